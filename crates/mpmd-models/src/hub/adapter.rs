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

use crate::config::ConfigKeys;
use crate::config::neutral::asks_for_nothing;
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
/// Texts in `init_lora_weights` for first values that leave the weights of the model as they are.
/// Other ones also change these weights.
const FIRST_VALUES: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// Keys of an adapter's settings that change no result, separated by blanks. All other keys must be
/// read, or ask for nothing. In this order: the origin; the choice of modules, which the names and
/// shapes of matrices show; settings of training; parts of settings that other keys enable.
const HARMLESS: &str = "
    auto_mapping base_model_name_or_path inference_mode peft_version revision task_type
    exclude_modules fan_in_fan_out layers_pattern layers_to_transform rank_pattern target_modules
    lora_dropout runtime_config
    corda_config eva_config loftq_config lora_ga_config megatron_core qalora_group_size
";

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
        if (stored.scale - scale).abs() > 1e-6 * stored.scale.abs() {
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
        let mut map: Map<String, Value> =
            read_json(&text).map_err(|why| unexpected(&file, "", expected, why))?;
        map.retain(|key, value| matches!(&**key, "r" | "lora_alpha") || !asks_for_nothing(value));

        let keys = ConfigKeys::new(&file, map);
        check_kind(&keys)?;
        let rank = keys.size("r", 0)?;
        let lora_alpha = keys.required("lora_alpha", "a number")?;
        let has_root = keys.flag("use_rslora", false)?;
        let expected = "numbers by the names of modules";
        let alphas: BTreeMap<String, f64> = keys.or("alpha_pattern", expected, BTreeMap::new())?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if let Some(module) = alphas.keys().find(|module| !module.chars().all(is_plain)) {
            return Err(keys.unexpected("alpha_pattern", expected, format!("{module:?}")));
        }
        keys.finish(HARMLESS)?;

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

        let alpha = self.alpha(start.trim_end_matches('.'))?;
        let by = if self.has_root {
            (rank as f64).sqrt()
        } else {
            rank as f64
        };
        let scale = (alpha / by) as f32;
        if !scale.is_finite() {
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
            scale,
        })
    }

    /// Returns the alpha of a module.
    ///
    /// # Errors
    ///
    /// If several names of `alpha_pattern` fit the module, with different numbers. `peft` takes the
    /// first of the file, but objects of JSON have no order.
    fn alpha(&self, module: &str) -> Result<f64> {
        let is_of = |end: &str| {
            let before = module.strip_suffix(end);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let mut own = self.alphas.iter().filter(|(end, _)| is_of(end));
        let Some((first, alpha)) = own.next() else {
            return Ok(self.lora_alpha);
        };
        if let Some((other, _)) = own.find(|(_, other)| *other != alpha) {
            let expected = format!("one number for {module}");
            let found = format!("those of {first:?} and {other:?}");
            return Err(unexpected(&self.file, "alpha_pattern", expected, found));
        }
        Ok(*alpha)
    }
}

/// Returns an error if an adapter's settings ask for more than products beside weights, by the keys
/// that are no flags.
fn check_kind(keys: &ConfigKeys<'_>) -> Result<()> {
    let kind: String = keys.required("peft_type", "\"LORA\"")?;
    if kind != "LORA" {
        return Err(keys.unexpected("peft_type", "\"LORA\"", format!("{kind:?}")));
    }
    keys.only("bias", "none".to_owned())?;

    let expected = "first values that leave the weights of the model as they are";
    match keys.get::<Value>("init_lora_weights", expected)? {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(first)) if FIRST_VALUES.contains(&&*first.to_lowercase()) => Ok(()),
        Some(first) => Err(keys.unexpected("init_lora_weights", expected, first)),
    }
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
