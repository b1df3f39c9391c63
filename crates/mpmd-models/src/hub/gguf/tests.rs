//! Files that llama.cpp's converter has made are the folders that they were made from.
//! `tests/make_gguf.py` makes them again.

use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use mpmd::aval::DType;
use mpmd::region::Region;
use mpmd_gguf::BlockType;
use serde_json::{Map, Value, json};

use super::PackedTensor;
use crate::hub::folder::Folder;
use crate::hub::stored_tensor::ValueOrigin;

/// A file, the folder that it was made from, and keys of the folder's config that files cannot
/// have, with the values that replace them.
struct Made {
    file: &'static str,
    folder: &'static str,
    lost: Value,
}

/// All files.
fn all() -> Vec<Made> {
    let made = |file, folder, lost| Made { file, folder, lost };
    vec![
        made("plain-q8_0", "plain", json!({})),
        made("llama3-bf16", "llama3", json!({})),
        made("mistral-f32", "mistral", json!({ "sliding_window": null })),
        made("mixtral-f16", "mixtral", json!({})),
        made("qwen2-f16", "qwen2", json!({})),
        made("qwen2-moe-f16", "qwen2-moe", json!({})),
        made("qwen3-bf16", "qwen3", json!({})),
        made("qwen3-moe-f16", "qwen3-moe", json!({})),
        made(
            "gemma2-f16",
            "gemma2",
            json!({ "query_pre_attn_scalar": 10 }),
        ),
        // The converter drops a row of the embedding that no token has.
        made(
            "gemma3-f16",
            "gemma3",
            json!({ "query_pre_attn_scalar": 10, "layer_types": null, "vocab_size": 322 }),
        ),
        made("phi3-f16", "phi3", json!({})),
        made("gpt2-f16", "gpt2", json!({})),
        made("neox-f16", "neox", json!({ "rotary_emb_base": 10_000 })),
        made("stablelm-f16", "stablelm", json!({})),
        made(
            "stablelm-parallel-f16",
            "stablelm-parallel",
            json!({ "rope_theta": 10_000 }),
        ),
        made("granite-f16", "granite", json!({})),
        made("olmo2-f16", "olmo2", json!({})),
    ]
}

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn open(file: &str) -> Folder {
    Folder::open(tests().join(format!("gguf/{file}.gguf"))).unwrap()
}

/// Returns the keys of the config that a folder would have if it had only what files have.
fn config_without(made: &Made) -> Map<String, Value> {
    let file = tests()
        .join("folders")
        .join(made.folder)
        .join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    for (key, value) in made.lost.as_object().unwrap() {
        config.insert(key.clone(), value.clone());
    }
    config
}

/// Reads a parameter.
fn read(folder: &Folder, name: &str, region: &Region) -> Vec<f32> {
    let mut values = vec![0.0; region.elements()];
    folder.read(name, region, &mut values).unwrap();
    values
}

/// Returns the first of the packed tensors that hold a parameter.
fn packed<'a>(folder: &'a Folder, param: &str) -> &'a PackedTensor {
    let (_, source) = folder.sources().find(|(name, _)| *name == param).unwrap();
    let name = &source.names()[0];
    match folder.origin(name) {
        Some(ValueOrigin::Packed(packed)) => packed,
        other => panic!("{param}: {other:?}"),
    }
}

#[test]
fn configs_are_those_of_the_folders() {
    for made in all() {
        let (_, expected) =
            crate::family::model_of(Path::new(made.folder), config_without(&made)).unwrap();
        assert_eq!(*open(made.file).config(), expected, "{}", made.file);
    }
}

#[test]
fn parameters_are_those_of_the_folders_in_the_types_of_the_files() {
    for made in all() {
        let file = open(made.file);
        let folder = Folder::open(tests().join("folders").join(made.folder)).unwrap();
        let mut seen = 0;
        for (name, aval) in file.params() {
            let region = Region::full(aval.shape());
            let found = read(&file, name, &region);
            let expected = read(&folder, name, &region);
            let packed = packed(&file, name);
            let width = packed.elements as usize / packed.rows.max(1);
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let message = || format!("{}: {name}[{at}]: {found} {expected}", made.file);
                match packed.block_type {
                    BlockType::F32 if packed.shift == 0.0 => assert_eq!(found, expected),
                    BlockType::F32 => assert_eq!(*found, (expected + 1.0) - 1.0, "{}", message()),
                    BlockType::F16 => {
                        assert_eq!(*found, f16::from_f32(*expected).to_f32(), "{}", message());
                    }
                    BlockType::BF16 => {
                        assert_eq!(*found, bf16::from_f32(*expected).to_f32(), "{}", message());
                    }
                    // Rounded to the 127th part of the largest value of a block.
                    _ => {
                        let largest = expected.abs().max(1.0);
                        assert!(
                            width > 0 && (found - expected).abs() < largest / 100.0,
                            "{}",
                            message()
                        );
                    }
                }
                seen += 1;
            }
        }
        assert!(seen > 10_000, "{}: {seen} values", made.file);
    }
}

#[test]
fn any_region_of_a_parameter_is_that_of_the_whole() {
    for made in all() {
        let file = open(made.file);
        for (name, aval) in file.params() {
            let whole = read(&file, name, &Region::full(aval.shape()));
            let inner = |size: usize| size / 3..size - size / 4;
            let region = Region::new(aval.shape().iter().map(|size| inner(*size)).collect());
            let found = read(&file, name, &region);
            let mut expected = Vec::new();
            let places = (0..whole.len()).filter(|place| {
                let mut place = *place;
                aval.shape().iter().rev().all(|size| {
                    let at = place % size;
                    place /= size;
                    inner(*size).contains(&at)
                })
            });
            expected.extend(places.map(|place| whole[place]));
            assert_eq!(found, expected, "{}: {name}", made.file);
        }
    }
}

#[test]
fn dtypes_are_those_of_the_files_and_f32_for_packed_tensors() {
    for (file, dtype) in [
        ("plain-q8_0", DType::F32),
        ("llama3-bf16", DType::Bf16),
        ("mixtral-f16", DType::F16),
    ] {
        let file = open(file);
        let (_, source) = file
            .sources()
            .find(|(name, _)| name.ends_with("layers.0.self_attn.q_proj.weight"))
            .unwrap();
        assert_eq!(file.dtype(source), dtype);
    }
}

#[test]
fn reading_counts_the_bytes_of_the_file() {
    let file = open("plain-q8_0");
    let rows = Region::new(vec![0..16, 0..32]);
    read(&file, "model.layers.1.self_attn.q_proj.weight", &rows);
    // 32 elements to a block of 34 bytes.
    assert_eq!(file.bytes_read(), 16 * 34);
}
