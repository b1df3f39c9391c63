//! A place for one shard's buffer: empty until its operation ends, then filled, or failed.
//!
//! The producer holds the [`Promise`], everybody else a [`Slot`]. A promise that is dropped unkept
//! fails the slot, so that no wait can outlive what it waits for.

use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Instant;

use mpmd_transport::SharedBuffer;
use mpmd_transport::router::{Failure, FailureKind};
use parking_lot::{Condvar, Mutex};

/// What a slot ends with.
pub(crate) type Outcome = Result<SharedBuffer, Arc<Failure>>;

type Callback = Box<dyn FnOnce(&Outcome) + Send>;

/// The reading side. Clones are the same slot.
#[derive(Clone)]
pub(crate) struct Slot(Arc<Inner>);

struct Inner {
    held: Mutex<Held>,
    ended: Condvar,
}

struct Held {
    state: State,
    /// Kernel calls that were issued and have not picked their input up.
    uses: usize,
    /// The buffer goes as soon as nothing issued before needs it; later readers get this.
    given_up: Option<Arc<Failure>>,
}

enum State {
    Pending { callbacks: Vec<Callback>, wakers: Vec<Waker> },
    Ended(Outcome),
}

/// A use of a slot that was issued: it gets the buffer even where that is given up meanwhile.
pub(crate) struct SlotUse(Slot);

/// The writing side.
pub(crate) struct Promise(Option<Slot>);

impl Slot {
    /// An empty slot and the promise to fill it.
    pub(crate) fn new() -> (Promise, Self) {
        let slot = Self::of(State::Pending { callbacks: Vec::new(), wakers: Vec::new() });
        (Promise(Some(slot.clone())), slot)
    }

    /// A slot that has its buffer.
    pub(crate) fn filled(buffer: SharedBuffer) -> Self {
        Self::of(State::Ended(Ok(buffer)))
    }

    fn of(state: State) -> Self {
        let held = Mutex::new(Held { state, uses: 0, given_up: None });
        Self(Arc::new(Inner { held, ended: Condvar::new() }))
    }

    /// What it ended with, if it has.
    pub(crate) fn peek(&self) -> Option<Outcome> {
        match &self.0.held.lock().state {
            State::Ended(outcome) => Some(outcome.clone()),
            State::Pending { .. } => None,
        }
    }

    /// Blocks until it ends, or until `deadline`.
    pub(crate) fn wait_until(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let mut held = self.0.held.lock();
        loop {
            match &held.state {
                State::Ended(outcome) => return Some(outcome.clone()),
                State::Pending { .. } => match deadline {
                    Some(deadline) => {
                        if self.0.ended.wait_until(&mut held, deadline).timed_out()
                            && matches!(held.state, State::Pending { .. })
                        {
                            return None;
                        }
                    }
                    None => self.0.ended.wait(&mut held),
                },
            }
        }
    }

    /// Calls `then` with what it ends with: now if it has ended, else on the thread that ends it.
    ///
    /// `then` must be short: that thread has other things to do.
    pub(crate) fn on_end(&self, then: impl FnOnce(&Outcome) + Send + 'static) {
        let mut held = self.0.held.lock();
        match &mut held.state {
            State::Pending { callbacks, .. } => callbacks.push(Box::new(then)),
            State::Ended(outcome) => {
                let outcome = outcome.clone();
                drop(held);
                then(&outcome);
            }
        }
    }

