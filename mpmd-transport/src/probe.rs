//! Tests which system calls between processes this machine allows, by trying them.

use std::io;

/// Reads `into.len()` bytes at `address` in the memory of process `pid`. Returns the number of
/// bytes read.
///
/// Transports that copy straight from process to process do the same (cross-memory attach). The
/// kernel allows it to a process that may trace `pid`: one of the same user, in the same user
/// namespace or a parent of it. Yama and seccomp may forbid it nevertheless.
///
/// # Errors
///
/// The kernel's error: `EPERM` if the read is not allowed, `ENOSYS` if the kernel lacks the call or
/// seccomp blocks it. `ESRCH` means that there is no such process, `EFAULT` that it has no such
/// memory.
pub fn read_memory_of(pid: u32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    let address =
        usize::try_from(address).map_err(|_| io::Error::from_raw_os_error(libc::EFAULT))?;
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote =
        libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: into.len() };
    // SAFETY: the kernel writes at most `iov_len` bytes to `local`, which is all of `into`,
    // borrowed here alone. It never trusts `remote`: an address that the other process does not
    // have is an error. Both vectors have the one entry that is announced.
    let read = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    // Negative if the call failed.
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_read_and_bad_addresses_fail() {
        let bytes = *b"bytes to read back";
        let mut read = [0; 18];
        // A process may always trace itself; a sandbox may still have taken the call away.
        match read_memory_of(
            std::process::id(),
            bytes.as_ptr().expose_provenance() as u64,
            &mut read,
        ) {
            Ok(count) => assert_eq!((count, read), (18, bytes)),
            Err(error) => {
                assert!(matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)), "{error}")
            }
        }
        for (pid, address) in [(std::process::id(), 8), (u32::MAX, 8), (0x7fff_fffe, 8)] {
            assert!(read_memory_of(pid, address, &mut read).is_err());
        }
    }
}
