//! A place for one shard's buffer: empty until its operation ends, then filled, or failed.
//!
//! The producer holds the [`Promise`], everybody else a [`Slot`]. A promise that is dropped unkept
//! fails the slot, so that no wait can outlive what it waits for.
//!
//! What a device makes in its own time is *issued* first: the buffer is there, with the fences of
//! the work that fills it, for who can have work of a device's come after it. The slot ends when
//! that work has.

mod inner;
mod promise;
mod verdict;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};
use std::time::Instant;

use mpmd_transport::SharedBuffer;
use mpmd_transport::router::Failure;

use inner::{ENDED, Filling, GIVEN_UP, HOLDER, ISSUED, Inner, State, USE, USES};
pub(crate) use promise::{IssuedPromises, Promise, Promises};

use super::waits::Waits;

/// What a slot ends with.
pub(crate) type Outcome = Result<SharedBuffer, Arc<Failure>>;

/// The reading side. Clones are the same slot.
///
/// The slots of one operation share an allocation; a buffer goes with the last holder of its own
/// slot all the same.
pub(crate) struct Slot {
    all: Arc<[Inner]>,
    index: u32,
    /// Its holder is counted no more.
    left: AtomicBool,
}

/// A use of a slot that was issued: it gets the buffer even where that is given up meanwhile.
pub(crate) struct SlotUse(Slot);

/// The slots that promises are for, in order.
pub(crate) struct Slots {
    all: Arc<[Inner]>,
    next: u32,
}

impl Slot {
    /// An empty slot and the promise to fill it.
    pub(crate) fn new() -> (Promise, Self) {
        let all: Arc<[Inner]> = Arc::new([Inner::new(State::Pending(None), 2 * HOLDER)]);
        (Promise(Some(Self::of(all.clone(), 0))), Self::of(all, 0))
    }

    /// Empty slots and the promise to fill them. Each slot is to be taken: one that is not keeps
    /// its buffer for as long as there are others.
    pub(crate) fn several(count: usize) -> (Promises, Slots) {
        let all: Arc<[Inner]> =
            (0..count).map(|_| Inner::new(State::Pending(None), 2 * HOLDER)).collect();
        (Promises { all: all.clone(), next: 0 }, Slots { all, next: 0 })
    }

    /// A slot that has its buffer.
    pub(crate) fn filled(buffer: SharedBuffer) -> Self {
        let inner = Inner::new(State::Ended(Ok(buffer)), HOLDER | ENDED);
        Self::of(Arc::new([inner]), 0)
    }

    fn of(all: Arc<[Inner]>, index: u32) -> Self {
        Self { all, index, left: AtomicBool::new(false) }
    }

    fn inner(&self) -> &Inner {
        &self.all[self.index as usize]
    }

    /// As if this were dropped, which must be all that still happens to it. For slots that share
    /// their allocation.
    pub(crate) fn leave(&self) {
        if !self.left.swap(true, Ordering::Relaxed) {
            self.inner().let_go(true);
        }
    }

    /// Whether it has ended. Costs a look at one word.
    pub(crate) fn has_ended(&self) -> bool {
        self.inner().counts.load(Ordering::Acquire) & ENDED != 0
    }

    /// What it ended with, if it has.
    pub(crate) fn peek(&self) -> Option<Outcome> {
        match &self.inner().held.lock().state {
            State::Ended(outcome) => Some(outcome.clone()),
            State::Pending(_) | State::Issued(..) => None,
        }
    }

    /// Whether its buffer is there, filled or not, or never will be. Costs a look at one word.
    pub(crate) fn has_issued(&self) -> bool {
        self.inner().counts.load(Ordering::Acquire) & ISSUED != 0
    }

    /// The buffer, filled or not, if it is there.
    pub(crate) fn peek_issued(&self) -> Option<Outcome> {
        self.inner().held.lock().issued()
    }

