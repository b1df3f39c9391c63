//! Memory that is not the host's: the processors of this machine cannot reach it.

use std::any::Any;
use std::io;

/// Where a device's segments come from.
pub trait DeviceAllocator: Send + Sync {
    /// New memory of `bytes` (more than 0), aligned to 256 bytes at least; what it holds means nothing.
    ///
    /// # Errors
    ///
    /// Where the device has no more.
    fn allocate(&self, bytes: usize) -> io::Result<Box<dyn DeviceMemory>>;
}

/// Memory of a device; freed when dropped.
///
/// Whoever drops it has seen that no work of the device uses it any more.
pub trait DeviceMemory: Any + Send + Sync {
    /// The device's own address of its first byte. Never 0.
    fn address(&self) -> u64;

    /// Its length.
    fn bytes(&self) -> usize;

    /// Which of this process's devices has it, by a number that the allocator gave it.
    fn device(&self) -> u32;

    /// Prepares the calling thread for libraries that are given such memory and take the device to be the thread's own.
    ///
    /// # Errors
    ///
    /// Where the device cannot be used any more.
    fn bind(&self) -> io::Result<()> {
        Ok(())
    }
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
