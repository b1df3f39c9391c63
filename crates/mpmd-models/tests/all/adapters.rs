//! Adapters of LoRA: added to a model, merged into it, and trained further.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use mpmd::aval::{DType, ShapedArray};
use mpmd::pipeline::Schedule;
use mpmd::train::Run;
use mpmd::train::data::{Data, MicrobatchPlace};
use mpmd::train::tensors::header;
use mpmd_models::score::nats_per_token;
use mpmd_models::{Adapter, Folder, Stages, merged, save, save_adapter, trainer};
use serde_json::{Value, json};

use crate::divided::{divided, model};
use crate::folders::{expected, open, path, read, read_all, simulate, tokens};
use crate::given::{Given, args};

/// Plain projections, and fused ones: as they are, transposed, and head by head. Of a model with
/// experts those of attention.
const MODELS: [&str; 5] = ["plain", "phi3", "gpt2", "neox", "mixtral"];
/// Largest difference of losses in nats per token: the products are added in another order.
const TOLERANCE: f64 = 1e-5;

/// Returns the names of the models, each with the numbers of devices of its two stages to test.
fn jobs() -> impl Iterator<Item = (&'static str, [usize; 2])> {
    let one = MODELS.map(|name| (name, [1, 1]));
    one.into_iter().chain([("plain", [2, 2]), ("gpt2", [3, 3])])
}

/// Trains an adapter of the model `name` on two stages with these numbers of devices. Saves it in
/// `to`, and the merged model in `whole`. Returns the loss of the trained pipeline.
fn train(name: &str, devices: &[usize; 2], to: &Path, whole: &Path) -> f64 {
    let folder = open(name);
    let (args, given) = (args("--lr 2e-2 --lora 3"), Given(expected(name).windows));
    let lora = args.lora().unwrap();
    let model = model(&folder, devices, 16).lora(Some(lora), 0);
    divided(&model, devices, |p, meshes| {
        let schedule = Schedule::named("1f1b", 2, 2, None)?;
        let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
        trainer.run(p, Run::steps(3).progress(false), &given)?;
        save_adapter(p, &folder, trainer.pipeline(), lora, to)?;
        let params = merged(p, trainer.pipeline(), Some(lora))?;
        save(p, &folder, &params, whole)?;

        let at = MicrobatchPlace::new(0, 20, 0, 1);
        let microbatch = given.training(p, meshes, at)?;
        Ok(Some(trainer.evaluate(p, vec![microbatch])?.read()?.loss()))
    })
}

/// Returns the loss of the first 60 tokens of the test text.
fn score(folder: &Folder) -> f64 {
    simulate(1, 2, |p, meshes| {
        let model = Stages::new(folder, 2, 60)?;
        nats_per_token(p, &model, meshes, &tokens(folder).first(60))
    })
}

#[test]
fn adapters_of_peft_give_the_scores_that_it_computes() {
    let adapters = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/adapters");
    let scores = fs::read(adapters.join("scores.json")).unwrap();
    let scores: BTreeMap<String, f64> = serde_json::from_slice(&scores).unwrap();
    assert_eq!(scores.len(), 3);

    for (name, expected) in scores {
        let folder = open(&name);
        let adapter = Adapter::open(adapters.join(&name)).unwrap();
        let adapted = score(&folder.with_adapter(&adapter).unwrap());
        assert!(
            (adapted - expected).abs() < TOLERANCE,
            "{name}: {adapted}, not {expected}"
        );
        // Else a test without any adapter would pass.
        assert!((score(&open(&name)) - expected).abs() > 1e-3, "{name}");
    }
}

