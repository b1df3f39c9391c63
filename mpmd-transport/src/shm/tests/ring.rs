//! Tests of a ring: one end alone, and both.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;

use crate::shm::ring::{Consumer, Ring};

const SMALL: usize = 512;

fn pop(consumer: &mut Consumer) -> Option<(u32, Vec<u8>)> {
    consumer.pop(|kind, bytes| (kind, bytes.to_vec())).unwrap()
}

#[test]
fn parts_of_any_length_arrive_as_one_record() {
    let ring = Ring::alone(SMALL);
    let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
    let bytes = (0..=255).collect::<Vec<_>>();
    let cases: [&[usize]; 7] = [
        &[],
        &[0],
        &[1],
        &[3, 8, 0, 5],
        &[8, 16],
        &[1, 1, 1, 1, 1, 1, 1, 1, 1],
        &[7, 56, 57],
    ];
    for (kind, lens) in cases.into_iter().enumerate() {
        let mut rest = &bytes[..];
        let parts = lens
            .iter()
            .map(|len| rest.split_off(..*len).unwrap())
            .collect::<Vec<_>>();
        assert!(producer.push(kind as u32, &parts));
        assert!(!consumer.is_empty());
        assert_eq!(pop(&mut consumer), Some((kind as u32, parts.concat())));
        assert!(consumer.is_empty());
    }
    assert_eq!(pop(&mut consumer), None);
}

#[test]
fn full_ring_refuses_until_a_record_is_popped() {
    let ring = Ring::alone(SMALL);
    let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
    assert_eq!(
        (Ring::bytes(SMALL), Ring::largest(SMALL)),
        (SMALL + 192, SMALL / 4 - 8)
    );
    let largest = vec![7; Ring::largest(SMALL)];
    for left in (0..4).rev() {
        assert!(producer.push(left, &[&largest]));
        assert_eq!(producer.free(), left as usize * SMALL / 4);
    }
    assert!(!producer.wants_room(), "nothing was refused");
    assert!(!consumer.take_wanted());

    let words = || {
        ring.words()
            .iter()
            .map(|word| word.load(Ordering::Relaxed))
            .collect::<Vec<_>>()
    };
    let before = words();
    assert!(!producer.push(9, &[&[1]]));
    assert_eq!(words(), before);
    assert!(producer.wants_room());
    assert_eq!(pop(&mut consumer).unwrap().0, 3);
    assert!(consumer.take_wanted());
    assert!(!consumer.take_wanted(), "it is told once");
    assert!(!producer.wants_room());
    assert!(
        !consumer.take_wanted(),
        "a producer with room waits no more"
    );
    assert!(producer.push(9, &[&[1]]));
    let rest = (0..4)
        .map(|_| pop(&mut consumer).unwrap().0)
        .collect::<Vec<_>>();
    assert_eq!(rest, [2, 1, 0, 9]);
}

#[test]
#[should_panic(expected = "a record of 121 bytes in a ring that takes 120")]
fn too_large_record_panics() {
    Ring::alone(SMALL).producer().push(0, &[&[0; 120], &[0]]);
}

#[test]
fn fuzz_shm_ring() {
    const HEADER: usize = 24;
    mpmd_fuzz::cases("shm-ring", |rng| {
        let ring = Ring::alone(SMALL);
        let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
        for _ in 0..rng.u32(..24) {
            match rng.u8(..8) {
                0..3 => {
                    let payload = vec![rng.u8(..); rng.usize(..=Ring::largest(SMALL))];
                    producer.push(
                        rng.u32(..9),
                        &[&payload[..payload.len() / 2], &payload[payload.len() / 2..]],
                    );
                }
                3..6 => {
                    let popped =
                        consumer.pop(|_, bytes| assert!(bytes.len() <= Ring::largest(SMALL)));
                    if popped.is_err() {
                        // Nothing is popped, however often it is tried.
                        assert_eq!(consumer.pop(|_, _| ()), popped);
                        return;
                    }
                }
                6 => {
                    let counts = [
                        0,
                        8,
                        16,
                        HEADER + 8 * rng.usize(..SMALL / 64),
                        rng.usize(..HEADER),
                    ];
                    let value = match rng.u8(..4) {
                        0 => mpmd_fuzz::integer(rng),
                        1 => 64 * rng.u64(..20),
                        2 => rng.u64(..200) | u64::from(u32::MAX) << 32,
                        _ => rng.u64(..200) | rng.u64(..9) << 32,
                    };
                    ring.words()[counts[rng.usize(..5)]].store(value, Ordering::Relaxed);
                }
                _ => {
                    let _ = (
                        consumer.is_empty(),
                        consumer.take_wanted(),
                        producer.wants_room(),
                    );
                    assert!(producer.free() <= SMALL);
                }
            }
        }
    });
}

