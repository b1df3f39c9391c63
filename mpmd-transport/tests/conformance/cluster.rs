//! A job of n processes over one kind of transport, each with a recorder.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::{Header, MessageKind, ProcessId};
use mpmd_transport::inproc::{Fabric, FabricFaults};
use mpmd_transport::shm::{self, Shm, ShmConfig};
use mpmd_transport::tcp::{PeerListener, Tcp, TcpConfig};
#[cfg(feature = "ucx")]
use mpmd_transport::ucx::{OpenedUcx, Spin, Ucx, UcxConfig};
use mpmd_transport::{Ticket, Transport, TransportError};

use crate::recorder::{Manner, Recorder};

pub(crate) const TOKEN: [u8; 32] = [42; 32];
pub(crate) const EPOCH: u64 = 3;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Inproc,
    /// The transport within one OS process, with zero-copy transfer between all its processes.
    InprocLends,
    Shm,
    Tcp,
    #[cfg(feature = "ucx")]
    Ucx,
}

impl Kind {
    /// Returns true if data is lent: it arrives as its sender's memory, which outlives the sender.
    pub(crate) fn lends(self) -> bool {
        matches!(self, Self::InprocLends | Self::Shm)
    }
}

pub(crate) struct Cluster {
    fabric: Option<Fabric>,
    transports: Vec<Option<Arc<dyn Transport>>>,
    pub(crate) recorders: Vec<Arc<Recorder>>,
    /// The tickets posted so far, by process.
    posted: Vec<Vec<Ticket>>,
    next: u64,
}

impl Cluster {
    /// Creates a cluster of `processes` processes that are connected and started.
    pub(crate) fn new(kind: Kind, processes: usize, manner: Manner) -> Self {
        let cluster = Self::not_started(kind, processes, manner);
        for process in 0..processes {
            cluster.start(process);
        }
        cluster
    }

    pub(crate) fn not_started(kind: Kind, processes: usize, manner: Manner) -> Self {
        match kind {
            Kind::Inproc => Self::inproc(processes, FabricFaults::default(), manner),
            Kind::InprocLends => Self::inproc(processes, lending(processes), manner),
            _ => Self::of(None, connected(kind, processes), manner),
        }
    }

    pub(crate) fn inproc(processes: usize, faults: FabricFaults, manner: Manner) -> Self {
        let fabric = Fabric::new(processes, faults);
        let endpoints: Vec<_> = (0..processes)
            .map(|p| fabric.endpoint(id(p)) as Arc<dyn Transport>)
            .collect();
        Self::of(Some(fabric), endpoints, manner)
    }

    pub(crate) fn of(
        fabric: Option<Fabric>,
        transports: impl IntoIterator<Item = Arc<dyn Transport>>,
        manner: Manner,
    ) -> Self {
        let transports: Vec<_> = transports.into_iter().map(Some).collect();
        let recorders = transports.iter().map(|_| Recorder::new(manner)).collect();
        let posted = vec![Vec::new(); transports.len()];
        Self {
            fabric,
            transports,
            recorders,
            posted,
            next: 1,
        }
    }

    pub(crate) fn start(&self, process: usize) {
        self.transport(process)
            .start(self.recorders[process].clone());
    }

    pub(crate) fn transport(&self, process: usize) -> &Arc<dyn Transport> {
        self.transports[process]
            .as_ref()
            .expect("the process is alive")
    }

    /// Posts a message of `bytes` bytes, with the pattern that belongs to it. Returns its ticket.
    pub(crate) fn post(
        &mut self,
        from: usize,
        to: usize,
        kind: MessageKind,
        bytes: usize,
    ) -> Ticket {
        let ticket = self.ticket(from);
        let header = Header {
            op: ticket.0,
            bytes: bytes as u64,
            ..Header::new(kind)
        };
        let payload = header
            .kind
            .carries_payload()
            .then(|| SharedBuffer::from(pattern(id(from), &header)));
        self.transport(from).post(id(to), header, payload, ticket);
        ticket
    }

