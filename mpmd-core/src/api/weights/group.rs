//! The processes of one end, as the other end calls them: a rendezvous of their own, at which they
//! stay for as long as they publish or subscribe.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use mpmd_launch::LaunchError;
use mpmd_layout::topology::{DeviceId, Topology};
use mpmd_proto::control::{self, ControlError};
use mpmd_rendezvous::{JobMember, JoinConfig, Rendezvous, RendezvousError, ServerConfig, Token};
use serde::{Deserialize, Serialize};

use super::link::VersionNumbers;
use super::net::{Net, Service};
use crate::api::program::{Program, SideJob, join_beside};
use crate::error::{Error, Result, panic_text};
use mpmd_base::ProcessId;
use mpmd_base::block::{mpsc, thread};

/// Longest peer timeout of a link. It may be short, since a lost link is soon replaced.
pub(super) const LONGEST: Duration = Duration::from_secs(15);

/// Interval at which a process that waits for the other members looks for lost processes.
const LOSS_LOOK: Duration = Duration::from_millis(50);

/// A request to all processes of a publisher, or of a subscriber, from process 0 of a subscriber.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum GroupCall {
    /// Asks whether the processes publish under this name.
    Hello(String),
    /// Asks the process to join a link.
    Join(Invitation),
    /// Tells a subscriber's processes the newest version that is whole. A process whose link broke
    /// while it took a version then knows whether that version is whole.
    Settle(Option<VersionNumbers>),
}

/// An invitation to the processes of a publisher and of a subscriber to join a link.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Invitation {
    /// The name of the publication.
    pub(super) name: String,
    /// The address of the link's rendezvous service.
    pub(super) server: String,
    /// A random text, from which both ends derive the [token of the link](link_token).
    pub(super) nonce: String,
    /// Number of the publisher's processes. They come first in the link's numbering of processes.
    pub(super) publishers: usize,
    /// Number of devices of each process of the link.
    pub(super) devices: Vec<usize>,
    pub(super) transport: String,
}

impl Invitation {
    /// Joins the link as process number `place` of the publisher or subscriber. `secret` is the
    /// secret of the publication. Blocks until all processes have joined. Fails at once if the link
    /// is over.
    pub(super) fn join(
        &self,
        end: LinkParty,
        place: usize,
        secret: &Token,
        peer_timeout: Duration,
        net: &Net,
    ) -> Result<Program> {
        let first = match end {
            LinkParty::Publisher => 0,
            LinkParty::Subscriber => self.publishers,
        };
        let all = match end {
            LinkParty::Publisher => self.publishers,
            LinkParty::Subscriber => self.devices.len(),
        };
        let process = first.saturating_add(place);
        if process >= all || self.publishers == 0 || self.publishers >= self.devices.len() {
            return Err(Error::Environment(format!(
                "the invitation to a link has {} processes, {} of them a publisher's: this process \
                 has no place among them",
                self.devices.len(),
                self.publishers
            )));
        }

        let process = ProcessId(process as u32);
        let token = link_token(secret, &self.nonce);
        let peer_timeout = peer_timeout.min(LONGEST);
        let config = JoinConfig {
            server: self.server.clone(),
            process,
            processes: self.devices.len(),
            token: token.clone(),
            peer_timeout,
        };
        let (rendezvous, over) = net.join_link(config).map_err(wrong)?;
        join_beside(SideJob {
            publication: &self.name,
            rendezvous,
            token: &token,
            process,
            devices: &self.devices,
            transport: &self.transport,
            peer_timeout,
            over,
        })
    }
}

/// The publisher or the subscriber of a link.
#[derive(Clone, Copy, Debug)]
pub(super) enum LinkParty {
    Publisher,
    Subscriber,
}

/// Derives the token of a link from the secret of the publication, which both ends know. The token
/// is never sent.
pub(super) fn link_token(secret: &Token, nonce: &str) -> Token {
    Token::of_secret(secret.bytes(), &format!("link {nonce}"))
}

/// Derives the token with which a subscriber's processes meet each other.
pub(super) fn group_token(secret: &Token, nonce: &str) -> Token {
    Token::of_secret(secret.bytes(), &format!("group {nonce}"))
}

/// Runs `f`, a part of a link, and turns a panic into an error. The thread then survives for later
/// links.
pub(super) fn guarded<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(f));
    result.unwrap_or_else(|panic| Err(Error::kernel(panic_text(&*panic))))
}

/// The answer of a process to a [`GroupCall`].
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum GroupAnswer {
    /// The process takes part and has this number of devices.
    Here(usize),
    /// The process publishes under this other name.
    Other(String),
}

/// The processes of a job that hold shards of the published or wanted arrays. Their devices get new
/// numbers for use in a link.
#[derive(Clone, Debug)]
pub(super) struct Members {
    processes: Vec<ProcessId>,
    /// Number of devices of each member process.
    pub(super) devices: Vec<usize>,
    numbers: HashMap<DeviceId, u32>,
}

