//! Pools: blocks by size class, carved from segments, kept for reuse, counted and limited.

use std::collections::BTreeMap;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mpmd_base::block::{Mutex, MutexGuard, now};
use mpmd_base::bytes_text;

use super::arena::segment::Segment;
use super::{ALIGNMENT, Arena, DevicePlace, OwnedBuffer, SegmentPosition, SharedBuffer};

/// Largest block, in bytes, that shares a segment with others. A larger block has its own segment.
const LARGEST_SHARED_CLASS: usize = 512 << 10;
/// The same as `LARGEST_SHARED_CLASS` for device memory, whose driver allocates blocks of 2 MiB.
const LARGEST_SHARED_ON_DEVICE: usize = 2 << 20;
/// Size in bytes of the first shared segment. Later ones grow with the pool, because each segment
/// costs a mapping, and a descriptor in every process to which it is lent.
const FIRST_SEGMENT: usize = 4 << 20;
const LARGEST_SEGMENT: usize = 32 << 20;
/// Unused blocks with a segment of their own are kept while all blocks together take at most twice
/// the peak use plus this many bytes. With a smaller limit, pages would be freed and mapped in
/// every step.
const KEPT_BESIDE: u64 = 64 << 20;
/// Time limit of an allocation that waits for peers to close freed device memory.
const FREED_WITHIN: Duration = Duration::from_millis(500);
/// Pause between two attempts of such an allocation.
const FREED_LOOK: Duration = Duration::from_millis(5);
/// Limit on the total size of a pool's buffers in bytes: the size of the largest allocation.
const MOST: u64 = isize::MAX as u64;

/// A source of buffers with an optional limit in bytes. It counts the memory of its buffers. A
/// clone refers to the same pool.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<PoolInner>,
}

struct PoolInner {
    name: String,
    limit: Option<u64>,
    arena: Arena,
    state: Mutex<PoolState>,
}

/// The state of a pool that its lock protects.
struct PoolState {
    /// Largest block, in bytes, that shares a segment with others.
    largest_shared: usize,
    /// Unused blocks, by size class in bytes.
    free: BTreeMap<usize, Vec<Carved>>,
    /// The segment from which the next small blocks are carved.
    open: Option<CarvedSegment>,
    stats: PoolStats,
}

/// A block for reuse that was taken from the unused ones.
struct CachedBlock {
    carved: Carved,
    /// The size class, in bytes, that the pool counts for the block.
    class: usize,
}

/// A segment from which small blocks are carved.
struct CarvedSegment {
    segment: Arc<Segment>,
    /// Number of bytes at the segment's start that are already carved into blocks.
    used: usize,
}

/// A pool's statistics, in bytes. A buffer counts with its size class, although its block can be
/// larger. A cached block counts with its own size.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes of buffers in use, and of reservations that are [held](Reservation::hold) for other
    /// memory.
    pub live: u64,
    /// Bytes of reservations that have not become a buffer.
    pub reserved: u64,
    /// Bytes of unused blocks that are kept for reuse.
    pub cached: u64,
    /// Largest sum of `live` and `reserved` so far.
    pub peak: u64,
    /// Largest `live` so far: the memory in use, without reservations.
    pub peak_live: u64,
    /// Largest `live` since [`Pool::forget_peak`], or since the start.
    pub recent_peak: u64,
    /// Total number of bytes mapped from the system so far; never falls. It stays constant once a
    /// program has allocated all the memory that its steps need.
    pub mapped: u64,
}

impl PoolStats {
    fn make_live(&mut self, class: usize) {
        self.live += class as u64;
        self.reserved -= class as u64;
        self.peak_live = self.peak_live.max(self.live);
        self.recent_peak = self.recent_peak.max(self.live);
    }
}

/// The error of a pool that has fewer bytes left than were requested. The environment's or the
/// program's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{pool}: {} asked for, {} in use and {} reserved{} of {}{}",
    bytes_text(*.asked),
    bytes_text(*.live),
    bytes_text(*.reserved),
    cached_text(*.cached),
    limit_text(.limit),
    refusal_text(.refusal)
)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The pool's name.
    pub pool: String,
    /// Number of bytes requested.
    pub asked: u64,
    /// Number of bytes in use.
    pub live: u64,
    /// Number of bytes reserved.
    pub reserved: u64,
    /// Number of bytes of unused blocks that the pool keeps although the system refused more
    /// memory.
    pub cached: u64,
    /// The pool's limit in bytes. `None` if there is no limit, or if the limit was not the cause.
    pub limit: Option<u64>,
    /// The error of the system or of the device's driver. `None` if neither has refused.
    pub refusal: Option<String>,
}

