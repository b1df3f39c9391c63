//! An async buffer: the place of one shard's buffer, pending until its operation ends, then filled
//! or failed.
//!
//! The producer holds the [`Resolver`], all readers hold a [`AsyncBuffer`]. A resolver that is
//! dropped without an outcome fails its async buffer, so that no wait lasts forever.
//!
//! A buffer that a device fills asynchronously is *issued* first. It is there with the fences of
//! the work that fills it, for readers that can order device work behind them. The async buffer
//! ends when that work has ended.

mod completion;
mod inner;
mod resolver;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};

use mpmd_base::block::Instant;
use mpmd_memory::SharedBuffer;
use mpmd_proto::router::Failure;

use inner::{BufferCell, BufferState, ENDED, FillStatus, GIVEN_UP, HOLDER, ISSUED, USE, USES};
pub(crate) use resolver::{IssuedPromises, Resolver, Resolvers};

use crate::exec::waits::parker::Parker;

/// The final state of an async buffer: its buffer, or a failure.
pub(crate) type Outcome = Result<SharedBuffer, Arc<Failure>>;

/// The reading side of an async buffer. Clones refer to the same async buffer.
///
/// The async buffers of one operation share an allocation. Each buffer's memory is freed when its
/// own last holder is dropped.
pub(crate) struct AsyncBuffer {
    all: Arc<[BufferCell]>,
    index: u32,
    /// True once this holder was released early by `leave`.
    left: AtomicBool,
}

/// A registered use of an async buffer. It gets the buffer even if the buffer is given up before
/// the use is over. Dropping it ends the use.
pub(crate) struct BufferUse(AsyncBuffer);

/// The async buffers that a [`Resolvers`] will resolve, in order.
pub(crate) struct AsyncBuffers {
    all: Arc<[BufferCell]>,
    next: u32,
}

impl AsyncBuffer {
    /// Creates a pending async buffer and its resolver.
    pub(crate) fn new() -> (Resolver, Self) {
        let all: Arc<[BufferCell]> =
            Arc::new([BufferCell::new(BufferState::Pending(None), 2 * HOLDER)]);
        (Resolver(Some(Self::of(all.clone(), 0))), Self::of(all, 0))
    }

    /// Creates `count` pending async buffers and their resolvers. Take every async buffer: one that
    /// is not taken keeps its memory while others live.
    pub(crate) fn several(count: usize) -> (Resolvers, AsyncBuffers) {
        let all: Arc<[BufferCell]> = (0..count)
            .map(|_| BufferCell::new(BufferState::Pending(None), 2 * HOLDER))
            .collect();
        (
            Resolvers {
                all: all.clone(),
                next: 0,
            },
            AsyncBuffers { all, next: 0 },
        )
    }

    /// Creates an async buffer that is already filled.
    pub(crate) fn filled(buffer: SharedBuffer) -> Self {
        let inner = BufferCell::new(BufferState::Ended(Ok(buffer)), HOLDER | ENDED);
        Self::of(Arc::new([inner]), 0)
    }

    fn of(all: Arc<[BufferCell]>, index: u32) -> Self {
        Self {
            all,
            index,
            left: AtomicBool::new(false),
        }
    }

    fn inner(&self) -> &BufferCell {
        &self.all[self.index as usize]
    }

    /// Releases this holder early. If it is the last holder, frees the buffer. Afterwards this
    /// handle may only be dropped. For async buffers that share an allocation.
    pub(crate) fn leave(&self) {
        if !self.left.swap(true, Ordering::Relaxed) {
            self.inner().let_go(true);
        }
    }

    /// Returns true if the async buffer has ended. Costs one atomic load.
    pub(crate) fn has_ended(&self) -> bool {
        self.inner().counts.load(Ordering::Acquire) & ENDED != 0
    }

    /// Returns the buffer or the failure, or `None` if the async buffer has not ended.
    pub(crate) fn peek(&self) -> Option<Outcome> {
        match &self.inner().held.lock().state {
            BufferState::Ended(outcome) => Some(outcome.clone()),
            BufferState::Pending(_) | BufferState::Issued(..) => None,
        }
    }

