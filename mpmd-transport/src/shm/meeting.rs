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

use super::address::{ShmAddress, ShmAddressError, VERSION};
use super::doorbell::Doorbell;
use super::peer::{Inbound, Outbound, ShmPeer};
use super::returns::ReturnPath;
use super::ring::{Consumer, Ring};
use super::shared_mapping::SharedMapping;
use super::socket::{LocalListener, Packet, Socket, something_comes};
use super::{ShmConfig, environment};
use crate::party::{self, Party};
use crate::transport::TransportError;
use mpmd_base::deadline::after;
use mpmd_handshake::Handshake;
use mpmd_handshake::token::random_bytes;
use mpmd_proto::wire::ProcessId;

const MAGIC: [u8; 8] = *b"MPMDSHM\0";
/// Limit on the number of connections with an unfinished handshake. Beyond it, the oldest is
/// closed.
const MOST_STRANGERS: usize = 1024;
/// Pause after the system has refused to accept a connection, before the next attempt.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);

/// Capacity in bytes of a ring of messages. `RETURNS` is the capacity of a ring of returned loans.
const MESSAGES: usize = 64 << 10;
const RETURNS: usize = 16 << 10;
/// Capacities in bytes of the four rings of two processes. First the messages of the process with
/// the lower id, then those of the other; then the returned loans of both in the same order.
pub(super) const CAPACITIES: [usize; 4] = [MESSAGES, MESSAGES, RETURNS, RETURNS];

/// A peer that this process has connected to.
pub(super) struct MetPeer {
    pub(super) peer: ShmPeer,
    /// The receiving half of the connection.
    pub(super) inbound: Inbound,
    /// The ring in which the peer reports returned loans.
    pub(super) returns: Consumer,
}

/// This process's doorbell and its memory, which all peers map.
pub(super) struct OwnDoor {
    memory: Arc<SharedMapping>,
    pub(super) door: Doorbell,
}

impl OwnDoor {
    pub(super) fn new() -> io::Result<Self> {
        let memory = Arc::new(SharedMapping::new(Doorbell::BYTES)?);
        Ok(Self {
            door: door(&memory),
            memory,
        })
    }

