//! The best model of a training, evaluations alone, and adapters, as real processes.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::finetune::{FINETUNE, bare, run};
use crate::folders::{open, path, read_all, text, tokens};
use crate::serve::Serving;

const GENERATE: &str = env!("CARGO_BIN_EXE_generate");
/// Options of all trainings here.
const SIZES: &str = "--time 32 --microbatches 2 --evaluate-every 2";

/// A folder for the files that programs write.
struct Written(tempfile::TempDir);

impl Written {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

/// Trains the model `plain` on the test text, which is held out too. Returns the line of JSON and
/// the output on stderr of process 0.
fn train(processes: usize, args: &[&str]) -> (Value, String) {
    let (model, text, stages) = (path("plain"), text(), processes.to_string());
    let (model, text) = (model.to_str().unwrap(), text.to_str().unwrap());
    let mut all = vec!["--model", model, text, "--held-out", text];
    all.extend(["--stages", &stages]);
    all.extend(SIZES.split(' '));
    all.extend(args);
    let mut ends = run(processes, &all);
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    let first = ends.swap_remove(0);
    let line = serde_json::from_str(&first.stdout).expect(&first.stdout);
    (line, first.stderr)
}

/// Runs a program that no launcher starts. Returns its output on stdout.
fn printed(program: &str, model: &Path, args: &[&str]) -> String {
    let mut command = bare(program);
    command.arg("--model").arg(model).args(args);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Evaluates a model on the test text as [`train`] does. Returns the line of JSON.
fn evaluated(model: &Path, args: &[&str]) -> Value {
    let text = text();
    let all = ["--evaluate", text.to_str().unwrap(), "--time", "32"];
    let line = printed(FINETUNE, model, &[&all, args].concat());
    serde_json::from_str(&line).expect(&line)
}

#[test]
fn best_model_and_patience_survive_a_restart() {
    let written = Written::new();
    let [best, checkpoints, other] =
        ["best", "checkpoints", "other"].map(|name| written.name(name));
    // The weights stay the same, so no evaluation is better than the first.
    let train = |processes, steps: &str, best: &str| {
        let fixed = [
            "--lr",
            "0",
            "--patience",
            "2",
            "--checkpoints",
            &checkpoints,
        ];
        let own = ["--steps", steps, "--save-best", best];
        train(processes, &[&fixed[..], &own].concat())
    };
    let (first, said) = train(1, "4", &best);
    assert_eq!(
        (&first["steps"], &first["best"]["step"]),
        (&4.into(), &2.into())
    );
    let loss = first["best"]["held_out_loss"].as_f64().unwrap();
    let last = format!("best evaluation after step 2: loss {loss:.4}, saved in {best}");
    assert_eq!(said.lines().last(), Some(last.as_str()), "{said}");
    assert!(read_all(&written.path("best")) == read_all(&path("plain")));
    let alone = evaluated(&written.path("best"), &["--stages", "2"]);
    assert_eq!(alone["held_out_loss"].as_f64(), Some(loss));

    let (second, said) = train(2, "100", &best);
    assert_eq!(
        (&second["steps"], &second["best"]),
        (&6.into(), &first["best"])
    );
    assert_eq!(said.lines().last(), Some(last.as_str()), "{said}");
    let (third, said) = train(1, "100", &other);
    assert_eq!(
        (&third["steps"], &third["best"]),
        (&6.into(), &first["best"])
    );
    let warning = "warning: the best evaluation is that after step 2 of an earlier run";
    assert!(said.contains(warning), "{said}");
    assert!(said.contains(&format!(", not saved in {other}")), "{said}");

    // The model of the same step of another training.
    let record = written.path("best").join("best.json");
    let saved: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    assert_eq!(saved, first["best"]);
    fs::write(&record, "{\"step\":2,\"held_out_loss\":9.5}\n").unwrap();
    let (_, said) = train(1, "100", &best);
    assert!(said.contains(warning), "{said}");
    assert!(said.contains(&format!(", not saved in {best}")), "{said}");
}

#[test]
fn broken_save_of_the_best_model_leaves_no_record() {
    let (written, text) = (Written::new(), text());
    let best = written.path("best");
    // No file can replace it.
    fs::create_dir_all(best.join("config.json/x")).unwrap();
    fs::write(best.join("best.json"), "of an earlier training").unwrap();
    let mut command = bare(FINETUNE);
    command.arg("--model").arg(path("plain")).arg(&text);
    command.arg("--held-out").arg(&text);
    let steps = ["--steps", "4", "--save-best", best.to_str().unwrap()];
    let output = command.args(SIZES.split(' ')).args(steps).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("config.json: "), "{said}");
    assert!(!best.join("best.json").exists());
}

#[test]
fn evaluation_alone_has_the_loss_of_the_training() {
    let written = Written::new();
    let saved = written.name("saved");
    let (trained, _) = train(1, &["--lr", "1e-3", "--steps", "3", "--save", &saved]);
    let loss = &trained["held_out_loss"];
    for stages in ["1", "3"] {
        let alone = evaluated(&written.path("saved"), &["--stages", stages]);
        assert_eq!(alone["held_out_loss"], *loss, "to the bit");
        let perplexity = alone["perplexity"].as_f64().unwrap();
        assert_eq!(perplexity, loss.as_f64().unwrap().exp());
        assert_eq!(alone["tokens"].as_u64().unwrap() % 32, 0, "{alone}");
    }

    let lines = r#"{"prompt": "the fox", "completion": " jumps"}"#;
    fs::write(written.path("chats.jsonl"), lines).unwrap();
    let chats = written.name("chats.jsonl");
    let line = printed(
        FINETUNE,
        &path("plain"),
        &["--evaluate", &chats, "--time", "64"],
    );
    let alone: Value = serde_json::from_str(&line).unwrap();
    assert!(alone["tokens"].as_u64().unwrap() < 20, "{line}");
}

#[test]
fn adapters_are_used_continued_and_merged() {
    let written = Written::new();
    let [best, merged, more] = ["best", "merged", "more"].map(|name| written.name(name));
    let lora = ["--lora", "2", "--lr", "1e-2", "--steps", "4"];
    let (trained, _) = train(2, &[&lora[..], &["--save-best", &best]].concat());
    let loss = trained["best"]["held_out_loss"].as_f64().unwrap();

    let model = path("plain");
    let adapter = ["--adapter", best.as_str()];
    let alone = evaluated(&model, &adapter);
    let found = alone["held_out_loss"].as_f64().unwrap();
    // The product is added to the weights, not to the activations.
    assert!((found - loss).abs() < 1e-5, "{found}, not {loss}");
    assert_ne!(evaluated(&model, &[]), alone);

    let said = printed(
        FINETUNE,
        &model,
        &[&adapter[..], &["--merge", &merged, "--stages", "2"]].concat(),
    );
    assert_eq!(said, "");
    let merged = written.path("merged");
    assert_eq!(evaluated(&merged, &[]), alone, "to the bit");
    let prompt = [
        "--prompt-ids",
        "5,17,3",
        "--temperature",
        "0",
        "--tokens",
        "9",
        "--json",
    ];
    let texts = [
        printed(GENERATE, &model, &[&adapter[..], &prompt].concat()),
        printed(GENERATE, &merged, &prompt),
    ];
    assert_eq!(texts[0], texts[1]);
    let generated: Value = serde_json::from_str(&texts[0]).unwrap();
    let server = Serving::start("plain", &adapter);
    let body = json!({ "prompt": [5, 17, 3], "temperature": 0, "max_tokens": 9 });
    let answer = server.send("POST", "/v1/completions", &body).json();
    assert_eq!(answer["choices"][0]["text"], generated["text"], "{answer}");
    server.end();

    // The adapter stays as it is.
    let text = text();
    let training = [text.to_str().unwrap(), "--evaluate-every", "2"];
    for (option, others) in [
        ("--merge", &[][..]),
        ("--save", &training[..1]),
        ("--save-best", &training),
        ("--save-adapter", &training[..1]),
    ] {
        let mut command = bare(FINETUNE);
        command.arg("--model").arg(&model).args(adapter);
        let output = command.args([option, &best]).args(others).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let expected = format!("{option} {best}: expected another folder than that of --adapter");
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&expected), "{said}");
    }

    // The first evaluation of the training that continues is that of the adapter.
    let continued = ["--lr", "0", "--steps", "2", "--save-adapter", &more];
    let (continued, _) = train(1, &[&adapter[..], &continued].concat());
    assert_eq!(continued["best"]["held_out_loss"].as_f64(), Some(loss));
    let [first, again] = ["best", "more"].map(|name| read_all(&written.path(name)));
    assert!(first == again, "the same matrices");
}

