//! Arenas: where the segments of a process come from, and who else may see them.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::segment::{Segment, check_file_limit};

/// A process that may not have files so long does not share memory: most programs would find no room in it.
const LEAST_FILE: u64 = 1 << 30;

/// What segments are made of, for all pools of a process. Clones are the same arena.
///
/// Of a *shared* arena other processes can map segments, for reading, where they are given them.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    shared: bool,
    next: AtomicU32,
    /// Numbers of segments that are no more, until their readers are told.
    retired: Mutex<Vec<u32>>,
    reclaim: OnceLock<Reclaim>,
}

type Reclaim = Box<dyn Fn() + Send + Sync>;

impl Arena {
    /// An arena for this process alone.
    pub fn private() -> Self {
        Self::new(false)
    }

    /// An arena whose segments other processes can map.
    ///
    /// # Errors
    ///
    /// Where the system has no such memory: tried here, with a small segment.
    pub fn shared() -> io::Result<Self> {
        check_file_limit(LEAST_FILE)?;
        Segment::shared(4096)?;
        Ok(Self::new(true))
    }

    fn new(shared: bool) -> Self {
        let (next, retired, reclaim) = Default::default();
        Self { inner: Arc::new(Inner { shared, next, retired, reclaim }) }
    }

    /// Maps a new segment of `bytes`.
    pub(super) fn map(&self, bytes: usize) -> io::Result<Arc<Segment>> {
        let map = if self.inner.shared { Segment::shared } else { Segment::private };
        map(bytes).map(Arc::new)
    }

    /// A number that no segment has had that this process gives to others.
    pub(super) fn next_number(&self) -> u32 {
        self.inner.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn downgrade(&self) -> Weak<Inner> {
        Arc::downgrade(&self.inner)
    }

    /// Sets what is called where a pool has no block left, before it asks the system for more: it may bring
    /// blocks back that were lent. Called on any thread, with any locks held but the pools'; the first counts.
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

    /// Numbers of segments that are no more, each told once.
    pub(crate) fn take_retired(&self) -> Vec<u32> {
        std::mem::take(&mut self.inner.retired.lock())
    }
}

impl Inner {
    pub(super) fn retire(&self, number: u32) {
        self.retired.lock().push(number);
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("shared", &self.inner.shared).finish_non_exhaustive()
    }
}
