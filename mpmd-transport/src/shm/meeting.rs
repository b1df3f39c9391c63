//! Connects two processes. The higher one connects to the lower one's socket. Both show that they
//! belong to the job, and exchange the memory of their doorbells and rings.

use std::io;
#[cfg(test)]
use std::os::fd::BorrowedFd;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{PidfdFlags, getuid, pidfd_open};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::address::{Address, VERSION};
use super::doorbell::Doorbell;
use super::loans::Returns;
use super::mapped::Mapped;
use super::peer::{Inbound, Outbound, Peer};
use super::ring::{Consumer, Ring};
use super::socket::{Listener, Packet, Socket, something_comes};
use super::{ShmConfig, environment};
use crate::deadline::after;
use crate::rendezvous::are_equal;
use crate::transport::TransportError;
use crate::wire::ProcessId;

#[cfg(test)]
mod fuzz;

const MAGIC: [u8; 8] = *b"mpmd-shm";
/// Limit on the connections that have not said hello yet. With more of them, the oldest is closed.
const MOST_SILENT: usize = 1024;
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

/// The first packet that each side sends. Holds the job's secret.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Hello {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) process: U32,
    pub(super) processes: U32,
    pub(super) epoch: U64,
    pub(super) token: [u8; 32],
}

/// The memory of this process's doorbell, which all peers map.
pub(super) struct OwnDoor {
    memory: Arc<Mapped>,
    pub(super) door: Doorbell,
}

