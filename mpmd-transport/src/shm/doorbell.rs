//! A process's doorbell: peers ring it when they have published something for the process.
//!
//! Ringing costs a system call only if no thread of the process is awake to look at the rings.
//! These threads look:
//!
//! - *drivers*: they look at the rings, and once more after they have announced that they leave;
//! - *parked* threads: they wait for an event that a message may bring, and sleep meanwhile;
//! - the *engine*: the thread that looks if no other does. Awake, it looks again before it sleeps.
//!
//! No message is missed. A thread that stops looking (leaves, parks, sleeps) first writes that to
//! `state`, then passes a fence, then looks once more. A publisher passes a fence, then reads
//! `state`. One of the two fences comes first. Either the last look sees the published data, or the
//! publisher sees the sleeping thread and wakes it. *Published* is all that the last look sees:
//! records, and free room that a producer waits for.
//!
//! A peer that writes invalid values to these words can cause a needless wake-up, or suppress a
//! needed one. So every wait has a timeout, and looks afterwards.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::shared_words::SharedWords;
use super::sync::{AtomicU32, Ordering, fence};

/// Bit of the state word: set while the engine sleeps or checks the rings for the last time before
/// it sleeps. The engine is the thread that reads the rings when no other thread does.
const ENGINE_ASLEEP: u32 = 1;
/// Added to the state word for each parked (sleeping) thread; the count has 8 bits.
const PARKED: u32 = 1 << 8;
/// Largest number of parked threads that the state word can count.
const MOST_PARKED: u32 = 255;
/// Added to the state word for each driver (a thread that reads the rings); the count has 16 bits.
const DRIVER: u32 = 1 << 16;

/// Indices of the doorbell's words, each of 4 bytes. `WAITERS` has a cache line for itself, because
/// threads of this process write it and peers only read the other words.
const STATE: usize = 0;
const ENGINE: usize = 1;
const WAITERS: usize = 16;
const WORDS: usize = 32;

/// Longest sleep of a thread while [`MOST_PARKED`] others are parked. No peer wakes this thread,
/// because it is not counted.
const UNCOUNTED: Duration = Duration::from_millis(1);

/// A way to sleep on a word of memory until another thread or process wakes the sleeper.
pub(super) trait Futex {
    /// Sleeps until `word` is woken or `timeout` is over. Returns at once if the value of `word` is
    /// not `expected`. The comparison and the start of the sleep are one atomic step with respect
    /// to [`wake`](Self::wake). May return early.
    fn wait(&self, word: &AtomicU32, expected: u32, timeout: Option<Duration>);

    /// Wakes one thread that sleeps on `word`, or with `all` every such thread.
    fn wake(&self, word: &AtomicU32, all: bool);
}

/// A doorbell: peers ring it to wake this process. It is in memory that the peers map too.
///
/// Peers may call [`ring`](Self::ring); the other methods are for the doorbell's own process.
#[derive(Clone)]
pub(super) struct Doorbell {
    words: SharedWords<AtomicU32>,
}

impl Doorbell {
    /// Size of a doorbell in bytes.
    pub(super) const BYTES: usize = WORDS * size_of::<u32>();

    /// Wraps the [`BYTES`](Self::BYTES) bytes at `first`. They must be zero before their first use.
    ///
    /// # Safety
    ///
    /// These bytes must be mapped for reading and writing until `keep` is dropped. Until then, all
    /// processes must access them only by atomic operations on whole aligned words of 4 bytes.
    ///
    /// # Panics
    ///
    /// If `first` is not aligned to 4 bytes.
    pub(super) unsafe fn at(first: NonNull<u8>, keep: Arc<dyn Send + Sync>) -> Self {
        // SAFETY: The caller's promise is that of `SharedWords::at`; any bytes are valid atomics.
        let words = unsafe { SharedWords::at(first, WORDS, keep) };
        Self { words }
    }

    /// Creates a doorbell in private memory, for tests and models.
    #[cfg(test)]
    pub(super) fn alone() -> Self {
        Self {
            words: SharedWords::alone(WORDS),
        }
    }

    /// Wakes all parked threads of the doorbell's process, or its engine if none is parked. Does
    /// nothing if one of its threads already reads the rings. Called after publishing something for
    /// that process.
    pub(super) fn ring(&self, futex: &impl Futex) {
        fence(Ordering::SeqCst);
        let state = self.words[STATE].load(Ordering::Relaxed);
        if state >= DRIVER {
            // A driver looks once more after it has left.
        } else if parked(state) > 0 {
            // One would do, as it drives and then wakes the receiver of the message. But that adds
            // a hop, and the publisher cannot tell which thread is the receiver.
            self.bump(WAITERS, futex, true);
        } else if state & ENGINE_ASLEEP != 0 {
            self.bump(ENGINE, futex, false);
        }
    }

    /// Ends every [`park`](Self::park) of this process whose [`parking`](Self::parking) value was
    /// taken before this call. Called after an event for which a parked thread may wait.
    pub(super) fn wake(&self, futex: &impl Futex) {
        // Counts even if no thread is parked yet: a thread that took `parking` and then looked in
        // vain must not sleep.
        self.words[WAITERS].fetch_add(1, Ordering::Release);
        // Either this sees the parked thread, or that thread sees the new value when it goes to
        // sleep.
        fence(Ordering::SeqCst);
        if parked(self.words[STATE].load(Ordering::Relaxed)) > 0 {
            futex.wake(&self.words[WAITERS], true);
        }
    }

