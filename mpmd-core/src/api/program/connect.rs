//! Joining a job: from environment variables to a running `Program`.
//!
//! A process meets the others at the rendezvous, where it tells its host, devices and transport
//! addresses. Then all check that they fit together, connect the transport and start the runtime.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mpmd_ids::ProcessId;
use mpmd_transport::TransportError;
use mpmd_transport::rendezvous::{
    Down, JoinConfig, Joined, Member, Rendezvous, RendezvousError, Report, Server, ServerConfig,
};
use mpmd_transport::router::{Failure, FailureKind};

use super::builder::{DEFAULT_PEER_TIMEOUT, gpus_of, has_cuda};
use super::neighbours::Neighbours;
use super::transports::{self, Opened};
use super::version;
use super::{Builder, Program, costs};
use crate::error::{Error, Result};
use crate::exec::Runtime;
use crate::exec::recorder::{MOST_STEPS, Order};
use crate::trace::{Trace, unix_now};
use crate::warning::warn_user;
use mpmd_launch::{JobEnv, LaunchError, PlanEnv};
use mpmd_layout::topology::{CudaCollectives, DeviceKind, GpuId, Links, Topology};

/// The longest time that a leaving process that hosts the rendezvous service waits for the others
/// to leave.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// This process's connection to the rendezvous, and the service itself if this process hosts it.
pub(crate) struct Membership {
    rendezvous: Rendezvous,
    server: Option<Server>,
    neighbours: Arc<Neighbours>,
}

impl Membership {
    /// Registers callbacks. One tells the runtime when the rendezvous reports the loss of a
    /// process, or is lost itself. The other tells observers the activity of this process.
    pub(super) fn watch(&self, runtime: &Arc<Runtime>) {
        let (runtime, neighbours) = (Arc::downgrade(runtime), self.neighbours.clone());
        let observed = runtime.clone();
        self.rendezvous.on_look(Box::new(move || {
            let activity = observed.upgrade().map(|runtime| runtime.activity());
            serde_json::to_vec(&activity.unwrap_or_default()).unwrap_or_default()
        }));
        self.rendezvous.on_down(Box::new(move |down| {
            let Some(runtime) = runtime.upgrade() else { return };
            match down {
                Down::Process(process, why) if neighbours.has_ended(process) => {
                    runtime.peer_ended(process, &why);
                }
                Down::Process(process, why) => runtime.suspect(process, &why),
                Down::Server(why) => runtime.rendezvous_lost(&why),
            }
        }));
    }

    /// If a trace is written, compares this process's clock with the rendezvous service's and
    /// records the offset. Blocks for the service's answers. An error is only logged.
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
                    let trip = trace.now() - before;
                    (trip, before + trip / 2, unix)
                };
                let best = (0..8).map(look).min_by_key(|(trip, ..)| *trip);
                let (trip, at, unix) = best.unwrap_or_else(|| look(0));
                trace.clock(at, unix.saturating_add(found.offset), found.bound + trip / 2);
            }
            // Other calls report the service's real problems.
            Err(error) => tracing::debug!(%error, "comparing clocks for a trace"),
        }
    }

    /// Leaves the job in order, so that the peers do not see a death. First sends `report` to the
    /// launcher, if there is one. A process that hosts the service then waits up to 5 seconds for
    /// the others. Errors are only logged.
    pub(super) fn leave(self, report: Option<Report>) {
        self.tell(report);
        if let Err(error) = self.rendezvous.leave() {
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
        Returning { process, epoch, server: self.server }
    }

    /// Sends `error` to the launcher and drops the connection without a goodbye, since this process
    /// could not start its part. The peers see that it is gone.
    pub(super) fn give_up(self, me: ProcessId, error: &Error) {
        self.tell(Some(Report { failure: blame(me, error), hash: None }));
    }

    fn tell(&self, report: Option<Report>) {
        if let Some(Err(error)) = report.map(|report| self.rendezvous.report(report)) {
            tracing::debug!(%error, "telling the launcher of a failure");
        }
    }
}

/// Returns the failure of a process that could not start its part, with the process at fault.
fn blame(me: ProcessId, error: &Error) -> Failure {
    let (kind, process) = match error {
        Error::Launch(LaunchError::Lacking { process, .. }) => (FailureKind::Left, *process),
        Error::Transport(
            TransportError::PeerGone { peer, .. } | TransportError::Protocol { peer, .. },
        ) => (FailureKind::PeerLost, *peer),
        _ => (FailureKind::Left, me),
    };
    Failure::new(kind, process, 0, error.to_string()).shortened()
}

