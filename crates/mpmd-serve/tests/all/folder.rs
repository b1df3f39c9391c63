//! Folders of models, and copies of them with a change.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The name of the embedding's weight.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Returns the path of the test folder `name`.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../mpmd-models/tests/folders")
        .join(name)
}

/// Copies the test folder `name` to a temporary folder.
pub(crate) fn copied(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(path(name))
        .unwrap()
        .map(|file| file.unwrap().path())
    {
        fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    folder
}

/// Copies a folder of a byte-level tokenizer, and lets its words begin with `▁`, as those of Llama
/// 2 do. The texts of such a tokenizer begin without their first blank.
pub(crate) fn with_low_lines(name: &str) -> TempDir {
    let folder = copied(name);
    let file = folder.path().join("tokenizer.json");
    let json = fs::read_to_string(&file).unwrap();
    let json = json
        .replace("\\u0120", "\u{2581}")
        .replace('\u{120}', "\u{2581}");
    let mut tokenizer: Value = serde_json::from_str(&json).unwrap();
    tokenizer["model"]["unk_token"] = "<s>".into();
    tokenizer["pre_tokenizer"] = json!({ "type": "Metaspace", "replacement": "\u{2581}",
        "prepend_scheme": "always", "split": true });
    tokenizer["decoder"] = json!({ "type": "Sequence", "decoders": [
        { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
        { "type": "ByteFallback" }, { "type": "Fuse" },
        { "type": "Strip", "content": " ", "start": 1, "stop": 0 }
    ] });
    fs::write(file, tokenizer.to_string()).unwrap();
    folder
}

/// The values of a tensor in a file of f32, which a test can change.
struct Values<'a> {
    /// Number of elements in a row.
    width: usize,
    bytes: &'a mut [[u8; 4]],
}

impl Values<'_> {
    fn set(&mut self, row: usize, column: usize, value: f32) {
        self.bytes[row * self.width + column] = value.to_le_bytes();
    }
}

/// Calls `change` with the values of the tensor `name` in the only weight file of a folder.
fn change(folder: &TempDir, name: &str, change: impl FnOnce(Values<'_>)) {
    let weights = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let index: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();

    let shape = index[name]["shape"].as_array().unwrap();
    let width = shape.last().unwrap().as_u64().unwrap() as usize;
    let [start, end] = [0, 1].map(|at| {
        let offset = &index[name]["data_offsets"][at];
        8 + header + offset.as_u64().unwrap() as usize
    });
    let bytes_of = bytes[start..end].as_chunks_mut().0;
    change(Values {
        width,
        bytes: bytes_of,
    });
    fs::write(weights, bytes).unwrap();
}

/// Copies a folder, and sets a value of the embedding to NaN.
pub(crate) fn with_nan(name: &str) -> TempDir {
    let folder = copied(name);
    change(&folder, EMBEDDING, |mut values| values.set(7, 3, f32::NAN));
    folder
}

/// Copies a folder, and changes its weights, all finite, so that the keys of one token overflow:
/// its embedding alone has a value in the column that the first norm makes very large.
pub(crate) fn with_overflowing_token(name: &str, token: u32) -> TempDir {
    let folder = copied(name);
    change(&folder, EMBEDDING, |mut values| {
        for row in 0..values.bytes.len() / values.width {
            values.set(row, 0, if row == token as usize { 1.0 } else { 0.0 });
        }
    });
    let norm = "model.layers.0.input_layernorm.weight";
    change(&folder, norm, |mut values| values.set(0, 0, f32::MAX));
    folder
}
