//! Lent memory stays valid after its owner's end. New segments are announced, and freed ones are
//! unmapped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ear::{Ear, TIME_LIMIT, config, later};
use crate::shm::{OpenedShm, Shm};
use crate::transport::{Payload, Ticket, Transport};
use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::wire::{Header, MessageKind, ProcessId};

/// Returns two connected and started processes, both real, and their handlers.
fn pair() -> ([Arc<Shm>; 2], [Arc<Ear>; 2]) {
    let (zero, one) = (OpenedShm::open().unwrap(), OpenedShm::open().unwrap());
    let addresses = [zero.address(), one.address()];
    let of = |process| config(process, &[&addresses[0], &addresses[1]]);
    let (zero_config, one_config) = (of(0), of(1));
    let zero = later(move || zero.connect(&zero_config).unwrap());
    let both = [one.connect(&one_config).unwrap(), zero.join().unwrap()];
    let [one, zero] = both;
    let ears: [Arc<Ear>; 2] = Default::default();
    zero.start(ears[0].clone());
    one.start(ears[1].clone());
    ([zero, one], ears)
}

fn filled(pool: &Pool, bytes: usize, with: u8) -> SharedBuffer {
    let mut buffer = pool.allocate(bytes).unwrap();
    buffer.fill(with);
    buffer.freeze()
}

#[test]
fn lent_memory_stays_unchanged_after_lender_is_gone() {
    for in_order in [true, false] {
        let ([zero, one], ears) = pair();
        let pool = Pool::in_arena("lender", None, &zero.arena().unwrap());
        for bytes in [5000, 3 << 20] {
            let header = Header {
                bytes: bytes as u64,
                ..Header::new(MessageKind::Data)
            };
            zero.post(
                ProcessId(1),
                header,
                Some(filled(&pool, bytes, 7)),
                Ticket::NONE,
            );
        }
        let held: Vec<Payload> = (0..2).map(|_| ears[1].next_from(0)).collect();
        if in_order {
            zero.shutdown(TIME_LIMIT);
        }
        drop(zero);
        ears[1].down(0);
        // The transport's thread drops everything at its end, some time after the socket closes.
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until {
            drop((filled(&pool, 5000, 9), filled(&pool, 3 << 20, 9)));
            pool.trim();
        }
        for payload in held {
            let Payload::Lent(bytes) = payload else {
                panic!("it is lent")
            };
            assert!(
                bytes.iter().all(|byte| *byte == 7),
                "memory is reused while it is read"
            );
        }
        one.shutdown(TIME_LIMIT);
    }
}

/// Returns the number of this process's shared mappings of exactly `bytes` bytes.
fn mappings(bytes: usize) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let length = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some(usize::from_str_radix(end, 16).ok()? - usize::from_str_radix(start, 16).ok()?)
    };
    maps.lines()
        .filter(|line| line.contains("memfd:mpmd") && length(line) == Some(bytes))
        .count()
}

#[test]
fn segment_sent_to_and_fro_is_mapped_once() {
    // Recognised by a length that no other test uses.
    const BYTES: usize = 5 << 20;
    let ([zero, one], ears) = pair();
    let pool = Pool::in_arena("lender", None, &zero.arena().unwrap());
    let header = Header {
        bytes: BYTES as u64,
        ..Header::new(MessageKind::Data)
    };
    let mut ball = filled(&pool, BYTES, 3);
    for round in 0..50 {
        let (from, to) = if round % 2 == 0 {
            (&zero, 1)
        } else {
            (&one, 0)
        };
        from.post(ProcessId(to), header, Some(ball), Ticket::NONE);
        ball = match (to, ears[to as usize].next_from(1 - to)) {
            // The owner gets its own memory.
            (0, Payload::Inline(own)) => own,
            (1, Payload::Lent(lent)) => lent,
            _ => panic!("round {round}"),
        };
        assert_eq!((ball.is_lent(), ball[0], ball[BYTES - 1]), (to == 1, 3, 3));
    }
    assert_eq!(
        mappings(BYTES),
        2,
        "the owner's mapping, and the borrower's"
    );
    drop(ball);
    let until = Instant::now() + TIME_LIMIT;
    while mappings(BYTES) > 0 {
        assert!(
            Instant::now() < until,
            "{:?}, {} mappings",
            pool.stats(),
            mappings(BYTES)
        );
        pool.trim();
        std::thread::sleep(Duration::from_millis(1));
    }
    one.shutdown(TIME_LIMIT);
    zero.shutdown(TIME_LIMIT);
}

