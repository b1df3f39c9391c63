//! Text to train on: given files and folders, or the files of this repository.
//!
//! All files form one sequence, with a [`SEPARATOR`] after each.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::{fs, io};

use mpmd_core::{Error, Program, Result};
use mpmd_layout::random::Key;

use crate::tensors::read_regular;

/// The byte that follows each file of a text. A file that contains this byte counts as binary.
pub const SEPARATOR: u8 = 0;
/// Size limit for files found in a folder, in bytes. Larger files are skipped.
pub const LARGEST_FILE: u64 = 4 << 20;
/// Names of folders that are skipped, because they hold no text to train on.
const SKIPPED_FOLDERS: [&str; 2] = [".git", "target"];

/// A text in memory. Clones share the bytes.
#[derive(Clone, Debug)]
pub struct TextBytes {
    bytes: Arc<[u8]>,
    files: usize,
}

impl TextBytes {
    /// Reads files and folders, in the order given.
    ///
    /// A folder is read in sorted order. It skips `.git`, `target`, links, pointers of Git LFS,
    /// files that are not UTF-8 text and files above [`LARGEST_FILE`]. A file given by name may
    /// have any size.
    ///
    /// # Errors
    ///
    /// If a path cannot be read, or a file given by name is not text or no regular file: each
    /// process reads it. If a folder has no text.
    pub fn of(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut files = Vec::new();
        for path in paths {
            let path = path.as_ref();
            let unreadable = |error| unreadable(path, error);
            if fs::metadata(path).map_err(unreadable)?.is_dir() {
                let mut found = FolderFiles::default();
                found.walk(path).map_err(unreadable)?;
                files.extend(found.read(path)?);
            } else {
                let bytes = read_regular(path, u64::MAX).map_err(unreadable)?;
                if let Some(why) = why_binary(&bytes) {
                    let why = format!("{} is not text: {why}", path.display());
                    return Err(Error::Environment(why));
                }
                files.push(bytes);
            }
        }
        Self::of_files(&files)
    }

    /// Reads the text of the repository of this crate: the files that `git` tracks or, without git,
    /// all files. Skips files that are not UTF-8 text, and files above [`LARGEST_FILE`].
    ///
    /// # Errors
    ///
    /// If the folder from which this crate was built is gone or cannot be read, or has no text.
    pub fn of_this_repository() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
        let root =
            root.ok_or_else(|| Error::Environment("the workspace has no folder".to_owned()))?;
        let mut found = FolderFiles::default();
        match tracked_files(root) {
            Some(files) => found.files = files,
            None => found.walk(root).map_err(|error| unreadable(root, error))?,
        }
        Self::of_files(&found.read(root)?)
    }

    /// Joins files that are already in memory, with a [`SEPARATOR`] after each.
    ///
    /// # Errors
    ///
    /// If there are no files.
    pub fn of_files(files: &[Vec<u8>]) -> Result<Self> {
        if files.is_empty() {
            return Err(Error::Environment("a text of no files".to_owned()));
        }
        let mut bytes = Vec::with_capacity(files.iter().map(|file| file.len() + 1).sum());
        for file in files {
            bytes.extend_from_slice(file);
            bytes.push(SEPARATOR);
        }
        Ok(Self {
            bytes: bytes.into(),
            files: files.len(),
        })
    }

    /// Returns the bytes of all files, with a [`SEPARATOR`] after each.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the number of files.
    pub fn files(&self) -> usize {
        self.files
    }

    /// Returns a hash of the text, by which processes that read their own files compare them.
    pub fn fingerprint(&self) -> u64 {
        let word = |key: Key, chunk: &[u8]| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            key.fold_in(u64::from_le_bytes(word))
        };
        self.bytes
            .chunks(8)
            .fold(Key(self.bytes.len() as u64), word)
            .0
    }

    /// Checks that all processes have the same text. Does not block. If texts differ, the programs
    /// have diverged, as for [`Program::assert_same`].
    ///
    /// # Errors
    ///
    /// If this call is within a captured step.
    pub fn compare(&self, p: &mut Program) -> Result<()> {
        let bytes = self.bytes.len();
        let files = self.files;
        let hash = self.fingerprint();
        p.assert_same(format!(
            "a text of {bytes} bytes in {files} files, with hash {hash:016x}"
        ))
    }
}

/// Creates the error for a path that cannot be read.
fn unreadable(path: &Path, error: io::Error) -> Error {
    Error::Environment(format!("cannot read {}: {error}", path.display()))
}

/// Runs `git` to list the tracked files under `root`, sorted. Returns `None` without git, without a
/// repository, or if a name is not UTF-8.
fn tracked_files(root: &Path) -> Option<Vec<PathBuf>> {
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["ls-files", "-z"])
        .output()
        .ok()?;
    if !output.status.success() || output.stdout.is_empty() {
        return None;
    }

    let names = String::from_utf8(output.stdout).ok()?;
    // A set, because a file in conflict is listed several times.
    let names: BTreeSet<_> = names.split('\0').filter(|name| !name.is_empty()).collect();
    Some(
        names
            .into_iter()
            .map(|name| root.join(name))
            .filter(|file| is_plain(file))
            .collect(),
    )
}

/// Returns true if `file` is a regular file: no link, submodule or deleted file.
fn is_plain(file: &Path) -> bool {
    fs::symlink_metadata(file).is_ok_and(|kind| kind.is_file())
}