/// Joins the job that the environment names, or starts its dry run. Without one, starts a job of
/// this process alone. Blocks until all processes are connected.
pub(super) fn from_env(builder: Builder) -> Result<Program> {
    let builder = with_settings(builder)?;
    start(builder, JobEnv::from_env()?.as_ref())
}

/// This process's part in a job over its epochs.
pub(crate) struct Job {
    builder: Builder,
    env: Option<JobEnv>,
    /// The service of the job, between the epochs of a process that hosts it.
    server: Option<Server>,
}

/// The place of a process that returns to its job, and the service if the process hosts it.
pub(crate) struct Returning {
    process: ProcessId,
    epoch: u64,
    server: Option<Server>,
}

impl Job {
    /// Reads the environment of a program that recovers. `spares` of the processes are spares, if
    /// the launcher says nothing else.
    pub(crate) fn of_environment(builder: Builder, spares: usize) -> Result<Self> {
        let builder = with_settings(builder)?;
        let env = JobEnv::from_env()?.map(|env| env.with_spares(spares)).transpose()?;
        Ok(Self { builder, env, server: None })
    }

    /// Joins the next epoch of the job. Blocks until all processes are connected, on a spare until
    /// there is a place for it. Returns `None` if the job ends without this process.
    pub(crate) fn join(&mut self) -> Result<Option<Program>> {
        match &self.env {
            Some(env) if env.plan.is_none() && (env.processes > 1 || env.hosted) => {
                join(self.builder.clone(), env, self.server.take(), true)
            }
            env => start(self.builder.clone(), env.as_ref()).map(Some),
        }
    }

    /// Prepares the return to the job in the epoch after one that has failed.
    pub(crate) fn returns(&mut self, returning: Returning) {
        if let Some(env) = &mut self.env {
            env.process = returning.process;
        }
        self.builder.epoch = returning.epoch + 1;
        self.server = returning.server;
    }
}

/// Returns the builder with the settings of the environment that the program has not set itself.
fn with_settings(mut builder: Builder) -> Result<Builder> {
    mpmd_launch::adopt()?;
    let folder =
        std::env::var_os(mpmd_launch::variables::TRACE).filter(|folder| !folder.is_empty());
    builder.trace = builder.trace.or(folder.map(PathBuf::from));
    builder.sync = match (builder.sync, std::env::var(mpmd_launch::variables::SYNC).as_deref()) {
        (None, Ok("1")) => Some(true),
        (None, Ok(value)) if !["", "0"].contains(&value) => {
            return Err(Error::Launch(LaunchError::Variable {
                variable: mpmd_launch::variables::SYNC.into(),
                value: value.into(),
                expected: "0 or 1".into(),
            }));
        }
        (sync, _) => sync,
    };
    if let (None, Ok(text)) = (&builder.dump, std::env::var(mpmd_launch::variables::DUMP))
        && !text.is_empty()
    {
        let (op, folder) = mpmd_launch::dump(&text)?;
        builder = builder.dump(op, folder);
    }
    Ok(builder)
}

/// Joins the job of this environment, or starts its dry run. Without one, starts a job of this
/// process alone.
fn start(mut builder: Builder, env: Option<&JobEnv>) -> Result<Program> {
    let Some(env) = env else {
        if let (None, Ok(text)) = (&builder.kinds, std::env::var(mpmd_launch::variables::DEVICE))
            && !text.trim().is_empty()
        {
            builder.kinds = Some(mpmd_launch::kinds_by_process(text.trim(), 1)?);
        }
        if let (None, Ok(text)) =
            (builder.collectives, std::env::var(mpmd_launch::variables::CUDA_COLLECTIVES))
            && !text.trim().is_empty()
        {
            builder.collectives = Some(mpmd_launch::cuda_collectives(text.trim())?);
        }
        return builder.alone();
    };
    builder.kinds = builder.kinds.or_else(|| env.device_kinds.clone());
    builder.collectives = builder.collectives.or(env.cuda_collectives);
    if env.check_uncommitted {
        builder.check_uncommitted.get_or_insert(true);
    }
    if env.check_replicas {
        builder.check_replicas.get_or_insert(true);
    }
    if let Some(plan) = &env.plan {
        return spectate(builder, env, plan);
    }
    if env.processes == 1 && !env.hosted {
        let topology = builder.topology(1, env.devices_per_process)?;
        return builder.start(env.process, topology, None, None);
    }
    let joined = join(builder, env, None, false)?;
    Ok(joined.expect("a process that does not wait has a place"))
}

