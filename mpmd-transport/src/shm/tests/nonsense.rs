//! Faulty peers and strangers: the connection ends with an error, and other peers are not affected.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use proptest::collection::vec;
use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::devices::{Site, World};
use super::ear::{Ear, Heard, TIME_LIMIT, config, later};
use super::meeting::{file, prove};
use crate::shm::doorbell::Doorbell;
use crate::shm::meeting::{CAPACITIES, OwnDoor};
use crate::shm::note::{CLOSED, LAST, PASSED_ON, RETURNED};
use crate::shm::record::{
    BROKEN, GOODBYE, INLINE, LANDED, LATER, LENT, LoanRecord, RETIRED, TO_OWNER, ToOwner,
};
use crate::shm::ring::{Producer, Ring};
use crate::shm::shared_mapping::SharedMapping;
use crate::shm::socket::Socket;
use crate::shm::{OpenedShm, Shm, ShmConfig};
use crate::transport::{Payload, Ticket, Transport, TransportError};
use mpmd_memory::Pool;
use mpmd_proto::wire::{Header, MessageKind, ProcessId};

/// Index of the ring into which the higher process of a pair pushes messages. `RETURNS` is that of
/// its ring of returns.
const MESSAGES: usize = 1;
const RETURNS: usize = 3;

/// A faulty peer that a test plays.
struct Fake {
    socket: Socket,
    rings: [Ring; 4],
    messages: Producer,
    returns: Producer,
    /// The doorbell of the real process.
    door: Doorbell,
    _own: OwnDoor,
}

impl Fake {
    /// Connects to process 0 at address `at` as the process of `config`.
    fn knock(at: &str, config: &ShmConfig) -> Self {
        let own = OwnDoor::new().unwrap();
        let socket = prove(at, config, &[own.descriptor()]);
        let welcome = socket.receive_until(Instant::now() + TIME_LIMIT).unwrap();
        let [door, rings] = <[OwnedFd; 2]>::try_from(welcome.descriptors).unwrap();
        let memory = Arc::new(
            SharedMapping::of(rings, CAPACITIES.iter().copied().map(Ring::bytes).sum()).unwrap(),
        );
        let mut offset = 0;
        let rings = CAPACITIES.map(|capacity| {
            let first = memory.at(offset, Ring::bytes(capacity));
            offset += Ring::bytes(capacity);
            // SAFETY: `at` has checked that the bytes are within the mapping, which the ring keeps.
            // Both sides use atomic words of 8 bytes.
            unsafe { Ring::at(first, capacity, memory.clone()) }
        });
        let memory = Arc::new(SharedMapping::of(door, Doorbell::BYTES).unwrap());
        // SAFETY: as above, with words of 4 bytes.
        let door = unsafe { Doorbell::at(memory.at(0, Doorbell::BYTES), memory.clone()) };
        let (messages, returns) = (rings[MESSAGES].producer(), rings[RETURNS].producer());
        Self {
            socket,
            rings,
            messages,
            returns,
            door,
            _own: own,
        }
    }

    fn say(&mut self, kind: u32, parts: &[&[u8]]) {
        assert!(self.messages.push(kind, parts));
    }

    fn lend(&mut self, announced: u64, lent: LoanRecord) {
        let header = Header {
            bytes: announced,
            ..Header::new(MessageKind::Data)
        };
        self.say(LENT, &[&header.encode(), lent.as_bytes()]);
    }

    /// Gives the real process `bytes` bytes of device memory with the description `words`, as
    /// segment `number`.
    fn give_device(&self, number: u32, bytes: u64, words: &[u8]) {
        let owner = 1u32.to_le_bytes();
        let packet = [
            &b"GIVD"[..],
            &number.to_le_bytes(),
            &bytes.to_le_bytes(),
            &owner,
            words,
        ]
        .concat();
        assert!(self.socket.send(&packet, &[]).unwrap());
    }

    fn lend_later(&mut self, lent: LoanRecord) {
        self.lend(
            lent.bytes.get(),
            LoanRecord {
                flags: LATER.into(),
                ..lent
            },
        );
    }

