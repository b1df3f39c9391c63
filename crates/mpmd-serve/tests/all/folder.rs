//! Folders of models, and copies of them with a change.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

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

/// Copies a folder, and sets a token's row of the embedding to NaN.
pub(crate) fn with_poisoned_token(name: &str, token: u32) -> TempDir {
    let folder = copied(name);
    let weights = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let index: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();

    let table = &index["model.embed_tokens.weight"];
    let width = table["shape"][1].as_u64().unwrap() as usize;
    let start = 8 + header + table["data_offsets"][0].as_u64().unwrap() as usize;
    let row = &mut bytes[start + token as usize * width * 4..][..width * 4];
    row.as_chunks_mut()
        .0
        .iter_mut()
        .for_each(|value| *value = f32::NAN.to_le_bytes());
    fs::write(weights, bytes).unwrap();
    folder
}