fn limit_text(limit: &Option<u64>) -> String {
    let text = |bytes| format!("a limit of {}", bytes_text(bytes));
    limit.map_or_else(|| "the system's memory".to_owned(), text)
}

fn cached_text(cached: u64) -> String {
    match cached {
        0 => String::new(),
        cached => format!(", {} kept for smaller buffers,", bytes_text(cached)),
    }
}

fn refusal_text(refusal: &Option<String>) -> String {
    refusal
        .as_ref()
        .map_or_else(String::new, |refusal| format!(": {refusal}"))
}

/// The total size of several buffers, for [`Pool::reserve_all`].
#[derive(Clone, Copy, Debug)]
pub struct BufferSizes {
    bytes: usize,
    /// Number of bytes of their size classes; `None` if that exceeds the limit of every pool.
    class: Option<u64>,
}

impl Pool {
    /// Creates an empty pool. Its buffers and reservations together may have at most `limit` bytes
    /// at any time; `None` is no limit. `name` is for messages.
    ///
    /// A buffer counts with its size class, [`Pool::rounded`], even if it reuses a larger block. So
    /// earlier buffers do not affect what fits. Unused blocks do not count: the pool can map more
    /// than its limit.
    pub fn new(name: impl Into<String>, limit: Option<u64>) -> Self {
        Self::in_arena(name, limit, &Arena::private())
    }

    /// Creates an empty pool, as [`Pool::new`] does, whose segments come from `arena`.
    pub fn in_arena(name: impl Into<String>, limit: Option<u64>, arena: &Arena) -> Self {
        let largest_shared = match arena.is_device() {
            true => LARGEST_SHARED_ON_DEVICE,
            false => LARGEST_SHARED_CLASS,
        };
        Self {
            inner: Arc::new(PoolInner {
                name: name.into(),
                limit,
                arena: arena.clone(),
                state: Mutex::new(PoolState {
                    largest_shared,
                    free: BTreeMap::new(),
                    open: None,
                    stats: PoolStats::default(),
                }),
            }),
        }
    }

    /// Allocates a buffer of `bytes` bytes. Its content is undefined, because its block may be
    /// reused.
    ///
    /// # Errors
    ///
    /// If the limit or the system does not allow it.
    pub fn allocate(&self, bytes: usize) -> Result<OwnedBuffer, OutOfMemory> {
        match self.inner.take_cached(bytes) {
            Some(cached) => Ok(self.buffer(cached.carved, cached.class, bytes)),
            None => self.reserve(bytes)?.allocate(),
        }
    }

    /// Reserves `bytes` bytes of the limit without allocating memory. Dropping the reservation ends
    /// it.
    ///
    /// # Errors
    ///
    /// If the limit does not allow it.
    pub fn reserve(&self, bytes: usize) -> Result<Reservation, OutOfMemory> {
        self.set_aside(bytes, size_class(bytes).map(|class| class as u64))
    }

    /// Reserves the bytes of several buffers together, for [`Reservation::allocate_all`].
    ///
    /// # Errors
    ///
    /// If the limit does not allow all of them.
    pub fn reserve_all(&self, sizes: BufferSizes) -> Result<Reservation, OutOfMemory> {
        self.set_aside(sizes.bytes, sizes.class)
    }

    /// Reserves `class` bytes; `None` is more than any pool has. If the limit forbids it, first
    /// reclaims lent blocks. `bytes` is the requested size for the error.
    fn set_aside(&self, bytes: usize, class: Option<u64>) -> Result<Reservation, OutOfMemory> {
        let most = self.inner.limit.unwrap_or(MOST).min(MOST);
        let fitting = |stats: &PoolStats| {
            class.filter(|class| *class <= most.saturating_sub(stats.live + stats.reserved))
        };

        let mut state = self.inner.state.lock();
        if fitting(&state.stats).is_none() {
            drop(state);
            self.inner.arena.reclaim();
            state = self.inner.state.lock();
        }

        let stats = &mut state.stats;
        let Some(class) = fitting(stats) else {
            return Err(self.inner.out_of_memory(bytes, stats, self.inner.limit));
        };

        stats.reserved += class;
        stats.peak = stats.peak.max(stats.live + stats.reserved);
        Ok(Reservation {
            pool: self.clone(),
            bytes,
            counted: class,
            held: false,
        })
    }

