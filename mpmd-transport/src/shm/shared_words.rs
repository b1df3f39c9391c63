//! Arrays of atomics in memory that several processes read and write at any time.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::sync::{AtomicU32, AtomicU64};

/// An atomic integer type whose values other processes may change at any time.
pub(super) trait Word: Send + Sync + 'static {
    #[cfg(test)]
    fn zero() -> Self;
}

impl Word for AtomicU32 {
    #[cfg(test)]
    fn zero() -> Self {
        Self::new(0)
    }
}

impl Word for AtomicU64 {
    #[cfg(test)]
    fn zero() -> Self {
        Self::new(0)
    }
}

/// A slice of atomic integers in memory that another object keeps alive.
pub(super) struct SharedWords<W> {
    first: NonNull<W>,
    count: usize,
    keep: Arc<dyn Send + Sync>,
}

// SAFETY: This is a shared slice of `W`, which may go to other threads as `W` is `Sync`, and a
// holder that may too. Nothing in it depends on the thread.
unsafe impl<W: Sync> Send for SharedWords<W> {}

// SAFETY: See above; a reference to it gives access only to a `&[W]`.
unsafe impl<W: Sync> Sync for SharedWords<W> {}

impl<W: Word> SharedWords<W> {
    /// Wraps the `count` words that start at `first`.
    ///
    /// # Safety
    ///
    /// Until `keep` is dropped, `first` must point to `count` valid `W` that can be read and
    /// written. (Any bytes of mapped memory are valid.) Until then, all code must access them only
    /// by atomic operations of the same size.
    ///
    /// # Panics
    ///
    /// If `first` is not aligned for `W`.
    pub(super) unsafe fn at(first: NonNull<u8>, count: usize, keep: Arc<dyn Send + Sync>) -> Self {
        let first = first.cast::<W>();
        assert!(first.is_aligned(), "words at {first:?}");
        Self { first, count, keep }
    }

    /// Allocates `count` zero words in private memory.
    #[cfg(test)]
    pub(super) fn alone(count: usize) -> Self {
        let words: Arc<Vec<W>> = Arc::new((0..count).map(|_| W::zero()).collect());
        let first = NonNull::from(words.as_slice()).cast::<u8>();
        // SAFETY: The vector has `count` words, never moves them as it never grows, and lives until
        // the `Arc` is dropped. No other code knows of it.
        unsafe { Self::at(first, count, words) }
    }
}

impl<W> Deref for SharedWords<W> {
    type Target = [W];

    fn deref(&self) -> &[W] {
        // SAFETY: The caller of `at` promised `count` valid words at `first` until `keep` is
        // dropped, which outlives the reference. They are atomics, so other processes may change
        // them meanwhile.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

impl<W> Clone for SharedWords<W> {
    fn clone(&self) -> Self {
        Self {
            first: self.first,
            count: self.count,
            keep: self.keep.clone(),
        }
    }
}
