//! Processes that are on different hosts: their options and copies of files differ.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mpmd::ProcessId;
use mpmd::testing::{ProcessEnd, Processes, Simulation};
use mpmd_models::{Folder, Room, Stages};

use crate::folders::{change, change_config, copy, path, text};

const FINETUNE: &str = env!("CARGO_BIN_EXE_finetune");
const GENERATE: &str = env!("CARGO_BIN_EXE_generate");

/// Runs a program as two processes with different arguments, until both have ended.
fn run(program: &str, args: [&[&str]; 2]) -> Vec<ProcessEnd> {
    let job = Processes::new(2, program).deadline(Duration::from_secs(120));
    let mut job = job.prepare().unwrap();
    for (process, args) in args.into_iter().enumerate() {
        let mut command = job.command(process);
        command.args(args);
        job.spawn(command).unwrap();
    }
    job.wait().unwrap()
}

/// Checks that both processes fail with an error that contains these texts.
fn check_refused(ends: &[ProcessEnd], expected: &[&str]) {
    for end in ends {
        let said = &end.stderr;
        assert_eq!((end.code(), end.stdout.as_str()), (1, ""), "{end:?}");
        assert!(
            expected.iter().all(|text| said.contains(text)),
            "{expected:?}: {said}"
        );
        assert!(!said.contains("diverged"), "{said}");
    }
}

/// Copies a test folder, and changes the last value of an output projection.
fn changed(name: &str) -> tempfile::TempDir {
    let folder = copy(name);
    change_weights(folder.path());
    folder
}

fn change_weights(folder: &Path) {
    change(folder, |tensors| {
        let name = "model.layers.1.self_attn.o_proj.weight";
        let (.., bytes) = tensors
            .iter_mut()
            .find(|(other, ..)| other == name)
            .unwrap();
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&0.25f32.to_le_bytes());
    });
}

const TRAINING: &str = "--steps 1 --time 16 --microbatches 2";

#[test]
fn options_that_differ_are_named_with_both_values() {
    let (model, text) = (path("plain"), text());
    let common = [
        &["--model", model.to_str().unwrap(), text.to_str().unwrap()],
        &*TRAINING.split(' ').collect::<Vec<_>>(),
    ]
    .concat();
    for (first, second, expected) in [
        (
            "--stages 2 --seed 1",
            "--stages 2 --seed 2",
            "--seed: process 0 has 1, process 1 has 2",
        ),
        (
            "--stages 2",
            "--stages 2 --lr 1",
            "--lr: process 0 has 0.00002, process 1 has 1",
        ),
        (
            "--stages 2",
            "--stages 4",
            "--stages: process 0 has 2, process 1 has 4",
        ),
        (
            "--stages 2 --clip 1",
            "--stages 2",
            "--clip: process 0 has 1, process 1 has none",
        ),
        (
            "--stages 2",
            "--stages 2 --save a",
            "--save: process 0 has none, process 1 has a path",
        ),
    ] {
        let [first, second] =
            [first, second].map(|own| [&common[..], &own.split(' ').collect::<Vec<_>>()].concat());
        let ends = run(FINETUNE, [&first, &second]);
        check_refused(&ends, &[expected, "Give all processes the same options"]);
    }
}