    /// Whether the slot, which was issued, ends as the work does that fills its buffer: else it may
    /// fail where that ends well, for it was given what never was made.
    pub(crate) fn ends_with_its_work(&self) -> bool {
        self.inner().held.lock().ends_with_its_work
    }

    /// Sleeps until the buffer is there, filled or not, or until `deadline`. Mostly
    /// [`Waits::wait_issued`] is what is wanted.
    pub(crate) fn wait_issued_until(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let Inner { held, ended, .. } = self.inner();
        let mut held = held.lock();
        loop {
            if let Some(outcome) = held.issued() {
                return Some(outcome);
            }
            match deadline {
                Some(deadline) if ended.wait_until(&mut held, deadline).timed_out() => {
                    return held.issued();
                }
                Some(_) => {}
                None => ended.wait(&mut held),
            }
        }
    }

    /// Calls `then` with the buffer as soon as it is there, filled or not: now, or on the thread
    /// that issues or ends it. `then` must be short.
    pub(crate) fn on_issued(&self, then: impl FnOnce(&Outcome) + Send + 'static) {
        let mut held = self.inner().held.lock();
        if let Some(outcome) = held.issued() {
            drop(held);
            return then(&outcome);
        }
        if let State::Pending(waiting) = &mut held.state {
            waiting.get_or_insert_default().issued.push(Box::new(then));
        }
    }

    /// Calls `then` with how the work that fills the buffer ended, once it has: now, or on the
    /// thread that ends it. To be asked of a slot that was issued: the buffer may be somebody
    /// else's by then. `then` must be short.
    pub(crate) fn on_verdict(&self, then: impl FnOnce(Result<(), Arc<Failure>>) + Send + 'static) {
        let mut held = self.inner().held.lock();
        let known = match &mut held.filling {
            Filling::UnderWay(verdicts) => {
                verdicts.push(Box::new(then));
                return;
            }
            Filling::Done => Ok(()),
            Filling::Failed(failure) => Err(failure.clone()),
        };
        drop(held);
        then(known);
    }

    /// As [`take`](Self::take), of a slot whose buffer may not be filled yet: its
    /// [fences](SharedBuffer::ready) say when it is. Where somebody is to have it when it is
    /// filled, it is shared with them, as it is with who peeks.
    pub(crate) fn take_issued(&self, donated: Arc<Failure>) -> Option<Outcome> {
        let inner = self.inner();
        let mut held = inner.held.lock();
        if let State::Issued(buffer, Some(waiting)) = &held.state
            && !waiting.callbacks.is_empty()
        {
            let shared = buffer.clone();
            held.given_up = Some(donated);
            inner.counts.fetch_or(GIVEN_UP, Ordering::AcqRel);
            return Some(Ok(shared));
        }
        match std::mem::replace(&mut held.state, State::Pending(None)) {
            State::Issued(buffer, waiting) => {
                held.state = State::Pending(waiting);
                inner.end_as(held, Err(donated));
                Some(Ok(buffer))
            }
            before => {
                held.state = before;
                drop(held);
                self.take(donated)
            }
        }
    }

    /// Sleeps until it ends on another thread, or until `deadline`. Mostly [`Waits::wait`] is what
    /// is wanted.
    pub(crate) fn wait_until(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let Inner { held, ended, .. } = self.inner();
        let mut held = held.lock();
        loop {
            match &held.state {
                State::Ended(outcome) => return Some(outcome.clone()),
                State::Pending(_) | State::Issued(..) => match deadline {
                    Some(deadline) => {
                        if ended.wait_until(&mut held, deadline).timed_out()
                            && !matches!(held.state, State::Ended(_))
                        {
                            return None;
                        }
                    }
                    None => ended.wait(&mut held),
                },
            }
        }
    }

    /// Calls `then` with what it ends with: now if it has ended, else on the thread that ends it.
    ///
    /// `then` must be short: that thread has other things to do.
    pub(crate) fn on_end(&self, then: impl FnOnce(&Outcome) + Send + 'static) {
        let mut held = self.inner().held.lock();
        match &mut held.state {
            State::Pending(waiting) | State::Issued(_, waiting) => {
                waiting.get_or_insert_default().callbacks.push(Box::new(then));
            }
            State::Ended(outcome) => {
                let outcome = outcome.clone();
                drop(held);
                then(&outcome);
            }
        }
    }

