//! GGUF files as models: over any number of stages and devices they give the tokens of the folders
//! that they were made from.
//!
//! `make_gguf.py` makes the files again, by llama.cpp's converter.

use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use mpmd::sharding::Sharding;
use mpmd::testing::Simulation;
use mpmd_gguf::{GgufFile, GgufWriter};
use mpmd_models::{Adapter, Folder, Sampling, Stages, save};
use serde_json::{Value, json};

use crate::divided::divided;
use crate::folders::{Tensor, change, change_config, copy, expected, simulate};
use crate::gguf_change::blocks_of;

/// Number of tokens that are generated.
const TOKENS: usize = 24;

/// The files, the folders that they were made from, and keys of configs that files cannot have.
fn made() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("mistral-f32", "mistral", json!({ "sliding_window": null })),
        ("llama3-bf16", "llama3", json!({})),
        ("mixtral-f16", "mixtral", json!({})),
        ("qwen2-f16", "qwen2", json!({})),
        ("qwen2-moe-f16", "qwen2-moe", json!({})),
        ("qwen3-bf16", "qwen3", json!({})),
        (
            "gemma2-f16",
            "gemma2",
            json!({ "query_pre_attn_scalar": 10 }),
        ),
        ("phi3-f16", "phi3", json!({})),
        ("gpt2-f16", "gpt2", json!({})),
        ("neox-f16", "neox", json!({ "rotary_emb_base": 10_000 })),
        ("stablelm-f16", "stablelm", json!({})),
        (
            "stablelm-parallel-f16",
            "stablelm-parallel",
            json!({ "rope_theta": 10_000 }),
        ),
        ("granite-f16", "granite", json!({})),
        ("olmo2-f16", "olmo2", json!({})),
    ]
}

pub(crate) fn path(file: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    tests.join("gguf").join(format!("{file}.gguf"))
}

pub(crate) fn open(file: &str) -> Folder {
    Folder::open(path(file)).unwrap()
}

/// Rounds a tensor of a folder as the converter does: matrices that are no routers.
fn round(tensor: &mut Tensor, file: &str) {
    let (name, aval, bytes) = tensor;
    let kept = ["mlp.gate.", "moe.gate.", "shared_expert_gate.", "wpe."];
    if aval.shape().len() != 2 || kept.iter().any(|part| name.contains(part)) {
        return;
    }
    let values = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|four| f32::from_le_bytes(*four));
    let rounded = values.map(|value| match file.rsplit_once('-') {
        Some((_, "f16")) => f16::from_f32(value).to_f32(),
        Some((_, "bf16")) => bf16::from_f32(value).to_f32(),
        _ => value,
    });
    *bytes = rounded.flat_map(f32::to_le_bytes).collect();
}

/// Returns a folder with the values of a file, made from the folder that the file was made from.
fn folder_of(file: &str, folder: &str, lost: &Value) -> tempfile::TempDir {
    let place = copy(folder);
    change(place.path(), |tensors| {
        tensors.iter_mut().for_each(|tensor| round(tensor, file));
    });
    change_config(place.path(), |config| {
        for (key, value) in lost.as_object().unwrap() {
            config[key] = value.clone();
        }
    });
    place
}

/// Generates tokens greedily, over stages of one device each.
pub(crate) fn generated(
    folder: &Folder,
    prompt: &[u32],
    (processes, stages): (usize, usize),
) -> Vec<u32> {
    simulate(processes, stages, |p, meshes| {
        let stages = Stages::new(folder, stages, prompt.len() + TOKENS)?;
        let mut generator = stages.generator(p, meshes, false)?;
        let tokens = generator.generate(p, prompt, &Sampling::default(), TOKENS, |_, _| Ok(false));
        tokens.map(Some)
    })
}

#[test]
fn tokens_are_those_of_the_folders_at_each_number_of_stages() {
    for (file, folder, lost) in made() {
        let prompt = expected(folder).prompt;
        let place = folder_of(file, folder, &lost);
        let right = generated(&Folder::open(place.path()).unwrap(), &prompt, (1, 1));
        for job in [(1, 1), (2, 2), (3, 3)] {
            assert_eq!(
                generated(&open(file), &prompt, job),
                right,
                "{file} {job:?}"
            );
        }
    }
}

#[test]
fn tokens_are_those_of_the_folders_over_two_devices() {
    let mut tried = 0;
    for (file, folder, lost) in made() {
        let opened = open(file);
        let model = Stages::new(&opened, 1, 64).unwrap().tensor_parallel(&[2]);
        let Ok(model) = model else { continue };
        let prompt = expected(folder).prompt;
        let place = folder_of(file, folder, &lost);
        let right = generated(&Folder::open(place.path()).unwrap(), &prompt, (1, 1));
        let found = divided(&model, &[1, 1], |p, meshes| {
            let mut generator = model.generator(p, meshes, false)?;
            let sampling = Sampling::default();
            let tokens = generator.generate(p, &prompt, &sampling, TOKENS, |_, _| Ok(false));
            tokens.map(Some)
        });
        assert_eq!(found, right, "{file}");
        tried += 1;
    }
    assert!(tried >= 4, "{tried} files");
}

#[test]
fn adapters_of_peft_are_added_to_files() {
    let adapters = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/adapters");
    for (file, name) in [("gpt2-f16", "gpt2"), ("phi3-f16", "phi3")] {
        let adapter = Adapter::open(adapters.join(name)).unwrap();
        let prompt = expected(name).prompt;
        let place = folder_of(file, name, &json!({}));
        let with_adapter = |folder: Folder| {
            let folder = folder.with_adapter(&adapter).unwrap();
            generated(&folder, &prompt, (2, 2))
        };
        let right = with_adapter(Folder::open(place.path()).unwrap());
        assert_eq!(with_adapter(open(file)), right, "{file}");
        assert_ne!(generated(&open(file), &prompt, (2, 2)), right, "{file}");
    }
}

