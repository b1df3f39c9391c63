//! A file in memory that several processes map as one value.

use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};

use crate::error::{Code, Result};

/// A type whose values several processes may share in a mapped file.
///
/// # Safety
///
/// Any bytes are a valid value, and any threads of any processes may use a value at the same time.
pub(crate) unsafe trait Page {}

/// A value of type `P` in a file, mapped into this process for reading and writing. Dropping it
/// unmaps the file.
pub(crate) struct Mapped<P: Page>(NonNull<P>);

// SAFETY: a page may be used by any threads at once, and the mapping lives as long as this.
unsafe impl<P: Page> Send for Mapped<P> {}
// SAFETY: see above.
unsafe impl<P: Page> Sync for Mapped<P> {}

impl<P: Page> Mapped<P> {
    /// Maps the start of a file. The file must be at least as long as a `P`; its length is not
    /// checked. Fails with `CUDA_ERROR_MAP_FAILED`.
    pub(crate) fn of(file: &OwnedFd) -> Result<Self> {
        // SAFETY: new addresses, for a file that is as long as the page.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size_of::<P>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(at.cast()) {
            Some(page) if at != libc::MAP_FAILED => Ok(Self(page)),
            _ => Err(Code::MAP_FAILED),
        }
    }
}

impl<P: Page> Deref for Mapped<P> {
    type Target = P;

    fn deref(&self) -> &P {
        // SAFETY: mapped as long as this is, and any bytes are valid for it.
        unsafe { self.0.as_ref() }
    }
}

impl<P: Page> Drop for Mapped<P> {
    fn drop(&mut self) {
        // SAFETY: mapped by `of` with this length, and not used any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<P>()) };
    }
}
