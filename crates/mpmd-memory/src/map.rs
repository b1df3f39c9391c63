//! Maps and unmaps memory by the C library's own functions.
//!
//! UCX registers memory with the network card, and drops a registration when the memory is
//! unmapped. UCX learns of that from hooks that it puts into the C library's `mmap` and `munmap`. A
//! direct system call bypasses the hooks. The next mapping at the same address would then be read
//! and written through the old registration. So this crate must not use `mmap` and `munmap` of
//! `rustix`, which make the system call themselves.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::mm::ProtFlags;

/// Maps `bytes` bytes of `file` at an address that the system selects. All processes that map the
/// file share them. Without a file, maps zero bytes that only this process can access.
///
/// Bytes beyond the file's end are mapped too: accessing them kills the process by a signal.
pub fn map(
    bytes: usize,
    access: ProtFlags,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<NonNull<u8>> {
    let (flags, file) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };

    let access = access.bits() as libc::c_int;
    // SAFETY: with a null hint and without MAP_FIXED the system picks a range that nothing else
    // uses, so no existing memory changes.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, file, 0) };

    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap returned null"))
}

/// Unmaps memory that [`map`] has mapped.
///
/// # Safety
///
/// `start` and `bytes` must be those of one mapping. Its memory must not be used any more.
pub unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller answers for the range.
    let result = unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
    debug_assert_eq!(
        result,
        0,
        "a mapping can be unmapped: {}",
        io::Error::last_os_error()
    );
}
