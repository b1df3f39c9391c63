//! The program `finetune --new`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use mpmd::aval::DType;
use mpmd::testing::{ProcessEnd, Processes};
use tempfile::TempDir;

use crate::folders::{change_config, copy, path, read_all, text};

/// Runs a program of this crate as `processes` processes until all have ended successfully.
fn run(program: &str, processes: usize, args: &[&str]) -> Vec<ProcessEnd> {
    let job = Processes::new(processes, program)
        .args(args)
        .deadline(Duration::from_secs(120));
    let ends = job.start().unwrap().wait().unwrap();
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    ends
}

/// Trains a new model over `stages` stages, each on a process. Returns the folder of the saved
/// model.
fn trained(config: &Path, stages: usize, more: &str) -> TempDir {
    let (to, text) = (tempfile::tempdir().unwrap(), text());
    let mut args = vec!["--new", config.to_str().unwrap(), text.to_str().unwrap()];
    let stages_arg = stages.to_string();
    args.extend([
        "--stages",
        &stages_arg,
        "--save",
        to.path().to_str().unwrap(),
    ]);
    args.extend("--time 32 --microbatches 2 --seed 5".split(' '));
    args.extend(more.split(' '));
    run(env!("CARGO_BIN_EXE_finetune"), stages, &args);
    to
}

#[test]
fn new_model_is_trained_saved_and_generates() {
    // A config and a tokenizer alone.
    let config = copy("bf16");
    fs::remove_file(config.path().join("model.safetensors")).unwrap();
    let still = "--steps 1 --lr 0";
    let [one, two] = [1, 2].map(|stages| read_all(trained(config.path(), stages, still).path()));
    assert!(
        one == two,
        "the first values depend on the number of stages"
    );
    let model = trained(config.path(), 2, "--steps 3 --lr 1e-2");
    let tensors = read_all(model.path());
    assert!(
        tensors.keys().eq(one.keys()) && tensors != one,
        "it has learned"
    );
    assert!(
        tensors
            .values()
            .all(|(aval, _)| aval.dtype() == DType::Bf16)
    );
    let model = model.path().to_str().unwrap();
    let args = [
        "--model",
        model,
        "--prompt",
        "A kernel",
        "--tokens",
        "5",
        "--ignore-eos",
    ];
    let ends = run(env!("CARGO_BIN_EXE_generate"), 1, &args);
    assert!(!ends[0].stdout.is_empty(), "{ends:?}");
}

#[test]
fn folders_that_make_no_new_model_are_refused() {
    let refused = |folder: &Path, args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_finetune"));
        let output = command
            .arg("--new")
            .arg(folder)
            .args(args)
            .arg(text())
            .output()
            .unwrap();
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let empty = tempfile::tempdir().unwrap();
    let without = copy("plain");
    fs::remove_file(without.path().join("tokenizer.json")).unwrap();
    let [dtype, deviation, small, deep] = [(); 4].map(|()| copy("plain"));
    change_config(dtype.path(), |config| config["dtype"] = "int8".into());
    change_config(deviation.path(), |config| {
        config["initializer_range"] = (-1).into()
    });
    change_config(small.path(), |config| config["vocab_size"] = 30.into());
    change_config(deep.path(), |config| {
        config["num_hidden_layers"] = 1001.into()
    });
    for (folder, expected) in [
        (
            deep,
            "num_hidden_layers: expected at most 1000 in each stage of a training (2 stages or \
             more), found 1001, and 1001 of them in a stage",
        ),
        (
            empty,
            "config.json: expected the config of a model, found No such file",
        ),
        (
            without,
            "tokenizer.json: expected a tokenizer, found No such file",
        ),
        (
            dtype,
            r#"dtype: expected "float32", "bfloat16" or "float16", found "int8""#,
        ),
        (
            deviation,
            "initializer_range: expected a standard deviation from 0 to 1, found -1",
        ),
        (
            small,
            "expected tokens below 30, the vocab_size of config.json",
        ),
    ] {
        let said = refused(folder.path(), &[]);
        assert!(said.contains(expected), "{said}");
    }
    for more in ["--model x", "--lora 2"] {
        let said = refused(&path("plain"), &more.split(' ').collect::<Vec<_>>());
        assert!(said.contains("cannot be used with"), "{said}");
    }
}
