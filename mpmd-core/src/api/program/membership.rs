//! A process's part in an epoch of its job, at the rendezvous.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_launch::LaunchError;
use mpmd_proto::router::{Failure, FailureKind};
use mpmd_rendezvous::{
    CommitStanding, Down, FailureReport, Identity, Rendezvous, RendezvousError, RendezvousServer,
    ServiceParting, Succession,
};
use mpmd_transport::TransportError;

use super::job_size::JobSize;
use super::neighbours::Neighbours;
use crate::error::Error;
use crate::exec::Runtime;
use crate::trace::{Trace, unix_now};
use crate::warning::warn_user;

/// The longest time that a process which hosts the rendezvous service waits, at its end, for the
/// others to leave.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// This process's connection to the rendezvous of its job. If this process hosts the rendezvous
/// service, also the service.
pub(crate) struct Membership {
    pub(super) job: MemberJob,
    pub(super) rendezvous: Arc<Rendezvous>,
    pub(super) server: Option<RendezvousServer>,
    /// The processes that can take over the rendezvous service. `None` if there are none.
    pub(super) succession: Option<Succession>,
    /// The job's commits at the start of the epoch.
    pub(super) standing: CommitStanding,
    pub(super) identity: Identity,
    pub(super) neighbours: Arc<Neighbours>,
    /// The host and system id of each process, for messages.
    pub(super) places: Vec<MemberPlace>,
    pub(super) peer_timeout: Duration,
    /// The numbers of processes and devices that later epochs of the job may have, ascending. Empty
    /// if every epoch has as many processes as the first.
    pub(super) sizes: Arc<[JobSize]>,
    /// The numbers of processes that the layout function refuses, each with its reason.
    pub(super) refused_sizes: Arc<BTreeMap<u32, String>>,
}

/// The job of a membership, as messages name it.
#[derive(Clone, Debug, Default)]
pub(crate) enum MemberJob {
    /// The job of the user's program.
    #[default]
    Program,
    /// A link of the publication with this name.
    Link(Arc<str>),
}

impl MemberJob {
    /// Formats a process of the job. A link numbers its processes anew.
    pub(super) fn name_process(&self, process: ProcessId) -> String {
        match self {
            Self::Program => format!("process {process}"),
            Self::Link(name) => format!("process {process} of the link of publication {name}"),
        }
    }

    pub(super) fn noun(&self) -> &'static str {
        match self {
            Self::Program => "job",
            Self::Link(_) => "link",
        }
    }

    /// Formats the warning that process `me` has lost the rendezvous service, for the reason `why`.
    pub(super) fn without_service(
        &self,
        me: ProcessId,
        why: &str,
        peer_timeout: Duration,
    ) -> String {
        let process = self.name_process(me);
        let job = self.noun();
        format!(
            "{process} has lost the rendezvous service of the {job} ({why}). The {job} goes on; a \
             process that dies without closing its connections is noticed only after \
             {peer_timeout:?}"
        )
    }
}

/// The host on which a process runs, and its system id.
pub(super) struct MemberPlace {
    pub(super) host: String,
    /// The process id of the operating system.
    pub(super) pid: u32,
}

/// The state that a process takes from one epoch to the next: its identity, and the rendezvous
/// service if it hosts it.
#[derive(Debug)]
pub(crate) struct Returning {
    pub(super) process: ProcessId,
    pub(super) epoch: u64,
    pub(super) identity: Identity,
    pub(super) server: Option<RendezvousServer>,
    /// The processes that can take over the rendezvous service, if this process knows them.
    pub(super) succession: Option<Succession>,
    /// True if the process that hosted the rendezvous service is leaving the job.
    pub(super) service_leaves: bool,
    /// True if this process leaves the job as soon as the others no longer need its copies.
    pub(super) leaves: bool,
    /// The loss because of which this process returns; `None` if the processes have agreed to
    /// return, or the job goes on without the lost process.
    pub(super) lack: Option<ProcessLack>,
    /// The way in which this process's connection to the rendezvous service ended.
    pub(super) parting: ServiceParting,
    /// The connection over which this process has left its epoch. It stays open until the process
    /// has joined the next one, so that the service sees if the process dies meanwhile. `None` if
    /// the process had no place.
    pub(super) left_over: Option<Arc<Rendezvous>>,
}

