//! A model's folder as model hubs lay it out: its config, and its weights in one or several
//! safetensors files.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::{bf16, f16};
use mpmd::aval::{DType, ShapedArray};
use mpmd::random::Key;
use mpmd::region::Region;
use mpmd::sharding::Sharding;
use mpmd::train::tensors::{TensorFile, read_regular, refuse_pointer};
use mpmd::{Error, MpmdArray, Program, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::config::{self, Config};
use crate::model::{EMBEDDING, OUTPUT, shapes_of};
use crate::rope::Rope;
use crate::unexpected;

/// Name of the config.
pub(crate) const CONFIG: &str = "config.json";
/// Name of the tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// Names of the files that may be beside the weights, and that a saved model gets, too.
const COMPANIONS: [&str; 13] = [
    CONFIG,
    TOKENIZER,
    "additional_chat_templates/tool_use.jinja",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];
/// Limit on the size of such a file and of the index, in bytes.
const LARGEST_FILE: u64 = 256 << 20;

/// Name of the weights' file, if there is one.
const SINGLE: &str = "model.safetensors";
/// Name of the file that maps tensors to files, if there are several.
const INDEX: &str = "model.safetensors.index.json";
/// End of the names of tables that old folders have and nothing needs.
const IGNORED: &str = "rotary_emb.inv_freq";
/// The dtypes of weights that are read, for messages.
const DTYPES: &str = "f32, bf16 or f16";
/// Number of elements that are read at once, if they are converted.
const BLOCK: usize = 1 << 18;

/// The tensors of a folder.
struct Found {
    /// The file that lists them.
    list: PathBuf,
    /// The file of each tensor.
    files: BTreeMap<String, TensorFile>,
    /// The size of the largest file, in bytes. `None` if there is one file.
    split: Option<u64>,
}

/// A model on disk. Its headers are read and checked; values are read later, by region.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    config: Config,
    /// The names of the companions that it has.
    companions: Vec<&'static str>,
    tensors: BTreeMap<String, Stored>,
    /// The names of further tensors, which the model does not use.
    unused: Vec<String>,
    /// The size of the largest file of weights, in bytes. `None` if there is one file.
    split: Option<u64>,
    read: Arc<AtomicU64>,
}

/// The place of a tensor.
#[derive(Clone, Debug)]
struct Stored {
    file: TensorFile,
    /// Its name in the file.
    name: String,
    aval: ShapedArray,
}

