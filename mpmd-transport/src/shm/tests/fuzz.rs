//! Fuzzes the rings and packets of a peer. Its connection ends once. Loans and pending memory end
//! with it.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mpmd_fuzz::{Rng, integer};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use zerocopy::IntoBytes;

use crate::shm::doorbell::Doorbell;
use mpmd_memory::{Arena, DeviceMemory, DeviceSharing, SharedBuffer};

use crate::shm::meeting::MetPeer;
use crate::shm::note::{CLOSED, LAST, PASSED_ON, RETURNED};
use crate::shm::peer::{Inbound, Outbound, ShmPeer};
use crate::shm::record::{
    BROKEN, COPY, GOODBYE, INLINE, LANDED, LATER, LENT, LoanRecord, RETIRED, TO_OWNER, ToOwner,
};
use crate::shm::returns::ReturnPath;
use crate::shm::ring::{Producer, Ring};
use crate::shm::socket::Socket;
use crate::shm::state::ShmState;
use crate::transport::{Handler, Payload, Ticket, TransportError};
use mpmd_proto::wire::{Header, MessageKind, ProcessId};

/// Number of faulty peers of one process under test, each used for one case.
const PEERS: usize = 32;

/// Capacity of each ring in bytes.
const RING: usize = 16 << 10;

/// The largest payload that is fetched, in bytes.
const MOST: u64 = 1 << 16;

/// The faulty peer's end of a connection: rings and a socket.
struct Liar {
    rings: [Ring; 4],
    messages: Producer,
    returns: Producer,
    socket: Socket,
}

/// A handler that panics at a second end of a peer or ticket, and reads every payload.
#[derive(Default)]
struct Ear {
    down: Mutex<HashSet<u32>>,
    done: Mutex<HashSet<Ticket>>,
    held: Mutex<Vec<SharedBuffer>>,
}

impl Handler for Ear {
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload) {
        assert!(
            !self.down.lock().contains(&from.0),
            "no message after peer_down"
        );
        let announced = header.payload_bytes();
        match payload {
            Payload::Empty => assert_eq!(announced, 0),
            Payload::Inline(bytes) => assert_eq!(announced, bytes.len() as u64),
            Payload::Lent(bytes) => {
                assert_eq!(announced, bytes.len() as u64);
                if bytes.device().is_none() {
                    let _ = std::hint::black_box((bytes.first().copied(), bytes.last().copied()));
                }
                self.held.lock().push(bytes);
            }
            Payload::Waiting(fetch) => {
                assert_eq!(announced, fetch.bytes());
                if announced <= MOST {
                    fetch.fetch(vec![0; announced as usize].into(), Box::new(drop));
                }
            }
        }
    }

    fn done(&self, ticket: Ticket, _: Result<(), TransportError>) {
        assert!(self.done.lock().insert(ticket), "a ticket ends once");
    }

    fn peer_down(&self, peer: ProcessId, _: TransportError) {
        assert!(self.down.lock().insert(peer.0), "a peer goes once");
    }
}

/// Devices that open memory named `good`.
struct Devices;

struct Memory(usize);

impl DeviceSharing for Devices {
    fn samples(&self) -> io::Result<Vec<Vec<u8>>> {
        Ok(vec![b"sample".to_vec()])
    }

    fn try_sample(&self, sample: &[u8]) -> io::Result<()> {
        if sample == b"sample" {
            Ok(())
        } else {
            Err(io::Error::other("it is none"))
        }
    }

    fn open(&self, words: &[u8], bytes: usize) -> io::Result<Box<dyn DeviceMemory>> {
        if words != b"good" || bytes > 4096 {
            return Err(io::Error::other("there is no such memory"));
        }
        Ok(Box::new(Memory(bytes)))
    }
}

impl DeviceMemory for Memory {
    fn address(&self) -> u64 {
        1 << 40
    }

    fn bytes(&self) -> usize {
        self.0
    }

    fn device(&self) -> u32 {
        0
    }
}

