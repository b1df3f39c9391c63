//! The program `finetune` as real processes.

use std::fs;
use std::process::Command;
use std::time::Duration;

use mpmd::testing::{ProcessEnd, Processes};

use crate::folders::{copy, expected, path, text};

const FINETUNE: &str = env!("CARGO_BIN_EXE_finetune");

/// Runs the program as `processes` processes until all have ended.
fn run(processes: usize, args: &[&str]) -> Vec<ProcessEnd> {
    let job = Processes::new(processes, FINETUNE).args(args).deadline(Duration::from_secs(120));
    job.start().unwrap().wait().unwrap()
}

#[test]
fn score_is_one_line_of_json_from_process_0() {
    let (model, text) = (path("llama3"), text());
    let (model, text) = (model.to_str().unwrap(), text.to_str().unwrap());
    for (processes, stages) in [(1, "1"), (2, "2"), (3, "3")] {
        let args = ["--model", model, "--score", text, "--tokens", "200", "--stages", stages];
        let ends = run(processes, &args);
        assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
        let lines: Vec<&str> = ends.iter().flat_map(|end| end.stdout.lines()).collect();
        let [line] = lines[..] else { panic!("{lines:?}") };
        assert_eq!(line, ends[0].stdout.trim_end());
        let nats = line.strip_prefix("{\"tokens\":199,\"nats_per_token\":").expect(line);
        let nats: f64 = nats.strip_suffix('}').expect(line).parse().unwrap();
        assert!((nats - expected("llama3").nats[&200]).abs() < 1e-4, "{line}");
    }
}

#[test]
fn bad_folder_gives_every_process_the_same_message() {
    let folder = copy("plain");
    let config = folder.path().join("config.json");
    let changed =
        fs::read_to_string(&config).unwrap().replace("\"vocab_size\": 320", "\"vocab_size\": 300");
    fs::write(&config, changed).unwrap();
    let (model, text) = (folder.path().to_str().unwrap(), text());
    let ends = run(2, &["--model", model, text.to_str().unwrap(), "--stages", "2"]);
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
    let mut command = Command::new(FINETUNE);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MPMD_") {
            command.env_remove(name);
        }
    }
    let missing = path("missing");
    let output =
        command.arg("--model").arg(&missing).arg(text()).args(["--stages", "4"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    let file = missing.join("config.json");
    assert!(error.contains(&format!("{}: expected the config", file.display())), "{error}");
}
