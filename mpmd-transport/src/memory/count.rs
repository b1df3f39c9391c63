//! Counts the allocations of the process, for benchmarks that show the cost of a call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// True while a count runs. Written at its start and end, read by every allocation.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// Number of allocations of all threads during counts.
static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Number of allocations of this thread during counts. Needs no initialisation and no
    /// destructor, so that an allocator may use it at any time.
    static OWN: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts while [`CountingAllocator::count`] runs. Otherwise each
/// allocation costs one extra read of an atomic that is never written.
///
/// To be set as a binary's `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// Number of allocations during [`CountingAllocator::count`]. A reallocation counts too, even in
/// place.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Allocations {
    /// Number of allocations by the thread that called `count`.
    pub own: u64,
    /// Number of allocations by all other threads of the process.
    pub others: u64,
}

impl CountingAllocator {
    /// Runs `run` and returns its result, with the number of allocations meanwhile. That number is
    /// zero if this is not the process's global allocator. Counts must not overlap: the first to
    /// end ends both.
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

// SAFETY: every call is passed to the system's allocator unchanged, so `System` keeps the promises
// of `GlobalAlloc` and has the same requirements. Counting touches an atomic and a thread's cell
// that has no destructor and is initialised at compile time. It neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::one_more();
        // SAFETY: the caller meets the requirements of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::one_more();
        // SAFETY: the caller meets the requirements of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::one_more();
        // SAFETY: `place` came from `System`, as all memory of this allocator does. The caller
        // meets the other requirements.
        unsafe { System.realloc(place, layout, size) }
    }

    #[inline]
    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: `place` came from `System`, as all memory of this allocator does. The caller
        // meets the other requirements.
        unsafe { System.dealloc(place, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_counted_per_thread() {
        // The test process uses another allocator, so this one is called directly.
        let allocate = || {
            let layout = Layout::new::<[u64; 4]>();
            // SAFETY: the layout is not empty. The memory is grown and freed with the layout that
            // it was allocated with.
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
