//! Model checks of the ring and the doorbell: all orders in which their threads can interleave.
//!
//! The sources of the ring and the doorbell are included here with loom's atomics in place of the
//! system's. Loom runs a model once for each order of its threads' steps and each value that a load
//! may see. The number of preemptions of a thread is bounded; bugs of this kind need few. Waits
//! have no timeout here: a lost wake-up is a deadlock, which loom reports. Such a report may end in
//! an abort, because guards of abandoned threads run outside the model. Then read the first panic.
//!
//! Loom does not try to reorder a store before an earlier load. The ordering of the ring's head
//! forbids that.

#![allow(unsafe_code)]

#[expect(dead_code, reason = "models do not need all of it")]
#[path = "../../src/shm/doorbell.rs"]
mod doorbell;
mod futex;
mod process;
#[expect(dead_code, reason = "models do not need all of it")]
#[path = "../../src/shm/ring.rs"]
mod ring;
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}
#[path = "../../src/shm/shared_words.rs"]
mod shared_words;

use std::sync::Arc;

use loom::thread;

use doorbell::Doorbell;
use futex::ModelFutex;
use process::{Process, Slot};
use ring::Ring;

/// Capacity in bytes of a small ring: four records of one line (64 bytes) each.
const SMALL: usize = 256;
/// Capacity in bytes of a ring for records of two lines; eight lines (of 64 bytes) in all.
const LARGER: usize = 512;

/// Runs `f` in every order of its threads. With `interruptions`, only orders with at most that many
/// preemptions.
fn model(interruptions: impl Into<Option<usize>>, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = interruptions.into();
    builder.max_branches = 10_000;
    builder.check(f);
}

#[test]
fn records_pushed_while_popped_arrive_whole_around_the_end() {
    model(None, || {
        let ring = Ring::alone(LARGER);
        let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
        for _ in 0..7 {
            assert!(producer.push(0, &[]));
            assert_eq!(consumer.pop(|kind, _| kind), Ok(Some(0)));
        }
        // The first record does not fit into the last line.
        let sent: [Vec<u8>; 2] = [(1..=58).collect(), vec![60, 61, 62]];
        let records = sent.clone();
        let pushing = thread::spawn(move || {
            for (kind, bytes) in records.iter().enumerate() {
                assert!(producer.push(kind as u32, &[bytes]));
            }
        });
        let mut popped = vec![];
        while popped.len() < 2 {
            match consumer.pop(|kind, bytes| (kind, bytes.to_vec())).unwrap() {
                Some((kind, bytes)) => {
                    assert_eq!(kind as usize, popped.len());
                    popped.push(bytes);
                }
                None => thread::yield_now(),
            }
        }
        assert_eq!(popped, sent);
        assert!(consumer.is_empty());
        pushing.join().unwrap();
    });
}

#[test]
fn a_record_is_not_written_over_before_it_is_popped() {
    model(3, || {
        let ring = Ring::alone(SMALL);
        let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
        for kind in 0..4 {
            assert!(producer.push(kind, &[&[kind as u8; 8]]));
        }
        let pushing = thread::spawn(move || {
            for kind in 4..6 {
                while !producer.push(kind, &[&[kind as u8; 8]]) {
                    thread::yield_now();
                }
            }
        });
        for expected in 0..6 {
            while consumer
                .pop(|kind, bytes| assert_eq!((kind, bytes), (expected, &[expected as u8; 8][..])))
                == Ok(None)
            {
                thread::yield_now();
            }
        }
        pushing.join().unwrap();
    });
}

#[test]
fn producer_waiting_for_room_is_woken() {
    model(5, || {
        let ring = Ring::alone(LARGER);
        let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
        for _ in 0..8 {
            assert!(producer.push(0, &[]));
        }
        let (door, futex) = (Doorbell::alone(), Arc::new(ModelFutex::new()));
        let (bell, bell_futex) = (door.clone(), futex.clone());
        // The new record needs both lines that are popped: the first ring of the doorbell may come
        // too early.
        let popping = thread::spawn(move || {
            for _ in 0..2 {
                assert_eq!(consumer.pop(|kind, _| kind), Ok(Some(0)));
                if consumer.take_wanted() {
                    bell.ring(&*bell_futex);
                }
            }
        });
        while !producer.push(1, &[&[1; 57]]) {
            door.sleep(&*futex, None, || !producer.wants_room());
        }
        popping.join().unwrap();
    });
}

#[test]
fn driver_waiting_for_room_is_woken() {
    model(None, || {
        let ring = Ring::alone(SMALL);
        let (mut producer, mut consumer) = (ring.producer(), ring.consumer());
        for _ in 0..4 {
            assert!(producer.push(0, &[]));
        }
        let (door, futex) = (Doorbell::alone(), Arc::new(ModelFutex::new()));
        let (bell, bell_futex) = (door.clone(), futex.clone());
        let popping = thread::spawn(move || {
            assert_eq!(consumer.pop(|kind, _| kind), Ok(Some(0)));
            if consumer.take_wanted() {
                bell.ring(&*bell_futex);
            }
        });
        let mut pushed = false;
        while !pushed {
            let driver = door.park(&*futex, door.parking(), None, || !producer.wants_room());
            pushed = producer.push(1, &[]);
            // A driver that has left tries again: a consumer may have made room and woken nobody.
            pushed = driver.leave(|| pushed || !producer.wants_room() && producer.push(1, &[]));
        }
        popping.join().unwrap();
    });
}

#[test]
fn engine_misses_no_message() {
    model(5, || {
        let (process, mut peer) = Process::with_peer();
        let pushing = thread::spawn(move || {
            peer.send(0);
            peer.send(1);
        });
        process.run_engine(|| process.arrived() == 2);
        pushing.join().unwrap();
    });
}

#[test]
fn parked_thread_misses_no_message_and_no_local_event() {
    model(3, || {
        let (process, mut peer) = Process::with_peer();
        let pushing = thread::spawn(move || peer.send(0));
        let local = process.clone();
        let ending = thread::spawn(move || local.end());
        process.wait_for(Slot::Message);
        process.wait_for(Slot::End);
        pushing.join().unwrap();
        ending.join().unwrap();
    });
}

#[test]
fn message_during_a_drivers_exit_is_found() {
    model(3, || {
        let (process, mut peer) = Process::with_peer();
        let engine = process.engine();
        let driving = {
            let process = process.clone();
            thread::spawn(move || process.drive())
        };
        peer.send(0);
        // From here on only a thread that was woken takes messages.
        process.block_until_arrived(1);
        driving.join().unwrap();
        process.stop();
        engine.join().unwrap();
    });
}

#[test]
fn message_during_a_woken_threads_exit_is_found() {
    model(2, || {
        let (process, mut peer) = Process::with_peer();
        let engine = process.engine();
        let waiting = {
            let process = process.clone();
            thread::spawn(move || process.wait_for(Slot::Message))
        };
        peer.send(0);
        peer.send(1);
        process.block_until_arrived(2);
        waiting.join().unwrap();
        process.stop();
        engine.join().unwrap();
    });
}

#[test]
fn two_parked_threads_are_each_woken() {
    model(2, || {
        let (process, mut peer) = Process::with_peer();
        let waiting = [Slot::Message, Slot::End].map(|slot| {
            let process = process.clone();
            thread::spawn(move || process.wait_for(slot))
        });
        let pushing = thread::spawn(move || peer.send(0));
        process.end();
        pushing.join().unwrap();
        waiting
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
}