    fn give(&self, number: u32, bytes: u64, what: &[BorrowedFd<'_>]) {
        assert!(self.try_give(number, bytes, what).unwrap());
    }

    /// Gives the real process a segment of `bytes` bytes with these descriptors. Returns false if
    /// there is no room. Fails if the other end has closed.
    fn try_give(&self, number: u32, bytes: u64, what: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let packet = [&b"GIVE"[..], &number.to_le_bytes(), &bytes.to_le_bytes()].concat();
        self.socket.send(&packet, what)
    }
}

fn lent(segment: u32, offset: u64, bytes: u64) -> LoanRecord {
    LoanRecord {
        loan: 1.into(),
        offset: offset.into(),
        bytes: bytes.into(),
        segment: segment.into(),
        flags: 0.into(),
        owner: 1.into(),
    }
}

/// The real processes 0 and 2 with their handlers; the test plays process 1.
struct Trio {
    zero: Arc<Shm>,
    two: Arc<Shm>,
    ears: [Arc<Ear>; 2],
    fake: Fake,
}

impl Trio {
    fn new() -> Self {
        Self::new_with(|_, _| {})
    }

    /// Connects the two real processes and the faulty peer. Calls `before` before the deliveries
    /// start.
    fn new_with(before: impl FnOnce(&Arc<Shm>, &mut Fake)) -> Self {
        let (zero, one, two) = (
            OpenedShm::open().unwrap(),
            OpenedShm::open().unwrap(),
            OpenedShm::open().unwrap(),
        );
        let addresses = [zero.address(), one.address(), two.address()];
        let of = |process| {
            let mut config = config(process, &[&addresses[0], &addresses[1], &addresses[2]]);
            if process == 2 {
                // Only process 0 meets the test.
                config.peers[1] = None;
            }
            config
        };
        let (zero_config, two_config) = (of(0), of(2));
        let zero = later(move || zero.connect(&zero_config).unwrap());
        let two = later(move || two.connect(&two_config).unwrap());
        let mut fake = Fake::knock(&addresses[0], &of(1));
        let (zero, two) = (zero.join().unwrap(), two.join().unwrap());
        before(&zero, &mut fake);
        let ears: [Arc<Ear>; 2] = Default::default();
        zero.start(ears[0].clone());
        two.start(ears[1].clone());
        Self {
            zero,
            two,
            ears,
            fake,
        }
    }

    /// Connects all three. Process 0 has devices, and finds that the faulty process 1 can share
    /// device memory too.
    fn with_devices() -> Self {
        let trio = Self::new_with(|zero, fake| {
            let site = Site {
                world: Arc::<World>::default(),
                process: 0,
                without: None,
                blind: false,
            };
            let real = zero.clone();
            let sharing = later(move || {
                real.share_devices(Arc::new(site), &[false, true, false], TIME_LIMIT)
                    .unwrap()
            });
            for packet in ["OVER", "GOOD"] {
                fake.socket
                    .send_until(packet.as_bytes(), &[], Instant::now() + TIME_LIMIT)
                    .unwrap();
            }
            sharing.join().unwrap();
            // Process 0 has sent three samples, their end, and that it could open all samples of
            // process 1, which sent none.
            let said = (0..5).map(|_| {
                fake.socket
                    .receive_until(Instant::now() + TIME_LIMIT)
                    .unwrap()
                    .bytes
            });
            assert_eq!(
                said.map(|packet| packet[..4].to_vec()).collect::<Vec<_>>()[2..],
                [b"SAMP", b"OVER", b"GOOD"]
            );
        });
        assert!(trio.zero.carries_device_memory(ProcessId(1)));
        trio
    }

    /// Checks that the real processes still exchange messages.
    fn check_others(&self) {
        let header = Header {
            bytes: 5000,
            ..Header::new(MessageKind::Data)
        };
        let pool = Pool::in_arena("others", None, &self.zero.arena().unwrap());
        for (from, to, ear, peer) in [(&self.zero, 2, 1, 0), (&self.two, 0, 0, 2)] {
            let mut bytes = pool.allocate(5000).unwrap();
            bytes.fill(42 + peer);
            from.post(ProcessId(to), header, Some(bytes.freeze()), Ticket::NONE);
            let (Payload::Lent(bytes) | Payload::Inline(bytes)) =
                self.ears[ear].next_from(u32::from(peer))
            else {
                panic!("a message without its payload")
            };
            assert!(bytes.iter().all(|byte| *byte == 42 + peer));
        }
        assert!(
            self.ears
                .iter()
                .all(|ear| ear.heard.lock().down.iter().all(|(peer, _)| peer.0 == 1))
        );
    }

