//! Adapters of LoRA in the format of the library `peft`: read, added to a model's weights, and
//! split into the matrices of a training.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mpmd::aval::DType;
use mpmd::random::Key;
use mpmd::region::Region;
use mpmd::train::tensors::{TensorFile, file_note, read_json, read_regular};
use mpmd::{Error, Fact, Result};
use serde_json::{Map, Value};

use crate::decoder::lora::{Lora, MATRICES, WEIGHT};
use crate::error::unexpected;
use crate::family::ParameterSource;
use crate::hub::adapter_matrices::AdapterMatrices;
use crate::hub::content::fold;
use crate::hub::files::{LARGEST_FILE, checked};
use crate::hub::stored_tensor::{DTYPES, convert, not_finite};

/// Prefix of the names in a file of adapters, since `peft` wraps the model twice.
pub(crate) const WRAPPED: &str = "base_model.model.";
/// Name of the file with the settings of an adapter.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Name of the file with the matrices of an adapter.
pub(crate) const ADAPTER_MODEL: &str = "adapter_model.safetensors";

/// Number of samples by which the matrices of an adapter are compared between processes.
const SAMPLES: u64 = 4;
/// Prefixes of `init_lora_weights` in adapters that also change the weights of their model.
const CHANGING: [&str; 4] = ["pissa", "olora", "loftq", "corda"];

/// An adapter of LoRA on disk, in the format of the library `peft`: `adapter_config.json` and
/// `adapter_model.safetensors`. Opening it reads all of its matrices. Clones share them.
///
/// [`Folder::with_adapter`](crate::Folder::with_adapter) adds it to a model, and
/// [`Stages::continue_adapter`](crate::Stages::continue_adapter) trains it further.
#[derive(Clone)]
pub struct Adapter {
    path: PathBuf,
    lora: Lora,
    /// The matrices beside each weight, by the weight's name in the files of the model.
    matrices: Arc<BTreeMap<String, Arc<AdapterMatrices>>>,
    hash: Key,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter")
            .field("path", &self.path)
            .field("lora", &self.lora)
            .finish_non_exhaustive()
    }
}

impl Adapter {
    /// Reads an adapter from a folder.
    ///
    /// # Errors
    ///
    /// If a file is missing, damaged, or leads out of the folder and its hub cache. If a value is
    /// infinite or NaN, or the adapter is of another kind than LoRA beside weights, such as DoRA.
    /// The message names the file, the key or tensor, the expected and the found.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let config = AdapterConfig::open(&path)?;
        let file = path.join(ADAPTER_MODEL);
        let values = checked(&path, ADAPTER_MODEL, u64::MAX)
            .map_err(|why| unexpected(&file, "", "the matrices of an adapter", why))?;
        let values = TensorFile::open(values)?;

        let mut hash = Key(0);
        let mut matrices = BTreeMap::new();
        for name in values.names() {
            let weight = name
                .strip_prefix(WRAPPED)
                .and_then(|name| MATRICES.iter().find_map(|end| name.strip_suffix(*end)));
            let Some(start) = weight else {
                let expected = format!("{WRAPPED}…{} or {}", MATRICES[0], MATRICES[1]);
                return Err(unexpected(&file, &name, expected, "another name"));
            };
            hash = fold(hash, name.as_bytes()).fold_in(values.hash_samples(&name, SAMPLES)?);
            if !name.ends_with(MATRICES[0]) {
                // Read with its A, or missed below.
                continue;
            }
            let read = config.read(&values, start)?;
            hash = hash.fold_in(read.scale.to_bits().into());
            matrices.insert(format!("{start}{WEIGHT}"), Arc::new(read));
        }
        let count = values.names().len();
        if matrices.is_empty() || count != 2 * matrices.len() {
            let expected = "a matrix B for each A, and at least one";
            return Err(unexpected(&file, "", expected, format!("{count} tensors")));
        }
        Ok(Self {
            path,
            lora: config.lora,
            matrices: Arc::new(matrices),
            hash,
        })
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the settings of LoRA that the adapter was trained with. Modules may have others.
    pub fn lora(&self) -> Lora {
        self.lora
    }

    /// Returns a fact about the adapter, for a comparison between processes.
    pub fn fact(&self) -> Fact {
        Fact {
            note: file_note(&self.path.join(ADAPTER_MODEL)),
            ..Fact::new("the adapter", format!("hash {:016x}", self.hash.0))
        }
    }