/// The lack of a process without which the job cannot go on.
#[derive(Debug)]
pub(super) struct ProcessLack {
    process: ProcessId,
    /// Number of processes that are left.
    left: usize,
    /// The reason why the program does not go on with them, if its layout function gives one.
    why: Option<String>,
}

impl ProcessLack {
    /// Formats the lack for the user, from process `me`. `None` on all processes but one.
    pub(super) fn told_by(&self, me: ProcessId) -> Option<String> {
        let Self { process, left, why } = self;
        let first = u32::from(*process == ProcessId(0));
        let why = why.as_ref().map_or(String::new(), |why| format!(": {why}"));
        (me == ProcessId(first)).then(|| {
            format!(
                "process {process} is lost, and the program does not go on with {left} of {}{why}. \
                 Without another process in that place the job ends (`mpmd run` starts one with \
                 --restart or --spares)",
                left + 1
            )
        })
    }
}

impl Returning {
    /// Waits until the other processes have left their epoch at the rendezvous service that this
    /// process hands over, for up to 5 seconds.
    pub(super) fn wait_for_others(&self) {
        if let Some(server) = &self.server {
            server.wait_empty(LEAVE_WITHIN);
        }
    }
}

impl Membership {
    /// Returns the reason why the job cannot continue with `size` processes, or `None` if it can.
    pub(super) fn why_not(&self, size: usize) -> Option<String> {
        let goes_on = |allowed: &JobSize| allowed.processes as usize == size;
        if size == self.places.len() || self.sizes.iter().any(goes_on) {
            return None;
        }

        let refused = u32::try_from(size).ok();
        let why = match refused.and_then(|size| self.refused_sizes.get(&size)) {
            Some(why) => format!(": {why}"),
            None if self.sizes.is_empty() => {
                ", but waits for others (`OnLoss::Wait`), and none waits for a place".to_owned()
            }
            None => String::new(),
        };
        Some(format!(
            "the program does not go on with {size} processes{why}"
        ))
    }

    /// Returns the lack of the lost process of `failure`. `None` if the job can go on without it.
    pub(super) fn lack_of(&self, failure: &Failure) -> Option<ProcessLack> {
        let left = self.places.len().saturating_sub(1);
        self.why_not(left)?;
        let refused = u32::try_from(left).ok();
        let why = refused.and_then(|left| self.refused_sizes.get(&left).cloned());
        Some(ProcessLack {
            process: failure.process,
            left,
            why,
        })
    }

    /// Registers callbacks at the rendezvous. One tells the runtime that a process or the
    /// rendezvous itself is lost. The other reports the activity of this process to observers.
    pub(super) fn watch(&self, runtime: &Arc<Runtime>) {
        let place = self.places.get(runtime.me.index());
        let own_host = place.map_or_else(String::new, |place| place.host.clone());
        let runtime = Arc::downgrade(runtime);
        let neighbours = self.neighbours.clone();
        let host = self.host();
        let job = self.job.clone();
        let peer_timeout = self.peer_timeout;
        let observed = runtime.clone();
        self.rendezvous.on_look(move |_| {
            let activity = observed
                .upgrade()
                .map(|runtime| runtime.activity(&own_host));
            serde_json::to_vec(&activity.unwrap_or_default()).unwrap_or_default()
        });

        self.rendezvous.on_down(Box::new(move |down| {
            let Some(runtime) = runtime.upgrade() else {
                return;
            };
            match down {
                Down::Process(process, why) if neighbours.has_ended(process) => {
                    runtime.peer_ended(process, &why);
                }
                Down::Process(process, why) => runtime.suspect(process, &why),
                Down::Epoch(by) => runtime.epoch_over(by),
                Down::Server(why) => {
                    host.iter().for_each(|host| runtime.suspect(*host, &why));
                    warn_user(&job.without_service(runtime.me, &why, peer_timeout));
                }
            }
        }));
    }

