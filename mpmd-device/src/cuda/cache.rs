//! A cache of compiled kernels on disk, in a folder of the user.
//!
//! It has one file for each combination of source, options, NVRTC version and architecture.
//! Failures here cost a compilation and are not errors: the folder may be on a full disk or belong
//! to another user. Several processes may write it at the same time.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cuda::source::Source;
use mpmd_layout::Fingerprint;

/// The first bytes of every cache file. Change the number when the format changes.
const MAGIC: &[u8] = b"mpmd compiled 1\n";

/// The text that identifies a compilation: source, options and NVRTC version.
pub(super) struct Key {
    text: String,
}

impl Key {
    /// Builds the key from a source, its compiler options and the version of NVRTC. The options
    /// name the architecture.
    pub(super) fn new(source: &Source, options: &[String], nvrtc: &str) -> Self {
        let head = [source.name(), nvrtc].into_iter().chain(options.iter().map(String::as_str));
        let head: Vec<&str> = head.collect();
        Self { text: format!("{}\n\n{}", head.join("\n"), source.text()) }
    }

    fn file(&self) -> String {
        let half = |kind| {
            let mut fingerprint = Fingerprint::new(kind);
            fingerprint.text(&self.text);
            fingerprint.finish()
        };
        format!("{:016x}{:016x}", half("compiled source"), half("compiled source, again"))
    }
}

/// The cache folder, or `None` if caching is off.
pub(super) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// Returns the cache in the folder `MPMD_CUDA_CACHE`, or else in the user's cache folder. An
    /// empty `MPMD_CUDA_CACHE` turns the cache off.
    pub(super) fn of_user() -> Self {
        Self { folder: folder(|name| std::env::var_os(name)) }
    }

    /// Returns the image stored for this key. `None` if there is none, the file is damaged, or the
    /// cache is off.
    pub(super) fn read(&self, key: &Key) -> Option<Vec<u8>> {
        let path = self.folder.as_ref()?.join(key.file());
        let bytes = fs::read(&path).ok()?;
        let image = whole(&bytes, key);
        if image.is_none() {
            tracing::debug!(path = %path.display(), "cached kernel is damaged; compiling it again");
        }
        image.map(<[u8]>::to_vec)
    }

    /// Stores an image under this key, unless the cache is off. Failures are only logged.
    pub(super) fn write(&self, key: &Key, image: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if let Err(error) = write(folder, key, image) {
            let folder = folder.display();
            tracing::debug!(%error, %folder, "cannot write the compiled kernel to the cache");
        }
    }
}

fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(folder) = variable("MPMD_CUDA_CACHE") {
        return (!folder.is_empty()).then(|| folder.into());
    }
    let set = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(caches.join("mpmd").join("cuda"))
}

/// Returns the bytes of a file: header, the complete key, the image and a checksum. The key is
/// included so that two keys with the same file name are not confused.
fn content(key: &Key, image: &[u8]) -> Vec<u8> {
    let lengths = [key.text.len() as u64, image.len() as u64].map(u64::to_le_bytes).concat();
    let mut bytes = [MAGIC, &lengths[..], key.text.as_bytes(), image].concat();
    bytes.extend(sum(&bytes).to_le_bytes());
    bytes
}

fn whole<'a>(bytes: &'a [u8], key: &Key) -> Option<&'a [u8]> {
    let (bytes, sum_of_it) = bytes.split_last_chunk::<8>()?;
    if sum(bytes) != u64::from_le_bytes(*sum_of_it) {
        return None;
    }
    let (text_length, rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
    let (image_length, rest) = rest.split_first_chunk::<8>()?;
    let (text, image) =
        rest.split_at_checked(usize::try_from(u64::from_le_bytes(*text_length)).ok()?)?;
    let is_all = image.len() as u64 == u64::from_le_bytes(*image_length);
    (is_all && text == key.text.as_bytes()).then_some(image)
}

fn sum(bytes: &[u8]) -> u64 {
    let mut sum = Fingerprint::new("file of a compiled source");
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    sum.words(words);
    sum.finish()
}

