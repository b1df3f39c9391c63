//! Connects two processes. The higher one connects to the lower one's socket. Each message of their
//! [handshake](mpmd_handshake) is a packet. The last two carry descriptors: the higher process
//! gives its doorbell with its proof, the lower one its doorbell and the rings with its welcome. So
//! no process gives a descriptor to one that has not proved that it belongs to the job.

use std::io;
#[cfg(test)]
use std::os::fd::BorrowedFd;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{PidfdFlags, getuid, pidfd_open};

use super::address::{Address, VERSION};
use super::doorbell::Doorbell;
use super::mapped::Mapped;
use super::peer::{Inbound, Outbound, Peer};
use super::returns::Returns;
use super::ring::{Consumer, Ring};
use super::socket::{Listener, Packet, Socket, something_comes};
use super::{ShmConfig, environment};
use crate::party::{self, Party};
use crate::transport::TransportError;
use mpmd_base::deadline::after;
use mpmd_handshake::Handshake;
use mpmd_handshake::token::random_bytes;
use mpmd_proto::wire::ProcessId;

const MAGIC: [u8; 8] = *b"MPMDSHM\0";
/// Limit on the connections within a handshake. With more of them, the oldest is closed.
const MOST_STRANGERS: usize = 1024;
/// Pause before the next accept after the system has refused one.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);

/// Capacity in bytes of a ring of messages; `RETURNS` is that of a ring of returns.
const MESSAGES: usize = 64 << 10;
const RETURNS: usize = 16 << 10;
/// Capacities in bytes of the rings of a pair: messages from the lower and from the higher process,
/// then returns from both.
pub(super) const CAPACITIES: [usize; 4] = [MESSAGES, MESSAGES, RETURNS, RETURNS];

/// (Connected peer, its receiving half, its ring of returns).
pub(super) type Met = (Peer, Inbound, Consumer);

/// The memory of this process's doorbell, which all peers map.
pub(super) struct OwnDoor {
    memory: Arc<Mapped>,
    pub(super) door: Doorbell,
}

impl OwnDoor {
    pub(super) fn new() -> io::Result<Self> {
        let memory = Arc::new(Mapped::new(Doorbell::BYTES)?);
        Ok(Self {
            door: door(&memory),
            memory,
        })
    }

