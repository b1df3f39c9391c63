//! Logits and scores equal those of `transformers` at every number of stages and processes, and
//! each process reads only the weights of its stages.

use std::fs;
use std::path::Path;

use mpmd::aval::{DType, ShapedArray};
use mpmd::pipeline::Microbatch;
use mpmd::sharding::{Sharding, Spec, SpecEntry};
use mpmd::topology::Mesh;
use mpmd::train::data::TextBytes;
use mpmd_models::score::nats_per_token;
use mpmd_models::{Folder, Stages, Tokens};
use serde_json::Value;

use crate::folders::{ALL, Expected, change, copy, expected, open, path, simulate, tokens};

/// Returns the logits of a sequence, by position.
fn logits(folder: &Folder, stages: usize, ids: &[u32]) -> Vec<Vec<f32>> {
    let logits = simulate(1, stages, |p, meshes| {
        let model = Stages::new(folder, stages, ids.len())?;
        let mut pipeline = model.logits(p, meshes)?;
        let (aval, ids) = (ShapedArray::new(&[1, ids.len()], DType::U32), ids.to_vec());
        let x = p.array_from_fn(aval, meshes[0].replicated(), move |_, mut view| {
            view.as_mut_slice::<u32>()?.copy_from_slice(&ids);
            Ok(())
        })?;
        let microbatch = Microbatch::new(x);
        pipeline.probe(p, &microbatch.shapes())?;
        let logits = pipeline.forward(p, microbatch)?;
        Ok(logits
            .to_host()?
            .map(|logits| logits.to_vec::<f32>())
            .transpose()?)
    });
    let vocabulary = folder.config().vocab_size;
    assert_eq!(logits.len(), ids.len() * vocabulary);
    logits
        .chunks_exact(vocabulary)
        .map(<[f32]>::to_vec)
        .collect()
}

#[test]
fn logits_equal_those_of_transformers() {
    for name in ALL {
        let (folder, expected) = (open(name), expected(name));
        let one = logits(&folder, 1, &expected.tokens);
        for (position, expected) in &expected.logits {
            let off = one[*position]
                .iter()
                .zip(expected)
                .map(|(a, b)| (a - b).abs());
            let off = off.fold(0.0, f32::max);
            assert!(off < 1e-4, "{name}, position {position}: {off}");
        }
        for stages in 2..=4 {
            let more = logits(&folder, stages, &expected.tokens);
            assert!(more == one, "{name}, {stages} stages: other bits");
        }
    }
}

#[test]
fn greedy_tokens_equal_those_of_transformers() {
    for name in ALL {
        let Expected { prompt, greedy, .. } = expected(name);
        let logits = logits(&open(name), 2, &[&prompt[..], &greedy].concat());
        let first = |row: &Vec<f32>| {
            let row = row.iter().zip(0u32..);
            row.max_by(|a, b| a.0.total_cmp(b.0))
                .map(|(_, token)| token)
                .unwrap()
        };
        let found: Vec<u32> = logits[prompt.len() - 1..].iter().map(first).collect();
        assert_eq!(found[..greedy.len()], greedy, "{name}");
    }
}

/// Returns the mean loss of the test text's first 50 tokens.
fn score_of(folder: &Path) -> f64 {
    let folder = Folder::open(folder).unwrap();
    let tokens = tokens(&folder).first(50);
    simulate(1, 1, |p, meshes| {
        nats_per_token(p, &Stages::new(&folder, 1, 50)?, meshes, &tokens)
    })
}

#[test]
fn folders_of_other_programs_score_alike() {
    let right = score_of(&path("plain"));
    let folder = copy("plain");
    change(folder.path(), |tensors| {
        let positions = ShapedArray::new(&[1, 8], DType::I64);
        tensors.push(("model.position_ids".to_owned(), positions, vec![0; 64]));
    });
    assert_eq!(score_of(folder.path()), right, "a tensor more");
    change(folder.path(), |tensors| {
        for (name, ..) in tensors {
            *name = name.trim_start_matches("model.").to_owned();
        }
    });
    assert_eq!(score_of(folder.path()), right, "names without `model.`");

    let file = folder.path().join("tokenizer.json");
    let rename = |token: Option<u32>, id: u64| {
        let mut json: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let words = json["model"]["vocab"].as_object_mut().unwrap();
        match words
            .values_mut()
            .find(|id| id.as_u64() == token.map(u64::from))
        {
            Some(old) => *old = id.into(),
            None => _ = words.insert("<more>".to_owned(), id.into()),
        }
        fs::write(&file, json.to_string()).unwrap();
    };
    let rows = Folder::open(folder.path()).unwrap().config().vocab_size as u64;
    rename(None, rows);
    assert_eq!(
        score_of(folder.path()),
        right,
        "a token that the text never has"
    );
    let first = tokens(&Folder::open(folder.path()).unwrap()).ids()[0];
    rename(Some(first), rows + 1);
    let text = TextBytes::of(&[crate::folders::text()]).unwrap();
    let error = Tokens::of(&text, &Folder::open(folder.path()).unwrap())
        .unwrap_err()
        .to_string();
    let said = format!("expected tokens below {rows}, the vocab_size of config.json, found");
    assert!(error.contains(&said), "{error}");
}

