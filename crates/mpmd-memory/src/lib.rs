//! Buffers, and the pools that they come from.
//!
//! A [`Pool`] carves 64-byte aligned blocks from *segments*. A segment is the unit that is lent to
//! other processes, registered with a network card or pinned, once. An [`Arena`] decides the kind
//! of memory of its segments. A freed block is kept for the next allocation of its size class,
//! because new pages cost tens of times more than reused ones.
//!
//! An [`OwnedBuffer`] has one owner, which may write it. When [frozen](OwnedBuffer::freeze) it
//! becomes a [`SharedBuffer`], which never changes and goes back to its pool when the last holder
//! drops it.
//!
//! Blocks may be in [device memory](DeviceMemory): only the device's own work accesses their bytes.
//! Their [`Fences`] stand for the work that has not finished, and memory goes back to its pool only
//! when they are over.

#![allow(unsafe_code)]

mod arena;
mod device;
mod fence;
mod latch;
mod map;
mod parts;
mod pool;

use std::any::Any;
use std::fmt;
use std::mem::take;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use mpmd_base::block::Mutex;

pub use arena::segment::Segment;
pub use arena::segment::{File, memory_file, take_pages};
pub use arena::{Arena, Pin};
pub use arena::{Leaving, Retired};
pub use device::{DeviceAllocator, DeviceMemory, DevicePlace, DeviceSharing, Landing, MOST_WORDS};
pub use fence::{Fence, Fences};
pub use latch::Latch;
pub use map::{map, unmap};
pub use parts::DividedBuffer;
pub use pool::{BufferSizes, OutOfMemory, Pool, PoolStats, Reservation};

use parts::BufferPart;
use pool::PoolBlock;

/// Alignment of every pool allocation in bytes: the size of a cache line. It suffices for any
/// vector load.
pub const ALIGNMENT: usize = 64;

/// The memory behind an owned buffer.
enum Backing {
    Block(PoolBlock),
    Part(BufferPart),
    Vec(Vec<u8>),
}

/// A writable buffer with a single owner.
///
/// Accessing its bytes panics if they are in [device memory](OwnedBuffer::device).
pub struct OwnedBuffer {
    backing: Backing,
    len: usize,
    /// Fences of device work that uses the bytes. Code that writes the bytes must wait for them
    /// first.
    fences: Fences,
}

impl OwnedBuffer {
    /// Makes the bytes immutable and shareable, without a copy.
    pub fn freeze(self) -> SharedBuffer {
        let range = 0..self.len;
        let whole = Arc::new(WholeMemory::new(BufferMemory::Owned(self)));
        SharedBuffer {
            whole,
            range,
            verdict: None,
            counted: None,
        }
    }

    /// Returns the address range of the bytes in device memory, or `None` if they are host memory.
    pub fn device(&self) -> Option<DevicePlace> {
        match &self.backing {
            Backing::Block(block) => block.device().map(|place| DevicePlace {
                bytes: self.len,
                ..place
            }),
            Backing::Part(_) | Backing::Vec(_) => None,
        }
    }

    /// Binds this thread to the device whose memory the bytes are in. Does nothing for host memory.
    /// See [`DeviceMemory::bind`].
    pub fn bind(&self) -> std::io::Result<()> {
        match &self.backing {
            Backing::Block(block) => block.bind(),
            Backing::Part(_) | Backing::Vec(_) => Ok(()),
        }
    }

    /// Returns true if the bytes are in pinned host pages, which devices can copy from and to
    /// directly.
    pub fn is_pinned(&self) -> bool {
        match &self.backing {
            Backing::Block(block) => block.is_pinned(),
            Backing::Part(part) => part.is_pinned(),
            Backing::Vec(_) => false,
        }
    }

    /// Returns the fences of device work that may still read or write these bytes. Do not write the
    /// bytes or rely on their content before all fences are passed. Does not wait.
    pub fn fences(&self) -> &Fences {
        &self.fences
    }

    /// Adds the fence of issued device work that writes these bytes. After
    /// [`freeze`](Self::freeze), readers wait for it.
    pub fn add_fence(&mut self, fence: Arc<dyn Fence>) {
        self.fences.add(fence);
    }