impl Members {
    /// Returns the members: the owners of the devices `used`, and the process `also`.
    pub(super) fn of(
        topology: &Topology,
        used: impl IntoIterator<Item = DeviceId>,
        also: Option<ProcessId>,
    ) -> Self {
        let owner = |device: DeviceId| topology.process_of(device);
        let all: BTreeSet<ProcessId> = used.into_iter().filter_map(owner).chain(also).collect();
        let processes: Vec<ProcessId> = all.into_iter().collect();

        let devices = processes
            .iter()
            .map(|process| topology.devices_of(*process).len())
            .collect();
        let all = processes
            .iter()
            .flat_map(|process| topology.devices_of(*process));
        let numbers = all
            .enumerate()
            .map(|(number, device)| (*device, number as u32))
            .collect();
        Self {
            processes,
            devices,
            numbers,
        }
    }

    /// Returns the index of a process among the members, or `None` if it is no member.
    pub(super) fn place_of(&self, process: ProcessId) -> Option<usize> {
        self.processes.iter().position(|member| *member == process)
    }

    /// Returns the link's number of a device of a member process; `u32::MAX` for any other device.
    pub(super) fn number_of(&self, device: DeviceId) -> u32 {
        self.numbers.get(&device).copied().unwrap_or(u32::MAX)
    }
}

/// This process's connection to the rendezvous of its publisher or subscriber. Dropping it leaves
/// the rendezvous.
pub(super) struct GroupMembership {
    rendezvous: Arc<Rendezvous>,
    server: Option<Service>,
}

/// The opened rendezvous of a publisher or subscriber.
pub(super) struct OpenedGroup {
    pub(super) address: SocketAddr,
    /// This process's membership; `None` if it is no member.
    pub(super) group: Option<GroupMembership>,
}

impl GroupMembership {
    /// Opens the rendezvous on the first member, at `listen` or any free port, and joins it. Blocks
    /// until all members have joined. `answer` is called for each [`GroupCall`], on a thread that
    /// must not block. All processes must call `open`.
    #[track_caller]
    pub(super) fn open(
        p: &mut Program,
        members: &Members,
        listen: Option<SocketAddr>,
        token: Token,
        net: &Net,
        answer: impl Fn(GroupCall) -> GroupAnswer + Send + Sync + 'static,
    ) -> Result<OpenedGroup> {
        let processes = members.processes.len();
        // It keeps every process that the program's own job keeps.
        let peer_timeout = p.runtime.config.peer_timeout.saturating_mul(2);
        let first = members.processes.first().copied().unwrap_or(ProcessId(0));
        let ip = p.local_ip();

        let mut server = None;
        let config = ServerConfig {
            processes,
            token: token.clone(),
            peer_timeout,
        };
        let bind = || {
            let at = listen.unwrap_or(SocketAddr::new(ip, 0));
            let bound = server
                .insert(net.bind(at, config).map_err(wrong)?)
                .address();
            // The other processes cannot connect to the address of all interfaces.
            let ip = if bound.ip().is_unspecified() {
                ip
            } else {
                bound.ip()
            };
            Ok(SocketAddr::new(ip, bound.port()).to_string())
        };
        let text: String = p.broadcast_value(first, String::new(), bind)?;
        let address = text
            .parse()
            .map_err(|_| Error::Environment(format!("{text} is no address of a publication")))?;
        let Some(place) = members.place_of(p.process()) else {
            return Ok(OpenedGroup {
                address,
                group: None,
            });
        };

        let config = JoinConfig {
            server: text,
            process: ProcessId(place as u32),
            processes,
            token,
            peer_timeout,
        };
        let rendezvous = net.connect(config).map_err(wrong)?;
        rendezvous.on_look(move |words| {
            let answered = control::decode::<GroupCall>(words).map(&answer);
            answered
                .ok()
                .and_then(|answer| control::encode(&answer).ok())
                .unwrap_or_default()
        });
        let rendezvous = join_unless_lost(p, rendezvous)?;
        Ok(OpenedGroup {
            address,
            group: Some(Self { rendezvous, server }),
        })
    }
}

