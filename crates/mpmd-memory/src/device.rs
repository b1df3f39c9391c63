//! Device memory, which the processors of this machine cannot reach.
//!
//! Processes of one host can still share it. Its owner exports it as a short byte string
//! ([`DeviceMemory::export`]), by which another process opens it ([`DeviceSharing::open`]). Only
//! the two implementations understand these bytes; the transport just carries them.

use std::any::Any;
use std::io;
use std::sync::OnceLock;

use super::{Fence, Latch};

/// Largest length of a description of device memory, in bytes.
pub const MOST_WORDS: usize = 96;

/// A source of segments in a device's memory.
pub trait DeviceAllocator: Send + Sync {
    /// Allocates `bytes` bytes (more than 0), aligned to at least 256 bytes. Their content is
    /// undefined.
    ///
    /// # Errors
    ///
    /// If the device has no more memory.
    fn allocate(&self, bytes: usize) -> io::Result<Box<dyn DeviceMemory>>;
}

/// Memory of a device. Dropping it frees it.
///
/// It must be dropped only when no work of the device uses it any more and no other process has it
/// open.
pub trait DeviceMemory: Any + Send + Sync {
    /// Returns the address of the memory's first byte on the device. Never 0.
    fn address(&self) -> u64;

    /// Returns the memory's length in bytes.
    fn bytes(&self) -> usize;

    /// Returns the index of the memory's device among this process's devices. The allocator numbers
    /// them.
    fn device(&self) -> u32;

    /// Makes the memory's device the current one of the calling thread, for libraries that expect
    /// this.
    ///
    /// # Errors
    ///
    /// If the device cannot be used any more.
    fn bind(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the description by which other processes of this host open the memory. It has at
    /// most [`MOST_WORDS`] bytes and is the same at every call. `None` if other processes cannot
    /// open the memory.
    fn export(&self) -> Option<&[u8]> {
        None
    }

    /// Returns true if the memory is physically in another device than [`device`](Self::device),
    /// which accesses it remotely. Copying such bytes is better than using them in place.
    fn is_far(&self) -> bool {
        false
    }
}

/// Opens memory of other processes' devices, and creates samples of this process's own for them.
pub trait DeviceSharing: Send + Sync {
    /// Returns the descriptions of sample memory, each at most [`MOST_WORDS`] bytes. Peers try to
    /// open them before memory is lent. The sample memory lives as long as this object.
    ///
    /// # Errors
    ///
    /// If this process's devices cannot share memory.
    fn samples(&self) -> io::Result<Vec<Vec<u8>>>;

    /// Returns true if the user has turned sharing off. The lack of sharing is then no reason for a
    /// warning.
    fn is_turned_off(&self) -> bool {
        false
    }

    /// Tries to open a peer's sample memory, given its description.
    ///
    /// # Errors
    ///
    /// If this process could not open memory that the peer lends.
    fn try_sample(&self, sample: &[u8]) -> io::Result<()>;

    /// Opens a peer's memory of `bytes` bytes by its [description](DeviceMemory::export), `words`.
    /// Dropping the result closes it. [`export`](DeviceMemory::export) is never called on the
    /// result.
    ///
    /// # Errors
    ///
    /// If the description is not valid on this host, or no longer valid.
    fn open(&self, words: &[u8], bytes: usize) -> io::Result<Box<dyn DeviceMemory>>;
}

/// The fence of device memory that a peer lends before it knows if the memory is valid. Devices
/// need not wait for it, because the peer's work on the memory has ended. The peer reports the
/// result once.
#[derive(Default)]
pub struct Landing {
    /// The result that the peer has reported: `Some(Some(failure))`, or `Some(None)` for valid
    /// memory.
    ended: OnceLock<Option<String>>,
    over: Latch,
}

impl Landing {
    /// Ends the fence with the peer's failure, or with `None` if the memory is valid. Also called
    /// if the peer is gone and will never report. Only the first call counts.
    pub fn pass(&self, failure: Option<String>) {
        let _ = self.ended.set(failure);
        self.over.pass().into_iter().for_each(|then| then());
    }
}

impl Fence for Landing {
    fn is_over(&self) -> bool {
        self.over.is_passed()
    }

    fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.over.on_pass(then);
    }

    fn failure(&self) -> Option<String> {
        self.ended.get()?.clone()
    }
}

/// A range of memory of one of this process's devices.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DevicePlace {
    /// Index of the device, as [`DeviceMemory::device`] returns it.
    pub device: u32,
    /// The address of the first byte on the device.
    pub address: u64,
    /// The range's length in bytes.
    pub bytes: usize,
}
