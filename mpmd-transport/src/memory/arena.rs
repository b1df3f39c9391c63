//! Arenas: where the segments of a process come from, and who else may see them.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::segment::{Segment, check_file_limit};
use super::{DeviceAllocator, DeviceMemory};

/// A process that may not have files so long does not share memory: most programs would find no
/// room in it.
const LEAST_FILE: u64 = 1 << 30;

/// What segments are made of, for all pools of a process. Clones are the same arena.
///
/// Of a *shared* arena other processes can map segments, for reading, where they are given them.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    kind: Kind,
    next: AtomicU32,
    /// Numbers of segments that are no more, until their readers are told.
    retired: Mutex<Vec<Retired>>,
    reclaim: Arc<OnceLock<Reclaim>>,
    /// How many segments of devices are no more, and still have their memory: others may have it
    /// open.
    leaving: Arc<AtomicUsize>,
    pin: OnceLock<Pin>,
}

/// What segments are.
enum Kind {
    Private,
    /// Files in memory.
    Shared,
    Device(Arc<dyn DeviceAllocator>),
}

/// A segment that is no more, of which others may still have to be told.
pub(crate) struct Retired {
    pub(crate) number: u32,
    /// What it was made of, where that is a device's: others may have it open.
    pub(crate) memory: Option<Leaving>,
}

/// Memory of a device's segment that is no more. It is freed with this.
pub(crate) struct Leaving {
    /// `None` once it is freed.
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

/// Keeps the pages of a new mapping, by its address and length, in their place for devices, until
/// what it returns is dropped; `None` where they are not to be, or cannot.
pub type Pin = Box<dyn Fn(usize, usize) -> Option<Box<dyn Any + Send + Sync>> + Send + Sync>;

impl Arena {
    /// An arena for this process alone.
    pub fn private() -> Self {
        Self::new(Kind::Private)
    }

    /// An arena in the memory of a device.
    pub fn device(allocator: Arc<dyn DeviceAllocator>) -> Self {
        Self::new(Kind::Device(allocator))
    }

    /// An arena in the memory of a device, from which blocks may be lent beside those of this one:
    /// where they are short, what others are done with comes back as it does here.
    pub fn device_beside(&self, allocator: Arc<dyn DeviceAllocator>) -> Self {
        let (next, retired, pin) = Default::default();
        let Inner { reclaim, leaving, .. } = &*self.inner;
        let (kind, reclaim, leaving) = (Kind::Device(allocator), reclaim.clone(), leaving.clone());
        Self { inner: Arc::new(Inner { kind, next, retired, reclaim, leaving, pin }) }
    }

    /// An arena whose segments other processes can map.
    ///
    /// # Errors
    ///
    /// Where the system has no such memory: tried here, with a small segment.
    pub fn shared() -> io::Result<Self> {
        check_file_limit(LEAST_FILE)?;
        Segment::shared(4096)?;
        Ok(Self::new(Kind::Shared))
    }

    fn new(kind: Kind) -> Self {
        let (next, retired, reclaim, leaving, pin) = Default::default();
        Self { inner: Arc::new(Inner { kind, next, retired, reclaim, leaving, pin }) }
    }

    /// Maps a new segment of `bytes`.
    pub(super) fn map(&self, bytes: usize) -> io::Result<Arc<Segment>> {
        let segment = match &self.inner.kind {
            Kind::Private => Segment::private(bytes),
            Kind::Shared => Segment::shared(bytes),
            Kind::Device(allocator) => {
                return Segment::of_device(allocator.allocate(bytes)?).map(Arc::new);
            }
        }?;
        if let Some(pin) = self.inner.pin.get()
            && let Some(pinned) = pin(segment.start().addr().get(), bytes)
        {
            segment.keep_pin(pinned);
        }
        Ok(Arc::new(segment))
    }

    /// Sets what keeps the pages of segments in their place for devices: those mapped from now on.
    /// The first counts.
    pub fn on_map(&self, pin: Pin) {
        let _ = self.inner.pin.set(pin);
    }

    /// A number that no segment has had that this process gives to others.
    pub(super) fn next_number(&self) -> u32 {
        self.inner.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn downgrade(&self) -> Weak<Inner> {
        Arc::downgrade(&self.inner)
    }

    /// Sets what is called where a pool has no block left, before it asks the system for more: it
    /// may bring blocks back that were lent. Called on any thread, with any locks held but the
    /// pools'; the first counts.
    pub(crate) fn on_shortage(&self, reclaim: impl Fn() + Send + Sync + 'static) {
        // A second transport over one arena has nothing lent yet.
        let _ = self.inner.reclaim.set(Box::new(reclaim));
    }

    /// Has blocks that others are done with brought back.
    pub(super) fn reclaim(&self) {
        if let Some(reclaim) = self.inner.reclaim.get() {
            reclaim();
        }
    }

    /// Whether memory of devices is about to be freed, as soon as others have closed it.
    pub(super) fn has_leaving(&self) -> bool {
        self.inner.leaving.load(Ordering::Acquire) > 0
    }

    /// Segments that are no more, each told once.
    pub(crate) fn take_retired(&self) -> Vec<Retired> {
        std::mem::take(&mut self.inner.retired.lock())
    }
}

impl Inner {
    /// A segment is no more, nor is its memory, where it was a device's, once nobody has it open.
    pub(super) fn retire(&self, number: u32, memory: Option<Box<dyn DeviceMemory>>) {
        let memory = memory.map(|memory| {
            self.leaving.fetch_add(1, Ordering::Relaxed);
            Leaving { memory: Some(memory), count: self.leaving.clone() }
        });
        self.retired.lock().push(Retired { number, memory });
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nobody is left who could hear that others have closed it. The process is about to end,
        // which frees it.
        self.retired.get_mut().drain(..).for_each(|segment| std::mem::forget(segment.memory));
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.inner.kind {
            Kind::Private => "private",
            Kind::Shared => "shared",
            Kind::Device(_) => "device",
        };
        f.debug_struct("Arena").field("kind", &kind).finish_non_exhaustive()
    }
}