    /// Returns the pool's present statistics.
    pub fn stats(&self) -> PoolStats {
        self.inner.state.lock().stats
    }

    /// Resets [`PoolStats::recent_peak`] to the bytes that are live now.
    pub fn forget_peak(&self) {
        let mut state = self.inner.state.lock();
        state.stats.recent_peak = state.stats.live;
    }

    /// Returns the limit in bytes on buffers and reservations together. `None` is no limit.
    pub fn limit(&self) -> Option<u64> {
        self.inner.limit
    }

    /// Returns the number of bytes that a pool counts for a buffer of `bytes` bytes: its size
    /// class. `u64::MAX` if no pool can have so many bytes.
    pub fn rounded(bytes: usize) -> u64 {
        size_class(bytes).map_or(u64::MAX, |class| class as u64)
    }

    /// Returns true if `self` and `other` are the same pool.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns unused blocks that have a segment of their own (above 512 KiB, on a device 2 MiB) to
    /// the system.
    pub fn trim(&self) {
        self.inner.trim();
    }

    fn buffer(&self, carved: Carved, class: usize, bytes: usize) -> OwnedBuffer {
        let block = PoolBlock {
            carved: Some(carved),
            class,
            pool: self.clone(),
            is_retired: AtomicBool::new(false),
        };
        OwnedBuffer::of_block(block, bytes)
    }
}

impl PoolInner {
    /// Creates the error of a request for `bytes` bytes.
    fn out_of_memory(&self, bytes: usize, stats: &PoolStats, limit: Option<u64>) -> OutOfMemory {
        OutOfMemory {
            pool: self.name.clone(),
            asked: bytes as u64,
            live: stats.live,
            reserved: stats.reserved,
            cached: if limit.is_none() { stats.cached } else { 0 },
            limit,
            refusal: None,
        }
    }

    /// Takes an unused block for `bytes` bytes, and locks the state only once. `None` if no block
    /// of this size class is unused, if the limit is reached, or if the block would make a new
    /// peak.
    fn take_cached(&self, bytes: usize) -> Option<CachedBlock> {
        let class = size_class(bytes)?;
        let mut state = self.state.lock();
        let PoolStats {
            live,
            reserved,
            recent_peak,
            ..
        } = state.stats;

        let limit = self.limit.unwrap_or(MOST);
        let fits = live + class as u64 <= recent_peak && live + reserved + class as u64 <= limit;
        if !fits {
            return None;
        }

        let block = state.take_free(class)?;
        let stats = &mut state.stats;
        stats.reserved += class as u64;
        stats.peak = stats.peak.max(stats.live + stats.reserved);
        stats.make_live(class);
        Some(CachedBlock {
            carved: block,
            class,
        })
    }

