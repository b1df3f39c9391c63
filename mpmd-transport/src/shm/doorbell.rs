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

/// Bit of the state word: set while the engine (the thread that looks if no other does) sleeps, or
/// takes its last look before.
const ENGINE_ASLEEP: u32 = 1;
/// Unit of the state word's count of parked (sleeping) threads, which has 8 bits.
const PARKED: u32 = 1 << 8;
/// Limit on the counted parked threads.
const MOST_PARKED: u32 = 255;
/// Unit of the state word's count of drivers (threads that look at the rings), which has 16 bits.
const DRIVER: u32 = 1 << 16;

/// Indices of the doorbell's words, of 4 bytes each. `WAITERS` is on a cache line of its own:
/// threads of this process write it, peers read the others.
const STATE: usize = 0;
const ENGINE: usize = 1;
const WAITERS: usize = 16;
const WORDS: usize = 32;

/// Limit on the sleep of a thread that finds [`MOST_PARKED`] others parked, as no peer would wake
/// it.
const UNCOUNTED: Duration = Duration::from_millis(1);

/// A way to sleep on a word of memory until another thread or process wakes it.
pub(super) trait Futex {
    /// Sleeps until `word` is woken, or `timeout` is over. Returns at once if the word is not
    /// `expected`. This check and going to sleep are one step with respect to [`wake`](Self::wake).
    /// May return early.
    fn wait(&self, word: &AtomicU32, expected: u32, timeout: Option<Duration>);

    /// Wakes one sleeper on `word`, or all.
    fn wake(&self, word: &AtomicU32, all: bool);
}

/// The doorbell of one process, in memory that its peers map too.
///
/// Peers may [`ring`](Self::ring) it; the other methods are for its own process.
#[derive(Clone)]
pub(super) struct Doorbell {
    words: SharedWords<AtomicU32>,
}

impl Doorbell {
    /// Bytes of memory that a doorbell takes.
    pub(super) const BYTES: usize = WORDS * size_of::<u32>();

    /// Wraps the [`BYTES`](Self::BYTES) bytes at `first`, which are zero before their first use.
    ///
    /// # Safety
    ///
    /// Those bytes must be mapped for reading and writing until `keep` is dropped. Until then, all
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

    /// Creates a doorbell in memory of its own.
    #[cfg(test)]
    pub(super) fn alone() -> Self {
        Self {
            words: SharedWords::alone(WORDS),
        }
    }

    /// Wakes the doorbell's process if none of its threads is awake to look: all parked threads, or
    /// else the engine. Called after publishing something for that process.
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

    /// Ends every [`park`](Self::park) of this process for which [`parking`](Self::parking) was
    /// called before. Called when an event happened that a parked thread may wait for.
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
    /// engine. For events that a last look does not see in the rings, such as a shutdown.
    pub(super) fn rouse(&self, futex: &impl Futex) {
        self.bump(WAITERS, futex, true);
        self.bump(ENGINE, futex, true);
    }

    /// Starts driving. Until the [`RingDriver`] leaves, peers wake no thread, as it looks at
    /// everything they publish.
    pub(super) fn enter(&self) -> RingDriver<'_> {
        // Needs no ordering: peers that skip a wake-up because of this are seen by the look after
        // it leaves.
        self.words[STATE].fetch_add(DRIVER, Ordering::Relaxed);
        RingDriver { door: self }
    }

    /// Returns the value to pass to [`park`](Self::park). The caller takes it before it checks its
    /// condition for the last time.
    pub(super) fn parking(&self) -> u32 {
        // A thread that sees the value of a `wake` sees everything that happened before it.
        self.words[WAITERS].load(Ordering::Acquire)
    }

    /// Sleeps until a peer rings, [`wake`](Self::wake) is called, or `timeout` is over. Returns at
    /// once if there was a `wake` since `parking` was taken, or if `look` returns true. May return
    /// early.
    ///
    /// `look` is the last look: true if the rings hold work, or room that a record waits for. It
    /// must see everything that every peer has published. If another thread holds the rings, it
    /// must wait for them rather than skip them. The caller comes back as a driver: it drives, then
    /// leaves.
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

    /// Puts the engine to sleep until a peer rings while no other thread looks, or `timeout` is
    /// over. Does not sleep if `look` returns true. May return early. Afterwards the engine is
    /// awake, and looks again before its next sleep.
    ///
    /// `look` is the last look, as for [`park`](Self::park). Only one thread of a process is the
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

    /// Returns the memory itself, for tests that write invalid values.
    #[cfg(test)]
    pub(super) fn words(&self) -> &[AtomicU32] {
        &self.words
    }
}

/// A thread that looks at the rings. Leaves when dropped, but call [`leave`](Self::leave) instead.
#[must_use]
pub(super) struct RingDriver<'a> {
    door: &'a Doorbell,
}

impl RingDriver<'_> {
    /// Announces that this thread no longer looks, then looks once more. `look` must take
    /// everything that the peers have published, as they woke no thread because of this driver. If
    /// another thread holds the rings, it must wait for them: that thread may already have had its
    /// own last look.
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

/// A thread that sleeps, or is about to.
struct Parked<'a> {
    door: &'a Doorbell,
}

impl<'a> Parked<'a> {
    /// Counts one more parked thread. Returns `None` if the count is at its limit of 255.
    fn new(door: &'a Doorbell) -> Option<Self> {
        let more = |state| (parked(state) < MOST_PARKED).then(|| state + PARKED);
        let counted = door.words[STATE].fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.ok().map(|_| Self { door })
    }

    /// Turns the parked thread into a driver in one step. Otherwise a peer could find it neither
    /// parked nor driving, and wake the engine.
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

/// Returns the number of parked threads in a state word.
fn parked(state: u32) -> u32 {
    (state / PARKED) & MOST_PARKED
}
