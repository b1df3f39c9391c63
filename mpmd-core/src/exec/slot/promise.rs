//! The writing side of slots. What is dropped unkept fails its slots.

use std::sync::Arc;

use mpmd_transport::SharedBuffer;
use mpmd_transport::router::{Failure, FailureKind};

use super::inner::Inner;
use super::{Outcome, Slot};

/// The writing side.
pub(crate) struct Promise(pub(super) Option<Slot>);

/// The writing side of slots that were issued.
pub(crate) struct IssuedPromises(Option<Arc<[Inner]>>);

/// The writing side of several slots, which end in order.
pub(crate) struct Promises {
    pub(super) all: Arc<[Inner]>,
    pub(super) next: u32,
}

impl Promise {
    /// Ends the slot.
    pub(crate) fn keep(mut self, outcome: Outcome) {
        if let Some(slot) = self.0.take() {
            slot.inner().end(outcome);
        }
    }

    /// The buffer is there, and work was issued that fills it: the slot ends when that does.
    pub(crate) fn issue(mut self, buffer: SharedBuffer) -> IssuedPromises {
        let all = self.0.take().map(|slot| {
            slot.inner().issue(buffer);
            slot.all.clone()
        });
        IssuedPromises(all)
    }
}

impl IssuedPromises {
    /// The work was given nothing that may turn out to have failed: the slots end as it does.
    pub(crate) fn end_with_their_work(&self) {
        let all = self.0.iter().flat_map(|all| all.iter());
        all.for_each(|inner| inner.held.lock().ends_with_its_work = true);
    }

    /// What was issued has filled the buffers, or has failed.
    pub(crate) fn end(mut self, result: Result<(), Arc<Failure>>) {
        self.end_all(&result);
    }

    fn end_all(&mut self, result: &Result<(), Arc<Failure>>) {
        let Some(all) = self.0.take() else { return };
        for inner in &*all {
            inner.end_issued(result.clone());
            if all.len() > 1 {
                inner.let_go(true);
            }
        }
    }
}

impl Drop for IssuedPromises {
    fn drop(&mut self) {
        self.end_all(&Err(abandoned()));
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.inner().end(Err(abandoned()));
        }
    }
}

impl Promises {
    /// Ends the next slot, if there is one.
    pub(crate) fn keep_next(&mut self, outcome: Outcome) {
        let Some(inner) = self.all.get(self.next as usize) else { return };
        self.next += 1;
        inner.end(outcome);
        inner.let_go(self.all.len() > 1);
    }

    /// The buffers of all slots are there, and work was issued that fills them: the slots end when
    /// that does.
    ///
    /// To be called before any of them has ended. Slots for which there is no buffer fail.
    pub(crate) fn issue(
        mut self,
        mut buffers: impl Iterator<Item = SharedBuffer>,
    ) -> IssuedPromises {
        for inner in &*self.all {
            match buffers.next() {
                Some(buffer) => inner.issue(buffer),
                None => inner.end(Err(abandoned())),
            }
        }
        self.next = self.all.len() as u32;
        IssuedPromises(Some(self.all.clone()))
    }

    /// Ends the slots that are left with this failure.
    pub(crate) fn fail(mut self, failure: &Arc<Failure>) {
        self.fail_rest(failure);
    }

    fn fail_rest(&mut self, failure: &Arc<Failure>) {
        (self.next as usize..self.all.len()).for_each(|_| self.keep_next(Err(failure.clone())));
    }
}

impl Drop for Promises {
    fn drop(&mut self) {
        if (self.next as usize) < self.all.len() {
            self.fail_rest(&abandoned());
        }
    }
}

fn abandoned() -> Arc<Failure> {
    let message = "the operation was abandoned: its program ended before it ran";
    Arc::new(Failure::new(FailureKind::Left, mpmd_ids::ProcessId(0), 0, message))
}