    /// Locks the state to take `bytes` bytes. If that would make a new peak, first reclaims the
    /// blocks that peers no longer use; until then these count as live.
    fn settled(&self, bytes: u64) -> MutexGuard<'_, PoolState> {
        let state = self.state.lock();
        if state.stats.live + bytes <= state.stats.recent_peak {
            return state;
        }
        drop(state);
        self.arena.reclaim();
        self.state.lock()
    }

    /// Takes a reserved block of `class` bytes when no unused block is left. Reclaims blocks that
    /// peers no longer use, or else maps a new segment without holding the lock.
    fn grow(&self, class: usize) -> io::Result<Carved> {
        self.arena.reclaim();
        let mut state = self.state.lock();
        if let Some(block) = state.take(class) {
            return Ok(block);
        }
        let is_shared = class <= state.largest_shared;
        let bytes = state.next_segment_bytes(class);
        let is_plenty = state.would_be_plenty(bytes);
        drop(state);

        // Mapping takes long, so it is done without the lock.
        if is_plenty {
            self.trim();
        }
        let segment = match self.arena.map(bytes) {
            Err(_) => {
                self.trim();
                self.map_when_freed(bytes)?
            }
            Ok(segment) => segment,
        };

        let mut state = self.state.lock();
        if is_shared && let Some(block) = state.take(class) {
            // Another thread mapped a segment first, and that one stays open: two would be one too
            // many.
            drop(state);
            return Ok(block);
        }

        state.stats.mapped += bytes as u64;
        if !is_shared {
            state.stats.make_live(class);
            return Ok(Carved {
                start: segment.start(),
                capacity: class,
                segment,
            });
        }

        // The rest of the previous segment is smaller than such a block, and is given up.
        state.open = Some(CarvedSegment { segment, used: 0 });
        state
            .take(class)
            .ok_or_else(|| io::Error::other("a new segment is too small for a block"))
    }

    /// Maps a new segment of `bytes` bytes. If there is no memory for it, waits up to half a second
    /// for peers to close freed device memory.
    fn map_when_freed(&self, bytes: usize) -> io::Result<Arc<Segment>> {
        let until = now() + FREED_WITHIN;
        loop {
            match self.arena.map(bytes) {
                Err(_) if self.arena.has_leaving() && now() < until => {
                    std::thread::sleep(FREED_LOOK)
                }
                mapped => return mapped,
            }
        }
    }

    fn trim(&self) {
        let mut freed = Vec::new();
        let mut state = self.state.lock();
        let largest_shared = state.largest_shared;
        for (class, blocks) in &mut state.free {
            if *class > largest_shared {
                freed.append(blocks);
            }
        }
        state.stats.cached -= freed.iter().map(|block| block.capacity as u64).sum::<u64>();

        drop(state);
        drop(freed);
    }
}

impl PoolState {
    /// Returns the length in bytes of the next segment, which must fit a block of `class` bytes.
    fn next_segment_bytes(&self, class: usize) -> usize {
        if class > self.largest_shared {
            return class;
        }
        (self.stats.mapped as usize / 4)
            .next_power_of_two()
            .clamp(FIRST_SEGMENT, LARGEST_SEGMENT)
    }

    /// Returns true if the pool keeps so many unused blocks that it should not map `bytes` bytes
    /// more.
    fn would_be_plenty(&self, bytes: usize) -> bool {
        let PoolStats {
            live,
            cached,
            peak_live,
            ..
        } = self.stats;
        live + cached + bytes as u64 > 2 * peak_live + KEPT_BESIDE
    }

    /// Takes a reserved block of `class` bytes, and counts it as live instead of reserved. Both
    /// happen under the lock, so that no other thread sees the bytes counted twice. `None` if a new
    /// segment is needed.
    fn take(&mut self, class: usize) -> Option<Carved> {
        let block = match self.take_free(class) {
            None if class <= self.largest_shared => {
                self.carve(class).or_else(|| self.take_larger(class))
            }
            block => block,
        }?;
        self.stats.make_live(class);
        Some(block)
    }

    fn take_free(&mut self, class: usize) -> Option<Carved> {
        let block = self.free.get_mut(&class)?.pop()?;
        self.stats.cached -= class as u64;
        Some(block)
    }

    /// Takes an unused block of another size class, at most twice as large. Without this, each
    /// class would keep as many small blocks as it ever had at once, because small blocks are never
    /// freed.
    fn take_larger(&mut self, class: usize) -> Option<Carved> {
        let most = (2 * class).min(self.largest_shared);
        let mut larger = self.free.range(class..=most);
        let found = *larger.find(|(_, blocks)| !blocks.is_empty())?.0;
        self.take_free(found)
    }

    /// Carves a block of `class` bytes from the open segment. `None` if the segment has no space.
    fn carve(&mut self, class: usize) -> Option<Carved> {
        let CarvedSegment { segment, used } = self
            .open
            .as_mut()
            .filter(|open| open.used + class <= open.segment.bytes())?;

        // Within the segment, as checked above. Plain arithmetic, since a device's addresses are
        // not valid pointers here.
        let start = NonNull::new(segment.start().as_ptr().wrapping_add(*used))?;
        *used += class;
        Some(Carved {
            start,
            capacity: class,
            segment: segment.clone(),
        })
    }
}

/// Bytes reserved in a pool. Dropping this releases the bytes that have not become a buffer.
#[derive(Debug)]
pub struct Reservation {
    pool: Pool,
    bytes: usize,
    /// Number of bytes that the pool still counts for this reservation.
    counted: u64,
    /// True if the pool counts the bytes as live, false if it counts them as reserved.
    held: bool,
}

