//! The program `finetune` as real processes.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use mpmd::aval::{DType, ShapedArray};
use mpmd::launch::Token;
use mpmd::testing::{ProcessEnd, Processes};
use mpmd::train::tensors::TensorFile;
use mpmd::weights::{Subscribing, WantedLeaf};
use mpmd::{MpmdArray, Program};

use crate::folders::{change, change_config, copy, expected, path, read_all, text};
use crate::stopping::Alone;

pub(crate) const FINETUNE: &str = env!("CARGO_BIN_EXE_finetune");

/// Runs the program as `processes` processes until all have ended.
pub(crate) fn run(processes: usize, args: &[&str]) -> Vec<ProcessEnd> {
    let job = Processes::new(processes, FINETUNE)
        .args(args)
        .deadline(Duration::from_secs(120));
    job.start().unwrap().wait().unwrap()
}

/// Returns a command without the variables of mpmd that the test process may have.
pub(crate) fn bare(program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MPMD_") {
            command.env_remove(name);
        }
    }
    command
}

#[test]
fn score_is_one_line_of_json_from_process_0() {
    let (model, text) = (path("llama3"), text());
    let (model, text) = (model.to_str().unwrap(), text.to_str().unwrap());
    for (processes, stages) in [(1, "1"), (2, "2"), (3, "3")] {
        let args = [
            "--model", model, "--score", text, "--tokens", "200", "--stages", stages,
        ];
        let ends = run(processes, &args);
        assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
        let lines: Vec<&str> = ends.iter().flat_map(|end| end.stdout.lines()).collect();
        let [line] = lines[..] else {
            panic!("{lines:?}")
        };
        assert_eq!(line, ends[0].stdout.trim_end());
        let nats = line
            .strip_prefix("{\"tokens\":199,\"nats_per_token\":")
            .expect(line);
        let nats: f64 = nats.strip_suffix('}').expect(line).parse().unwrap();
        assert!(
            (nats - expected("llama3").nats[&200]).abs() < 1e-4,
            "{line}"
        );
    }
}

#[test]
fn errors_have_no_control_characters_of_a_folder() {
    let folder = copy("plain");
    change_config(folder.path(), |config| {
        config["\u{1b}[31m\u{9b}RED\u{202e}"] = 1.into()
    });
    for program in [FINETUNE, env!("CARGO_BIN_EXE_generate")] {
        let mut command = bare(program);
        command.arg("--model").arg(folder.path());
        match program == FINETUNE {
            true => command.args(["--score", text().to_str().unwrap(), "--tokens", "9"]),
            false => command.args(["--prompt-ids", "1"]),
        };
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("\\u001b[31m\\u009bRED\\u202e"), "{said:?}");
        let is_shown = |c: char| c == '\n' || !c.is_control() && c != '\u{202e}';
        assert!(said.chars().all(is_shown), "{said:?}");
    }
}

