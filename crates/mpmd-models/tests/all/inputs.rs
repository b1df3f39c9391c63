//! Bad folders: each gives one message with the file, the tensor or key, and both values.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use mpmd::Error;
use mpmd::aval::DType;
use mpmd_models::{Folder, Stages, tokenizer};
use serde_json::json;

use crate::folders::{change, change_config, copy, open, path, zeros};

const GATE: &str = "model.layers.1.mlp.gate_proj.weight";

/// Returns the error of opening a folder, without the folder's path.
fn refused(folder: &Path) -> String {
    without(Folder::open(folder).unwrap_err(), folder)
}

fn without(error: impl Display, folder: &Path) -> String {
    error
        .to_string()
        .replace(&format!("{}/", folder.display()), "")
}

/// Returns the error of opening a folder whose tensors were changed.
fn refused_with(
    name: &str,
    change_tensors: impl FnOnce(&mut Vec<crate::folders::Tensor>),
) -> String {
    let folder = copy(name);
    change(folder.path(), change_tensors);
    refused(folder.path())
}

#[test]
fn wrong_tensors_are_refused_by_name() {
    let missing = refused_with("plain", |tensors| tensors.retain(|(name, ..)| name != GATE));
    assert_eq!(
        missing,
        format!(
            "model.safetensors: {GATE}: expected f32, bf16 or f16 [64, 32], found no such tensor"
        )
    );
    let replaced = |with: crate::folders::Tensor| {
        refused_with("plain", |tensors| {
            tensors.retain(|(name, ..)| name != GATE);
            tensors.push(with);
        })
    };
    let expected = format!("model.safetensors: {GATE}: expected f32, bf16 or f16 [64, 32], found");
    assert_eq!(
        replaced(zeros(GATE, &[64, 33], DType::F32)),
        format!("{expected} f32 [64, 33]")
    );
    assert_eq!(
        replaced(zeros(GATE, &[64, 32], DType::F64)),
        format!("{expected} f64 [64, 32]")
    );
    let twice = refused_with("plain", |tensors| {
        tensors.push(zeros(
            GATE.trim_start_matches("model."),
            &[64, 32],
            DType::F32,
        ));
    });
    let said = "expected one tensor of this name, with or without `model.`, found two";
    assert!(twice.ends_with(said), "{twice}");
    let folder = copy("plain");
    change(folder.path(), |tensors| {
        tensors.push(zeros(
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            &[4],
            DType::F32,
        ));
    });
    Folder::open(folder.path()).expect("an old table is ignored");
}

#[test]
fn tensors_of_other_forms_are_refused_by_their_own_names() {
    for (name, tensor, shape) in [
        ("gpt2", "transformer.h.1.attn.c_attn.weight", "[15, 45]"),
        ("gpt2", "transformer.h.1.mlp.c_proj.bias", "[15]"),
        (
            "phi3",
            "model.layers.0.self_attn.qkv_proj.weight",
            "[40, 24]",
        ),
        ("phi3", "model.layers.3.mlp.gate_up_proj.weight", "[56, 24]"),
        (
            "neox",
            "gpt_neox.layers.2.attention.query_key_value.bias",
            "[54]",
        ),
        ("neox", "embed_out.weight", "[323, 18]"),
        (
            "mixtral",
            "model.layers.2.block_sparse_moe.experts.3.w2.weight",
            "[16, 12]",
        ),
        (
            "qwen3-moe",
            "model.layers.0.mlp.experts.5.gate_proj.weight",
            "[8, 16]",
        ),
    ] {
        let expected = format!("model.safetensors: {tensor}: expected f32, bf16 or f16 {shape}");
        let is_it = |one: &crate::folders::Tensor| one.0 == tensor;
        let said = refused_with(name, |tensors| tensors.retain(|one| !is_it(one)));
        assert_eq!(said, format!("{expected}, found no such tensor"));
        let said = refused_with(name, |tensors| {
            tensors.retain(|one| !is_it(one));
            tensors.push(zeros(tensor, &[7, 44], DType::F32));
        });
        assert_eq!(said, format!("{expected}, found f32 [7, 44]"));
    }
}