impl Reservation {
    /// Turns the reservation into a buffer of the reserved length.
    ///
    /// # Errors
    ///
    /// If the system has no memory left.
    pub fn allocate(mut self) -> Result<OwnedBuffer, OutOfMemory> {
        let inner = &self.pool.inner;
        let class = self.counted as usize;
        let taken = inner.settled(self.counted).take(class);
        let carved = taken
            .map_or_else(|| inner.grow(class), Ok)
            .map_err(|error| OutOfMemory {
                refusal: Some(error.to_string()),
                ..inner.out_of_memory(self.bytes, &inner.state.lock().stats, None)
            })?;
        self.counted = 0;
        Ok(self.pool.buffer(carved, class, self.bytes))
    }

    /// Turns a reservation for several buffers into these buffers. `sizes` are the lengths that
    /// were reserved, or the first of them. Locks the pool once if the blocks are small or cached.
    ///
    /// # Errors
    ///
    /// If the system has no memory left, or if more is requested than was reserved.
    pub fn allocate_all(
        mut self,
        sizes: impl Iterator<Item = usize>,
    ) -> Result<Vec<OwnedBuffer>, OutOfMemory> {
        let mut buffers = Vec::with_capacity(sizes.size_hint().1.unwrap_or(0));
        let pool = self.pool.clone();
        let mut state = pool.inner.settled(self.counted);
        for bytes in sizes {
            let class = size_class(bytes).filter(|class| *class as u64 <= self.counted);
            let mut refusal = None;
            let taken = match class {
                None => None,
                Some(class) => match state.take(class) {
                    Some(taken) => Some(taken),
                    None => {
                        drop(state);
                        let grown = pool.inner.grow(class);
                        state = pool.inner.state.lock();
                        grown
                            .inspect_err(|error| refusal = Some(error.to_string()))
                            .ok()
                    }
                },
            };

            let (Some(class), Some(carved)) = (class, taken) else {
                let error = OutOfMemory {
                    refusal,
                    ..pool.inner.out_of_memory(bytes, &state.stats, None)
                };
                // The buffers go back to the pool, which takes its lock.
                drop(state);
                return Err(error);
            };

            self.counted -= class as u64;
            buffers.push(pool.buffer(carved, class, bytes));
        }
        drop(state);
        Ok(buffers)
    }

    /// Moves the bytes of a buffer of `bytes` bytes from this reservation to a new one. If fewer
    /// bytes are left, moves these.
    #[must_use]
    pub fn split_off(&mut self, bytes: usize) -> Self {
        let class = size_class(bytes).map_or(self.counted, |class| self.counted.min(class as u64));
        self.counted -= class;
        self.bytes = self.bytes.saturating_sub(bytes);
        Self {
            pool: self.pool.clone(),
            bytes,
            counted: class,
            held: self.held,
        }
    }

    /// Counts the reserved bytes as live from now on, for a value whose memory is outside the pool.
    #[must_use]
    pub fn hold(mut self) -> Self {
        if !self.held {
            self.pool
                .inner
                .settled(self.counted)
                .stats
                .make_live(self.counted as usize);
            self.held = true;
        }
        self
    }

    /// Counts the reserved bytes as live until the returned buffer and its clones are dropped. The
    /// buffer shares the memory of `values`.
    pub fn hold_for(self, values: SharedBuffer) -> SharedBuffer {
        SharedBuffer {
            counted: Some(Arc::new(self.hold())),
            ..values
        }
    }

    /// Counts the bytes as reserved again, instead of as live.
    pub(super) fn unhold(mut self) -> Self {
        if std::mem::take(&mut self.held) {
            let stats = &mut self.pool.inner.state.lock().stats;
            stats.live -= self.counted;
            stats.reserved += self.counted;
        }
        self
    }

    /// Returns the number of bytes that were requested, before rounding to size classes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.counted > 0 {
            let stats = &mut self.pool.inner.state.lock().stats;
            if self.held {
                stats.live -= self.counted;
            } else {
                stats.reserved -= self.counted;
            }
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("name", &self.inner.name)
            .field("stats", &self.stats())
            .finish()
    }
}

/// A range of a segment, of `capacity` bytes, that no other block overlaps.
struct Carved {
    start: NonNull<u8>,
    capacity: usize,
    segment: Arc<Segment>,
}

