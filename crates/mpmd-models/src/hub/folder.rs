//! A model's folder as model hubs lay it out: its config, and its weights in one or several
//! safetensors files. A GGUF file is read as such a folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mpmd::aval::{DType, ShapedArray};
use mpmd::random::Key;
use mpmd::region::Region;
use mpmd::sharding::Sharding;
use mpmd::train::tensors::{TensorFile, read_json, read_regular};
use mpmd::{Error, Fact, MpmdArray, Program, Result};
use serde_json::{Map, Value};

use crate::config::{self, ModelConfig};
use crate::decoder::{EMBEDDING, OUTPUT, shapes_of};
use crate::error::unexpected;
use crate::family::{Family, ParameterSource, model_of, read_keys};
use crate::hub::adapter::Adapter;
use crate::hub::adapter_matrices::AdapterMatrices;
use crate::hub::content::{FolderContent, Known, fold};
pub(crate) use crate::hub::files::{CONFIG, GENERATION, TOKENIZER};
use crate::hub::files::{FolderTensors, LARGEST_FILE, checked, companions, find, with_hint};
use crate::hub::gguf::{GgufModel, NeededTensor};
use crate::hub::initial::{InitialSettings, InitialValues};
use crate::hub::stored_tensor::{
    DTYPES, ParameterReader, StoredTensor, TensorAdapter, ValueOrigin, are_equal,
};
use crate::rope::Rope;

/// A model on disk: a folder of a hub, or a GGUF file. Opening it reads and checks headers; values
/// are read later, region by region.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    family: &'static Family,
    config: ModelConfig,
    /// The keys of `config.json`, as they were when the folder was opened.
    keys: Arc<Map<String, Value>>,
    /// The names of the files that the folder has beside the weights.
    companions: Vec<&'static str>,
    /// The contents of these files, if they were made from the metadata of a GGUF file.
    made: Option<Arc<BTreeMap<&'static str, Vec<u8>>>>,
    /// The source of each parameter in the files, and its shape, by the parameter's name.
    sources: BTreeMap<String, (ParameterSource, ShapedArray)>,
    /// The stored tensors, by the names that `transformers` gives them.
    tensors: BTreeMap<String, StoredTensor>,
    /// The names of tensors in the files that the model does not use.
    unused: Vec<String>,
    /// The size of the largest weight file, in bytes. `None` if there is only one file.
    split: Option<u64>,
    read: Arc<AtomicU64>,
    known: Known,
    /// The adapter that is added to the weights.
    adapter: Option<Adapter>,
}