    /// Returns a hash of the matrices' names, of samples of their values, and of the factors.
    pub(crate) fn hash(&self) -> u64 {
        self.hash.0
    }

    /// Returns the matrices beside each weight, by the weight's name.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = (&str, &Arc<AdapterMatrices>)> {
        self.matrices.iter().map(|(name, one)| (name.as_str(), one))
    }

    /// Returns the error for the module of the weight `weight`.
    pub(crate) fn unexpected(
        &self,
        weight: &str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Error {
        let module = weight.strip_suffix(WEIGHT).unwrap_or(weight);
        let name = format!("{WRAPPED}{module}{}", MATRICES[0]);
        unexpected(&self.path.join(ADAPTER_MODEL), &name, expected, found)
    }

    /// Returns the matrices A and B of a parameter for a training that continues. `source` is the
    /// source of the weight, which may be rows of a fused tensor; `place` is its index among the
    /// `parts` parameters of this tensor. `None` if the adapter has none beside this weight.
    ///
    /// # Errors
    ///
    /// If the rank or the factor of the product differs from the adapter's settings.
    pub(crate) fn start(
        &self,
        source: &ParameterSource,
        place: usize,
        parts: usize,
    ) -> Result<Option<[Vec<f32>; 2]>> {
        let Some(stored) = self.matrices.get(&source.name) else {
            return Ok(None);
        };
        let Lora { rank, alpha } = self.lora;
        let scale = (alpha / rank as f64) as f32;
        if (stored.scale - scale).abs() > 1e-6 * scale.abs() {
            let expected = format!("alpha / rank {scale}, as in {ADAPTER_CONFIG}");
            return Err(self.unexpected(&source.name, expected, stored.scale));
        }

        // A fused tensor has one A for all of its parts, or one below the other.
        let is_stacked = parts > 1 && stored.rank == parts * rank;
        if !is_stacked && stored.rank != rank {
            let expected = format!("rank {rank}, as in {ADAPTER_CONFIG}");
            return Err(self.unexpected(&source.name, expected, stored.rank));
        }
        let first = if is_stacked { place * rank } else { 0 };
        let a = stored.a[first * stored.inputs..][..rank * stored.inputs].to_vec();

        let mut b = Vec::new();
        for (_, rows) in source.rows.places() {
            for row in rows {
                let row = &stored.b[row * stored.rank..][..stored.rank];
                let mut others = row[..first].iter().chain(&row[first + rank..]);
                if others.any(|value| *value != 0.0) {
                    let expected = "zeros beside the columns of each part of a fused weight";
                    return Err(self.unexpected(&source.name, expected, "other values"));
                }
                b.extend_from_slice(&row[first..first + rank]);
            }
        }
        Ok(Some([a, b]))
    }
}

/// The settings of an adapter.
struct AdapterConfig {
    file: PathBuf,
    lora: Lora,
    /// True if the product is divided by the square root of the rank instead of the rank.
    has_root: bool,
    lora_alpha: f64,
    /// The alpha of modules with another one, by the end of their name.
    alphas: BTreeMap<String, f64>,
}

impl AdapterConfig {
    /// Reads and checks the settings of the adapter in a folder.
    fn open(folder: &Path) -> Result<Self> {
        let file = folder.join(ADAPTER_CONFIG);
        let expected = "the settings of an adapter";
        let text = checked(folder, ADAPTER_CONFIG, LARGEST_FILE)
            .and_then(|path| read_regular(&path, LARGEST_FILE))
            .map_err(|why| unexpected(&file, "", expected, why))?;
        let map: Map<String, Value> =
            read_json(&text).map_err(|why| unexpected(&file, "", expected, why))?;
        check_kind(&file, &map)?;

        let value = |key: &str| map.get(key).unwrap_or(&Value::Null);
        let wrong = |key: &str, expected: &str| unexpected(&file, key, expected, value(key));
        let rank = value("r").as_u64().filter(|rank| *rank > 0);
        let rank = rank.ok_or_else(|| wrong("r", "a rank above 0"))? as usize;
        let lora_alpha = value("lora_alpha").as_f64();
        let lora_alpha = lora_alpha.ok_or_else(|| wrong("lora_alpha", "a number"))?;
        let has_root = match value("use_rslora") {
            Value::Null => false,
            Value::Bool(has_root) => *has_root,
            _ => return Err(wrong("use_rslora", "true or false")),
        };

        let mut alphas = BTreeMap::new();
        for (module, alpha) in value("alpha_pattern").as_object().into_iter().flatten() {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
            match alpha.as_f64().filter(|_| module.chars().all(is_plain)) {
                Some(alpha) => alphas.insert(module.clone(), alpha),
                None => return Err(wrong("alpha_pattern", "numbers by the names of modules")),
            };
        }
        let root = if has_root { (rank as f64).sqrt() } else { 1.0 };
        Ok(Self {
            lora: Lora {
                rank,
                alpha: lora_alpha * root,
            },
            file,
            has_root,
            lora_alpha,
            alphas,
        })
    }