#[test]
fn packed_weights_give_the_tokens_of_the_unpacked() {
    let file = open("plain-q8_0");
    let prompt = expected("plain").prompt;
    let right = generated(&file, &prompt, (1, 1));
    assert_eq!(generated(&file, &prompt, (3, 3)), right);
    let saved = saved(&file);
    assert_eq!(
        generated(&Folder::open(saved.path()).unwrap(), &prompt, (2, 2)),
        right
    );
}

/// Saves a model as a folder.
fn saved(folder: &Folder) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    simulate(1, 1, |p, meshes| {
        let pipeline = Stages::new(folder, 1, 1)?.training(p, meshes)?;
        let params = pipeline.params(0).into_iter().collect();
        save(p, folder, &params, to.path()).map(Some)
    });
    to
}

#[test]
fn saved_model_is_a_folder_with_the_values_of_the_file() {
    for (name, folder, lost) in [
        ("mistral-f32", "mistral", json!({ "sliding_window": null })),
        ("gpt2-f16", "gpt2", json!({})),
        ("neox-f16", "neox", json!({ "rotary_emb_base": 10_000 })),
        ("mixtral-f16", "mixtral", json!({})),
    ] {
        let to = saved(&open(name));
        let from = folder_of(name, folder, &lost);
        let [found, right] = [&to, &from].map(|folder| Folder::open(folder.path()).unwrap());
        assert_eq!(found.config(), right.config(), "{name}");
        let shapes = |folder: &Folder| -> Vec<(String, Vec<usize>)> {
            let tensors = folder.tensors();
            tensors
                .map(|(name, aval)| (name.to_owned(), aval.shape().to_vec()))
                .collect()
        };
        assert_eq!(shapes(&found), shapes(&right), "{name}");
        let prompt = expected(folder).prompt;
        assert_eq!(
            generated(&found, &prompt, (1, 1)),
            generated(&right, &prompt, (1, 1)),
            "{name}"
        );
    }
}

#[test]
fn each_process_reads_only_the_bytes_of_its_stage() {
    for file in ["plain-q8_0", "mixtral-f16", "gpt2-f16", "mistral-f32"] {
        let opened = GgufFile::open(path(file)).unwrap();
        let results = Simulation::new(2, 2).run(|p| {
            // A file of its own for each process, as in real ones.
            let folder = open(file);
            let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
            let model = Stages::new(&folder, 2, 1)?;
            let pipeline = model.training(p, &meshes)?;
            let first = Sharding::single_device(p.topology().device_ids()[0]);
            for stage in 0..2 {
                for (_, array) in pipeline.params(stage) {
                    p.device_put(&array, first.clone())?.to_host()?;
                }
            }
            p.broadcast_value(mpmd::ProcessId(0), (), || Ok(()))?;
            Ok((folder.bytes_read(), model.layers(0)))
        });
        let results: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
        let layers = results[0].1.clone();
        let is_tied = !opened.contains("output.weight");
        let mut shares = [0, 0];
        for tensor in opened.tensors().values() {
            let layer = tensor.name().strip_prefix("blk.");
            let layer = layer.and_then(|name| name.split('.').next()?.parse().ok());
            let is_first = match layer {
                Some(layer) => layers.contains(&layer),
                None => ["token_embd.weight", "position_embd.weight"].contains(&tensor.name()),
            };
            shares[usize::from(!is_first)] += tensor.bytes();
        }
        let read: Vec<u64> = results.into_iter().map(|(read, _)| read).collect();
        assert_eq!(read, shares, "{file}, tied: {is_tied}");
    }
}

#[test]
fn model_in_several_files_is_opened_by_any_of_them() {
    let prompt = expected("mistral").prompt;
    let right = generated(&open("mistral-f32"), &prompt, (1, 1));
    let place = tempfile::tempdir().unwrap();
    let parts = split(place.path(), "mistral-f32", 3);
    for part in &parts {
        let folder = Folder::open(part).unwrap();
        assert_eq!(generated(&folder, &prompt, (2, 2)), right);
    }
    fs::remove_file(&parts[1]).unwrap();
    let said = Folder::open(&parts[0]).unwrap_err().to_string();
    assert!(said.starts_with(&parts[1].display().to_string()), "{said}");
}

/// Writes the tensors of a file into `count` files, in turn. Returns their paths.
fn split(to: &Path, file: &str, count: u16) -> Vec<PathBuf> {
    let from = GgufFile::open(path(file)).unwrap();
    let all: Vec<_> = from.tensors().values().collect();
    let parts = (0..count).map(|part| {
        let mut header = GgufWriter::new();
        header.set("split.no", part).unwrap();
        header.set("split.count", count).unwrap();
        header.set("split.tensors.count", all.len() as i32).unwrap();
        let values = from.metadata().iter().filter(|_| part == 0);
        values.for_each(|(key, value)| header.set(key, value.clone()).unwrap());
        let own = || all.iter().skip(part.into()).step_by(count.into());
        for tensor in own() {
            header
                .declare(tensor.name(), tensor.block_type(), tensor.shape())
                .unwrap();
        }
        let path = to.join(format!("model-{:05}-of-{count:05}.gguf", part + 1));
        let mut writer = header.write(fs::File::create(&path).unwrap()).unwrap();
        for tensor in own() {
            writer.write(&blocks_of(&from, tensor)).unwrap();
        }
        writer.finish().unwrap();
        path
    });
    parts.collect()
}
