//! A process that joins its job at the rendezvous: all check that they fit together, connect the
//! transport and start the runtime.

use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{mpsc, now, since, thread};
use mpmd_launch::{DEFAULT_PEER_TIMEOUT, LaunchError};
use mpmd_layout::topology::{CudaCollectives, DeviceKind, GpuId, Topology};
use mpmd_proto::router::{Failure, FailureKind};
use mpmd_rendezvous::{
    FailureReport, Identity, JobMember, JoinedEpoch, Rendezvous, RendezvousError, RendezvousServer,
    Succession,
};
use mpmd_transport::{Transport, TransportError};

use super::builder::gpus_of;
use super::facts::ProgramFacts;
use super::membership::{MemberJob, MemberPlace, Membership, Returning, blame};
use super::neighbours::Neighbours;
use super::transports::{self, OpenedTransport};
use super::{Builder, Program, vectors};
use crate::error::{Error, Result};
use crate::warning::warn_user;

/// Maximum number of late processes that a warning names.
const MOST_NAMED: usize = 8;

/// Interval at which a process that connects its transport looks for lost members.
const LOSS_LOOK: Duration = Duration::from_millis(50);

/// Time for a transport to connect after a member was lost. A member that is lost after all have
/// connected is noticed by the transport itself.
const CONNECTS_WITHIN: Duration = Duration::from_secs(1);

/// A process that has connected to the rendezvous and is about to join its job.
pub(super) struct Candidate {
    pub(super) job: MemberJob,
    pub(super) rendezvous: Rendezvous,
    /// The rendezvous service, if this process hosts it.
    pub(super) server: Option<RendezvousServer>,
    /// True if the process, when the job is full, waits for the place of a lost process. Such a
    /// process also returns to the job after another process was lost.
    pub(super) waits: bool,
    pub(super) process: ProcessId,
    pub(super) identity: Identity,
    pub(super) member: JobMember,
    pub(super) opened: Result<OpenedTransport>,
    /// The secret token of the job.
    pub(super) token: [u8; 32],
    /// The connection over which the process has left the epoch before:
    /// [`Returning::left_over`].
    pub(super) left_over: Option<Arc<Rendezvous>>,
}

/// The outcome of an attempt to join an epoch of the job.
#[derive(Debug)]
pub(crate) enum EpochStart {
    /// The epoch has begun, and this is its program.
    Program(Box<Program>),
    /// The job has ended, and this process had no place in it.
    NoPlace,
    /// A process was lost before the epoch began. This process may return in the next epoch.
    Lost {
        failure: Arc<Failure>,
        returning: Box<Returning>,
    },
}

impl Candidate {
    /// Joins the builder's epoch, and starts this process's part in it. Blocks until all processes
    /// are connected, or, for a process that [waits](Self::waits), until there is a place for it.
    pub(super) fn join(mut self, mut builder: Builder, topology: Topology) -> Result<EpochStart> {
        let member = std::mem::take(&mut self.member);
        let leaves = member.leaves;
        let joined = match self.take_place(builder.epoch, member) {
            Ok(Some(joined)) => joined,
            Ok(None) => return Ok(EpochStart::NoPlace),
            // It tries again, and finds the service gone if that was the reason.
            Err(error) if self.waits && is_cut(&error) => {
                return Ok(self.lost_before_place(builder.epoch, leaves, &error));
            }
            // A difference between the programs is reported before a missing transport or device.
            Err(
                error @ (RendezvousError::Program { .. }
                | RendezvousError::Differs { .. }
                | RendezvousError::Narrower { .. }),
            ) => return Err(wrong(error)),
            Err(error) => return Err(self.opened.err().unwrap_or_else(|| wrong(error))),
        };

        if matches!(self.job, MemberJob::Program) {
            vectors::agree(&joined);
        }
        let process = joined.process;
        let has_waited = joined.epoch > builder.epoch;
        if has_waited && let Some(facts) = &builder.facts {
            self.keep_place(facts)?;
        }
        builder.epoch = joined.epoch;
        let topology = builder.resized(topology, joined.members.len())?;
        let peer_timeout = builder.peer_timeout.unwrap_or(DEFAULT_PEER_TIMEOUT);

        let Self {
            job,
            rendezvous,
            server,
            waits,
            identity,
            opened,
            token,
            ..
        } = self;
        let membership = Membership::of(
            job,
            &joined,
            &builder,
            rendezvous,
            server,
            identity,
            peer_timeout,
        );
        let returns = |error: &Error| waits && is_loss(error);
        let agreed = agree(&membership, &builder, &joined, opened, topology);
        let (opened, topology) = match agreed {
            Ok(agreed) => agreed,
            Err(error) if returns(&error) => {
                return Ok(membership.lost(process, joined.epoch, &error));
            }
            Err(error) => {
                // All peers must hear of it, also from a service that this process hosts.
                membership.leave(Some(FailureReport {
                    failure: blame(process, &error),
                    hash: None,
                }));
                return Err(error);
            }
        };

        let spin = *builder.spin.get_or_insert_default();
        let connect = move |joined: &JoinedEpoch| opened.connect(token, joined, peer_timeout, spin);
        match connect_unless_lost(&membership, joined.clone(), connect) {
            Ok(transport) => builder
                .start(process, topology, Some(transport), Some(membership))
                .map(|p| EpochStart::Program(Box::new(p))),
            Err(error) if returns(&error) => Ok(membership.lost(process, joined.epoch, &error)),
            Err(error) => {
                membership.give_up(process, &error);
                Err(error)
            }
        }
    }

