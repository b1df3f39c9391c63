//! Joining a job: from environment variables to a process that joins at the rendezvous, where it
//! tells its host, devices and transport addresses.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Spin, mpsc, thread};
use mpmd_device::cpu;
use mpmd_launch::{DEFAULT_PEER_TIMEOUT, DryRunEnv, JobEnv, LaunchError};
use mpmd_rendezvous::{
    Identity, JobMember, JoinConfig, Rendezvous, RendezvousError, RendezvousServer, ServerConfig,
    ServiceSeeker, SizeRange, Token, check_resolves,
};
use mpmd_transport::Transport;

use super::builder::LayoutFn;
use super::builder::has_cuda;
use super::candidate::{Candidate, EpochStart};
use super::membership::{MemberJob, Returning};
use super::transports::{self, OpenedTransport};
use super::{Builder, Program, vectors, version};
use crate::error::{Error, Result};
use crate::exec::dry_run::Order;
use crate::warning::warn_user;

/// Time without an answer from the service at which the job meets after which the user is told.
const SILENCE: Duration = Duration::from_secs(10);

/// Joins the job that the environment describes, or starts its dry run. If it describes none,
/// starts a job of this process alone. Blocks until all processes are connected.
pub(super) fn from_env(builder: Builder) -> Result<Program> {
    let builder = with_settings(builder)?;
    let env = JobEnv::from_env()?.map_or_else(JobEnv::alone, Ok)?;
    start(with_env(builder, &env)?, &env)
}

/// This process's part in a job that the environment describes, over all epochs.
pub(crate) struct EnvironmentJob {
    builder: Builder,
    env: JobEnv,
    seeker: ServiceSeeker,
}

impl EnvironmentJob {
    /// Reads the environment of a program that recovers. `spares` is the number of processes that
    /// wait as spares, unless the launcher sets another one.
    pub(crate) fn of_environment(builder: Builder, spares: usize) -> Result<Self> {
        let builder = with_settings(builder)?;
        let env = match JobEnv::from_env()? {
            Some(env) => env.with_spares(spares)?,
            None => JobEnv::alone()?,
        };
        let seeker = ServiceSeeker::new(env.coordinator.clone());
        Ok(Self {
            builder: with_env(builder, &env)?,
            env,
            seeker,
        })
    }

    /// Sets the numbers of processes that later epochs may have: those that `layout` allows, each
    /// with the number of devices that it returns. Without `layout` the devices of the first epoch
    /// stay.
    pub(crate) fn set_sizes(&mut self, layout: Option<&LayoutFn>) -> Result<()> {
        let processes = self.env.processes;
        let each = self.env.devices_per_process;
        let topology = self.builder.topology(processes, each)?;
        self.builder.set_sizes(&topology, layout)
    }

    /// Joins the next epoch of the job. `returning` is this process's state from the epoch before;
    /// `None` in its first. Blocks until all processes are connected, on a spare until it gets a
    /// place.
    pub(crate) fn join(&mut self, returning: Option<Returning>) -> Result<EpochStart> {
        if self.env.dry_run.is_some() || is_alone(&self.env) {
            return Ok(EpochStart::Program(Box::new(start(
                self.builder.clone(),
                &self.env,
            )?)));
        }
        let Some(mut returning) = returning else {
            return self.join_as(None);
        };

        if let Some(lack) = returning.lack.take()
            && self.env.spares.unwrap_or(0) == 0
            && self.env.restarts == 0
            && let Some(told) = lack.told_by(returning.process)
        {
            warn_user(&told);
        }
        self.env.process = returning.process;
        self.builder.epoch = returning.epoch + 1;
        self.seeker.hear(returning.succession.take());
        self.seeker.part(returning.parting.clone());
        if returning.service_leaves {
            self.seeker.hands_over();
            returning.wait_for_others();
        }

        let run = returning.identity.run.or(self.seeker.run());
        let identity = Identity {
            run,
            ..returning.identity
        };
        let Returning {
            server,
            leaves,
            left_over,
            ..
        } = returning;
        match self.join_as(Some(FormerMember {
            identity,
            server,
            leaves,
            left_over: left_over.clone(),
        })) {
            // Process 0 was started again, and with it another service. That of this job is not it.
            Err(Error::Launch(LaunchError::Rendezvous(RendezvousError::OtherRun { .. })))
                if self.seeker.leaves() =>
            {
                self.join_as(Some(FormerMember {
                    identity,
                    server: None,
                    leaves,
                    left_over,
                }))
            }
            started => started,
        }
    }

