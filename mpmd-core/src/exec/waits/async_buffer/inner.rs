//! The state that an async buffer and its resolver share: buffer, waiters and holders.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use mpmd_base::block::{Condvar, Mutex, MutexGuard};
use mpmd_memory::SharedBuffer;
use mpmd_proto::router::Failure;

use super::Outcome;

type Callback = Box<dyn FnOnce(&Outcome) + Send>;

/// Callback that gets the completion status of the work that fills a buffer.
type CompletionStatus = Box<dyn FnOnce(Result<(), Arc<Failure>>) + Send>;

/// The value of one holder of the async buffer in [`BufferCell::counts`].
pub(super) const HOLDER: u64 = 1;
/// The value in [`BufferCell::counts`] of one registered use that has not picked up its input.
pub(super) const USE: u64 = 1 << 32;
pub(super) const USES: u64 = ISSUED - USE;
/// Flag in [`BufferCell::counts`]: the async buffer has its buffer, though work may still fill it.
pub(super) const ISSUED: u64 = 1 << 61;
/// Flag in [`BufferCell::counts`]: the async buffer has ended.
pub(super) const ENDED: u64 = 1 << 62;
/// Flag in [`BufferCell::counts`]: the buffer was given up.
pub(super) const GIVEN_UP: u64 = 1 << 63;

pub(super) struct BufferCell {
    /// The numbers of holders and of uses, and three flags, from low to high bits. One word, so
    /// that registering and ending a use takes no lock.
    pub(super) counts: AtomicU64,
    pub(super) held: Mutex<HeldBuffer>,
    pub(super) ended: Condvar,
}

pub(super) struct HeldBuffer {
    pub(super) state: BufferState,
    /// The failure for later readers, set once the buffer is given up. The buffer is freed when no
    /// registered use needs it.
    pub(super) given_up: Option<Arc<Failure>>,
    pub(super) filling: FillStatus,
    /// True if the async buffer ends exactly as the work that fills the buffer: no input of the
    /// work can still fail.
    pub(super) ends_with_its_work: bool,
}

/// The completion status of the work that was issued to fill the buffer. Known even after the
/// buffer was taken.
#[derive(Default)]
pub(super) enum FillStatus {
    /// No work was issued, or it has succeeded.
    #[default]
    Done,
    /// The work has not ended. These callbacks get its status when it ends.
    UnderWay(Vec<CompletionStatus>),
    Failed(Arc<Failure>),
}

pub(super) enum BufferState {
    /// There is no buffer yet. Holds the waiters, if there are any.
    Pending(Option<Box<BufferWaiters>>),
    /// The buffer, which issued work fills, and the waiters if there are any.
    Issued(SharedBuffer, Option<Box<BufferWaiters>>),
    Ended(Outcome),
}

#[derive(Default)]
pub(super) struct BufferWaiters {
    /// Callbacks for the issue of the async buffer, or for its end before that.
    pub(super) issued: Vec<Callback>,
    pub(super) callbacks: Vec<Callback>,
    /// The last waker of each future, with the future's number in this async buffer.
    pub(super) wakers: Vec<(u64, Waker)>,
    /// Number of futures that have a number.
    pub(super) futures: u64,
}

impl BufferCell {
    pub(super) fn new(state: BufferState, counts: u64) -> Self {
        let held = Mutex::new(HeldBuffer {
            state,
            given_up: None,
            filling: FillStatus::Done,
            ends_with_its_work: false,
        });
        Self {
            counts: AtomicU64::new(counts),
            held,
            ended: Condvar::new(),
        }
    }

    /// Frees a given-up buffer if the async buffer has ended and no use is left.
    pub(super) fn release(&self) {
        let mut held = self.held.lock();
        if self.counts.load(Ordering::Acquire) & USES != 0 {
            return;
        }
        let HeldBuffer {
            state: BufferState::Ended(outcome),
            given_up,
            ..
        } = &mut *held
        else {
            return;
        };

        if let Some(donated) = given_up.take()
            && outcome.is_ok()
        {
            let buffer = std::mem::replace(outcome, Err(donated));
            drop(held);
            drop(buffer);
        }
    }