/// Writes a temporary file and renames it, so that a reader sees a complete file or none.
fn write(folder: &Path, key: &Key, image: &[u8]) -> io::Result<()> {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    // The files contain code that will run, so only the user may write here.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(key.file());
    let new = folder.join(format!("{}.{}-{number}", key.file(), std::process::id()));
    let written =
        fs::File::create_new(&new).and_then(|mut file| file.write_all(&content(key, image)));
    written.and_then(|()| fs::rename(&new, &path)).inspect_err(|_| {
        // The temporary file may not exist.
        let _ = fs::remove_file(&new);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    static SOURCE: Source = Source::cuda("one.cu", "extern \"C\" __global__ void one() {}");

    fn key(options: &[&str], nvrtc: &str) -> Key {
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        Key::new(&SOURCE, &options, nvrtc)
    }

    fn folder_of(variables: &[(&str, &str)]) -> Option<PathBuf> {
        folder(|name| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn folder_comes_from_mpmd_then_xdg_then_home() {
        let path = |text: &str| Some(PathBuf::from(text));
        let home = ("HOME", "/home/a");
        assert_eq!(folder_of(&[home]), path("/home/a/.cache/mpmd/cuda"));
        assert_eq!(folder_of(&[home, ("XDG_CACHE_HOME", "/c")]), path("/c/mpmd/cuda"));
        // The XDG specification says to ignore relative paths.
        assert_eq!(folder_of(&[home, ("XDG_CACHE_HOME", "c")]), path("/home/a/.cache/mpmd/cuda"));
        assert_eq!(folder_of(&[home, ("MPMD_CUDA_CACHE", "x/y")]), path("x/y"));
        assert_eq!(folder_of(&[home, ("MPMD_CUDA_CACHE", "")]), None);
        assert_eq!(folder_of(&[]), None);
    }

    #[test]
    fn different_options_and_versions_use_different_files() {
        let files = [
            key(&["a"], "12.8"),
            key(&["b"], "12.8"),
            key(&["a"], "12.9"),
            key(&["a", "b"], "12.8"),
        ];
        let mut files: Vec<String> = files.iter().map(Key::file).collect();
        assert_eq!(files[0], key(&["a"], "12.8").file());
        files.sort();
        files.dedup();
        assert_eq!(files.len(), 4);
    }

    #[test]
    fn written_images_are_read_back_and_damaged_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().join("deep/er")) };
        let (one, other) = (key(&["a"], "12.8"), key(&["b"], "12.8"));
        assert_eq!(cache.read(&one), None);
        cache.write(&one, b"image");
        assert_eq!(cache.read(&one).as_deref(), Some(&b"image"[..]));
        assert_eq!(cache.read(&other), None);
        cache.write(&one, b"image again");
        assert_eq!(cache.read(&one).as_deref(), Some(&b"image again"[..]));
        let path = folder.path().join("deep/er").join(one.file());
        assert_eq!(
            fs::read_dir(path.parent().unwrap()).unwrap().count(),
            1,
            "nothing is left beside it"
        );

        let good = fs::read(&path).unwrap();
        for damaged in [&good[..good.len() - 1], &good[..10], &[], &good[1..]] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(cache.read(&one), None, "{} bytes", damaged.len());
        }
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 4;
            fs::write(&path, bytes).unwrap();
            assert_eq!(cache.read(&one), None, "byte {at}");
        }
        // A file of another key under this key's name.
        fs::write(&path, content(&other, b"image")).unwrap();
        assert_eq!(cache.read(&one), None);
    }

    #[test]
    fn unwritable_folder_is_no_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache { folder: Some(file.path().join("below a file")) };
        cache.write(&key(&[], ""), b"image");
        assert_eq!(cache.read(&key(&[], "")), None);
        let none = Cache { folder: None };
        none.write(&key(&[], ""), b"image");
        assert_eq!(none.read(&key(&[], "")), None);
    }
}