#[test]
fn scores_equal_those_of_transformers() {
    for name in ALL {
        let (folder, expected) = (open(name), expected(name));
        let tokens = tokens(&folder);
        assert_eq!(tokens.ids().len(), expected.all_tokens);
        assert_eq!(tokens.ids()[..expected.tokens.len()], expected.tokens);
        for (count, nats) in &expected.nats_in_f32 {
            let score = |processes, stages| {
                simulate(processes, stages, |p, meshes| {
                    let model = Stages::new(&folder, stages, *count)?;
                    nats_per_token(p, &model, meshes, &tokens.first(*count))
                })
            };
            let one = score(1, 1);
            let off = (one - nats).abs();
            assert!(off < 1e-5, "{name}, {count} tokens: {one}, not {nats}");
            // The mean of one loss in bf16 is as coarse as its logits.
            let (nats, few) = (expected.nats[count], *count < 100);
            assert!(
                few || (one - nats).abs() < 2e-3,
                "{name}, {count} tokens: {one}, not {nats}"
            );
            for (processes, stages) in [(1, 2), (2, 2), (1, 3), (3, 3)] {
                assert_eq!(
                    score(processes, stages),
                    one,
                    "{name} on {processes} of {stages}"
                );
            }
        }
    }
}

/// Returns the stored bytes of each stage's tensors.
fn shares(folder: &Folder, model: &Stages, stages: usize) -> Vec<u64> {
    let mut shares = vec![0; stages];
    for (name, aval) in folder.tensors() {
        let mut words = name
            .split('.')
            .skip_while(|word| !["layers", "h"].contains(word));
        let tables = ["embed_tokens", "wte", "wpe", "embed_in"];
        let stage = match words.nth(1) {
            Some(layer) => {
                let layer = layer.parse().unwrap();
                (0..stages)
                    .find(|stage| model.layers(*stage).contains(&layer))
                    .unwrap()
            }
            None if tables.iter().any(|table| name.contains(table)) => 0,
            None => stages - 1,
        };
        shares[stage] += aval.bytes() as u64;
    }
    shares
}

#[test]
fn each_process_reads_only_its_share() {
    for name in ALL {
        for stages in 1..=3 {
            let results = mpmd::testing::Simulation::new(stages, stages).run(|p| {
                // A folder of its own for each process, as in real ones.
                let folder = open(name);
                let meshes = p.mesh(&[("stage", stages)])?.split("stage")?;
                let model = Stages::new(&folder, stages, 1)?;
                let pipeline = model.training(p, &meshes)?;
                // Waits until all is read.
                let first = Sharding::single_device(p.topology().device_ids()[0]);
                for stage in 0..stages {
                    for (_, array) in pipeline.params(stage) {
                        p.device_put(&array, first.clone())?.to_host()?;
                    }
                }
                p.broadcast_value(mpmd::ProcessId(0), (), || Ok(()))?;
                Ok(folder)
            });
            let folders: Vec<Folder> = results.into_iter().map(|result| result.unwrap()).collect();
            let read: Vec<u64> = folders.iter().map(Folder::bytes_read).collect();
            let model = Stages::new(&folders[0], stages, 1).unwrap();
            assert_eq!(
                read,
                shares(&folders[0], &model, stages),
                "{name}, {stages} stages"
            );
        }
    }
}

#[test]
fn regions_of_parameters_are_read_alone() {
    // Of tensors as they are, fused, transposed, head by head, in bf16, and one for each expert.
    for (name, parameter) in [
        ("plain", "mlp.down_proj.weight"),
        ("phi3", "self_attn.k_proj.weight"),
        ("gpt2-hub", "self_attn.v_proj.weight"),
        ("gpt2-hub", "self_attn.v_proj.bias"),
        ("gpt2", "mlp.down_proj.weight"),
        ("neox", "self_attn.k_proj.weight"),
        ("neox", "self_attn.q_proj.bias"),
        ("bf16", "self_attn.q_proj.weight"),
        ("qwen3-moe", "mlp.experts.gate_proj.weight"),
        ("mixtral-window", "mlp.experts.down_proj.weight"),
    ] {
        let parameter = format!("model.layers.1.{parameter}");
        let load = |sharding: &(dyn Fn(&Mesh) -> Sharding + Sync)| {
            simulate(1, 3, |p, meshes| {
                let folder = open(name);
                let mesh = p.mesh(&[("part", 3)])?;
                let array = folder.load(p, &parameter, &sharding(&mesh))?;
                // Waits until all parts are read.
                let whole = p.device_put(&array, meshes[0].replicated())?.to_host()?;
                let values = whole.map(|whole| whole.to_vec::<f32>()).transpose()?;
                Ok(values.map(|values| (array.aval().clone(), values, folder.bytes_read())))
            })
        };
        let (aval, whole, _) = load(&|mesh| mesh.replicated());
        let bytes = whole.len() * if name == "bf16" { 2 } else { 4 };
        for axis in 0..aval.shape().len() {
            if aval.shape()[axis] % 3 == 0 {
                let split = |mesh: &Mesh| {
                    let entries = (0..aval.shape().len()).map(|at| (at == axis).then_some("part"));
                    mesh.sharding(Spec::new(entries.map(SpecEntry::from).collect()))
                };
                let (_, parts, read) = load(&split);
                assert_eq!(parts, whole, "{name}: {parameter} by axis {axis}");
                assert_eq!(read, bytes as u64, "{name}: {parameter} by axis {axis}");
            }
        }
    }
}
