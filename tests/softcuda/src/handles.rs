//! Tables of what C programs know by opaque handles. A handle is a number that no memory lies at,
//! and is never given out twice, so that one that was destroyed is known as such.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::error::{Code, Result};

/// What C calls `CUstream`, `CUevent` and so on: pointers there, never followed here.
pub(crate) type Handle = u64;

/// The objects of one kind, by handle.
pub(crate) struct Handles<T> {
    kind: u64,
    next: AtomicU64,
    live: RwLock<Option<HashMap<Handle, Arc<T>>>>,
}

impl<T> Handles<T> {
    /// An empty table; `kind` tells its handles from those of other tables.
    pub(crate) const fn new(kind: u64) -> Self {
        Handles { kind, next: AtomicU64::new(1), live: RwLock::new(None) }
    }

    /// Makes an object that knows its own handle.
    pub(crate) fn insert(&self, make: impl FnOnce(Handle) -> T) -> Arc<T> {
        // Above what 47 bits of address reach, and no small number: streams 1 and 2 have a meaning
        // in CUDA.
        let handle =
            0x5C_0000_0000_0000 | self.kind << 40 | self.next.fetch_add(1, Ordering::Relaxed) << 4;
        let made = Arc::new(make(handle));
        self.live.write().get_or_insert_default().insert(handle, made.clone());
        made
    }

    /// The object of a handle.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_HANDLE` where there is none, or none any more.
    pub(crate) fn get(&self, handle: Handle) -> Result<Arc<T>> {
        self.live
            .read()
            .as_ref()
            .and_then(|live| live.get(&handle).cloned())
            .ok_or(Code::INVALID_HANDLE)
    }

    /// Takes an object out; who still holds it keeps it alive.
    pub(crate) fn remove(&self, handle: Handle) -> Result<Arc<T>> {
        self.live.write().as_mut().and_then(|live| live.remove(&handle)).ok_or(Code::INVALID_HANDLE)
    }

    /// Takes out all objects that belong to something that ends.
    pub(crate) fn remove_all(&self, belongs: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut live = self.live.write();
        let Some(live) = live.as_mut() else { return Vec::new() };
        live.extract_if(|_, object| belongs(object)).map(|(_, object)| object).collect()
    }
}
