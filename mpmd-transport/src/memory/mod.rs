//! Buffers, and the pools they come from.
//!
//! A [`Pool`] carves 64-byte aligned blocks from *segments*: the unit that gets lent to other processes,
//! registered with a network card or pinned, once. What segments are made of is its [`Arena`]'s matter. A block that is given back is kept
//! for the next allocation of its size class, because fresh pages cost tens of times more than reused
//! ones. An [`OwnedBuffer`] has one owner who may write; [frozen](OwnedBuffer::freeze) it becomes a
//! [`SharedBuffer`], which never changes again and goes back to its pool when the last holder drops it.

mod arena;
mod count;
mod parts;
mod pool;
mod segment;

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

pub use arena::Arena;
pub use count::{Allocations, CountingAllocator};
pub use parts::Divided;
pub use pool::{OutOfMemory, Pool, PoolStats, Reservation};
pub use segment::Segment;
pub(crate) use segment::{File, memory_file};

use parts::Part;
use pool::Block;

/// Alignment of every pool allocation, in bytes: a cache line, and enough for any vector load.
pub const ALIGNMENT: usize = 64;

enum Backing {
    Block(Block),
    Part(Part),
    Vec(Vec<u8>),
}

/// Bytes with one owner, who may write them.
pub struct OwnedBuffer {
    backing: Backing,
    len: usize,
}

impl OwnedBuffer {
    /// The same bytes, from now on immutable and shareable.
    pub fn freeze(self) -> SharedBuffer {
        let range = 0..self.len;
        SharedBuffer { whole: Arc::new(Whole::Owned(self)), range }
    }

    fn place(&self) -> Option<Place> {
        match &self.backing {
            Backing::Block(block) => Some(block.place()),
            Backing::Part(part) => part.place(),
            Backing::Vec(_) => None,
        }
    }

    fn of_block(block: Block, len: usize) -> Self {
        debug_assert!(len <= block.capacity());
        Self { backing: Backing::Block(block), len }
    }
}

/// A buffer outside any pool, for control payloads and host values. Not necessarily aligned.
impl From<Vec<u8>> for OwnedBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self { backing: Backing::Vec(bytes), len }
    }
}

impl Deref for OwnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.backing {
            Backing::Block(block) => &block.bytes()[..self.len],
            Backing::Part(part) => part.bytes(self.len),
            Backing::Vec(bytes) => bytes,
        }
    }
}

impl DerefMut for OwnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.backing {
            Backing::Block(block) => &mut block.bytes_mut()[..self.len],
            Backing::Part(part) => part.bytes_mut(self.len),
            Backing::Vec(bytes) => bytes,
        }
    }
}

impl fmt::Debug for OwnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnedBuffer({} bytes)", self.len)
    }
}

/// Memory that somebody else owns, and that may be read until this is dropped.
///
/// What drops it gives it back; dropping must not block.
pub trait Loan: Send + Sync {
    /// The bytes: the same place and the same values at every call.
    fn bytes(&self) -> &[u8];

    /// Where they are, if that can be lent on.
    fn place(&self) -> Option<Place> {
        None
    }

    /// Called before they are lent on: their owner hears that others than this process may read them, also where
    /// this process is no more. False where it cannot be told now: then they are not lent on.
    fn pass_on(&self) -> bool {
        true
    }
}

/// Where in which segment bytes begin.
#[derive(Clone)]
pub struct Place {
    pub(crate) segment: Arc<Segment>,
    pub(crate) offset: usize,
}

impl Place {
    fn plus(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

/// Immutable bytes with any number of holders: a range of a frozen [`OwnedBuffer`], or of memory on
/// [loan](Loan).
#[derive(Clone)]
pub struct SharedBuffer {
    whole: Arc<Whole>,
    range: Range<usize>,
}

enum Whole {
    Owned(OwnedBuffer),
    Lent(Box<dyn Loan>),
}

impl SharedBuffer {
    /// Memory of somebody else's, which goes back when the last holder drops it. Nobody gets it as
    /// [its own](Self::into_owned).
    pub fn lent(loan: Box<dyn Loan>) -> Self {
        let range = 0..loan.bytes().len();
        Self { whole: Arc::new(Whole::Lent(loan)), range }
    }

    /// Whether these bytes are somebody else's.
    pub fn is_lent(&self) -> bool {
        matches!(*self.whole, Whole::Lent(_))
    }

    /// A part of these bytes; moves nothing.
    ///
    /// # Panics
    ///
    /// Where `range` runs past the end.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.range.len(),
            "{range:?} runs past {}",
            self.len()
        );
        let start = self.range.start + range.start;
        Self { whole: self.whole.clone(), range: start..start + range.len() }
    }

