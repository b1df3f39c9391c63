//! Arenas: the sources of a process's segments, which decide if other processes can map them.

pub(crate) mod segment;

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use mpmd_base::block::Mutex;

use super::{DeviceAllocator, DeviceMemory};
use segment::{Segment, check_file_limit};

/// The smallest file size limit, in bytes, under which a process shares memory. Under a lower
/// limit, most programs would run out of memory.
const LEAST_FILE: u64 = 1 << 30;

/// The source of memory segments for all pools of a process. A clone refers to the same arena.
///
/// Other processes can map the segments of a *shared* arena for reading, once they have received
/// them.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<ArenaInner>,
}

pub(super) struct ArenaInner {
    kind: ArenaKind,
    next: AtomicU32,
    /// Freed segments that the peers have not been told about yet.
    retired: Mutex<Vec<Retired>>,
    reclaim: Arc<OnceLock<Reclaim>>,
    on_segment: OnceLock<OnSegment>,
    /// Number of freed device segments whose memory is not freed yet, because peers may have it
    /// open.
    leaving: Arc<AtomicUsize>,
    pin: OnceLock<Pin>,
}

/// The kind of memory of an arena's segments.
enum ArenaKind {
    /// Memory that only this process can map.
    Private,
    /// Files in memory, which other processes can map too.
    Shared,
    /// Memory of a device, from this allocator.
    Device(Arc<dyn DeviceAllocator>),
}

/// A freed segment. The peers may not have been told about it yet.
pub struct Retired {
    /// The number that the segment had in its arena.
    pub number: u32,
    /// The segment's device memory, which peers may still have open; `None` for host memory.
    pub memory: Option<Leaving>,
}

/// The memory of a freed device segment. Dropping this frees it.
pub struct Leaving {
    /// The device memory; `None` once it is freed.
    memory: Option<Box<dyn DeviceMemory>>,
    count: Arc<AtomicUsize>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        drop(self.memory.take());
        self.count.fetch_sub(1, Ordering::Release);
    }
}

type Reclaim = Box<dyn Fn() + Send + Sync>;
type OnSegment = Box<dyn Fn(&Arc<Segment>) + Send + Sync>;

/// Pins the pages of a new mapping for devices. The arguments are its address and its length in
/// bytes. The pages stay pinned until the result is dropped. Returns `None` if the pages should not
/// or cannot be pinned.
pub type Pin = Box<dyn Fn(usize, usize) -> Option<Box<dyn Any + Send + Sync>> + Send + Sync>;

impl Arena {
    /// Creates an arena of host memory that other processes cannot map.
    pub fn private() -> Self {
        Self::new(ArenaKind::Private)
    }

    /// Creates an arena of device memory that `allocator` allocates.
    pub fn device(allocator: Arc<dyn DeviceAllocator>) -> Self {
        Self::new(ArenaKind::Device(allocator))
    }

    /// Creates an arena in the memory of a device, for use beside this arena. When either arena is
    /// short of memory, the same function reclaims the blocks that peers no longer use.
    pub fn device_beside(&self, allocator: Arc<dyn DeviceAllocator>) -> Self {
        let kind = ArenaKind::Device(allocator);
        let reclaim = self.inner.reclaim.clone();
        let leaving = self.inner.leaving.clone();
        Self {
            inner: Arc::new(ArenaInner::new(kind, reclaim, leaving)),
        }
    }

    /// Creates an arena of host memory that other processes can map.
    ///
    /// # Errors
    ///
    /// If the system does not support such memory, which this tests with a small segment.
    pub fn shared() -> io::Result<Self> {
        check_file_limit(LEAST_FILE)?;
        Segment::shared(4096)?;
        Ok(Self::new(ArenaKind::Shared))
    }

    fn new(kind: ArenaKind) -> Self {
        Self {
            inner: Arc::new(ArenaInner::new(kind, Arc::default(), Arc::default())),
        }
    }