#[test]
fn model_with_adapter_computes_what_the_merged_one_does() {
    for (name, devices) in jobs() {
        let to = tempfile::tempdir().unwrap();
        let [adapter, whole, merge] = ["adapter", "whole", "merge"].map(|name| {
            let folder = to.path().join(name);
            fs::create_dir(&folder).unwrap();
            folder
        });
        train(name, &devices, &adapter, &whole);

        let adapter = Adapter::open(&adapter).unwrap();
        let with_adapter = open(name).with_adapter(&adapter).unwrap();
        let found = score(&with_adapter);
        let expected = score(&Folder::open(&whole).unwrap());
        assert!(
            (found - expected).abs() < TOLERANCE,
            "{name}: {found}, not {expected}"
        );
        assert!(
            (found - score(&open(name))).abs() > 1e-3,
            "{name} has learned"
        );

        // The weights of the merged folder are those that the model computes with, to the bit.
        let model = model(&with_adapter, &devices, 1);
        divided(&model, &devices, |p, meshes| {
            let pipeline = model.losses(p, meshes)?;
            let params = merged(p, &pipeline, None)?;
            save(p, &with_adapter, &params, &merge).map(Some)
        });
        assert_eq!(score(&Folder::open(&merge).unwrap()), found, "{name}");
        let [before, after] = [&*path(name), &merge].map(read_all);
        assert!(before.keys().eq(after.keys()), "{name}: the same tensors");
    }
}

#[test]
fn adapter_that_is_trained_further_begins_where_it_ended() {
    for (name, devices) in jobs() {
        let to = tempfile::tempdir().unwrap();
        let [first, whole, again] = ["first", "whole", "again"].map(|name| {
            let folder = to.path().join(name);
            fs::create_dir(&folder).unwrap();
            folder
        });
        let loss = train(name, &devices, &first, &whole);

        let folder = open(name);
        let (args, given) = (args("--lr 2e-2"), Given(expected(name).windows));
        let adapter = Adapter::open(&first).unwrap();
        let model = model(&folder, &devices, 16);
        let model = model.continue_adapter(&adapter, 1).unwrap();
        let continued = divided(&model, &devices, |p, meshes| {
            let schedule = Schedule::named("1f1b", 2, 2, None)?;
            let mut trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
            save_adapter(p, &folder, trainer.pipeline(), adapter.lora(), &again)?;
            let at = MicrobatchPlace::new(0, 20, 0, 1);
            let microbatch = given.training(p, meshes, at)?;
            Ok(Some(trainer.evaluate(p, vec![microbatch])?.read()?.loss()))
        });
        assert_eq!(continued, loss, "{name}: to the bit");
        let [first, again] = [first, again].map(|folder| read_all(&folder));
        assert!(first == again, "{name}: the same matrices");
    }
}

/// Writes an adapter with matrices of these names and shapes. All values differ.
fn write(folder: &Path, config: &Value, matrices: &[(&str, [usize; 2])]) {
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let name = |name: &str| format!("base_model.model.{name}");
    let avals: Vec<_> = matrices
        .iter()
        .map(|(module, shape)| (name(module), ShapedArray::new(shape, DType::F32)))
        .collect();
    let (mut bytes, _) = header(&avals, &BTreeMap::new()).unwrap();
    for (_, aval) in &avals {
        let values = (0..aval.elements()).map(|at| (0.05 * (at as f32).cos()).to_le_bytes());
        bytes.extend(values.flatten());
    }
    fs::write(folder.join("adapter_model.safetensors"), bytes).unwrap();
}

fn config() -> Value {
    json!({ "peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none" })
}

#[test]
fn one_matrix_for_a_fused_weight_is_trained_in_its_parts() {
    let folder = open("phi3");
    let weight = "model.layers.0.self_attn.qkv_proj";
    let tensors = read(&path("phi3").join("model.safetensors"));
    let (_, aval, _) = tensors
        .iter()
        .find(|(name, ..)| *name == format!("{weight}.weight"))
        .unwrap();
    let [outputs, inputs] = [aval.shape()[0], aval.shape()[1]];
    let to = tempfile::tempdir().unwrap();
    let [a, b] = ["A", "B"].map(|which| format!("{weight}.lora_{which}.weight"));
    // As `peft` makes it: the rank of the fused weight is that of the config.
    write(
        to.path(),
        &config(),
        &[(&a, [2, inputs]), (&b, [outputs, 2])],
    );

    let adapter = Adapter::open(to.path()).unwrap();
    let expected = score(&open("phi3").with_adapter(&adapter).unwrap());
    let whole = tempfile::tempdir().unwrap();
    simulate(1, 2, |p, meshes| {
        let model = Stages::new(&folder, 2, 16)?.continue_adapter(&adapter, 0)?;
        let pipeline = model.training(p, meshes)?;
        let params = merged(p, &pipeline, Some(adapter.lora()))?;
        save(p, &folder, &params, whole.path()).map(Some)
    });
    let found = score(&Folder::open(whole.path()).unwrap());
    assert!(
        (found - expected).abs() < TOLERANCE,
        "{found}, not {expected}"
    );
    assert!((found - score(&folder)).abs() > 1e-4, "the adapter counts");
}