#[test]
fn corrupt_ring_is_an_error_and_pops_nothing() {
    /// Index of the word that counts pushed bytes.
    const TAIL: usize = 0;
    /// Index of the first word of the first record.
    const FIRST: usize = 24;
    let prefix = |len: u64, kind: u64| len | kind << 32;
    let padding = u64::from(u32::MAX);
    // The word to overwrite, the value, and part of the error, with one record of 64 bytes pushed.
    let cases = [
        (TAIL, 576, "576 bytes are said to be in a ring of 512"),
        (TAIL, 0u64.wrapping_sub(64), "are said to be in"),
        (TAIL, 72, "72 bytes are said"),
        (
            FIRST,
            prefix(121, 0),
            "a record of 121 bytes in a ring that takes 120",
        ),
        (
            FIRST,
            prefix(57, 0),
            "a record of 57 bytes at 0, with 64 bytes pushed",
        ),
        (FIRST, u64::MAX, "padding of 4294967295 bytes at 0"),
        (FIRST, prefix(504, padding), "padding of 504 bytes at 0"),
    ];
    for (place, value, said) in cases {
        let ring = Ring::alone(SMALL);
        let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
        assert!(producer.push(1, &[&[5; 56]]));
        ring.words()[place].store(value, Ordering::Relaxed);
        for _ in 0..2 {
            let error = consumer.pop(|_, _| ()).unwrap_err().to_string();
            assert!(
                error.contains("holds nonsense") && error.contains(said),
                "{error}"
            );
        }
    }
}

#[test]
fn padding_without_its_record_is_refused() {
    let ring = Ring::alone(SMALL);
    let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
    for _ in 0..7 {
        assert!(producer.push(1, &[&[5; 56]]));
        assert_eq!(pop(&mut consumer).unwrap().1, [5; 56]);
    }
    assert!(producer.push(2, &[&[6; 57]]));
    // The padding's line is pushed, its record is not.
    ring.words()[0].store(SMALL as u64, Ordering::Relaxed);
    let error = consumer.pop(|_, _| ()).unwrap_err().to_string();
    assert!(
        error.contains("padding of 56 bytes at 448, with 64 bytes pushed"),
        "{error}"
    );
}

#[test]
fn consumer_with_invalid_count_makes_no_room() {
    let ring = Ring::alone(SMALL);
    let mut producer = ring.producer();
    while producer.push(1, &[&[5; 56]]) {}
    for head in [u64::MAX, 1 << 40, 8, 576, SMALL as u64 + 64] {
        ring.words()[8].store(head, Ordering::Relaxed);
        assert_eq!(
            (
                producer.push(1, &[&[5; 56]]),
                producer.wants_room(),
                producer.free()
            ),
            (false, true, 0)
        );
    }
    ring.words()[8].store(64, Ordering::Relaxed);
    assert!(producer.push(1, &[&[5; 56]]));
}

#[test]
fn two_threads_pass_records_around_a_small_ring() {
    const RECORDS: u32 = 50_000;
    let ring = Ring::alone(1024);
    let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
    let end = Instant::now() + Duration::from_secs(60);
    let len = |i: u32| (i * 37 % 249) as usize;
    std::thread::scope(|threads| {
        threads.spawn(move || {
            for i in 0..RECORDS {
                let bytes = vec![i as u8; len(i)];
                while !producer.push(i, &[&bytes]) {
                    assert!(Instant::now() < end, "record {i} finds no room");
                    std::thread::yield_now();
                }
            }
        });
        let mut next = 0;
        while next < RECORDS {
            let popped = consumer.pop(|kind, bytes| {
                assert_eq!((kind, bytes.len()), (next, len(next)));
                assert!(bytes.iter().all(|byte| *byte == next as u8));
            });
            match popped.unwrap() {
                Some(()) => next += 1,
                None => std::thread::yield_now(),
            }
            assert!(Instant::now() < end, "record {next} does not come");
        }
    });
    assert!(consumer.is_empty());
}