    /// For futures: the outcome, or `waker` is woken when there is one.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Outcome> {
        match &mut self.0.held.lock().state {
            State::Ended(outcome) => Poll::Ready(outcome.clone()),
            State::Pending { wakers, .. } => {
                if !wakers.iter().any(|known| known.will_wake(waker)) {
                    wakers.push(waker.clone());
                }
                Poll::Pending
            }
        }
    }

    /// Takes the buffer of an ended slot away; whoever reads it later gets `donated`.
    pub(crate) fn take(&self, donated: Arc<Failure>) -> Option<Outcome> {
        match &mut self.0.held.lock().state {
            State::Ended(outcome) if outcome.is_ok() => Some(std::mem::replace(outcome, Err(donated))),
            State::Ended(outcome) => Some(outcome.clone()),
            State::Pending { .. } => None,
        }
    }

    /// A use that is issued now.
    pub(crate) fn issue_use(&self) -> SlotUse {
        self.0.held.lock().uses += 1;
        SlotUse(self.clone())
    }

    /// Lets the buffer go once it has ended and all uses issued before have what they need; whoever
    /// reads it later gets `donated`.
    pub(crate) fn give_up(&self, donated: Arc<Failure>) {
        self.0.held.lock().given_up = Some(donated);
        self.release();
    }

    /// Drops a buffer that was given up and that nothing waits for any more.
    fn release(&self) {
        let mut held = self.0.held.lock();
        let Held { state: State::Ended(outcome), uses: 0, given_up } = &mut *held else { return };
        if let Some(donated) = given_up.take()
            && outcome.is_ok()
        {
            let buffer = std::mem::replace(outcome, Err(donated));
            drop(held);
            drop(buffer);
        }
    }

    fn end(&self, outcome: Outcome) {
        let mut held = self.0.held.lock();
        // A second holder, however short, would keep a kernel from taking the memory over.
        let shared = match &held.state {
            State::Pending { callbacks, .. } if !callbacks.is_empty() => Some(outcome.clone()),
            _ => None,
        };
        let before = std::mem::replace(&mut held.state, State::Ended(outcome));
        drop(held);
        self.0.ended.notify_all();
        if let State::Pending { callbacks, wakers } = before {
            if let Some(outcome) = shared {
                callbacks.into_iter().for_each(|then| then(&outcome));
            }
            wakers.into_iter().for_each(Waker::wake);
        }
        self.release();
    }
}

impl SlotUse {
    /// Blocks until the slot ends.
    pub(crate) fn wait(self) -> Outcome {
        self.0.wait_until(None).expect("no deadline was set")
    }
}

impl Drop for SlotUse {
    fn drop(&mut self) {
        self.0.0.held.lock().uses -= 1;
        self.0.release();
    }
}

impl Promise {
    /// Ends the slot.
    pub(crate) fn keep(mut self, outcome: Outcome) {
        if let Some(slot) = self.0.take() {
            slot.end(outcome);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            let message = "the operation was abandoned: its program ended before it ran";
            let failure = Failure::new(FailureKind::Left, mpmd_transport::ProcessId(0), 0, message);
            slot.end(Err(Arc::new(failure)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn waiters_callbacks_and_futures_all_see_the_end() {
        let (promise, slot) = Slot::new();
        let called = Arc::new(AtomicUsize::new(0));
        let count = called.clone();
        slot.on_end(move |outcome| {
            count.fetch_add(outcome.as_ref().map_or(0, |buffer| buffer.len()), Ordering::Relaxed);
        });
        assert!(slot.wait_until(Some(Instant::now() + Duration::from_millis(5))).is_none());
        let waiting = slot.clone();
        let thread = std::thread::spawn(move || waiting.wait_until(None));
        promise.keep(Ok(vec![1u8, 2, 3].into()));
        assert_eq!(thread.join().unwrap().unwrap().unwrap().len(), 3);
        assert_eq!(called.load(Ordering::Relaxed), 3);
        assert!(slot.poll(Waker::noop()).is_ready());
    }

    #[test]
    fn a_dropped_promise_is_a_failure_not_a_hang() {
        let (promise, slot) = Slot::new();
        drop(promise);
        assert!(slot.wait_until(None).unwrap().is_err());
    }

    #[test]
    fn a_buffer_given_up_stays_for_the_uses_issued_before() {
        let (promise, slot) = Slot::new();
        let (first, second) = (slot.issue_use(), slot.issue_use());
        slot.give_up(Arc::new(Failure::new(
            FailureKind::Donated,
            mpmd_transport::ProcessId(0),
            4,
            "donated",
        )));
        promise.keep(Ok(vec![7u8].into()));
        assert_eq!(first.wait().unwrap().len(), 1);
        assert!(slot.peek().unwrap().is_ok(), "one use is left");
        drop(second);
        assert_eq!(slot.peek().unwrap().unwrap_err().kind, FailureKind::Donated);
    }

    #[test]
    fn a_taken_buffer_leaves_the_donation_behind() {
        let slot = Slot::filled(vec![7u8].into());
        let failure = Failure::new(FailureKind::Donated, mpmd_transport::ProcessId(0), 4, "donated");
        let taken = slot.take(Arc::new(failure)).unwrap().unwrap();
        assert!(taken.into_owned().is_ok(), "the slot no longer holds it");
        assert_eq!(slot.peek().unwrap().unwrap_err().kind, FailureKind::Donated);
    }
}