#[test]
fn adapters_that_ask_for_more_are_refused() {
    let to = tempfile::tempdir().unwrap();
    let q_proj = "model.layers.0.self_attn.q_proj";
    let [a, b] = ["A", "B"].map(|which| format!("{q_proj}.lora_{which}.weight"));
    let pair = |inputs| vec![(a.as_str(), [2, inputs]), (b.as_str(), [32, 2])];
    let refused = |change: &dyn Fn(&mut Value), matrices: &[(&str, [usize; 2])]| {
        let mut config = config();
        change(&mut config);
        write(to.path(), &config, matrices);
        let opened = Adapter::open(to.path());
        let said = opened.and_then(|adapter| open("plain").with_adapter(&adapter));
        said.map(drop).unwrap_err().to_string()
    };

    let whole = pair(32);
    for (key, value, says) in [
        (
            "peft_type",
            json!("IA3"),
            "peft_type: expected \"LORA\", found \"IA3\"",
        ),
        (
            "use_dora",
            json!(true),
            "use_dora: expected no such key: it may change results, and nothing here handles it, \
             found true",
        ),
        (
            "alora_invocation_tokens",
            json!([5, 17]),
            "alora_invocation_tokens: expected no such key",
        ),
        (
            "layer_replication",
            json!([[0, 2], [1, 3]]),
            "layer_replication: expected no such key",
        ),
        (
            "modules_to_save",
            json!(["lm_head"]),
            "modules_to_save: expected no such key",
        ),
        (
            "key_of_tomorrow",
            json!({ "of": 1 }),
            "key_of_tomorrow: expected no such key",
        ),
        (
            "use_rslora",
            json!("yes"),
            "use_rslora: expected true or false, found \"yes\"",
        ),
        (
            "bias",
            json!("all"),
            "bias: expected \"none\", found \"all\"",
        ),
        (
            "r",
            json!(0),
            "r: expected a number from 1 to 2147483647, found 0",
        ),
        ("r", json!(u64::MAX), "found 18446744073709551615"),
        (
            "lora_alpha",
            json!(1e300),
            "lora_alpha: expected a finite number",
        ),
        (
            "init_lora_weights",
            json!("pissa_niter_4"),
            "as they are, found \"pissa_niter_4\"",
        ),
        (
            "init_lora_weights",
            json!("lora_ga"),
            "as they are, found \"lora_ga\"",
        ),
        (
            "alpha_pattern",
            json!({ "^q.*": 3 }),
            "numbers by the names of modules",
        ),
    ] {
        let said = refused(&|config| config[key] = value.clone(), &whole);
        assert!(
            said.contains("adapter_config.json: ") && said.contains(says),
            "{said}"
        );
    }

    let same = |_: &mut Value| ();
    let said = refused(&same, &pair(31));
    assert!(said.contains("a weight [32, 32], found [32, 31]"), "{said}");
    let said = refused(&same, &whole[..1]);
    assert!(
        said.contains(&format!("{b}: there is no such array")),
        "{said}"
    );
    let said = refused(&same, &whole[1..]);
    assert!(
        said.contains("expected a matrix B for each A, and at least one"),
        "{said}"
    );
    let more = [&whole[..], &[("lm_head.weight", [2, 2])]].concat();
    let said = refused(&same, &more);
    assert!(
        said.contains("base_model.model.lm_head.weight: expected "),
        "{said}"
    );
    let other = [
        ("model.x.lora_A.weight", [2, 32]),
        ("model.x.lora_B.weight", [32, 2]),
    ];
    let said = refused(&same, &other);
    assert!(
        said.contains("expected a weight of the model beside it, found none"),
        "{said}"
    );
}

