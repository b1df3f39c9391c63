//! Tables of objects that C programs know by opaque handles. A handle is a number at which no
//! memory lies. It is never issued twice, so a destroyed handle is recognized.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::error::{Code, Result};

/// An opaque handle such as `CUstream` or `CUevent`: a pointer in C, never dereferenced here.
pub(crate) type Handle = u64;

/// The live objects of one kind (streams, events, ...), by handle. An object lives at least until
/// it is removed.
pub(crate) struct Handles<T> {
    kind: u64,
    next: AtomicU64,
    live: RwLock<Option<HashMap<Handle, Arc<T>>>>,
}

impl<T> Handles<T> {
    /// Creates an empty table. `kind` is a part of each handle, and must be different for each
    /// table.
    pub(crate) const fn new(kind: u64) -> Self {
        Handles {
            kind,
            next: AtomicU64::new(1),
            live: RwLock::new(None),
        }
    }

    /// Calls `make` with a new handle and adds the object that it returns to the table.
    pub(crate) fn insert(&self, make: impl FnOnce(Handle) -> T) -> Arc<T> {
        // Beyond 47-bit addresses, and not a small number: CUDA gives streams 1 and 2 a meaning.
        let handle =
            0x5C_0000_0000_0000 | self.kind << 40 | self.next.fetch_add(1, Ordering::Relaxed) << 4;
        let made = Arc::new(make(handle));
        self.live
            .write()
            .get_or_insert_default()
            .insert(handle, made.clone());
        made
    }

    /// Returns the object of a handle.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_HANDLE` if the handle was never issued or its object was removed.
    pub(crate) fn get(&self, handle: Handle) -> Result<Arc<T>> {
        self.live
            .read()
            .as_ref()
            .and_then(|live| live.get(&handle).cloned())
            .ok_or(Code::INVALID_HANDLE)
    }

    /// Returns the number of live objects for which `is_one` returns true.
    pub(crate) fn count_of(&self, is_one: impl Fn(&T) -> bool) -> u64 {
        let live = self.live.read();
        let objects = live.iter().flat_map(HashMap::values);
        objects.filter(|object| is_one(object)).count() as u64
    }

    /// Removes the object of a handle and returns it. Other holders keep it alive. Fails with
    /// `CUDA_ERROR_INVALID_HANDLE` if the handle has no object.
    pub(crate) fn remove(&self, handle: Handle) -> Result<Arc<T>> {
        self.live
            .write()
            .as_mut()
            .and_then(|live| live.remove(&handle))
            .ok_or(Code::INVALID_HANDLE)
    }

    /// Removes and returns all objects for which `belongs` returns true.
    pub(crate) fn remove_all(&self, belongs: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut live = self.live.write();
        let Some(live) = live.as_mut() else {
            return Vec::new();
        };
        live.extract_if(|_, object| belongs(object))
            .map(|(_, object)| object)
            .collect()
    }
}