    /// Drops the fences. The caller has issued work that runs after them, and adds the fence of
    /// that work. [Lost](Fence::is_lost) fences stay, since no work can run after them.
    pub fn clear_fences(&mut self) {
        self.fences.clear();
    }

    fn place(&self) -> Option<SegmentPosition> {
        match &self.backing {
            Backing::Block(block) => Some(block.place()),
            Backing::Part(part) => part.place(),
            Backing::Vec(_) => None,
        }
    }

    /// Returns the pool block that contains the bytes. `None` if they are in no pool.
    fn block(&self) -> Option<&PoolBlock> {
        match &self.backing {
            Backing::Block(block) => Some(block),
            Backing::Part(part) => part.block(),
            Backing::Vec(_) => None,
        }
    }

    /// Creates a buffer from the first `len` bytes of a block.
    fn of_block(block: PoolBlock, len: usize) -> Self {
        debug_assert!(len <= block.capacity());
        Self {
            backing: Backing::Block(block),
            len,
            fences: Fences::default(),
        }
    }
}

impl Drop for OwnedBuffer {
    fn drop(&mut self) {
        if !self.fences.are_done() {
            let memory = std::mem::replace(&mut self.backing, Backing::Vec(Vec::new()));
            take(&mut self.fences).keep(memory);
        }
    }
}

/// Wraps bytes outside any pool, for control payloads and host values. They may be unaligned.
impl From<Vec<u8>> for OwnedBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self {
            backing: Backing::Vec(bytes),
            len,
            fences: Fences::default(),
        }
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

/// Memory that another owner has lent. It may be read until this is dropped.
///
/// Dropping it returns the memory to its owner, and must not block.
pub trait Loan: Any + Send + Sync {
    /// Returns the bytes, with the same address and the same values at every call. Empty if they
    /// are in [device memory](Self::device).
    fn bytes(&self) -> &[u8];

    /// Returns the address range of the bytes in memory of one of this process's devices. `None` if
    /// they are host memory.
    fn device(&self) -> Option<DevicePlace> {
        None
    }

    /// Returns the Rust value that is lent instead of bytes. `None` if bytes are lent.
    fn value(&self) -> Option<&(dyn Any + Send + Sync)> {
        None
    }

    /// Returns true if the bytes are in another device's memory, which the device accesses
    /// remotely. The borrower should then copy them.
    fn is_far(&self) -> bool {
        false
    }

    /// Returns true if the owner of the bytes has a memory limit. The borrower should then copy
    /// them and return the loan soon.
    fn is_limited(&self) -> bool {
        false
    }

    /// Returns the position of the bytes in a segment. `None` if they cannot be lent on to another
    /// process.
    fn place(&self) -> Option<SegmentPosition> {
        None
    }
}

/// A segment, and an offset in bytes within it.
#[derive(Clone)]
pub struct SegmentPosition {
    /// The segment that contains the bytes.
    pub segment: Arc<Segment>,
    /// Offset of the first byte within the segment, in bytes.
    pub offset: usize,
}

impl SegmentPosition {
    fn plus(self, bytes: usize) -> Self {
        Self {
            offset: self.offset + bytes,
            ..self
        }
    }
}

/// Immutable bytes that any number of clones share: a range of a frozen [`OwnedBuffer`] or of
/// memory on [loan](Loan).
#[derive(Clone)]
pub struct SharedBuffer {
    whole: Arc<WholeMemory>,
    range: Range<usize>,
    /// A fence that is passed once it is known if the bytes are valid. Clones of this buffer have
    /// it too. See `with_verdict`.
    verdict: Option<Arc<dyn Fence>>,
    /// Bytes that a pool counts as live for this buffer and its clones, although their memory is
    /// not the pool's. See [`Reservation::hold_for`].
    counted: Option<Arc<Reservation>>,
}

/// The memory of shared buffers, with the fences of device work on it.
struct WholeMemory {
    memory: BufferMemory,
    /// Fences of device work that reads the memory.
    reads: Mutex<Fences>,
    /// Fences of device work that writes the memory.
    ready: Fences,
}

