//! The manifest of a checkpoint, and the lists of pieces that it names.

use std::collections::BTreeMap;
use std::path::Path;

use mpmd_core::{Error, Result, read_regular};
use mpmd_layout::region::Region;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::best::BestEvaluation;
use crate::tensors::failed;

/// Version of the manifest format that this program writes and reads.
pub(super) const FORMAT: u32 = 1;
/// Limit on the bytes that are read from a manifest or a list of pieces.
pub(super) const LARGEST: u64 = 1 << 30;

/// The files of a checkpoint, and the step, seed and best evaluation of its training.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Manifest {
    pub(super) format: u32,
    /// Number of updates that the model had at the save.
    pub(super) step: u64,
    /// The epoch of the job that wrote the checkpoint. It is 1 in jobs that do not recover.
    #[serde(default = "first", skip_serializing_if = "is_first")]
    pub(super) epoch: u64,
    pub(super) seed: u64,
    /// The best evaluation up to the save. `None` if there was no evaluation yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) best: Option<BestEvaluation>,
    /// Number of processes that wrote the checkpoint.
    pub(super) processes: usize,
    pub(super) stages: usize,
    /// True if the names of the arrays begin with their stage, as in `stage.1.`.
    pub(super) by_stage: bool,
    /// The model's settings that the program has declared by `Checkpoints::setting`.
    pub(super) settings: BTreeMap<String, String>,
    pub(super) files: Vec<FileEntry>,
    /// The files with lists of pieces, one for each process.
    pub(super) lists: Vec<ListEntry>,
}

/// A safetensors file of a checkpoint.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct FileEntry {
    pub(super) name: String,
    /// Length of the file in bytes.
    pub(super) bytes: u64,
    /// Length of the header, the part before the values, in bytes.
    pub(super) header_bytes: u64,
    /// Hash of the header.
    pub(super) header_hash: String,
}

/// A JSON file with the [`ArrayPieces`] that a process has written.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct ListEntry {
    pub(super) name: String,
    pub(super) hash: String,
}

/// The pieces of an array that one process has written.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct ArrayPieces {
    pub(super) array: String,
    /// Each piece with the hash of its elements in row-major order.
    pub(super) pieces: Vec<(Region, String)>,
}

/// A manifest as it is stored, with the hash of its compact JSON.
#[derive(Deserialize, Serialize)]
struct Sealed {
    manifest: Manifest,
    hash: String,
}

/// A reason why the content of a file is not a manifest.
#[derive(Debug, thiserror::Error)]
pub(super) enum ManifestFault {
    #[error("no valid manifest of a checkpoint ({0})")]
    Json(#[from] serde_json::Error),
    #[error("format {FORMAT} is expected, {found} found")]
    Format { found: u32 },
    #[error("damaged: it does not have the hash that it names")]
    Hash,
}

fn first() -> u64 {
    1
}

fn is_first(epoch: &u64) -> bool {
    *epoch == 1
}

impl Manifest {
    /// Returns the content of the manifest's file, with a hash.
    pub(super) fn seal(self) -> Result<Vec<u8>> {
        let hash = self.hash()?;
        let sealed = serde_json::to_string_pretty(&Sealed {
            manifest: self,
            hash,
        });
        sealed
            .map(|text| (text + "\n").into_bytes())
            .map_err(invalid)
    }

    /// Parses the content of a manifest's file, and checks its hash.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ManifestFault> {
        let sealed: Sealed = serde_json::from_slice(bytes)?;
        let Sealed { manifest, hash } = sealed;
        if manifest.format != FORMAT {
            return Err(ManifestFault::Format {
                found: manifest.format,
            });
        }

        match manifest.hash() {
            Ok(expected) if expected == hash => Ok(manifest),
            _ => Err(ManifestFault::Hash),
        }
    }

    /// Returns a hash of all fields of the manifest.
    pub(super) fn hash(&self) -> Result<String> {
        serde_json::to_vec(self)
            .map(|text| hash(&text))
            .map_err(invalid)
    }
}

/// Reads a list of pieces. Fails if its hash differs from the manifest's.
pub(super) fn read_list(folder: &Path, list: &ListEntry) -> Result<Vec<ArrayPieces>> {
    let path = folder.join(&list.name);
    let bytes = read_regular(&path, LARGEST).map_err(|error| failed(&path, &error))?;
    if hash(&bytes) != list.hash {
        return Err(failed(
            &path,
            &"damaged: it does not have the hash in the manifest",
        ));
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| failed(&path, &format!("no valid list of pieces ({error})")))
}

/// Returns the hash of some bytes: XXH3 with 128 bits, as 32 hexadecimal digits.
pub(super) fn hash(bytes: &[u8]) -> String {
    format!("{:032x}", XxHash3_128::oneshot(bytes))
}

fn invalid(error: serde_json::Error) -> Error {
    Error::Environment(format!("a manifest of a checkpoint: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        let file = FileEntry {
            name: "model.safetensors".to_owned(),
            bytes: 300,
            header_bytes: 96,
            header_hash: hash(b"header"),
        };
        let list = ListEntry {
            name: "pieces-0.json".to_owned(),
            hash: hash(b"list"),
        };
        let (files, lists) = (vec![file], vec![list]);
        let (step, epoch, seed, processes, stages) = (100, 2, u64::MAX, 4, 2);
        let settings = BTreeMap::from([("heads".to_owned(), "4".to_owned())]);
        let (format, by_stage) = (FORMAT, false);
        let best = Some(BestEvaluation::updated(None, 100, 0.1 + 0.2));
        Manifest {
            format,
            step,
            epoch,
            seed,
            best,
            processes,
            stages,
            by_stage,
            settings,
            files,
            lists,
        }
    }

    #[test]
    fn changed_manifest_is_refused() {
        let text = String::from_utf8(sample().seal().unwrap()).unwrap();
        assert_eq!(Manifest::parse(text.as_bytes()).unwrap(), sample());
        let said = Manifest::parse(text.replace("300", "301").as_bytes()).unwrap_err();
        assert_eq!(
            said.to_string(),
            "damaged: it does not have the hash that it names"
        );
        let said = Manifest::parse(text.replace("\"format\": 1", "\"format\": 2").as_bytes());
        assert_eq!(
            said.unwrap_err().to_string(),
            "format 1 is expected, 2 found"
        );
        let said = Manifest::parse(&text.as_bytes()[..100])
            .unwrap_err()
            .to_string();
        assert!(
            said.starts_with("no valid manifest of a checkpoint"),
            "{said}"
        );
    }

    #[test]
    fn fuzz_manifests() {
        mpmd_fuzz::bytes("manifests", &[sample().seal().unwrap()], |bytes| {
            if let Ok(manifest) = Manifest::parse(bytes) {
                assert_eq!(manifest, sample());
            }
        });
    }
}
