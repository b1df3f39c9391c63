//! Words of memory that several processes read and write at any time.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::sync::{AtomicU32, AtomicU64};

/// A word that others may change at any time.
pub(super) trait Word: Send + Sync + 'static {
    /// A zero.
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

/// Words in memory that somebody else keeps alive: a slice of atomics.
pub(super) struct Words<W> {
    first: NonNull<W>,
    count: usize,
    keep: Arc<dyn Send + Sync>,
}

// SAFETY: This is a shared slice of `W`, which may go to other threads as `W` is `Sync`, and a
// holder that may too. Nothing in here depends on the thread.
unsafe impl<W: Sync> Send for Words<W> {}

// SAFETY: See above; through a reference to it one gets at nothing but a `&[W]`.
unsafe impl<W: Sync> Sync for Words<W> {}

impl<W: Word> Words<W> {
    /// The `count` words from `first` on.
    ///
    /// # Safety
    ///
    /// From `first` on there are `count` valid `W`, for reading and writing, until `keep` is
    /// dropped (mapped memory has them, whatever its bytes are). Meanwhile whoever accesses them
    /// does so by atomic operations of the same size.
    ///
    /// # Panics
    ///
    /// Where `first` is not aligned for `W`.
    pub(super) unsafe fn at(first: NonNull<u8>, count: usize, keep: Arc<dyn Send + Sync>) -> Self {
        let first = first.cast::<W>();
        assert!(first.is_aligned(), "words at {first:?}");
        Self { first, count, keep }
    }

    /// `count` words of zero that nobody else has.
    #[cfg(test)]
    pub(super) fn alone(count: usize) -> Self {
        let words: Arc<Vec<W>> = Arc::new((0..count).map(|_| W::zero()).collect());
        let first = NonNull::from(words.as_slice()).cast::<u8>();
        // SAFETY: The vector has `count` words, never changes its place as it never grows, and
        // lives until the `Arc` is dropped. Nobody else knows of it.
        unsafe { Self::at(first, count, words) }
    }
}

impl<W> Deref for Words<W> {
    type Target = [W];

    fn deref(&self) -> &[W] {
        // SAFETY: Whoever made this promised `count` valid words from `first` on until `keep` is
        // dropped, which outlives the reference. They are atomics, so others may change them
        // meanwhile.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

impl<W> Clone for Words<W> {
    fn clone(&self) -> Self {
        Self { first: self.first, count: self.count, keep: self.keep.clone() }
    }
}