    /// Joins the epoch at the rendezvous, and gets a place in it. Returns `None` if the job has
    /// ended without this process.
    fn take_place(
        &mut self,
        epoch: u64,
        member: JobMember,
    ) -> Result<Option<JoinedEpoch>, RendezvousError> {
        let process = self.process;
        let job = self.job.clone();
        self.rendezvous.on_busy(move |epoch, busy, waited| {
            warn_user(&waits_for(&job, process, epoch, busy, waited));
        });
        match self.waits {
            true => self.rendezvous.join_epoch(member, epoch, self.identity),
            false => self.rendezvous.join(member).map(Some),
        }
    }

    /// Returns [`EpochStart::Lost`] for an attempt to join `epoch` that lost the connection to the
    /// rendezvous.
    fn lost_before_place(self, epoch: u64, leaves: bool, error: &RendezvousError) -> EpochStart {
        let process = self.process;
        let message = format!("process {process} could not join: {error}");
        let failure = Failure::new(FailureKind::PeerLost, process, 0, message);
        let returning = Returning {
            process,
            epoch: epoch - 1,
            identity: self.identity,
            server: self.server,
            succession: self.rendezvous.succession(),
            service_leaves: false,
            leaves,
            lack: None,
            parting: self.rendezvous.parting(),
            left_over: self.left_over,
        };
        EpochStart::Lost {
            failure: Arc::new(failure),
            returning: Box::new(returning),
        }
    }

    /// Checks that the facts that this process reported are still true. If not, gives its place
    /// back to the job, so that another process can take it.
    fn keep_place(&self, facts: &ProgramFacts) -> Result<()> {
        facts.check().inspect_err(|error| {
            if let Err(error) = self.rendezvous.give_back(error.to_string()) {
                tracing::debug!(%error, "giving a place back");
            }
        })
    }
}

/// Connects a transport on a thread of its own. Waits for it, but not for a member that the
/// rendezvous service has lost: that one may never come, and the transport cannot know it.
///
/// # Errors
///
/// Those of `connect`, and [`TransportError::PeerGone`] if a member is lost. The thread then ends
/// later, within the peer timeout.
fn connect_unless_lost(
    membership: &Membership,
    joined: JoinedEpoch,
    connect: impl FnOnce(&JoinedEpoch) -> Result<Arc<dyn Transport>> + Send + 'static,
) -> Result<Arc<dyn Transport>> {
    let (sender, connected) = mpsc::channel();
    let connects = move || {
        // Nobody waits any more once a member was lost.
        _ = sender.send(connect(&joined));
    };
    thread::Builder::new()
        .name("mpmd-connect".to_owned())
        .spawn(connects)
        .map_err(|error| {
            Error::Environment(format!(
                "the thread that connects cannot be started: {error}"
            ))
        })?;

    let mut lost_since = None;
    loop {
        match connected.recv_timeout(LOSS_LOOK) {
            Ok(connected) => return connected,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Error::Environment(
                    "the thread that connects panicked".to_owned(),
                ));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        let host = membership.host();
        let Some((peer, why)) = membership.rendezvous.first_untold_loss(host) else {
            continue;
        };
        if since(*lost_since.get_or_insert_with(now)) >= CONNECTS_WITHIN {
            return Err(TransportError::PeerGone { peer, why }.into());
        }
    }
}