    /// Wakes all threads of this process that sleep at the doorbell or are about to, including the
    /// engine. For events that do not show in the rings, such as a shutdown.
    pub(super) fn rouse(&self, futex: &impl Futex) {
        self.bump(WAITERS, futex, true);
        self.bump(ENGINE, futex, true);
    }

    /// Registers the calling thread as a driver, which reads everything that peers publish. Until
    /// the [`RingDriver`] leaves, peers wake no thread of this process.
    pub(super) fn enter(&self) -> RingDriver<'_> {
        // Needs no ordering: peers that skip a wake-up because of this are seen by the look after
        // it leaves.
        self.words[STATE].fetch_add(DRIVER, Ordering::Relaxed);
        RingDriver { door: self }
    }

    /// Returns the value to pass to [`park`](Self::park). Call it before the last check of the
    /// condition that the thread waits for.
    pub(super) fn parking(&self) -> u32 {
        // A thread that sees the value of a `wake` sees everything that happened before it.
        self.words[WAITERS].load(Ordering::Acquire)
    }

    /// Sleeps until a peer rings, [`wake`](Self::wake) is called, or `timeout` is over. Returns at
    /// once if `wake` was called since `parking` was taken, or if `look` returns true. May return
    /// early.
    ///
    /// `look` is the last check: it returns true if the rings contain records, or free space that a
    /// record waits for. It must see everything that peers have published. If another thread has
    /// locked the rings, `look` must wait for the lock. The returned [`RingDriver`] makes the
    /// caller a driver, which reads the rings and then leaves.
    pub(super) fn park(
        &self,
        futex: &impl Futex,
        parking: u32,
        timeout: Option<Duration>,
        look: impl FnOnce() -> bool,
    ) -> RingDriver<'_> {
        let Some(parked) = Parked::new(self) else {
            let timeout = timeout.map_or(UNCOUNTED, |timeout| timeout.min(UNCOUNTED));
            futex.wait(&self.words[WAITERS], parking, Some(timeout));
            return self.enter();
        };
        fence(Ordering::SeqCst);
        if !look() {
            futex.wait(&self.words[WAITERS], parking, timeout);
        }
        parked.into_driver()
    }

    /// Puts the engine to sleep until a peer rings while no other thread reads the rings, or until
    /// `timeout` is over. Does not sleep if `look` returns true. May return early. Afterwards the
    /// engine counts as awake, and must check the rings before it sleeps again.
    ///
    /// `look` is the last check, as for [`park`](Self::park). Only one thread of a process is the
    /// engine.
    pub(super) fn sleep(
        &self,
        futex: &impl Futex,
        timeout: Option<Duration>,
        look: impl FnOnce() -> bool,
    ) {
        let before = self.words[ENGINE].load(Ordering::Acquire);
        self.words[STATE].fetch_or(ENGINE_ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !look() {
            futex.wait(&self.words[ENGINE], before, timeout);
        }
        self.words[STATE].fetch_and(!ENGINE_ASLEEP, Ordering::Relaxed);
    }

    fn bump(&self, word: usize, futex: &impl Futex, all: bool) {
        self.words[word].fetch_add(1, Ordering::Release);
        futex.wake(&self.words[word], all);
    }

    /// Returns the doorbell's words, for tests that write invalid values into them.
    #[cfg(test)]
    pub(super) fn words(&self) -> &[AtomicU32] {
        &self.words
    }
}

/// Marks the calling thread as a driver, which reads the rings. Dropping it leaves, but prefer
/// [`leave`](Self::leave), which checks the rings once more.
#[must_use]
pub(super) struct RingDriver<'a> {
    door: &'a Doorbell,
}

impl RingDriver<'_> {
    /// Announces that this thread no longer reads the rings, then calls `look` once. `look` must
    /// take everything that peers have published, because they woke no thread while this driver was
    /// registered. If another thread has locked the rings, `look` must wait for the lock: that
    /// thread may already have made its own last check.
    pub(super) fn leave<R>(self, look: impl FnOnce() -> R) -> R {
        drop(self);
        fence(Ordering::SeqCst);
        look()
    }
}

impl Drop for RingDriver<'_> {
    fn drop(&mut self) {
        self.door.words[STATE].fetch_sub(DRIVER, Ordering::Relaxed);
    }
}

/// Marks the calling thread as parked: it sleeps, or is about to.
struct Parked<'a> {
    door: &'a Doorbell,
}

impl<'a> Parked<'a> {
    /// Counts one more parked thread. Returns `None` if the count is at [`MOST_PARKED`].
    fn new(door: &'a Doorbell) -> Option<Self> {
        let more = |state| (parked(state) < MOST_PARKED).then(|| state + PARKED);
        let counted = door.words[STATE].fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.ok().map(|_| Self { door })
    }

    /// Turns the parked thread into a driver in one atomic step. Otherwise a peer could see it
    /// neither parked nor driving, and wake the engine.
    fn into_driver(self) -> RingDriver<'a> {
        let door = self.door;
        std::mem::forget(self);
        door.words[STATE].fetch_add(DRIVER - PARKED, Ordering::Relaxed);
        RingDriver { door }
    }
}

impl Drop for Parked<'_> {
    fn drop(&mut self) {
        self.door.words[STATE].fetch_sub(PARKED, Ordering::Relaxed);
    }
}

/// Returns the number of parked threads in the state word `state`.
fn parked(state: u32) -> u32 {
    (state / PARKED) & MOST_PARKED
}
