//! Files and folders that are on the disk when a function returns. Nothing is written through a
//! link, nor into a file that exists.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use mpmd_base::bytes_text;
use mpmd_core::{ProcessId, Program, Result};
use rustix::fs::statvfs;

use super::failed;
use crate::agree::{agree, on_first};

/// Checks that all processes can write to `folder`, so that a folder without space is found early.
/// Creates the folder if it is missing. Each process creates and removes a file in it, and checks
/// that its disk has space for `bytes`, the total that all processes will write. Every process must
/// call it. Does nothing in a dry run.
///
/// # Errors
///
/// If a process cannot create a file, or the disk has less space. Every process gets the same
/// error.
pub fn check_folder(p: &mut Program, folder: &Path, bytes: u64) -> Result<()> {
    let first = on_first(p, folder.to_owned(), || {
        create_folder(folder)?;
        Ok(folder.to_owned())
    })?;
    let own = match first == folder {
        _ if p.is_dry_run() => Ok(()),
        true => try_folder(folder).and_then(|()| find_room(folder, bytes)),
        false => Err(failed(
            folder,
            &format!(
                "process 0 names another folder, {}: name the same",
                first.display()
            ),
        )),
    };
    agree(p, own)
}

/// A folder that no other job claims. Dropping this value gives it up.
#[derive(Debug)]
pub struct FolderClaim {
    /// The locked folder, on process 0.
    _locked: Option<File>,
}

/// Checks a folder as [`check_folder`] does, and claims it for a model that this job saves there
/// later. Leaves no file in it: process 0 locks the folder itself, where its file system has locks.
///
/// # Errors
///
/// Those of `check_folder`. If another job, or this one, has claimed the folder.
pub fn claim_folder(p: &mut Program, folder: &Path, bytes: u64) -> Result<FolderClaim> {
    check_folder(p, folder, bytes)?;
    let is_first = p.process() == ProcessId(0) && !p.is_dry_run();
    let locked = match is_first {
        true => lock_folder(folder).map(Some),
        false => Ok(None),
    };
    agree(p, locked.as_ref().map(drop).map_err(Clone::clone))?;
    Ok(FolderClaim { _locked: locked? })
}

fn lock_folder(folder: &Path) -> Result<File> {
    let opened = File::open(folder).map_err(|error| failed(folder, &error))?;
    match opened.try_lock() {
        Err(TryLockError::WouldBlock) => Err(failed(
            folder,
            &"another job saves a model there: name another folder, or wait until it has ended",
        )),
        // Some file systems have no locks.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(opened),
    }
}

fn try_folder(folder: &Path) -> Result<()> {
    let file = beside(&folder.join("try"));
    let tried = File::create_new(&file).and_then(|_| fs::remove_file(&file));
    tried.map_err(|error| failed(folder, &format!("no file can be created there: {error}")))
}

/// Checks that the disk of a folder has space for `bytes` bytes. Succeeds if the file system does
/// not report its space.
fn find_room(folder: &Path, bytes: u64) -> Result<()> {
    let Ok(disk) = statvfs(folder) else {
        return Ok(());
    };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    match disk.f_blocks == 0 || free >= bytes {
        true => Ok(()),
        false => Err(failed(
            folder,
            &format!(
                "{} are to be saved there, and its disk has room for {}: make room, or save \
                 elsewhere",
                bytes_text(bytes),
                bytes_text(free)
            ),
        )),
    }
}

/// Replaces the file at `path`, so that readers see the old content or the new content, never a
/// part. Writes a temporary file in the same folder and renames it to `path` after it is on the
/// disk. If `path` is a link or one of several hard links, the linked file keeps its content.
///
/// # Errors
///
/// If the file cannot be written. If that fails before the renaming, `path` is unchanged.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = beside(path);
    let placed = write_new(&partial, bytes)
        .and_then(|()| fs::rename(&partial, path).inspect_err(|_| _ = fs::remove_file(&partial)));
    placed.map_err(|error| failed(path, &error))?;
    sync_folder(parent(path))
}

/// Writes a new file and waits until it is on the disk. Removes the file if that fails.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    written.inspect_err(|_| _ = fs::remove_file(path))
}

/// Removes a file if it exists.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(path, &error)),
        _ => Ok(()),
    }
}

/// Returns a random suffix for the name of a temporary file.
pub(crate) fn partial() -> String {
    format!(".partial-{:016x}", fastrand::u64(..))
}

/// Returns `path` with a random suffix, for a temporary file in the same folder.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(partial());
    name.into()
}

/// Creates a folder and its missing parent folders.
pub(crate) fn create_folder(folder: &Path) -> Result<()> {
    let above = folder
        .ancestors()
        .filter(|folder| !folder.as_os_str().is_empty());
    let missing: Vec<&Path> = above.take_while(|folder| !folder.exists()).collect();
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    missing
        .into_iter()
        .try_for_each(|folder| sync_folder(parent(folder)))
}

/// Blocks until the folder's entries are on the disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| failed(folder, &error))
}

/// Returns the folder that contains `path`.
fn parent(path: &Path) -> &Path {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn replaced_links_leave_their_files_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link, hard] = ["file", "link", "hard"].map(|name| folder.path().join(name));
        fs::write(&file, "of somebody else").unwrap();
        symlink(&file, &link).unwrap();
        fs::hard_link(&file, &hard).unwrap();
        for path in [&link, &hard] {
            replace(path, b"new").unwrap();
            assert_eq!(fs::read(path).unwrap(), b"new");
        }
        assert_eq!(fs::read(&file).unwrap(), b"of somebody else");
        assert!(replace(folder.path(), b"no folder is replaced").is_err());
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            3,
            "no partial file is left"
        );
        let above = folder.path().parent().unwrap();
        let left = fs::read_dir(above)
            .unwrap()
            .flatten()
            .map(|entry| entry.path());
        let name = folder.path().display().to_string();
        let left = left.filter(|path| path.display().to_string().starts_with(&name));
        assert_eq!(left.count(), 1, "nor beside a folder");
    }

    #[test]
    fn too_little_room_is_found_before() {
        let folder = tempfile::tempdir().unwrap();
        find_room(folder.path(), 1).unwrap();
        let said = find_room(folder.path(), 1 << 62).unwrap_err().to_string();
        assert!(
            said.contains(": 4.0 EiB are to be saved there, and its disk has room"),
            "{said}"
        );
        // It tells no size.
        find_room(Path::new("/proc"), 1 << 62).unwrap();
    }

    #[test]
    fn folders_and_their_parents_are_created() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        create_folder(&deep).unwrap();
        create_folder(&deep).unwrap();
        assert!(deep.is_dir());
        assert_eq!(
            (parent(Path::new("x")), parent(Path::new("/a/b"))),
            (Path::new("."), Path::new("/a"))
        );
    }
}