    /// For futures: the outcome, or `waker` is woken when there is one.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Outcome> {
        match &mut self.inner().held.lock().state {
            State::Ended(outcome) => Poll::Ready(outcome.clone()),
            State::Pending(waiting) | State::Issued(_, waiting) => {
                let wakers = &mut waiting.get_or_insert_default().wakers;
                if !wakers.iter().any(|known| known.will_wake(waker)) {
                    wakers.push(waker.clone());
                }
                Poll::Pending
            }
        }
    }

    /// As [`poll`](Self::poll), for the buffer, filled or not. The waker is woken again when it
    /// ends.
    pub(crate) fn poll_issued(&self, waker: &Waker) -> Poll<Outcome> {
        match self.peek_issued() {
            Some(outcome) => Poll::Ready(outcome),
            None => match self.poll(waker) {
                // It was issued in between: that waker may come too late.
                Poll::Pending => self.peek_issued().map_or(Poll::Pending, Poll::Ready),
                ready => ready,
            },
        }
    }

    /// Takes the buffer of an ended slot away; whoever reads it later gets `donated`.
    pub(crate) fn take(&self, donated: Arc<Failure>) -> Option<Outcome> {
        match &mut self.inner().held.lock().state {
            State::Ended(outcome) if outcome.is_ok() => {
                Some(std::mem::replace(outcome, Err(donated)))
            }
            State::Ended(outcome) => Some(outcome.clone()),
            State::Pending(_) | State::Issued(..) => None,
        }
    }

    /// A use that is issued now.
    pub(crate) fn issue_use(&self) -> SlotUse {
        self.inner().counts.fetch_add(HOLDER + USE, Ordering::Relaxed);
        SlotUse(Self::of(self.all.clone(), self.index))
    }

    /// Lets the buffer go once it has ended and all uses issued before have what they need; whoever
    /// reads it later gets `donated`.
    pub(crate) fn give_up(&self, donated: Arc<Failure>) {
        let inner = self.inner();
        {
            let mut held = inner.held.lock();
            held.given_up = Some(donated);
            inner.counts.fetch_or(GIVEN_UP, Ordering::AcqRel);
        }
        inner.release();
    }
}

impl Clone for Slot {
    fn clone(&self) -> Self {
        self.inner().counts.fetch_add(HOLDER, Ordering::Relaxed);
        Self::of(self.all.clone(), self.index)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.left.load(Ordering::Relaxed) {
            self.inner().let_go(self.all.len() > 1);
        }
    }
}

impl Iterator for Slots {
    type Item = Slot;

    fn next(&mut self) -> Option<Slot> {
        let index = self.next;
        self.next += u32::from((index as usize) < self.all.len());
        ((index as usize) < self.all.len()).then(|| Slot::of(self.all.clone(), index))
    }
}

impl SlotUse {
    /// Whether the slot has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.has_ended()
    }

    /// Blocks until the slot ends.
    pub(crate) fn wait(self, waits: &Waits) -> Outcome {
        waits.wait(&self.0, None).expect("no deadline was set")
    }

    /// Blocks until the buffer is there, filled or not.
    pub(crate) fn wait_issued(&self, waits: &Waits) -> Outcome {
        waits.wait_issued(&self.0)
    }

    /// The slot it is a use of.
    pub(crate) fn slot(&self) -> &Slot {
        &self.0
    }
}