/// The regular files found in a folder.
#[derive(Default)]
struct FolderFiles {
    files: Vec<PathBuf>,
    /// Number of links. They are skipped, since a link may lead back to a parent folder.
    links: usize,
}

impl FolderFiles {
    fn walk(&mut self, folder: &Path) -> io::Result<()> {
        let mut entries = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
        entries.sort_by_key(|entry| entry.file_name());
        for entry in entries {
            // The type of the entry, not of a link's target.
            let kind = entry.file_type()?;
            let skipped = SKIPPED_FOLDERS
                .iter()
                .any(|name| entry.file_name() == *name);
            if kind.is_dir() && !skipped {
                self.walk(&entry.path())?;
            } else if kind.is_file() {
                self.files.push(entry.path());
            }
            self.links += usize::from(kind.is_symlink());
        }
        Ok(())
    }

    /// Reads the files that are text.
    fn read(&self, folder: &Path) -> Result<Vec<Vec<u8>>> {
        let mut texts = Vec::new();
        for file in &self.files {
            let failed = |error| unreadable(file, error);
            if fs::metadata(file).map_err(failed)?.len() > LARGEST_FILE {
                continue;
            }
            match read_regular(file, u64::MAX) {
                Ok(bytes) if why_binary(&bytes).is_none() => texts.push(bytes),
                Ok(_) => {}
                // A pointer of Git LFS.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                Err(error) => return Err(failed(error)),
            }
        }

        if texts.is_empty() {
            let folder = folder.display();
            let files = self.files.len();
            let links = self.links;
            let advice = if links > 0 {
                ": name the files that they lead to"
            } else {
                ""
            };
            return Err(Error::Environment(format!(
                "{folder}: no text: none of its files ({files}) is UTF-8 text of at most \
                 {LARGEST_FILE} bytes, and its links ({links}) are skipped{advice}"
            )));
        }
        Ok(texts)
    }
}

/// Returns the reason why the bytes of a file are no text, or `None` if they are text.
fn why_binary(bytes: &[u8]) -> Option<String> {
    if let Some(at) = bytes.iter().position(|byte| *byte == SEPARATOR) {
        return Some(format!("byte {at} is a NUL, which separates files"));
    }
    let error = std::str::from_utf8(bytes).err()?;
    Some(format!(
        "it is not UTF-8 from byte {} on",
        error.valid_up_to()
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn folders_are_walked_sorted_and_only_text_is_taken() {
        let folder = std::env::temp_dir().join(format!("mpmd-text-{}", std::process::id()));
        let write = |name: &str, content: &[u8]| {
            let file = folder.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        };
        write("b.txt", b"second file, after the folder");
        write("a/z.txt", b"first file, of the folder");
        write("a/latin1", &[b'g', 0xfc, b'n']);
        write("a/nul", b"binary\0file");
        write("target/x.txt", b"built");
        write(".git/config", b"history");
        write("large.txt", &vec![b'x'; LARGEST_FILE as usize + 1]);
        let walked = TextBytes::of(std::slice::from_ref(&folder));
        let named = TextBytes::of(&[folder.join("b.txt"), folder.join("a/z.txt")]);
        let large = TextBytes::of(&[folder.join("large.txt")]);
        let pipe = folder.join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let pipes = [TextBytes::of(&[&pipe]), TextBytes::of(&["/dev/zero"])];
        let errors =
            ["a/latin1", "a/nul", "absent"].map(|name| TextBytes::of(&[folder.join(name)]));
        write(
            "pointers/weights",
            b"version https://git-lfs.github.com/spec/v1\nsize 9\n",
        );
        symlink("../b.txt", folder.join("pointers/link")).unwrap();
        let [pointer, none] = ["pointers/weights", "pointers"]
            .map(|name| TextBytes::of(&[folder.join(name)]).unwrap_err().to_string());
        fs::remove_dir_all(&folder).unwrap();

        let walked = walked.unwrap();
        assert_eq!(
            walked.bytes(),
            b"first file, of the folder\0second file, after the folder\0"
        );
        assert_eq!(walked.files(), 2);
        let named = named.unwrap();
        assert_eq!(
            named.bytes(),
            b"second file, after the folder\0first file, of the folder\0"
        );
        assert_ne!(walked.fingerprint(), named.fingerprint());
        assert_eq!(large.unwrap().files(), 1);
        let why = [
            "latin1 is not text: it is not UTF-8 from byte 1 on",
            "nul is not text: byte 6 is a NUL, which separates files",
            "absent: No such file or directory (os error 2)",
        ];
        for (error, why) in errors.into_iter().zip(why) {
            let error = error.unwrap_err().to_string();
            assert!(error.ends_with(why), "{error}");
        }
        assert!(
            pointer.contains("weights: a pointer of Git LFS in place of the file"),
            "{pointer}"
        );
        let expected = "pointers: no text: none of its files (1) is UTF-8 text of at most 4194304 \
                        bytes, and its links (1) are skipped: name the files that they lead to";
        assert!(none.ends_with(expected), "{none}");
        for pipe in pipes {
            assert!(pipe.unwrap_err().to_string().ends_with("no regular file"));
        }
        assert!(TextBytes::of_files(&[]).is_err());
    }

    #[test]
    fn repository_text_is_the_same_at_each_reading() {
        let text = TextBytes::of_this_repository().unwrap();
        assert!(text.files() > 10);
        assert_eq!(
            text.fingerprint(),
            TextBytes::of_this_repository().unwrap().fingerprint()
        );
    }
}
