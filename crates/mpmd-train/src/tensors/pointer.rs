//! Pointers of Git LFS: the small files that a clone has in place of large ones until they are
//! fetched.

use std::io::{Error, ErrorKind, Result};
use std::path::Path;

/// The first bytes of every pointer of Git LFS.
const START: &[u8] = b"version https://git-lfs.github.com/spec/";
/// Limit on the size of a pointer in bytes, from the specification of Git LFS.
const LARGEST: u64 = 1024;

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
///
/// If the file cannot be opened, is no regular file, or is larger. If it is a pointer of Git LFS,
/// the error has the kind [`ErrorKind::InvalidData`].
pub fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>> {
    let bytes = mpmd_core::read_regular(path, most)?;
    if bytes.starts_with(START) && bytes.len() as u64 <= LARGEST {
        let why = "a pointer of Git LFS in place of the file: fetch it with `git lfs pull`";
        return Err(Error::new(ErrorKind::InvalidData, why));
    }
    Ok(bytes)
}

/// Returns an error if a file of `bytes` bytes is a pointer of Git LFS.
///
/// # Errors
///
/// Returns the errors of [`read_regular`].
pub fn refuse_pointer(path: &Path, bytes: u64) -> Result<()> {
    if bytes <= LARGEST {
        read_regular(path, LARGEST)?;
    }
    Ok(())
}