    /// Maps a new segment of `bytes` bytes of the arena's kind of memory. Pins host memory if
    /// [`Arena::on_map`] was called.
    pub(super) fn map(&self, bytes: usize) -> io::Result<Arc<Segment>> {
        let segment = match &self.inner.kind {
            ArenaKind::Private => Segment::private(bytes),
            ArenaKind::Shared => Segment::shared(bytes),
            ArenaKind::Device(allocator) => {
                return Segment::of_device(allocator.allocate(bytes)?).map(Arc::new);
            }
        }?;

        if let Some(pin) = self.inner.pin.get()
            && let Some(pinned) = pin(segment.start().addr().get(), bytes)
        {
            segment.keep_pin(pinned);
        }

        let segment = Arc::new(segment);
        if let (ArenaKind::Shared, Some(told)) = (&self.inner.kind, self.inner.on_segment.get()) {
            told(&segment);
        }
        Ok(segment)
    }

    /// Sets the function that pins the pages of segments for devices. It is called for segments
    /// that are mapped later. Only the first call counts.
    pub fn on_map(&self, pin: Pin) {
        let _ = self.inner.pin.set(pin);
    }

    /// Returns true if the segments are memory of a device.
    pub(super) fn is_device(&self) -> bool {
        matches!(self.inner.kind, ArenaKind::Device(_))
    }

    /// Returns true if `other` is this arena.
    pub(super) fn is(&self, other: &Weak<ArenaInner>) -> bool {
        std::ptr::eq(other.as_ptr(), Arc::as_ptr(&self.inner))
    }

    /// Returns a new segment number, by which peers tell this process's segments apart.
    pub(super) fn next_number(&self) -> u32 {
        self.inner.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn downgrade(&self) -> Weak<ArenaInner> {
        Arc::downgrade(&self.inner)
    }

    /// Sets the function that a pool calls before it asks the system for more memory. The function
    /// may reclaim lent blocks. It may run on any thread, also on one that holds locks other than a
    /// pool's. Only the first call counts.
    pub fn on_shortage(&self, reclaim: impl Fn() + Send + Sync + 'static) {
        // A second transport over one arena has nothing lent yet.
        let _ = self.inner.reclaim.set(Box::new(reclaim));
    }

    /// Sets the function that is called with each new segment that other processes can map, before
    /// its first block is used. It may run on any thread, also on one that holds locks other than a
    /// pool's. Only the first call counts.
    pub fn on_segment(&self, told: impl Fn(&Arc<Segment>) + Send + Sync + 'static) {
        let _ = self.inner.on_segment.set(Box::new(told));
    }

    /// Calls the function of [`Arena::on_shortage`], if one is set. The function reclaims blocks
    /// that peers no longer use.
    pub(super) fn reclaim(&self) {
        if let Some(reclaim) = self.inner.reclaim.get() {
            reclaim();
        }
    }

    /// Returns true if the memory of a freed device segment is not freed yet, because peers may
    /// have it open.
    pub(super) fn has_leaving(&self) -> bool {
        self.inner.leaving.load(Ordering::Acquire) > 0
    }

    /// Returns and removes the freed segments that peers have not been told about.
    pub fn take_retired(&self) -> Vec<Retired> {
        std::mem::take(&mut self.inner.retired.lock())
    }
}

impl ArenaInner {
    fn new(kind: ArenaKind, reclaim: Arc<OnceLock<Reclaim>>, leaving: Arc<AtomicUsize>) -> Self {
        Self {
            kind,
            next: AtomicU32::new(0),
            retired: Mutex::default(),
            reclaim,
            on_segment: OnceLock::new(),
            leaving,
            pin: OnceLock::new(),
        }
    }

    /// Records that a segment was freed. Device memory is freed only once no peer has it open.
    pub(super) fn retire(&self, number: u32, memory: Option<Box<dyn DeviceMemory>>) {
        let memory = memory.map(|memory| {
            self.leaving.fetch_add(1, Ordering::Relaxed);
            Leaving {
                memory: Some(memory),
                count: self.leaving.clone(),
            }
        });
        self.retired.lock().push(Retired { number, memory });
    }
}

impl Drop for ArenaInner {
    fn drop(&mut self) {
        // No transport is left that could hear that peers have closed it. The process is about to
        // end, which frees it.
        self.retired
            .get_mut()
            .drain(..)
            .for_each(|segment| std::mem::forget(segment.memory));
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.inner.kind {
            ArenaKind::Private => "private",
            ArenaKind::Shared => "shared",
            ArenaKind::Device(_) => "device",
        };
        f.debug_struct("Arena")
            .field("kind", &kind)
            .finish_non_exhaustive()
    }
}