    fn join_as(&mut self, returning: Option<FormerMember>) -> Result<EpochStart> {
        join(
            self.builder.clone(),
            &self.env,
            returning,
            Some(&mut self.seeker),
        )
    }
}

/// The identity of a process of the job, and its rendezvous service, between two epochs.
struct FormerMember {
    identity: Identity,
    /// The rendezvous service, if the process hosts it.
    server: Option<RendezvousServer>,
    /// True if the process is leaving the job.
    leaves: bool,
    /// The connection over which the process has left the epoch before:
    /// [`Returning::left_over`].
    left_over: Option<Arc<Rendezvous>>,
}

/// Fills settings that the program has not set with the values of environment variables.
fn with_settings(mut builder: Builder) -> Result<Builder> {
    mpmd_launch::adopt()?;
    let folder =
        std::env::var_os(mpmd_launch::variables::TRACE).filter(|folder| !folder.is_empty());
    builder.trace = builder.trace.or(folder.map(PathBuf::from));

    builder.sync = match (
        builder.sync,
        std::env::var(mpmd_launch::variables::SYNC).as_deref(),
    ) {
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

    Ok(builder)
}

/// Fills settings that the program has not set with those of the job's environment. Process 0 warns
/// of variables that have no effect.
fn with_env(mut builder: Builder, env: &JobEnv) -> Result<Builder> {
    if env.process.index() == 0 && env.dry_run.is_none() {
        for unknown in mpmd_launch::unknown_variables_here() {
            warn_user(&unknown.to_string());
        }
    }

    builder.kinds = builder.kinds.or_else(|| env.device_kinds.clone());
    builder.collectives = builder.collectives.or(env.cuda_collectives);

    if env.check_uncommitted {
        builder.check_uncommitted.get_or_insert(true);
    }
    if env.check_replicas {
        builder.check_replicas.get_or_insert(true);
    }

    builder.check_replay = builder.check_replay.or(env.check_replay);
    builder.spin = builder.spin.or(env.spin);

    let peer_timeout = *builder
        .peer_timeout
        .get_or_insert(env.peer_timeout.unwrap_or(DEFAULT_PEER_TIMEOUT));
    if peer_timeout.is_zero() {
        return Err(Error::Environment(
            "the peer timeout of the program's builder is zero: every peer would count as lost at \
             once; give it a time"
                .to_owned(),
        ));
    }

    Ok(builder)
}

/// Returns true if no other process has a part in the job: neither a spare nor a launcher.
fn is_alone(env: &JobEnv) -> bool {
    env.processes == 1 && !env.hosted && env.spares.unwrap_or(0) == 0
}

/// Joins the job that `env` describes, or starts its dry run, or a job of this process alone.
fn start(builder: Builder, env: &JobEnv) -> Result<Program> {
    if let Some(asked) = &env.dry_run {
        return dry_run(builder, env, asked);
    }
    if is_alone(env) {
        let topology = builder.topology(env.processes, env.devices_per_process)?;
        return builder.start(env.process, topology, None, None);
    }
    match join(builder, env, None, None)? {
        EpochStart::Program(program) => Ok(*program),
        EpochStart::NoPlace | EpochStart::Lost { .. } => unreachable!("for a process that waits"),
    }
}

/// Starts a dry run that lists the operations of all processes of the job. Assumes that all
/// processes run on one host. The step end that completes the dry run writes it and exits the
/// process.
fn dry_run(builder: Builder, env: &JobEnv, asked: &DryRunEnv) -> Result<Program> {
    let topology = builder.topology(env.processes, env.devices_per_process)?;
    let order = Order {
        file: asked.file.clone(),
        requested_steps: asked.steps,
    };
    builder.start_dry_run(env.process, topology, Some(order))
}

/// Joins the builder's epoch of a job. `returning` is this process's state from an earlier epoch,
/// if there was one. A process with a `seeker` waits for a place if the job is full, see
/// [`Candidate`]. It may then connect to a rendezvous service that another process has taken over.
fn join(
    builder: Builder,
    env: &JobEnv,
    returning: Option<FormerMember>,
    seeker: Option<&mut ServiceSeeker>,
) -> Result<EpochStart> {
    let waits = seeker.is_some();
    let peer_timeout = builder.peer_timeout.unwrap_or(DEFAULT_PEER_TIMEOUT);
    let topology = builder.topology(env.processes, env.devices_per_process)?;
    if env.spares.is_some_and(|spares| spares > 0) && !waits {
        return Err(Error::Environment(
            "the job has spares or restarts (--spares, --restart of mpmd run), but this program \
             cannot go on after the loss of a process: leave them out, or let the program recover \
             (`Builder::spares`)"
                .to_owned(),
        ));
    }
    let is_returning = returning.is_some();
    warn_before_join(&builder, env, is_returning);

    let FormerMember {
        identity,
        mut server,
        leaves,
        left_over,
    } = match returning {
        Some(former) => former,
        None => new_member(env, peer_timeout)?,
    };
    let config = JoinConfig {
        server: env.coordinator.clone(),
        process: env.process,
        processes: env.processes,
        token: env.token.clone(),
        peer_timeout,
    };
    let answered = (!is_returning).then(|| tell_of_silence(env));
    let (rendezvous, heir) = match seeker.filter(|_| !env.hosted) {
        Some(seeker) => {
            let rendezvous = seeker.connect(&config, &mut server);
            let rendezvous = rendezvous.map_err(|error| wrong(named(error, env)))?;
            let at = rendezvous.local_address();
            (
                rendezvous,
                seeker.heir(at, &identity, server.as_ref()).map_err(wrong)?,
            )
        }
        None => {
            let rendezvous = Rendezvous::connect(config);
            (rendezvous.map_err(|error| wrong(named(error, env)))?, None)
        }
    };
    drop(answered);

    let name = env.transport.as_deref().unwrap_or(transports::DEFAULT);
    let opened = has_cuda(env.process, &topology)
        .and_then(|()| OpenedTransport::open(name, env.processes, rendezvous.local_address()));

    let told = builder.facts.as_ref().map_or(&[][..], |facts| facts.told());
    // Joins also without a transport or devices. Otherwise the others would wait and never learn
    // the reason.
    let member = JobMember {
        host: env.host.clone().unwrap_or_else(hostname),
        pid: std::process::id(),
        devices: (topology.devices().len() / env.processes) as u32,
        addresses: transports::told(name, &opened),
        program: version::fingerprint(&topology, builder.checks(), &builder.sizes),
        facts: told.iter().cloned().chain(vectors::candle_fact()).collect(),
        vectors: cpu::width(),
        trouble: opened.as_ref().err().map(lack),
        sizes: SizeRange::of(builder.sizes.iter().map(|size| size.processes)),
        is_added: env.is_added,
        leaves,
        heir,
    };

    let candidate = Candidate {
        job: MemberJob::Program,
        rendezvous,
        server,
        waits,
        process: env.process,
        identity,
        member,
        opened,
        token: *env.token.bytes(),
        left_over,
    };
    candidate.join(builder, topology)
}

/// Tells the user if the service at which the job meets does not answer for some time, since the
/// process that runs it has perhaps not started. Dropping the returned sender ends the wait.
fn tell_of_silence(env: &JobEnv) -> mpsc::Sender<()> {
    let (answered, waits) = mpsc::channel();
    let warning = format!(
        "process {} has waited {} s for the job to begin: at {} nobody answers, where process 0 \
         or the launcher runs the service at which the job meets; it has perhaps not started",
        env.process,
        SILENCE.as_secs(),
        env.coordinator
    );
    let wait = move || {
        if waits.recv_timeout(SILENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            warn_user(&warning);
        }
    };
    // Without the thread nothing is told; the wait itself ends by the peer timeout.
    _ = thread::Builder::new()
        .name("silence".to_owned())
        .spawn(wait);
    answered
}

/// Warns the user if the job's token can be guessed, or if this process was added to a job that has
/// no place for it.
fn warn_before_join(builder: &Builder, env: &JobEnv, is_returning: bool) {
    if env.token_is_guessable && env.process.index() == 0 {
        let source = env.source;
        let file = mpmd_launch::variables::JOB_TOKEN_FILE;
        warn_user(&format!(
            "the token of this job is derived from the job id of {source}, so other users can \
             guess it and join: \
             name a file with a secret of yours in {file} on all hosts, or give all processes a \
             random {}",
            mpmd_launch::variables::JOB_TOKEN
        ));
    }

    if env.is_added && !is_returning {
        let largest = builder
            .sizes
            .last()
            .map_or(env.processes, |size| size.processes as usize);
        if largest <= env.processes {
            warn_user(&format!(
                "this process was added to a job that goes on with at most {largest} processes, as \
                 many as have a device: while it has them, this one waits for the place of one \
                 that is lost; a layout (`RecoveringBuilder::layout`) lets a job have more"
            ));
        }
    }
}

/// Creates the identity of a process in its first epoch, and starts the rendezvous service if the
/// process hosts it.
fn new_member(env: &JobEnv, peer_timeout: Duration) -> Result<FormerMember> {
    let hosts = !env.hosted && env.process.index() == 0;
    let server = hosts.then(|| host(env, peer_timeout)).transpose()?;
    Ok(FormerMember {
        identity: Identity::random().map_err(wrong)?,
        server,
        leaves: false,
        left_over: None,
    })
}

fn wrong(error: RendezvousError) -> Error {
    Error::Launch(LaunchError::Rendezvous(error))
}

/// The transport of a process in a simulation.
pub(crate) type SimulatedTransport = Arc<dyn Transport>;

/// A job that this process joins in addition to the job of the user's program: a link.
pub(crate) struct SideJob<'a> {
    /// The name of the link's publication, for messages.
    pub(crate) publication: &'a str,
    pub(crate) rendezvous: Rendezvous,
    pub(crate) token: &'a Token,
    /// This process's number in the side job.
    pub(crate) process: ProcessId,
    /// Number of CPU devices of each process.
    pub(crate) devices: &'a [usize],
    /// The name of the transport.
    pub(crate) transport: &'a str,
    pub(crate) peer_timeout: Duration,
    /// The transport that carries the messages in a simulation; `None` otherwise.
    pub(crate) over: Option<SimulatedTransport>,
}

