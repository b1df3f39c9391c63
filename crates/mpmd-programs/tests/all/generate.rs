//! The program `generate` as real processes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use mpmd::testing::{ProcessEnd, Processes};
use mpmd_models::{Folder, Sampling};

use crate::folders::{Expected, change_config, copy, expected, open, path};

/// Runs `generate` as `processes` processes, each with a stage. Returns the output of process 0.
fn printed(model: &Path, processes: usize, args: &[&str]) -> String {
    let stages = processes.to_string();
    let mut ends = ended(model, processes, &[args, &["--stages", &stages]].concat());
    assert!(ends.iter().all(|end| end.code() == 0), "{ends:?}");
    assert!(
        ends[1..].iter().all(|end| end.stdout.is_empty()),
        "{ends:?}"
    );
    ends.swap_remove(0).stdout
}

fn ended(model: &Path, processes: usize, args: &[&str]) -> Vec<ProcessEnd> {
    let job = Processes::new(processes, env!("CARGO_BIN_EXE_generate"));
    let args = [&["--model", model.to_str().unwrap()], args].concat();
    job.args(&args)
        .deadline(Duration::from_secs(120))
        .start()
        .unwrap()
        .wait()
        .unwrap()
}

/// Returns the tokens and the text of the line that `--json` prints.
fn parsed(line: &str) -> (Vec<u32>, String) {
    assert!(
        line.starts_with("{\"tokens\":[") && line.lines().count() == 1,
        "{line}"
    );
    let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
    let text = line["text"].as_str().unwrap().to_owned();
    (serde_json::from_value(line["tokens"].take()).unwrap(), text)
}

