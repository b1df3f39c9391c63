//! Memory that two processes write: rings and doors live in it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals, fstat};
use rustix::mm::ProtFlags;

use crate::memory::{map, memory_file, take_pages, unmap};

/// Nobody can make it shorter under who reads it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapping that other processes may write at any time: whoever uses it does so by atomics.
pub(super) struct Mapped {
    start: NonNull<u8>,
    bytes: usize,
    descriptor: OwnedFd,
}

// SAFETY: it is an address range that it owns and that it only gives the address of; nothing in it
// belongs to a thread.
unsafe impl Send for Mapped {}
// SAFETY: as above; shared access gives out the address and the length.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// New memory of `bytes` zeroes.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        let descriptor = memory_file("mpmd-rings", bytes)?;
        // Its pages are taken now: later nobody could be told that there are none.
        take_pages(descriptor.as_fd(), bytes)?;
        fcntl_add_seals(&descriptor, SEALS)?;
        Self::map(descriptor, bytes)
    }

    /// What another process has made, which must have exactly these bytes.
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
        // The file has `bytes` bytes, and is sealed so that it keeps them.
        let start = map(bytes, access, Some(descriptor.as_fd()))?;
        Ok(Self { start, bytes, descriptor })
    }

    /// The address of `bytes` bytes at `offset`.
    ///
    /// # Panics
    ///
    /// Where they are not within it.
    pub(super) fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: it was just seen to be within the mapping.
        unsafe { self.start.add(offset) }
    }
}

impl AsFd for Mapped {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` with this length and is unmapped only here; who
        // uses an address in it keeps this alive.
        unsafe { unmap(self.start, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn memory_is_the_same_on_both_sides_and_of_the_size_it_should_have() {
        let here = Mapped::new(4096).unwrap();
        let there = Mapped::of(here.as_fd().try_clone_to_owned().unwrap(), 4096).unwrap();
        // SAFETY: both addresses are within their mappings, and no other thread knows them.
        let read = unsafe {
            here.at(100, 1).as_ptr().write_volatile(7);
            there.at(100, 1).as_ptr().read_volatile()
        };
        assert_eq!(read, 7);
        assert!(Mapped::of(here.as_fd().try_clone_to_owned().unwrap(), 8192).is_err());
        assert!(ftruncate(here.as_fd(), 0).is_err());
        let open = memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 4096).unwrap();
        assert!(Mapped::of(open, 4096).is_err());
    }
}