/// Joins a job in addition to the job of the user's program. Its processes may run other
/// executables with the same version of mpmd. Blocks until all processes are connected.
///
/// # Errors
///
/// If there is no such transport, or the job cannot be formed within the peer timeout.
pub(crate) fn join_beside(job: SideJob<'_>) -> Result<Program> {
    let SideJob {
        publication,
        rendezvous,
        token,
        process,
        devices,
        transport,
        peer_timeout,
        over,
    } = job;
    let builder = Builder::default()
        .devices_by_process(devices)
        .peer_timeout(peer_timeout)
        .spin(Spin::Never);
    let processes = devices.len();
    let topology = builder.topology(processes, None)?;
    let opened = match over {
        None => OpenedTransport::open(transport, processes, rendezvous.local_address()),
        Some(over) => Ok(OpenedTransport::Simulated(Box::new(move |_| Ok(over)))),
    };

    let member = JobMember {
        host: std::env::var(mpmd_launch::variables::HOST).unwrap_or_else(|_| hostname()),
        pid: std::process::id(),
        devices: devices.get(process.index()).copied().unwrap_or_default() as u32,
        addresses: transports::told(transport, &opened),
        program: version::fingerprint_beside(&topology),
        trouble: opened.as_ref().err().map(lack),
        ..JobMember::default()
    };

    let candidate = Candidate {
        job: MemberJob::Link(publication.into()),
        rendezvous,
        server: None,
        waits: false,
        process,
        identity: Identity::random().map_err(wrong)?,
        member,
        opened,
        token: *token.bytes(),
        left_over: None,
    };
    match candidate.join(builder, topology)? {
        EpochStart::Program(program) => Ok(*program),
        EpochStart::NoPlace | EpochStart::Lost { .. } => unreachable!("for a process that waits"),
    }
}