    /// The buffer back for writing, where this is its only holder and covers all of it.
    ///
    /// # Errors
    ///
    /// Returns itself where somebody else holds these bytes or has lent them, or where it is only a part.
    pub fn into_owned(self) -> Result<OwnedBuffer, Self> {
        let Whole::Owned(buffer) = &*self.whole else { return Err(self) };
        if self.range != (0..buffer.len) {
            return Err(self);
        }
        let range = self.range;
        match Arc::try_unwrap(self.whole) {
            Ok(Whole::Owned(buffer)) => Ok(buffer),
            Ok(lent @ Whole::Lent(_)) => Err(Self { whole: Arc::new(lent), range }),
            Err(whole) => Err(Self { whole, range }),
        }
    }

    /// Whether they count against a limit of their pool. Who lends such bytes may be short of them later, so
    /// who gets them copies them and gives them back.
    pub fn is_limited(&self) -> bool {
        match &*self.whole {
            Whole::Owned(OwnedBuffer { backing: Backing::Block(block), .. }) => block.is_limited(),
            _ => false,
        }
    }

    /// Where these bytes are, if other processes can map it.
    pub(crate) fn place(&self) -> Option<Place> {
        let place = match &*self.whole {
            Whole::Owned(buffer) => buffer.place(),
            Whole::Lent(loan) => loan.place(),
        };
        place.map(|place| place.plus(self.range.start)).filter(|place| place.segment.descriptor().is_some())
    }

    /// To be called before these bytes are lent; false where they cannot be now. See [`Loan::pass_on`].
    pub(crate) fn pass_on(&self) -> bool {
        match &*self.whole {
            Whole::Owned(_) => true,
            Whole::Lent(loan) => loan.pass_on(),
        }
    }

    /// Whether both are the same bytes in the same place.
    pub fn same_place(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.whole, &other.whole) && self.range == other.range
    }
}

impl From<Vec<u8>> for SharedBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        OwnedBuffer::from(bytes).freeze()
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let bytes = match &*self.whole {
            Whole::Owned(buffer) => &buffer[..],
            Whole::Lent(loan) => loan.bytes(),
        };
        &bytes[self.range.clone()]
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBuffer({} bytes)", self.range.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_frozen_buffer_comes_back_only_to_its_last_whole_holder() {
        let pool = Pool::new("test", None);
        let mut buffer = pool.allocate(100).unwrap();
        buffer[99] = 7;
        let whole = buffer.freeze();
        let part = whole.slice(99..100);
        assert_eq!(&part[..], &[7]);
        let whole = whole.into_owned().unwrap_err();
        drop(part);
        let part = whole.slice(0..99);
        drop(whole);
        assert!(part.into_owned().is_err(), "a part is not the whole");
        assert_eq!(pool.stats().live, 0);
    }

    #[test]
    fn slices_of_slices_count_from_their_own_start() {
        let bytes = SharedBuffer::from((0..10).collect::<Vec<u8>>());
        let inner = bytes.slice(2..8).slice(1..3);
        assert_eq!(&inner[..], &[3, 4]);
        assert!(inner.same_place(&bytes.slice(3..5)));
    }

    #[test]
    fn lent_memory_is_read_in_place_never_owned_and_goes_back_with_its_last_holder() {
        struct Borrowed(Vec<u8>, Arc<AtomicUsize>);
        impl Loan for Borrowed {
            fn bytes(&self) -> &[u8] {
                &self.0
            }
        }
        impl Drop for Borrowed {
            fn drop(&mut self) {
                self.1.fetch_add(1, Ordering::Relaxed);
            }
        }
        let back = Arc::new(AtomicUsize::new(0));
        let lent = SharedBuffer::lent(Box::new(Borrowed(vec![1, 2, 3, 4], back.clone())));
        let part = lent.slice(1..3);
        let lent = lent.into_owned().unwrap_err();
        assert!(lent.is_lent() && part.is_lent() && !SharedBuffer::from(vec![1]).is_lent());
        drop(lent);
        assert_eq!((&part[..], back.load(Ordering::Relaxed)), (&[2, 3][..], 0));
        drop(part);
        assert_eq!(back.load(Ordering::Relaxed), 1);
    }

    #[test]
    #[should_panic(expected = "runs past")]
    fn a_slice_past_the_end_is_the_callers_bug() {
        let _ = SharedBuffer::from(vec![0; 4]).slice(2..5);
    }
}
