//! What was compiled, kept on disk: a folder of the user's, a file for each source, its options,
//! NVRTC's version and the architecture.
//!
//! Whatever goes wrong here costs a compile and is no error: the folder may be on a full disk, or
//! belong to somebody else, and processes write it at the same time.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::cuda::source::Source;
use mpmd_layout::Fingerprint;

/// How a file begins. Another number for another form.
const MAGIC: &[u8] = b"mpmd compiled 1\n";

/// All that what is compiled depends on.
pub(super) struct Key {
    text: String,
}

impl Key {
    /// The options say for which architecture.
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

/// The folder, where there is one.
pub(super) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// Where the environment says. `MPMD_CUDA_CACHE` set to nothing has none.
    pub(super) fn of_user() -> Self {
        Self { folder: folder(|name| std::env::var_os(name)) }
    }

    /// What was written for this key, if it is there and whole.
    pub(super) fn read(&self, key: &Key) -> Option<Vec<u8>> {
        let path = self.folder.as_ref()?.join(key.file());
        let bytes = fs::read(&path).ok()?;
        let image = whole(&bytes, key);
        if image.is_none() {
            tracing::debug!(path = %path.display(), "damaged: compiled again");
        }
        image.map(<[u8]>::to_vec)
    }

    /// Keeps what was compiled, if it can.
    pub(super) fn write(&self, key: &Key, image: &[u8]) {
        let Some(folder) = &self.folder else { return };
        if let Err(error) = write(folder, key, image) {
            tracing::debug!(%error, folder = %folder.display(), "what was compiled is not kept");
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

/// The bytes of a file: all that the key is, so that no two are taken for each other, the image,
/// and a sum of both.
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

/// By another name first: whoever reads it sees all of it or nothing.
fn write(folder: &Path, key: &Key, image: &[u8]) -> io::Result<()> {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    // What lies here is run: nobody else writes it.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(key.file());
    let new = folder.join(format!("{}.{}-{number}", key.file(), std::process::id()));
    let written =
        fs::File::create_new(&new).and_then(|mut file| file.write_all(&content(key, image)));
    written.and_then(|()| fs::rename(&new, &path)).inspect_err(|_| {
        // It may never have been there.
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
    fn the_folder_is_the_one_that_was_named_or_the_users_own() {
        let path = |text: &str| Some(PathBuf::from(text));
        let home = ("HOME", "/home/a");
        assert_eq!(folder_of(&[home]), path("/home/a/.cache/mpmd/cuda"));
        assert_eq!(folder_of(&[home, ("XDG_CACHE_HOME", "/c")]), path("/c/mpmd/cuda"));
        // As its specification has it, a relative path is none.
        assert_eq!(folder_of(&[home, ("XDG_CACHE_HOME", "c")]), path("/home/a/.cache/mpmd/cuda"));
        assert_eq!(folder_of(&[home, ("MPMD_CUDA_CACHE", "x/y")]), path("x/y"));
        assert_eq!(folder_of(&[home, ("MPMD_CUDA_CACHE", "")]), None);
        assert_eq!(folder_of(&[]), None);
    }

    #[test]
    fn options_and_versions_have_files_of_their_own() {
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
    fn what_was_written_is_read_and_anything_else_is_not() {
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
        // The file of another key, under this one's name.
        fs::write(&path, content(&other, b"image")).unwrap();
        assert_eq!(cache.read(&one), None);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache { folder: Some(file.path().join("below a file")) };
        cache.write(&key(&[], ""), b"image");
        assert_eq!(cache.read(&key(&[], "")), None);
        let none = Cache { folder: None };
        none.write(&key(&[], ""), b"image");
        assert_eq!(none.read(&key(&[], "")), None);
    }
}
