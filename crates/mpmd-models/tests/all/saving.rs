//! Saved models have the form and the bits of those that they come from.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use mpmd::candle::{Device, Tensor};
use mpmd::pipeline::Schedule;
use mpmd::train::Run;
use mpmd_models::score::nats_per_token;
use mpmd_models::{Folder, Stages, merged, save, save_adapter, trainer};
use serde_json::Value;

use crate::folders::{ALL, change, copy, expected, open, path, read, read_all, simulate, tokens};
use crate::given::{Given, args};

#[test]
fn untrained_models_are_saved_with_equal_bits() {
    for name in ALL {
        let (folder, to) = (open(name), tempfile::tempdir().unwrap());
        simulate(2, 2, |p, meshes| {
            let pipeline = Stages::new(&folder, 2, 1)?.training(p, meshes)?;
            let params = merged(p, &pipeline, None)?;
            save(p, &folder, &params, to.path()).map(Some)
        });
        let mut before = read_all(&path(name));
        if name == "gpt2-hub" {
            // `transformers` gives names a prefix, and drops the masks.
            before.remove("h.0.attn.bias").expect("a mask");
            let renamed = before
                .into_iter()
                .map(|(name, one)| (format!("transformer.{name}"), one));
            before = renamed.collect();
        }
        assert!(read_all(to.path()) == before, "{name} differs");
        let saved = Folder::open(to.path()).unwrap();
        assert_eq!(
            saved.split().is_some(),
            folder.split().is_some(),
            "{name}: files"
        );
        assert_eq!(saved.config(), folder.config());
        assert!(to.path().join("tokenizer.json").exists());
    }
}

#[test]
fn other_output_of_a_tied_model_is_used_and_saved() {
    let folder = copy("plain");
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    let [no, yes] = ["false", "true"].map(|value| format!("\"tie_word_embeddings\": {value}"));
    fs::write(&config, text.replace(&no, &yes)).unwrap();
    let opened = Folder::open(folder.path()).unwrap();
    let (count, nats) = expected("plain").nats_in_f32.pop_first().unwrap();
    for stages in [1, 2] {
        let found = simulate(1, stages, |p, meshes| {
            let model = Stages::new(&opened, stages, count)?;
            nats_per_token(p, &model, meshes, &tokens(&opened).first(count))
        });
        assert!((found - nats).abs() < 1e-4, "{found}, not {nats}");
    }
    let to = tempfile::tempdir().unwrap();
    simulate(1, 2, |p, meshes| {
        let pipeline = Stages::new(&opened, 2, 1)?.training(p, meshes)?;
        let params = merged(p, &pipeline, None)?;
        save(p, &opened, &params, to.path()).map(Some)
    });
    assert!(read_all(to.path()) == read_all(&path("plain")));
    let saved = fs::read_to_string(to.path().join("config.json")).unwrap();
    assert!(
        saved.contains(&no),
        "readers that ignore the output of tied models: {saved}"
    );

    // Equal values are one parameter.
    change(folder.path(), |tensors| {
        let values = |name: &str| {
            tensors
                .iter()
                .position(|(other, ..)| other == name)
                .unwrap()
        };
        let (from, to) = (
            values("model.embed_tokens.weight"),
            values("lm_head.weight"),
        );
        tensors[to].2 = tensors[from].2.clone();
    });
    let tied = Folder::open(folder.path()).unwrap();
    assert!(tied.config().tie_word_embeddings);
    assert!(tied.tensors().all(|(name, _)| name != "lm_head.weight"));
}

/// Trains a folder's model for some steps and saves it. Returns the losses of the trained pipeline
/// and of the saved model.
fn scores(name: &str, lora: &str) -> [f64; 2] {
    let (folder, to) = (open(name), tempfile::tempdir().unwrap());
    let (args, given) = (
        args(&format!("--lr 2e-2 {lora}")),
        Given(expected(name).windows),
    );
    let trained = simulate(1, 2, |p, meshes| {
        let schedule = Schedule::named("1f1b", 2, 2, None)?;
        let model = Stages::new(&folder, 2, 16)?.lora(args.lora(), 0);
        let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
        trainer.run(p, Run::steps(20).progress(false), &given)?;
        let at = mpmd::train::data::MicrobatchPlace::new(0, 20, 0, 1);
        let microbatch = mpmd::train::data::Data::training(&given, p, meshes, at)?;
        let loss = trainer.evaluate(p, vec![microbatch])?.read()?.loss();
        let params = merged(p, trainer.pipeline(), args.lora())?;
        save(p, &folder, &params, to.path())?;
        Ok(Some(loss))
    });
    let saved = Folder::open(to.path()).unwrap();
    let reloaded = simulate(1, 1, |p, meshes| {
        let schedule = Schedule::named("1f1b", 1, 2, None)?;
        let model = Stages::new(&saved, 1, 16)?;
        let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
        let at = mpmd::train::data::MicrobatchPlace::new(0, 20, 0, 1);
        let microbatch = mpmd::train::data::Data::training(&given, p, meshes, at)?;
        Ok(Some(trainer.evaluate(p, vec![microbatch])?.read()?.loss()))
    });
    let untrained = simulate(1, 1, |p, meshes| {
        nats_per_token(
            p,
            &Stages::new(&folder, 1, 50)?,
            meshes,
            &tokens(&folder).first(50),
        )
    });
    let scored = simulate(1, 1, |p, meshes| {
        nats_per_token(
            p,
            &Stages::new(&saved, 1, 50)?,
            meshes,
            &tokens(&saved).first(50),
        )
    });
    assert!(
        untrained - scored > 0.02,
        "{name} has learned: {untrained}, then {scored}"
    );
    [trained, reloaded]
}