    /// Measures the offset of this process's clock from the rendezvous service's and notes it in
    /// the trace, if there is one. Blocks for the service's answers. An error is only logged.
    pub(super) fn compare_clocks(&self, trace: &Trace) {
        if !trace.is_on() {
            return;
        }
        match self.rendezvous.compare_clocks() {
            Ok(found) => {
                // Uses the quickest of 8 reads of both local clocks: the thread may have slept in a
                // slower one.
                let look = |_| {
                    let before = trace.now();
                    let unix = unix_now();
                    // The writer may end the trace, and then its clock is 0.
                    let trip = trace.now().saturating_sub(before);
                    (trip, before + trip / 2, unix)
                };

                let best = (0..8).map(look).min_by_key(|(trip, ..)| *trip);
                let (trip, at, unix) = best.unwrap_or_else(|| look(0));
                trace.clock(
                    at,
                    unix.saturating_add(found.offset),
                    found.bound + trip / 2,
                );
            }
            // Other calls report the service's real problems.
            Err(error) => tracing::debug!(%error, "comparing clocks for a trace"),
        }
    }

    /// Waits until all processes have reached the end of an epoch, at most for the peer timeout.
    /// Returns a failure if a process was lost before that, or if the others have continued without
    /// this process. If the service is lost and nobody can take it over, no process can return, so
    /// this is only logged.
    pub(super) fn wait_for_all(&self, me: ProcessId, epoch: u64) -> Option<Arc<Failure>> {
        let waited = self
            .rendezvous
            .barrier(format!("mpmd.end.{epoch}"), self.peer_timeout);

        let (process, why) = match waited {
            Ok(()) => return None,
            Err(RendezvousError::BarrierBroken { process, why, .. }) => (
                process,
                format!("process {process} was lost at the end: {why}"),
            ),
            Err(error @ (RendezvousError::ServerGone { .. } | RendezvousError::Stopped))
                if !self.is_followed() && !self.rendezvous.is_server_alive() =>
            {
                tracing::debug!(process = me.0, %error, "waiting for the end of an epoch");
                return None;
            }
            // The service has died with its process, or the others have gone on without this one.
            Err(error) => (me, error.to_string()),
        };

        Some(Arc::new(Failure::new(
            FailureKind::PeerLost,
            process,
            0,
            why,
        )))
    }

    /// Leaves the job in order, so that peers do not report this process as dead. First sends
    /// `report` to the launcher, if there is one. A process that hosts the service then waits up to
    /// 5 seconds for the others. Errors are only logged.
    pub(super) fn leave(self, report: Option<FailureReport>) {
        self.tell(report);
        let left = self.rendezvous.leave();
        self.serve_others(left);
    }

    /// Leaves a job that has ended without failure on all processes. Waits and logs like
    /// [`leave`](Self::leave).
    pub(super) fn end(self) {
        let left = self.rendezvous.end();
        self.serve_others(left);
    }

    fn serve_others(self, left: Result<(), RendezvousError>) {
        if let Err(error) = left {
            tracing::debug!(%error, "taking leave of the rendezvous");
        }
        if let Some(server) = self.server {
            // The service must stay until the others have left.
            server.wait_empty(LEAVE_WITHIN);
        }
    }

    /// Leaves an epoch that has ended, in order to join the next one. Errors are only logged.
    pub(super) fn return_later(self, process: ProcessId, epoch: u64) -> Returning {
        if let Err(error) = self.rendezvous.leave_epoch() {
            tracing::debug!(%error, "leaving an epoch of the job");
        }
        let parting = self.rendezvous.parting();
        let is_whole = self.rendezvous.has_whole_commit();
        let Self {
            identity,
            server,
            mut succession,
            rendezvous,
            ..
        } = self;

        if let Some(succession) = succession.as_mut().filter(|_| is_whole) {
            succession.commit_is_whole();
        }

        Returning {
            process,
            epoch,
            identity,
            server,
            succession,
            service_leaves: false,
            leaves: false,
            lack: None,
            parting,
            left_over: Some(rendezvous),
        }
    }