#[test]
fn any_cut_gives_the_same_score_and_memory_is_respected() {
    let (model, text) = (path("grouped"), text());
    let arguments = [
        "--model",
        model.to_str().unwrap(),
        "--score",
        text.to_str().unwrap(),
    ];
    let score = |processes: usize, cut: &[&str]| {
        let ends = run(
            processes,
            &[&arguments[..], &["--tokens", "100"], cut].concat(),
        );
        assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
        ends[0].stdout.clone()
    };
    let whole = score(1, &[]);
    assert_eq!(score(2, &["--cut", "0..1,1..5"]), whole);
    assert_eq!(score(3, &["--cut", "0..3,3..4,4..5"]), whole);
    assert_eq!(
        score(2, &["--stages", "2", "--memory", "1MiB,300KiB"]),
        whole
    );
    let refused = |cut: &[&str]| {
        let output = bare(FINETUNE)
            .args(arguments)
            .args(["--tokens", "9"])
            .args(cut)
            .output();
        let output = output.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(1) && said.lines().count() == 1,
            "{said}"
        );
        said
    };
    for (cut, expected) in [
        (
            "--cut 0..2,3..5",
            "--cut: expected stage 1 to begin at layer 2, found 3..5",
        ),
        (
            "--cut 0..2,2..4",
            "--cut: expected 5 layers in all, found 4",
        ),
        (
            "--cut 0..2,2..9",
            "--cut: expected 5 layers in all, found 9",
        ),
        (
            "--stages 2 --memory 1MiB",
            "--memory: expected 2 sizes, one for each stage, found 1",
        ),
        (
            "--cut 0..4,4..5 --memory 9KiB,1MiB",
            "KiB for stage 0, found 9.0 KiB",
        ),
        (
            "--stages 2 --memory 200KiB,100KiB",
            "stage 0 needs 240.8 KiB, and has 200.0 KiB: 40.8 KiB more",
        ),
    ] {
        let said = refused(&cut.split(' ').collect::<Vec<_>>());
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn training_continues_with_experts_on_more_devices() {
    let (model, folder) = (copy("mixtral"), tempfile::tempdir().unwrap());
    change_config(model.path(), |config| {
        config["output_router_logits"] = true.into()
    });
    let text = text();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    // The rate rises in all of these steps, so it does not depend on their number.
    let train = |processes: usize, devices: &str, steps: &str, name: &str| {
        let metrics = at(&format!("{name}-{steps}.jsonl"));
        let (saved, checkpoints) = (at(&format!("{name}-model")), at(name));
        let mut args = vec![
            "--model",
            model.path().to_str().unwrap(),
            text.to_str().unwrap(),
        ];
        args.extend("--time 32 --microbatches 2 --lr 1e-2 --warmup 1000".split_whitespace());
        args.extend(["--steps", steps, "--metrics", &metrics, "--save", &saved]);
        args.extend(["--checkpoints", &checkpoints]);
        args.extend(devices.split_whitespace());
        let ends = run(processes, &args);
        assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
        losses(Path::new(&metrics))
    };
    let whole = train(1, "--stages 2", "6", "whole");
    let mut parts = train(2, "--stages 2 --expert-parallel 2,1", "2", "parts");
    parts.extend(train(2, "--stages 2 --expert-parallel 4,2", "4", "parts"));
    parts.extend(train(1, "--stages 2", "6", "parts"));
    assert_eq!(parts, whole);
    let [a, b] = ["whole-model", "parts-model"].map(|name| read_all(Path::new(&at(name))));
    assert!(a == b, "the models differ");
}

#[test]
fn held_out_text_is_evaluated_while_training_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (model, text) = (path("plain"), text());
    let metrics = folder.path().join("metrics.jsonl");
    let mut args = vec!["--model", model.to_str().unwrap(), text.to_str().unwrap()];
    args.extend("--stages 2 --time 32 --microbatches 2 --steps 5".split_whitespace());
    args.extend(["--held-out", text.to_str().unwrap()]);
    args.extend(["--evaluate-every", "2"]);
    args.extend(["--metrics", metrics.to_str().unwrap()]);
    let ends = run(2, &args);
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");

    let lines = std::fs::read_to_string(&metrics).unwrap();
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let evaluated = lines
        .filter(|line| line["evaluation"].is_f64())
        .map(|line| line["step"].as_u64().unwrap());
    assert_eq!(evaluated.collect::<Vec<_>>(), [2, 4, 5]);
}

#[test]
fn score_that_is_no_number_is_an_error() {
    let folder = copy("plain");
    change(folder.path(), |tensors| {
        let output = tensors
            .iter_mut()
            .find(|(name, ..)| name == "lm_head.weight")
            .unwrap();
        // All values are finite, but not all sums.
        let (values, _) = output.2.as_chunks_mut();
        values.fill(f32::MAX.to_le_bytes());
    });
    let (model, text) = (folder.path().to_str().unwrap(), text());
    let text = text.to_str().unwrap();
    for (processes, stages) in [(1, "1"), (2, "2")] {
        let args = [
            "--model", model, "--score", text, "--tokens", "50", "--stages", stages,
        ];
        let ends = run(processes, &args);
        for end in &ends {
            assert_eq!((end.code(), end.stdout.as_str()), (1, ""), "{end:?}");
        }
        let said: String = ends.iter().map(|end| end.stderr.as_str()).collect();
        let expected = format!("error: the loss of {text} in {model} is NaN: its activations");
        assert_eq!(
            said.matches(&expected).count(),
            1,
            "once, by process 0: {said}"
        );
    }
}

