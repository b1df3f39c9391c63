//! Divides a buffer into parts that are written concurrently.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::pool::PoolBlock;
use super::{Backing, Fences, OwnedBuffer, SegmentPosition};

/// A buffer that is divided into parts which never overlap. It can be joined again when all parts
/// have been dropped.
///
/// Each part is an [`OwnedBuffer`]. So a transport can read into one part while other threads write
/// the others.
pub struct DividedBuffer {
    whole: Arc<DividedWhole>,
    /// The byte ranges of the parts so far, ascending. Empty ranges are left out.
    given: Vec<Range<usize>>,
}

/// The whole buffer, shared with the parts. While parts exist, only they access its bytes.
struct DividedWhole {
    buffer: OwnedBuffer,
    start: NonNull<u8>,
}

// SAFETY: the buffer is `Send`, and `start` points into memory that it owns. Through `start` only
// parts reach that memory, each its own range.
unsafe impl Send for DividedWhole {}
// SAFETY: sharing a `DividedWhole` gives no access to its bytes. `buffer` is private to this
// module, which uses it only as its last holder, and parts reach disjoint ranges.
unsafe impl Sync for DividedWhole {}

/// A byte range of a divided buffer that no other part overlaps.
pub(super) struct BufferPart {
    whole: Arc<DividedWhole>,
    start: usize,
}

impl DividedBuffer {
    /// Wraps `buffer`, which is not divided yet. Panics if `buffer` is device memory.
    pub fn new(mut buffer: OwnedBuffer) -> Self {
        let start = NonNull::from(&mut buffer[..]).cast();
        Self {
            whole: Arc::new(DividedWhole { buffer, start }),
            given: Vec::new(),
        }
    }

    /// Returns the part at `range`, in bytes, with the buffer's present content. Returns `None` if
    /// the range overlaps an earlier part or runs past the end. A range cannot be used again after
    /// its part is dropped.
    pub fn part(&mut self, range: Range<usize>) -> Option<OwnedBuffer> {
        if range.start > range.end || range.end > self.whole.buffer.len {
            return None;
        }

        if !range.is_empty() {
            let at = self.given.partition_point(|given| given.end <= range.start);
            if self
                .given
                .get(at)
                .is_some_and(|given| given.start < range.end)
            {
                return None;
            }
            self.given.insert(at, range.clone());
        }

        let part = BufferPart {
            whole: self.whole.clone(),
            start: range.start,
        };
        Some(OwnedBuffer {
            backing: Backing::Part(part),
            len: range.len(),
            fences: Fences::default(),
        })
    }

    /// Returns the whole buffer.
    ///
    /// # Errors
    ///
    /// Returns `self` while parts exist.
    pub fn join(self) -> Result<OwnedBuffer, Self> {
        let Self { whole, given } = self;
        Arc::try_unwrap(whole)
            .map(|whole| whole.buffer)
            .map_err(|whole| Self { whole, given })
    }
}

impl BufferPart {
    pub(super) fn place(&self) -> Option<SegmentPosition> {
        self.whole
            .buffer
            .place()
            .map(|place| place.plus(self.start))
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.whole.buffer.is_pinned()
    }

    pub(super) fn block(&self) -> Option<&PoolBlock> {
        self.whole.buffer.block()
    }

    pub(super) fn bytes(&self, len: usize) -> &[u8] {
        // SAFETY: `DividedBuffer::part` checked that `start + len` is within the buffer. `whole`
        // keeps its memory in place: the buffer is neither moved out nor accessed while this part
        // holds it. The bytes are initialised, as those of every buffer. No other part has them:
        // `DividedBuffer` hands each out once.
        unsafe { std::slice::from_raw_parts(self.whole.start.as_ptr().add(self.start), len) }
    }

    pub(super) fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        // SAFETY: as in `bytes`. `start` comes from a mutable borrow of the buffer, and `&mut self`
        // excludes every other access to this part.
        unsafe { std::slice::from_raw_parts_mut(self.whole.start.as_ptr().add(self.start), len) }
    }
}

impl fmt::Debug for DividedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Divided({} bytes, {} parts given out)",
            self.whole.buffer.len,
            self.given.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn parts_written_at_once_make_a_whole() {
        let pool = Pool::new("test", None);
        for buffer in [
            pool.allocate(1000).unwrap(),
            OwnedBuffer::from(vec![9; 1000]),
        ] {
            let mut divided = DividedBuffer::new(buffer);
            let parts: Vec<OwnedBuffer> = (0..10)
                .rev()
                .map(|i| divided.part(i * 100..(i + 1) * 100).unwrap())
                .collect();
            std::thread::scope(|scope| {
                for (i, mut part) in parts.into_iter().rev().enumerate() {
                    scope.spawn(move || part.fill(i as u8));
                }
            });
            let whole = divided.join().unwrap();
            assert!(
                whole
                    .iter()
                    .enumerate()
                    .all(|(i, byte)| usize::from(*byte) == i / 100)
            );
        }
        assert_eq!(pool.stats().live, 0);
    }

    #[test]
    fn overlapping_and_out_of_range_parts_are_refused() {
        let mut divided = DividedBuffer::new(vec![0; 100].into());
        let first = divided.part(20..40).unwrap();
        for range in [
            20..40,
            0..21,
            39..41,
            25..30,
            10..50,
            0..100,
            90..101,
            101..101,
        ] {
            assert!(divided.part(range.clone()).is_none(), "{range:?}");
        }
        let beside = [
            divided.part(0..20).unwrap(),
            divided.part(40..100).unwrap(),
            divided.part(30..30).unwrap(),
        ];
        assert_eq!(beside.each_ref().map(|part| part.len()), [20, 60, 0]);
        drop(first);
        assert!(divided.part(20..40).is_none(), "a range is handed out once");
    }

    #[test]
    fn join_fails_with_parts_which_may_outlive_it() {
        let pool = Pool::new("test", None);
        let mut divided = DividedBuffer::new(pool.allocate(256).unwrap());
        let part = divided.part(0..64).unwrap();
        let mut divided = divided.join().unwrap_err();
        let frozen = part.freeze();
        let mut other = divided.part(64..128).unwrap();
        drop(divided);
        other.fill(1);
        assert_eq!((frozen.len(), other[63], pool.stats().live), (64, 1, 256));
        drop((frozen, other));
        assert_eq!(pool.stats().live, 0);
    }
}