    fn finish(self) {
        self.check_others();
        let Self { zero, two, .. } = self;
        let two = later(move || two.shutdown(TIME_LIMIT));
        zero.shutdown(TIME_LIMIT);
        two.join().unwrap();
    }
}

/// Checks that `nonsense` of a connected peer ends its connection, and no other, with an error that
/// contains `says`.
fn ends(says: &str, nonsense: impl FnOnce(&mut Fake)) {
    ends_in(Trio::new(), says, nonsense);
}

fn ends_in(mut trio: Trio, says: &str, nonsense: impl FnOnce(&mut Fake)) {
    let header = Header {
        bytes: 3000,
        ..Header::new(MessageKind::Data)
    };
    trio.zero
        .post(ProcessId(1), header, Some(vec![1; 3000].into()), Ticket(5));
    nonsense(&mut trio.fake);
    let why = trio.ears[0].down(1);
    assert!(
        matches!(
            &why,
            TransportError::Protocol {
                peer: ProcessId(1),
                ..
            }
        ),
        "{says}: {why}"
    );
    assert!(why.to_string().contains(says), "{says}: {why}");
    // The message to it has ended too, and it sees the end of the connection.
    let ended = |heard: &mut Heard| {
        heard
            .done
            .iter()
            .find(|done| done.0 == Ticket(5))
            .map(|done| done.1.clone())
    };
    assert_eq!(trio.ears[0].wait("the end of a ticket", ended), Err(why));
    let until = Instant::now() + TIME_LIMIT;
    // It may have been given memory before.
    let end = loop {
        if let Err(error) = trio.fake.socket.receive_until(until) {
            break error.kind();
        }
    };
    assert_eq!(end, io::ErrorKind::UnexpectedEof);
    trio.finish();
}

#[test]
fn invalid_records_end_the_connection() {
    ends("a record of kind 99", |fake| fake.say(99, &[&[1; 200]]));
    ends("a record of 10 bytes", |fake| fake.say(INLINE, &[&[1; 10]]));
    ends("is no message", |fake| fake.say(INLINE, &[&[0; 64]]));
    let header = Header {
        bytes: 3,
        ..Header::new(MessageKind::Eager)
    };
    ends("2 bytes of payload where 3", |fake| {
        fake.say(INLINE, &[&header.encode(), &[1, 2]])
    });
    let part = |loan: u64, offset: u64, bytes: u64| ToOwner {
        loan: loan.into(),
        offset: offset.into(),
        bytes: bytes.into(),
        lender: 0.into(),
    };
    // The loan of 3000 bytes that `ends` makes has the number 1.
    for part in [
        part(2, 0, 3),
        part(1, 0, 3001),
        part(1, u64::MAX, 3),
        part(1, 1 << 40, 3),
    ] {
        let header = Header {
            bytes: part.bytes.get(),
            ..Header::new(MessageKind::Data)
        };
        ends("it has no 3", |fake| {
            fake.say(TO_OWNER, &[&header.encode(), part.as_bytes()])
        });
    }
    for owner in [0, 3, u32::MAX] {
        ends("which shares no memory with this process", |fake| {
            fake.lend(
                100,
                LoanRecord {
                    owner: owner.into(),
                    ..lent(7, 0, 100)
                },
            );
        });
    }
    ends("a loan in 7 bytes", |fake| {
        fake.say(LENT, &[&header.encode(), &[0; 7]])
    });
    ends("with 3 bytes", |fake| fake.say(RETIRED, &[&[1, 2, 3]]));
    ends("no message", |fake| fake.say(RETURNED, &[&[0; 8]]));
}

#[test]
fn invalid_segments_and_ranges_end_the_connection() {
    ends("segment 7 was never given", |fake| {
        fake.lend(100, lent(7, 0, 100))
    });
    ends("100 bytes of payload where 99", |fake| {
        fake.lend(99, lent(7, 0, 100))
    });
    let places = [
        (4096, 1),
        (0, 4097),
        (4095, 2),
        (u64::MAX, 1),
        (1, u64::MAX),
        (u64::MAX, u64::MAX),
        (1 << 63, 1 << 63),
    ];
    for (offset, bytes) in places {
        ends("are not there", |fake| {
            fake.give(7, 4096, &[file(4096, true).as_fd()]);
            fake.lend(bytes, lent(7, offset, bytes));
        });
    }
}

#[test]
fn invalid_segment_packets_end_the_connection() {
    let with = |says: &str, give: &dyn Fn(&Fake)| {
        ends(says, |fake| {
            give(fake);
            fake.lend(1, lent(7, 0, 1));
        });
    };
    let raw = |bytes: &'static [u8]| {
        move |fake: &Fake| drop(fake.socket.send(bytes, &[file(64, true).as_fd()]))
    };
    with("a packet that gives no segment", &raw(b"GIVE"));
    with("a packet that gives no segment", &|fake| {
        fake.give(7, 4096, &[])
    });
    with("a packet of another kind", &raw(b"TAKE890123456789"));
    with("a packet is too long", &raw(&[0; 400]));
    with("is not sealed", &|fake| {
        fake.give(7, 4096, &[file(4096, false).as_fd()])
    });
    for (there, said) in [
        (4096, 4097),
        (4096, 0),
        (0, 0),
        (4096, u64::MAX),
        (100, 1 << 40),
    ] {
        with("but another length was announced", &|fake| {
            fake.give(7, said, &[file(there, true).as_fd()])
        });
    }
    with("but another length was announced", &|fake| {
        fake.give(7, 9, &[File::open("/dev/null").unwrap().as_fd()])
    });
    let folder = std::env::temp_dir();
    with("", &|fake| {
        fake.give(7, 4096, &[File::open(&folder).unwrap().as_fd()])
    });
    with("was given before", &|fake| {
        fake.give(6, 4096, &[file(4096, true).as_fd()]);
        fake.give(6, 4096, &[file(4096, true).as_fd()]);
    });
}