#[test]
fn files_of_tokens_train_as_their_text() {
    let written = Written::new();
    let folder = open("plain");
    let ids = tokens(&folder);
    let bytes: Vec<u8> = ids
        .ids()
        .iter()
        .flat_map(|id| (*id as u16).to_le_bytes())
        .collect();
    fs::write(written.path("text.bin"), bytes).unwrap();
    let (text, numbers) = (text(), written.name("text.bin"));
    let text = text.to_str().unwrap();
    let options = ["--time", "32", "--steps", "3", "--lr", "1e-3", "--held-out"];
    let lines = [
        printed(
            FINETUNE,
            &path("plain"),
            &[&[text][..], &options, &[text]].concat(),
        ),
        printed(
            FINETUNE,
            &path("plain"),
            &[&["--data", &numbers], &options[..], &[&numbers]].concat(),
        ),
    ];
    assert_eq!(lines[0], lines[1]);
    let alone = printed(
        FINETUNE,
        &path("plain"),
        &["--evaluate", &numbers, "--time", "32"],
    );
    assert_eq!(
        alone,
        printed(
            FINETUNE,
            &path("plain"),
            &["--evaluate", text, "--time", "32"]
        )
    );
}

#[test]
fn options_that_lack_another_are_refused() {
    let written = Written::new();
    let (text, best) = (text(), written.name("best"));
    let text = text.to_str().unwrap();
    fs::write(written.path("chats.jsonl"), "{}").unwrap();
    fs::write(written.path("x.bin"), [0; 8]).unwrap();
    let [chats, numbers] = ["chats.jsonl", "x.bin"].map(|name| written.name(name));
    for (args, code, says) in [
        (
            &[text, "--save-best", &best][..],
            2,
            "--evaluate-every <STEPS>",
        ),
        (
            &[text, "--save-adapter", &best],
            2,
            "<--adapter <DIR>|--lora <RANK>>",
        ),
        (
            &[text, "--lora", "2", "--adapter", &best],
            2,
            "cannot be used with",
        ),
        (&["--merge", &best], 2, "--adapter <DIR>"),
        (
            &["--adapter", &best, "--merge", &best],
            1,
            "no such folder or file",
        ),
        (
            &[
                text,
                "--evaluate-every",
                "1",
                "--patience",
                "1",
                "--time",
                "8",
            ],
            1,
            "error: --patience: nothing is held out for evaluations: give --held-out FILE",
        ),
        (
            &["--data", &chats, "--held-out", &numbers],
            1,
            "expected a file of examples (.jsonl, .json), as --data is one",
        ),
        (
            &[text, "--held-out", &chats],
            1,
            "expected a text or tokens, as the training data are, found a file of examples",
        ),
        (
            &["--data", &numbers, "--held-out", &chats],
            1,
            "expected a text or tokens, as the training data are, found a file of examples",
        ),
        (
            &["--data", text],
            1,
            "expected a name that ends with .jsonl or .json",
        ),
        (
            &["--evaluate", text, "--elastic"],
            2,
            "'--evaluate <FILE>' cannot be used with '--elastic'",
        ),
        (
            &["--score", text, "--tokens", "9", "--elastic"],
            2,
            "'--score <FILE>' cannot be used with '--elastic'",
        ),
        (
            &["--merge", &best, "--adapter", &best, "--elastic"],
            2,
            "'--merge <DIR>' cannot be used with '--elastic'",
        ),
        (
            &[
                "--evaluate",
                text,
                "--publish",
                "localhost:1",
                "--weights-secret",
                text,
            ],
            2,
            "'--evaluate <FILE>' cannot be used with '--publish <ADDRESS>'",
        ),
        (
            &["--evaluate", text, "--patience", "2"],
            2,
            "'--evaluate <FILE>' cannot be used with '--patience <N>'",
        ),
        (
            &["--score", text, "--tokens", "9", "--save-best", &best],
            2,
            "'--score <FILE>' cannot be used with '--save-best <DIR>'",
        ),
        (
            &["--evaluate", text, "--lr", "1"],
            2,
            "'--evaluate <FILE>' cannot be used with '--lr <LR>'",
        ),
    ] {
        let output = bare(FINETUNE)
            .arg("--model")
            .arg(path("plain"))
            .args(args)
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(says), "{args:?}: {said}");
    }
}
