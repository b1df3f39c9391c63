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

/// The longest time that a leaving process that hosts the rendezvous service waits for the others
/// to leave.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// This process's connection to the rendezvous, and the service itself if this process hosts it.
pub(crate) struct Membership {
    pub(super) rendezvous: Arc<Rendezvous>,
    pub(super) server: Option<RendezvousServer>,
    /// The processes that can go on with the service. `None` if there are none.
    pub(super) succession: Option<Succession>,
    /// The commits of the job at the begin of the epoch.
    pub(super) standing: CommitStanding,
    pub(super) identity: Identity,
    pub(super) neighbours: Arc<Neighbours>,
    /// The place of each process, for messages.
    pub(super) places: Vec<MemberPlace>,
    pub(super) peer_timeout: Duration,
    /// The sizes that later epochs of the job may have, ascending. Empty if all epochs have as many
    /// processes as the first.
    pub(super) sizes: Arc<[JobSize]>,
    /// The numbers of processes that the layout refuses, each with its reason.
    pub(super) refused_sizes: Arc<BTreeMap<u32, String>>,
}

/// The place at which a process runs.
pub(super) struct MemberPlace {
    pub(super) host: String,
    /// The system's id of the process.
    pub(super) pid: u32,
}

/// The place of a process that returns to its job, and the service if the process hosts it.
#[derive(Debug)]
pub(crate) struct Returning {
    pub(super) process: ProcessId,
    pub(super) epoch: u64,
    pub(super) identity: Identity,
    pub(super) server: Option<RendezvousServer>,
    /// The processes that can go on with the service, if this process has heard of them.
    pub(super) succession: Option<Succession>,
    /// True if the process that ran the service leaves the job.
    pub(super) service_leaves: bool,
    /// True if the process leaves the job, once it is not needed any more.
    pub(super) leaves: bool,
    /// The end of this process's contact with the service.
    pub(super) parting: ServiceParting,
}

impl Returning {
    /// Lets the others leave their epoch at a service that this process hands over, for up to 5
    /// seconds.
    pub(super) fn wait_for_others(&self) {
        if let Some(server) = &self.server {
            server.wait_empty(LEAVE_WITHIN);
        }
    }
}

impl Membership {
    /// Returns the reason why the job does not go on with `size` processes, if it does not.
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

    /// Registers callbacks. One tells the runtime when the rendezvous reports the loss of a
    /// process, or is lost itself. The other tells observers the activity of this process.
    pub(super) fn watch(&self, runtime: &Arc<Runtime>) {
        let runtime = Arc::downgrade(runtime);
        let neighbours = self.neighbours.clone();
        let host = self.host();
        let observed = runtime.clone();
        self.rendezvous.on_look(move |_| {
            let activity = observed.upgrade().map(|runtime| runtime.activity());
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
                Down::Server(why) => {
                    host.iter().for_each(|host| runtime.suspect(*host, &why));
                    runtime.rendezvous_lost(&why);
                }
            }
        }));
    }

    /// If a trace is written, compares this process's clock with the rendezvous service's and notes
    /// the offset. Blocks for the service's answers. An error is only logged.
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

    /// Waits until all processes are at the end of an epoch, at most for the peer timeout. Returns
    /// a failure if one was lost before, or if the others have gone on without this process. The
    /// loss of the service is only logged if nobody can go on with it: then nobody returns.
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

    /// Leaves the job in order, so that the peers do not see a death. First sends `report` to the
    /// launcher, if there is one. A process that hosts the service then waits up to 5 seconds for
    /// the others. Errors are only logged.
    pub(super) fn leave(self, report: Option<FailureReport>) {
        self.tell(report);
        let left = self.rendezvous.leave();
        self.serve_others(left);
    }

    /// Leaves a job that has ended well on all processes, as [`leave`](Self::leave) does.
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

    /// Leaves an epoch that has failed, to join the next one. Errors are only logged.
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
            parting,
        }
    }

    /// Returns the other process that runs the service. `None` if that is none of the job, or this.
    pub(super) fn host(&self) -> Option<ProcessId> {
        self.succession
            .as_ref()
            .filter(|_| self.server.is_none())?
            .host()
    }

    /// Returns the process that runs the service, of which `me` is this one. `None` if that is none
    /// of the job, or if nobody could go on with it.
    pub(super) fn service_of(&self, me: ProcessId) -> Option<ProcessId> {
        let succession = self.succession.as_ref();
        succession
            .and_then(|succession| self.server.as_ref().map_or(succession.host(), |_| Some(me)))
    }

    /// True if the service is gone, and others can go on with it.
    fn is_followed(&self) -> bool {
        self.succession.is_some() && self.rendezvous.is_server_gone()
    }

    /// Sends `error` to the launcher and drops the connection without a goodbye, since this process
    /// could not start its part. The peers see that it is gone.
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

/// Returns the failure of a process that could not start its part, with the process at fault.
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