    /// Returns the process that hosts the rendezvous service. `None` if this process does, or no
    /// process of the job.
    pub(super) fn host(&self) -> Option<ProcessId> {
        self.succession
            .as_ref()
            .filter(|_| self.server.is_none())?
            .host()
    }

    /// Returns the process that hosts the rendezvous service; `me` is this process. `None` if no
    /// process of the job hosts it, or if nobody could take it over.
    pub(super) fn service_of(&self, me: ProcessId) -> Option<ProcessId> {
        let succession = self.succession.as_ref();
        succession
            .and_then(|succession| self.server.as_ref().map_or(succession.host(), |_| Some(me)))
    }

    /// True if the rendezvous service is gone, but other processes can take it over.
    fn is_followed(&self) -> bool {
        self.succession.is_some() && self.rendezvous.is_server_gone()
    }

    /// Reports `error` to the launcher and closes the connection without taking leave, since this
    /// process could not start its part. The peers see that this process is gone.
    pub(super) fn give_up(self, me: ProcessId, error: &Error) {
        self.tell(Some(FailureReport {
            failure: blame(me, error),
            hash: None,
        }));
    }

    fn tell(&self, report: Option<FailureReport>) {
        if let Some(Err(error)) = report.map(|report| self.rendezvous.report(report)) {
            tracing::debug!(%error, "telling the launcher of a failure");
        }
    }
}

/// Returns the failure of a process that could not start its part. It names the process at fault.
pub(super) fn blame(me: ProcessId, error: &Error) -> Failure {
    let (kind, process) = match error {
        Error::Launch(LaunchError::Lacking { process, .. }) => (FailureKind::Left, *process),
        Error::Transport(
            TransportError::PeerGone { peer, .. } | TransportError::Protocol { peer, .. },
        ) => (FailureKind::PeerLost, *peer),
        _ => (FailureKind::Left, me),
    };
    Failure::new(kind, process, 0, error.to_string()).shortened()
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use super::*;
    use crate::api::program::Program;
    use crate::exec::array::MpmdArray;
    use crate::kernel::elementwise;

    #[test]
    fn step_counts_once_its_operations_have_ended() {
        let (go, gate) = mpsc::channel::<()>();
        let gate = Mutex::new(gate);
        let held = elementwise(move |x: f32| {
            // Returns when the sender is gone.
            let _ = gate.lock().map(|gate| gate.recv());
            x
        })
        .with("gate");

        let mut p = Program::builder().alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let all = mesh.replicated();
        let held = p.jit(held).on(&mesh).outputs(all.clone());
        let held = held.build().unwrap();
        let x = p.device_put(&MpmdArray::scalar(1.0f32), all).unwrap();
        let x = held.call(&mut p, x).unwrap();
        p.step_end().unwrap();
        assert_eq!(p.runtime.activity("").steps, 0);

        drop(go);
        p.sync().unwrap();
        assert_eq!(p.runtime.activity("").steps, 1);
        drop(x);
        p.finish().unwrap();
    }

    #[test]
    fn lost_service_is_that_of_the_job_or_of_the_link() {
        let said = |job: MemberJob| {
            job.without_service(ProcessId(2), "it was closed", Duration::from_secs(15))
        };
        let goes_on = "goes on; a process that dies without closing its connections is noticed \
                       only after 15s";
        assert_eq!(
            said(MemberJob::Program),
            format!(
                "process 2 has lost the rendezvous service of the job (it was closed). The job \
                 {goes_on}"
            )
        );
        assert_eq!(
            said(MemberJob::Link("policy".into())),
            format!(
                "process 2 of the link of publication policy has lost the rendezvous service of \
                 the link (it was closed). The link {goes_on}"
            )
        );
    }
}
