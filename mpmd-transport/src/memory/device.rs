//! Memory that is not the host's: the processors of this machine cannot reach it.
//!
//! Processes of one host can give it to each other all the same: its owner has words for it
//! ([`DeviceMemory::export`]) by which another process opens it ([`DeviceSharing::open`]). What the
//! words mean is known to who made both; whoever carries them sees bytes.

use std::any::Any;
use std::io;
use std::sync::Arc;

use super::Fence;

/// The most bytes of what is told of memory, or of a fence, of a device's.
pub const MOST_WORDS: usize = 96;

/// Where a device's segments come from.
pub trait DeviceAllocator: Send + Sync {
    /// New memory of `bytes` (more than 0), aligned to 256 bytes at least; what it holds means
    /// nothing.
    ///
    /// # Errors
    ///
    /// Where the device has no more.
    fn allocate(&self, bytes: usize) -> io::Result<Box<dyn DeviceMemory>>;
}

/// Memory of a device; freed when dropped.
///
/// Whoever drops it has seen that no work of the device uses it any more, and that nobody else has
/// it open.
pub trait DeviceMemory: Any + Send + Sync {
    /// The device's own address of its first byte. Never 0.
    fn address(&self) -> u64;

    /// Its length.
    fn bytes(&self) -> usize;

    /// Which of this process's devices has it, by a number that the allocator gave it.
    fn device(&self) -> u32;

    /// Prepares the calling thread for libraries that are given such memory and take the device to
    /// be the thread's own.
    ///
    /// # Errors
    ///
    /// Where the device cannot be used any more.
    fn bind(&self) -> io::Result<()> {
        Ok(())
    }

    /// By what other processes of this host open it: at most [`MOST_WORDS`] bytes, and the same at
    /// every call. `None` where they cannot.
    fn export(&self) -> Option<&[u8]> {
        None
    }

    /// Whether it is in another device than [`device`](Self::device), which reaches it from afar:
    /// to be copied, rather than used where it is.
    fn is_far(&self) -> bool {
        false
    }
}

/// How this process opens memory of others' devices, and shows them its own.
pub trait DeviceSharing: Send + Sync {
    /// What peers try to open before anything is lent, each at most [`MOST_WORDS`] bytes; what they
    /// are of stays for as long as this does.
    ///
    /// # Errors
    ///
    /// Why this process's devices cannot show any, for people.
    fn samples(&self) -> Result<Vec<Vec<u8>>, String>;

    /// Tries a sample of a peer's.
    ///
    /// # Errors
    ///
    /// Why what the peer lends could not be opened here, for people.
    fn try_sample(&self, sample: &[u8]) -> Result<(), String>;

    /// Opens memory by the [words](DeviceMemory::export) of its owner, who says that there are so
    /// many bytes. Closed when what is returned is dropped. Its own
    /// [`export`](DeviceMemory::export) is not asked.
    ///
    /// # Errors
    ///
    /// Where the words mean nothing here, or no longer.
    fn open(&self, words: &[u8], bytes: usize) -> io::Result<Box<dyn DeviceMemory>>;

    /// By what a peer has work of its devices come after `fence`: at most [`MOST_WORDS`] bytes.
    /// They mean that for as long as the fence is held here. `None` where the peer cannot.
    fn tell(&self, fence: &dyn Fence) -> Option<Vec<u8>>;

    /// Fences of a peer's, by what it told of them, as one. Its devices may have passed them
    /// already; that the peer has seen it is said later, once.
    ///
    /// # Errors
    ///
    /// Where the words mean nothing here.
    fn hear(&self, words: &[&[u8]]) -> io::Result<Arc<dyn Arriving>>;
}

/// A fence in the work of another process.
pub trait Arriving: Fence {
    /// The other process has seen that its work is over, or that it failed; or is no more, so that
    /// nobody will.
    fn pass(&self, result: Result<(), String>);

    /// The same object, as what memory carries.
    fn fence(self: Arc<Self>) -> Arc<dyn Fence>;
}

/// Where bytes are on which device of this process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DevicePlace {
    /// The device, by [`DeviceMemory::device`].
    pub device: u32,
    /// The device's own address of the first byte.
    pub address: u64,
    /// How many there are.
    pub bytes: usize,
}
