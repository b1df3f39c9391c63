//! A hash of files, by which processes see that they have the same data.

use std::path::Path;

use mpmd_core::{Result, hash_samples, open_regular};
use mpmd_layout::random::Key;

use super::TextBytes;
use crate::tensors::failed;

/// Number of 4 KiB samples that are hashed of a file. A file of up to 64 MiB is hashed completely.
const SAMPLES: u64 = 16 << 10;

/// Returns a hash of files and folders. The hash of a folder is that of its [`TextBytes`]. The hash
/// of a file covers its length and content; of a file above 64 MiB it covers samples of 64 MiB in
/// total.
///
/// # Errors
///
/// If a path cannot be read.
pub fn hash_files(paths: &[impl AsRef<Path>]) -> Result<u64> {
    let hash = |path: &Path| {
        if path.is_dir() {
            return TextBytes::of(&[path]).map(|text| text.fingerprint());
        }
        let hash = open_regular(path).and_then(|file| {
            let bytes = file.metadata()?.len();
            hash_samples(&file, 0..bytes, SAMPLES)
        });
        hash.map_err(|error| failed(path, &error))
    };
    let start = Key(paths.len() as u64);
    let all = paths
        .iter()
        .try_fold(start, |key, path| Ok(key.fold_in(hash(path.as_ref())?)));
    all.map(|key| key.0)
}
