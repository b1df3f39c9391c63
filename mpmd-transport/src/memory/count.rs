//! Counting allocations of the process: for benchmarks that show what a call costs.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Whether anybody counts. Written at the start and the end of a count, read by every allocation.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// Allocations of all threads while somebody counted.
static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Allocations of this thread while somebody counted. Needs no set-up and no destructor, so
    /// that it may be used by an allocator at any time.
    static OWN: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts while [`CountingAllocator::count`] runs. Else it costs a
/// look at a word that nobody writes.
///
/// To be a binary's `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// Allocations during [`CountingAllocator::count`]; growing one in its place counts too.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Allocations {
    /// By the thread that counted.
    pub own: u64,
    /// By all other threads of the process meanwhile.
    pub others: u64,
}

impl CountingAllocator {
    /// Runs `run` and counts the allocations meanwhile: none where this is not the process's
    /// allocator. One count at a time: where two overlap, the first to end ends both.
    pub fn count<R>(run: impl FnOnce() -> R) -> (R, Allocations) {
        let before = (ALL.load(Ordering::SeqCst), OWN.get());
        COUNTING.store(true, Ordering::SeqCst);
        let result = run();
        COUNTING.store(false, Ordering::SeqCst);
        let own = OWN.get() - before.1;
        let all = ALL.load(Ordering::SeqCst) - before.0;
        (result, Allocations { own, others: all.saturating_sub(own) })
    }

    #[inline]
    fn one_more() {
        if COUNTING.load(Ordering::Relaxed) {
            ALL.fetch_add(1, Ordering::Relaxed);
            OWN.set(OWN.get() + 1);
        }
    }
}

// SAFETY: every call goes to the system's allocator as it came, so all that `GlobalAlloc` promises
// and asks for is what `System` promises and asks for. Counting touches an atomic and a thread's
// cell that has no destructor and is initialised at compile time: it neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::one_more();
        // SAFETY: the caller keeps what `GlobalAlloc::alloc` asks for.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::one_more();
        // SAFETY: the caller keeps what `GlobalAlloc::alloc_zeroed` asks for.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::one_more();
        // SAFETY: `place` came from `System`, as all places of this allocator do; the rest is the
        // caller's.
        unsafe { System.realloc(place, layout, size) }
    }

    #[inline]
    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: `place` came from `System`, as all places of this allocator do; the rest is the
        // caller's.
        unsafe { System.dealloc(place, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_of_this_thread_and_of_others_are_told_apart_while_somebody_counts() {
        // Not this test's allocator: asked by hand.
        let allocate = || {
            let layout = Layout::new::<[u64; 4]>();
            // SAFETY: the layout is not empty, and what comes is grown and given back as it was
            // taken.
            unsafe {
                let place = CountingAllocator.alloc(layout);
                let place = CountingAllocator.realloc(place, layout, 64);
                CountingAllocator.dealloc(place, Layout::new::<[u64; 8]>());
            }
        };
        allocate();
        let ((), found) = CountingAllocator::count(|| {
            allocate();
            std::thread::spawn(move || (allocate(), allocate())).join().unwrap();
        });
        assert_eq!(found, Allocations { own: 2, others: 4 });
        allocate();
        assert_eq!(CountingAllocator::count(|| ()).1, Allocations::default());
    }
}
