//! The content of a model's folder, which must be the same on all processes and stay so: hashes of
//! samples of the tensors, and of the files beside them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use mpmd::random::Key;
use mpmd::train::tensors::{file_note, read_json};
use mpmd::{Error, Fact, Result};
use serde_json::Value;

use crate::hub::files::{COMPANIONS, CONFIG, GENERATION};
use crate::hub::stored_tensor::StoredTensor;

/// Limit on the number of samples in all tensors together. Each tensor has at least one sample.
const SAMPLES: usize = 4096;
/// Largest number of samples of one tensor. A sample has 4 KiB.
const SAMPLES_OF_ONE: usize = 4;
/// Config keys that do not describe the model. Changes of their values are ignored.
const NOT_OF_MODEL: [&str; 2] = ["_name_or_path", "transformers_version"];
/// The last words of an error about a file that has changed while a job runs.
pub const CHANGED: &str =
    "has changed since the job started: put the old file back, or start the job again";

/// Hashes of a folder's content, by which processes see that they read the same model.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct FolderContent {
    /// Hash of samples of each tensor, by name. Tensors of a new model have no entry.
    tensors: BTreeMap<String, u64>,
    /// Largest number of samples in each tensor, of 4 KiB each.
    samples: u64,
    /// Hash of each file beside the weights, by name. `None` if the folder lacks the file.
    files: BTreeMap<&'static str, Option<u64>>,
}

/// The content of a folder when it was first compared. Clones share the value.
pub(crate) type Known = Arc<OnceLock<Result<FolderContent>>>;

impl FolderContent {
    /// Reads and hashes samples of the tensors, and the files beside the weights. `file` reads such
    /// a file, or returns `None` if the folder lacks it.
    pub(crate) fn of(
        stored: &BTreeMap<String, StoredTensor>,
        file: impl Fn(&str) -> Result<Option<Vec<u8>>>,
    ) -> Result<Self> {
        let samples = (SAMPLES / stored.len().max(1)).clamp(1, SAMPLES_OF_ONE) as u64;
        let tensors = stored
            .iter()
            .filter_map(|(name, stored)| {
                let hash = stored.hash_samples(samples).transpose()?;
                Some(hash.map(|hash| (name.clone(), hash)))
            })
            .collect::<Result<_>>()?;

        let file = |name| Ok((name, file(name)?.map(|bytes| hash_file(name, &bytes))));
        let files = COMPANIONS.into_iter().map(file).collect::<Result<_>>()?;
        Ok(Self {
            tensors,
            samples,
            files,
        })
    }

    /// Returns one hash of the samples of all tensors.
    pub(crate) fn of_weights(&self) -> u64 {
        let all = self.tensors.iter().fold(Key(0), |key, (name, hash)| {
            fold(key, name.as_bytes()).fold_in(*hash)
        });
        all.0
    }

    /// Returns an error if samples of the tensor `name` have other values than when they were
    /// hashed.
    pub(crate) fn check_tensor(&self, name: &str, stored: &StoredTensor) -> Result<()> {
        let Some(known) = self.tensors.get(name) else {
            return Ok(());
        };
        match (stored.path(), stored.hash_samples(self.samples)?) {
            (Some(file), Some(found)) if found != *known => {
                let file = file.display();
                Err(Error::Environment(format!(
                    "{file}: {name}: the tensor {CHANGED}"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Returns the hash of a file beside the weights. `None` if the folder lacks the file.
    pub(crate) fn file_hash(&self, name: &str) -> Option<u64> {
        self.files.get(name).copied().flatten()
    }

    /// Returns an error if `bytes` differ from the file `name` when it was hashed. The error does
    /// not name the path.
    pub(crate) fn check_file(&self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        match self.files.get_key_value(name) {
            Some((name, known)) if *known != Some(hash_file(name, bytes)) => {
                Err(std::io::Error::other(format!("the file {CHANGED}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns facts that the processes of a job compare to see that their folders are equal. All
    /// tensors of a layer are one fact. How tensors are spread over files does not matter. `path`
    /// returns the path of a file beside the weights.
    pub(crate) fn facts(
        &self,
        path: impl Fn(&str) -> PathBuf,
        stored: &BTreeMap<String, StoredTensor>,
    ) -> Vec<Fact> {
        let mut groups = BTreeMap::<String, (Key, Option<&Path>)>::new();
        for (name, hash) in &self.tensors {
            let (key, path) = groups.entry(group(name)).or_insert((Key(0), None));
            *key = fold(*key, name.as_bytes()).fold_in(*hash);
            *path = path.or(stored[name].path());
        }
        let weights = groups.into_iter().map(|(group, (key, path))| Fact {
            note: path.map(file_note).unwrap_or_default(),
            ..Fact::new(
                format!("weights of {group}"),
                format!("hash {:016x}", key.0),
            )
        });

        let files = self.files.iter().filter_map(|(name, hash)| match hash {
            Some(hash) => Some(Fact {
                note: file_note(&path(name)),
                ..Fact::new(*name, format!("hash {hash:016x}"))
            }),
            // All processes read these settings.
            None if *name == GENERATION => None,
            // Only process 0 reads the others.
            None => Some(Fact {
                value: None,
                ..Fact::new(*name, "")
            }),
        });
        weights.chain(files).collect()
    }
}

/// Returns the hash `key` continued by `bytes`.
pub(crate) fn fold(key: Key, bytes: &[u8]) -> Key {
    bytes.iter().copied().map(u64::from).fold(key, Key::fold_in)
}

/// Returns the layer of a tensor, such as `model.layers.3`, or the tensor's name if it belongs to
/// no layer.
fn group(name: &str) -> String {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<&str> = name.split('.').collect();
    let end = parts
        .iter()
        .position(|part| is_number(part))
        .map_or(parts.len(), |at| at + 1);
    parts[..end].join(".")
}

/// Returns a hash of a file beside the weights. Files of settings are hashed by their JSON values,
/// not by their bytes.
fn hash_file(name: &str, bytes: &[u8]) -> u64 {
    let settings = match name {
        CONFIG | GENERATION => read_json::<Value>(bytes).ok(),
        _ => None,
    };

    match settings {
        Some(mut settings @ Value::Object(_)) => {
            for key in NOT_OF_MODEL {
                settings
                    .as_object_mut()
                    .and_then(|settings| settings.remove(key));
            }
            settings.sort_all_objects();
            fold(Key(0), settings.to_string().as_bytes()).0
        }
        _ => {
            let word = |chunk: &[u8]| {
                chunk
                    .iter()
                    .fold(0, |word, byte| word << 8 | u64::from(*byte))
            };
            bytes
                .chunks(8)
                .map(word)
                .fold(Key(bytes.len() as u64), Key::fold_in)
                .0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_a_layer_are_one_group() {
        assert_eq!(
            group("model.layers.31.mlp.experts.7.up_proj.weight"),
            "model.layers.31"
        );
        assert_eq!(group("h.0.attn.c_attn.weight"), "h.0");
        assert_eq!(
            group("model.embed_tokens.weight"),
            "model.embed_tokens.weight"
        );
    }

    #[test]
    fn settings_count_by_their_values() {
        let hash = |text: &str| hash_file(CONFIG, text.as_bytes());
        let one = hash(r#"{"a": 1, "b": 2, "transformers_version": "5.0"}"#);
        assert_eq!(hash(r#"{ "b": 2, "a": 1 }"#), one);
        assert_ne!(hash(r#"{"a": 1, "b": 3}"#), one);
    }
}