#[test]
fn mistakes_in_arguments_start_no_process() {
    let (model, text) = (path("plain"), text());
    let text = text.to_str().unwrap();
    let file = model.join("config.json");
    let positions = format!(
        ": {}: max_position_embeddings: expected at least 1025, the tokens of a sequence",
        file.display()
    );
    let time = format!("error: --time{positions}");
    let tokens = format!("error: --tokens{positions}");
    for (args, expected) in [
        (&[text, "--time", "1025"][..], time.as_str()),
        (&["--score", text, "--tokens", "1025"], tokens.as_str()),
        (&[text, "--stages", "9"], "error: --stages: "),
        (
            &[text, "--cut", "0..1,1..2,2..3,3..4,4..5"],
            "error: --cut: ",
        ),
        (
            &["/dev/null", "--stages", "2"],
            "cannot read /dev/null: it is no regular file",
        ),
        (
            &["--score", "/absent", "--tokens", "9"],
            "cannot read /absent: No such file",
        ),
        (
            &["--data", "/absent.jsonl"],
            "cannot read /absent.jsonl: No such file",
        ),
        (
            &[text, "--held-out", "/absent"],
            "cannot read /absent: No such file",
        ),
    ] {
        let output = bare(FINETUNE)
            .arg("--model")
            .arg(&model)
            .args(args)
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains(expected) && said.lines().count() == 1,
            "{said}"
        );
    }
}

#[test]
fn models_are_saved_outside_of_checkpoints() {
    let (model, text) = (path("plain"), text());
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    for inside in ["", "step-00000002"] {
        let output = bare(FINETUNE)
            .arg("--model")
            .arg(&model)
            .arg(&text)
            .args(["--steps", "1", "--checkpoints"])
            .arg(&checkpoints)
            .arg("--save")
            .arg(checkpoints.join(inside))
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("expected a folder outside of that of --checkpoints"),
            "{said}"
        );
    }
}

