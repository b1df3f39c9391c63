//! GGUF files as models: one file has the config, the tokenizer and the weights.
//!
//! Such a file becomes what a folder of a hub is: the keys of a `config.json`, the other files
//! beside the weights, and tensors by the names that `transformers` gives them. So all other parts
//! know folders only.

mod config;
mod families;
mod keys;
mod model_keys;
mod names;
mod rope;
mod splitters;
mod tensor;
#[cfg(test)]
mod tests;
mod tokenizer;
mod vocabulary;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use mpmd::Result;
use mpmd::aval::ShapedArray;
use mpmd_gguf::GgufFile;
use serde_json::{Map, Value, json};

use self::config::{Architecture, config_of};
use self::keys::{MetadataKeys, of_gguf};
use self::names::{TensorPlace, place_of};
pub(crate) use self::tensor::PackedTensor;
use self::tokenizer::{TokenizerFiles, tokenizer_of};
use crate::config::ModelConfig;
use crate::error::unexpected;
use crate::hub::files::{CONFIG, GENERATION, TOKENIZER};
use crate::hub::stored_tensor::{StoredTensor, ValueOrigin};

/// The file of a tokenizer's settings.
const SETTINGS: &str = "tokenizer_config.json";
/// Settings of sampling, as (key in files, key of a `generation_config.json`).
const SAMPLING: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// A model in a GGUF file.
pub(crate) struct GgufModel {
    /// The keys of a `config.json`.
    pub(crate) config: Map<String, Value>,
    /// The files beside the weights, by name.
    pub(crate) companions: BTreeMap<&'static str, Vec<u8>>,
    pub(crate) tensors: GgufTensors,
}

/// The tensors of a GGUF file.
pub(crate) struct GgufTensors {
    file: GgufFile,
    architecture: &'static Architecture,
}

/// A tensor that a model needs, in the terms of folders.
pub(crate) struct NeededTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    /// True if folders have it as `[inputs, outputs]`.
    pub(crate) is_transposed: bool,
}

impl GgufModel {
    /// Reads the metadata of a file, and the list of its tensors. If the file is a part of a model
    /// that is split into several files, the others are opened, too.
    ///
    /// # Errors
    ///
    /// If a file is missing or damaged. If the model or its tokenizer is of a kind that is not
    /// known here, or a key that may change results is unknown.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = GgufFile::open(path).map_err(of_gguf)?;
        let (architecture, mut config) = config_of(&file)?;
        let tokenizer = tokenizer_of(&file)?;

        let mut companions = BTreeMap::new();
        let mut generation = sampling(&file)?;
        if let Some(files) = tokenizer {
            let TokenizerFiles { begin, end, .. } = files;
            for (key, number) in [("bos_token_id", begin), ("eos_token_id", end)] {
                config.insert(key.to_owned(), number.into());
            }
            if !files.ends.is_empty() {
                generation.insert("eos_token_id".to_owned(), json!(files.ends));
            }
            companions.insert(TOKENIZER, files.tokenizer.to_string().into_bytes());
            companions.insert(SETTINGS, text(files.settings));
        }
        if !generation.is_empty() {
            companions.insert(GENERATION, text(generation.into()));
        }
        companions.insert(CONFIG, text(config.clone().into()));
        Ok(Self {
            config,
            companions,
            tensors: GgufTensors { file, architecture },
        })
    }
}

impl GgufTensors {
    /// Returns the tensors of the model, by the names that folders have.
    ///
    /// # Errors
    ///
    /// If the file lacks a tensor, has one of another shape, or has one that the model does not
    /// use.
    pub(crate) fn find<'a>(
        &self,
        config: &ModelConfig,
        needed: impl Iterator<Item = NeededTensor<'a>>,
    ) -> Result<BTreeMap<String, StoredTensor>> {
        let mut used =
            BTreeSet::from([rope::FREQUENCIES, rope::SHORT, rope::LONG].map(String::from));
        let mut tensors = BTreeMap::new();
        for needed in needed {
            let place = place_of(self.architecture, config, needed.name);
            let Some(place) = place else {
                let expected = format!("a tensor for {}", needed.name);
                let found = format!("none: the architecture {} lacks it", self.architecture.name);
                return Err(unexpected(self.file.path(), "", expected, found));
            };
            used.insert(place.name.clone());
            tensors.insert(needed.name.to_owned(), self.tensor(&needed, place)?);
        }
        match self
            .file
            .tensors()
            .keys()
            .find(|name| !used.contains(*name))
        {
            None => Ok(tensors),
            Some(other) => {
                let expected = "no such tensor: it may change results, and nothing here handles it";
                let path = self.file.path_of(other).map_err(of_gguf)?;
                Err(unexpected(path, other, expected, "one"))
            }
        }
    }

    /// Returns a tensor at its place in the file. Checks its shape.
    fn tensor(&self, needed: &NeededTensor<'_>, place: TensorPlace) -> Result<StoredTensor> {
        let mut shape = needed.shape.to_vec();
        if needed.is_transposed {
            shape.reverse();
        }
        let columns = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).product::<usize>();
        let expected = format!("{} x {columns} elements", rows * place.of);
        let Ok(tensor) = self.file.tensor(&place.name) else {
            return Err(unexpected(
                self.file.path(),
                &place.name,
                expected,
                "no such tensor",
            ));
        };
        if [tensor.rows(), tensor.columns()] != [rows * place.of, columns] {
            let path = self.file.path_of(&place.name).map_err(of_gguf)?;
            let found = format!("{} x {}", tensor.rows(), tensor.columns());
            return Err(unexpected(path, &place.name, expected, found));
        }

        let packed = PackedTensor {
            file: self.file.clone(),
            name: place.name.clone(),
            first: place.index * rows,
            rows,
            order: place.order,
            shift: place.shift,
            is_turned: needed.is_transposed,
            block_type: tensor.block_type(),
            elements: tensor.elements() as u64,
            bytes: tensor.bytes(),
        };
        Ok(StoredTensor {
            aval: ShapedArray::new(needed.shape, packed.dtype()),
            origin: ValueOrigin::Packed(packed),
            name: place.name,
            adapter: None,
        })
    }
}

/// Returns the settings of sampling that a file asks for, as a `generation_config.json` has them.
fn sampling(file: &GgufFile) -> Result<Map<String, Value>> {
    let keys = MetadataKeys::new(file, "general.sampling");
    let mut settings = Map::new();
    for (key, name) in SAMPLING {
        match key {
            "top_k" => {
                if let Some(count) = keys.count(key)? {
                    settings.insert(name.to_owned(), count.into());
                }
            }
            _ => {
                if let Some(number) = keys.number(key)? {
                    settings.insert(name.to_owned(), number.into());
                }
            }
        }
    }
    if !settings.is_empty() {
        settings.insert("do_sample".to_owned(), true.into());
    }
    Ok(settings)
}

/// Returns the bytes of a file of settings.
fn text(value: Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