    /// Posts a message with this header and payload. Returns its ticket.
    pub(crate) fn post_payload(
        &mut self,
        from: usize,
        to: usize,
        header: Header,
        payload: SharedBuffer,
    ) -> Ticket {
        let ticket = self.ticket(from);
        self.transport(from)
            .post(id(to), header, Some(payload), ticket);
        ticket
    }

    pub(crate) fn ticket(&mut self, from: usize) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.posted[from].push(ticket);
        ticket
    }

    /// Makes a process vanish without a goodbye.
    pub(crate) fn kill(&mut self, process: usize) {
        if let Some(fabric) = &self.fabric {
            fabric.kill(id(process));
        }
        self.transports[process] = None;
    }

    /// Shuts down all living processes at the same time. Asserts that every ticket has ended once,
    /// and that no peer went down twice.
    pub(crate) fn finish(mut self) {
        self.shut_down();
        for (process, (posted, recorder)) in self.posted.iter().zip(&self.recorders).enumerate() {
            // A vanished process may end its last tickets a little later.
            recorder.wait("the end of all tickets", |seen| {
                (seen.done.len() >= posted.len()).then_some(())
            });
            recorder.read(|seen| {
                for ticket in posted {
                    assert_eq!(
                        seen.done[ticket].len(),
                        1,
                        "{ticket:?} of process {process}: {:?}",
                        seen.done
                    );
                }
                assert_eq!(
                    seen.done.len(),
                    posted.len(),
                    "process {process} heard of tickets it has not"
                );
                for peer in 0..self.recorders.len() {
                    let downs = seen
                        .down
                        .iter()
                        .filter(|(down, _)| *down == id(peer))
                        .count();
                    assert!(downs <= 1, "process {process} lost {peer} {downs} times");
                }
            });
        }
    }

    /// Shuts down all living processes, as `finish` does, and asserts that every message was sent.
    pub(crate) fn finish_fine(self) {
        let recorders = self.recorders.clone();
        self.finish();
        for recorder in recorders {
            recorder.read(|seen| {
                assert!(
                    seen.done.values().flatten().all(Result::is_ok),
                    "{:?}",
                    seen.done
                );
                assert!(seen.lost.is_empty(), "{:?}", seen.lost);
            });
        }
    }

    fn shut_down(&mut self) {
        let alive: Vec<_> = self
            .transports
            .iter_mut()
            .filter_map(Option::take)
            .collect();
        std::thread::scope(|scope| {
            for transport in &alive {
                scope.spawn(move || transport.shutdown(Duration::from_secs(10)));
            }
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Also if a check failed: nothing is left running.
        self.shut_down();
    }
}

/// Returns a configuration without faults, and with all processes on one host.
fn lending(processes: usize) -> FabricFaults {
    FabricFaults {
        hosts: vec![0; processes],
        ..FabricFaults::default()
    }
}

/// Returns `processes` connected transports of a kind, not started.
pub(crate) fn connected(kind: Kind, processes: usize) -> Vec<Arc<dyn Transport>> {
    match kind {
        Kind::Inproc | Kind::InprocLends => {
            let faults = if kind.lends() {
                lending(processes)
            } else {
                FabricFaults::default()
            };
            let fabric = Fabric::new(processes, faults);
            (0..processes)
                .map(|process| fabric.endpoint(id(process)) as _)
                .collect()
        }
        Kind::Shm => connect_shm(processes)
            .into_iter()
            .map(|shm| shm as _)
            .collect(),
        Kind::Tcp => connect(processes).into_iter().map(|tcp| tcp as _).collect(),
        #[cfg(feature = "ucx")]
        Kind::Ucx => connect_ucx(processes)
            .into_iter()
            .map(|ucx| ucx as _)
            .collect(),
    }
}

/// Returns `processes` connected transports over UCX, not started.
#[cfg(feature = "ucx")]
fn connect_ucx(processes: usize) -> Vec<Arc<Ucx>> {
    let opened: Vec<_> = (0..processes)
        .map(|_| OpenedUcx::open(processes).unwrap())
        .collect();
    let peers: Vec<_> = opened
        .iter()
        .map(|opened| opened.address().to_owned())
        .collect();
    let connecting = opened.into_iter().enumerate().map(|(process, opened)| {
        let config = UcxConfig {
            process: id(process),
            peers: peers.clone(),
            token: TOKEN,
            epoch: EPOCH,
            peer_timeout: Duration::from_secs(20),
            pool: Pool::new("unexpected", None),
            spin: Spin::Auto,
            neighbours: processes,
        };
        std::thread::spawn(move || opened.connect(config))
    });
    let connecting: Vec<_> = connecting.collect();
    connecting
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect()
}

/// Returns `processes` connected transports over shared memory, not started.
pub(crate) fn connect_shm(processes: usize) -> Vec<Arc<Shm>> {
    let opened: Vec<_> = (0..processes)
        .map(|_| shm::OpenedShm::open().unwrap())
        .collect();
    let peers: Vec<_> = opened.iter().map(|opened| Some(opened.address())).collect();
    let connecting = opened.into_iter().enumerate().map(|(process, opened)| {
        let config = ShmConfig {
            process: id(process),
            peers: peers.clone(),
            token: TOKEN,
            epoch: EPOCH,
            peer_timeout: Duration::from_secs(20),
        };
        std::thread::spawn(move || opened.connect(&config))
    });
    let connecting: Vec<_> = connecting.collect();
    connecting
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect()
}

/// Returns `processes` connected TCP transports, not started.
pub(crate) fn connect(processes: usize) -> Vec<Arc<Tcp>> {
    let listeners: Vec<_> = (0..processes).map(|_| listen()).collect();
    let peers: Vec<_> = listeners.iter().map(PeerListener::address).collect();
    let connecting = listeners
        .into_iter()
        .enumerate()
        .map(|(process, listener)| {
            let config = config(process, peers.clone());
            std::thread::spawn(move || listener.connect(config))
        });
    let connecting: Vec<_> = connecting.collect();
    connecting
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect()
}

pub(crate) fn listen() -> PeerListener {
    PeerListener::bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap()
}

pub(crate) fn config(process: usize, peers: Vec<std::net::SocketAddr>) -> TcpConfig {
    TcpConfig {
        process: id(process),
        peers,
        token: TOKEN,
        epoch: EPOCH,
        peer_timeout: Duration::from_secs(20),
        pool: Pool::new("control", None),
    }
}

pub(crate) fn id(process: usize) -> ProcessId {
    ProcessId(u32::try_from(process).unwrap())
}

pub(crate) fn is_gone(error: &TransportError, peer: usize) -> bool {
    matches!(error, TransportError::PeerGone { peer: gone, .. } if *gone == id(peer))
}

/// Returns a payload that differs from that of every other message, and in each of its parts.
pub(crate) fn pattern(from: ProcessId, header: &Header) -> Vec<u8> {
    let bytes = usize::try_from(header.payload_bytes()).unwrap();
    let mut pattern: Vec<u8> = (0..bytes.div_ceil(8) as u64)
        .flat_map(|at| word(from, header, at).to_le_bytes())
        .collect();
    pattern.truncate(bytes);
    pattern
}

pub(crate) fn pattern_is_intact(from: ProcessId, header: &Header, bytes: &[u8]) -> bool {
    let words = bytes.chunks(8).zip(0..);
    words
        .into_iter()
        .all(|(chunk, at)| chunk == &word(from, header, at).to_le_bytes()[..chunk.len()])
}

fn word(from: ProcessId, header: &Header, at: u64) -> u64 {
    let seed = (u64::from(from.0) << 48) ^ (header.op << 24) ^ at;
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(29)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
}