#[test]
fn saved_models_compute_what_the_trained_ones_do() {
    for name in ["grouped", "llama3"] {
        let [trained, reloaded] = scores(name, "");
        assert_eq!(trained, reloaded, "{name}: all parameters, to the bit");
        let [trained, reloaded] = scores(name, "--lora 3 --alpha 5");
        assert!(
            (trained - reloaded).abs() < 1e-5,
            "{name}: {trained}, merged {reloaded}"
        );
    }
    // The weights are rounded to bf16.
    let [trained, reloaded] = scores("bf16", "--lora 3");
    assert!(
        (trained - reloaded).abs() < 2e-2,
        "{trained}, merged {reloaded}"
    );
}

/// Returns the tensors of a file by name.
fn matrices(file: &Path) -> BTreeMap<String, Tensor> {
    let one = |(name, aval, bytes): (String, mpmd::aval::ShapedArray, Vec<u8>)| {
        let values: Vec<f32> = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|four| f32::from_le_bytes(*four))
            .collect();
        (
            name,
            Tensor::from_vec(values, aval.shape(), &Device::Cpu).unwrap(),
        )
    };
    read(file).into_iter().map(one).collect()
}

#[test]
fn adapters_are_what_merged_weights_have_more() {
    // Plain projections, and fused ones: as they are, transposed, and head by head.
    for (name, fused) in [
        ("plain", &[][..]),
        ("phi3", &["qkv_proj", "gate_up_proj"]),
        ("gpt2", &["c_attn"]),
        ("neox", &["query_key_value"]),
    ] {
        let (folder, to) = (open(name), tempfile::tempdir().unwrap());
        let (args, given) = (args("--lr 2e-2 --lora 3"), Given(expected(name).windows));
        simulate(2, 2, |p, meshes| {
            let schedule = Schedule::named("1f1b", 2, 2, None)?;
            let (lora, model) = (args.lora().unwrap(), Stages::new(&folder, 2, 16)?);
            let model = model.lora(Some(lora), 0);
            let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
            trainer.run(p, Run::steps(3).progress(false), &given)?;
            let params = merged(p, trainer.pipeline(), Some(lora))?;
            save(p, &folder, &params, to.path())?;
            save_adapter(p, &folder, trainer.pipeline(), lora, to.path()).map(Some)
        });
        let [before, after] =
            [&*path(name), to.path()].map(|at| matrices(&at.join("model.safetensors")));
        let adapter = matrices(&to.path().join("adapter_model.safetensors"));
        let config = fs::read(to.path().join("adapter_config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(
            config["rank_pattern"].as_object().unwrap().len(),
            fused.len()
        );
        let mut count = 0;
        for (matrix, a) in &adapter {
            let Some(module) = matrix.strip_suffix(".lora_A.weight") else {
                continue;
            };
            let b = &adapter[&format!("{module}.lora_B.weight")];
            let layer = module.rsplit('.').next().unwrap();
            let of = |pattern: &str, all: &str| {
                config[pattern]
                    .get(layer)
                    .unwrap_or(&config[all])
                    .as_f64()
                    .unwrap()
            };
            let (rank, alpha) = (of("rank_pattern", "r"), of("alpha_pattern", "lora_alpha"));
            assert_eq!(rank as usize, a.dim(0).unwrap(), "{matrix}");
            assert_eq!(rank > 3.0, fused.contains(&layer), "{matrix}");
            let mut product = (b.matmul(a).unwrap() * (alpha / rank)).unwrap();
            if config["fan_in_fan_out"] == true {
                product = product.t().unwrap();
            }
            let weight = format!(
                "{}.weight",
                module.strip_prefix("base_model.model.").unwrap()
            );
            let more = (&after[&weight] - &before[&weight]).unwrap();
            let largest = |x: &Tensor| {
                x.abs()
                    .unwrap()
                    .max_all()
                    .unwrap()
                    .to_scalar::<f32>()
                    .unwrap()
            };
            let off = largest(&(&more - product).unwrap());
            assert!(
                off < 1e-5 && largest(&more) > 1e-4,
                "{name}: {weight} is off by {off}"
            );
            count += 1;
        }
        assert_eq!(2 * count, adapter.len());
    }
}