/// Formats, for the other processes, which transport or device this process lacks and why.
fn lack(error: &Error) -> String {
    match error {
        Error::Cuda(why) if why.is_of_nccl() => format!("no NCCL, which was asked for: {why}"),
        Error::Cuda(why) => format!("no devices of kind cuda: {why}"),
        other => format!("no transport: {other}"),
    }
}

/// Starts the rendezvous service in this process, at the job's listen address.
fn host(env: &JobEnv, peer_timeout: Duration) -> Result<RendezvousServer> {
    let config = ServerConfig {
        processes: env.processes,
        token: env.token.clone(),
        peer_timeout,
    };
    // The name may come later: some systems name a process only once it runs.
    if let Err(why) = check_resolves(&env.coordinator) {
        let JobEnv {
            coordinator,
            coordinator_source,
            ..
        } = env;
        warn_user(&format!(
            "warning: {coordinator_source}: the host of {coordinator} has no address: {why}. \
             Trying again for up to {peer_timeout:?}"
        ));
    }
    let server = RendezvousServer::bind(env.listen_address()?, config);
    server.map_err(|error| wrong(named(error, env)))
}

/// Adds to an error of the rendezvous address the variable that gives it.
fn named(mut error: RendezvousError, env: &JobEnv) -> RendezvousError {
    if let RendezvousError::Bind { why, .. } | RendezvousError::Unreachable { why, .. } = &mut error
    {
        *why += &format!(" (the address is that of {})", env.coordinator_source);
    }
    error
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}
