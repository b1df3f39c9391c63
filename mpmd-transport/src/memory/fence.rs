//! Fences: device work that uses memory and may not have finished.
//!
//! A device runs its work later, in its own order. So memory that it reads or writes carries
//! [fences](Fence): the last work issued that uses it. New work waits for them *on the device*;
//! memory is freed when they are over, without blocking a thread. Host memory that no device uses
//! has no fences, which costs nothing.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A point in a device's work. It is passed once all work before it has finished, well or not.
pub trait Fence: Any + Send + Sync {
    /// True if the fence has been passed. Reads one atomic.
    fn is_over(&self) -> bool;

    /// Calls `then` once the fence is passed: now, or on the thread that notices it. `then` must be
    /// short.
    fn on_over(&self, then: Box<dyn FnOnce() + Send>);

    /// The work's error, as a message for users. `None` if the fence is not passed, or if no error
    /// is known.
    fn failure(&self) -> Option<String> {
        None
    }

    /// True if the fence was passed though its work was not over and may never be. Nothing waits
    /// for that work any more, and its memory is never reused.
    fn is_lost(&self) -> bool {
        false
    }

    /// True if `earlier` is always over when this fence is: both are in one queue, and `earlier`
    /// was issued before. Then only this one must be kept, and a buffer that a thousand calls read
    /// has one fence.
    fn covers(&self, earlier: &dyn Fence) -> bool {
        let _ = earlier;
        false
    }
}

/// Fences of one piece of memory, at most one for each queue that uses it.
#[derive(Clone, Default)]
pub struct Fences(Vec<Arc<dyn Fence>>);

impl Fences {
    /// Adds `fence`, unless it is over or a stored fence [covers](Fence::covers) it. Drops stored
    /// fences that are over or that `fence` covers. [Lost](Fence::is_lost) fences are always added
    /// and kept: their memory must never be reused.
    pub fn add(&mut self, fence: Arc<dyn Fence>) {
        self.0.retain(|known| known.is_lost() || (!known.is_over() && !fence.covers(&**known)));
        // Two threads may add their fences in another order than they issued them.
        let is_open = !fence.is_over() && !self.0.iter().any(|known| known.covers(&*fence));
        if is_open || fence.is_lost() {
            self.0.push(fence);
        }
    }

    /// Drops all fences except [lost](Fence::is_lost) ones.
    pub(super) fn clear(&mut self) {
        self.0.retain(|fence| fence.is_lost());
    }

    /// Returns true if work that is [lost](Fence::is_lost) may still use the memory.
    pub(super) fn has_lost(&self) -> bool {
        self.0.iter().any(|fence| fence.is_lost())
    }

    /// Collects these fences, even those that are over, since they may hold an error.
    pub fn of(fences: impl IntoIterator<Item = Arc<dyn Fence>>) -> Self {
        Self(fences.into_iter().collect())
    }

    /// Adds the fences of `others` as [`add`](Self::add) does, which leaves out those that are
    /// over.
    pub(crate) fn add_all(&mut self, others: &Self) {
        others.0.iter().for_each(|fence| self.add(fence.clone()));
    }