#[test]
fn wrong_files_are_refused_by_name() {
    let folder = copy("plain");
    let file = folder.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 5]).unwrap();
    let (found, all) = (bytes.len() - 5, bytes.len());
    assert_eq!(
        refused(folder.path()),
        format!("model.safetensors: cut off: it has {found} bytes of {all}")
    );
    fs::remove_file(&file).unwrap();
    let none = refused(folder.path());
    let expected = "expected model.safetensors or model.safetensors.index.json, found No such file";
    assert!(none.contains(expected), "{none}");
    fs::remove_file(folder.path().join("config.json")).unwrap();
    let none = refused(folder.path());
    let expected = "config.json: expected the config of a model, found No such file";
    assert!(none.starts_with(expected), "{none}");

    let folder = copy("grouped");
    let index = folder.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replace("model-00002", "../model-00002")).unwrap();
    let outside = refused(folder.path());
    assert!(
        outside.contains("expected the name of a file, found \"../model-00002"),
        "{outside}"
    );
    let line = text.lines().find(|line| line.contains(GATE)).unwrap();
    fs::write(&index, text.replace(line, "")).unwrap();
    assert_eq!(
        refused(folder.path()),
        format!(
            "model.safetensors.index.json: {GATE}: expected f32, bf16 or f16 [64, 48], found no \
             such tensor"
        )
    );
    let elsewhere = line.replace("model-00003", "model-00001");
    fs::write(&index, text.replace(line, &elsewhere)).unwrap();
    assert_eq!(
        refused(folder.path()),
        format!(
            "model-00001-of-00007.safetensors: {GATE}: there is no such array: expected f32, bf16 \
             or f16 [64, 48]"
        )
    );
    fs::write(&index, &text).unwrap();
    fs::remove_file(folder.path().join("model-00003-of-00007.safetensors")).unwrap();
    let missing = refused(folder.path());
    assert!(
        missing.starts_with("model-00003-of-00007.safetensors: No such file"),
        "{missing}"
    );
}

#[test]
fn wrong_tokenizers_are_refused_by_name() {
    let folder = copy("plain");
    let error = |folder: &Path| {
        without(
            tokenizer(&Folder::open(folder).unwrap()).unwrap_err(),
            folder,
        )
    };
    let file = folder.path().join("tokenizer.json");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, &text[..100]).unwrap();
    let broken = error(folder.path());
    assert!(
        broken.starts_with("tokenizer.json: expected a tokenizer, found ")
            && broken.contains("EOF while parsing a value at line 7"),
        "{broken}"
    );
    fs::remove_file(&file).unwrap();
    let missing = error(folder.path());
    assert!(
        missing.starts_with("tokenizer.json: expected a tokenizer, found No such"),
        "{missing}"
    );
}

/// Returns the error of `open` for a folder in whose file `name` the object begins with the pair
/// `more`.
fn refused_with_pair(
    folder: &Path,
    name: &str,
    more: &str,
    open: impl Fn(&Folder) -> Result<(), Error>,
) -> String {
    let file = folder.join(name);
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen('{', &format!("{{{more}, "), 1)).unwrap();
    let error = Folder::open(folder).and_then(|folder| open(&folder));
    fs::write(&file, text).unwrap();
    without(error.unwrap_err(), folder)
}

#[test]
fn repeated_keys_in_files_are_refused_by_name() {
    let plain = copy("plain");
    let plain = plain.path();
    let twice = |name: &str, expected: &str, key: &str| {
        format!("{name}: expected {expected}, found the key {key:?} twice in an object")
    };

    let said = refused_with_pair(plain, "config.json", "\"hidden_size\": 64", |_| Ok(()));
    let expected = twice("config.json", "the config of a model", "hidden_size");
    assert!(said.starts_with(&expected), "{said}");

    let name = "generation_config.json";
    let said = refused_with_pair(plain, name, "\"top_k\": 1, \"top_k\": 2", |folder| {
        folder.end_tokens().map(drop)
    });
    let expected = twice(name, "settings of generation", "top_k");
    assert!(said.starts_with(&expected), "{said}");

    let name = "tokenizer.json";
    let said = refused_with_pair(plain, name, "\"model\": {}", |folder| {
        tokenizer(folder).map(drop)
    });
    let expected = twice(name, "a tokenizer", "model");
    assert!(said.starts_with(&expected), "{said}");

    let grouped = copy("grouped");
    let name = "model.safetensors.index.json";
    let said = refused_with_pair(grouped.path(), name, "\"weight_map\": {}", |_| Ok(()));
    let expected = twice(name, "the files of all tensors", "weight_map");
    assert!(said.starts_with(&expected), "{said}");
}

#[test]
fn sequences_beyond_the_positions_are_refused() {
    let folder = open("plain");
    Stages::new(&folder, 1, 1024).unwrap();
    assert_eq!(
        without(Stages::new(&folder, 1, 1025).unwrap_err(), &path("plain")),
        "config.json: max_position_embeddings: expected at least 1025, the tokens of a sequence, \
         found 1024"
    );
    // A linear scaling comes on top, as in models of longer contexts.
    let scaled = copy("plain");
    change_config(scaled.path(), |config| {
        config["rope_parameters"] = json!({ "rope_type": "linear", "factor": 2.5 });
    });
    let folder = Folder::open(scaled.path()).unwrap();
    Stages::new(&folder, 1, 2560).unwrap();
    assert_eq!(
        without(Stages::new(&folder, 1, 2561).unwrap_err(), scaled.path()),
        "config.json: max_position_embeddings: expected at least 2561, the tokens of a sequence, \
         found 1024, scaled to 2560"
    );
}

#[test]
fn more_stages_than_layers_are_refused() {
    let error = Stages::new(&open("plain"), 5, 1).unwrap_err();
    assert_eq!(
        without(error, &path("plain")),
        "config.json: num_hidden_layers: expected at least 5, the number of stages, found 4"
    );
}