    /// The descriptor by which a peer maps the doorbell's memory.
    #[cfg(test)]
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Connects to all peers in the configuration and returns them by process. Blocks until all are
/// connected; fails after the configuration's `peer_timeout`.
pub(super) fn meet(
    listener: &Listener,
    own: &OwnDoor,
    config: &ShmConfig,
) -> Result<Vec<Option<Met>>, TransportError> {
    let meeting = Meeting {
        own,
        config,
        party: party(config),
        deadline: after(Instant::now(), config.peer_timeout),
    };
    let me = config.process.index();
    let mut peers: Vec<Option<Met>> = config.peers.iter().map(|_| None).collect();
    let mut called = meeting.call_lower()?;
    let with = |error: io::Error| {
        environment(
            "waiting for the job's processes over shared memory".to_owned(),
            &error,
        )
    };
    // Callers that have not proved themselves. Nothing waits for them.
    let mut strangers: Vec<End> = Vec::new();
    let mut most_strangers = MOST_STRANGERS;
    let mut refused: Option<io::Error> = None;
    // Peers that are gone or do not fit. The others are met all the same: one that waits for the
    // rest of a handshake could not know why that does not come.
    let mut failed: Vec<(ProcessId, TransportError)> = Vec::new();
    loop {
        let is_refused = match meeting.accept_all(listener, &mut strangers, &mut most_strangers) {
            Ok(()) => false,
            Err(error) => {
                refused = Some(error);
                true
            }
        };
        for end in std::mem::take(&mut strangers) {
            match meeting.hear_caller(end, &peers) {
                Ok(Heard::Nothing(end)) => strangers.push(end),
                Ok(Heard::Met(peer, met)) => peers[peer.index()] = Some(*met),
                Ok(Heard::End) => {}
                Err((peer, error)) => failed.push((peer, error)),
            }
        }
        for (peer, end) in std::mem::take(&mut called) {
            match meeting.hear_answerer(peer, end) {
                Ok(Heard::Nothing(end)) => called.push((peer, end)),
                Ok(Heard::Met(peer, met)) => peers[peer.index()] = Some(*met),
                Ok(Heard::End) => {}
                Err(error) => failed.push((peer, error)),
            }
        }
        let is_missing = |index: &usize| {
            *index != me
                && config.peers[*index].is_some()
                && peers[*index].is_none()
                && failed.iter().all(|(peer, _)| peer.index() != *index)
        };
        let missing: Vec<String> = (0..peers.len())
            .filter(is_missing)
            .map(|index| index.to_string())
            .collect();
        if missing.is_empty() {
            return failed
                .into_iter()
                .next()
                .map_or(Ok(peers), |(_, error)| Err(error));
        }
        let (listening, until) = match is_refused {
            false => (Some(listener.as_fd()), meeting.deadline),
            true => (None, meeting.deadline.min(Instant::now() + ACCEPT_AGAIN)),
        };
        let ends = strangers.iter().chain(called.iter().map(|(_, end)| end));
        let fds: Vec<_> = listening
            .into_iter()
            .chain(ends.map(|end| end.socket.as_fd()))
            .collect();
        if !something_comes(&fds, until).map_err(with)? && Instant::now() >= meeting.deadline {
            if let Some((_, error)) = failed.into_iter().next() {
                return Err(error);
            }
            let refused =
                refused.map(|error| format!(" (the last that could not be accepted: {error})"));
            return Err(TransportError::TimedOut {
                event: format!(
                    "processes {} to share memory{}",
                    missing.join(", "),
                    refused.unwrap_or_default()
                ),
                peer_timeout: config.peer_timeout,
            });
        }
    }
}

/// This process as the end of handshakes over shared memory.
pub(super) fn party(config: &ShmConfig) -> Party {
    let ShmConfig {
        process,
        peers,
        epoch,
        token,
        ..
    } = config;
    Party::new((MAGIC, VERSION), *process, peers.len(), *epoch, *token)
}

/// One end of a connection within the handshake.
struct End {
    socket: Socket,
    handshake: Handshake,
}

/// The result of a look at a connection.
enum Heard {
    /// The handshake goes on.
    Nothing(End),
    Met(ProcessId, Box<Met>),
    /// The connection is closed: it was a stranger's, or of no use.
    End,
}

/// The fixed values of a meeting.
struct Meeting<'a> {
    own: &'a OwnDoor,
    config: &'a ShmConfig,
    party: Party,
    deadline: Instant,
}