impl Folder {
    /// Reads the config and the headers of the weights, but no values. Checks that the folder has
    /// all tensors of the model, with the shapes of the config and a float dtype. If `path` is a
    /// file, it is a GGUF file, or one part of a model that is split into several.
    ///
    /// If the config ties the output to the embedding but the files have both with different
    /// values, the model is not tied.
    ///
    /// # Errors
    ///
    /// If a file is missing, damaged, too large, no regular file, or a pointer file of Git LFS. If
    /// a link leads out of the folder and its hub cache. If a tensor is missing, has another shape
    /// or dtype, or exists twice. If a GGUF file has a key or a tensor that is not known here and
    /// may change results. The message names the file, the tensor, the expected and the found.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let is_named_so = path.extension().is_some_and(|end| end == "gguf");
        if path.is_file() || (is_named_so && !path.is_dir()) {
            return Self::open_gguf(path);
        }
        let keys = keys_of(&path)?;
        let (family, mut config) = model_of(&path.join(CONFIG), keys.clone())?;
        let companions = companions(&path)?;
        let FolderTensors { list, files, split } = find(&path)?;
        let [table, output] =
            [EMBEDDING, OUTPUT].map(|name| family.source(&config, name, &[0]).name);
        let may_be_tied = config.tie_word_embeddings && files.contains_key(&output);
        config.tie_word_embeddings &= !may_be_tied;
        let sources = sources(&path, family, &config)?;
        let needed = needed(sources.values());
        let prefix = table.split_inclusive('.').next().unwrap_or_default();
        let mut tensors = BTreeMap::new();
        let mut unused = Vec::new();
        for (name, file) in files {
            let more = add(&mut tensors, name, prefix, &file, &needed)?;
            let is_ignored = |name: &String| family.ignored.iter().any(|end| name.ends_with(end));
            unused.extend(more.filter(|name| !is_ignored(name)));
        }
        for (name, shape) in &needed {
            let expected = format!("{DTYPES} {shape:?}");
            let Some(stored) = tensors.get(name) else {
                return Err(unexpected(&list, name, expected, "no such tensor"));
            };
            let is_float = matches!(stored.aval.dtype(), DType::F32 | DType::Bf16 | DType::F16);
            if !is_float || stored.aval.shape() != shape {
                let found = format!("{} {:?}", stored.aval.dtype(), stored.aval.shape());
                let file = stored.path().unwrap_or(&list);
                return Err(unexpected(file, name, expected, found));
            }
        }
        let mut folder = Self {
            path,
            family,
            config,
            keys: keys.into(),
            companions,
            made: None,
            sources,
            tensors,
            unused,
            split,
            read: Arc::default(),
            known: Known::default(),
            adapter: None,
        };
        if may_be_tied && are_equal(&folder.tensors[&table], &folder.tensors[&output])? {
            folder.config.tie_word_embeddings = true;
            folder.tensors.remove(&output);
            folder.sources.remove(OUTPUT);
        }
        Ok(folder)
    }

    /// Opens a GGUF file.
    fn open_gguf(path: PathBuf) -> Result<Self> {
        let GgufModel {
            config: keys,
            companions: made,
            tensors: weights,
        } = GgufModel::open(&path)?;
        let (family, config) = model_of(&path, keys.clone())?;
        let sources = sources(&path, family, &config)?;
        let shapes = needed(sources.values());
        let transposed = sources.values().filter(|(source, _)| source.is_transposed);
        let transposed: BTreeSet<String> =
            transposed.flat_map(|(source, _)| source.names()).collect();
        let needed = shapes.iter().map(|(name, shape)| NeededTensor {
            name,
            shape,
            is_transposed: transposed.contains(name),
        });
        Ok(Self {
            tensors: weights.find(&config, needed)?,
            path,
            family,
            config,
            keys: keys.into(),
            companions: made.keys().copied().collect(),
            made: Some(made.into()),
            sources,
            unused: Vec::new(),
            split: None,
            read: Arc::default(),
            known: Known::default(),
            adapter: None,
        })
    }

    /// Opens a folder with a config for a new model. Weights in the folder are not read. The first
    /// values are drawn by `seed`, on the processes that load them.
    ///
    /// # Errors
    ///
    /// If the config is missing or invalid, also in `initializer_range` or `dtype`. If
    /// [`Folder::open`] would refuse a file beside the weights.
    pub fn untrained(path: impl Into<PathBuf>, seed: u64) -> Result<Self> {
        let path = path.into();
        let keys = keys_of(&path)?;
        let (family, config) = model_of(&path.join(CONFIG), keys.clone())?;
        let companions = companions(&path)?;
        let sources = sources(&path, family, &config)?;
        let mut folder = Self {
            path,
            family,
            config,
            keys: keys.into(),
            companions,
            made: None,
            sources,
            tensors: BTreeMap::new(),
            unused: Vec::new(),
            split: None,
            read: Arc::default(),
            known: Known::default(),
            adapter: None,
        };
        let settings = InitialSettings::of(&folder.path.join(CONFIG), &folder.keys)?;
        let shapes = needed(folder.sources.values());
        for (param, (source, _)) in &folder.sources {
            for name in source.names() {
                let initial = InitialValues::of(&folder.config, settings, param, &name, seed);
                let aval = ShapedArray::new(&shapes[&name], settings.dtype);
                let stored = StoredTensor {
                    origin: ValueOrigin::New(initial),
                    name: name.clone(),
                    aval,
                    adapter: None,
                };
                folder.tensors.insert(name, stored);
            }
        }
        Ok(folder)
    }

    /// Adds an adapter to the model: the products of its matrices are added to the weights as these
    /// are read. Nothing is written.
    ///
    /// # Errors
    ///
    /// If the adapter has matrices beside a weight that the model lacks, or of other shapes. If the
    /// model has an adapter already.
    pub fn with_adapter(mut self, adapter: &Adapter) -> Result<Self> {
        if let Some(first) = &self.adapter {
            let found = format!("two, as {} was added before", first.path().display());
            return Err(unexpected(adapter.path(), "", "one adapter", found));
        }
        let sources = self.sources.values().flat_map(|(source, _)| {
            let names = source.names().into_iter();
            names.map(move |name| (name, source.is_transposed))
        });
        let sources: BTreeMap<String, bool> = sources.collect();
        for (name, matrices) in adapter.matrices() {
            let is_transposed = sources.get(name).copied().unwrap_or(false);
            self.check_adapter(adapter, name, matrices, is_transposed)?;
            if let Some(stored) = self.tensors.get_mut(name) {
                stored.adapter = Some(TensorAdapter {
                    matrices: matrices.clone(),
                    is_transposed: is_transposed && !stored.is_turned(),
                });
            }
        }
        self.adapter = Some(adapter.clone());
        Ok(self)
    }

    /// Returns an error if the model has no weight `name`, or one of another shape than the
    /// matrices of an adapter beside it.
    pub(crate) fn check_adapter(
        &self,
        adapter: &Adapter,
        name: &str,
        matrices: &AdapterMatrices,
        is_transposed: bool,
    ) -> Result<()> {
        let Some(stored) = self.tensors.get(name) else {
            return Err(adapter.unexpected(name, "a weight of the model beside it", "none"));
        };
        let mut shape = matrices.shape();
        if is_transposed {
            shape.reverse();
        }
        if stored.aval.shape() != shape {
            let expected = format!("matrices for a weight {:?}", stored.aval.shape());
            return Err(adapter.unexpected(name, expected, format!("{shape:?}")));
        }
        Ok(())
    }

    /// Returns the names of the files beside the weights, which are copied to a saved model.
    pub(crate) fn companions(&self) -> &[&'static str] {
        &self.companions
    }

    /// Reads a file other than weights. Returns an error if it has changed since the processes
    /// compared it.
    pub(crate) fn small(&self, name: &str) -> io::Result<Vec<u8>> {
        let bytes = self.current(name)?;
        self.check(name, &bytes).map(|()| bytes)
    }

    /// Returns an error if `bytes` differ from the file `name` that the processes compared. Without
    /// a comparison every content is accepted.
    pub(crate) fn check(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        match self.known.get() {
            Some(Ok(content)) => content.check_file(name, bytes),
            _ => Ok(()),
        }
    }

    /// Reads a file other than weights, even if it has changed since the processes compared it.
    pub(crate) fn current(&self, name: &str) -> io::Result<Vec<u8>> {
        if let Some(made) = &self.made {
            let found = made.get(name).cloned();
            return found.ok_or_else(|| io::Error::other(format!("no metadata for a {name}")));
        }
        read_regular(&checked(&self.path, name, LARGEST_FILE)?, LARGEST_FILE)
    }

    /// Reads and hashes the folder's content as it is now.
    fn present(&self) -> Result<FolderContent> {
        FolderContent::of(&self.tensors, |name| {
            let has_it = self.companions.contains(&name);
            let bytes = has_it.then(|| self.current(name)).transpose();
            bytes.map_err(|why| Error::Environment(format!("{}: {why}", self.file(name).display())))
        })
    }

    /// Returns the hashes of the folder's content. The first call reads the folder; later calls
    /// return the same hashes.
    pub(crate) fn content(&self) -> Result<&FolderContent> {
        self.known
            .get_or_init(|| self.present())
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Returns facts about the present content of the folder, for a comparison between processes.
    /// Reads samples of the tensors: some 16 MiB in a model of up to 4,096 tensors.
    pub fn facts(&self) -> Vec<Fact> {
        let content = self.present();
        _ = self.known.set(content.clone());
        match content {
            Ok(content) => {
                let mut facts = content.facts(|name| self.file(name), &self.tensors);
                facts.extend(self.adapter.as_ref().map(Adapter::fact));
                facts
            }
            Err(why) => vec![Fact::new("the model", format!("cannot be read: {why}"))],
        }
    }

    /// Returns an error if samples of a tensor have changed since the folder's content was first
    /// hashed.
    ///
    /// # Errors
    ///
    /// If a tensor has changed, with its file and name.
    pub(crate) fn check_weights(&self) -> Result<()> {
        let content = self.content()?;
        self.tensors
            .iter()
            .try_for_each(|(name, stored)| content.check_tensor(name, stored))
    }

    /// Returns the values of `generation_config.json`. Empty if the folder lacks this file.
    ///
    /// # Errors
    ///
    /// If the file is damaged.
    pub(crate) fn generation(&self) -> Result<Map<String, Value>> {
        if !self.companions.contains(&GENERATION) {
            return Ok(Map::new());
        }
        let failed = |why: &dyn Display| {
            unexpected(&self.file(GENERATION), "", "settings of generation", why)
        };
        let bytes = self.small(GENERATION).map_err(|why| failed(&why))?;
        read_json(&bytes).map_err(|why| failed(&why))
    }

    /// Returns the tokens that end a text: from `generation_config.json`, or else from
    /// `config.json`. Empty if neither has any.
    ///
    /// # Errors
    ///
    /// If a file is damaged, or its end tokens are not numbers of tokens.
    pub fn end_tokens(&self) -> Result<Vec<u32>> {
        let own = match self.generation_ends()? {
            Some(own) => Some(own),
            None => self.config_ends()?,
        };
        Ok(own.unwrap_or_default())
    }

    /// Returns the end tokens in `generation_config.json`. `None` if it has none.
    ///
    /// # Errors
    ///
    /// As for [`end_tokens`](Self::end_tokens).
    pub(crate) fn generation_ends(&self) -> Result<Option<Vec<u32>>> {
        ends_of(&self.file(GENERATION), &self.generation()?)
    }

    /// Returns the end tokens in `config.json`. `None` if it has none.
    ///
    /// # Errors
    ///
    /// As for [`end_tokens`](Self::end_tokens).
    pub(crate) fn config_ends(&self) -> Result<Option<Vec<u32>>> {
        ends_of(&self.file(CONFIG), &self.keys)
    }

    /// Returns the keys of `config.json`, as they were when the folder was opened.
    pub(crate) fn keys(&self) -> &Map<String, Value> {
        &self.keys
    }

    /// Returns the path of the folder, or of the GGUF file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of a file of the folder, for messages. That of the GGUF file, if the file's
    /// content was made from its metadata.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        match self.made {
            Some(_) => self.path.clone(),
            None => self.path.join(name),
        }
    }

    /// Returns the model's config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the stored tensors, by the names that `transformers` gives them, with their shapes
    /// and dtypes.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &ShapedArray)> {
        self.tensors
            .iter()
            .map(|(name, stored)| (name.as_str(), &stored.aval))
    }

    /// Returns the source of the values of a stored tensor.
    #[cfg(test)]
    pub(crate) fn origin(&self, tensor: &str) -> Option<&ValueOrigin> {
        self.tensors.get(tensor).map(|stored| &stored.origin)
    }

    /// Returns the family's name for a config key.
    pub(crate) fn key(&self, key: &'static str) -> &'static str {
        self.family.key(key)
    }

    /// Returns the dtype in which a parameter is stored: f32 if its tensors have different dtypes.
    pub(crate) fn dtype(&self, source: &ParameterSource) -> DType {
        let names = source.names();
        let mut all = names.iter().map(|name| self.tensors[name].aval.dtype());
        let first = all.next().unwrap_or(DType::F32);
        if all.all(|dtype| dtype == first) {
            first
        } else {
            DType::F32
        }
    }

    /// Returns the name of each parameter, and its source in the files.
    pub(crate) fn sources(&self) -> impl Iterator<Item = (&str, &ParameterSource)> {
        self.sources
            .iter()
            .map(|(name, (source, _))| (name.as_str(), source))
    }

    /// Returns the name of each parameter, and its shape.
    pub(crate) fn params(&self) -> impl Iterator<Item = (&str, &ShapedArray)> {
        self.sources
            .iter()
            .map(|(name, (_, aval))| (name.as_str(), aval))
    }

    /// Returns the number of bytes that the saved model will take, in the dtypes of the files.
    pub fn saved_bytes(&self) -> u64 {
        let bytes = |(source, aval): &(ParameterSource, ShapedArray)| {
            (aval.elements() * self.dtype(source).size()) as u64
        };
        self.sources.values().map(bytes).sum()
    }

    /// Checks that the model can be trained.
    ///
    /// # Errors
    ///
    /// If the config has a dropout probability that is not zero: the stages have no dropout.
    pub fn check_training(&self) -> Result<()> {
        match self.config.dropout {
            None => Ok(()),
            Some((key, share)) => Err(unexpected(&self.file(CONFIG), key, 0, share)),
        }
    }

    /// Returns the names of tensors in the files that the model does not use.
    pub(crate) fn unused(&self) -> &[String] {
        &self.unused
    }

    /// Returns the size of the largest weight file, in bytes. `None` if there is only one file.
    pub fn split(&self) -> Option<u64> {
        self.split
    }

    /// Returns the number of bytes of tensor values that this process has read through this folder
    /// and its clones. Does not count headers.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Issues a comparison between processes of the config, of the tensors' names, shapes and
    /// dtypes, and of samples of their values. Does not wait for other processes.
    ///
    /// # Errors
    ///
    /// As for [`Program::assert_same`].
    pub fn compare(&self, p: &mut Program) -> Result<()> {
        let count = self.tensors.len();
        let key = fold(self.form(), format!("{:?}", self.config).as_bytes());
        let values = match self.content() {
            Ok(content) => format!("values with hash {:016x}", content.of_weights()),
            Err(why) => format!("values that cannot be read: {why}"),
        };
        p.assert_same(format!(
            "a model of {count} tensors, with hash {:016x}, {values}",
            key.0
        ))
    }

    /// Returns a hash of the names, shapes and dtypes of the tensors, and of the adapter.
    fn form(&self) -> Key {
        let form = self.tensors.iter().fold(Key(0), |key, (name, stored)| {
            fold(key, format!("{name} {}", stored.aval).as_bytes())
        });
        let adapter = self.adapter.as_ref();
        adapter.map_or(form, |adapter| form.fold_in(adapter.hash()))
    }

    /// Returns (name, value) pairs by which a checkpoint recognises the model. They are the
    /// settings that change results without changing a shape, and a hash of the weights.
    ///
    /// # Errors
    ///
    /// If a file cannot be read.
    pub fn settings(&self) -> Result<Vec<(&'static str, String)>> {
        let config = &self.config;
        let rope = config.ropes.first();
        let rope = |f: fn(&Rope) -> String| rope.map_or_else(|| "none".to_owned(), f);
        let mut settings = vec![
            (
                "num_attention_heads",
                config.num_attention_heads.to_string(),
            ),
            ("head_dim", config.head_dim.to_string()),
            ("rms_norm_eps", config.norm_eps.to_string()),
            ("rope_theta", rope(|rope| rope.theta.to_string())),
            ("rope_type", rope(|rope| rope.scaling.to_string())),
            ("weights", format!("with hash {:016x}", self.fingerprint()?)),
        ];
        // The names and shapes of the parameters, and the settings above, show all of Llama's.
        if config.family != "llama" {
            // These change no result.
            let rest = ModelConfig {
                max_position_embeddings: 0,
                dropout: None,
                ..config.clone()
            };
            let hash = fold(Key(0), format!("{rest:?}").as_bytes()).0;
            settings.push(("config", format!("with hash {hash:016x}")));
        }
        Ok(settings)
    }

    /// Returns a hash of the tensors' names, shapes and dtypes, and of samples of their values or
    /// the seeds of new ones.
    ///
    /// # Errors
    ///
    /// If a file cannot be read.
    fn fingerprint(&self) -> Result<u64> {
        let new = self
            .tensors
            .values()
            .filter_map(|stored| match &stored.origin {
                ValueOrigin::New(initial) => Some(initial.key.0),
                ValueOrigin::File(_) | ValueOrigin::Packed(_) => None,
            });
        let key = self.form().fold_in(self.content()?.of_weights());
        Ok(new.fold(key, Key::fold_in).0)
    }

    /// Reads a region of a parameter as f32, row-major. If the model is tied, its output is read
    /// from the embedding.
    ///
    /// # Errors
    ///
    /// If the model has no such parameter, the file cannot be read, or a value is infinite or NaN.
    pub(crate) fn read(&self, name: &str, region: &Region, values: &mut [f32]) -> Result<()> {
        self.tied_reader(name)?.read(region, values)
    }

    /// Returns the reader of a parameter. If the model is tied, its output is read from the
    /// embedding.
    fn tied_reader(&self, name: &str) -> Result<ParameterReader> {
        let tied = name == OUTPUT && self.config.tie_word_embeddings;
        self.reader(if tied { EMBEDDING } else { name })
    }

    /// Returns the reader of a parameter.
    fn reader(&self, name: &str) -> Result<ParameterReader> {
        let Some((source, _)) = self.sources.get(name) else {
            return Err(unexpected(
                &self.path,
                name,
                "a parameter of the model",
                "another name",
            ));
        };
        let tensors = source
            .names()
            .iter()
            .map(|name| self.tensors[name].clone())
            .collect();
        Ok(ParameterReader {
            source: source.clone(),
            tensors,
            read: self.read.clone(),
        })
    }

    /// Issues the loading of a parameter as an f32 array on the devices of `sharding`. Each owner
    /// of a device reads only its own regions, and converts bf16 and f16.
    ///
    /// # Errors
    ///
    /// As for [`Program::array_from_fn`], and if the model has no such parameter. If the file
    /// cannot be read, or a value is infinite or NaN, the array fails instead.
    pub fn load(&self, p: &mut Program, name: &str, sharding: &Sharding) -> Result<MpmdArray> {
        let reader = self.reader(name)?;
        let aval = self.sources[name].1.clone();
        let known = self.known.clone();
        p.array_from_fn(aval, sharding, move |region, mut view| {
            reader.read_into(region, &mut view)?;
            // A file may have changed since the processes have compared it.
            let Some(Ok(content)) = known.get() else {
                return Ok(());
            };
            let names = reader.source.names();
            let mut tensors = names.iter().zip(&reader.tensors);
            tensors.try_for_each(|(name, stored)| content.check_tensor(name, stored))
        })
    }
}