    /// Removes one holder. If `shared` (several async buffers share the allocation), the last
    /// holder frees the buffer.
    pub(super) fn let_go(&self, shared: bool) {
        let last = (self.counts.fetch_sub(HOLDER, Ordering::AcqRel) & (USE - 1)) == HOLDER;
        if last && shared {
            let state = std::mem::replace(&mut self.held.lock().state, BufferState::Pending(None));
            drop(state);
        }
    }

    pub(super) fn end(&self, outcome: Outcome) {
        let held = self.held.lock();
        self.end_as(held, outcome);
    }

    pub(super) fn end_as(&self, mut held: MutexGuard<'_, HeldBuffer>, outcome: Outcome) {
        // A second reference, however short, would keep a kernel from taking the memory over.
        let shared = match &held.state {
            BufferState::Pending(Some(waiting)) | BufferState::Issued(_, Some(waiting))
                if !waiting.callbacks.is_empty() || !waiting.issued.is_empty() =>
            {
                Some(outcome.clone())
            }
            _ => None,
        };

        let before = std::mem::replace(&mut held.state, BufferState::Ended(outcome));
        let counts = self.counts.fetch_or(ENDED | ISSUED, Ordering::AcqRel);
        drop(held);
        self.ended.notify_all();
        if let BufferState::Pending(Some(waiting)) | BufferState::Issued(_, Some(waiting)) = before
        {
            let BufferWaiters {
                issued,
                callbacks,
                wakers,
                ..
            } = *waiting;
            if let Some(outcome) = shared {
                issued
                    .into_iter()
                    .chain(callbacks)
                    .for_each(|then| then(&outcome));
            }
            wakers.into_iter().for_each(|(_, waker)| waker.wake());
        }
        // A later `give_up` sees that the async buffer has ended.
        if counts & GIVEN_UP != 0 {
            self.release();
        }
    }

    /// Stores a buffer that issued work will fill, and calls the callbacks and wakers that wait for
    /// it. Does nothing unless the async buffer is pending.
    pub(super) fn issue(&self, buffer: SharedBuffer) {
        let mut held = self.held.lock();
        let BufferState::Pending(waiting) = &mut held.state else {
            return;
        };
        let mut waiting = waiting.take();
        let callbacks = waiting
            .as_mut()
            .map(|waiting| std::mem::take(&mut waiting.issued))
            .unwrap_or_default();
        let shared = (!callbacks.is_empty()).then(|| Ok(buffer.clone()));
        // Threads that wait for the end check again and keep waiting.
        let wakers = waiting
            .as_ref()
            .map(|waiting| waiting.wakers.clone())
            .unwrap_or_default();

        held.state = BufferState::Issued(buffer, waiting);
        held.filling = FillStatus::UnderWay(Vec::new());
        self.counts.fetch_or(ISSUED, Ordering::AcqRel);
        drop(held);
        self.ended.notify_all();
        if let Some(outcome) = shared {
            callbacks.into_iter().for_each(|then| then(&outcome));
        }
        wakers.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// Ends the async buffer with the result of the issued work. The buffer may already be taken.
    pub(super) fn end_issued(&self, result: Result<(), Arc<Failure>>) {
        let mut held = self.held.lock();
        let known = result
            .clone()
            .map_or_else(FillStatus::Failed, |()| FillStatus::Done);
        let verdicts = match std::mem::replace(&mut held.filling, known) {
            FillStatus::UnderWay(verdicts) => verdicts,
            FillStatus::Done | FillStatus::Failed(_) => Vec::new(),
        };

        match std::mem::replace(&mut held.state, BufferState::Pending(None)) {
            BufferState::Issued(buffer, waiting) => {
                held.state = BufferState::Pending(waiting);
                let (outcome, buffer) = match &result {
                    Ok(()) => (Ok(buffer), None),
                    Err(failure) => (Err(failure.clone()), Some(buffer)),
                };
                self.end_as(held, outcome);
                drop(buffer);
            }
            // The last holder is gone, or a kernel has taken the buffer over.
            before => {
                held.state = before;
                drop(held);
            }
        }
        verdicts.into_iter().for_each(|then| then(result.clone()));
    }
}

impl HeldBuffer {
    pub(super) fn issued(&self) -> Option<Outcome> {
        match &self.state {
            BufferState::Ended(outcome) => Some(outcome.clone()),
            BufferState::Issued(buffer, _) => Some(Ok(buffer.clone())),
            BufferState::Pending(_) => None,
        }
    }
}
