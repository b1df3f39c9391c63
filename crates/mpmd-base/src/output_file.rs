//! Output files that a user names. They get their new content in one step.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Seek as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Opens the file at `path` for writing, with the new content that `begin` writes.
///
/// Follows links. If `path` names a regular file or nothing, `begin` writes to a new file beside
/// it, which then takes its place by a rename: readers never see a part, and a process that has
/// the old file open does not write to the new one. Anything else is written in place, after its
/// present content: see [`open_in_place`].
///
/// # Errors
///
/// If a file cannot be opened, has no room for one byte, or `begin` fails. A regular file at
/// `path` is then unchanged.
pub fn open_output(
    path: &Path,
    begin: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<File> {
    if let Some(mut file) = open_in_place(path)? {
        begin(&mut file)?;
        return Ok(file);
    }
    let old = match fs::metadata(path) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };

    let target = followed(path)?;
    let mut new = target.as_os_str().to_owned();
    new.push(format!(".partial-{:016x}", fastrand::u64(..)));
    let new = Path::new(&new);
    let placed =
        begin_new(new, old, begin).and_then(|file| fs::rename(new, &target).map(|()| file));
    placed.inspect_err(|_| _ = fs::remove_file(new))
}

/// Opens a file for writing if it must not be replaced or cut. Such a file is a pipe, a device, or
/// this process's own output, such as `/dev/stdout`. Returns `None` for another regular file, and
/// if there is no file.
///
/// The file of the own output is the same open file: what is written to either comes after what
/// both have written before.
///
/// # Errors
///
/// If it cannot be opened.
pub fn open_in_place(path: &Path) -> io::Result<Option<File>> {
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found?,
    };
    match own_output(&found) {
        Some(own) => Ok(Some(own)),
        None if found.is_file() => Ok(None),
        None => File::options().append(true).open(path).map(Some),
    }
}

/// Creates the file `new` with the permissions of `old`, and has `begin` write to it.
fn begin_new(
    new: &Path,
    old: Option<Metadata>,
    begin: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<File> {
    let mut file = File::create_new(new)?;
    // A full disk lets files be created.
    file.write_all(b"\n")?;
    file.set_len(0)?;
    file.rewind()?;

    if let Some(old) = old {
        file.set_permissions(old.permissions())?;
    }
    begin(&mut file)?;
    Ok(file)
}

/// Returns this process's standard output or error output, if it goes to `file`.
fn own_output(file: &Metadata) -> Option<File> {
    let own = [
        io::stdout().as_fd().try_clone_to_owned(),
        io::stderr().as_fd().try_clone_to_owned(),
    ];
    let is_it = |own: &File| {
        let own = own.metadata();
        own.is_ok_and(|own| (own.dev(), own.ino()) == (file.dev(), file.ino()))
    };
    own.into_iter().flatten().map(File::from).find(is_it)
}

/// Returns `path` with links followed. The last of them may lead to a file that does not exist.
fn followed(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => match fs::read_link(path) {
            Ok(to) => followed(&path.parent().unwrap_or(Path::new("")).join(to)),
            Err(_) => Ok(path.to_owned()),
        },
        found => found,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            let name = format!("mpmd-output-{:016x}", fastrand::u64(..));
            let folder = std::env::temp_dir().join(name);
            fs::create_dir(&folder).unwrap();
            Self(folder)
        }

        /// Returns the names in the folder, in order.
        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap().flatten();
            let mut names: Vec<String> = entries
                .map(|entry| entry.file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            _ = fs::remove_dir_all(&self.0);
        }
    }

    fn write(path: &Path, text: &str) -> io::Result<File> {
        open_output(path, |file| file.write_all(text.as_bytes()))
    }

    #[test]
    fn links_stay_and_the_files_behind_them_change() {
        let folder = Folder::new();
        let at = |name: &str| folder.0.join(name);
        fs::write(at("file"), "old").unwrap();
        fs::set_permissions(at("file"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink("file", at("link")).unwrap();
        symlink("link", at("link-to-link")).unwrap();
        symlink("missing", at("early")).unwrap();

        let mut old = File::open(at("file")).unwrap();
        write(&at("link-to-link"), "new").unwrap();
        write(&at("early"), "first").unwrap();
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "new");
        assert_eq!(fs::read_to_string(at("missing")).unwrap(), "first");
        assert_eq!(at("file").metadata().unwrap().mode() & 0o777, 0o600);
        assert!(at("link").is_symlink() && at("early").is_symlink());

        let mut text = String::new();
        old.read_to_string(&mut text).unwrap();
        assert_eq!(text, "old", "a reader of the old file");
        assert_eq!(
            folder.names(),
            ["early", "file", "link", "link-to-link", "missing"]
        );
    }

    #[test]
    fn devices_and_pipes_are_written_in_place() {
        let folder = Folder::new();
        let link = folder.0.join("null");
        symlink("/dev/null", &link).unwrap();
        write(&link, "text").unwrap();
        assert!(link.is_symlink(), "the link to a device stays");

        let (mut reader, writer) = io::pipe().unwrap();
        let path = folder.0.join("pipe");
        let number = std::os::fd::AsRawFd::as_raw_fd(&writer);
        symlink(format!("/proc/self/fd/{number}"), &path).unwrap();
        write(&path, "text").unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        assert_eq!(folder.names(), ["null", "pipe"]);
    }

    #[test]
    fn failed_write_leaves_the_old_file_and_no_other() {
        let folder = Folder::new();
        let path = folder.0.join("file");
        fs::write(&path, "old").unwrap();
        open_output(&path, |_| Err(io::Error::other("no more room"))).unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(folder.names(), ["file"]);
        assert!(write(&folder.0, "a folder is no file").is_err());
        assert!(write(&folder.0.join("none/file"), "").is_err());
    }
}