impl Meeting<'_> {
    /// Connects to all lower processes and says hello to them.
    fn call_lower(&self) -> Result<Vec<(ProcessId, End)>, TransportError> {
        let lower = (0..)
            .map(ProcessId)
            .zip(&self.config.peers)
            .take(self.config.process.index());
        let called = lower.filter_map(|(peer, address)| Some((peer, address.as_ref()?)));
        called
            .map(|(peer, address)| Ok((peer, self.call(peer, address)?)))
            .collect()
    }

    fn call(&self, peer: ProcessId, address: &str) -> Result<End, TransportError> {
        let with = |error: io::Error| not_met(peer, "meeting", &error);
        let address: Address = address.parse().map_err(|why: String| protocol(peer, why))?;
        let socket = Socket::connect(&address.socket_name(), self.deadline).map_err(with)?;
        // Another program may have taken the name.
        let user = socket.peer().map_err(with)?;
        if user.uid != getuid() {
            return Err(protocol(
                peer,
                format!("it belongs to user {}", user.uid.as_raw()),
            ));
        }
        let mut handshake = self.party.call(peer, 0, random_bytes().map_err(with)?);
        socket
            .send_until(&handshake.say(), &[], self.deadline)
            .map_err(with)?;
        Ok(End { socket, handshake })
    }

    /// Accepts all connections that wait. Those of other users are closed at once. If there are
    /// more than `most` strangers, the oldest is closed.
    ///
    /// If the system refuses to accept, half of the strangers are closed, and `most` is lowered to
    /// the rest: a peer needs descriptors for more than its connection.
    ///
    /// # Errors
    ///
    /// If the system refuses and no stranger is left to close, or gives no random numbers.
    fn accept_all(
        &self,
        listener: &Listener,
        strangers: &mut Vec<End>,
        most: &mut usize,
    ) -> io::Result<()> {
        loop {
            match listener.accept() {
                Ok(None) => return Ok(()),
                Ok(Some(socket)) if socket.peer().is_ok_and(|user| user.uid == getuid()) => {
                    if strangers.len() >= *most {
                        strangers.remove(0);
                    }
                    let handshake = self.party.answer(random_bytes()?);
                    strangers.push(End { socket, handshake });
                }
                Ok(Some(_)) => {}
                Err(error) if strangers.is_empty() => return Err(error),
                Err(_) => {
                    strangers.drain(..strangers.len().div_ceil(2));
                    *most = strangers.len().max(1);
                }
            }
        }
    }

    /// Reads a packet of a process that has connected, if one has arrived, and replies. A stranger
    /// is closed. A process that has proved itself is welcomed, if `peers` has none of its number
    /// yet. An error comes with the process at fault.
    fn hear_caller(
        &self,
        mut end: End,
        peers: &[Option<Met>],
    ) -> Result<Heard, (ProcessId, TransportError)> {
        let packet = match end.socket.receive() {
            Ok(None) => return Ok(Heard::Nothing(end)),
            Ok(Some(packet)) => packet,
            Err(_) => return Ok(Heard::End),
        };
        let Ok(reply) = end.handshake.take_packet(&packet.bytes) else {
            // One of another version is told. The packet still arrives after the end.
            let last = end.handshake.say();
            if !last.is_empty() {
                let _ = end.socket.send(&last, &[]);
            }
            return Ok(Heard::End);
        };
        let Some(facts) = end.handshake.proved_facts() else {
            let is_sent = end.socket.send(&reply, &[]);
            return Ok(if let Ok(true) = is_sent {
                Heard::Nothing(end)
            } else {
                Heard::End
            });
        };
        let peer = party::process(facts);
        self.party
            .check_caller(facts, 1)
            .map_err(|error| (peer, error))?;
        if self.config.peers[peer.index()].is_none() || peers[peer.index()].is_some() {
            return Ok(Heard::End);
        }
        self.welcome(peer, end, packet, &reply)
            .map_err(|error| (peer, error))
    }

    /// Gives the descriptors to a process that has proved itself, and takes its own.
    fn welcome(
        &self,
        peer: ProcessId,
        end: End,
        packet: Packet,
        reply: &[u8],
    ) -> Result<Heard, TransportError> {
        let with = |error: io::Error| not_met(peer, "sharing memory with", &error);
        let [door] = descriptors(peer, packet)?;
        let bytes = CAPACITIES.iter().copied().map(Ring::bytes).sum();
        let memory = Arc::new(Mapped::new(bytes).map_err(with)?);
        let give = [self.own.memory.as_fd(), memory.as_fd()];
        end.socket
            .send_until(reply, &give, self.deadline)
            .map_err(with)?;
        let met = pair(self.config.process, end.socket, door, &memory, true).map_err(with)?;
        Ok(Heard::Met(peer, Box::new(met)))
    }

    /// Reads a packet of `peer`, which this process has connected to, if one has arrived. Replies
    /// to its answer with this process's proof, and takes the descriptors of its welcome.
    fn hear_answerer(&self, peer: ProcessId, mut end: End) -> Result<Heard, TransportError> {
        let with = |error: io::Error| not_met(peer, "sharing memory with", &error);
        let packet = match end.socket.receive() {
            Ok(None) => return Ok(Heard::Nothing(end)),
            Ok(Some(packet)) => packet,
            Err(error) => {
                return Err(TransportError::PeerGone {
                    peer,
                    why: error.to_string(),
                });
            }
        };
        let heard = end.handshake.take_packet(&packet.bytes);
        let reply = heard.map_err(|refusal| protocol(peer, self.party.why(refusal)))?;
        if !end.handshake.is_done() {
            let facts = end.handshake.proved_facts();
            let checked = facts.map_or(Ok(()), |facts| self.party.check_answerer(facts, peer));
            // A process that does not fit is answered too: it learns the reason.
            let door = [self.own.memory.as_fd()];
            let give = if checked.is_ok() { &door[..] } else { &[] };
            let said = end.socket.send_until(&reply, give, self.deadline);
            return checked
                .and(said.map_err(with))
                .map(|()| Heard::Nothing(end));
        }
        let [door, rings] = descriptors(peer, packet)?;
        let bytes = CAPACITIES.iter().copied().map(Ring::bytes).sum();
        let memory = Arc::new(Mapped::of(rings, bytes).map_err(with)?);
        let met = pair(self.config.process, end.socket, door, &memory, false).map_err(with)?;
        Ok(Heard::Met(peer, Box::new(met)))
    }
}

