//! The writing side of async buffers. A resolver that is dropped without an outcome fails its async
//! buffers.

use std::sync::Arc;

use mpmd_memory::SharedBuffer;
use mpmd_proto::router::{Failure, FailureKind};

use super::inner::BufferCell;
use super::{AsyncBuffer, Outcome};

/// The writing side of one async buffer. Dropping it unused fails the async buffer.
pub(crate) struct Resolver(pub(super) Option<AsyncBuffer>);

/// The writing side of issued async buffers. It ends them when the issued work has ended. Dropping
/// it unused fails them.
pub(crate) struct IssuedPromises(Option<Arc<[BufferCell]>>);

/// The writing side of several async buffers, which are resolved in order. Dropping it fails the
/// remaining ones.
pub(crate) struct Resolvers {
    pub(super) all: Arc<[BufferCell]>,
    pub(super) next: u32,
}

impl Resolver {
    /// Ends the async buffer with a buffer or a failure, and wakes its waiters.
    pub(crate) fn keep(mut self, outcome: Outcome) {
        if let Some(slot) = self.0.take() {
            slot.inner().end(outcome);
        }
    }

    /// Issues the async buffer with `buffer`, which issued work fills. The caller must end the
    /// returned object when that work ends.
    pub(crate) fn issue(mut self, buffer: SharedBuffer) -> IssuedPromises {
        let all = self.0.take().map(|slot| {
            slot.inner().issue(buffer);
            slot.all.clone()
        });
        IssuedPromises(all)
    }
}

impl IssuedPromises {
    /// Marks that the async buffers end exactly as the work that fills them: no input of the work
    /// can still fail.
    pub(crate) fn end_with_their_work(&self) {
        let all = self.0.iter().flat_map(|all| all.iter());
        all.for_each(|inner| inner.held.lock().ends_with_its_work = true);
    }

    /// Ends the async buffers: filled on success, or with the failure of the issued work.
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

impl Drop for Resolver {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.inner().end(Err(abandoned()));
        }
    }
}

impl Resolvers {
    /// Ends the next async buffer with a buffer or a failure. Does nothing if none is left.
    pub(crate) fn keep_next(&mut self, outcome: Outcome) {
        let Some(inner) = self.all.get(self.next as usize) else {
            return;
        };
        self.next += 1;
        inner.end(outcome);
        inner.let_go(self.all.len() > 1);
    }

    /// Issues all async buffers with the given buffers, which issued work fills. The caller must
    /// end the returned object when that work ends.
    ///
    /// Call it before any of the async buffers has ended. An async buffer whose entry in `buffers`
    /// has no memory fails.
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

    /// Ends all remaining async buffers with this failure.
    pub(crate) fn fail(mut self, failure: &Arc<Failure>) {
        self.fail_rest(failure);
    }

    fn fail_rest(&mut self, failure: &Arc<Failure>) {
        (self.next as usize..self.all.len()).for_each(|_| self.keep_next(Err(failure.clone())));
    }
}

impl Drop for Resolvers {
    fn drop(&mut self) {
        if (self.next as usize) < self.all.len() {
            self.fail_rest(&abandoned());
        }
    }
}

fn abandoned() -> Arc<Failure> {
    let message = "the operation was abandoned: its program ended before it ran";
    Arc::new(Failure::new(
        FailureKind::Left,
        mpmd_base::ProcessId(0),
        0,
        message,
    ))
}
