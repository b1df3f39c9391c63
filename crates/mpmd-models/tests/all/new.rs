//! New models: their first values.

use std::collections::BTreeMap;

use half::{bf16, f16};
use mpmd::aval::{DType, ShapedArray};
use mpmd_models::{Folder, Stages, merged, save};

use crate::folders::{ALL, path, read_all, simulate};

/// Shape and bytes of tensors by name.
type Tensors = BTreeMap<String, (ShapedArray, Vec<u8>)>;

/// Saves a new model from `stages` stages, each on a process. Returns the saved tensors.
fn drawn(name: &str, seed: u64, stages: usize) -> Tensors {
    let (folder, to) = (
        Folder::untrained(path(name), seed).unwrap(),
        tempfile::tempdir().unwrap(),
    );
    simulate(stages, stages, |p, meshes| {
        let pipeline = Stages::new(&folder, stages, 1)?.training(p, meshes)?;
        let params = merged(p, &pipeline, None)?;
        save(p, &folder, &params, to.path()).map(Some)
    });
    assert_eq!(
        folder.bytes_read(),
        0,
        "{name}: the weights of the folder are not read"
    );
    read_all(to.path())
}

/// Returns the values of a tensor as f32.
fn values((aval, bytes): &(ShapedArray, Vec<u8>)) -> Vec<f32> {
    let pairs = bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|pair| u16::from_le_bytes(*pair));
    match aval.dtype() {
        DType::Bf16 => pairs.map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        DType::F16 => pairs.map(|bits| f16::from_bits(bits).to_f32()).collect(),
        _ => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|four| f32::from_le_bytes(*four))
            .collect(),
    }
}

#[test]
fn new_models_have_equal_bits_at_any_number_of_stages() {
    for name in ALL {
        let one = drawn(name, 7, 1);
        assert!(
            one == drawn(name, 7, 3),
            "{name}: other values over three stages"
        );
        let shapes = |of: &Tensors| {
            let shape = |(name, (aval, _)): (&String, &(ShapedArray, _))| {
                (name.replace("transformer.", ""), aval.clone())
            };
            of.iter()
                .map(shape)
                .filter(|(name, _)| name != "h.0.attn.bias")
                .collect::<Vec<_>>()
        };
        assert_eq!(
            shapes(&one),
            shapes(&read_all(&path(name))),
            "{name}: not as transformers"
        );
    }
    assert!(
        drawn("plain", 7, 1) != drawn("plain", 8, 1),
        "the seed counts"
    );
}

#[test]
fn first_values_have_the_distributions_of_transformers() {
    for (name, norm) in [
        ("plain", 1.0),
        ("gemma2", 0.0),
        ("gpt2", 1.0),
        ("mixtral", 1.0),
    ] {
        for (tensor, found) in &drawn(name, 3, 1) {
            let all = values(found);
            let is = |value: f32| all.iter().all(|found| *found == value);
            let is_norm = ["norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"];
            if tensor.ends_with(".bias") {
                assert!(is(0.0), "{name}: {tensor}");
            } else if is_norm.iter().any(|end| tensor.ends_with(end)) {
                assert!(is(norm), "{name}: {tensor}");
            } else {
                // The GPT-2 of the folder has four layers.
                let narrows = tensor.ends_with("c_proj.weight");
                let expected = if narrows { 0.02 / 8f64.sqrt() } else { 0.02 };
                let (count, all) = (all.len() as f64, all.iter().map(|value| f64::from(*value)));
                let mean = all.clone().sum::<f64>() / count;
                let deviation = (all.map(|value| value * value).sum::<f64>() / count).sqrt();
                let near = 6.0 * expected / count.sqrt();
                assert!(mean.abs() < near, "{name}: {tensor}: mean {mean}");
                assert!(
                    (deviation - expected).abs() < near,
                    "{name}: {tensor}: {deviation}"
                );
            }
        }
    }
}