#[test]
fn invalid_device_records_end_the_connection() {
    let ends =
        |says: &str, nonsense: &dyn Fn(&mut Fake)| ends_in(Trio::with_devices(), says, nonsense);
    let given = |fake: &Fake, words: &[u8]| fake.give_device(7, 4096, words);
    for words in [&[][..], &[1; 97]] {
        ends("gives no memory of a device", &|fake| {
            given(fake, words);
            fake.lend(1, lent(7, 0, 1));
        });
    }
    ends("gives no memory of a device", &|fake| {
        fake.give_device(7, 0, b"memory 1");
        fake.lend(1, lent(7, 0, 1));
    });
    ends("segment 7 was given before", &|fake| {
        (0..2).for_each(|_| given(fake, b"memory 1"));
        fake.lend(1, lent(8, 0, 1));
    });
    ends(
        "a loan of the host's memory that is not there yet",
        &|fake| {
            fake.give(7, 4096, &[file(4096, true).as_fd()]);
            fake.lend_later(lent(7, 0, 1));
        },
    );
    ends("loan 9 is there, which was never on its way", &|fake| {
        fake.say(LANDED, &[&9u64.to_le_bytes()])
    });
    ends("loan 1 is on its way already", &|fake| {
        given(fake, b"nothing of the kind");
        (0..2).for_each(|_| fake.lend_later(lent(7, 0, 1)));
    });
    ends("a message of kind Grant that cannot be had", &|fake| {
        fake.say(BROKEN, &[&Header::new(MessageKind::Grant).encode()]);
    });
    ends("a loan named in 3 bytes", &|fake| {
        fake.say(LANDED, &[&[1; 3]])
    });
    ends("a record of 3 bytes", &|fake| fake.say(BROKEN, &[&[1; 3]]));
    // A peer that has not agreed to share devices.
    self::ends("device sharing was not agreed", |fake| {
        given(fake, b"memory 1");
        fake.lend(1, lent(7, 0, 1));
    });
}

#[test]
fn unknown_device_memory_is_refused_bad_range_is_fatal() {
    let mut trio = Trio::with_devices();
    trio.fake.give_device(7, 4096, b"nothing of the kind");
    trio.fake.lend(1, lent(7, 0, 1));
    let Payload::Waiting(fetch) = trio.ears[0].next_from(1) else {
        panic!("it is not there")
    };
    assert_eq!(fetch.bytes(), 1);
    drop(fetch);
    // The loan was returned, and nothing else has happened.
    trio.fake.say(CLOSED, &[&[1; 8]]);
    assert!(
        trio.ears[0]
            .down(1)
            .to_string()
            .contains("a record of kind 9")
    );
    trio.finish();
    for (offset, bytes) in [(4096, 1), (0, 4097), (u64::MAX, 1), (1, u64::MAX)] {
        let mut own = None;
        let trio = Trio::new_with(|zero, fake| {
            let world = Arc::<World>::default();
            let site = |process| Site {
                world: world.clone(),
                process,
                without: None,
                blind: false,
            };
            own = Some(mpmd_memory::DeviceAllocator::allocate(&site(1), 4096).unwrap());
            for packet in ["OVER", "GOOD"] {
                fake.socket
                    .send_until(packet.as_bytes(), &[], Instant::now() + TIME_LIMIT)
                    .unwrap();
            }
            zero.share_devices(Arc::new(site(0)), &[false, true, false], TIME_LIMIT)
                .unwrap();
        });
        ends_in(trio, "are not there", |fake| {
            fake.give_device(7, 4096, b"memory 1");
            fake.lend(bytes, lent(7, offset, bytes));
        });
    }
}