#[test]
fn data_that_differ_are_named_with_both_paths() {
    let (model, folder) = (path("plain"), tempfile::tempdir().unwrap());
    let file = |name: &str, reply: &str| {
        let line = format!("{{\"prompt\": \"A\", \"completion\": \"{reply}\"}}\n");
        let file = folder.path().join(name);
        fs::write(&file, line.repeat(20)).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let [one, same, other] = [("one", "B"), ("same", "B"), ("other", "C")]
        .map(|(name, reply)| file(&format!("{name}.jsonl"), reply));
    let train = |first: &str, second: &str| {
        let args = |data| {
            let mut args = vec!["--model", model.to_str().unwrap(), "--data", data];
            args.extend(TRAINING.split(' ').chain(["--stages", "2"]));
            args
        };
        run(FINETUNE, [&args(first), &args(second)])
    };
    check_refused(
        &train(&one, &other),
        &["--data: process 0 has hash ", &one, &other],
    );
    // A path of another host, and one that the host lacks: process 0 alone reads the data.
    for second in [&same, "/absent.jsonl"] {
        let ends = train(&one, second);
        assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    }
}

#[test]
fn copies_of_a_folder_that_differ_are_refused() {
    let (model, text) = (path("plain"), text());
    let other = changed("plain");
    let [model, other, text] = [&model, other.path(), &text].map(|path| path.to_str().unwrap());
    let expected = [
        "weights of model.layers.1: process 0 has hash ",
        model,
        other,
        ", changed 20",
    ];
    let generate = "--prompt-ids 5,17,3 --tokens 4 --stages 2 --json";
    let score = format!("--score {text} --tokens 50 --stages 2");
    let train = format!("{text} {TRAINING} --stages 2");
    for (program, args) in [(GENERATE, generate), (FINETUNE, &score), (FINETUNE, &train)] {
        let args = |model| [&["--model", model], &*args.split(' ').collect::<Vec<_>>()].concat();
        check_refused(&run(program, [&args(model), &args(other)]), &expected);
    }
}

#[test]
fn copies_with_the_same_values_are_one_model() {
    let model = path("plain");
    let other = copy("plain");
    // Another version has saved it, in another order. The tokenizer is for process 0 alone.
    change_config(other.path(), |config| {
        config["transformers_version"] = "0.0.1".into()
    });
    change(other.path(), |tensors| tensors.reverse());
    fs::remove_file(other.path().join("tokenizer.json")).unwrap();
    let args = |model| {
        let generate = "--prompt-ids 5,17,3 --tokens 4 --stages 2 --json";
        [
            &["--model", model],
            &*generate.split(' ').collect::<Vec<_>>(),
        ]
        .concat()
    };
    let [first, second] = [&model, other.path()].map(|path| args(path.to_str().unwrap()));
    let ends = run(GENERATE, [&first, &second]);
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
}

#[test]
fn settings_and_tokenizers_that_differ_are_named() {
    let model = path("plain");
    let (eps, generation, tokenizer) = (copy("plain"), copy("plain"), copy("plain"));
    change_config(eps.path(), |config| config["rms_norm_eps"] = 1e-3.into());
    fs::write(
        generation.path().join("generation_config.json"),
        "{\"eos_token_id\": 3}",
    )
    .unwrap();
    let file = tokenizer.path().join("tokenizer.json");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(file, text + " ").unwrap();
    for (other, expected) in [
        (eps, "config.json: process 0 has hash "),
        (generation, "generation_config.json: process 0 has "),
        (tokenizer, "tokenizer.json: process 0 has hash "),
    ] {
        let args = |model| vec!["--model", model, "--prompt-ids", "5,17", "--stages", "2"];
        let [first, second] = [&model, other.path()].map(|path| args(path.to_str().unwrap()));
        check_refused(&run(GENERATE, [&first, &second]), &[expected]);
    }
}

#[test]
fn program_without_arguments_finds_other_weights_as_divergence() {
    let other = changed("plain");
    let folders = [path("plain"), other.path().to_owned()].map(|path| Folder::open(path).unwrap());
    let results = Simulation::new(2, 2).run(|p| {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let model = Stages::new(&folders[p.process().index()], 2, 20)?;
        let mut generator = model.generator(p, &meshes, false)?;
        generator.generate(p, &[5, 17, 3], &Default::default(), 4, |_, _| Ok(false))
    });
    for result in results {
        let said = result.unwrap_err().to_string();
        assert_eq!(said.matches(" tensors, with hash ").count(), 2, "{said}");
        assert_eq!(said.matches("values with hash ").count(), 2, "{said}");
    }
}

#[test]
fn files_that_change_after_the_comparison_are_not_read() {
    let copied = copy("plain");
    let folder = Folder::open(copied.path()).unwrap();
    let facts = folder.facts();
    assert_eq!(folder.facts(), facts);
    let tokenizer = copied.path().join("tokenizer.json");
    let text = fs::read_to_string(&tokenizer).unwrap();
    fs::write(&tokenizer, text.clone() + "\n").unwrap();
    let said = mpmd_models::tokenizer(&folder).unwrap_err().to_string();
    assert!(
        said.contains("the file has changed since the job started"),
        "{said}"
    );
    fs::write(&tokenizer, text).unwrap();
    assert!(mpmd_models::tokenizer(&folder).is_ok());
    // Into the same file: a process that reads has it open.
    change_weights(copied.path());
    assert_ne!(folder.facts(), facts);
    for in_training in [true, false] {
        let results = Simulation::new(1, 2).run(|p| {
            let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
            let model = Stages::new(&folder, 2, 20)?;
            if in_training {
                let params = model.training(p, &meshes)?.params(1);
                return params
                    .iter()
                    .try_for_each(|(_, array)| array.block_until_ready().map(drop));
            }
            let mut generator = model.generator(p, &meshes, false)?;
            generator
                .generate(p, &[5, 17], &Default::default(), 2, |_, _| Ok(false))
                .map(drop)
        });
        let said = results[0].as_ref().unwrap_err().to_string();
        assert!(
            said.contains(".weight: the tensor has changed since the job started"),
            "{said}"
        );
    }
}

#[test]
fn version_of_folders_that_differ_is_refused() {
    let other = changed("plain");
    let paths = [path("plain"), other.path().to_owned()];
    let folder = Folder::open(&paths[0]).unwrap();
    let load = |paths: &[PathBuf; 2]| {
        let results = Simulation::new(2, 2).run(|p| {
            let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
            let room = Room {
                blocks: 4,
                sequences: 1,
            };
            let mut inference = Stages::new(&folder, 2, 20)?.inference(p, &meshes, room, false)?;
            inference.load_weights(p, &paths[p.process().index()], 7);
            while p.broadcast_value(ProcessId(0), false, || {
                Ok(inference.versions().is_loading())
            })? {
                inference.poll(p)?;
            }
            Ok((
                inference.versions().newest(),
                inference.versions().failure(),
            ))
        });
        results[0].as_ref().unwrap().clone()
    };
    assert_eq!(load(&[paths[0].clone(), paths[0].clone()]), (7, None));
    let (newest, failure) = load(&paths);
    let failure = failure.unwrap();
    assert_eq!(newest, 0, "{failure}");
    let path = paths[0].display();
    let expected = format!("version 7: {path}: the weights of process 0 have hash ");
    assert!(failure.starts_with(&expected), "{failure}");
    assert!(
        failure.ends_with(": give all hosts the same files"),
        "{failure}"
    );
}

#[test]
fn version_that_processes_read_at_once_is_compared() {
    let other = changed("plain");
    let paths = [path("plain"), other.path().to_owned()];
    let folder = Folder::open(&paths[0]).unwrap();
    let results = Simulation::new(2, 2).run(|p| {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let room = Room {
            blocks: 4,
            sequences: 1,
        };
        let inference = Stages::new(&folder, 2, 20)?.inference(p, &meshes, room, false)?;
        inference.read_weights(p, &paths[0], 1)?;
        p.broadcast_value(ProcessId(0), (), || Ok(()))?;
        inference.read_weights(p, &paths[p.process().index()], 2)?;
        p.broadcast_value(ProcessId(0), (), || Ok(()))
    });
    for result in results {
        let said = result.unwrap_err().to_string();
        assert_eq!(
            said.matches("weights of a folder as version 2, with hash ")
                .count(),
            2,
            "{said}"
        );
    }
}