#[test]
fn what_training_lacks_is_refused_and_scored() {
    let (folder, text) = (copy("gpt2"), text());
    change_config(folder.path(), |config| {
        // The default is a tenth.
        config.as_object_mut().unwrap().remove("resid_pdrop");
    });
    let run = |args: &[&str]| {
        let mut command = bare(FINETUNE);
        command
            .arg("--model")
            .arg(folder.path())
            .args(args)
            .arg(&text)
            .output()
            .unwrap()
    };
    let output = run(&[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("config.json: resid_pdrop: expected 0, found 0.1"),
        "{said}"
    );
    assert_eq!(
        (output.status.code(), said.lines().count()),
        (Some(1), 1),
        "{said}"
    );
    let output = run(&["--tokens", "9", "--score"]);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn other_model_or_rank_on_resume_is_refused() {
    let (checkpoints, text) = (tempfile::tempdir().unwrap(), text());
    let train = |model: &Path, steps: &str, lora: &str| {
        let mut args = vec!["--model", model.to_str().unwrap(), text.to_str().unwrap()];
        args.extend([
            "--checkpoints",
            checkpoints.path().to_str().unwrap(),
            "--steps",
            steps,
        ]);
        args.extend("--time 8 --microbatches 1".split_whitespace());
        args.extend(lora.split_whitespace());
        let [end] = <[ProcessEnd; 1]>::try_from(run(1, &args)).unwrap();
        (end.code(), end.stderr)
    };
    let (first, moved, other) = (path("plain"), copy("plain"), copy("plain"));
    change(other.path(), |tensors| {
        let weight = tensors
            .iter_mut()
            .find(|(name, ..)| name.ends_with("o_proj.weight"))
            .unwrap();
        weight.2[..4].copy_from_slice(&0.25f32.to_le_bytes());
    });
    let (code, said) = train(&first, "1", "--lora 2");
    assert_eq!(code, 0, "{said}");
    let rotated = copy("plain");
    change_config(rotated.path(), |config| {
        config["rope_parameters"]["rope_theta"] = 5e5.into()
    });
    let lora = "rank 2 and alpha 4";
    for (model, options, name, found, expected) in [
        (
            first.as_path(),
            "--lora 4",
            "--lora",
            lora,
            "rank 4 and alpha 8",
        ),
        (
            first.as_path(),
            "--lora 2 --lora-alpha 3",
            "--lora",
            lora,
            "rank 2 and alpha 3",
        ),
        (first.as_path(), "", "--lora", lora, "none"),
        (
            rotated.path(),
            "--lora 2",
            "--model rope_theta",
            "10000",
            "500000",
        ),
        (
            other.path(),
            "--lora 2",
            "--model weights",
            "with hash ",
            "with hash ",
        ),
    ] {
        let (code, said) = train(model, "2", options);
        assert_eq!(code, 1, "{said}");
        let found = format!("step-00000001.json: the checkpoint has {name} {found}");
        let expected = format!(", and this training has {name} {expected}");
        assert!(said.contains(&found) && said.contains(&expected), "{said}");
    }
    // A copy that was made for longer sequences is the same model.
    change_config(moved.path(), |config| {
        config["max_position_embeddings"] = 4096.into()
    });
    let (code, said) = train(moved.path(), "2", "--lora 2");
    assert_eq!(code, 0, "{said}");
}

/// Trains a model with these arguments. Returns the JSON line of process 0, and its other output.
fn evaluated(processes: usize, args: &[&str]) -> (serde_json::Value, String) {
    let options = "--steps 3 --time 64 --microbatches 2 --lr 1e-3".split_whitespace();
    let stages = processes.to_string();
    let model = path("plain");
    let mut all = vec!["--model", model.to_str().unwrap(), "--stages", &stages];
    all.extend(args.iter().copied().chain(options));
    let mut ends = run(processes, &all);
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    let first = ends.swap_remove(0);
    (
        serde_json::from_str(&first.stdout).expect(&first.stdout),
        first.stderr,
    )
}

#[test]
fn examples_and_second_files_train_alike_on_more_processes() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, lines: &[serde_json::Value]| {
        let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        fs::write(folder.path().join(name), lines.join("\n")).unwrap();
        folder.path().join(name).to_str().unwrap().to_owned()
    };
    let line = |i: usize| {
        serde_json::json!({ "id": i, "prompt": format!("{i} and"),
        "completion": format!(" {}", "so on ".repeat(i % 5 + 1)) })
    };
    let lines: Vec<_> = (0..20).map(line).collect();
    let (data, other) = (file("data.jsonl", &lines), file("other.jsonl", &lines[..3]));
    let (text, other_text) = (text(), folder.path().join("other.txt"));
    fs::copy(path("plain/config.json"), &other_text).unwrap();
    let (text, other_text) = (text.to_str().unwrap(), other_text.to_str().unwrap());
    for (args, says) in [
        (
            &["--data", &data][..],
            "epoch: 5 rows of 64 tokens, 2.5 steps",
        ),
        (
            &["--data", &data, "--held-out", &other, "--lora", "2"],
            "evaluation after step 3",
        ),
        (&[text, "--held-out", other_text], "evaluation after step 3"),
    ] {
        let (alone, said) = evaluated(1, args);
        assert!(said.contains(says), "{said}");
        assert!(alone["loss"].as_f64().unwrap() > 1.0, "{alone}");
        assert!(alone["held_out_loss"].as_f64().unwrap() > 1.0, "{alone}");
        assert_eq!(evaluated(2, args).0, alone, "{args:?}");
    }
}

#[test]
fn bad_folder_gives_every_process_the_same_message() {
    let folder = copy("plain");
    let config = folder.path().join("config.json");
    let changed = fs::read_to_string(&config)
        .unwrap()
        .replace("\"vocab_size\": 320", "\"vocab_size\": 300");
    fs::write(&config, changed).unwrap();
    let (model, text) = (folder.path().to_str().unwrap(), text());
    let ends = run(
        2,
        &["--model", model, text.to_str().unwrap(), "--stages", "2"],
    );
    for end in &ends {
        assert_eq!((end.code(), end.stdout.as_str()), (1, ""), "{end:?}");
        assert_eq!(
            end.stderr.trim_end(),
            format!(
                "error: {model}/model.safetensors: lm_head.weight: expected f32, bf16 or f16 [300, \
                 32], found f32 [320, 32]"
            )
        );
    }
}

#[test]
fn bad_folder_gives_one_message_before_processes_start() {
    let mut command = bare(FINETUNE);
    let missing = path("missing");
    let output = command
        .arg("--model")
        .arg(&missing)
        .arg(text())
        .args(["--stages", "4"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    let expected = format!(
        "error: --model {}: no such folder or file\n",
        missing.display()
    );
    assert_eq!(error, expected);
}

/// Returns the loss of each step from a file of metrics.
fn losses(file: &Path) -> BTreeMap<u64, f64> {
    let text = fs::read_to_string(file).unwrap();
    let lines = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let steps = lines.filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?)));
    steps.collect()
}