/// Returns the descriptors of a packet of `peer`.
fn descriptors<const N: usize>(
    peer: ProcessId,
    packet: Packet,
) -> Result<[OwnedFd; N], TransportError> {
    let given = packet.descriptors.len();
    let wrong = |_| protocol(peer, format!("it gave {given} descriptors instead of {N}"));
    packet.descriptors.try_into().map_err(wrong)
}

/// Builds the connection to a peer: its sending and receiving halves.
fn pair(
    own: ProcessId,
    socket: Socket,
    door_of_peer: OwnedFd,
    rings: &Arc<Mapped>,
    is_lower: bool,
) -> io::Result<Met> {
    let user = socket.peer()?;
    let exit = pidfd_open(user.pid, PidfdFlags::empty())?;
    let door = door(&Arc::new(Mapped::of(door_of_peer, Doorbell::BYTES)?));
    let mut offset = 0;
    let [from_lower, from_higher, back_from_lower, back_from_higher] = CAPACITIES.map(|capacity| {
        let first = rings.at(offset, Ring::bytes(capacity));
        offset += Ring::bytes(capacity);
        // SAFETY: `Mapped::at` has checked that the bytes are within the mapping, which is for
        // reading and writing and which the ring keeps. Both processes access them only through
        // rings, which use atomic words of 8 bytes. Each ring has bytes of its own, at a multiple
        // of 64.
        unsafe { Ring::at(first, capacity, rings.clone()) }
    });
    let (here, there, back_here, back_there) = if is_lower {
        (from_lower, from_higher, back_from_lower, back_from_higher)
    } else {
        (from_higher, from_lower, back_from_higher, back_from_lower)
    };
    let peer = Peer {
        outbound: parking_lot::Mutex::new(Outbound::new(here.producer())),
        returns: Returns::new(back_here.producer(), door.clone()),
        door,
        socket,
        exit,
        own,
        is_waiting: false.into(),
        shares_devices: false.into(),
        gets_payloads: false.into(),
    };
    Ok((peer, Inbound::new(there.consumer()), back_there.consumer()))
}

fn door(memory: &Arc<Mapped>) -> Doorbell {
    let first = memory.at(0, Doorbell::BYTES);
    // SAFETY: `Mapped::at` has checked that the bytes are within the mapping, which is for reading
    // and writing and which the doorbell keeps. All processes that have it access it only through
    // doorbells, which use atomic words of 4 bytes.
    unsafe { Doorbell::at(first, memory.clone()) }
}

/// Returns the error of a failed meeting: [`TransportError::PeerGone`] if the peer is gone, else a
/// failure of this process's environment.
fn not_met(peer: ProcessId, doing: &str, error: &io::Error) -> TransportError {
    let why = match error.kind() {
        _ if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {
            "its process has ended".to_owned()
        }
        io::ErrorKind::ConnectionRefused
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => error.to_string(),
        _ => return environment(format!("{doing} process {peer} over shared memory"), error),
    };
    TransportError::PeerGone { peer, why }
}

fn protocol(peer: ProcessId, why: String) -> TransportError {
    TransportError::Protocol { peer, why }
}