/// The memory of a shared buffer: an owned buffer, or a loan.
enum BufferMemory {
    Owned(OwnedBuffer),
    Lent(Box<dyn Loan>),
    /// No memory: the state while the buffer is dropped.
    Gone,
}

impl WholeMemory {
    fn new(mut memory: BufferMemory) -> Self {
        let ready = match &mut memory {
            BufferMemory::Owned(buffer) => take(&mut buffer.fences),
            BufferMemory::Lent(_) | BufferMemory::Gone => Fences::default(),
        };
        Self {
            memory,
            reads: Mutex::default(),
            ready,
        }
    }

    /// Removes and returns the memory, with the fences of all unfinished work on it.
    fn take(&mut self) -> (BufferMemory, Fences) {
        let mut fences = take(&mut self.ready);
        fences.add_all(self.reads.get_mut());
        *self.reads.get_mut() = Fences::default();
        (
            std::mem::replace(&mut self.memory, BufferMemory::Gone),
            fences,
        )
    }

    fn bytes(&self) -> &[u8] {
        match &self.memory {
            BufferMemory::Owned(buffer) => buffer,
            BufferMemory::Lent(loan) => {
                assert!(
                    loan.device().is_none(),
                    "device memory cannot be accessed as host memory"
                );
                loan.bytes()
            }
            BufferMemory::Gone => &[],
        }
    }
}

impl Drop for WholeMemory {
    fn drop(&mut self) {
        if !self.ready.are_done() || !self.reads.get_mut().are_done() {
            let (memory, fences) = self.take();
            fences.keep(memory);
        }
    }
}

impl SharedBuffer {
    /// Wraps memory that another owner has lent. It is returned when the last clone is dropped.
    /// [`into_owned`](Self::into_owned) always fails on it.
    pub fn lent(loan: Box<dyn Loan>) -> Self {
        Self::lent_later(loan, Fences::default())
    }

    /// Wraps lent memory, as [`SharedBuffer::lent`] does, that may not be written yet. Its bytes
    /// are valid once all fences in `ready` are passed.
    pub fn lent_later(loan: Box<dyn Loan>, ready: Fences) -> Self {
        let bytes = loan
            .device()
            .map_or_else(|| loan.bytes().len(), |place| place.bytes);
        let whole = WholeMemory {
            memory: BufferMemory::Lent(loan),
            reads: Mutex::default(),
            ready,
        };
        Self {
            whole: Arc::new(whole),
            range: 0..bytes,
            verdict: None,
            counted: None,
        }
    }

    /// Returns the Rust [value](Loan::value) that was lent instead of bytes, if there is one.
    pub fn value(&self) -> Option<&(dyn Any + Send + Sync)> {
        match &self.whole.memory {
            BufferMemory::Lent(loan) => loan.value(),
            BufferMemory::Owned(_) | BufferMemory::Gone => None,
        }
    }

    /// Returns true if these bytes are on loan from another owner.
    pub fn is_lent(&self) -> bool {
        matches!(self.whole.memory, BufferMemory::Lent(_))
    }

    /// Returns the length in bytes, in host or device memory.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Returns the address range of the bytes in device memory, or `None` if they are host memory.
    pub fn device(&self) -> Option<DevicePlace> {
        let place = match &self.whole.memory {
            BufferMemory::Owned(buffer) => buffer.device(),
            BufferMemory::Lent(loan) => loan.device(),
            BufferMemory::Gone => None,
        };
        let part = |place: DevicePlace| DevicePlace {
            address: place.address + self.range.start as u64,
            bytes: self.range.len(),
            ..place
        };
        place.map(part)
    }

    /// Binds this thread to the device whose memory the bytes are in, if this process owns that
    /// memory. Otherwise does nothing.
    pub fn bind(&self) -> std::io::Result<()> {
        match &self.whole.memory {
            BufferMemory::Owned(buffer) => buffer.bind(),
            BufferMemory::Lent(_) | BufferMemory::Gone => Ok(()),
        }
    }

    /// Returns true if the bytes are in pinned host pages of this process, which devices can copy
    /// from directly.
    pub fn is_pinned(&self) -> bool {
        match &self.whole.memory {
            BufferMemory::Owned(buffer) => buffer.is_pinned(),
            BufferMemory::Lent(_) | BufferMemory::Gone => false,
        }
    }