#[test]
fn continued_training_has_the_losses_of_an_uninterrupted_one() {
    for lora in ["", "--lora 2"] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (model, text) = (path("grouped"), text());
        // The rate rises in all of these steps, so it does not depend on their number.
        let train = |processes: usize, stages: &str, steps: &str, name: &str| {
            let lora = lora.split_whitespace();
            let metrics = at(&format!("{name}-{steps}.jsonl"));
            let mut args = vec!["--model", model.to_str().unwrap(), text.to_str().unwrap()];
            args.extend("--time 32 --microbatches 2 --lr 1e-2 --warmup 1000".split_whitespace());
            args.extend(lora);
            let (saved, checkpoints) = (at(&format!("{name}-model")), at(name));
            args.extend(["--stages", stages, "--steps", steps, "--metrics", &metrics]);
            args.extend([
                "--save",
                &saved,
                "--checkpoints",
                &checkpoints,
                "--save-every",
                "2",
            ]);
            let adapter = at(&format!("{name}-adapter"));
            if args.contains(&"--lora") {
                args.extend(["--save-adapter", &adapter]);
            }
            let ends = run(processes, &args);
            assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
            losses(Path::new(&metrics))
        };
        let whole = train(1, "2", "8", "whole");
        assert_eq!(whole.len(), 8);
        let mut parts = train(2, "2", "5", "parts");
        parts.extend(train(3, "3", "8", "parts"));
        assert_eq!(parts, whole, "{lora}");
        let [a, b] = ["whole-model", "parts-model"].map(|name| read_all(Path::new(&at(name))));
        assert!(a == b, "the models differ: {lora}");
        let names = |file: String| TensorFile::open(Path::new(&file)).unwrap().names();
        let saved = names(at("whole/step-00000008/model.safetensors"));
        let is_matrix =
            |name: &String| name.ends_with("lora_A.weight") || name.ends_with("lora_B.weight");
        assert_eq!(saved.iter().all(is_matrix), !lora.is_empty(), "{saved:?}");
        if !lora.is_empty() {
            let adapter = names(at("whole-adapter/adapter_model.safetensors"));
            assert_eq!(adapter.len() * 3, saved.len(), "parameters and two moments");
            assert!(adapter.iter().all(|name| {
                name.starts_with("base_model.model.model.layers.") && is_matrix(name)
            }));
            let config = fs::read(at("whole-adapter/adapter_config.json")).unwrap();
            let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
            assert_eq!(
                (config["r"].as_u64(), config["lora_alpha"].as_f64()),
                (Some(2), Some(4.0))
            );
            assert_eq!(config["target_modules"].as_array().unwrap().len(), 7);
            let [a, b] = ["whole", "parts"].map(|name| {
                fs::read(at(&format!("{name}-adapter/adapter_model.safetensors"))).unwrap()
            });
            assert!(a == b, "the adapters differ");
        }
    }
}

#[test]
fn folder_without_room_for_files_stops_before_the_first_step() {
    let (model, text) = (path("plain"), text());
    for option in ["--save", "--checkpoints"] {
        // Nobody can create files there, not even root.
        let args = [
            model.to_str().unwrap(),
            text.to_str().unwrap(),
            option,
            "/proc",
        ];
        let args = [&["--model"], &args[..], &["--time", "8", "--stages", "2"]].concat();
        let ends = run(2, &args);
        for end in &ends {
            assert_eq!((end.code(), end.stdout.as_str()), (1, ""), "{end:?}");
            let said = "/proc: no file can be created there: ";
            assert!(
                end.stderr.contains(said) && !end.stderr.contains("step 1/"),
                "{end:?}"
            );
        }
    }
}

#[test]
fn full_disk_is_one_message_with_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let (model, text, to) = (path("plain"), text(), folder.path().join("saved"));
    let mut command = bare("bash");
    // A file of the model has more than the 100 KiB that are allowed.
    command
        .arg("-c")
        .arg("ulimit -f 100; trap '' XFSZ; exec \"$0\" \"$@\"")
        .arg(FINETUNE);
    command
        .arg("--model")
        .arg(&model)
        .arg(text)
        .arg("--save")
        .arg(&to);
    command.args([
        "--steps",
        "1",
        "--time",
        "8",
        "--stages",
        "2",
        "--processes",
        "1",
    ]);
    let output = command.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let file = format!("error: {}", to.join("model.safetensors").display());
    let lines: Vec<&str> = error
        .lines()
        .filter(|line| line.contains("error"))
        .collect();
    let [line] = lines[..] else { panic!("{error}") };
    assert!(
        line.contains(&file) && line.contains("File too large"),
        "{line}"
    );
}