/// Starts a dry run that records the operations of all processes of the job, and assumes that all
/// are on one host. The step end that completes the plan writes it and exits the process.
fn spectate(builder: Builder, env: &JobEnv, plan: &PlanEnv) -> Result<Program> {
    let mut topology = builder.topology(env.processes, env.devices_per_process)?;
    if let Some(file) = &env.links
        && builder.links.is_none()
    {
        topology = topology.with_links(costs::of(file)?);
    }
    let order = Order { file: plan.file.clone(), most_steps: plan.steps.unwrap_or(MOST_STEPS) };
    builder.spectate(env.process, topology, Some(order))
}

/// Joins the builder's epoch of a job. `server` is the service, if this process hosts it already.
/// A process that `waits` may find no place of its own, and then gets that of another process that
/// is gone. Returns `None` if the job ends without it.
fn join(
    mut builder: Builder,
    env: &JobEnv,
    server: Option<Server>,
    waits: bool,
) -> Result<Option<Program>> {
    let peer_timeout =
        *builder.peer_timeout.get_or_insert(env.peer_timeout.unwrap_or(DEFAULT_PEER_TIMEOUT));
    let wrong = |error| Error::Launch(LaunchError::Rendezvous(error));
    let topology = builder.topology(env.processes, env.devices_per_process)?;
    if env.token_is_guessable && env.process.index() == 0 {
        let (source, file) = (env.source, mpmd_launch::variables::JOB_TOKEN_FILE);
        warn_user(&format!(
            "the token of this job is derived from the job id of {source}, so other users can \
             guess it and join: \
             name a file with a secret of yours in {file} on all hosts, or give all processes a \
             random {}",
            mpmd_launch::variables::JOB_TOKEN
        ));
    }
    let server = match server {
        None if !env.hosted && env.process.index() == 0 => Some(host(env, peer_timeout)?),
        server => server,
    };
    let rendezvous = Rendezvous::connect(JoinConfig {
        server: env.coordinator.clone(),
        process: env.process,
        processes: env.processes,
        token: env.token.clone(),
        peer_timeout,
    })
    .map_err(wrong)?;
    let name = env.transport.as_deref().unwrap_or(transports::DEFAULT);
    let opened = has_cuda(env.process, &topology)
        .and_then(|()| Opened::open(name, env.processes, rendezvous.local_ip()));
    // Joins also without a transport or devices. Otherwise the others would wait and never learn
    // the reason.
    let member = Member {
        host: env.host.clone().unwrap_or_else(hostname),
        pid: std::process::id(),
        devices: (topology.devices().len() / env.processes) as u32,
        addresses: transports::told(name, &opened),
        program: version::fingerprint(&topology, builder.checks()),
        trouble: opened.as_ref().err().map(lack),
    };
    let (process, epoch) = (env.process, builder.epoch);
    let joined = match waits {
        true => rendezvous.join_epoch(member, epoch),
        false => rendezvous.join(member).map(|members| Some(Joined { process, epoch, members })),
    };
    let joined = match joined {
        Ok(Some(joined)) => joined,
        Ok(None) => return Ok(None),
        // A difference between the programs is reported before a missing transport or device.
        Err(error @ RendezvousError::Program { .. }) => return Err(wrong(error)),
        Err(error) => return Err(opened.err().unwrap_or_else(|| wrong(error))),
    };
    let Joined { process, epoch, ref members } = joined;
    builder.epoch = epoch;
    let neighbours = Arc::new(Neighbours::find(process, members));
    let membership = Membership { rendezvous, server, neighbours };
    let agreed = || {
        let rendezvous = &membership.rendezvous;
        costs::tell(rendezvous, process, epoch, env.links.as_deref())?;
        tell_gpus(rendezvous, process, epoch, &topology)?;
        let opened = match (transports::agree(members), opened) {
            (Ok(()), opened) => opened?,
            // On the process at fault, its own error is more precise.
            (Err(LaunchError::Lacking { .. }), Err(own)) => return Err(own),
            (Err(error), _) => return Err(error.into()),
        };
        let links = costs::hear(rendezvous, epoch, peer_timeout)?;
        let topology = hear_gpus(rendezvous, epoch, topology, peer_timeout)?;
        Ok((opened, placed(&builder, topology, members, links)?))
    };
    let (opened, topology) = match agreed() {
        Ok(agreed) => agreed,
        Err(error) => {
            // All peers must hear of it, also from a service that this process hosts.
            membership.leave(Some(Report { failure: blame(process, &error), hash: None }));
            return Err(error);
        }
    };
    let spin = *builder.spin.get_or_insert(env.spin.unwrap_or_default());
    match opened.connect(env, &joined, peer_timeout, spin) {
        Ok(transport) => {
            builder.start(process, topology, Some(transport), Some(membership)).map(Some)
        }
        Err(error) => {
            membership.give_up(process, &error);
            Err(error)
        }
    }
}