    /// Returns the descriptor by which a peer maps the doorbell's memory.
    #[cfg(test)]
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Connects to all peers in the configuration and returns them by process. Blocks until all are
/// connected; fails after the configuration's `peer_timeout`.
pub(super) fn meet(
    listener: &LocalListener,
    own: &OwnDoor,
    config: &ShmConfig,
) -> Result<Vec<Option<MetPeer>>, TransportError> {
    let meeting = ShmMeeting {
        own,
        config,
        party: party(config),
        deadline: after(Instant::now(), config.peer_timeout),
    };
    let mut state = MeetingState {
        peers: config.peers.iter().map(|_| None).collect(),
        called: meeting.call_lower()?,
        strangers: Vec::new(),
        most_strangers: MOST_STRANGERS,
        failed: Vec::new(),
    };
    let mut refused: Option<io::Error> = None;

    loop {
        let accepted = meeting.accept_all(listener, &mut state);
        let is_refused = accepted.is_err();
        if let Err(error) = accepted {
            refused = Some(error);
        }
        meeting.hear_all(&mut state);

        let missing = meeting.missing(&state);
        if missing.is_empty() {
            return state.first_failure().map_or(Ok(state.peers), Err);
        }

        // After a refusal the listener would wake this at once, again and again.
        let (listening, until) = match is_refused {
            false => (Some(listener.as_fd()), meeting.deadline),
            true => (None, meeting.deadline.min(Instant::now() + ACCEPT_AGAIN)),
        };
        let called = state.called.iter().map(|called| &called.handshake);
        let pending = state.strangers.iter().chain(called);
        let fds: Vec<_> = listening
            .into_iter()
            .chain(pending.map(|pending| pending.socket.as_fd()))
            .collect();
        let comes = something_comes(&fds, until).map_err(|error| {
            environment(
                "waiting for the job's processes over shared memory".to_owned(),
                &error,
            )
        })?;

        if !comes && Instant::now() >= meeting.deadline {
            if let Some(error) = state.first_failure() {
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

/// Returns this process's identity in the handshakes of shared memory connections.
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

/// The progress of connecting to all peers.
struct MeetingState {
    /// The connected peers, by process.
    peers: Vec<Option<MetPeer>>,
    /// Processes with lower ids that this process has called and that have not completed the
    /// handshake.
    called: Vec<CalledPeer>,
    /// Callers that have not proved yet that they know the job's token.
    strangers: Vec<PendingHandshake>,
    /// Limit on the length of `strangers`.
    most_strangers: usize,
    /// Peers that are gone or do not belong to this job. Connecting to the others goes on, so that
    /// no peer waits for the rest of a handshake without learning why it ended.
    failed: Vec<FailedPeer>,
}

impl MeetingState {
    /// Returns the error of the first peer in `failed`, and removes it.
    fn first_failure(&mut self) -> Option<TransportError> {
        let failed = std::mem::take(&mut self.failed);
        failed.into_iter().next().map(|failed| failed.error)
    }
}

/// A process with a lower id that this process has called.
struct CalledPeer {
    peer: ProcessId,
    handshake: PendingHandshake,
}

/// A peer to which this process cannot connect.
struct FailedPeer {
    peer: ProcessId,
    error: TransportError,
}

/// A connection whose handshake has not finished, seen from this process.
struct PendingHandshake {
    socket: Socket,
    handshake: Handshake,
}

/// The result of reading from a connection during its handshake.
enum HandshakeStep {
    /// The handshake has not finished.
    Nothing(PendingHandshake),
    Met(ProcessId, Box<MetPeer>),
    /// The connection was closed: the caller was a stranger, or was connected already.
    End,
}

/// The values that do not change while this process connects to its peers.
struct ShmMeeting<'a> {
    own: &'a OwnDoor,
    config: &'a ShmConfig,
    party: Party,
    deadline: Instant,
}

impl ShmMeeting<'_> {
    /// Connects to all processes with lower ids and sends each the first handshake message.
    fn call_lower(&self) -> Result<Vec<CalledPeer>, TransportError> {
        let lower = (0..)
            .map(ProcessId)
            .zip(&self.config.peers)
            .take(self.config.process.index());
        let called = lower.filter_map(|(peer, address)| Some((peer, address.as_ref()?)));
        called
            .map(|(peer, address)| {
                let handshake = self.call(peer, address)?;
                Ok(CalledPeer { peer, handshake })
            })
            .collect()
    }

    /// Returns the processes that are not connected yet, as text.
    fn missing(&self, state: &MeetingState) -> Vec<String> {
        let is_missing = |index: &usize| {
            *index != self.config.process.index()
                && self.config.peers[*index].is_some()
                && state.peers[*index].is_none()
                && state
                    .failed
                    .iter()
                    .all(|failed| failed.peer.index() != *index)
        };
        (0..state.peers.len())
            .filter(is_missing)
            .map(|index| index.to_string())
            .collect()
    }

    /// Connects to process `peer` and sends the first handshake message.
    fn call(&self, peer: ProcessId, address: &str) -> Result<PendingHandshake, TransportError> {
        let with = |error: io::Error| not_met(peer, "meeting", &error);
        let address: ShmAddress = address
            .parse()
            .map_err(|error: ShmAddressError| protocol(peer, error.to_string()))?;

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
        Ok(PendingHandshake { socket, handshake })
    }

    /// Accepts all waiting connections. Closes connections of other users at once. If more than
    /// `most_strangers` callers have not proved themselves, closes the oldest.
    ///
    /// If the system refuses to accept, closes half of these callers and lowers `most_strangers` to
    /// the number that remains. A peer needs more descriptors than that of its connection.
    ///
    /// # Errors
    ///
    /// If the system refuses and no such caller is left to close, or if it gives no random numbers.
    fn accept_all(&self, listener: &LocalListener, state: &mut MeetingState) -> io::Result<()> {
        let MeetingState {
            strangers,
            most_strangers,
            ..
        } = state;
        loop {
            match listener.accept() {
                Ok(None) => return Ok(()),
                Ok(Some(socket)) if socket.peer().is_ok_and(|user| user.uid == getuid()) => {
                    if strangers.len() >= *most_strangers {
                        strangers.remove(0);
                    }
                    let handshake = self.party.answer(random_bytes()?);
                    strangers.push(PendingHandshake { socket, handshake });
                }
                Ok(Some(_)) => {}
                Err(error) if strangers.is_empty() => return Err(error),
                Err(_) => {
                    strangers.drain(..strangers.len().div_ceil(2));
                    *most_strangers = strangers.len().max(1);
                }
            }
        }
    }

    /// Reads the packets that all callers and all called processes have sent, and continues their
    /// handshakes.
    fn hear_all(&self, state: &mut MeetingState) {
        for end in std::mem::take(&mut state.strangers) {
            match self.hear_caller(end, &state.peers) {
                Ok(HandshakeStep::Nothing(end)) => state.strangers.push(end),
                Ok(HandshakeStep::Met(peer, met)) => state.peers[peer.index()] = Some(*met),
                Ok(HandshakeStep::End) => {}
                Err(failed) => state.failed.push(failed),
            }
        }

        for CalledPeer { peer, handshake } in std::mem::take(&mut state.called) {
            match self.hear_answerer(peer, handshake) {
                Ok(HandshakeStep::Nothing(handshake)) => {
                    state.called.push(CalledPeer { peer, handshake })
                }
                Ok(HandshakeStep::Met(peer, met)) => state.peers[peer.index()] = Some(*met),
                Ok(HandshakeStep::End) => {}
                Err(error) => state.failed.push(FailedPeer { peer, error }),
            }
        }
    }

    /// Reads a packet from a caller, if one has arrived, and replies. Closes the connection if the
    /// caller is a stranger. Once it has proved itself, connects it, unless `peers` already
    /// contains its process. An error names the process at fault.
    fn hear_caller(
        &self,
        mut end: PendingHandshake,
        peers: &[Option<MetPeer>],
    ) -> Result<HandshakeStep, FailedPeer> {
        let packet = match end.socket.receive() {
            Ok(None) => return Ok(HandshakeStep::Nothing(end)),
            Ok(Some(packet)) => packet,
            Err(_) => return Ok(HandshakeStep::End),
        };

        let Ok(reply) = end.handshake.take_packet(&packet.bytes) else {
            // One of another version is told. The packet still arrives after the end.
            let last = end.handshake.say();
            if !last.is_empty() {
                let _ = end.socket.send(&last, &[]);
            }
            return Ok(HandshakeStep::End);
        };

        let Some(facts) = end.handshake.proved_facts() else {
            let is_sent = end.socket.send(&reply, &[]);
            return Ok(if let Ok(true) = is_sent {
                HandshakeStep::Nothing(end)
            } else {
                HandshakeStep::End
            });
        };

        let peer = party::process(facts);
        self.party
            .check_caller(facts, 1)
            .map_err(|error| FailedPeer { peer, error })?;
        if self.config.peers[peer.index()].is_none() || peers[peer.index()].is_some() {
            return Ok(HandshakeStep::End);
        }
        self.welcome(peer, end, packet, &reply)
            .map_err(|error| FailedPeer { peer, error })
    }

    /// Sends this process's descriptors to a caller that has proved itself, and takes the caller's.
    fn welcome(
        &self,
        peer: ProcessId,
        end: PendingHandshake,
        packet: Packet,
        reply: &[u8],
    ) -> Result<HandshakeStep, TransportError> {
        let with = |error: io::Error| not_met(peer, "sharing memory with", &error);
        let [door] = descriptors(peer, packet)?;
        let bytes = CAPACITIES.iter().copied().map(Ring::bytes).sum();
        let memory = Arc::new(SharedMapping::new(bytes).map_err(with)?);

        let give = [self.own.memory.as_fd(), memory.as_fd()];
        end.socket
            .send_until(reply, &give, self.deadline)
            .map_err(with)?;

        let met = pair(self.config.process, end.socket, door, &memory, true).map_err(with)?;
        Ok(HandshakeStep::Met(peer, Box::new(met)))
    }

    /// Reads a packet from `peer`, which this process has called, if one has arrived. Replies to
    /// the peer's answer with this process's proof. Takes the descriptors that the peer then sends.
    fn hear_answerer(
        &self,
        peer: ProcessId,
        mut end: PendingHandshake,
    ) -> Result<HandshakeStep, TransportError> {
        let with = |error: io::Error| not_met(peer, "sharing memory with", &error);
        let packet = match end.socket.receive() {
            Ok(None) => return Ok(HandshakeStep::Nothing(end)),
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
                .map(|()| HandshakeStep::Nothing(end));
        }

        let [door, rings] = descriptors(peer, packet)?;
        let bytes = CAPACITIES.iter().copied().map(Ring::bytes).sum();
        let memory = Arc::new(SharedMapping::of(rings, bytes).map_err(with)?);
        let met = pair(self.config.process, end.socket, door, &memory, false).map_err(with)?;
        Ok(HandshakeStep::Met(peer, Box::new(met)))
    }
}

/// Returns the `N` descriptors of a packet from `peer`. Fails if it has another number of them.
fn descriptors<const N: usize>(
    peer: ProcessId,
    packet: Packet,
) -> Result<[OwnedFd; N], TransportError> {
    let given = packet.descriptors.len();
    let wrong = |_| protocol(peer, format!("it gave {given} descriptors instead of {N}"));
    packet.descriptors.try_into().map_err(wrong)
}

/// Builds the connection to a peer from its doorbell, its socket, and the rings of the two
/// processes.
fn pair(
    own: ProcessId,
    socket: Socket,
    door_of_peer: OwnedFd,
    rings: &Arc<SharedMapping>,
    is_lower: bool,
) -> io::Result<MetPeer> {
    let user = socket.peer()?;
    let exit = pidfd_open(user.pid, PidfdFlags::empty())?;
    let door = door(&Arc::new(SharedMapping::of(door_of_peer, Doorbell::BYTES)?));

    let mut offset = 0;
    let [from_lower, from_higher, back_from_lower, back_from_higher] = CAPACITIES.map(|capacity| {
        let first = rings.at(offset, Ring::bytes(capacity));
        offset += Ring::bytes(capacity);
        // SAFETY: `SharedMapping::at` has checked that the bytes are within the mapping, which is
        // for reading and writing and which the ring keeps. Both processes access them only through
        // rings, which use atomic words of 8 bytes. Each ring has bytes of its own, at a multiple
        // of 64.
        unsafe { Ring::at(first, capacity, rings.clone()) }
    });

    let (here, there, back_here, back_there) = if is_lower {
        (from_lower, from_higher, back_from_lower, back_from_higher)
    } else {
        (from_higher, from_lower, back_from_higher, back_from_lower)
    };

    let peer = ShmPeer {
        outbound: parking_lot::Mutex::new(Outbound::new(here.producer())),
        returns: ReturnPath::new(back_here.producer(), door.clone()),
        door,
        socket,
        exit,
        own,
        is_waiting: false.into(),
        shares_devices: false.into(),
        gets_payloads: false.into(),
    };

    Ok(MetPeer {
        peer,
        inbound: Inbound::new(there.consumer()),
        returns: back_there.consumer(),
    })
}

/// Returns the doorbell that is stored in `memory`.
fn door(memory: &Arc<SharedMapping>) -> Doorbell {
    let first = memory.at(0, Doorbell::BYTES);
    // SAFETY: `SharedMapping::at` has checked that the bytes are within the mapping, which is for
    // reading and writing and which the doorbell keeps. All processes that have it access it only
    // through doorbells, which use atomic words of 4 bytes.
    unsafe { Doorbell::at(first, memory.clone()) }
}

/// Returns the error for a peer that could not be connected: [`TransportError::PeerGone`] if the
/// peer is gone, else a failure of this process's environment.
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