#[test]
fn peer_with_invalid_samples_shares_no_devices() {
    for says in [&b"SAM"[..], b"WHAT", b"NONEof your business", b"GOOD"] {
        let trio = Trio::new_with(|zero, fake| {
            for packet in [says, b"GOOD"] {
                fake.socket
                    .send_until(packet, &[], Instant::now() + TIME_LIMIT)
                    .unwrap();
            }
            let site = Site {
                world: Arc::<World>::default(),
                process: 0,
                without: None,
                blind: false,
            };
            zero.share_devices(Arc::new(site), &[false, true, false], TIME_LIMIT)
                .unwrap();
        });
        assert!(!trio.zero.carries_device_memory(ProcessId(1)));
        trio.finish();
    }
    let trio = Trio::new_with(|zero, _| {
        let site = Site {
            world: Arc::<World>::default(),
            process: 0,
            without: None,
            blind: false,
        };
        let peer_timeout = std::time::Duration::from_millis(20);
        let late = zero
            .share_devices(Arc::new(site), &[false, true, false], peer_timeout)
            .unwrap_err();
        assert!(
            matches!(&late, TransportError::TimedOut { .. })
                && late.to_string().contains("process 1"),
            "{late}"
        );
    });
    trio.finish();
}

#[test]
fn sparse_file_of_any_size_is_mapped_cheaply() {
    let mut trio = Trio::new();
    const BYTES: u64 = 1 << 40;
    trio.fake.give(7, BYTES, &[file(BYTES, true).as_fd()]);
    trio.fake.lend(1, lent(7, BYTES - 1, 1));
    let Payload::Lent(bytes) = trio.ears[0].next_from(1) else {
        panic!("it is lent")
    };
    assert_eq!(bytes[..], [0]);
    trio.finish();
}

#[test]
fn corrupt_ring_ends_the_connection() {
    for ring in [MESSAGES, RETURNS] {
        for tail in [1, 64 << 20, u64::MAX, u64::MAX - 63] {
            ends("holds nonsense", |fake| {
                fake.rings[ring].words()[0].store(tail, Ordering::SeqCst)
            });
        }
    }
    ends("a record of 4294967295 bytes", |fake| {
        fake.rings[MESSAGES].words()[24].store(u64::from(u32::MAX), Ordering::SeqCst);
        fake.rings[MESSAGES].words()[0].store(64, Ordering::SeqCst);
    });
}

