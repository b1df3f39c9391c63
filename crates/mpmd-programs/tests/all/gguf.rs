//! The programs with a GGUF file in place of a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mpmd::testing::{ProcessEnd, Processes};
use mpmd_models::Folder;
use serde_json::{Value, json};

use crate::finetune::run;
use crate::folders::{path as folder, text};
use crate::serve::Serving;

fn path(file: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mpmd-models/tests/gguf");
    tests.join(format!("{file}.gguf"))
}

fn generate(model: &Path, processes: usize, args: &[&str]) -> Vec<ProcessEnd> {
    let stages = processes.to_string();
    let own = ["--model", model.to_str().unwrap(), "--stages", &stages];
    let job = Processes::new(processes, env!("CARGO_BIN_EXE_generate"));
    let args: Vec<&str> = own.iter().chain(args).copied().collect();
    let job = job.args(&args).deadline(Duration::from_secs(120));
    job.start().unwrap().wait().unwrap()
}

/// Returns the line of JSON that `generate` prints.
fn printed(model: &Path, processes: usize, args: &[&str]) -> Value {
    let ends = generate(
        model,
        processes,
        &[args, &["--json", "--tokens", "12"]].concat(),
    );
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    serde_json::from_str(&ends[0].stdout).unwrap()
}

/// Returns the tokens of a text in the tokenizer of a folder, for `--prompt-ids`.
fn ids(name: &str, text: &str) -> String {
    let tokenizer = mpmd_models::tokenizer(&Folder::open(folder(name)).unwrap()).unwrap();
    let tokens = tokenizer.encode(text, false).unwrap();
    let tokens: Vec<String> = tokens.get_ids().iter().map(u32::to_string).collect();
    tokens.join(",")
}

#[test]
fn generate_prints_the_tokens_of_the_file_at_any_number_of_stages() {
    let file = path("qwen2-f16");
    let whole = printed(&file, 1, &["--prompt", "Once upon a time"]);
    // The tokenizer of the file adds the token at the start.
    let ids = ids("qwen2", "<s>Once upon a time");
    for processes in [1, 2, 3] {
        assert_eq!(printed(&file, processes, &["--prompt-ids", &ids]), whole);
    }
    // By default the values of the file are f32: in the folder, they are what was rounded.
    assert_eq!(whole["tokens"].as_array().unwrap().len(), 12);
}

#[test]
fn template_of_the_file_makes_the_prompt() {
    let file = path("mistral-f32");
    let ids = ids("mistral", "<s>user: Hi\nassistant:");
    let right = printed(&file, 1, &["--prompt-ids", &ids]);
    assert_eq!(printed(&file, 1, &["--chat", "Hi"]), right);
    assert_ne!(printed(&file, 1, &["--prompt", "Hi"]), right);
}

#[test]
fn serve_replies_by_the_template_of_the_file() {
    let file = path("llama3-bf16");
    let file = file.to_str().unwrap();
    let serving = Serving::start_with(&["--model", file, "--stages", "2"]);
    let models = serving.send("GET", "/v1/models", &Value::Null).json();
    assert_eq!(models["data"][0]["id"], "llama3-bf16");

    let ask = json!({
        "messages": [{ "role": "user", "content": "Hi" }],
        "max_tokens": 12,
        "temperature": 0,
    });
    let answer = serving.send("POST", "/v1/chat/completions", &ask).json();
    let prompt = ids("llama3", "<s>user: Hi\nassistant:");
    let right = printed(&path("llama3-bf16"), 1, &["--prompt-ids", &prompt]);
    assert_eq!(
        answer["choices"][0]["message"]["content"], right["text"],
        "{answer}"
    );
    let counted = prompt.split(',').count();
    assert_eq!(answer["usage"]["prompt_tokens"], counted, "{answer}");
}

#[test]
fn score_and_training_take_the_file_and_save_a_folder() {
    let file = path("plain-q8_0");
    let file = file.to_str().unwrap();
    let text = text();
    let text = text.to_str().unwrap();
    let score = |model: &str| {
        let args = [
            "--model", model, "--score", text, "--tokens", "100", "--stages", "2",
        ];
        let ends = run(2, &args);
        assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
        let line: Value = serde_json::from_str(&ends[0].stdout).unwrap();
        line["nats_per_token"].as_f64().unwrap()
    };
    let before = score(file);
    let unpacked = score(folder("plain").to_str().unwrap());
    assert!((before - unpacked).abs() < 0.02, "{before} {unpacked}");

    let to = tempfile::tempdir().unwrap();
    let saved = to.path().join("tuned");
    let saved = saved.to_str().unwrap();
    let train = |to: &str| {
        let args = [
            "--model", file, text, "--stages", "2", "--steps", "3", "--time", "16", "--save", to,
        ];
        run(2, &args)
    };
    let ends = train(saved);
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    let config = fs::read_to_string(Path::new(saved).join("config.json")).unwrap();
    assert!(config.contains("\"model_type\": \"llama\""), "{config}");
    assert!(score(saved) < before);

    let refused = train(&format!("{saved}.gguf"));
    let right = "expected a folder: models are saved as safetensors, not as GGUF";
    assert!(
        refused.iter().any(|end| end.stderr.contains(right)),
        "{refused:?}"
    );
    assert!(refused.iter().all(|end| end.code() != 0), "{refused:?}");
}

#[test]
fn file_that_is_not_there_is_named() {
    let ends = generate(Path::new("absent-Q4_K_M.gguf"), 1, &["--prompt", "a"]);
    let right = "absent-Q4_K_M.gguf: ";
    assert!(ends[0].stderr.contains(right), "{ends:?}");
    assert!(!ends[0].stderr.contains("hub"), "{ends:?}");
}
