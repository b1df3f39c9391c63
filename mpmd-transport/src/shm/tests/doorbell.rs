//! Tests of the doorbell: which threads are woken, and that the system wakes them.

use std::cell::RefCell;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::ProtFlags;

use crate::shm::doorbell::{Doorbell, Futex};
use crate::shm::futex::SystemFutex;
use mpmd_memory::{map, unmap};

/// Time limit for a wait: longer than anything in these tests takes.
const TIME_LIMIT: Duration = Duration::from_secs(60);
const STATE: usize = 0;
const ENGINE: usize = 1;
const WAITERS: usize = 16;

/// A futex that records its calls and never sleeps.
#[derive(Default)]
struct Recorder {
    waits: RefCell<Vec<(u32, Option<Duration>)>>,
    wakes: RefCell<Vec<(usize, bool)>>,
}

impl Futex for Recorder {
    fn wait(&self, word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
        if word.load(Ordering::Relaxed) == expected {
            self.waits.borrow_mut().push((expected, timeout));
        }
    }

    fn wake(&self, word: &AtomicU32, all: bool) {
        self.wakes
            .borrow_mut()
            .push((ptr::from_ref(word).addr(), all));
    }
}

impl Recorder {
    /// Takes the wake-ups since the last call: (index of the word, true if all sleepers were
    /// woken).
    fn woken(&self, door: &Doorbell) -> Vec<(usize, bool)> {
        let start = ptr::from_ref(&door.words()[0]).addr();
        self.wakes
            .take()
            .into_iter()
            .map(|(word, all)| ((word - start) / 4, all))
            .collect()
    }
}

#[test]
fn ring_wakes_a_looker_only_if_none_is_awake() {
    let (door, futex) = (Doorbell::alone(), Recorder::default());
    door.ring(&futex);
    assert_eq!(futex.woken(&door), [], "the engine is awake");
    door.sleep(&futex, None, || {
        door.ring(&futex);
        assert_eq!(futex.woken(&door), [(ENGINE, false)]);
        let driver = door.park(&futex, door.parking(), None, || {
            door.ring(&futex);
            assert_eq!(
                futex.woken(&door),
                [(WAITERS, true)],
                "parked threads come before the engine"
            );
            let driver = door.enter();
            door.ring(&futex);
            assert_eq!(futex.woken(&door), [], "a driver looks");
            driver.leave(|| door.ring(&futex));
            assert_eq!(futex.woken(&door), [(WAITERS, true)], "it has left");
            false
        });
        door.ring(&futex);
        assert_eq!(futex.woken(&door), [], "the parked thread drives now");
        driver.leave(|| ());
        door.ring(&futex);
        assert_eq!(futex.woken(&door), [(ENGINE, false)]);
        false
    });
    door.ring(&futex);
    assert_eq!(futex.woken(&door), []);
    assert_eq!(
        *futex.waits.borrow(),
        [],
        "there was a ring before each sleep"
    );
}

#[test]
fn sleep_is_skipped_after_an_earlier_event() {
    let (door, futex) = (Doorbell::alone(), Recorder::default());
    let slept = || futex.waits.take().len();
    let park = |parking, found| {
        door.park(&futex, parking, Some(TIME_LIMIT), || found)
            .leave(|| ())
    };

    park(door.parking(), false);
    assert_eq!(slept(), 1);
    park(door.parking(), true);
    assert_eq!(slept(), 0, "the last look found something");
    let parking = door.parking();
    door.wake(&futex);
    assert_eq!(futex.woken(&door), [], "nobody sleeps");
    park(parking, false);
    assert_eq!(slept(), 0, "there was a wake since");
    door.park(&futex, door.parking(), None, || {
        door.wake(&futex);
        assert_eq!(futex.woken(&door), [(WAITERS, true)]);
        false
    })
    .leave(|| ());
    assert_eq!(slept(), 0);

    door.sleep(&futex, None, || true);
    assert_eq!(slept(), 0);
    door.sleep(&futex, None, || {
        door.rouse(&futex);
        false
    });
    assert_eq!(
        (slept(), futex.woken(&door)),
        (0, vec![(WAITERS, true), (ENGINE, true)])
    );
    door.sleep(&futex, None, || {
        door.wake(&futex);
        false
    });
    assert_eq!(
        (slept(), futex.woken(&door)),
        (1, vec![]),
        "the engine waits for nothing of this process"
    );
    assert_eq!(door.words()[STATE].load(Ordering::Relaxed), 0);
}