/// Checks that this process and the other members fit together, and exchanges the hosts and GPUs of
/// all devices. Returns this process's transport, and the topology with hosts and GPUs added.
fn agree(
    membership: &Membership,
    builder: &Builder,
    joined: &JoinedEpoch,
    opened: Result<OpenedTransport>,
    topology: Topology,
) -> Result<(OpenedTransport, Topology)> {
    let JoinedEpoch {
        process,
        epoch,
        ref members,
        ..
    } = *joined;
    let rendezvous = &membership.rendezvous;
    tell_gpus(rendezvous, process, epoch, &topology)?;
    let opened = match (transports::agree(members), opened) {
        (Ok(()), opened) => opened?,
        // On the process at fault, its own error is more precise.
        (Err(LaunchError::Lacking { .. }), Err(own)) => return Err(own),
        (Err(error), _) => return Err(error.into()),
    };

    let topology = hear_gpus(rendezvous, epoch, topology, membership.peer_timeout)?;
    Ok((opened, placed(builder, topology, members)?))
}

fn wrong(error: RendezvousError) -> Error {
    Error::Launch(LaunchError::Rendezvous(error))
}

impl Membership {
    /// Creates the membership of a process that has joined an epoch.
    fn of(
        job: MemberJob,
        joined: &JoinedEpoch,
        builder: &Builder,
        rendezvous: Rendezvous,
        server: Option<RendezvousServer>,
        identity: Identity,
        peer_timeout: Duration,
    ) -> Self {
        let members = &joined.members;
        let neighbours = Arc::new(Neighbours::find(joined.process, members));
        let places = members
            .iter()
            .map(|member| MemberPlace {
                host: member.host.clone(),
                pid: member.pid,
            })
            .collect();

        Self {
            job,
            rendezvous: Arc::new(rendezvous),
            server,
            succession: Succession::of(joined),
            standing: joined.standing,
            identity: Identity {
                run: Some(joined.run),
                ..identity
            },
            neighbours,
            places,
            peer_timeout,
            sizes: builder.sizes.clone(),
            refused_sizes: builder.refused_sizes.clone(),
        }
    }

    /// Leaves an epoch that could not begin because a process was lost.
    fn lost(self, process: ProcessId, epoch: u64, error: &Error) -> EpochStart {
        let failure = Arc::new(blame(process, error));
        EpochStart::Lost {
            failure,
            returning: Box::new(self.return_later(process, epoch)),
        }
    }
}

/// Formats the warning that process `me` of `job` waits for others: in the first epoch for
/// processes that have not joined, later for processes that have not left the failed epoch.
fn waits_for(
    job: &MemberJob,
    me: ProcessId,
    epoch: u64,
    busy: &[ProcessId],
    waited: Duration,
) -> String {
    let process = job.name_process(me);
    let job = job.noun();
    let names: Vec<_> = busy.iter().map(ToString::to_string).collect();
    if epoch == 1 {
        let more = match names.len().saturating_sub(MOST_NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        return format!(
            "{process} has waited {:.0} s for the {job} to begin: these processes have not joined \
             it, and have perhaps not started: {}{more}",
            waited.as_secs_f32(),
            names[..names.len().min(MOST_NAMED)].join(", "),
        );
    }

    format!(
        "{process} has waited {:.0} s for epoch {epoch} of the {job}: each of these processes is \
         alive, but runs code of its own in the epoch that has failed, and keeps its place until \
         that returns: {}",
        waited.as_secs_f32(),
        names.join(", ")
    )
}

/// True if the error means that another process was lost while it joined, or that the job gave up
/// this process.
fn is_loss(error: &Error) -> bool {
    match error {
        Error::Launch(LaunchError::Rendezvous(error)) => {
            let never = matches!(
                error,
                RendezvousError::NeverSet { .. } | RendezvousError::Unset { .. }
            );
            never || is_cut(error)
        }
        error => matches!(error, Error::Transport(TransportError::PeerGone { .. })),
    }
}

/// True if the error means that the connection to the rendezvous is lost. Perhaps the job gave up
/// this process and the message about it was lost.
fn is_cut(error: &RendezvousError) -> bool {
    matches!(
        error,
        RendezvousError::GivenUp { .. } | RendezvousError::ServerGone { .. }
    )
}

/// Returns the rendezvous key of the GPU ids of a process in an epoch.
fn gpus_key(process: ProcessId, epoch: u64) -> String {
    format!("mpmd.gpus.{epoch}.{process}")
}

/// True if the other processes need the GPU ids of `process`: it has CUDA devices, and collectives
/// use NCCL.
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
        true => Ok(rendezvous.set(
            gpus_key(process, epoch),
            gpus_of(process, topology).concat(),
        )?),
        false => Ok(()),
    }
}