/// A process and its faulty peers.
struct Scene {
    shared: Arc<ShmState>,
    ear: Arc<Ear>,
    devices: Arc<Devices>,
    liars: Vec<Liar>,
}

impl Scene {
    fn new(exit: &OwnedFd) -> Self {
        let arena = Arena::shared().unwrap();
        let (mut peers, mut liars) = (Vec::new(), Vec::new());
        for _ in 0..PEERS {
            let rings: [Ring; 4] = std::array::from_fn(|_| Ring::alone(RING));
            let [here, there, back_here, back_there] = &rings;
            let [socket, far] = Socket::pair().unwrap();
            let door = Doorbell::alone();
            let peer = ShmPeer {
                outbound: Mutex::new(Outbound::new(here.producer())),
                returns: ReturnPath::new(back_here.producer(), door.clone()),
                door,
                socket,
                exit: exit.try_clone().unwrap(),
                own: ProcessId(PEERS as u32),
                is_waiting: false.into(),
                shares_devices: false.into(),
                gets_payloads: false.into(),
            };
            peers.push(Some(MetPeer {
                peer,
                inbound: Inbound::new(there.consumer()),
                returns: back_there.consumer(),
            }));
            let (messages, returns) = (there.producer(), back_there.producer());
            liars.push(Liar {
                rings,
                messages,
                returns,
                socket: far,
            });
        }
        peers.push(None);
        let shared = ShmState::new(ProcessId(PEERS as u32), peers, Doorbell::alone(), arena);
        let (ear, devices) = (Arc::<Ear>::default(), Arc::new(Devices));
        shared.start(ear.clone());
        Self {
            shared,
            ear,
            devices,
            liars,
        }
    }

    fn has_ended(&self, index: usize) -> bool {
        self.ear.down.lock().contains(&(index as u32))
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // A peer leaks its open loans when it is dropped, and a million of them would fill the
        // memory.
        for process in 0..PEERS as u32 {
            drop(self.shared.ledger.lock().note_exit(ProcessId(process)));
        }
    }
}

/// Returns files for a peer to give as segments, valid ones and faulty ones: (file, length in
/// bytes).
fn files() -> Vec<(OwnedFd, u64)> {
    let file = |bytes, sealed| {
        let file = memfd_create("lie", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, bytes).unwrap();
        if sealed {
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        }
        (file, bytes)
    };
    vec![
        file(4096, true),
        file(8192, true),
        file(4096, false),
        file(0, true),
        file(1 << 40, true),
    ]
}

fn number(rng: &mut Rng) -> u64 {
    if rng.u8(..4) == 0 {
        integer(rng)
    } else {
        [0, 1, 10, 4095, 4096, 8192][rng.usize(..6)]
    }
}

fn segment(rng: &mut Rng) -> u32 {
    if rng.u8(..16) == 0 {
        integer(rng) as u32
    } else {
        rng.u32(..4)
    }
}

fn header(rng: &mut Rng, bytes: u64) -> Header {
    use MessageKind::{Answer, AskTaken, Batch, Credit, Data, Eager, Grant, Probe, Records};
    let kinds = [
        Data, Data, Eager, Grant, Credit, AskTaken, Probe, Answer, Records, Batch,
    ];
    let kind = kinds[rng.usize(..kinds.len())];
    Header {
        bytes,
        op: rng.u64(..9),
        piece: number(rng),
        count: number(rng),
        ..Header::new(kind)
    }
}

