//! Memory that two processes write: it holds their rings and doorbells.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals, fstat};
use rustix::mm::ProtFlags;

use mpmd_memory::{map, memory_file, take_pages, unmap};

/// Seals of the memory file that keep its length fixed: no process can shorten it under a reader.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Memory that is mapped by several processes, each of which may write it at any time. All access
/// must be by atomic operations.
pub(super) struct SharedMapping {
    start: NonNull<u8>,
    bytes: usize,
    descriptor: OwnedFd,
}

// SAFETY: it is an address range that it owns, and it gives out only the address. Nothing in it
// belongs to a thread.
unsafe impl Send for SharedMapping {}
// SAFETY: as above; shared access gives out the address and the length.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Allocates `bytes` zero bytes of memory that other processes can map.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        let descriptor = memory_file("mpmd-rings", bytes)?;
        // The pages are allocated now: a later failure could not be reported.
        take_pages(descriptor.as_fd(), bytes)?;
        fcntl_add_seals(&descriptor, SEALS)?;
        Self::map(descriptor, bytes)
    }

    /// Maps memory that another process has created, which must have exactly `bytes` bytes.
    pub(super) fn of(descriptor: OwnedFd, bytes: usize) -> io::Result<Self> {
        let found = fstat(&descriptor)?.st_size;
        if u64::try_from(found).ok() != Some(bytes as u64) {
            return Err(io::Error::other(format!(
                "memory for rings has {found} bytes instead of {bytes}"
            )));
        }

        if !fcntl_get_seals(&descriptor)?.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(io::Error::other("memory for rings is not sealed"));
        }
        Self::map(descriptor, bytes)
    }

    fn map(descriptor: OwnedFd, bytes: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // The file has `bytes` bytes, and its seal keeps them.
        let start = map(bytes, access, Some(descriptor.as_fd()))?;
        Ok(Self {
            start,
            bytes,
            descriptor,
        })
    }

    /// Returns the address of the `bytes` bytes at `offset` in the mapping.
    ///
    /// # Panics
    ///
    /// If the bytes are not within the mapping.
    pub(super) fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        assert!(
            offset
                .checked_add(bytes)
                .is_some_and(|end| end <= self.bytes)
        );
        // SAFETY: the assertion shows that it is within the mapping.
        unsafe { self.start.add(offset) }
    }
}

impl AsFd for SharedMapping {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` with this length and is unmapped only here. Users
        // of an address in it keep this object alive.
        unsafe { unmap(self.start, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn mapped_memory_is_shared_and_its_length_fixed() {
        let here = SharedMapping::new(4096).unwrap();
        let there = SharedMapping::of(here.as_fd().try_clone_to_owned().unwrap(), 4096).unwrap();
        // SAFETY: both addresses are within their mappings, and no other thread knows them.
        let read = unsafe {
            here.at(100, 1).as_ptr().write_volatile(7);
            there.at(100, 1).as_ptr().read_volatile()
        };
        assert_eq!(read, 7);
        assert!(SharedMapping::of(here.as_fd().try_clone_to_owned().unwrap(), 8192).is_err());
        assert!(ftruncate(here.as_fd(), 0).is_err());
        let open = memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 4096).unwrap();
        assert!(SharedMapping::of(open, 4096).is_err());
    }
}
