//! Fences: device work that uses memory and may not have finished.
//!
//! A device runs its work later, in its own order. So memory that it reads or writes carries
//! [fences](Fence): the last work issued that uses it. New work waits for them *on the device*;
//! memory is freed when they are over, without blocking a thread. Host memory that no device uses
//! has no fences, which costs nothing.

#[cfg(test)]
pub(super) mod tests;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A point in a device's queue of work. It is passed once all earlier work has succeeded or failed.
pub trait Fence: Any + Send + Sync {
    /// Returns true if the fence has been passed. Reads one atomic.
    fn is_over(&self) -> bool;

    /// Calls `then` once the fence is passed: at once, or on the thread that notices it. `then`
    /// must return quickly.
    fn on_over(&self, then: Box<dyn FnOnce() + Send>);

    /// Returns the error of the work before the fence, as a message for users. `None` if the fence
    /// is not passed, or if no error is known.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Returns true if the fence was passed although its work may never end. No thread waits for
    /// that work any more, and its memory is never reused.
    fn is_lost(&self) -> bool {
        false
    }

    /// Returns true if `earlier` is always passed when this fence is, because `earlier` was issued
    /// before in the same queue. Then only this fence must be stored. A buffer that many calls read
    /// thus keeps one fence per queue.
    fn covers(&self, earlier: &dyn Fence) -> bool {
        let _ = earlier;
        false
    }
}

/// The fences of the work on one piece of memory, at most one for each queue.
#[derive(Clone, Default)]
pub struct Fences(Vec<Arc<dyn Fence>>);

impl Fences {
    /// Adds `fence`, unless it is passed or a stored fence [covers](Fence::covers) it. Drops stored
    /// fences that are passed or that `fence` covers. [Lost](Fence::is_lost) fences are always
    /// added and kept: their memory must never be reused.
    pub fn add(&mut self, fence: Arc<dyn Fence>) {
        self.0
            .retain(|known| known.is_lost() || (!known.is_over() && !fence.covers(&**known)));
        // Two threads may add their fences in another order than they issued them.
        let is_open = !fence.is_over() && !self.0.iter().any(|known| known.covers(&*fence));
        if is_open || fence.is_lost() {
            self.0.push(fence);
        }
    }

    /// Drops all fences except [lost](Fence::is_lost) ones, whose work may never end.
    pub(super) fn clear(&mut self) {
        self.0.retain(|fence| fence.is_lost());
    }

    /// Returns true if work that is [lost](Fence::is_lost) may still use the memory.
    pub(super) fn has_lost(&self) -> bool {
        self.0.iter().any(|fence| fence.is_lost())
    }

    /// Collects `fences`. Keeps even those that are passed, because they may have an error.
    pub fn of(fences: impl IntoIterator<Item = Arc<dyn Fence>>) -> Self {
        Self(fences.into_iter().collect())
    }

    /// Adds the fences of `others`, except those that are passed, as [`add`](Self::add) does.
    pub fn add_all(&mut self, others: &Self) {
        others.0.iter().for_each(|fence| self.add(fence.clone()));
    }

    /// Iterates over the stored fences. Some of them may already be passed.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Fence>> {
        self.0.iter()
    }

    /// Returns true if all fences are passed, or if there are none.
    pub fn are_over(&self) -> bool {
        self.0.iter().all(|fence| fence.is_over())
    }

    /// Returns true if the memory may be reused: all fences are passed, and none is
    /// [lost](Fence::is_lost).
    pub(super) fn are_done(&self) -> bool {
        self.0
            .iter()
            .all(|fence| fence.is_over() && !fence.is_lost())
    }

    /// Returns the error of the first fence that has failed, or `None` if no failure is known.
    pub fn failure(&self) -> Option<String> {
        self.0.iter().find_map(|fence| fence.failure())
    }

    /// Calls `then` once all fences are passed: at once, or on the thread that notices the last
    /// one.
    pub fn on_over(mut self, then: Box<dyn FnOnce() + Send>) {
        while let Some(fence) = self.0.pop() {
            if !fence.is_over() {
                return fence.on_over(Box::new(move || self.on_over(then)));
            }
        }
        then();
    }

    /// Keeps `memory` alive until all fences are passed, or for ever if one of them is
    /// [lost](Fence::is_lost). Does not wait.
    pub(super) fn keep<T: Send + 'static>(self, memory: T) {
        let all = self.clone();
        self.on_over(Box::new(move || {
            if all.are_done() {
                drop(memory);
            } else {
                std::mem::forget(memory);
            }
        }));
    }
}

impl fmt::Debug for Fences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.0.iter().filter(|fence| !fence.is_over()).count();
        write!(f, "Fences({open} open)")
    }
}