// SAFETY: a carved range is used by one owner at a time, and nothing in it belongs to a thread.
unsafe impl Send for Carved {}
// SAFETY: shared access only reads the bytes; writing needs exclusive access
// (`PoolBlock::bytes_mut`).
unsafe impl Sync for Carved {}

impl Carved {
    /// Checks that the block is host memory.
    ///
    /// # Panics
    ///
    /// If it is device memory.
    fn check_host(&self) {
        assert!(
            self.segment.device().is_none(),
            "device memory cannot be accessed as host memory"
        );
    }
}

/// A carved range that is in use. Dropping it returns the range to its pool.
pub(super) struct PoolBlock {
    /// The range; `None` only while this is dropped.
    carved: Option<Carved>,
    /// The size class, in bytes, that the pool counts for the block. The range can be larger.
    class: usize,
    pool: Pool,
    /// True if the range must not return to the pool, because another process may still read it.
    is_retired: AtomicBool,
}

impl PoolBlock {
    /// Keeps the range from returning to its pool. Its memory returns to the system with its
    /// segment.
    pub(super) fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Relaxed)
    }

    pub(super) fn capacity(&self) -> usize {
        self.carved().capacity
    }

    pub(super) fn bytes(&self) -> &[u8] {
        let carved = self.carved();
        carved.check_host();
        // SAFETY: the range lies in a live mapping, kept by `segment`. The mapping was zero-filled
        // when created, so every byte is initialised. This block is its only owner, and writing
        // needs `&mut self`.
        unsafe { std::slice::from_raw_parts(carved.start.as_ptr(), carved.capacity) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let carved = self.carved();
        carved.check_host();
        // SAFETY: as in `bytes`, and `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(carved.start.as_ptr(), carved.capacity) }
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.carved().segment.is_pinned()
    }

    /// Binds this thread to the block's device; does nothing for host memory. See
    /// `DeviceMemory::bind`.
    pub(super) fn bind(&self) -> io::Result<()> {
        self.carved()
            .segment
            .device()
            .map_or(Ok(()), |memory| memory.bind())
    }

    /// Returns the block's address range in device memory, or `None` if it is host memory.
    pub(super) fn device(&self) -> Option<DevicePlace> {
        let Carved {
            start,
            segment,
            capacity,
        } = self.carved();
        let device = segment.device()?.device();
        Some(DevicePlace {
            device,
            address: start.addr().get() as u64,
            bytes: *capacity,
        })
    }

    pub(super) fn place(&self) -> SegmentPosition {
        let Carved { start, segment, .. } = self.carved();
        let offset = start.addr().get() - segment.start().addr().get();
        SegmentPosition {
            segment: segment.clone(),
            offset,
        }
    }

    fn carved(&self) -> &Carved {
        self.carved
            .as_ref()
            .expect("a block has its range until it is dropped")
    }
}

impl Drop for PoolBlock {
    fn drop(&mut self) {
        let Some(carved) = self.carved.take() else {
            return;
        };
        let mut state = self.pool.inner.state.lock();
        state.stats.live -= self.class as u64;
        if self.is_retired() {
            drop(state);
            return drop(carved);
        }
        state.stats.cached += carved.capacity as u64;
        state.free.entry(carved.capacity).or_default().push(carved);
    }
}

impl FromIterator<usize> for BufferSizes {
    fn from_iter<I: IntoIterator<Item = usize>>(sizes: I) -> Self {
        let sum = |Self { bytes, class }: Self, size| {
            let class = class
                .zip(size_class(size))
                .and_then(|(sum, class)| sum.checked_add(class as u64));
            Self {
                bytes: bytes.saturating_add(size),
                class,
            }
        };
        sizes.into_iter().fold(
            Self {
                bytes: 0,
                class: Some(0),
            },
            sum,
        )
    }
}

/// Returns the size class in bytes of an allocation of `bytes` bytes: a multiple of the alignment.
/// Above 256 bytes at most a quarter of it is unused. `None` if it would exceed [`MOST`].
fn size_class(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(ALIGNMENT);
    let step = (bytes.checked_next_power_of_two()? / 8).max(ALIGNMENT);
    bytes
        .div_ceil(step)
        .checked_mul(step)
        .filter(|class| *class as u64 <= MOST)
}

#[cfg(test)]
mod tests;