#[test]
fn uncounted_parked_thread_sleeps_briefly() {
    let (door, futex) = (Doorbell::alone(), Recorder::default());
    door.words()[STATE].store(255 << 8, Ordering::Relaxed);
    door.park(&futex, 0, Some(TIME_LIMIT), || {
        panic!("this one is not woken by peers")
    })
    .leave(|| ());
    assert_eq!(*futex.waits.borrow(), [(0, Some(Duration::from_millis(1)))]);
    assert_eq!(door.words()[STATE].load(Ordering::Relaxed), 255 << 8);
}

proptest! {
    #[test]
    fn random_words_in_doorbell_keep_timeouts(states: [u32; 8], engine: u32, waiters: u32) {
        let (door, futex) = (Doorbell::alone(), Recorder::default());
        door.words()[ENGINE].store(engine, Ordering::Relaxed);
        door.words()[WAITERS].store(waiters, Ordering::Relaxed);
        let mut states = states.into_iter();
        let mut scribble = || door.words()[STATE].store(states.next().unwrap(), Ordering::Relaxed);
        scribble();
        door.ring(&futex);
        let driver = door.enter();
        scribble();
        door.wake(&futex);
        driver.leave(&mut scribble);
        let driver = door.park(&futex, door.parking(), Some(TIME_LIMIT), || { scribble(); false });
        scribble();
        driver.leave(|| ());
        door.sleep(&futex, Some(TIME_LIMIT), || { scribble(); false });
        scribble();
        door.rouse(&futex);
        door.ring(&futex);
        // Every sleep has the timeout that it was given, or a shorter one.
        for (_, timeout) in futex.waits.borrow().iter() {
            prop_assert!(timeout.is_some_and(|timeout| timeout <= TIME_LIMIT));
        }
    }
}

#[test]
fn timeout_ends_a_wait() {
    let (door, futex) = (Doorbell::alone(), SystemFutex);
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        door.sleep(&futex, Some(Duration::from_millis(1)), || false);
        door.park(
            &futex,
            door.parking(),
            Some(Duration::from_millis(1)),
            || false,
        )
        .leave(|| ());
        futex.wait(&door.words()[ENGINE], 7, None);
        ended.send(())
    });
    end.recv_timeout(TIME_LIMIT).unwrap();
}

/// A mapped page of memory; unmapped when dropped.
struct Mapped(NonNull<u8>);

// SAFETY: Only its address is used, and to unmap it.
unsafe impl Send for Mapped {}

// SAFETY: As above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: `door_in` mapped that page, and only the doorbell that holds this object uses it.
        unsafe { unmap(self.0, 4096) }
    }
}

fn door_in(file: &impl std::os::fd::AsFd) -> Doorbell {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let page = map(4096, access, Some(file.as_fd())).unwrap();
    // SAFETY: The page stays mapped until `Mapped` is dropped, and only doorbells use it.
    unsafe { Doorbell::at(page, Arc::new(Mapped(page))) }
}

/// Two mappings of one file stand for two processes: they share the memory, but not its address.
#[test]
fn a_peer_wakes_through_its_own_mapping() {
    let file = memfd_create("door", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    let (ours, theirs) = (door_in(&file), door_in(&file));
    let (ended, end) = mpsc::channel();
    let sleeper = ours.clone();
    std::thread::spawn(move || {
        sleeper.sleep(&SystemFutex, None, || false);
        ended.send("engine").unwrap();
        sleeper
            .park(&SystemFutex, sleeper.parking(), None, || false)
            .leave(|| ());
        ended.send("parked").unwrap();
    });
    let until = Instant::now() + TIME_LIMIT;
    for (thread, flag) in [("engine", 0xff), ("parked", 0xff00)] {
        while theirs.words()[STATE].load(Ordering::Relaxed) & flag == 0 {
            assert!(Instant::now() < until, "the {thread} thread does not sleep");
            std::thread::yield_now();
        }
        theirs.ring(&SystemFutex);
        assert_eq!(end.recv_timeout(TIME_LIMIT), Ok(thread));
    }
}
