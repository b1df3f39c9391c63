//! Tests of fences, and a fence that a test passes by hand.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::Latch;

/// A fence that a test passes by hand.
#[derive(Default)]
pub(crate) struct ByHand {
    over: Latch,
    lost: AtomicBool,
}

impl ByHand {
    pub(crate) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.pass();
    }

    pub(crate) fn pass(&self) {
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
        assert_eq!(
            (Arc::strong_count(&memory), fences.are_over()),
            (1 + held, true)
        );
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
    assert_eq!(
        (copy.iter().count(), copy.are_over(), copy.are_done()),
        (2, true, false)
    );
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
        (earlier as &dyn Any)
            .downcast_ref::<Self>()
            .is_some_and(|earlier| earlier.0 < self.0)
    }
}

#[test]
fn only_the_last_fence_of_a_queue_is_kept() {
    let mut fences = Fences::default();
    fences.add(Arc::new(ByHand::default()));
    (0..100).for_each(|number| fences.add(Arc::new(InQueue(number))));
    fences.add(Arc::new(InQueue(7)));
    assert_eq!(fences.iter().count(), 2);
    let last = fences
        .iter()
        .find_map(|fence| (&**fence as &dyn Any).downcast_ref::<InQueue>());
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