#[test]
fn freed_segments_are_unmapped_everywhere() {
    // Recognised by a length that no other test uses.
    const BYTES: usize = (3 << 20) + (512 << 10);
    let ([zero, one], ears) = pair();
    let pool = Pool::in_arena("lender", None, &zero.arena().unwrap());
    let header = Header {
        bytes: BYTES as u64,
        ..Header::new(MessageKind::Data)
    };
    for round in 0..20 {
        zero.post(
            ProcessId(1),
            header,
            Some(filled(&pool, BYTES, round)),
            Ticket(1 + u64::from(round)),
        );
        let payload = ears[1].next_from(0);
        assert_eq!(mappings(BYTES), 2, "one on each side");
        drop(payload);
        let until = Instant::now() + TIME_LIMIT;
        while zero.lent_to(ProcessId(1)) > 0 {
            assert!(Instant::now() < until);
        }
        pool.trim();
        while mappings(BYTES) > 0 {
            assert!(
                Instant::now() < until,
                "round {round}: {} mappings are left",
                mappings(BYTES)
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    one.shutdown(TIME_LIMIT);
    zero.shutdown(TIME_LIMIT);
}

/// Blocks until there are `count` mappings of `bytes` bytes.
fn until_mapped(bytes: usize, count: usize) {
    let until = Instant::now() + TIME_LIMIT;
    while mappings(bytes) != count {
        assert!(
            Instant::now() < until,
            "{} mappings, not {count}",
            mappings(bytes)
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a payload of `bytes` bytes to process 1 and returns it as it arrives there.
fn sent(zero: &Shm, ears: &[Arc<Ear>; 2], bytes: SharedBuffer) -> Payload {
    let header = Header {
        bytes: bytes.len() as u64,
        ..Header::new(MessageKind::Data)
    };
    zero.post(ProcessId(1), header, Some(bytes), Ticket::NONE);
    ears[1].next_from(0)
}

#[test]
fn new_segment_is_mapped_before_a_message_names_it() {
    // Recognised by a length that no other test uses.
    const BYTES: usize = 7 << 20;
    let ([zero, one], ears) = pair();
    let pool = Pool::in_arena("lender", None, &zero.arena().unwrap());
    let unexpected = filled(&pool, BYTES, 1);
    drop(sent(&zero, &ears, filled(&pool, 8, 2)));
    assert_eq!(mappings(BYTES), 1, "the peer had got nothing before");
    let new = filled(&pool, BYTES, 3);
    until_mapped(BYTES, 3);
    let Payload::Lent(lent) = sent(&zero, &ears, new) else {
        panic!("it is lent")
    };
    assert!(lent.iter().all(|byte| *byte == 3) && mappings(BYTES) == 3);
    let unused = filled(&pool, BYTES, 4);
    until_mapped(BYTES, 5);
    drop((unexpected, lent, unused));
    let until = Instant::now() + TIME_LIMIT;
    while mappings(BYTES) > 0 {
        assert!(Instant::now() < until, "{} mappings", mappings(BYTES));
        drop(sent(&zero, &ears, filled(&pool, 8, 5)));
        zero.lent_to(ProcessId(1));
        pool.trim();
    }
    one.shutdown(TIME_LIMIT);
    let late = filled(&pool, BYTES, 6);
    ears[0].down(1);
    let later = filled(&pool, BYTES, 7);
    assert_eq!(mappings(BYTES), 2, "the peer has left");
    drop((late, later));
    zero.shutdown(TIME_LIMIT);
}

#[test]
fn unused_announced_segments_are_limited() {
    // Recognised by a length that no other test uses.
    const BYTES: usize = 5 << 18;
    let ([zero, one], ears) = pair();
    let pool = Pool::in_arena("lender", None, &zero.arena().unwrap());
    drop(sent(&zero, &ears, filled(&pool, 8, 1)));
    let mut all: Vec<SharedBuffer> = (0..40).map(|i| filled(&pool, BYTES, i)).collect();
    until_mapped(BYTES, 40 + 32);
    // The first was announced, the last was not. One that is lent from makes room for another.
    let lent = [
        sent(&zero, &ears, all.remove(0)),
        sent(&zero, &ears, all.remove(38)),
    ];
    until_mapped(BYTES, 40 + 32 + 1);
    all.push(filled(&pool, BYTES, 40));
    until_mapped(BYTES, 41 + 34);
    drop((lent, all));
    one.shutdown(TIME_LIMIT);
    zero.shutdown(TIME_LIMIT);
}