    /// Returns the fences of the device work that writes the bytes. Device work that reads the
    /// bytes must run after that work. Other readers must wait for the fences.
    ///
    /// If the work [has failed](Fences::failure), or if the process that lent the bytes is gone,
    /// the values are undefined. Device work that would use them then fails.
    pub fn ready(&self) -> &Fences {
        &self.whole.ready
    }

    /// Returns the same bytes with a fence that is passed once it is known if they are valid. If
    /// they are not, the fence's failure is the reason.
    ///
    /// [`ready`](Self::ready) alone is not enough, because work can succeed on invalid input. A
    /// peer to which the bytes are lent before they are written gets this result too.
    pub fn with_verdict(self, verdict: Arc<dyn Fence>) -> Self {
        Self {
            verdict: Some(verdict),
            ..self
        }
    }

    /// Returns the fence given by [`with_verdict`](Self::with_verdict), if there is one.
    pub fn verdict(&self) -> Option<Arc<dyn Fence>> {
        self.verdict.clone()
    }

    /// Returns true if the bytes are written and known to be valid. Does not wait.
    pub fn is_made(&self) -> bool {
        let is_well = |verdict: &Arc<dyn Fence>| verdict.is_over() && verdict.failure().is_none();
        self.ready().are_over()
            && self.ready().failure().is_none()
            && self.verdict.as_ref().is_none_or(is_well)
    }

    /// Calls `then` once it is known if the bytes are valid, with the failure if they are not. The
    /// call happens at once, or on the thread that notices the last fence. `then` must return
    /// quickly.
    pub fn on_made(&self, then: Box<dyn FnOnce(Option<String>) + Send>) {
        let ready = self.ready().clone();
        let verdict = self.verdict.clone();
        self.ready().clone().on_over(Box::new(move || {
            let Some(verdict) = verdict else {
                return then(ready.failure());
            };
            let known = verdict.clone();
            verdict.on_over(Box::new(move || {
                then(known.failure().or_else(|| ready.failure()))
            }));
        }));
    }

    /// Adds the fence of issued device work that reads these bytes. Their memory returns to its
    /// pool or owner only after the fence is passed.
    pub fn add_read(&self, fence: Arc<dyn Fence>) {
        self.whole.reads.lock().add(fence);
    }