/// The index of a folder with several files.
#[derive(Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl Folder {
    /// Reads the config and the headers of the weights, but no values. Checks that the folder has
    /// all tensors of the model, in the shapes of the config and a float dtype.
    ///
    /// If the config ties the output to the embedding, and the weights have an output with other
    /// values, then it is not tied.
    ///
    /// # Errors
    ///
    /// If a file is missing or damaged, no regular file, a pointer of Git LFS or too large, or a
    /// link that leads out of the folder and of its hub cache. If a tensor is missing, of another
    /// shape or dtype, or there twice. The message names the file, the tensor, the expected and the
    /// found.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = path.join(CONFIG);
        checked(&path, CONFIG, config::LARGEST_FILE)
            .map_err(|why| unexpected(&file, "", config::EXPECTED, why))?;
        let mut config = Config::read(&file)?;
        let companions = companions(&path)?;
        let Found { list, files, split } = find(&path)?;
        let may_be_tied = config.tie_word_embeddings && files.contains_key(OUTPUT);
        config.tie_word_embeddings &= !may_be_tied;
        let needed = shapes_of(&config)
            .map_err(|why| unexpected(&file, "", "sizes of a model", why.to_string()))?;
        let mut tensors = BTreeMap::new();
        let mut unused = Vec::new();
        for (name, file) in files {
            unused.extend(add(&mut tensors, name, &file, &needed)?);
        }
        for (name, aval) in &needed {
            let expected = format!("{DTYPES} {:?}", aval.shape());
            let Some(stored) = tensors.get(name) else {
                return Err(unexpected(&list, name, expected, "no such tensor"));
            };
            let is_float = matches!(stored.aval.dtype(), DType::F32 | DType::Bf16 | DType::F16);
            if !is_float || stored.aval.shape() != aval.shape() {
                let found = format!("{} {:?}", stored.aval.dtype(), stored.aval.shape());
                return Err(unexpected(stored.file.path(), name, expected, found));
            }
        }
        if may_be_tied && are_equal(&tensors[EMBEDDING], &tensors[OUTPUT])? {
            config.tie_word_embeddings = true;
            tensors.remove(OUTPUT);
        }
        Ok(Self { path, config, companions, tensors, unused, split, read: Arc::default() })
    }

    /// Returns the names of the files that a saved model gets beside its weights.
    pub(crate) fn companions(&self) -> &[&'static str] {
        &self.companions
    }

    /// Reads a file other than weights.
    pub(crate) fn small(&self, name: &str) -> io::Result<Vec<u8>> {
        read_regular(&checked(&self.path, name, LARGEST_FILE)?, LARGEST_FILE)
    }

    /// Returns the tokens that end a text: those of `generation_config.json`, or else those of the
    /// config. Neither file need have any.
    pub(crate) fn end_tokens(&self) -> Vec<u32> {
        let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let of = |name| {
            let settings: Value = serde_json::from_slice(&self.small(name).ok()?).ok()?;
            match &settings["eos_token_id"] {
                Value::Array(several) => several.iter().map(number).collect(),
                one => Some(vec![number(one)?]),
            }
        };
        of("generation_config.json").or_else(|| of(CONFIG)).unwrap_or_default()
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the model's config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the names of the model's tensors, with their shapes and the dtypes of the files.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &ShapedArray)> {
        self.tensors.iter().map(|(name, stored)| (name.as_str(), &stored.aval))
    }

    /// Returns the names of further tensors in the files, which the model does not use.
    pub(crate) fn unused(&self) -> &[String] {
        &self.unused
    }

    /// Returns the size of the largest file of weights, in bytes. `None` if there is only one file.
    pub fn split(&self) -> Option<u64> {
        self.split
    }

    /// Returns the number of bytes of values that this process has read, through this folder and
    /// its clones. Headers are not counted.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Makes the processes compare the config, and the names, shapes and dtypes of the tensors.
    /// Does not block.
    ///
    /// # Errors
    ///
    /// As for [`Program::assert_same`].
    pub fn compare(&self, p: &mut Program) -> Result<()> {
        let count = self.tensors.len();
        let key = fold(self.form(), format!("{:?}", self.config).as_bytes());
        p.assert_same(format!("a model of {count} tensors, with hash {:016x}", key.0))
    }

    /// Returns a hash of the names, shapes and dtypes of the tensors.
    fn form(&self) -> Key {
        self.tensors.iter().fold(Key(0), |key, (name, stored)| {
            fold(key, format!("{name} {}", stored.aval).as_bytes())
        })
    }

    /// Returns (name, value) of each setting by which a checkpoint tells this model from others:
    /// those that change results and that no shape shows, and a hash of the weights.
    ///
    /// # Errors
    ///
    /// If a file cannot be read.
    pub(crate) fn settings(&self) -> Result<[(&'static str, String); 6]> {
        // All fields are here, so that a new one is not forgotten.
        let Config {
            num_attention_heads: heads,
            head_dim,
            rms_norm_eps,
            rope: Rope { theta, scaling },
            // The names and shapes of the parameters show these.
            vocab_size: _,
            hidden_size: _,
            intermediate_size: _,
            num_hidden_layers: _,
            num_key_value_heads: _,
            tie_word_embeddings: _,
            attention_bias: _,
            mlp_bias: _,
            // These change no result.
            max_position_embeddings: _,
            attention_dropout: _,
        } = &self.config;
        Ok([
            ("--model num_attention_heads", heads.to_string()),
            ("--model head_dim", head_dim.to_string()),
            ("--model rms_norm_eps", rms_norm_eps.to_string()),
            ("--model rope_theta", theta.to_string()),
            ("--model rope_type", scaling.to_string()),
            ("--model weights", format!("with hash {:016x}", self.fingerprint()?)),
        ])
    }

    /// Returns a hash of the tensors' names, shapes and dtypes, and of the values in their first
    /// and last row.
    ///
    /// # Errors
    ///
    /// If a file cannot be read.
    fn fingerprint(&self) -> Result<u64> {
        let (mut key, mut bytes) = (self.form(), Vec::new());
        for Stored { file, name, aval } in self.tensors.values() {
            let rows = aval.shape().first().copied().unwrap_or(1);
            for row in [0, rows.saturating_sub(1)] {
                let all = aval.shape().iter().map(|size| 0..*size);
                let mut ranges: Vec<_> = all.collect();
                ranges.iter_mut().take(1).for_each(|rows| *rows = row..row + 1);
                let region = Region::new(ranges);
                bytes.resize(region.elements() * aval.dtype().size(), 0);
                file.read(name, &region, &mut bytes)?;
                key = fold(key, &bytes);
            }
        }
        Ok(key.0)
    }

    /// Issues the reading of a tensor as f32 on the devices of `sharding`. Each owner reads only
    /// its own regions, and converts bf16 and f16.
    ///
    /// # Errors
    ///
    /// As for [`Program::array_from_fn`], and if the model has no such tensor. If the file cannot
    /// be read, the array fails instead.
    pub fn load(&self, p: &mut Program, name: &str, sharding: &Sharding) -> Result<MpmdArray> {
        let Some(Stored { file, name, aval }) = self.tensors.get(name).cloned() else {
            return Err(unexpected(&self.path, name, "a tensor of the model", "another name"));
        };
        let read = self.read.clone();
        let values = ShapedArray::try_new(aval.shape(), DType::F32)?;
        p.array_from_fn(values, sharding, move |region, mut view| {
            read.fetch_add((region.elements() * aval.dtype().size()) as u64, Ordering::Relaxed);
            match aval.dtype() {
                DType::Bf16 => read_as(&file, &name, region, view.as_mut_slice()?, |bits| {
                    bf16::from_bits(bits).to_f32()
                }),
                DType::F16 => read_as(&file, &name, region, view.as_mut_slice()?, |bits| {
                    f16::from_bits(bits).to_f32()
                }),
                _ => file.read(&name, region, view.as_bytes_mut()),
            }
        })
    }
}

