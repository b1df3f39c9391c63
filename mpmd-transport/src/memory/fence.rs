//! Work of a device that uses memory and may not be over yet.
//!
//! A device does what it is told later, in its own order. So memory that it reads or writes carries
//! [fences](Fence): what was last issued that uses it. Whoever issues more waits for them *on the
//! device*; whoever frees it waits until they are over, without blocking. Memory of the host that
//! no device uses has none, which costs nothing.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A point in a device's work. Passed once all work before it is over, well or not.
pub trait Fence: Any + Send + Sync {
    /// Whether it has been passed. Costs a look at one word.
    fn is_over(&self) -> bool;

    /// Calls `then` once it is passed: now, or on the thread that finds that it is. `then` must be
    /// short.
    fn on_over(&self, then: Box<dyn FnOnce() + Send>);

    /// What went wrong with the work, for people, where that is known once it is passed.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Whether it was passed though the work before it was not over, and may never be: nobody waits
    /// for that any more, and the memory that it uses is nobody else's ever again.
    fn is_lost(&self) -> bool {
        false
    }

    /// Whether `earlier` is over whenever this is: one of the same queue that was issued before.
    /// Then only this one need be kept, and a buffer that a thousand calls read has one fence.
    fn covers(&self, earlier: &dyn Fence) -> bool {
        let _ = earlier;
        false
    }
}

/// Fences of one piece of memory, at most one for each queue that uses it.
#[derive(Clone, Default)]
pub struct Fences(Vec<Arc<dyn Fence>>);

impl Fences {
    /// Adds one, and forgets those that are over or that it [covers](Fence::covers). Keeps those
    /// that are [lost](Fence::is_lost): what they use is never free again.
    pub fn add(&mut self, fence: Arc<dyn Fence>) {
        self.0.retain(|known| known.is_lost() || (!known.is_over() && !fence.covers(&**known)));
        // Two threads may add theirs in another order than they issued them in.
        let is_open = !fence.is_over() && !self.0.iter().any(|known| known.covers(&*fence));
        if is_open || fence.is_lost() {
            self.0.push(fence);
        }
    }

    /// Forgets all but those that are [lost](Fence::is_lost).
    pub(super) fn clear(&mut self) {
        self.0.retain(|fence| fence.is_lost());
    }

    /// Returns true if work that is [lost](Fence::is_lost) may still use the memory.
    pub(super) fn has_lost(&self) -> bool {
        self.0.iter().any(|fence| fence.is_lost())
    }

    /// These, whether they are over or not: for those that know of failures.
    pub fn of(fences: impl IntoIterator<Item = Arc<dyn Fence>>) -> Self {
        Self(fences.into_iter().collect())
    }

    /// Adds all of `others`.
    pub fn add_all(&mut self, others: &Self) {
        others.0.iter().for_each(|fence| self.add(fence.clone()));
    }

    /// Those that were not over when they were last looked at, and those that are lost.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Fence>> {
        self.0.iter()
    }

    /// Whether all are over.
    pub fn are_over(&self) -> bool {
        self.0.iter().all(|fence| fence.is_over())
    }

    /// Whether the memory may be used by others: all are over, and none is [lost](Fence::is_lost).
    pub(super) fn are_done(&self) -> bool {
        self.0.iter().all(|fence| fence.is_over() && !fence.is_lost())
    }

    /// What went wrong with the work of the first that failed, if any has.
    pub fn failure(&self) -> Option<String> {
        self.0.iter().find_map(|fence| fence.failure())
    }

    /// Calls `then` once all are over: now, or on the thread that finds the last of them so.
    pub fn on_over(mut self, then: Box<dyn FnOnce() + Send>) {
        while let Some(fence) = self.0.pop() {
            if !fence.is_over() {
                return fence.on_over(Box::new(move || self.on_over(then)));
            }
        }
        then();
    }

    /// Keeps `memory` until all are over; for ever where one of them is [lost](Fence::is_lost).
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

    /// A fence that is passed when a test says so.
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
    fn memory_of_work_that_may_never_end_is_nobodys_again() {
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
            assert_eq!(Arc::strong_count(&memory), 1 + 2 * held, "also of what is let go of later");
        }
    }

    #[test]
    fn lost_fences_stay_whatever_is_added_later() {
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
    fn what_waits_for_several_is_called_once_after_the_last_whatever_their_order() {
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

    /// One of a queue's, by its place in it.
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
    fn of_a_queue_the_last_is_kept_in_whatever_order_they_are_added() {
        let mut fences = Fences::default();
        fences.add(Arc::new(ByHand::default()));
        (0..100).for_each(|number| fences.add(Arc::new(InQueue(number))));
        fences.add(Arc::new(InQueue(7)));
        assert_eq!(fences.iter().count(), 2);
        let last = fences.iter().find_map(|fence| (&**fence as &dyn Any).downcast_ref::<InQueue>());
        assert_eq!(last.map(|last| last.0), Some(99));
    }

    #[test]
    fn those_that_are_over_are_forgotten() {
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
