//! A process's door: where its peers ring when they have published something for it.
//!
//! Ringing costs a system call only where nobody in the process is awake to look. Who may be awake:
//!
//! - *drivers*: threads that look at the rings, and look once more after they have said that they
//!   leave;
//! - *parked* threads, which wait for something that a message may bring, and sleep meanwhile;
//! - the *engine*, the thread that looks where nobody else does. Awake, it looks again before it
//!   sleeps.
//!
//! Why no message is slept through: whoever stops looking (leaves, parks, sleeps) first says so in
//! `state`, then passes a fence, then looks once more; whoever publishes passes a fence, then reads
//! `state`. Of two such fences one comes first. Either the last look sees what was published, or
//! the publisher sees who sleeps and wakes it. *Published* is all that the last look sees: records,
//! and room that was waited for.
//!
//! What a peer's nonsense in these words can do: a wake-up for nothing, or none where one was due.
//! So every wait has a time-out, and looks afterwards.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::sync::{AtomicU32, Ordering, fence};
use super::words::Words;

/// In `state`: the engine sleeps, or is about to look once more before it does.
const ENGINE_ASLEEP: u32 = 1;
/// In `state`: one parked thread; 8 bits.
const PARKED: u32 = 1 << 8;
const MOST_PARKED: u32 = 255;
/// In `state`: one driver; 16 bits.
const DRIVER: u32 = 1 << 16;

/// Places of the words. The last is on a cache line of its own: threads of this process write it,
/// peers read the others.
const STATE: usize = 0;
const ENGINE: usize = 1;
const WAITERS: usize = 16;
const WORDS: usize = 32;

/// How long a thread sleeps that finds [`MOST_PARKED`] others parked, as nobody would wake it.
const UNCOUNTED: Duration = Duration::from_millis(1);

/// Sleeps on a word of memory until another thread or process wakes it.
pub(super) trait Futex {
    /// Sleeps until `word` is woken, or `timeout` is over; not at all where the word is not
    /// `expected`. Looking at the word and going to sleep are one step, as seen by
    /// [`wake`](Self::wake). May return early.
    fn wait(&self, word: &AtomicU32, expected: u32, timeout: Option<Duration>);

    /// Wakes one, or all, who sleep on `word`.
    fn wake(&self, word: &AtomicU32, all: bool);
}

/// The door of one process, in memory that its peers map too.
///
/// Peers may [`ring`](Self::ring); the rest is for the process whose door it is.
#[derive(Clone)]
pub(super) struct Door {
    words: Words<AtomicU32>,
}

impl Door {
    /// How many bytes of memory a door takes.
    pub(super) const BYTES: usize = WORDS * size_of::<u32>();

    /// A door in the [`BYTES`](Self::BYTES) from `first` on, which are zero before its first use.
    ///
    /// # Safety
    ///
    /// Those bytes are mapped for reading and writing until `keep` is dropped. Meanwhile whoever
    /// accesses them, in whichever process, does so by atomic operations on whole aligned words of
    /// 4 bytes.
    ///
    /// # Panics
    ///
    /// Where `first` is not aligned to 4 bytes.
    pub(super) unsafe fn at(first: NonNull<u8>, keep: Arc<dyn Send + Sync>) -> Self {
        // SAFETY: The caller's promise is that of `Words::at`; any bytes are valid atomics.
        Self { words: unsafe { Words::at(first, WORDS, keep) } }
    }

    /// A door in memory of its own.
    #[cfg(test)]
    pub(super) fn alone() -> Self {
        Self { words: Words::alone(WORDS) }
    }

    /// Called after something was published for the process whose door this is: wakes somebody who
    /// looks, where nobody is awake who does.
    pub(super) fn ring(&self, futex: &impl Futex) {
        fence(Ordering::SeqCst);
        let state = self.words[STATE].load(Ordering::Relaxed);
        if state >= DRIVER {
            // Looks once more after it has left.
        } else if parked(state) > 0 {
            // One would do, as it drives and then wakes whoever the message is for. But that is a
            // hop more, and only they know which of them that is.
            self.bump(WAITERS, futex, true);
        } else if state & ENGINE_ASLEEP != 0 {
            self.bump(ENGINE, futex, false);
        }
    }