    /// Returns true if the async buffer is issued or has ended: it has its buffer, filled or not,
    /// or it has failed. Costs one atomic load.
    pub(crate) fn has_issued(&self) -> bool {
        self.inner().counts.load(Ordering::Acquire) & ISSUED != 0
    }

    /// Returns the buffer, filled or not, or the failure. `None` if the async buffer is pending.
    pub(crate) fn peek_issued(&self) -> Option<Outcome> {
        self.inner().held.lock().issued()
    }

    /// Returns true if the issued async buffer ends exactly as the work that fills its buffer. If
    /// false, the async buffer may fail although that work succeeds, because one of its inputs
    /// failed.
    pub(crate) fn ends_with_its_work(&self) -> bool {
        self.inner().held.lock().ends_with_its_work
    }

    /// Blocks until the async buffer is issued or has ended, and returns the buffer or the failure.
    /// Returns `None` at `deadline`. Most callers should use [`Parker::wait_issued`].
    pub(crate) fn wait_issued_until(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let BufferCell { held, ended, .. } = self.inner();
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

    /// Calls `then` with the buffer, filled or not, as soon as the async buffer is issued, or with
    /// the failure. Calls it now, or on the thread that issues or ends the async buffer. `then`
    /// must be short.
    pub(crate) fn on_issued(&self, then: impl FnOnce(&Outcome) + Send + 'static) {
        let mut held = self.inner().held.lock();
        if let Some(outcome) = held.issued() {
            drop(held);
            return then(&outcome);
        }
        if let BufferState::Pending(waiting) = &mut held.state {
            waiting.get_or_insert_default().issued.push(Box::new(then));
        }
    }

    /// Calls `then` with the completion status of the work that fills the buffer, once the work has
    /// ended. Calls it now, or on the thread that ends the async buffer. The async buffer must be
    /// issued; its buffer may already be taken. `then` must be short.
    pub(crate) fn on_completion(
        &self,
        then: impl FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
    ) {
        let mut held = self.inner().held.lock();
        let known = match &mut held.filling {
            FillStatus::UnderWay(waiting) => {
                waiting.push(Box::new(then));
                return;
            }
            FillStatus::Done => Ok(()),
            FillStatus::Failed(failure) => Err(failure.clone()),
        };
        drop(held);
        then(known);
    }

    /// Takes the buffer, filled or not: its [fences](SharedBuffer::ready) tell when it is filled.
    /// Later readers get `donated` as the failure. If callbacks wait for the filled buffer, the
    /// buffer is shared with them. Returns `None` if the async buffer is pending.
    pub(crate) fn take_issued(&self, donated: Arc<Failure>) -> Option<Outcome> {
        let inner = self.inner();
        let mut held = inner.held.lock();
        // The callbacks have no buffer of their own yet.
        if let BufferState::Issued(buffer, Some(waiting)) = &held.state
            && !waiting.callbacks.is_empty()
        {
            let shared = buffer.clone();
            held.given_up = Some(donated);
            inner.counts.fetch_or(GIVEN_UP, Ordering::AcqRel);
            return Some(Ok(shared));
        }

        match std::mem::replace(&mut held.state, BufferState::Pending(None)) {
            BufferState::Issued(buffer, waiting) => {
                held.state = BufferState::Pending(waiting);
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

    /// Blocks until another thread ends the async buffer, and returns the buffer or the failure.
    /// Returns `None` at `deadline`. Most callers should use [`Parker::wait`].
    pub(crate) fn wait_until(&self, deadline: Option<Instant>) -> Option<Outcome> {
        let BufferCell { held, ended, .. } = self.inner();
        let mut held = held.lock();
        loop {
            match &held.state {
                BufferState::Ended(outcome) => return Some(outcome.clone()),
                BufferState::Pending(_) | BufferState::Issued(..) => match deadline {
                    Some(deadline) => {
                        if ended.wait_until(&mut held, deadline).timed_out()
                            && !matches!(held.state, BufferState::Ended(_))
                        {
                            return None;
                        }
                    }
                    None => ended.wait(&mut held),
                },
            }
        }
    }

    /// Calls `then` with the buffer or the failure: now if the async buffer has ended, otherwise on
    /// the thread that ends it.
    ///
    /// `then` must be short, because that thread has other work.
    pub(crate) fn on_end(&self, then: impl FnOnce(&Outcome) + Send + 'static) {
        let mut held = self.inner().held.lock();
        match &mut held.state {
            BufferState::Pending(waiting) | BufferState::Issued(_, waiting) => {
                waiting
                    .get_or_insert_default()
                    .callbacks
                    .push(Box::new(then));
            }
            BufferState::Ended(outcome) => {
                let outcome = outcome.clone();
                drop(held);
                then(&outcome);
            }
        }
    }

    /// Returns the buffer or the failure if the async buffer has ended. Otherwise registers
    /// `waker`, which is woken when the async buffer is issued and when it ends.
    ///
    /// `future` is the number of the polling future in this async buffer. The first poll sets it.
    /// The waker replaces the future's previous waker.
    pub(crate) fn poll(&self, future: &mut Option<u64>, waker: &Waker) -> Poll<Outcome> {
        match &mut self.inner().held.lock().state {
            BufferState::Ended(outcome) => Poll::Ready(outcome.clone()),
            BufferState::Pending(waiting) | BufferState::Issued(_, waiting) => {
                let waiting = waiting.get_or_insert_default();
                let number = *future.get_or_insert_with(|| {
                    waiting.futures += 1;
                    waiting.futures
                });

                match waiting
                    .wakers
                    .iter_mut()
                    .find(|(known, _)| *known == number)
                {
                    Some((_, last)) => last.clone_from(waker),
                    None => waiting.wakers.push((number, waker.clone())),
                }
                Poll::Pending
            }
        }
    }

    /// Drops the waker of a future that is no longer polled. `future` is its number in this async
    /// buffer.
    pub(crate) fn forget(&self, future: u64) {
        if let BufferState::Pending(Some(waiting)) | BufferState::Issued(_, Some(waiting)) =
            &mut self.inner().held.lock().state
        {
            waiting.wakers.retain(|(known, _)| *known != future);
        }
    }

    /// Returns the buffer, filled or not, or the failure. If the async buffer is pending, registers
    /// `waker`, which is woken when the async buffer is issued, and again at its end. `future` is
    /// as in [`AsyncBuffer::poll`].
    pub(crate) fn poll_issued(&self, future: &mut Option<u64>, waker: &Waker) -> Poll<Outcome> {
        match self.peek_issued() {
            Some(outcome) => Poll::Ready(outcome),
            None => match self.poll(future, waker) {
                // Issued in between: the waker may have come too late.
                Poll::Pending => self.peek_issued().map_or(Poll::Pending, Poll::Ready),
                ready => ready,
            },
        }
    }

    /// Takes the buffer of an ended async buffer, or returns its failure. Later readers get
    /// `donated` as the failure. Returns `None` if the async buffer has not ended.
    pub(crate) fn take(&self, donated: Arc<Failure>) -> Option<Outcome> {
        match &mut self.inner().held.lock().state {
            BufferState::Ended(outcome) if outcome.is_ok() => {
                Some(std::mem::replace(outcome, Err(donated)))
            }
            BufferState::Ended(outcome) => Some(outcome.clone()),
            BufferState::Pending(_) | BufferState::Issued(..) => None,
        }
    }

    /// Registers a use of the buffer, which lasts until the returned object is dropped.
    pub(crate) fn issue_use(&self) -> BufferUse {
        self.inner()
            .counts
            .fetch_add(HOLDER + USE, Ordering::Relaxed);
        BufferUse(Self::of(self.all.clone(), self.index))
    }

    /// Gives up the buffer: it is freed once the async buffer has ended and all registered uses are
    /// over. Later readers get `donated` as the failure.
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

impl Clone for AsyncBuffer {
    fn clone(&self) -> Self {
        self.inner().counts.fetch_add(HOLDER, Ordering::Relaxed);
        Self::of(self.all.clone(), self.index)
    }
}

impl Drop for AsyncBuffer {
    fn drop(&mut self) {
        if !self.left.load(Ordering::Relaxed) {
            self.inner().let_go(self.all.len() > 1);
        }
    }
}

impl Iterator for AsyncBuffers {
    type Item = AsyncBuffer;

    fn next(&mut self) -> Option<AsyncBuffer> {
        let index = self.next;
        self.next += u32::from((index as usize) < self.all.len());
        ((index as usize) < self.all.len()).then(|| AsyncBuffer::of(self.all.clone(), index))
    }
}

impl BufferUse {
    /// Returns true if the async buffer has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.has_ended()
    }

    /// Blocks until the async buffer ends, and returns the buffer or the failure.
    pub(crate) fn wait(self, parker: &Parker) -> Outcome {
        parker.wait(&self.0, None).expect("no deadline was set")
    }

    /// Blocks until the async buffer is issued or has ended. Returns the buffer, filled or not, or
    /// the failure.
    pub(crate) fn wait_issued(&self, parker: &Parker) -> Outcome {
        parker.wait_issued(&self.0)
    }

    /// Returns the async buffer that is used.
    pub(crate) fn slot(&self) -> &AsyncBuffer {
        &self.0
    }
}

impl Drop for BufferUse {
    fn drop(&mut self) {
        let inner = self.0.inner();
        let counts = inner.counts.fetch_sub(USE, Ordering::AcqRel);
        // A later `give_up` sees that this use is over.
        if counts & USES == USE && counts & GIVEN_UP != 0 {
            inner.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use mpmd_base::block::{Mutex, thread};
    use mpmd_proto::router::FailureKind;

    use super::*;

    #[test]
    fn end_reaches_waiters_callbacks_and_futures() {
        let (resolver, slot) = AsyncBuffer::new();
        let called = Arc::new(AtomicUsize::new(0));
        let count = called.clone();
        slot.on_end(move |outcome| {
            count.fetch_add(
                outcome.as_ref().map_or(0, |buffer| buffer.len()),
                Ordering::Relaxed,
            );
        });
        assert!(
            slot.wait_until(Some(Instant::now() + Duration::from_millis(5)))
                .is_none()
        );
        let waiting = slot.clone();
        let thread = thread::spawn(move || waiting.wait_until(None));
        resolver.keep(Ok(vec![1u8, 2, 3].into()));
        assert_eq!(thread.join().unwrap().unwrap().unwrap().len(), 3);
        assert_eq!(called.load(Ordering::Relaxed), 3);
        assert!(slot.poll(&mut None, Waker::noop()).is_ready());
    }

    /// Counts its wakes; its references show how often it is registered.
    #[derive(Default)]
    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_future_keeps_only_its_last_waker() {
        let (resolver, slot) = AsyncBuffer::new();
        let counts: Vec<Arc<Count>> = (0..9).map(|_| Arc::default()).collect();
        let mut futures = [None; 3];
        for (i, count) in counts.iter().enumerate() {
            // The first future is polled by task after task, the others by one each.
            let future = &mut futures[i.saturating_sub(6)];
            for _ in 0..3 {
                assert!(slot.poll(future, &Waker::from(count.clone())).is_pending());
            }
        }
        let registered = || counts.iter().map(|count| Arc::strong_count(count) - 1);
        assert_eq!(
            registered().collect::<Vec<_>>(),
            [0, 0, 0, 0, 0, 0, 1, 1, 1]
        );
        slot.forget(futures[1].expect("it was polled"));
        assert_eq!(
            registered().collect::<Vec<_>>(),
            [0, 0, 0, 0, 0, 0, 1, 0, 1]
        );
        resolver.keep(Ok(Vec::new().into()));
        let woken: Vec<usize> = counts
            .iter()
            .map(|count| count.0.load(Ordering::Relaxed))
            .collect();
        assert_eq!(woken, [0, 0, 0, 0, 0, 0, 1, 0, 1]);
    }

    #[test]
    fn dropped_resolver_is_a_failure_not_a_hang() {
        let (resolver, slot) = AsyncBuffer::new();
        drop(resolver);
        assert!(slot.wait_until(None).unwrap().is_err());
    }

    #[test]
    fn given_up_buffer_stays_for_registered_uses() {
        let (resolver, slot) = AsyncBuffer::new();
        let (first, second) = (slot.issue_use(), slot.issue_use());
        slot.give_up(Arc::new(Failure::new(
            FailureKind::Donated,
            mpmd_base::ProcessId(0),
            4,
            "donated",
        )));
        resolver.keep(Ok(vec![7u8].into()));
        assert_eq!(first.wait(&Parker::alone()).unwrap().len(), 1);
        assert!(slot.peek().unwrap().is_ok(), "one use is left");
        drop(second);
        assert_eq!(slot.peek().unwrap().unwrap_err().kind, FailureKind::Donated);
    }

    #[test]
    fn issued_buffer_is_visible_before_it_is_filled() {
        let (resolver, slot) = AsyncBuffer::new();
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
        let thread = thread::spawn(move || waiting.wait_issued_until(None).unwrap().unwrap().len());
        let end = resolver.issue(vec![1u8, 2].into());
        assert_eq!(thread.join().unwrap(), 2);
        assert!(slot.has_issued() && !slot.has_ended() && slot.peek().is_none());
        assert_eq!(slot.peek_issued().unwrap().unwrap().len(), 2);
        assert!(
            slot.wait_until(Some(Instant::now() + Duration::from_millis(2)))
                .is_none()
        );
        assert_eq!(seen.load(Ordering::Relaxed), 1);
        end.end(Ok(()));
        assert_eq!(seen.load(Ordering::Relaxed), 11);
        assert_eq!(slot.wait_until(None).unwrap().unwrap().len(), 2);
        slot.on_issued(|outcome| assert!(outcome.is_ok()));
    }

    #[test]
    fn issued_buffers_may_fail_or_be_taken_before_the_end() {
        let failure = || {
            Arc::new(Failure::new(
                FailureKind::Kernel,
                mpmd_base::ProcessId(0),
                4,
                "no",
            ))
        };
        let pool = mpmd_memory::Pool::new("test", None);
        let block = || pool.allocate(1).unwrap().freeze();
        let (resolvers, slots) = AsyncBuffer::several(2);
        let slots: Vec<AsyncBuffer> = slots.collect();
        let end = resolvers.issue([block(), block()].into_iter());
        let taken = slots[0].take_issued(failure()).unwrap().unwrap();
        assert!(taken.into_owned().is_ok(), "it has no other holder");
        assert!(slots[0].peek().unwrap().is_err() && !slots[1].has_ended());
        end.end(Err(failure()));
        assert_eq!(slots[1].peek().unwrap().unwrap_err().message, "no");
        assert_eq!(pool.stats().live, 0);
        let (resolvers, slots) = AsyncBuffer::several(2);
        let slots: Vec<AsyncBuffer> = slots.collect();
        drop(resolvers.issue([block()].into_iter()));
        assert!(
            slots.iter().all(|slot| slot.peek().unwrap().is_err()),
            "async buffers without memory fail"
        );
        drop(slots);
        assert_eq!(pool.stats().live, 0);
    }

    #[test]
    fn earlier_callbacks_and_status_survive_a_taken_buffer() {
        let failure = || {
            Arc::new(Failure::new(
                FailureKind::Donated,
                mpmd_base::ProcessId(0),
                4,
                "no",
            ))
        };
        let told = Arc::new(Mutex::new(Vec::new()));
        for result in [Ok(()), Err(failure())] {
            let (resolver, slot) = AsyncBuffer::new();
            let ends = told.clone();
            slot.on_end(move |outcome| ends.lock().push(outcome.is_ok()));
            let end = resolver.issue(vec![1u8].into());
            assert!(
                slot.take_issued(failure())
                    .unwrap()
                    .unwrap()
                    .into_owned()
                    .is_err(),
                "it is shared"
            );
            end.end(result.clone());
            assert_eq!(std::mem::take(&mut *told.lock()), [result.is_ok()]);
            assert!(
                slot.peek().unwrap().is_err(),
                "later readers get the donation or the failure"
            );

            let (resolver, slot) = AsyncBuffer::new();
            let end = resolver.issue(vec![1u8].into());
            let ends = told.clone();
            slot.on_completion(move |result| ends.lock().push(result.is_ok()));
            assert!(
                slot.take_issued(failure())
                    .unwrap()
                    .unwrap()
                    .into_owned()
                    .is_ok()
            );
            assert!(told.lock().is_empty(), "it was taken, and is not filled");
            end.end(result.clone());
            let ends = told.clone();
            slot.on_completion(move |result| ends.lock().push(result.is_ok()));
            assert_eq!(std::mem::take(&mut *told.lock()), [result.is_ok(); 2]);
        }
    }

    #[test]
    fn taken_buffer_leaves_a_donated_failure() {
        let slot = AsyncBuffer::filled(vec![7u8].into());
        let failure = Failure::new(FailureKind::Donated, mpmd_base::ProcessId(0), 4, "donated");
        let taken = slot.take(Arc::new(failure)).unwrap().unwrap();
        assert!(taken.into_owned().is_ok(), "the slot no longer holds it");
        assert_eq!(slot.peek().unwrap().unwrap_err().kind, FailureKind::Donated);
    }

    #[test]
    fn memory_is_freed_with_its_own_last_holder() {
        let pool = mpmd_memory::Pool::new("test", None);
        let (mut resolvers, slots) = AsyncBuffer::several(3);
        let mut slots: Vec<AsyncBuffer> = slots.collect();
        drop(slots.pop());
        (0..3).for_each(|_| resolvers.keep_next(Ok(pool.allocate(1).unwrap().freeze())));
        assert_eq!(
            pool.stats().live,
            2 * mpmd_memory::Pool::rounded(1),
            "the third has no holder"
        );
        let issued = slots[1].issue_use();
        drop(slots.pop());
        assert_eq!(
            pool.stats().live,
            2 * mpmd_memory::Pool::rounded(1),
            "a use was issued"
        );
        assert!(issued.wait(&Parker::alone()).is_ok());
        assert_eq!(pool.stats().live, mpmd_memory::Pool::rounded(1));
        assert!(slots[0].has_ended());
    }

    #[test]
    fn leave_releases_the_buffer() {
        let pool = mpmd_memory::Pool::new("test", None);
        let (mut resolvers, slots) = AsyncBuffer::several(2);
        let slots: Vec<AsyncBuffer> = slots.collect();
        resolvers.keep_next(Ok(pool.allocate(1).unwrap().freeze()));
        let other = slots[0].clone();
        slots[0].leave();
        slots[0].leave();
        assert!(other.peek().unwrap().is_ok(), "the clone still holds it");
        drop(other);
        assert_eq!(pool.stats().live, 0);
        // Also if the async buffer has not ended.
        slots[1].leave();
        resolvers.keep_next(Ok(pool.allocate(1).unwrap().freeze()));
        assert_eq!(pool.stats().live, 0);
        drop(slots);
    }

    #[test]
    fn dropped_or_failed_resolvers_fail_all_pending_buffers() {
        let (mut resolvers, slots) = AsyncBuffer::several(3);
        let slots: Vec<AsyncBuffer> = slots.collect();
        resolvers.keep_next(Ok(vec![1u8].into()));
        drop(resolvers);
        let kinds = slots
            .iter()
            .map(|slot| slot.peek().unwrap().map_err(|failure| failure.kind).err());
        assert_eq!(
            kinds.collect::<Vec<_>>(),
            [None, Some(FailureKind::Left), Some(FailureKind::Left)]
        );
        let (resolvers, slots) = AsyncBuffer::several(2);
        resolvers.fail(&Arc::new(Failure::new(
            FailureKind::Kernel,
            mpmd_base::ProcessId(0),
            4,
            "why",
        )));
        slots.for_each(|slot| {
            assert_eq!(slot.peek().unwrap().unwrap_err().kind, FailureKind::Kernel)
        });
    }
}