    /// Returns a range of these bytes without copying. `range` counts bytes from the start of this
    /// buffer.
    ///
    /// # Panics
    ///
    /// If `range` runs past the end, or ends before it starts.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.range.len(),
            "{range:?} runs past {}",
            self.len()
        );
        let start = self.range.start + range.start;
        Self {
            range: start..start + range.len(),
            ..self.clone()
        }
    }

    /// Drops this buffer, whose memory other processes may go on reading without limit. The memory
    /// is never written again, nor reused by its pool. Host memory returns to the system together
    /// with its whole segment, since readers have mappings of their own. Device memory stays
    /// allocated until this process ends, since nothing else keeps it.
    pub fn retire(self) {
        match &self.whole.memory {
            BufferMemory::Owned(buffer) if buffer.device().is_none() => {
                buffer.block().into_iter().for_each(PoolBlock::retire);
            }
            _ => std::mem::forget(self),
        }
    }

    /// Turns the bytes back into a writable buffer, if this is the only clone and covers the whole
    /// buffer. Unfinished device work that reads the bytes is in the result's
    /// [fences](OwnedBuffer::fences).
    ///
    /// # Errors
    ///
    /// Returns `self` if there are other clones, if the bytes are on loan, or if this is only a
    /// part of the buffer. Also if [lost](Fence::is_lost) work or another process may still use the
    /// bytes.
    pub fn into_owned(self) -> Result<OwnedBuffer, Self> {
        let BufferMemory::Owned(buffer) = &self.whole.memory else {
            return Err(self);
        };

        let is_lost = self.whole.ready.has_lost() || self.whole.reads.lock().has_lost();
        if is_lost || self.range != (0..buffer.len) {
            return Err(self);
        }

        let Self {
            whole,
            range,
            verdict,
            counted,
        } = self;
        match Arc::try_unwrap(whole) {
            Ok(mut whole) => match whole.take() {
                // A block is retired before its last other holder is dropped.
                (BufferMemory::Owned(mut buffer), fences)
                    if !buffer.block().is_some_and(PoolBlock::is_retired) =>
                {
                    buffer.fences = fences;
                    Ok(buffer)
                }
                (memory, ready) => {
                    let whole = WholeMemory {
                        memory,
                        reads: Mutex::default(),
                        ready,
                    };
                    Err(Self {
                        whole: Arc::new(whole),
                        range,
                        verdict,
                        counted,
                    })
                }
            },
            Err(whole) => Err(Self {
                whole,
                range,
                verdict,
                counted,
            }),
        }
    }

    /// Returns true if the pool or the owner of the bytes has a memory limit. The owner may run
    /// short of memory, so a borrower should copy the bytes and return the loan.
    pub fn is_limited(&self) -> bool {
        let of_memory = match &self.whole.memory {
            BufferMemory::Owned(OwnedBuffer {
                backing: Backing::Block(block),
                ..
            }) => block.pool().limit().is_some(),
            BufferMemory::Lent(loan) => loan.is_limited(),
            _ => false,
        };

        of_memory
            || self
                .counted
                .as_ref()
                .is_some_and(|held| held.pool().limit().is_some())
    }

    /// Returns true if `pool` counts these bytes: they are in one of its blocks, or it
    /// [counts](Reservation::hold_for) memory outside it.
    pub fn is_counted_by(&self, pool: &Pool) -> bool {
        let block = match &self.whole.memory {
            BufferMemory::Owned(buffer) => buffer.block(),
            BufferMemory::Lent(_) | BufferMemory::Gone => None,
        };
        let pools = block.map(PoolBlock::pool).into_iter();
        pools
            .chain(self.counted.as_ref().map(|held| held.pool()))
            .any(|one| one.is_same(pool))
    }

    /// Turns the bytes that a pool [counts](Reservation::hold_for) for this buffer back into a
    /// reservation of its length. The buffer stays as it is, but is no longer counted. `None` if no
    /// pool counts bytes for it, or if a clone shares the count.
    pub fn take_room(&mut self) -> Option<Reservation> {
        match Arc::try_unwrap(self.counted.take()?) {
            Ok(held) => Some(held.unhold().split_off(self.len())),
            Err(shared) => {
                self.counted = Some(shared);
                None
            }
        }
    }

    /// Returns true if `self` and `other` are the same range of the same buffer, so that a pool
    /// counts their bytes only once. False if each has a reservation of its own, see
    /// [`Reservation::hold_for`].
    pub fn counts_with(&self, other: &Self) -> bool {
        let is_held_twice = match (&self.counted, &other.counted) {
            (Some(one), Some(other)) => !Arc::ptr_eq(one, other),
            _ => false,
        };
        self.same_place(other) && !is_held_twice
    }

    /// Returns true if these bytes are lent and in another device's memory, which [this process's
    /// device](Self::device) accesses remotely. They should be copied.
    pub fn is_far(&self) -> bool {
        matches!(&self.whole.memory, BufferMemory::Lent(loan) if loan.is_far())
    }

    /// Returns the position of the bytes in their segment. `None` if other processes cannot map or
    /// open that segment.
    pub fn place(&self) -> Option<SegmentPosition> {
        let place = match &self.whole.memory {
            BufferMemory::Owned(buffer) => buffer.place(),
            BufferMemory::Lent(loan) => loan.place(),
            BufferMemory::Gone => None,
        };
        place
            .map(|place| place.plus(self.range.start))
            .filter(|place| place.segment.is_shareable())
    }

    /// Returns the `bytes` bytes at `offset` of the segment that contains this buffer. `None`
    /// unless all of them are part of the buffer.
    pub fn part_at(&self, offset: u64, bytes: u64) -> Option<Self> {
        let first = self.place()?.offset;
        let start = usize::try_from(offset).ok()?.checked_sub(first)?;
        let end = start.checked_add(usize::try_from(bytes).ok()?)?;
        (end <= self.len()).then(|| self.slice(start..end))
    }

    /// Returns the loan, if these bytes are on loan from another owner.
    pub fn loan(&self) -> Option<&dyn Loan> {
        match &self.whole.memory {
            BufferMemory::Owned(_) | BufferMemory::Gone => None,
            BufferMemory::Lent(loan) => Some(&**loan),
        }
    }

    /// Returns true if `self` and `other` are the same range of the same buffer.
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
        &self.whole.bytes()[self.range.clone()]
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

    use super::fence::tests::ByHand;
    use super::*;

    #[test]
    fn into_owned_needs_the_last_whole_holder() {
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
    fn lent_memory_goes_back_with_its_last_holder() {
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
    fn device_memory_goes_back_when_its_fences_are_over() {
        let pool = Pool::new("test", None);
        let live = || pool.stats().live / Pool::rounded(1);
        let [writes, reads] = [(); 2].map(|()| Arc::new(ByHand::default()));
        let mut buffer = pool.allocate(1).unwrap();
        buffer.add_fence(writes.clone());
        let shared = buffer.freeze();
        shared.add_read(reads.clone());
        assert_eq!(shared.ready().iter().count(), 1, "reads make no values");
        let owned = shared.into_owned().unwrap();
        assert_eq!(owned.fences().iter().count(), 2);
        drop(owned);
        writes.pass();
        assert_eq!(live(), 1, "it is still read");
        reads.pass();
        assert_eq!(live(), 0);

        let [writes, reads] = [(); 2].map(|()| Arc::new(ByHand::default()));
        let mut buffer = pool.allocate(1).unwrap();
        buffer.add_fence(writes.clone());
        let shared = buffer.freeze();
        let part = shared.slice(0..1);
        part.add_read(reads.clone());
        drop((shared, part));
        reads.pass();
        assert_eq!(live(), 1);
        writes.pass();
        assert_eq!(live(), 0);
    }

    #[test]
    fn read_fence_alone_keeps_owned_and_lent_memory() {
        struct Counted(Arc<[u8]>);
        impl Loan for Counted {
            fn bytes(&self) -> &[u8] {
                &self.0
            }
        }
        let pool = Pool::new("test", None);
        let (owned, borrowed) = (pool.allocate(1).unwrap().freeze(), Arc::from([7u8]));
        let lent = SharedBuffer::lent(Box::new(Counted(Arc::clone(&borrowed))));
        let is_held = || [pool.stats().live > 0, Arc::strong_count(&borrowed) > 1];
        let reads = [(); 2].map(|()| Arc::new(ByHand::default()));
        for (buffer, read) in [owned, lent].into_iter().zip(&reads) {
            buffer.add_read(read.clone());
            assert!(buffer.is_made(), "reads make no values");
            drop(buffer);
        }
        assert_eq!(is_held(), [true; 2]);
        reads[0].pass();
        assert_eq!(is_held(), [false, true]);
        reads[1].pass();
        assert_eq!(is_held(), [false; 2]);
    }

    #[test]
    fn memory_of_lost_work_is_never_given_out_again() {
        let pool = Pool::new("test", None);
        let live = || pool.stats().live / Pool::rounded(1);
        // Another reader comes after the lost one, and its fence passes.
        let [lost, later] = [(); 2].map(|()| Arc::new(ByHand::default()));
        let shared = pool.allocate(1).unwrap().freeze();
        shared.add_read(lost.clone());
        lost.lose();
        shared.add_read(later.clone());
        later.pass();
        let shared = shared.into_owned().unwrap_err();
        drop(shared);
        assert_eq!(live(), 1, "it may still be read");
        // The owner believes that its new work runs after the lost work.
        let lost = Arc::new(ByHand::default());
        let mut owned = pool.allocate(1).unwrap();
        owned.add_fence(lost.clone());
        lost.lose();
        owned.clear_fences();
        drop(owned);
        assert_eq!(live(), 2, "it may still be written");
    }

    /// An allocator of addresses without memory.
    struct Nowhere;

    struct Addresses(usize);

    impl DeviceAllocator for Nowhere {
        fn allocate(&self, bytes: usize) -> std::io::Result<Box<dyn DeviceMemory>> {
            Ok(Box::new(Addresses(bytes)))
        }
    }

    impl DeviceMemory for Addresses {
        fn address(&self) -> u64 {
            1 << 40
        }

        fn bytes(&self) -> usize {
            self.0
        }

        fn device(&self) -> u32 {
            3
        }
    }

    #[test]
    fn device_blocks_have_places_but_no_host_bytes() {
        let pool = Pool::in_arena("test", Some(1 << 20), &Arena::device(Arc::new(Nowhere)));
        let [first, second] = [(); 2].map(|()| pool.allocate(1000).unwrap());
        let (first_place, second_place) = (first.device().unwrap(), second.device().unwrap());
        assert_eq!((first_place.device, first_place.bytes), (3, 1000));
        assert_eq!(
            second_place.address - first_place.address,
            Pool::rounded(1000)
        );
        let shared = second.freeze().slice(100..300);
        assert_eq!(shared.len(), 200);
        let place = shared.device().unwrap();
        assert_eq!(
            (place.address, place.bytes),
            (second_place.address + 100, 200)
        );
        assert!(!shared.is_pinned() && shared.place().is_none());
        let look = std::panic::AssertUnwindSafe(|| shared[0]);
        assert!(std::panic::catch_unwind(look).is_err());
    }

    /// An allocator with room for one segment at a time.
    struct OneAtATime(Arc<AtomicUsize>);

    struct TheOne(Addresses, Arc<AtomicUsize>);

    impl DeviceAllocator for OneAtATime {
        fn allocate(&self, bytes: usize) -> std::io::Result<Box<dyn DeviceMemory>> {
            if self.0.swap(1, Ordering::Relaxed) == 1 {
                return Err(std::io::Error::other("no memory"));
            }
            Ok(Box::new(TheOne(Addresses(bytes), self.0.clone())))
        }
    }

    impl DeviceMemory for TheOne {
        fn address(&self) -> u64 {
            self.0.address()
        }

        fn bytes(&self) -> usize {
            self.0.bytes()
        }

        fn device(&self) -> u32 {
            self.0.device()
        }
    }

    impl Drop for TheOne {
        fn drop(&mut self) {
            self.1.store(0, Ordering::Relaxed);
        }
    }

    #[test]
    fn allocation_waits_for_peers_to_close_memory() {
        let base = Arena::private();
        let pool = Pool::in_arena(
            "test",
            None,
            &base.device_beside(Arc::new(OneAtATime(Arc::default()))),
        );
        // Each is large enough for a segment of its own.
        let first = pool.allocate(4 << 20).unwrap().freeze();
        // From here on a peer knows the segment.
        let BufferMemory::Owned(buffer) = &first.whole.memory else {
            panic!("it is owned")
        };
        buffer.place().unwrap().segment.number(&base);
        assert!(pool.allocate(8 << 20).is_err(), "it is in use");
        drop(first);
        let others = std::thread::spawn(move || {
            let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
            loop {
                let closed = base.take_retired();
                if !closed.is_empty() || std::time::Instant::now() > until {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    return closed.len();
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        assert!(pool.allocate(8 << 20).is_ok());
        assert_eq!(others.join().unwrap(), 1);
    }

    #[test]
    fn segments_are_pinned_from_map_to_unmap() {
        let arena = Arena::private();
        let pinned = Arc::new(AtomicUsize::new(0));
        struct Unpin(Arc<AtomicUsize>);
        impl Drop for Unpin {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let count = pinned.clone();
        arena.on_map(Box::new(move |address, bytes| {
            assert!(address.is_multiple_of(4096) && bytes > 0);
            count.fetch_add(1, Ordering::Relaxed);
            Some(Box::new(Unpin(count.clone())))
        }));
        let pool = Pool::in_arena("test", None, &arena);
        let buffer = pool.allocate(1 << 20).unwrap();
        assert!(buffer.is_pinned() && !OwnedBuffer::from(vec![1]).is_pinned());
        assert_eq!(pinned.load(Ordering::Relaxed), 1);
        drop((buffer, pool));
        assert_eq!(pinned.load(Ordering::Relaxed), 0);
    }

    #[test]
    #[should_panic(expected = "runs past")]
    fn slice_past_the_end_panics() {
        let _ = SharedBuffer::from(vec![0; 4]).slice(2..5);
    }
}