impl Liar {
    /// Says something as process `own`.
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn say(&mut self, rng: &mut Rng, files: &[(OwnedFd, u64)], own: u32) {
        match rng.u8(..17) {
            0 | 1 => {
                let (file, bytes) = &files[if rng.bool() {
                    0
                } else {
                    rng.usize(..files.len())
                }];
                let bytes = if rng.u8(..8) == 0 {
                    number(rng)
                } else {
                    *bytes
                };
                self.give(
                    b"GIVE",
                    segment(rng),
                    bytes,
                    &[],
                    &vec![file.as_fd(); rng.usize(1..3)],
                );
            }
            2 | 3 => {
                let owner = if rng.u8(..4) == 0 {
                    integer(rng) as u32
                } else {
                    rng.u32(..20)
                }
                .to_le_bytes();
                let words: &[u8] = if rng.u8(..4) == 0 {
                    &[7; 97][..rng.usize(..98)]
                } else {
                    b"good"
                };
                let bytes = if rng.u8(..4) == 0 { number(rng) } else { 4096 };
                self.give(b"GIVD", segment(rng), bytes, &[&owner, words].concat(), &[]);
            }
            4 => {
                let packet: Vec<u8> = (0..rng.usize(..140)).map(|_| rng.u8(..)).collect();
                let _ = self.socket.send(&packet, &[]);
            }
            5..10 => {
                let bytes = number(rng);
                let flags = [0, COPY, LATER, LATER, COPY | LATER, rng.u32(..)][rng.usize(..6)];
                let lent = LoanRecord {
                    loan: rng.u64(..6).into(),
                    offset: number(rng).into(),
                    bytes: bytes.into(),
                    segment: segment(rng).into(),
                    flags: flags.into(),
                    owner: if rng.u8(..4) == 0 {
                        integer(rng) as u32
                    } else {
                        own
                    }
                    .into(),
                };
                let announced = if rng.u8(..16) == 0 {
                    number(rng)
                } else {
                    bytes
                };
                let header = header(rng, announced).encode();
                let more: &[u8] = if rng.u8(..16) == 0 { &[9] } else { &[] };
                self.messages.push(LENT, &[&header, lent.as_bytes(), more]);
            }
            10 => {
                let bytes = rng.u64(..100);
                let announced = if rng.u8(..8) == 0 { number(rng) } else { bytes };
                let header = header(rng, announced);
                let there = if header.kind.carries_payload() {
                    bytes as usize
                } else {
                    0
                };
                self.messages
                    .push(INLINE, &[&header.encode(), &[3; 100][..there]]);
            }
            11 => {
                let numbers: Vec<u32> = (0..rng.usize(..4)).map(|_| segment(rng)).collect();
                self.messages.push(RETIRED, &[numbers.as_bytes()]);
            }
            12 => {
                let why: &[u8] = if rng.bool() { b"" } else { b"it broke" };
                self.messages
                    .push(LANDED, &[&rng.u64(..6).to_le_bytes(), why]);
            }
            13 => {
                let bytes = number(rng);
                let header = header(rng, bytes).encode();
                let (kind, rest) = match rng.u8(..4) {
                    0..3 => (BROKEN, &header[..]),
                    _ => (
                        [GOODBYE, BROKEN, rng.u32(..12)][rng.usize(..3)],
                        &header[..rng.usize(..64)],
                    ),
                };
                self.messages.push(kind, &[rest]);
            }
            14 => {
                let said: Vec<u64> = (0..rng.usize(..8))
                    .map(|_| number(rng).min(rng.u64(..40)))
                    .collect();
                let kinds = [(RETURNED, 3), (PASSED_ON, 6), (LAST, 2), (CLOSED, 1)];
                let (kind, words) = match rng.usize(..5) {
                    4 => (rng.u32(..20), 8),
                    kind => kinds[kind],
                };
                self.returns
                    .push(kind, &[said[..words.min(said.len())].as_bytes()]);
            }
            15 => {
                let bytes = [3000, 10, number(rng)][rng.usize(..3)];
                let part = ToOwner {
                    loan: rng.u64(..6).into(),
                    offset: [0, number(rng)][rng.usize(..2)].into(),
                    bytes: bytes.into(),
                    lender: [PEERS as u32, rng.u32(..40)][rng.usize(..2)].into(),
                };
                let header = header(rng, bytes).encode();
                self.messages.push(TO_OWNER, &[&header, part.as_bytes()]);
            }
            _ if rng.u8(..8) == 0 => {
                let value = if rng.bool() {
                    integer(rng)
                } else {
                    64 * rng.u64(..64)
                };
                let words = self.rings[rng.usize(..4)].words();
                words[[0, 8, 16, 24, rng.usize(..256)][rng.usize(..5)]]
                    .store(value, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    fn give(
        &self,
        kind: &[u8; 4],
        number: u32,
        bytes: u64,
        rest: &[u8],
        files: &[std::os::fd::BorrowedFd<'_>],
    ) {
        let packet = [kind, &number.to_le_bytes()[..], &bytes.to_le_bytes(), rest].concat();
        // The other end may have closed.
        let _ = self.socket.send(&packet, files);
    }
}

fn exit() -> OwnedFd {
    pidfd_open(getpid(), PidfdFlags::empty()).unwrap()
}

#[test]
fn fuzz_shm_peer() {
    let (files, exit) = (files(), exit());
    let mut scene = Scene::new(&exit);
    let (mut next, mut ticket) = (0, 0);
    mpmd_fuzz::cases("shm-peer", |rng| {
        if next == PEERS {
            (scene, next) = (Scene::new(&exit), 0);
        }
        let index = next;
        next += 1;
        let Scene {
            shared,
            liars,
            devices,
            ear,
        } = &mut scene;
        let _ = shared.devices.sharing.set(devices.clone());
        if rng.bool() {
            shared.peers[index].as_ref().unwrap().share_devices();
        }
        for _ in 0..rng.u32(..24) {
            match rng.u8(..8) {
                0 | 1 => drop(shared.progress()),
                2 if rng.u8(..4) == 0 => {
                    let bytes = [0, 10, 3000][rng.usize(..3)];
                    let header = Header {
                        bytes: bytes as u64,
                        ..Header::new(MessageKind::Data)
                    };
                    ticket += 1;
                    shared.post(
                        ProcessId(index as u32),
                        &header,
                        Some(vec![1; bytes].into()),
                        Ticket(ticket),
                    );
                }
                3 if rng.u8(..8) == 0 => shared.tidy(),
                4 if rng.u8(..4) == 0 => ear.held.lock().clear(),
                _ => liars[index].say(rng, &files, index as u32),
            }
        }
        liars[index].socket.close();
        shared.watch();
        let held = std::mem::take(&mut *scene.ear.held.lock());
        assert!(
            held.iter().all(|bytes| bytes.ready().are_over()),
            "pending memory has ended"
        );
        drop(held);
        assert!(scene.has_ended(index), "a closed peer is down");
    });
}

#[test]
fn fuzz_shm_agreeing() {
    let exit = exit();
    let mut scene = Scene::new(&exit);
    let mut next = 0;
    mpmd_fuzz::cases("shm-agreeing", |rng| {
        if next == PEERS {
            (scene, next) = (Scene::new(&exit), 0);
        }
        let (index, liar) = (next, &scene.liars[next]);
        next += 1;
        for _ in 0..rng.u32(..6) {
            let mut packet = [
                &b"SAMPsample"[..],
                b"OVER",
                b"NONEof them",
                b"GOOD",
                b"BAD!so",
                b"\xff\xff\xff\xffx",
            ][rng.usize(..6)]
            .to_vec();
            if rng.u8(..4) == 0 {
                mpmd_fuzz::mutate(rng, &mut packet);
            }
            let _ = liar.socket.send(&packet, &[]);
        }
        if rng.bool() {
            liar.socket.close();
        }
        let mut with = [false; PEERS + 1];
        with[index] = true;
        let devices = scene.devices.clone();
        match scene.shared.share_devices(devices, &with, Duration::ZERO) {
            Ok(()) => {}
            Err(TransportError::TimedOut { .. }) => {
                assert!(!scene.shared.peers[index].as_ref().unwrap().shares_devices());
            }
            Err(error) => panic!("{error}"),
        }
    });
}