#[test]
fn program_tells_its_version() {
    let output = bare(FINETUNE).arg("--version").output().unwrap();
    let expected = format!("finetune {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(
        (output.status.code(), output.stdout),
        (Some(0), expected.into_bytes())
    );
}

#[test]
fn errors_that_nobody_reads_do_not_end_a_training() {
    for (args, code) in [(&["--steps", "5"][..], 0), (&["--stages", "9"], 1)] {
        let mut job = Alone::start(args);
        drop(job.0.stderr.take());
        assert_eq!(job.wait().code(), Some(code));
    }
}

#[test]
fn text_and_tokenizer_need_only_be_on_the_first_host() {
    // Two folders stand for two hosts.
    let hosts = [copy("plain"), copy("plain")];
    fs::copy(text(), hosts[0].path().join("text.txt")).unwrap();
    fs::remove_file(hosts[1].path().join("tokenizer.json")).unwrap();
    let trained = [
        "text.txt",
        "--steps",
        "1",
        "--time",
        "8",
        "--microbatches",
        "2",
    ];
    for args in [&trained[..], &["--score", "text.txt", "--tokens", "9"]] {
        let args = [&["--model", ".", "--stages", "2"], args].concat();
        let deadline = Duration::from_secs(120);
        let mut job = Processes::new(2, FINETUNE)
            .args(args)
            .deadline(deadline)
            .prepare()
            .unwrap();
        for (process, host) in hosts.iter().enumerate() {
            let mut command = job.command(process);
            command.current_dir(host.path());
            job.spawn(command).unwrap();
        }
        let ends = job.wait().unwrap();
        assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    }
}

#[test]
fn finetune_publishes_what_it_saves() {
    let names = ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"];
    let folder = tempfile::tempdir().unwrap();
    let (secret, saved) = (folder.path().join("secret"), folder.path().join("saved"));
    fs::write(&secret, "a secret of more than thirty-two bytes").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let address = format!("127.0.0.1:{port}");
    let (model, text) = (path("plain"), text());
    let at = |path: &Path| path.to_str().unwrap().to_owned();
    let args = [
        "--model",
        &at(&model),
        &at(&text),
        "--stages=2",
        "--steps=300",
        "--publish-every=100",
        "--publish-as=bf16",
        "--time=32",
        "--save",
        &at(&saved),
        "--publish",
        &address,
        "--weights-secret",
        &at(&secret),
    ];
    let avals = names.map(|name| read_all(&model)[name].0.clone());
    let (arrays, ends) = std::thread::scope(|scope| {
        let program = scope.spawn(|| run(2, &args));
        let mut p = Program::builder().alone().unwrap();
        let all = p.mesh(&[("all", 1)]).unwrap().replicated();
        let wanted = |at: usize, dtype| {
            let aval = ShapedArray::new(avals[at].shape(), dtype);
            WantedLeaf::new(names[at], aval, all.clone())
        };
        let token = Token::of_secret(&fs::read(&secret).unwrap(), "model");
        let subscribing = Subscribing::new("model", address.as_str(), token);
        let wanted = vec![wanted(0, DType::Bf16), wanted(1, DType::F32)];
        let mut subscription = p.subscribe(subscribing, wanted).unwrap();
        let mut last = (0, Vec::new());
        while last.0 < 300 {
            assert!(
                subscription
                    .wait(last.0 + 1, Duration::from_secs(100))
                    .is_some()
            );
            last = subscription.next(&mut p).unwrap().unwrap_or(last);
        }
        assert_eq!(last.0, 300);
        let host = |array: &MpmdArray| array.to_host().unwrap().unwrap();
        let arrays: Vec<_> = last.1.iter().map(host).collect();
        drop((subscription, last));
        p.finish().unwrap();
        (arrays, program.join().unwrap())
    });
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    let saved = read_all(&saved);
    let floats = |name: &str| {
        let (_, bytes) = &saved[name];
        bytes
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
            .collect()
    };
    let [matrix, vector]: [Vec<f32>; 2] = names.map(floats);
    let rounded: Vec<half::bf16> = matrix.into_iter().map(half::bf16::from_f32).collect();
    assert_eq!(arrays[0].to_vec::<half::bf16>().unwrap(), rounded);
    assert_eq!(arrays[1].to_vec::<f32>().unwrap(), vector);
}