/// Adds bytes to a hash.
fn fold(key: Key, bytes: &[u8]) -> Key {
    bytes.iter().copied().map(u64::from).fold(key, Key::fold_in)
}

/// Reads a region of a tensor with elements of 16 bits, block by block, and converts each element.
fn read_as(
    file: &TensorFile,
    name: &str,
    region: &Region,
    values: &mut [f32],
    convert: impl Fn(u16) -> f32,
) -> Result<()> {
    let rows = region.range(0);
    let row = region.ranges().skip(1).map(|range| range.len()).product::<usize>().max(1);
    let step = (BLOCK / row).max(1);
    let mut bytes = Vec::new();
    for (start, values) in rows.clone().step_by(step).zip(values.chunks_mut(step * row)) {
        bytes.resize(2 * values.len(), 0);
        let mut block: Vec<_> = region.ranges().collect();
        block[0] = start..rows.end.min(start + step);
        file.read(name, &Region::new(block), &mut bytes)?;
        let (pairs, _) = bytes.as_chunks::<2>();
        let bits = pairs.iter().map(|pair| u16::from_le_bytes(*pair));
        values.iter_mut().zip(bits).for_each(|(value, bits)| *value = convert(bits));
    }
    Ok(())
}

/// Returns the path of a file in a folder, which may be from a stranger: a regular file of at most
/// `most` bytes, and no pointer of Git LFS. Links may lead to files of the folder only, or from a
/// folder in `snapshots/REV` of a hub cache to `blobs` beside `snapshots`.
fn checked(folder: &Path, name: &str, most: u64) -> io::Result<PathBuf> {
    let path = folder.join(name);
    let (real, root) = (path.canonicalize()?, folder.canonicalize()?);
    let snapshots = root.ancestors().skip(1).find(|above| above.ends_with("snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|cache| cache.join("blobs"));
    if !real.starts_with(&root) && !blobs.is_some_and(|blobs| real.starts_with(blobs)) {
        let real = real.display();
        return Err(io::Error::other(format!(
            "a link out of the folder, to {real}: copy the file"
        )));
    }
    let found = real.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("no regular file"));
    }
    if found.len() > most {
        let bytes = found.len();
        return Err(io::Error::other(format!("a file of {bytes} bytes, more than {most}")));
    }
    refuse_pointer(&path, found.len())?;
    Ok(path)
}