impl Drop for SlotUse {
    fn drop(&mut self) {
        let inner = self.0.inner();
        let counts = inner.counts.fetch_sub(USE, Ordering::AcqRel);
        // Whoever gives it up from here on finds that this use is over.
        if counts & USES == USE && counts & GIVEN_UP != 0 {
            inner.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use mpmd_transport::router::FailureKind;
    use parking_lot::Mutex;

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
            mpmd_ids::ProcessId(0),
            4,
            "donated",
        )));
        promise.keep(Ok(vec![7u8].into()));
        assert_eq!(first.wait(&Waits::alone()).unwrap().len(), 1);
        assert!(slot.peek().unwrap().is_ok(), "one use is left");
        drop(second);
        assert_eq!(slot.peek().unwrap().unwrap_err().kind, FailureKind::Donated);
    }

    #[test]
    fn who_can_come_after_work_of_a_device_has_the_buffer_before_it_is_filled() {
        let (promise, slot) = Slot::new();
        let seen = Arc::new(AtomicUsize::new(0));
        let (issued, ended) = (seen.clone(), seen.clone());
        slot.on_issued(move |outcome| {
            assert!(outcome.is_ok());
            issued.fetch_add(1, Ordering::Relaxed);
        });
        slot.on_end(move |_| {
            ended.fetch_add(10, Ordering::Relaxed);
        });
        let waiting = slot.clone();
        let thread =
            std::thread::spawn(move || waiting.wait_issued_until(None).unwrap().unwrap().len());
        let end = promise.issue(vec![1u8, 2].into());
        assert_eq!(thread.join().unwrap(), 2);
        assert!(slot.has_issued() && !slot.has_ended() && slot.peek().is_none());
        assert_eq!(slot.peek_issued().unwrap().unwrap().len(), 2);
        assert!(slot.wait_until(Some(Instant::now() + Duration::from_millis(2))).is_none());
        assert_eq!(seen.load(Ordering::Relaxed), 1);
        end.end(Ok(()));
        assert_eq!(seen.load(Ordering::Relaxed), 11);
        assert_eq!(slot.wait_until(None).unwrap().unwrap().len(), 2);
        slot.on_issued(|outcome| assert!(outcome.is_ok()));
    }

    #[test]
    fn what_was_issued_may_fail_and_may_be_taken_over_before_it_ends() {
        let failure =
            || Arc::new(Failure::new(FailureKind::Kernel, mpmd_ids::ProcessId(0), 4, "no"));
        let pool = mpmd_transport::Pool::new("test", None);
        let block = || pool.allocate(1).unwrap().freeze();
        let (promises, slots) = Slot::several(2);
        let slots: Vec<Slot> = slots.collect();
        let end = promises.issue([block(), block()].into_iter());
        let taken = slots[0].take_issued(failure()).unwrap().unwrap();
        assert!(taken.into_owned().is_ok(), "nobody else holds it");
        assert!(slots[0].peek().unwrap().is_err() && !slots[1].has_ended());
        end.end(Err(failure()));
        assert_eq!(slots[1].peek().unwrap().unwrap_err().message, "no");
        assert_eq!(pool.stats().live, 0);
        let (promises, slots) = Slot::several(2);
        let slots: Vec<Slot> = slots.collect();
        drop(promises.issue([block()].into_iter()));
        assert!(
            slots.iter().all(|slot| slot.peek().unwrap().is_err()),
            "never a wait without an end"
        );
        drop(slots);
        assert_eq!(pool.stats().live, 0);
    }

    #[test]
    fn who_asked_before_a_buffer_is_taken_has_it_when_it_is_filled_and_a_verdict_outlives_it() {
        let failure =
            || Arc::new(Failure::new(FailureKind::Donated, mpmd_ids::ProcessId(0), 4, "no"));
        let told = Arc::new(Mutex::new(Vec::new()));
        for result in [Ok(()), Err(failure())] {
            let (promise, slot) = Slot::new();
            let ends = told.clone();
            slot.on_end(move |outcome| ends.lock().push(outcome.is_ok()));
            let end = promise.issue(vec![1u8].into());
            assert!(
                slot.take_issued(failure()).unwrap().unwrap().into_owned().is_err(),
                "it is shared"
            );
            end.end(result.clone());
            assert_eq!(std::mem::take(&mut *told.lock()), [result.is_ok()]);
            assert!(
                slot.peek().unwrap().is_err(),
                "later readers hear of the donation, or of the failure"
            );

            let (promise, slot) = Slot::new();
            let end = promise.issue(vec![1u8].into());
            let ends = told.clone();
            slot.on_verdict(move |result| ends.lock().push(result.is_ok()));
            assert!(slot.take_issued(failure()).unwrap().unwrap().into_owned().is_ok());
            assert!(told.lock().is_empty(), "it was taken, and is not filled");
            end.end(result.clone());
            let ends = told.clone();
            slot.on_verdict(move |result| ends.lock().push(result.is_ok()));
            assert_eq!(std::mem::take(&mut *told.lock()), [result.is_ok(); 2]);
        }
    }

    #[test]
    fn a_taken_buffer_leaves_the_donation_behind() {
        let slot = Slot::filled(vec![7u8].into());
        let failure = Failure::new(FailureKind::Donated, mpmd_ids::ProcessId(0), 4, "donated");
        let taken = slot.take(Arc::new(failure)).unwrap().unwrap();
        assert!(taken.into_owned().is_ok(), "the slot no longer holds it");
        assert_eq!(slot.peek().unwrap().unwrap_err().kind, FailureKind::Donated);
    }

    #[test]
    fn a_buffer_goes_with_its_own_slot_not_with_those_beside_it() {
        let pool = mpmd_transport::Pool::new("test", None);
        let (mut promises, slots) = Slot::several(3);
        let mut slots: Vec<Slot> = slots.collect();
        drop(slots.pop());
        (0..3).for_each(|_| promises.keep_next(Ok(pool.allocate(1).unwrap().freeze())));
        assert_eq!(
            pool.stats().live,
            2 * mpmd_transport::Pool::rounded(1),
            "nobody wants the third"
        );
        let issued = slots[1].issue_use();
        drop(slots.pop());
        assert_eq!(pool.stats().live, 2 * mpmd_transport::Pool::rounded(1), "a use was issued");
        assert!(issued.wait(&Waits::alone()).is_ok());
        assert_eq!(pool.stats().live, mpmd_transport::Pool::rounded(1));
        assert!(slots[0].has_ended());
    }

    #[test]
    fn who_leaves_a_slot_holds_nothing_more() {
        let pool = mpmd_transport::Pool::new("test", None);
        let (mut promises, slots) = Slot::several(2);
        let slots: Vec<Slot> = slots.collect();
        promises.keep_next(Ok(pool.allocate(1).unwrap().freeze()));
        let other = slots[0].clone();
        slots[0].leave();
        slots[0].leave();
        assert!(other.peek().unwrap().is_ok(), "somebody else holds it");
        drop(other);
        assert_eq!(pool.stats().live, 0);
        // Also one that has not ended.
        slots[1].leave();
        promises.keep_next(Ok(pool.allocate(1).unwrap().freeze()));
        assert_eq!(pool.stats().live, 0);
        drop(slots);
    }

    #[test]
    fn promises_that_are_dropped_or_failed_end_every_slot_that_is_left() {
        let (mut promises, slots) = Slot::several(3);
        let slots: Vec<Slot> = slots.collect();
        promises.keep_next(Ok(vec![1u8].into()));
        drop(promises);
        let kinds =
            slots.iter().map(|slot| slot.peek().unwrap().map_err(|failure| failure.kind).err());
        assert_eq!(
            kinds.collect::<Vec<_>>(),
            [None, Some(FailureKind::Left), Some(FailureKind::Left)]
        );
        let (promises, slots) = Slot::several(2);
        promises.fail(&Arc::new(Failure::new(
            FailureKind::Kernel,
            mpmd_ids::ProcessId(0),
            4,
            "why",
        )));
        slots.for_each(|slot| {
            assert_eq!(slot.peek().unwrap().unwrap_err().kind, FailureKind::Kernel)
        });
    }
}