    /// Iterates over the stored fences. Some of them may be over.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Fence>> {
        self.0.iter()
    }

    /// True if all fences are over, or if there are none.
    pub fn are_over(&self) -> bool {
        self.0.iter().all(|fence| fence.is_over())
    }

    /// True if the memory may be reused: all fences are over, and none is [lost](Fence::is_lost).
    pub(super) fn are_done(&self) -> bool {
        self.0.iter().all(|fence| fence.is_over() && !fence.is_lost())
    }

    /// Returns the error of the first failed fence, or `None` if no failure is known.
    pub fn failure(&self) -> Option<String> {
        self.0.iter().find_map(|fence| fence.failure())
    }

    /// Calls `then` once all fences are over: now, or on the thread that notices the last of them.
    pub fn on_over(mut self, then: Box<dyn FnOnce() + Send>) {
        while let Some(fence) = self.0.pop() {
            if !fence.is_over() {
                return fence.on_over(Box::new(move || self.on_over(then)));
            }
        }
        then();
    }

    /// Keeps `memory` until all fences are over, or for ever if one of them is
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

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;
    use crate::memory::Latch;

    /// A fence that a test passes by hand.
    #[derive(Default)]
    pub(in crate::memory) struct ByHand {
        over: Latch,
        lost: AtomicBool,
    }

    impl ByHand {
        pub(in crate::memory) fn lose(&self) {
            self.lost.store(true, Ordering::Release);
            self.pass();
        }

        pub(in crate::memory) fn pass(&self) {
            self.over.pass().into_iter().for_each(|then| then());
        }
    }

    impl Fence for ByHand {
        fn is_over(&self) -> bool {
            self.over.is_passed()
        }

        fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
            self.over.on_pass(then);
        }

        fn is_lost(&self) -> bool {
            self.lost.load(Ordering::Acquire)
        }
    }

    #[test]
    fn memory_of_lost_work_is_kept_for_ever() {
        for is_lost in [false, true] {
            let fence = Arc::new(ByHand::default());
            let mut fences = Fences::default();
            fences.add(fence.clone());
            let memory = Arc::new(());
            fences.clone().keep(memory.clone());
            assert_eq!((Arc::strong_count(&memory), fences.are_done()), (2, false));
            if is_lost {
                fence.lose()
            } else {
                fence.pass()
            }
            let held = usize::from(is_lost);
            assert_eq!((Arc::strong_count(&memory), fences.are_over()), (1 + held, true));
            assert_eq!(fences.are_done(), !is_lost);
            fences.keep(memory.clone());
            assert_eq!(
                Arc::strong_count(&memory),
                1 + 2 * held,
                "also memory that is released later"
            );
        }
    }

    #[test]
    fn lost_fences_stay_when_others_are_added() {
        let (early, late) = (Arc::new(ByHand::default()), Arc::new(ByHand::default()));
        let (mut fences, mut copy) = (Fences::default(), Fences::default());
        fences.add(early.clone());
        early.lose();
        fences.add(Arc::new(ByHand::default()));
        assert_eq!(
            (fences.iter().count(), fences.has_lost()),
            (2, true),
            "over before another was added"
        );
        late.lose();
        fences.add(late);
        assert_eq!(fences.iter().count(), 3, "over when it was added");
        copy.add_all(&fences);
        assert_eq!(copy.iter().count(), 3);
        copy.clear();
        assert_eq!((copy.iter().count(), copy.are_over(), copy.are_done()), (2, true, false));
    }

    #[test]
    fn callback_runs_once_after_the_last_fence() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let fences = [(); 3].map(|()| Arc::new(ByHand::default()));
            let mut all = Fences::default();
            fences.iter().for_each(|fence| all.add(fence.clone()));
            let called = Arc::new(AtomicUsize::new(0));
            let count = called.clone();
            all.on_over(Box::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
            }));
            for (i, at) in order.into_iter().enumerate() {
                assert_eq!(called.load(Ordering::Relaxed), 0, "{i} are over");
                fences[at].pass();
            }
            assert_eq!(called.load(Ordering::Relaxed), 1);
        }
        Fences::default().on_over(Box::new(|| ()));
    }

    /// A fence with its position in a queue.
    struct InQueue(u32);

    impl Fence for InQueue {
        fn is_over(&self) -> bool {
            false
        }

        fn on_over(&self, _: Box<dyn FnOnce() + Send>) {}

        fn covers(&self, earlier: &dyn Fence) -> bool {
            (earlier as &dyn Any).downcast_ref::<Self>().is_some_and(|earlier| earlier.0 < self.0)
        }
    }

    #[test]
    fn only_the_last_fence_of_a_queue_is_kept() {
        let mut fences = Fences::default();
        fences.add(Arc::new(ByHand::default()));
        (0..100).for_each(|number| fences.add(Arc::new(InQueue(number))));
        fences.add(Arc::new(InQueue(7)));
        assert_eq!(fences.iter().count(), 2);
        let last = fences.iter().find_map(|fence| (&**fence as &dyn Any).downcast_ref::<InQueue>());
        assert_eq!(last.map(|last| last.0), Some(99));
    }

    #[test]
    fn finished_fences_are_dropped() {
        let (first, second) = (Arc::new(ByHand::default()), Arc::new(ByHand::default()));
        let mut fences = Fences::default();
        fences.add(first.clone());
        first.pass();
        assert!(fences.are_over());
        fences.add(second);
        assert_eq!(fences.iter().count(), 1);
        fences.add(first);
        assert_eq!((fences.iter().count(), fences.are_over()), (1, false));
    }
}
