//! The folders, their expected results, and jobs that compute with them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use mpmd::aval::{DType, ShapedArray};
use mpmd::region::Region;
use mpmd::testing::Simulation;
use mpmd::topology::Mesh;
use mpmd::train::data::TextBytes;
use mpmd::train::tensors::{TensorFile, header};
use mpmd::{Program, Result};
use mpmd_models::{Folder, Tokens};
use serde::Deserialize;

/// The path of the test folders, from this crate and from the crate of the programs.
const FOLDERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../mpmd-models/tests/folders");

pub(crate) const ALL: [&str; 33] = [
    "plain",
    "grouped",
    "llama3",
    "bf16",
    "dynamic",
    "mistral",
    "mistral-bf16",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-window",
    "mixtral",
    "mixtral-window",
    "qwen2-moe",
    "qwen2-moe-sparse",
    "qwen3-moe",
    "qwen3-moe-sparse",
    "gemma2",
    "gemma2-bf16",
    "gemma3",
    "gemma3-old",
    "phi3",
    "phi3-window",
    "olmo2",
    "olmo2-wide",
    "granite",
    "granite-tied",
    "gpt2",
    "gpt2-hub",
    "neox",
    "neox-serial",
    "stablelm",
    "stablelm-parallel",
];

/// The results of `transformers` and `torch` for a folder.
#[derive(Deserialize)]
pub(crate) struct Expected {
    /// The first tokens of the text.
    pub(crate) tokens: Vec<u32>,
    pub(crate) all_tokens: usize,
    /// Logits of these tokens in f32, by position.
    pub(crate) logits: BTreeMap<usize, Vec<f32>>,
    /// Loss in nats per token, by number of tokens. The model is in the dtype of the weights.
    pub(crate) nats: BTreeMap<usize, f64>,
    pub(crate) nats_in_f32: BTreeMap<usize, f64>,
    /// A prompt from the start of the text. `greedy` has the tokens that follow it greedily.
    pub(crate) prompt: Vec<u32>,
    pub(crate) greedy: Vec<u32>,
    pub(crate) rate: f64,
    pub(crate) decay: f64,
    /// Training data: the tokens of each step, microbatch and row. The last token of a row is only
    /// a target.
    #[serde(skip)]
    pub(crate) windows: Vec<Vec<Vec<Vec<u32>>>>,
    pub(crate) losses: Vec<f64>,
    /// The losses of a training with LoRA: rank 2, factor 3, and first values `A[i] = 0.5 cos(i)`.
    pub(crate) lora_losses: Vec<f64>,
    /// The losses of a training in which half of the balancing loss of the experts is added. Empty
    /// for models without experts.
    #[serde(default)]
    pub(crate) balanced_losses: Vec<f64>,
}

pub(crate) fn path(name: &str) -> PathBuf {
    // A kit for a machine with a GPU has them beside the folder of this program.
    let program = std::env::current_exe().unwrap();
    let of_kit = program
        .ancestors()
        .nth(2)
        .map(|kit| kit.join("folders").join(name));
    of_kit
        .filter(|folder| folder.is_dir())
        .unwrap_or_else(|| Path::new(FOLDERS).join(name))
}

pub(crate) fn text() -> PathBuf {
    path("text.txt")
}

pub(crate) fn expected(name: &str) -> Expected {
    let read = |file: PathBuf| fs::read_to_string(file).unwrap();
    let windows = serde_json::from_str(&read(path("windows.json"))).unwrap();
    let expected = serde_json::from_str(&read(path(name).join("expected.json"))).unwrap();
    Expected {
        windows,
        ..expected
    }
}

pub(crate) fn open(name: &str) -> Folder {
    Folder::open(path(name)).unwrap()
}

/// Returns the tokens of the test text.
pub(crate) fn tokens(folder: &Folder) -> Tokens {
    Tokens::of(&TextBytes::of(&[text()]).unwrap(), folder).unwrap()
}

/// Runs a program as `processes` processes with one device for each stage. Returns the value of the
/// process that returned one.
pub(crate) fn simulate<T: Send>(
    processes: usize,
    stages: usize,
    program: impl Fn(&mut Program, &[Mesh]) -> Result<Option<T>> + Sync,
) -> T {
    run(processes, stages, |p| {
        let meshes = p.mesh(&[("stage", stages)])?.split("stage")?;
        program(p, &meshes)
    })
}

/// Runs a program as `processes` processes with `devices` devices in all. Returns the value of the
/// process that returned one.
pub(crate) fn run<T: Send>(
    processes: usize,
    devices: usize,
    program: impl Fn(&mut Program) -> Result<Option<T>> + Sync,
) -> T {
    let results = Simulation::new(processes, devices).run(program);
    let values = results.into_iter().filter_map(|result| result.unwrap());
    values.last().expect("one process returns a value")
}

/// A tensor of a file: its name, its shape and dtype, and its bytes.
pub(crate) type Tensor = (String, ShapedArray, Vec<u8>);

/// Returns the tensors of a file.
pub(crate) fn read(file: &Path) -> Vec<Tensor> {
    let file = TensorFile::open(file).unwrap();
    let one = |name: String| {
        let aval = file.aval(&name).unwrap();
        let mut bytes = vec![0; aval.bytes()];
        file.read(&name, &Region::full(aval.shape()), &mut bytes)
            .unwrap();
        (name, aval, bytes)
    };
    file.names().into_iter().map(one).collect()
}

/// Returns the tensors of all files of a folder, by name.
pub(crate) fn read_all(folder: &Path) -> BTreeMap<String, (ShapedArray, Vec<u8>)> {
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let files = files.filter(|file| file.extension().is_some_and(|end| end == "safetensors"));
    files
        .flat_map(|file| read(&file))
        .map(|(name, aval, bytes)| (name, (aval, bytes)))
        .collect()
}

/// Copies the test folder `name` to a temporary folder.
pub(crate) fn copy(name: &str) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(path(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    to
}

/// Rewrites the only weight file of a folder with tensors changed by `change`.
pub(crate) fn change(folder: &Path, change: impl FnOnce(&mut Vec<Tensor>)) {
    let file = folder.join("model.safetensors");
    let mut tensors = read(&file);
    change(&mut tensors);
    let avals: Vec<_> = tensors
        .iter()
        .map(|(name, aval, _)| (name.clone(), aval.clone()))
        .collect();
    let (mut bytes, _) = header(&avals, &BTreeMap::new()).unwrap();
    tensors.iter().for_each(|(.., values)| bytes.extend(values));
    fs::write(file, bytes).unwrap();
}

/// Changes the config of a folder.
pub(crate) fn change_config(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let file = folder.join("config.json");
    let mut config = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut config);
    fs::write(&file, config.to_string()).unwrap();
}

/// Returns a tensor of zeros.
pub(crate) fn zeros(name: &str, shape: &[usize], dtype: DType) -> Tensor {
    let aval = ShapedArray::new(shape, dtype);
    let bytes = vec![0; aval.bytes()];
    (name.to_owned(), aval, bytes)
}
