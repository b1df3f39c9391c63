//! The versions of a model's weights, while a trainer publishes new ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mpmd_base::block::Mutex;

/// The versions of the weights of an inference. Clones share the state.
///
/// Version 0 are the weights of the folder. A later version is the number that its trainer gave
/// it.
#[derive(Clone, Debug, Default)]
pub struct Versions(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    newest: AtomicU64,
    has_room: AtomicBool,
    is_loading: AtomicBool,
    failure: Mutex<Option<String>>,
}

impl Versions {
    /// Returns the newest version that is whole on every process. 0 before the first one. Does not
    /// block.
    pub fn newest(&self) -> u64 {
        self.0.newest.load(Ordering::Acquire)
    }

    /// Says that every process has a further version.
    pub fn arrive(&self, version: u64) {
        self.0.newest.store(version, Ordering::Release);
    }

    /// Says if there is room for a further version: no other one than the newest is in use.
    pub fn set_room(&self, has_room: bool) {
        self.0.has_room.store(has_room, Ordering::Release);
    }

    /// True if weights of a folder are being read.
    pub fn is_loading(&self) -> bool {
        self.0.is_loading.load(Ordering::Acquire)
    }

    /// Returns the reason why the last version was not taken, until a later one is.
    pub fn failure(&self) -> Option<String> {
        self.0.failure.lock().clone()
    }

    /// True if there is room for a further version.
    pub fn has_room(&self) -> bool {
        self.0.has_room.load(Ordering::Acquire)
    }
}