/// Returns the rendezvous key of the GPU ids of a process in an epoch.
fn gpus_key(process: ProcessId, epoch: u64) -> String {
    format!("mpmd.gpus.{epoch}.{process}")
}

/// True if the other processes must know the GPUs of `process`: it has CUDA devices, and
/// collectives use NCCL.
fn are_gpus_told(process: ProcessId, topology: &Topology) -> bool {
    topology.cuda_collectives() == CudaCollectives::Nccl
        && topology.has_kind(process, DeviceKind::Cuda)
}

/// Publishes the ids of this process's GPUs at the rendezvous, if collectives use NCCL. The
/// process's own environment selects its visible GPUs, so no other process can know them.
fn tell_gpus(
    rendezvous: &Rendezvous,
    process: ProcessId,
    epoch: u64,
    topology: &Topology,
) -> Result<(), LaunchError> {
    match are_gpus_told(process, topology) {
        true => Ok(rendezvous.set(gpus_key(process, epoch), gpus_of(process, topology).concat())?),
        false => Ok(()),
    }
}

/// Returns the topology with the GPU ids that all processes published, the same on every process.
/// Blocks for up to `peer_timeout` for each process.
fn hear_gpus(
    rendezvous: &Rendezvous,
    epoch: u64,
    topology: Topology,
    peer_timeout: Duration,
) -> Result<Topology, LaunchError> {
    let processes = (0..topology.processes() as u32).map(ProcessId);
    let told = processes.filter(|process| are_gpus_told(*process, &topology)).collect::<Vec<_>>();
    told.into_iter().try_fold(topology, |topology, process| {
        let told = rendezvous.get(gpus_key(process, epoch), peer_timeout)?;
        let (gpus, _) = told.as_chunks::<{ size_of::<GpuId>() }>();
        Ok(topology.with_gpus_of(process, gpus))
    })
}

/// Returns the topology with the hosts that the processes reported and with `links`. Hosts or links
/// that the builder sets stay as they are.
fn placed(
    builder: &Builder,
    topology: Topology,
    members: &[Member],
    links: Links,
) -> Result<Topology> {
    let mut topology = topology;
    if builder.hosts.is_none() {
        let hosts: Vec<&str> = members.iter().map(|member| member.host.as_str()).collect();
        topology = topology.on_hosts(&hosts)?;
    }
    if builder.links.is_none() {
        topology = topology.with_links(links);
    }
    Ok(topology)
}

/// Returns a text for the other processes: the missing transport or device, and the reason.
fn lack(error: &Error) -> String {
    match error {
        Error::Cuda(why) if why.is_of_nccl() => format!("no NCCL, which was asked for: {why}"),
        Error::Cuda(why) => format!("no devices of kind cuda: {why}"),
        other => format!("no transport: {other}"),
    }
}

/// Starts the rendezvous service in this process, at the job's listen address.
fn host(env: &JobEnv, peer_timeout: Duration) -> Result<Server> {
    let wrong = |error| Error::Launch(LaunchError::Rendezvous(error));
    let config = ServerConfig { processes: env.processes, token: env.token.clone(), peer_timeout };
    Server::bind(env.listen_address()?, config).map_err(wrong)
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}