impl OwnDoor {
    pub(super) fn new() -> io::Result<Self> {
        let memory = Arc::new(Mapped::new(Doorbell::BYTES)?);
        Ok(Self { door: door(&memory), memory })
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
    let deadline = after(Instant::now(), config.peer_timeout);
    let me = config.process.index();
    let mut peers: Vec<Option<Met>> = config.peers.iter().map(|_| None).collect();
    // Connects to all lower ones first: no process waits here for one that waits for others.
    let mut knocked = Vec::new();
    for (index, address) in config.peers.iter().enumerate().take(me) {
        let Some(address) = address else { continue };
        let peer = ProcessId(index as u32);
        let with = |error: io::Error| not_met(peer, "meeting", &error);
        let address: Address = address.parse().map_err(|why: String| protocol(peer, why))?;
        let socket = Socket::connect(&address.socket_name(), deadline).map_err(with)?;
        // Checked before the token is sent: another program may have taken the name.
        let user = socket.peer().map_err(with)?;
        if user.uid != getuid() {
            return Err(protocol(peer, format!("it belongs to user {}", user.uid.as_raw())));
        }
        socket
            .send_until(hello(config).as_bytes(), &[own.memory.as_fd()], deadline)
            .map_err(with)?;
        knocked.push((peer, socket));
    }
    let awaited = |peers: &[Option<Met>]| -> Vec<usize> {
        (me + 1..peers.len())
            .filter(|i| config.peers[*i].is_some() && peers[*i].is_none())
            .collect()
    };
    let with = |error: io::Error| {
        environment("waiting for the job's processes over shared memory".to_owned(), &error)
    };
    // Connections that have sent nothing yet. They may be strangers, and nothing waits for them.
    let mut silent: Vec<Socket> = Vec::new();
    let mut most_silent = MOST_SILENT;
    let mut refused: Option<io::Error> = None;
    loop {
        let is_refused = match accept_all(listener, &mut silent, &mut most_silent) {
            Ok(()) => false,
            Err(error) => {
                refused = Some(error);
                true
            }
        };
        for socket in std::mem::take(&mut silent) {
            match socket.receive() {
                Ok(None) => silent.push(socket),
                // Strangers are closed without an answer. A faulty process of the job is reported
                // as missing at the end.
                Ok(Some(packet)) => {
                    if let Some((index, peer)) =
                        welcome(socket, packet, own, config, &awaited(&peers), deadline)?
                    {
                        peers[index] = Some(peer);
                    }
                }
                Err(_) => {}
            }
        }
        let missing = awaited(&peers);
        if missing.is_empty() {
            break;
        }
        let (listening, until) = match is_refused {
            false => (Some(listener.as_fd()), deadline),
            true => (None, deadline.min(Instant::now() + ACCEPT_AGAIN)),
        };
        let fds: Vec<_> = listening.into_iter().chain(silent.iter().map(AsFd::as_fd)).collect();
        if !something_comes(&fds, until).map_err(with)? && Instant::now() >= deadline {
            let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
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
    drop(silent);
    for (id, socket) in knocked {
        let peer = answered(id, socket, config, deadline)?;
        peers[id.index()] = Some(peer);
    }
    Ok(peers)
}

/// Accepts all connections that wait. Those of other users are closed at once. If there are more
/// than `most` silent ones, the oldest is closed.
///
/// If the system refuses to accept, half of the silent ones are closed, and `most` is lowered to
/// the rest: a peer needs descriptors for more than its connection.
///
/// # Errors
///
/// If the system refuses and no silent connection is left to close.
fn accept_all(listener: &Listener, silent: &mut Vec<Socket>, most: &mut usize) -> io::Result<()> {
    loop {
        match listener.accept() {
            Ok(None) => return Ok(()),
            Ok(Some(socket)) if socket.peer().is_ok_and(|user| user.uid == getuid()) => {
                if silent.len() >= *most {
                    silent.remove(0);
                }
                silent.push(socket);
            }
            Ok(Some(_)) => {}
            Err(error) if silent.is_empty() => return Err(error),
            Err(_) => {
                silent.drain(..silent.len().div_ceil(2));
                *most = silent.len().max(1);
            }
        }
    }
}

/// Answers the hello packet of an awaited process. Returns (its index, its connection), or `None`
/// for all other senders.
fn welcome(
    socket: Socket,
    packet: Packet,
    own: &OwnDoor,
    config: &ShmConfig,
    awaited: &[usize],
    deadline: Instant,
) -> Result<Option<(usize, Met)>, TransportError> {
    let Some((index, door)) = check(packet, config, 1) else { return Ok(None) };
    if !awaited.contains(&index) {
        return Ok(None);
    }
    let with = |error: io::Error| not_met(ProcessId(index as u32), "sharing memory with", &error);
    let memory =
        Arc::new(Mapped::new(CAPACITIES.iter().copied().map(Ring::bytes).sum()).map_err(with)?);
    let give = [own.memory.as_fd(), memory.as_fd()];
    socket.send_until(hello(config).as_bytes(), &give, deadline).map_err(with)?;
    let door = door.into_iter().next().ok_or_else(|| with(io::Error::other("it gave no door")))?;
    let peer = pair(config.process, socket, door, &memory, true).map_err(with)?;
    Ok(Some((index, peer)))
}

/// Waits for the answer of a lower process that this one connected to. Returns the connection.
fn answered(
    id: ProcessId,
    socket: Socket,
    config: &ShmConfig,
    deadline: Instant,
) -> Result<Met, TransportError> {
    let with = |error: io::Error| not_met(id, "sharing memory with", &error);
    let packet = match socket.receive_until(deadline) {
        Ok(packet) => packet,
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            let what = format!("process {id} to share memory");
            return Err(TransportError::TimedOut {
                event: what,
                peer_timeout: config.peer_timeout,
            });
        }
        Err(error) => return Err(TransportError::PeerGone { peer: id, why: error.to_string() }),
    };
    let given = check(packet, config, 2).filter(|(index, _)| *index == id.index());
    let Some((_, given)) = given else {
        return Err(protocol(id, "it is of another job, epoch or build".to_owned()));
    };
    let Ok([door, rings]) = <[OwnedFd; 2]>::try_from(given) else {
        return Err(protocol(id, "it gave no memory".to_owned()));
    };
    let bytes = CAPACITIES.iter().copied().map(Ring::bytes).sum();
    let memory = Arc::new(Mapped::of(rings, bytes).map_err(with)?);
    pair(config.process, socket, door, &memory, false).map_err(with)
}

/// Checks a hello packet. Returns (the sender's process number, its descriptors). Returns `None`
/// for a stranger, or if there are not exactly `descriptors` of them.
fn check(packet: Packet, config: &ShmConfig, descriptors: usize) -> Option<(usize, Vec<OwnedFd>)> {
    let hello = Hello::ref_from_bytes(&packet.bytes).ok()?;
    let Hello { magic, version, process, processes, epoch, token } = hello;
    let is_ours = *magic == MAGIC
        && are_equal(&config.token, token)
        && version.get() == VERSION
        && processes.get() as usize == config.peers.len()
        && epoch.get() == config.epoch
        && packet.descriptors.len() == descriptors;
    is_ours.then(|| (process.get() as usize, packet.descriptors))
}

pub(super) fn hello(config: &ShmConfig) -> Hello {
    Hello {
        magic: MAGIC,
        version: VERSION.into(),
        process: config.process.0.into(),
        processes: (config.peers.len() as u32).into(),
        epoch: config.epoch.into(),
        token: config.token,
    }
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