/// Joins the group at its rendezvous. Waits for all members, but not after the program has lost a
/// process: that one may never come, and the rendezvous cannot know it.
///
/// # Errors
///
/// Those of [`Rendezvous::join`], and the failure of the program. The thread that joins then ends
/// with the rendezvous, or within the time limit of the group.
fn join_unless_lost(p: &Program, rendezvous: Rendezvous) -> Result<Arc<Rendezvous>> {
    let rendezvous = Arc::new(rendezvous);
    let joining = rendezvous.clone();
    let (sender, joined) = mpsc::channel();
    let join = move || {
        // Nobody waits any more once a process was lost.
        _ = sender.send(joining.join(JobMember::default()));
    };
    spawn("mpmd-group", join)?;

    loop {
        match joined.recv_timeout(LOSS_LOOK) {
            Ok(joined) => {
                joined.map_err(wrong)?;
                return Ok(rendezvous);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Error::Environment(
                    "the thread that joins the processes of a publication panicked".to_owned(),
                ));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if let Some(failure) = p.runtime.cause() {
            return Err(Error::failed(failure));
        }
    }
}

impl Drop for GroupMembership {
    fn drop(&mut self) {
        if let Err(error) = self.rendezvous.leave() {
            tracing::debug!(%error, "leaving the processes of a publication");
        }
        if let Some(server) = &self.server {
            // Short: the others may stay longer than this process.
            _ = server.wait_end(Duration::from_millis(200));
        }
    }
}

/// The reason why a call to the processes of a publisher or subscriber has failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The rendezvous cannot be reached, or refuses the call.
    #[error("{}", unreachable_text(.0))]
    Rendezvous(#[from] RendezvousError),
    /// The call cannot be encoded.
    #[error(transparent)]
    Encode(#[from] ControlError),
    /// A process has not answered. `why` is the reason that the rendezvous gives.
    #[error("process {process} at {address}: {why}")]
    Unanswered {
        process: ProcessId,
        address: String,
        why: String,
    },
    /// The answer of a process cannot be decoded.
    #[error("process {process} at {address}: no answer")]
    Unreadable { process: ProcessId, address: String },
}

/// Formats the error of a subscriber that cannot call its publisher.
fn unreachable_text(error: &RendezvousError) -> String {
    match error {
        RendezvousError::Token { server } => format!(
            "the publisher at {server} has another secret or another name: give both ends the same"
        ),
        RendezvousError::Stranger { server } => {
            format!("the program that listens at {server} is no publisher of mpmd")
        }
        RendezvousError::Unreachable { server, why, .. } => {
            format!("no publisher answers at {server}: {why}")
        }
        other => other.to_string(),
    }
}

/// The answers of all processes of a publisher or subscriber to a call.
pub(super) struct GroupAnswers {
    pub(super) by_process: Vec<GroupAnswer>,
    /// The caller's own address in the network over which it called.
    pub(super) local_ip: IpAddr,
}

/// Calls all processes of the publisher or subscriber at an address, and returns their answers.
///
/// # Errors
///
/// If the rendezvous cannot be reached, or a process has not answered.
pub(super) fn call(
    address: &str,
    token: &Token,
    net: &Net,
    call: &GroupCall,
    timeout: Duration,
) -> std::result::Result<GroupAnswers, CallError> {
    let observer = net.observe(address, token, timeout)?;
    let words = control::encode(call)?;
    let answers = observer.look(&words, timeout)?;

    let mut by_process = Vec::with_capacity(answers.len());
    for (process, status) in answers {
        let bytes = status.map_err(|why| CallError::Unanswered {
            process,
            address: address.to_owned(),
            why,
        })?;
        let answer = control::decode(&bytes).map_err(|_| CallError::Unreadable {
            process,
            address: address.to_owned(),
        })?;
        by_process.push(answer);
    }
    Ok(GroupAnswers {
        by_process,
        local_ip: observer.local_address().ip(),
    })
}

impl Program {
    /// Returns the address of this process in the network of its job.
    fn local_ip(&self) -> IpAddr {
        self.rendezvous_address()
            .map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip())
    }
}

/// Starts a named thread of a publisher or subscriber.
pub(super) fn spawn(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<thread::JoinHandle<()>> {
    let builder = thread::Builder::new().name(name.to_owned());
    builder.spawn(run).map_err(|error| {
        Error::Environment(format!("the thread {name} could not be started: {error}"))
    })
}

pub(super) fn wrong(error: RendezvousError) -> Error {
    Error::Launch(LaunchError::Rendezvous(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invitation_without_a_place_for_this_process_is_refused() {
        let secret = Token::new([7; 32]);
        for (publishers, processes, end, place) in [
            (0, 2, LinkParty::Subscriber, 0),
            (2, 2, LinkParty::Publisher, 0),
            (7, 2, LinkParty::Subscriber, 0),
            (1, 2, LinkParty::Publisher, 1),
            (1, 2, LinkParty::Subscriber, 1),
            (1, 2, LinkParty::Subscriber, usize::MAX),
        ] {
            let invitation = Invitation {
                name: "policy".to_owned(),
                server: "127.0.0.1:1".to_owned(),
                nonce: String::new(),
                publishers,
                devices: vec![1; processes],
                transport: "tcp".to_owned(),
            };
            let joined =
                invitation.join(end, place, &secret, Duration::from_secs(1), &Net::default());
            let why = joined
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default();
            assert!(why.contains("has no place among them"), "{why}");
        }
    }
}