/// Returns the names of the companions that a folder has.
fn companions(folder: &Path) -> Result<Vec<&'static str>> {
    let has = |name: &&str| folder.join(name).symlink_metadata().is_ok();
    let found = COMPANIONS.into_iter().filter(has);
    let check = |name| match checked(folder, name, LARGEST_FILE) {
        Ok(_) => Ok(name),
        Err(why) => Err(unexpected(&folder.join(name), "", "a file beside the weights", why)),
    };
    found.map(check).collect()
}

/// Opens the files of weights and finds their tensors.
///
/// # Errors
///
/// If a file is missing or damaged.
fn find(folder: &Path) -> Result<Found> {
    let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
    let open = |name: &str| {
        let path = folder.join(name);
        match checked(folder, name, u64::MAX) {
            Ok(path) => TensorFile::open(path),
            Err(why) => Err(Error::Environment(format!("{}: {why}", path.display()))),
        }
    };
    if single.symlink_metadata().is_ok() {
        let file = open(SINGLE)?;
        let files = file.names().into_iter().map(|name| (name, file.clone())).collect();
        return Ok(Found { list: single, files, split: None });
    }
    let expected = format!("{SINGLE} or {INDEX}");
    let text = checked(folder, INDEX, LARGEST_FILE)
        .and_then(|path| read_regular(&path, LARGEST_FILE))
        .map_err(|why| unexpected(folder, "", expected, why))?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|why| unexpected(&index, "", "the files of all tensors", why))?;
    let (mut opened, mut files) = (BTreeMap::<&str, TensorFile>::new(), BTreeMap::new());
    let mut largest = 0;
    for (name, file) in &weight_map {
        if Path::new(file).file_name() != Some(file.as_ref()) {
            return Err(unexpected(&index, name, "the name of a file", format!("{file:?}")));
        }
        if !opened.contains_key(file.as_str()) {
            opened.insert(file, open(file)?);
            let path = folder.join(file);
            largest = largest.max(path.metadata().map_or(0, |found| found.len()));
        }
        files.insert(name.clone(), opened[file.as_str()].clone());
    }
    Ok(Found { list: index, files, split: Some(largest) })
}

/// True if two matrices have the same elements. Reads both, up to the first block that differs.
fn are_equal(a: &Stored, b: &Stored) -> Result<bool> {
    if a.aval != b.aval {
        return Ok(false);
    }
    let [rows, columns] = *a.aval.shape() else { return Ok(false) };
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let step = (BLOCK / columns.max(1)).max(1);
    for row in (0..rows).step_by(step) {
        for column in (0..columns).step_by(BLOCK) {
            let block = [row..rows.min(row + step), column..columns.min(column + BLOCK)];
            let block = Region::new(block.to_vec());
            let bytes = block.elements() * a.aval.dtype().size();
            left.resize(bytes, 0);
            right.resize(bytes, 0);
            a.file.read(&a.name, &block, &mut left)?;
            b.file.read(&b.name, &block, &mut right)?;
            if left != right {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Start of the names in a file of a model with an output. A file without one may lack it.
const PREFIX: &str = "model.";

/// Adds a tensor of a file to those found, by its name in the model. Returns its name if the model
/// does not have it.
fn add(
    tensors: &mut BTreeMap<String, Stored>,
    name: String,
    file: &TensorFile,
    needed: &BTreeMap<String, ShapedArray>,
) -> Result<Option<String>> {
    if name.ends_with(IGNORED) {
        return Ok(None);
    }
    let names = [name.clone(), format!("{PREFIX}{name}")];
    let found = names.into_iter().find_map(|known| needed.get_key_value(&known));
    let Some((known, expected)) = found else { return Ok(Some(name)) };
    if tensors.contains_key(known) {
        let expected = "one tensor of this name, with or without `model.`";
        return Err(unexpected(file.path(), &name, expected, "two"));
    }
    let aval = file.aval(&name);
    // The file lacks the tensor, or its dtype is unknown. The message names both.
    let shape = expected.shape();
    let aval =
        aval.map_err(|why| Error::Environment(format!("{why}: expected {DTYPES} {shape:?}")))?;
    tensors.insert(known.clone(), Stored { file: file.clone(), name, aval });
    Ok(None)
}