#[test]
fn values_of_an_adapter_that_are_not_finite_are_refused() {
    let to = tempfile::tempdir().unwrap();
    let [a, b] =
        ["A", "B"].map(|which| format!("model.layers.1.self_attn.o_proj.lora_{which}.weight"));
    write(to.path(), &config(), &[(&a, [2, 32]), (&b, [32, 2])]);
    let file = to.path().join("adapter_model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_chunk_mut().unwrap() = f32::INFINITY.to_le_bytes();
    std::fs::write(&file, bytes).unwrap();

    let said = Adapter::open(to.path()).unwrap_err().to_string();
    let named = format!("{}: base_model.model.{b}", file.display());
    assert_eq!(said, format!("{named}: expected finite values, found inf"));
}

#[test]
fn factors_of_modules_and_of_roots_count() {
    let to = tempfile::tempdir().unwrap();
    let [a, b] =
        ["A", "B"].map(|which| format!("model.layers.1.self_attn.o_proj.lora_{which}.weight"));
    let matrices = [(a.as_str(), [4, 32]), (b.as_str(), [32, 4])];
    let scored = |change: &[(&str, Value)]| {
        let mut config = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8 });
        change
            .iter()
            .for_each(|(key, value)| config[key] = value.clone());
        write(to.path(), &config, &matrices);
        let adapter = Adapter::open(to.path()).unwrap();
        score(&open("plain").with_adapter(&adapter).unwrap())
    };
    let expected = scored(&[]);
    // 8 / 4 in each.
    assert_eq!(
        scored(&[("use_rslora", json!(true)), ("lora_alpha", json!(4))]),
        expected
    );
    let own = json!({ "layers.1.self_attn.o_proj": 8 });
    assert_eq!(
        scored(&[("alpha_pattern", own), ("lora_alpha", json!(1))]),
        expected
    );
    let others = json!({ "layers.0.self_attn.o_proj": 8, "proj": 8 });
    assert_ne!(
        scored(&[("alpha_pattern", others), ("lora_alpha", json!(1))]),
        expected
    );

    let both = json!({ "o_proj": 8, "layers.1.self_attn.o_proj": 8 });
    assert_eq!(scored(&[("alpha_pattern", both)]), expected);
    let mut config = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8 });
    config["alpha_pattern"] = json!({ "o_proj": 8, "layers.1.self_attn.o_proj": 4 });
    write(to.path(), &config, &matrices);
    let said = Adapter::open(to.path()).unwrap_err().to_string();
    let expected = "alpha_pattern: expected one number for model.layers.1.self_attn.o_proj, found \
                    those of \"layers.1.self_attn.o_proj\" and \"o_proj\"";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn settings_that_change_no_result_are_accepted() {
    let to = tempfile::tempdir().unwrap();
    let [a, b] =
        ["A", "B"].map(|which| format!("model.layers.1.self_attn.o_proj.lora_{which}.weight"));
    let mut config = config();
    for (key, value) in [
        ("init_lora_weights", json!("gaussian")),
        ("lora_dropout", json!(0.1)),
        ("target_modules", json!(["o_proj"])),
        ("layers_to_transform", json!([1])),
        ("key_of_tomorrow", json!(false)),
        ("another_one", json!({})),
    ] {
        config[key] = value;
    }
    write(to.path(), &config, &[(&a, [2, 32]), (&b, [32, 2])]);
    Adapter::open(to.path()).unwrap();
}

#[test]
fn other_ranks_and_factors_are_not_trained_further() {
    let to = tempfile::tempdir().unwrap();
    let module = "model.layers.0.self_attn.q_proj";
    let [a, b] = ["A", "B"].map(|which| format!("{module}.lora_{which}.weight"));
    for (key, value, says) in [
        ("r", json!(4), "as in adapter_config.json, found "),
        ("r", json!((1u64 << 31) - 1), "found "),
        ("alpha_pattern", json!({ "q_proj": 3 }), "found 1.5"),
    ] {
        let mut config = config();
        config[key] = value;
        write(to.path(), &config, &[(&a, [2, 32]), (&b, [32, 2])]);
        let adapter = Adapter::open(to.path()).unwrap();
        let model = Stages::new(&open("plain"), 2, 16).unwrap();
        let said = model.continue_adapter(&adapter, 0).unwrap_err().to_string();
        let place = format!("adapter_model.safetensors: base_model.model.{a}: expected ");
        assert!(said.contains(&place) && said.contains(says), "{said}");
    }
}
