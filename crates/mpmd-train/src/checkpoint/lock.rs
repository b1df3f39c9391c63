//! The lock of a folder of checkpoints, so that only one job saves there.
//!
//! It is a lock of the operating system on a file, which ends with its process, however that dies.
//! The file says who holds it. A later epoch of the same job takes the lock over from a process
//! that the job has lost, which may still live.

use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use mpmd_core::Result;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::tensors::disk::beside;
use crate::tensors::failed;

/// Name of the lock file in a folder of checkpoints.
const NAME: &str = ".lock";
/// Limit on the bytes that are read from the lock file.
const LARGEST: u64 = 16 << 20;

/// The lock of a folder of checkpoints. Dropping it releases the lock.
#[derive(Debug)]
pub(super) struct FolderLock(File);

/// The content of the lock file: the process and job that hold the lock.
#[derive(Deserialize, Serialize)]
struct Holder {
    process: u32,
    host: String,
    /// The identity of the job's run, in hexadecimal digits.
    run: String,
    epoch: u64,
}

fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}

impl FolderLock {
    /// Locks a folder for epoch `epoch` of the job's run `run`. Takes the lock over from an earlier
    /// epoch of the same run.
    ///
    /// # Errors
    ///
    /// If another job holds the lock, or the file cannot be written.
    pub(super) fn take(folder: &Path, run: u128, epoch: u64) -> Result<Self> {
        let path = folder.join(NAME);
        let process = std::process::id();
        let run = format!("{run:032x}");
        let holder = Holder {
            process,
            host: host(),
            run,
            epoch,
        };

        let refused = |why: &dyn std::fmt::Display| failed(&path, why);
        loop {
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
            let mut options = File::options();
            let options = options.read(true).write(true).create(true).truncate(false);
            let options = options.custom_flags(flags);
            // The file of another user's job: it is locked all the same, and then replaced.
            let is_foreign = |error: &std::io::Error| error.kind() == ErrorKind::PermissionDenied;
            let (file, is_own) = match options.open(&path) {
                Err(error) if is_foreign(&error) => {
                    let options = options.write(false).create(false);
                    (options.open(&path).map_err(|_| refused(&error))?, false)
                }
                opened => (opened.map_err(|error| refused(&error))?, true),
            };

            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if !is_named(&file, &path) => continue,
                Err(Errno::WOULDBLOCK) => {}
                // Some file systems have no locks; there the file only says who saves.
                Ok(()) if !is_own => {
                    return holder
                        .take_over(&path)
                        .map(Self)
                        .map_err(|error| refused(&error));
                }
                Ok(()) | Err(Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL) => {
                    return holder
                        .write(&file)
                        .map(|()| Self(file))
                        .map_err(|error| refused(&error));
                }
                Err(error) => return Err(refused(&error)),
            }

            let Some(other) = Holder::read(&file) else {
                return Err(refused(
                    &"another job is just taking this folder: save elsewhere",
                ));
            };
            if other.run == holder.run && other.epoch < epoch {
                return holder
                    .take_over(&path)
                    .map(Self)
                    .map_err(|error| refused(&error));
            }

            let Holder { process, host, .. } = other;
            return Err(failed(
                folder,
                &format!(
                    "process {process} on {host} saves the checkpoints of another job there. Save \
                     to another folder, or wait until that process has ended ({} is its lock)",
                    path.display()
                ),
            ));
        }
    }

    /// Returns true if this lock still holds for the folder: no later epoch has taken it over.
    pub(super) fn is_of(&self, folder: &Path) -> bool {
        is_named(&self.0, &folder.join(NAME))
    }
}

impl Holder {
    fn read(file: &File) -> Option<Self> {
        let mut text = Vec::new();
        file.take(LARGEST).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    fn write(&self, file: &File) -> std::io::Result<()> {
        file.set_len(0)?;
        file.write_all_at(&serde_json::to_vec(self)?, 0)?;
        // Other hosts must be able to read it, also after the loss of this one.
        file.sync_all()
    }

    /// Replaces the lock file by a new file that this process has locked. The lock of a lost
    /// process on the old file then has no effect.
    fn take_over(&self, path: &Path) -> std::io::Result<File> {
        let new = beside(path);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&new)?;
        let placed = flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(Into::into)
            .and_then(|()| self.write(&file))
            .and_then(|()| fs::rename(&new, path));
        placed.inspect_err(|_| _ = fs::remove_file(&new))?;
        Ok(file)
    }
}

/// Returns true if `path` still names the open file `file`.
fn is_named(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_job_is_refused_with_process_and_host() {
        let folder = tempfile::tempdir().unwrap();
        let first = FolderLock::take(folder.path(), 7, 1).unwrap();
        for (run, epoch) in [(8, 1), (8, 2)] {
            let said = FolderLock::take(folder.path(), run, epoch)
                .unwrap_err()
                .to_string();
            let expected = format!("process {} on {} saves", std::process::id(), host());
            assert!(said.contains(&expected), "{said}");
            assert!(
                said.starts_with(&folder.path().display().to_string()),
                "{said}"
            );
        }
        assert!(first.is_of(folder.path()));
        drop(first);
        FolderLock::take(folder.path(), 8, 1).unwrap();
    }

    #[test]
    fn later_epoch_takes_the_lock_over() {
        let folder = tempfile::tempdir().unwrap();
        let lost = FolderLock::take(folder.path(), 7, 1).unwrap();
        let later = FolderLock::take(folder.path(), 7, 2).unwrap();
        assert!(!lost.is_of(folder.path()) && later.is_of(folder.path()));
        assert!(
            FolderLock::take(folder.path(), 7, 1).is_err(),
            "an ended epoch gets no lock"
        );
        drop(lost);
        let other = FolderLock::take(folder.path(), 8, 1);
        assert!(other.is_err(), "the later epoch's lock still holds");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