#[test]
fn program_prints_the_same_tokens_on_any_number_of_processes() {
    let Expected { prompt, greedy, .. } = expected("qwen3");
    let prompt = prompt
        .iter()
        .map(u32::to_string)
        .collect::<Vec<_>>()
        .join(",");
    let model = path("qwen3");
    let greedy_args = [
        "--prompt-ids",
        &prompt,
        "--tokens",
        "64",
        "--temperature",
        "0",
    ];
    let drawn = "--prompt,A kernel,--tokens,40,--temperature,0.9,--top-p,0.9,--seed,5,--ignore-eos";
    let drawn: Vec<&str> = drawn.split(',').collect();
    let mut texts = Vec::new();
    for processes in 1..=3 {
        let json =
            |args: &[&str]| parsed(&printed(&model, processes, &[args, &["--json"]].concat()));
        assert_eq!(json(&greedy_args).0, greedy);
        let (tokens, text) = json(&drawn);
        assert_eq!(tokens.len(), 40);
        assert_eq!(
            printed(&model, processes, &drawn),
            format!("{text}\n"),
            "as it comes"
        );
        texts.push((tokens, text));
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
}

#[test]
fn text_ends_at_a_stop_or_an_end_token() {
    let folder = copy("plain");
    let json = |args: &[&str]| {
        let args = [&["--prompt", "A kernel", "--tokens", "30", "--json"], args].concat();
        parsed(&printed(folder.path(), 2, &args))
    };
    let sampled = ["--temperature", "1", "--seed", "7", "--ignore-eos"];
    let (tokens, text) = json(&sampled);
    let stop: String = text.chars().skip(9).take(3).collect();
    let (fewer, before) =
        json(&[&sampled[..], &["--stop", "\u{1}\u{2}", "--stop", &stop]].concat());
    assert_eq!(before, text[..text.find(&stop).unwrap()]);
    assert!(fewer.len() < 30 && tokens.starts_with(&fewer), "{fewer:?}");
    let plain = [
        &["--prompt", "A kernel", "--tokens", "30", "--stop", &stop][..],
        &sampled,
    ]
    .concat();
    assert_eq!(printed(folder.path(), 2, &plain), format!("{before}\n"));
    // The folder's own settings, with the tenth token as the end.
    let settings = serde_json::json!({ "do_sample": true, "temperature": 1.0,
        "eos_token_id": [tokens[9], 999] });
    let file = folder.path().join("generation_config.json");
    fs::write(file, settings.to_string()).unwrap();
    let until = tokens.iter().position(|token| *token == tokens[9]).unwrap();
    assert_eq!(json(&["--seed", "7"]).0, tokens[..=until]);
}

#[test]
fn text_keeps_what_a_decoder_strips_at_the_start_of_a_text() {
    let folder = copy("plain");
    let args = ["--prompt", "A kernel", "--tokens", "8", "--json"];
    let generated = || parsed(&printed(folder.path(), 1, &args));
    let before = generated();
    let first = before.1.chars().next().unwrap();
    assert_ne!(first, 'A');

    let file = folder.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let strip = serde_json::json!({ "type": "Strip", "content": first, "start": 1, "stop": 0 });
    let bytes = tokenizer["decoder"].take();
    tokenizer["decoder"] = serde_json::json!({ "type": "Sequence", "decoders": [bytes, strip] });
    fs::write(&file, tokenizer.to_string()).unwrap();
    assert_eq!(generated(), before);
}

#[test]
fn chat_template_makes_the_prompt() {
    let folder = copy("plain");
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                    {% if add_generation_prompt %}<assistant>{% endif %}";
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let of = |args: &[&str]| {
        parsed(&printed(
            folder.path(),
            1,
            &[args, &["--tokens", "8", "--json"]].concat(),
        ))
    };
    let tokenizer = mpmd_models::tokenizer(&open("plain")).unwrap();
    let prompt = tokenizer.encode("<user>Hi<assistant>", false).unwrap();
    let ids: Vec<String> = prompt.get_ids().iter().map(u32::to_string).collect();
    assert_eq!(of(&["--chat", "Hi"]), of(&["--prompt-ids", &ids.join(",")]));
    assert_ne!(of(&["--chat", "Hi"]), of(&["--prompt", "Hi"]));
}

#[test]
fn wrong_generation_configs_are_refused_by_key() {
    let folder = copy("plain");
    let file = folder.path().join("generation_config.json");
    let write = |settings: &str| fs::write(&file, settings).unwrap();
    let said = |settings: &str| {
        write(settings);
        let folder = Folder::open(folder.path()).unwrap();
        let errors = [Sampling::of(&folder).err(), folder.end_tokens().err()];
        errors
            .into_iter()
            .flatten()
            .map(|error| error.to_string())
            .collect::<String>()
    };
    for (settings, expected) in [
        (
            r#"{"temperature": "0.7"}"#,
            r#"temperature: expected a number, found "0.7""#,
        ),
        (
            r#"{"do_sample": true, "temperature": -1}"#,
            "temperature: expected 0 or more, found -1",
        ),
        (
            r#"{"do_sample": true, "top_k": -5}"#,
            "top_k: expected a whole number, 0 or more, found -5",
        ),
        (
            r#"{"top_k": 2.5}"#,
            "top_k: expected a whole number, 0 or more, found 2.5",
        ),
        (
            r#"{"do_sample": true, "top_p": 0}"#,
            "top_p: expected more than 0, and 1 at most, found 0",
        ),
        (
            r#"{"do_sample": true, "min_p": 2}"#,
            "min_p: expected 0 to 1, found 2",
        ),
        (
            r#"{"do_sample": "yes"}"#,
            r#"do_sample: expected true or false, found "yes""#,
        ),
        (
            r#"{"repetition_penalty": 0}"#,
            "repetition_penalty: expected more than 0, found 0",
        ),
        (
            r#"{"eos_token_id": "</s>"}"#,
            r#"eos_token_id: expected the number of a token, or a list of numbers, found "</s>""#,
        ),
        (
            r#"{"eos_token_id": [1, -1]}"#,
            "eos_token_id: expected the number of a token, or a list of numbers, found [1,-1]",
        ),
        (
            "[1]",
            "expected settings of generation, found invalid type: sequence",
        ),
    ] {
        let said = said(settings);
        let expected = match settings.starts_with('{') {
            true => format!("{}: {expected}", file.display()),
            false => expected.to_owned(),
        };
        assert!(said.contains(&expected), "{said}, not {expected}");
    }
    // Settings of draws do not count without `do_sample`, and null is no setting.
    assert_eq!(
        said(r#"{"temperature": 0, "top_p": 0, "top_k": null, "eos_token_id": null}"#),
        ""
    );
    let end = ended(folder.path(), 1, &["--prompt", "a"]).remove(0);
    assert_eq!(end.code(), 0, "{end:?}");
    write(r#"{"do_sample": true, "top_k": "many"}"#);
    let end = ended(folder.path(), 1, &["--prompt", "a"]).remove(0);
    assert!(
        end.code() == 1 && end.stderr.contains("top_k: expected a whole number"),
        "{end:?}"
    );
    // The config has the end tokens of a folder without them in this file.
    write("{}");
    change_config(folder.path(), |config| {
        config["eos_token_id"] = serde_json::json!("none")
    });
    let said = Folder::open(folder.path())
        .unwrap()
        .end_tokens()
        .unwrap_err()
        .to_string();
    assert!(
        said.contains("config.json: eos_token_id: expected the number of a token"),
        "{said}"
    );
}

#[test]
fn wrong_generations_are_refused_with_the_reason() {
    let plain = path("plain");
    for (args, expected) in [
        (
            &["--prompt-ids", "5, 320"][..],
            "--prompt-ids: expected tokens below 320, found 320",
        ),
        (
            &["--prompt", "a", "--top-p", "0.9"],
            "--top-p: the most probable token is taken",
        ),
        (
            &["--prompt", "a", "--temperature", "1", "--min-p", "2"],
            "expected 0 to 1, found 2",
        ),
        (
            &["--prompt", "a", "--repetition-penalty", "0"],
            "expected more than 0, found 0",
        ),
        (&["--json"], "give --prompt, --chat or --prompt-ids"),
        (
            &["--prompt", "a", "--tokens", "2000"],
            "--tokens: the model has 1024 positions, and 2002 are asked for; the prompt has 2",
        ),
        (
            &["--prompt", "a", "--max-len", "2000"],
            "--max-len: the model has 1024 positions, and 2000 are asked for",
        ),
        (
            &["--prompt", "a", "--max-len", "9"],
            "--max-len: expected at least 130",
        ),
        (&["--chat", "a"], "expected chat_template.jinja"),
    ] {
        let ends = ended(&plain, 2, &[args, &["--stages", "2"]].concat());
        for end in ends {
            assert_eq!((end.code(), end.stdout.as_str()), (1, ""), "{end:?}");
            assert!(end.stderr.contains(expected), "{end:?}");
        }
    }
}