/// Adds the GPU ids that the processes published to the topology. The result is the same on every
/// process. Blocks for up to `peer_timeout` for each process.
fn hear_gpus(
    rendezvous: &Rendezvous,
    epoch: u64,
    topology: Topology,
    peer_timeout: Duration,
) -> Result<Topology, LaunchError> {
    let processes = (0..topology.processes() as u32).map(ProcessId);
    let told = processes
        .filter(|process| are_gpus_told(*process, &topology))
        .collect::<Vec<_>>();
    told.into_iter().try_fold(topology, |topology, process| {
        let told = rendezvous.get(gpus_key(process, epoch), peer_timeout)?;
        let (gpus, _) = told.as_chunks::<{ size_of::<GpuId>() }>();
        Ok(topology.with_gpus_of(process, gpus))
    })
}

/// Adds the hosts that the processes reported to the topology, unless the builder sets the hosts.
fn placed(builder: &Builder, topology: Topology, members: &[JobMember]) -> Result<Topology> {
    if builder.hosts.is_some() {
        return Ok(topology);
    }
    let hosts: Vec<&str> = members.iter().map(|member| member.host.as_str()).collect();
    Ok(topology.on_hosts(&hosts)?)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};

    use mpmd_rendezvous::{JoinConfig, ServerConfig, Token};

    use super::*;
    use crate::api::program::{SideJob, join_beside};

    #[test]
    fn member_that_is_lost_before_it_connects_is_not_awaited() {
        let peer_timeout = Duration::from_secs(60);
        let token = Token::new([7; 32]);
        let config = ServerConfig {
            processes: 2,
            token: token.clone(),
            peer_timeout,
        };
        let server = RendezvousServer::bind((Ipv4Addr::LOCALHOST, 0).into(), config).unwrap();
        let connect = |process: u32| {
            let config = JoinConfig {
                server: server.address().to_string(),
                process: ProcessId(process),
                processes: 2,
                token: token.clone(),
                peer_timeout,
            };
            Rendezvous::connect(config).unwrap()
        };

        // Its host accepts connections, but the process is lost before it answers any.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let [first, lost] = [0, 1].map(connect);
        let joins = std::thread::spawn(move || {
            let topology = Builder::default().topology(2, None).unwrap();
            let member = JobMember {
                addresses: vec![("tcp".to_owned(), address.to_string())],
                devices: 1,
                program: super::super::version::fingerprint_beside(&topology),
                ..JobMember::default()
            };
            lost.join(member).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            drop(lost);
        });

        let begin = now();
        let joined = join_beside(SideJob {
            publication: "policy",
            rendezvous: first,
            token: &token,
            process: ProcessId(0),
            devices: &[1, 1],
            transport: "tcp",
            peer_timeout,
            over: None,
        });
        let said = joined.expect_err("a member is lost").to_string();
        assert!(said.contains("process 1 is gone"), "{said}");
        assert!(since(begin) < peer_timeout / 4, "{:?}", since(begin));
        joins.join().unwrap();
    }
}