/// Returns the end tokens in the settings of a file. `None` if they have none.
fn ends_of(file: &Path, settings: &Map<String, Value>) -> Result<Option<Vec<u32>>> {
    const KEY: &str = "eos_token_id";
    let found = match settings.get(KEY) {
        None | Some(Value::Null) => return Ok(None),
        Some(found) => found,
    };
    let tokens = match found {
        Value::Array(several) => several.iter().map(token).collect(),
        one => token(one).map(|one| vec![one]),
    };
    let expected = "the number of a token, or a list of numbers";
    let wrong = || unexpected(file, KEY, expected, found);
    tokens.map(Some).ok_or_else(wrong)
}

/// Returns a token of a JSON value. `None` if the value is no number of a token.
fn token(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// Checks and reads `config.json` of the folder `path`.
fn keys_of(path: &Path) -> Result<Map<String, Value>> {
    let file = path.join(CONFIG);
    checked(path, CONFIG, config::LARGEST_FILE)
        .map_err(|why| unexpected(&file, "", config::EXPECTED, with_hint(path, &why)))?;
    read_keys(&file)
}

/// Returns the source in the files and the shape of each parameter of a model.
fn sources(
    path: &Path,
    family: &Family,
    config: &ModelConfig,
) -> Result<BTreeMap<String, (ParameterSource, ShapedArray)>> {
    let shapes = shapes_of(config);
    let shapes = shapes
        .map_err(|why| unexpected(&path.join(CONFIG), "", "sizes of a model", why.to_string()))?;

    Ok(shapes
        .into_iter()
        .map(|(name, aval)| {
            let source = family.source(config, &name, aval.shape());
            (name, (source, aval))
        })
        .collect())
}

/// Returns the name and shape of each tensor in the files that the parameters come from.
fn needed<'a>(
    sources: impl Iterator<Item = &'a (ParameterSource, ShapedArray)>,
) -> BTreeMap<String, Vec<usize>> {
    let mut needed = BTreeMap::<String, Vec<usize>>::new();
    for (source, aval) in sources {
        let rows = source.rows.end();
        let mut shape = aval.shape()[usize::from(source.stacked.is_some())..].to_vec();
        let axis = usize::from(source.is_transposed);
        if source.is_transposed {
            shape.reverse();
        }
        shape[axis] = rows;
        for name in source.names() {
            // The parameters of a tensor differ in their rows alone.
            let whole = needed.entry(name).or_insert_with(|| shape.clone());
            whole[axis] = whole[axis].max(rows);
        }
    }
    needed
}

/// Adds a tensor of `file` to `tensors`, by the name that the model has for it. Returns the name if
/// the model does not use the tensor. Files of models saved without output may lack `prefix` in
/// names.
fn add(
    tensors: &mut BTreeMap<String, StoredTensor>,
    name: String,
    prefix: &str,
    file: &TensorFile,
    needed: &BTreeMap<String, Vec<usize>>,
) -> Result<Option<String>> {
    let names = [name.clone(), format!("{prefix}{name}")];
    let found = names
        .into_iter()
        .find_map(|known| needed.get_key_value(&known));
    let Some((known, shape)) = found else {
        return Ok(Some(name));
    };
    if tensors.contains_key(known) {
        let expected = format!("one tensor of this name, with or without `{prefix}`");
        return Err(unexpected(file.path(), &name, expected, "two"));
    }
    let aval = file.aval(&name);
    // The file lacks the tensor, or its dtype is unknown. The message names both.
    let aval =
        aval.map_err(|why| Error::Environment(format!("{why}: expected {DTYPES} {shape:?}")))?;
    tensors.insert(
        known.clone(),
        StoredTensor {
            origin: ValueOrigin::File(file.clone()),
            name,
            aval,
            adapter: None,
        },
    );
    Ok(None)
}