    /// Ends every [`park`](Self::park) of this process whose [`parking`](Self::parking) came
    /// before: something happened here that a parked thread may wait for.
    pub(super) fn wake(&self, futex: &impl Futex) {
        // Also where nobody is parked yet: who took `parking` and then looked in vain must not
        // sleep.
        self.words[WAITERS].fetch_add(1, Ordering::Release);
        // Either this sees who is parked, or who parks sees the new value when going to sleep.
        fence(Ordering::SeqCst);
        if parked(self.words[STATE].load(Ordering::Relaxed)) > 0 {
            futex.wake(&self.words[WAITERS], true);
        }
    }

    /// Wakes everybody in this process who sleeps at the door, the engine too, or is about to. For
    /// what a last look does not see in the rings: that the process shuts down, say.
    pub(super) fn rouse(&self, futex: &impl Futex) {
        self.bump(WAITERS, futex, true);
        self.bump(ENGINE, futex, true);
    }

    /// Starts driving: until the [`Driver`] leaves, peers wake nobody, as it looks at what they
    /// publish.
    pub(super) fn enter(&self) -> Driver<'_> {
        // No ordering: what peers leave undone because of this is made good when it leaves.
        self.words[STATE].fetch_add(DRIVER, Ordering::Relaxed);
        Driver { door: self }
    }

    /// What to give to [`park`](Self::park); to be taken before the last look at what is waited
    /// for.
    pub(super) fn parking(&self) -> u32 {
        // Who sees the value of a `wake` sees what happened before it.
        self.words[WAITERS].load(Ordering::Acquire)
    }

    /// Sleeps until a peer rings, [`wake`](Self::wake) is called, or `timeout` is over; at once it
    /// returns where there was a `wake` since `parking` was taken, or where `look` is true. May
    /// return early.
    ///
    /// `look` is the last look: whether there is anything in the rings to do, or room that
    /// something waits for. It must see what every peer has published; where another thread has
    /// hold of the rings, it waits for them rather than go without. The caller comes back as a
    /// driver: it drives, then leaves.
    pub(super) fn park(
        &self,
        futex: &impl Futex,
        parking: u32,
        timeout: Option<Duration>,
        look: impl FnOnce() -> bool,
    ) -> Driver<'_> {
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

    /// The engine's sleep: until a peer rings and nobody else is there, or `timeout` is over; not
    /// at all where `look` is true. May return early. Afterwards the engine is awake, and looks
    /// again before it next sleeps.
    ///
    /// `look` is the last look, as for [`park`](Self::park). One thread of the process is the
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

    /// The memory itself, for tests that write nonsense.
    #[cfg(test)]
    pub(super) fn words(&self) -> &[AtomicU32] {
        &self.words
    }
}

/// A thread that looks at the rings. Leaves when dropped, but [`leave`](Self::leave) is the way.
#[must_use]
pub(super) struct Driver<'a> {
    door: &'a Door,
}

impl Driver<'_> {
    /// Says that this thread no longer looks, then looks once more: `look` must take everything
    /// that the peers have published, as they woke nobody because of this driver. Where another
    /// thread has hold of the rings, it waits for them: the other may have had its own last look at
    /// them already.
    pub(super) fn leave<R>(self, look: impl FnOnce() -> R) -> R {
        drop(self);
        fence(Ordering::SeqCst);
        look()
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        self.door.words[STATE].fetch_sub(DRIVER, Ordering::Relaxed);
    }
}

/// A thread that sleeps, or is about to.
struct Parked<'a> {
    door: &'a Door,
}

impl<'a> Parked<'a> {
    /// None where too many are parked.
    fn new(door: &'a Door) -> Option<Self> {
        let more = |state| (parked(state) < MOST_PARKED).then(|| state + PARKED);
        let counted = door.words[STATE].fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.ok().map(|_| Self { door })
    }

    /// In one step, so that no peer finds this thread neither parked nor driving, and wakes the
    /// engine.
    fn into_driver(self) -> Driver<'a> {
        let door = self.door;
        std::mem::forget(self);
        door.words[STATE].fetch_add(DRIVER - PARKED, Ordering::Relaxed);
        Driver { door }
    }
}

impl Drop for Parked<'_> {
    fn drop(&mut self) {
        self.door.words[STATE].fetch_sub(PARKED, Ordering::Relaxed);
    }
}

fn parked(state: u32) -> u32 {
    (state / PARKED) & MOST_PARKED
}
