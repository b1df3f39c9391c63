//! Reading of files that others may have made: only regular ones, and never waiting for a writer.

use std::fs::File;
use std::io::{Error, Read as _, Result};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file for reading.
///
/// # Errors
///
/// If the file cannot be opened, or is a pipe, a device or a folder.
pub fn open_regular(path: &Path) -> Result<File> {
    // Opening a pipe without this flag would wait for its writer.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    // From the open file: the path may name another file by now.
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(Error::other("it is no regular file")),
    }
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
///
/// As for [`open_regular`], and if the file is larger.
pub fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>> {
    let file = open_regular(path)?;
    let large = |bytes| Err(Error::other(format!("it has {bytes} bytes, more than {most}")));
    match file.metadata()?.len() {
        bytes if bytes > most => return large(bytes),
        _ => {}
    }
    let mut bytes = Vec::new();
    // The file may grow meanwhile.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { large(bytes.len() as u64) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_small_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let [file, pipe, zeros] = ["file", "pipe", "zeros"].map(|name| folder.path().join(name));
        std::fs::write(&file, "12345").unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        symlink("/dev/zero", &zeros).unwrap();
        assert_eq!(read_regular(&file, 5).unwrap(), b"12345");
        let said = |path: &Path| read_regular(path, 4).unwrap_err().to_string();
        assert_eq!(said(&file), "it has 5 bytes, more than 4");
        for path in [&pipe, &zeros, folder.path()] {
            assert_eq!(said(path), "it is no regular file", "{}", path.display());
        }
    }
}