#[test]
fn returns_of_unknown_loans_change_nothing() {
    let mut trio = Trio::new();
    let pool = Pool::in_arena("lender", None, &trio.zero.arena().unwrap());
    let header = Header {
        bytes: 4000,
        ..Header::new(MessageKind::Data)
    };
    for ticket in [5, 6] {
        trio.zero.post(
            ProcessId(1),
            header,
            Some(pool.allocate(4000).unwrap().freeze()),
            Ticket(ticket),
        );
    }
    assert_eq!(trio.zero.lent_to(ProcessId(1)), 8000);
    let push = |fake: &mut Fake, kind, words: &[u64]| {
        assert!(fake.returns.push(kind, &[words.as_bytes()]))
    };
    for number in [0, 3, 12345, u64::MAX, 1, 1, 1] {
        push(&mut trio.fake, RETURNED, &[0, number, 0]);
        push(&mut trio.fake, RETURNED, &[2, number, 0]);
        push(&mut trio.fake, LAST, &[2, number]);
        // To itself, to process 0, to no process, and a part that is not lent.
        for (to, offset) in [(1, 0), (0, 0), (9, 0), (u64::MAX, 0), (2, 1 << 40)] {
            push(&mut trio.fake, PASSED_ON, &[0, number, to, 7, offset, 10]);
        }
    }
    push(&mut trio.fake, RETURNED, &[0, 2]);
    push(&mut trio.fake, 77, &[0, 2, 0]);
    assert!(trio.fake.returns.push(RETURNED, &[&[1, 2, 3]]));
    assert_eq!(
        (trio.zero.lent_to(ProcessId(1)), pool.stats().live),
        (4000, 4096)
    );
    assert_eq!(trio.zero.lent_to(ProcessId(9)), 0);
    let first = |heard: &mut Heard| heard.done.iter().find(|done| done.0 == Ticket(5)).cloned();
    assert_eq!(
        trio.ears[0].wait("the end of the first", first),
        (Ticket(5), Ok(()))
    );
    // Numbers of unknown segments, and a doorbell that claims that a thread is awake.
    trio.fake.say(RETIRED, &[&[9; 400]]);
    trio.fake
        .door
        .words()
        .iter()
        .for_each(|word| word.store(u32::MAX, Ordering::SeqCst));
    let header = Header {
        bytes: 1,
        ..Header::new(MessageKind::Eager)
    };
    trio.fake.say(INLINE, &[&header.encode(), &[3]]);
    assert!(matches!(trio.ears[0].next_from(1), Payload::Inline(bytes) if bytes[..] == [3]));
    trio.finish();
}

#[test]
fn records_after_goodbye_are_ignored() {
    let mut trio = Trio::new();
    trio.fake.say(GOODBYE, &[]);
    trio.fake.say(99, &[]);
    assert!(matches!(
        trio.ears[0].down(1),
        TransportError::PeerGone { .. }
    ));
    trio.finish();
}

#[test]
fn peer_that_closes_but_keeps_writing_is_gone() {
    let trio = Trio::new();
    let Trio {
        zero,
        two,
        ears,
        fake,
    } = trio;
    let stop = Arc::new(AtomicBool::new(false));
    let Fake {
        socket,
        rings,
        mut messages,
        door,
        _own,
        returns,
    } = fake;
    let told = stop.clone();
    socket.close();
    let writer = later(move || {
        let header = Header::new(MessageKind::Heartbeat).encode();
        while !told.load(Ordering::Relaxed) {
            messages.push(INLINE, &[&header]);
        }
        messages
    });
    assert!(matches!(ears[0].down(1), TransportError::PeerGone { .. }));
    stop.store(true, Ordering::Relaxed);
    let messages = writer.join().unwrap();
    Trio {
        zero,
        two,
        ears,
        fake: Fake {
            socket,
            rings,
            messages,
            door,
            _own,
            returns,
        },
    }
    .finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn random_writes_of_a_peer_do_not_affect_others(
        words in vec((0usize..4, any::<prop::sample::Index>(), any::<u64>()), 0..40),
        counts in vec((0usize..4, 0usize..3, 0u64..1024), 0..6),
        door in vec((0usize..32, any::<u32>()), 0..6),
        records in vec((0u32..12, vec(any::<u8>(), 0..200)), 0..20),
        packets in vec((0u32..4, 0u64..9000, any::<bool>()), 0..10),
    ) {
        let mut trio = Trio::new();
        let header = Header { bytes: 3000, ..Header::new(MessageKind::Data) };
        trio.zero.post(ProcessId(1), header, Some(vec![1; 3000].into()), Ticket(5));
        for (number, bytes, sealed) in packets {
            // An earlier loan may have ended the connection already.
            match trio.fake.try_give(number, bytes, &[file(bytes, sealed).as_fd()]) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
                given => prop_assert!(given.unwrap()),
            }
            trio.fake.lend(8, lent(number, bytes / 2, 8));
        }
        for (kind, bytes) in records {
            trio.fake.messages.push(kind, &[&bytes]);
            trio.fake.returns.push(kind, &[&bytes]);
        }
        for (at, value) in door {
            trio.fake.door.words()[at].store(value, Ordering::SeqCst);
        }
        for (ring, at, value) in words {
            let words = trio.fake.rings[ring].words();
            words[at.index(words.len())].store(value, Ordering::SeqCst);
        }
        for (ring, count, value) in counts {
            trio.fake.rings[ring].words()[count * 8].store(64 * value, Ordering::SeqCst);
        }
        trio.check_others();
        trio.fake.socket.close();
        trio.ears[0].down(1);
        trio.finish();
    }
}