    /// Reads the matrices beside the weight `start` + `weight`.
    fn read(&self, values: &TensorFile, start: &str) -> Result<AdapterMatrices> {
        let [a, b] = MATRICES.map(|end| format!("{WRAPPED}{start}{end}"));
        let [(a, a_shape), (b, b_shape)] = [matrix(values, &a)?, matrix(values, &b)?];
        let [rank, inputs] = a_shape;
        if b_shape[1] != rank || rank == 0 {
            let name = format!("{WRAPPED}{start}{}", MATRICES[1]);
            let expected = format!("a matrix [outputs, {rank}], as A is {a_shape:?}");
            return Err(unexpected(
                values.path(),
                &name,
                expected,
                format!("{b_shape:?}"),
            ));
        }

        let module = start.trim_end_matches('.');
        let is_of = |end: &String| {
            let before = module.strip_suffix(end.as_str());
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let own = self.alphas.iter().find(|(end, _)| is_of(end));
        let alpha = own.map_or(self.lora_alpha, |(_, alpha)| *alpha);
        let by = if self.has_root {
            (rank as f64).sqrt()
        } else {
            rank as f64
        };
        if !(alpha / by).is_finite() {
            return Err(unexpected(
                &self.file,
                "lora_alpha",
                "a finite number",
                alpha,
            ));
        }
        Ok(AdapterMatrices {
            a,
            b,
            rank,
            inputs,
            scale: (alpha / by) as f32,
        })
    }
}

/// Returns an error if an adapter's settings ask for more than products beside weights.
fn check_kind(file: &Path, map: &Map<String, Value>) -> Result<()> {
    let value = |key: &str| map.get(key).unwrap_or(&Value::Null);
    if value("peft_type") != "LORA" {
        return Err(unexpected(
            file,
            "peft_type",
            "\"LORA\"",
            value("peft_type"),
        ));
    }
    if !(value("bias").is_null() || value("bias") == "none") {
        return Err(unexpected(file, "bias", "\"none\"", value("bias")));
    }
    for key in ["use_dora", "lora_bias", "use_qalora"] {
        if !(value(key).is_null() || *value(key) == false) {
            return Err(unexpected(file, key, false, value(key)));
        }
    }
    // The first repeats layers of the model; the second adds the product after some tokens alone.
    for key in ["layer_replication", "alora_invocation_tokens"] {
        if !value(key).is_null() {
            return Err(unexpected(file, key, "null", value(key)));
        }
    }
    let first = value("init_lora_weights").as_str().unwrap_or_default();
    if CHANGING
        .iter()
        .any(|kind| first.to_lowercase().starts_with(kind))
    {
        let expected = "first values that leave the weights of the model as they are";
        return Err(unexpected(
            file,
            "init_lora_weights",
            expected,
            format!("{first:?}"),
        ));
    }
    Ok(())
}

/// Reads a matrix of floats as f32. Returns its values and its shape.
fn matrix(file: &TensorFile, name: &str) -> Result<(Vec<f32>, [usize; 2])> {
    let aval = file.aval(name)?;
    let wrong = || {
        let found = format!("{} {:?}", aval.dtype(), aval.shape());
        unexpected(file.path(), name, format!("a matrix of {DTYPES}"), found)
    };
    let shape = <[usize; 2]>::try_from(aval.shape()).map_err(|_| wrong())?;
    if !matches!(aval.dtype(), DType::F32 | DType::Bf16 | DType::F16) {
        return Err(wrong());
    }
    let mut bytes = vec![0; aval.bytes()];
    file.read(name, &Region::full(aval.shape()), &mut bytes)?;

    let mut values = vec![0.0; aval.elements()];
    convert(&bytes, aval.dtype(), &mut values);
    match not_finite(&values) {
        None => Ok((values, shape)),
        Some(found) => Err(unexpected(file.path(), name, "finite values", found)),
    }
}
