//! The lock of a folder of checkpoints, so that only one job saves there.
//!
//! It is a lock of the operating system on a file, which ends with its process, however that dies.
//! The file says who holds it. A later epoch of the same job takes the lock over from a process
//! that the job has lost, which may still live.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use mpmd_core::{ProcessId, Program, Result};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::tensors::disk::beside;
use crate::tensors::failed;

/// Name of the locked file.
const NAME: &str = ".lock";
/// Limit on the content of the file that is read, in bytes.
const LARGEST: u64 = 16 << 20;

/// The lock of a folder, until it is dropped.
#[derive(Debug)]
pub(super) struct FolderLock(File);

/// The content of the file.
#[derive(Deserialize, Serialize)]
struct Holder {
    process: u32,
    host: String,
    epoch: u64,
    /// The processes of the job, as from [`members`].
    members: Vec<String>,
}

/// Returns host and process id of each process of the job, on every process. Every process must
/// call it.
pub(crate) fn members(p: &mut Program) -> Result<Vec<String>> {
    let own = || Ok(format!("{}:{}", host(), std::process::id()));
    let all = (0..p.processes() as u32).map(ProcessId);
    all.map(|process| p.broadcast_value(process, String::new(), own)).collect()
}

fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}

impl FolderLock {
    /// Takes the lock of a folder for an epoch of a job with these members.
    ///
    /// # Errors
    ///
    /// If another job holds it, or the file cannot be written.
    pub(super) fn take(folder: &Path, members: &[String], epoch: u64) -> Result<Self> {
        let path = folder.join(NAME);
        let holder =
            Holder { process: std::process::id(), host: host(), epoch, members: members.to_vec() };
        let refused = |why: &dyn std::fmt::Display| failed(&path, why);
        loop {
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
            let mut options = File::options();
            let options = options.read(true).write(true).create(true).truncate(false);
            let file = options.custom_flags(flags).open(&path).map_err(|error| refused(&error))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if !is_named(&file, &path) => continue,
                Err(Errno::WOULDBLOCK) => {}
                // Some file systems have no locks; there the file only says who saves.
                Ok(()) | Err(Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL) => {
                    return holder
                        .write(&file)
                        .map(|()| Self(file))
                        .map_err(|error| refused(&error));
                }
                Err(error) => return Err(refused(&error)),
            }
            let Some(other) = Holder::read(&file) else {
                return Err(refused(&"another job is just taking this folder: save elsewhere"));
            };
            if other.epoch < epoch && other.members.iter().any(|member| members.contains(member)) {
                return holder.take_over(&path).map(Self).map_err(|error| refused(&error));
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

    /// True if this is still the lock of the folder: no later epoch has taken it over.
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
        file.write_all_at(&serde_json::to_vec(self)?, 0)
    }

    /// Puts a locked file in the place of one that a lost process has locked.
    fn take_over(&self, path: &Path) -> std::io::Result<File> {
        let new = beside(path);
        let file = File::options().read(true).write(true).create_new(true).open(&new)?;
        let placed = flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(Into::into)
            .and_then(|()| self.write(&file))
            .and_then(|()| fs::rename(&new, path));
        placed.inspect_err(|_| _ = fs::remove_file(&new))?;
        Ok(file)
    }
}

/// True if `path` names this file.
fn is_named(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(folder: &Path, members: &[&str], epoch: u64) -> Result<FolderLock> {
        let members: Vec<String> = members.iter().map(ToString::to_string).collect();
        FolderLock::take(folder, &members, epoch)
    }

    #[test]
    fn second_job_is_refused_with_process_and_host() {
        let folder = tempfile::tempdir().unwrap();
        let first = take(folder.path(), &["a:1", "b:2"], 1).unwrap();
        for (members, epoch) in [(["a:1", "c:3"], 1), (["c:3", "d:4"], 2)] {
            let said = take(folder.path(), &members, epoch).unwrap_err().to_string();
            let expected = format!("process {} on {} saves", std::process::id(), host());
            assert!(said.contains(&expected), "{said}");
            assert!(said.starts_with(&folder.path().display().to_string()), "{said}");
        }
        assert!(first.is_of(folder.path()));
        drop(first);
        take(folder.path(), &["c:3"], 1).unwrap();
    }

    #[test]
    fn later_epoch_takes_the_lock_over() {
        let folder = tempfile::tempdir().unwrap();
        let lost = take(folder.path(), &["a:1", "b:2"], 1).unwrap();
        let later = take(folder.path(), &["b:2", "c:3"], 2).unwrap();
        assert!(!lost.is_of(folder.path()) && later.is_of(folder.path()));
        assert!(take(folder.path(), &["b:2", "c:3"], 2).is_err());
        drop(lost);
        assert!(take(folder.path(), &["d:4"], 1).is_err(), "the later epoch's lock still holds");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