/// A test's operation on a ring.
#[derive(Clone, Debug)]
enum RingStep {
    /// (Bytes, index): pushes a record of so many bytes in two parts, cut at the index.
    Push(usize, Index),
    Pop,
}

fn steps() -> impl Strategy<Value = Vec<RingStep>> {
    let push =
        (0..=Ring::largest(SMALL), any::<Index>()).prop_map(|(len, cut)| RingStep::Push(len, cut));
    prop::collection::vec(prop_oneof![3 => push, 2 => Just(RingStep::Pop)], 1..200)
}

proptest! {
    #[test]
    fn pushed_records_are_popped_in_order(steps in steps()) {
        let ring = Ring::alone(SMALL);
        let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
        let mut inside = VecDeque::new();
        for (i, step) in steps.into_iter().enumerate() {
            match step {
                RingStep::Push(len, cut) => {
                    let bytes = (0..len).map(|at| (at + i) as u8).collect::<Vec<_>>();
                    let (one, two) = bytes.split_at(cut.index(len + 1));
                    let free = producer.free();
                    if producer.push(i as u32, &[one, two]) {
                        prop_assert!(producer.free() < free);
                        inside.push_back((i as u32, bytes));
                    } else {
                        prop_assert!(free < 2 * (len + 72));
                        prop_assert!(!inside.is_empty() && producer.wants_room());
                    }
                }
                RingStep::Pop => prop_assert_eq!(pop(&mut consumer), inside.pop_front()),
            }
            prop_assert_eq!(consumer.is_empty(), inside.is_empty());
        }
        while let Some(record) = inside.pop_front() {
            prop_assert_eq!(pop(&mut consumer), Some(record));
        }
        prop_assert_eq!(producer.free(), SMALL);
    }

    /// Writes plausible counts and prefixes, and random words, anywhere and at any time.
    #[test]
    fn random_words_in_ring_memory_are_survived(
        steps in steps(),
        scribbles in prop::collection::vec((any::<Index>(), prop_oneof![
            any::<u64>(),
            (0..40u64).prop_map(|lines| lines * 64),
            (0..600u64, prop_oneof![Just(u64::from(u32::MAX)), 0..4u64])
                .prop_map(|(len, kind)| len | kind << 32),
        ]), 1..200),
        headers_only: bool,
    ) {
        let ring = Ring::alone(SMALL);
        let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
        let mut scribbles = scribbles.into_iter().cycle();
        for step in steps {
            let (place, value) = scribbles.next().unwrap();
            let words = ring.words().len();
            let place = if headers_only { place.index(8) * 8 } else { place.index(words) };
            ring.words()[place].store(value, Ordering::Relaxed);
            match step {
                RingStep::Push(len, _) => {
                    producer.push(1, &[&vec![1; len]]);
                    producer.wants_room();
                    prop_assert!(producer.free() <= SMALL);
                }
                RingStep::Pop => {
                    let popped = consumer.pop(|_, bytes| bytes.len());
                    if let Ok(Some(len)) = popped {
                        prop_assert!(len <= Ring::largest(SMALL));
                    }
                    consumer.take_wanted();
                    consumer.is_empty();
                }
            }
        }
    }
}

#[test]
fn random_words_during_pops_are_survived() {
    let ring = Ring::alone(SMALL);
    let mut consumer = ring.consumer();
    let end = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|threads| {
        let scribbler = threads.spawn(|| {
            // A linear congruential generator with Knuth's constants.
            let mut random = 1u64;
            for _ in 0..500_000 {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let value = (random >> 40) % 128;
                let words = ring.words();
                match (random >> 33) % 4 {
                    // Ahead of the consumer's count, as only then anything is read.
                    0 => words[0].store(
                        words[8].load(Ordering::Relaxed) + value % 8 * 64,
                        Ordering::Relaxed,
                    ),
                    1 => words[0].store(random, Ordering::Relaxed),
                    _ => words[24 + (random >> 50) as usize % 64].store(value, Ordering::Relaxed),
                }
            }
        });
        while !scribbler.is_finished() && Instant::now() < end {
            if let Ok(Some(len)) = consumer.pop(|_, bytes| bytes.len()) {
                assert!(len <= Ring::largest(SMALL));
            }
        }
        assert!(scribbler.is_finished());
    });
}
