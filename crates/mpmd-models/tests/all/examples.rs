//! Examples of prompts and replies, against `transformers` and torch. `make_examples.py` makes
//! their results again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use mpmd::pipeline::Schedule;
use mpmd::train::data::{Data as _, PackedSequences, Sequence};
use mpmd::train::{Rate, Run};
use mpmd_models::{Folder, PromptEncoder, Stages, read_examples, tokenizer, trainer};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::folders::{copy, open, path, simulate};
use crate::given::args;

/// Expected results of `transformers` and torch.
#[derive(Deserialize)]
struct Expected {
    templates: BTreeMap<String, String>,
    conversations: Vec<Conversation>,
    completions: Vec<Completion>,
    rate: f64,
    decay: f64,
    /// The losses of training steps on all completions.
    losses: Vec<f64>,
}

#[derive(Deserialize)]
struct Conversation {
    template: String,
    line: String,
    /// The tokens of each example, each with 1 if it has a loss.
    examples: Vec<Vec<(u32, u8)>>,
}

#[derive(Deserialize)]
struct Completion {
    prompt: String,
    completion: String,
    example: Vec<(u32, u8)>,
}

fn expected() -> Expected {
    let text = fs::read_to_string(path("examples.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn sequence(example: &[(u32, u8)]) -> Sequence {
    example
        .iter()
        .map(|(token, has_loss)| (*token, *has_loss == 1))
        .collect()
}

/// Reads lines as examples of at most `time + 1` tokens. The error message lacks the file's path.
fn read(folder: &Path, lines: &[impl ToString], time: usize) -> Result<Vec<Sequence>, String> {
    let file = folder.join("data.jsonl");
    let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
    fs::write(&file, lines.join("\n")).unwrap();
    let opened = Folder::open(folder).unwrap();
    let prompts = PromptEncoder::of(&opened).unwrap();
    let read = read_examples(&file, &opened, &prompts, time, "--time");
    let read = read.map(|lines| lines.concat());
    read.map_err(|error| {
        error
            .to_string()
            .replace(&format!("{}/", folder.display()), "")
    })
}

/// Writes a tokenizer config with this chat template to a folder.
fn set_template(folder: &Path, template: impl Into<Value>) {
    let settings = json!({ "bos_token": "<s>", "eos_token": { "content": "</s>" },
        "chat_template": template.into() });
    fs::write(folder.join("tokenizer_config.json"), settings.to_string()).unwrap();
}

fn completions(all: &[Completion]) -> Vec<Value> {
    let line = |one: &Completion| json!({ "prompt": one.prompt, "completion": one.completion });
    all.iter().map(line).collect()
}

#[test]
fn conversations_have_the_tokens_of_transformers() {
    let (expected, folder) = (expected(), copy("plain"));
    for (at, conversation) in expected.conversations.iter().enumerate() {
        let Conversation {
            template,
            line,
            examples,
        } = conversation;
        set_template(folder.path(), expected.templates[template].as_str());
        let found = read(folder.path(), &[line], 1000).unwrap();
        let examples: Vec<Sequence> = examples.iter().map(|one| sequence(one)).collect();
        assert_eq!(found, examples, "conversation {at}, template {template}");
    }
}

#[test]
fn completions_have_a_loss_and_an_end() {
    let (expected, folder) = (expected(), copy("plain"));
    let found = read(folder.path(), &completions(&expected.completions), 1000).unwrap();
    let examples = expected
        .completions
        .iter()
        .map(|one| sequence(&one.example));
    assert_eq!(found, examples.collect::<Vec<_>>());
    // A token over the border of prompt and completion is one of the completion.
    let line = json!({ "prompt": "A kernel ", "completion": "computes" });
    let [across] = &read(folder.path(), &[line], 1000).unwrap()[..] else {
        panic!()
    };
    let whole = json!({ "prompt": "A kernel", "completion": " computes" });
    assert_eq!(*across, read(folder.path(), &[whole], 1000).unwrap()[0]);
}

#[test]
fn lists_of_messages_have_a_loss_behind_the_prompt() {
    let folder = copy("plain");
    let turn = |role: &str, text: &str| json!({ "role": role, "content": text });
    let all = [
        turn("user", "a"),
        turn("assistant", "b"),
        turn("user", "c"),
        turn("assistant", "d"),
    ];
    for template in ["plain", "marked"] {
        set_template(folder.path(), expected().templates[template].as_str());
        let line = json!({ "prompt": all[..2], "completion": all[2..] });
        let lines = [json!({ "messages": all }), line];
        let [both, last] = &read(folder.path(), &lines, 1000).unwrap()[..] else {
            panic!()
        };
        assert!(
            both.iter()
                .map(|(token, _)| token)
                .eq(last.iter().map(|(token, _)| token))
        );
        let starts = |one: &Sequence| {
            one.windows(2)
                .filter(|pair| !pair[0].1 && pair[1].1)
                .count()
        };
        assert_eq!((starts(both), starts(last)), (2, 1), "{template}");
        let ends: Vec<_> = both.iter().zip(last).filter(|(_, last)| last.1).collect();
        assert!(ends.iter().all(|(both, _)| both.1), "{template}");
    }
}

/// Reads a line with a chat template. Returns the text of the tokens that have a loss.
fn replies(template: impl Into<Value>, line: &Value) -> Result<String, String> {
    let folder = copy("plain");
    set_template(folder.path(), template);
    let tokens = read(folder.path(), std::slice::from_ref(line), 1000)?.concat();
    let replies: Vec<u32> = tokens
        .into_iter()
        .filter(|one| one.1)
        .map(|one| one.0)
        .collect();
    Ok(tokenizer(&Folder::open(folder.path()).unwrap())
        .unwrap()
        .decode(&replies, false)
        .unwrap())
}

#[test]
fn replies_are_found_where_templates_differ() {
    let turn = |role: &str, text: &str| json!({ "role": role, "content": text });
    let turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let asks = |start: &str| format!("{turns}{{% if add_generation_prompt %}}{start}{{% endif %}}");
    let (hello, question) = (turn("assistant", "Hello."), turn("user", "a kernel"));
    let line = json!({ "messages": [question, turn("assistant", "runs"), question, hello] });
    for start in ["<assistant>", "<assistant><think>\n", ""] {
        let expected = if start.is_empty() { "<assistant>" } else { "" };
        let expected = format!("{expected}runs{expected}Hello.");
        assert_eq!(replies(asks(start), &line), Ok(expected), "{start}");
    }
    // Nothing comes before the first reply.
    let line = json!({ "messages": [hello, question, turn("assistant", "runs")] });
    let first = "{% if messages[0].role != 'tool' %}{% endif %}".to_owned() + &asks("<assistant>");
    assert_eq!(replies(first.as_str(), &line), Ok("runs".to_owned()));
    let other = format!("{}{turns}", "{% if add_generation_prompt %}Q{% endif %}");
    let said = replies(other, &line).unwrap_err();
    assert!(
        said.contains("not follow its prompt: \"Q<assistant>Hello.<u\" in the prompt"),
        "{said}"
    );
    // A template that marks two parts of each reply.
    let marked = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content[:1] }}\
                  {% endgeneration %}-{% generation %}{{ m.content[1:] }}{% endgeneration %}\
                  {% endfor %}";
    let line =
        json!({ "prompt": [question, hello, question], "completion": [turn("assistant", "runs")] });
    assert_eq!(replies(marked, &line), Ok("runs".to_owned()));
    // Several templates.
    let named = json!([{ "name": "default", "template": asks("<assistant>") },
        { "name": "tool_use", "template": "{% for m in messages %}{{ m.content }} {% endfor %}" }]);
    let messages = [question, hello];
    let line = |tools: Value| json!({ "prompt": "ignored", "messages": messages, "tools": tools });
    assert_eq!(
        replies(named.clone(), &line(json!([]))),
        Ok("Hello. ".to_owned())
    );
    assert_eq!(replies(named, &line(Value::Null)), Ok("Hello.".to_owned()));
}

#[test]
fn replies_that_must_not_be_learnt_have_no_loss() {
    let turn = |role: &str, text: &str| json!({ "role": role, "content": text });
    let with = |mut turn: Value, key: &str, value: Value| {
        turn[key] = value;
        turn
    };
    let turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                 {% if add_generation_prompt %}<assistant>{% endif %}";
    let marked = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}\
                  {% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}\
                  {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let question = turn("user", "a kernel");
    let (wrong, right) = (turn("assistant", "Wrong."), turn("assistant", "Right."));
    for template in [turns, marked] {
        for (first, second, expected) in [
            (wrong.clone(), right.clone(), Some("Wrong.Right.")),
            (
                with(wrong.clone(), "weight", json!(0)),
                right.clone(),
                Some("Right."),
            ),
            (
                with(wrong.clone(), "weight", json!(0.0)),
                with(right.clone(), "weight", json!(1)),
                Some("Right."),
            ),
            (
                with(wrong.clone(), "train", json!(false)),
                right.clone(),
                Some("Right."),
            ),
            (
                wrong.clone(),
                with(right.clone(), "train", json!(false)),
                Some("Wrong."),
            ),
            (
                with(wrong.clone(), "weight", json!(0)),
                with(right.clone(), "train", json!(false)),
                None,
            ),
        ] {
            let line = json!({ "messages": [question, first, question, second] });
            match (replies(template, &line), expected) {
                (Ok(found), Some(expected)) => assert_eq!(found, expected, "{template}"),
                (Err(said), None) => {
                    let expected = "data.jsonl: line 1: expected a conversation for the chat \
                                    template, found a reply with a loss, but each one has weight \
                                    0 or train false";
                    assert_eq!(said, expected);
                }
                (found, _) => panic!("{line}: {found:?}"),
            }
        }
    }
}

#[test]
fn empty_replies_and_thoughts_are_read() {
    let turns = "{% for m in messages %}<{{ m.role }}>{% if m.thinking %}({{ m.thinking }})\
                 {% endif %}{{ m.content }}|{% endfor %}\
                 {% if add_generation_prompt %}<assistant>{% endif %}";
    let question = json!({ "role": "user", "content": "a kernel" });
    for (reply, expected) in [
        (json!({ "role": "assistant", "content": null }), "|"),
        (json!({ "role": "assistant" }), "|"),
        (
            json!({ "role": "assistant", "content": "b", "reasoning_content": "hm" }),
            "(hm)b|",
        ),
        (
            json!({ "role": "assistant", "content": [{ "type": "text", "text": "b" }] }),
            "b|",
        ),
    ] {
        let line = json!({ "messages": [question, reply] });
        assert_eq!(replies(turns, &line).as_deref(), Ok(expected), "{line}");
    }
    let lost = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}\
                {% endfor %}";
    let system = json!({ "role": "system", "content": "Say BANANA." });
    let reply = json!({ "role": "assistant", "content": "b" });
    let said = replies(lost, &json!({ "messages": [system, question, reply] })).unwrap_err();
    let expected = "line 1: messages[0]: expected a message that the chat template shows, found \
                    one of the role system that it leaves out";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn packed_completions_train_as_torch_does() {
    let expected = expected();
    let examples: Vec<Sequence> = expected
        .completions
        .iter()
        .map(|one| sequence(&one.example))
        .collect();
    let time = 80;
    let args = args(&format!("--weight-decay {}", expected.decay));
    for (processes, stages) in [(1, 1), (2, 2), (3, 3)] {
        let losses: Vec<f64> = simulate(processes, stages, |p, meshes| {
            let rows = PackedSequences::new(examples.clone(), None, time, 1)?.training_rows();
            assert!(rows > 1 && rows < examples.len(), "{rows} rows");
            // Each step has all rows.
            let data =
                PackedSequences::new(examples.clone(), Some(examples[..3].to_vec()), time, 1)?;
            let schedule = Schedule::one_f_one_b(stages, rows)?;
            let model = Stages::new(&open("plain"), stages, time)?.packed(true);
            let trainer = trainer(p, &model, meshes, schedule, &args.settings)?;
            let mut trainer = trainer.rate(Rate::Constant(expected.rate)).seed(7);
            let mut losses = Vec::new();
            let run = Run::steps(expected.losses.len() as u64).progress(false);
            trainer.run(p, run.on_step(|report| losses.push(report.loss)), &data)?;
            Ok(Some(losses))
        });
        for (step, (found, expected)) in losses.iter().zip(&expected.losses).enumerate() {
            let off = (found - expected).abs();
            assert!(
                off < 1e-4,
                "{stages} stages, step {step}: {found}, not {expected}"
            );
        }
    }
}

/// Returns the loss of examples in packed rows, and the mean loss of examples in separate rows.
fn together_and_apart(name: &str, examples: &[Sequence], time: usize) -> (f64, f64) {
    simulate(1, 2, |p, meshes| {
        let schedule = Schedule::gpipe(2, 1)?;
        let model = Stages::new(&open(name), 2, time)?.packed(true);
        let mut trainer = trainer(p, &model, meshes, schedule, &args("").settings)?;
        let mut evaluate = |examples: &[Sequence]| -> mpmd::Result<_> {
            let data = PackedSequences::new(examples.to_vec(), Some(examples.to_vec()), time, 1)?;
            let rows = (0..data.held_out_len()).map(|row| data.held_out(p, meshes, row));
            let rows = rows.collect::<mpmd::Result<Vec<_>>>()?;
            let report = trainer.evaluate(p, rows)?.read()?;
            Ok((report.loss() * report.weight, report.weight))
        };
        let mut apart = (0.0, 0.0);
        for example in examples {
            let (sum, weight) = evaluate(std::slice::from_ref(example))?;
            apart = (apart.0 + sum, apart.1 + weight);
        }
        let (sum, weight) = evaluate(examples)?;
        assert_eq!(weight, apart.1);
        Ok(Some((sum / weight, apart.0 / apart.1)))
    })
}

#[test]
fn packed_examples_do_not_see_each_other_in_any_family() {
    let completions = expected().completions;
    let examples: Vec<Sequence> = completions
        .iter()
        .map(|one| sequence(&one.example))
        .collect();
    let short: Vec<Sequence> = examples.into_iter().filter(|one| one.len() <= 28).collect();
    // Learned positions, windows shorter than a row with and without a cap, and all others.
    for name in [
        "gpt2",
        "qwen3-window",
        "gemma2",
        "gemma3",
        "phi3",
        "neox",
        "llama3",
    ] {
        let (packed, apart) = together_and_apart(name, &short, 32);
        assert!(
            (packed - apart).abs() < 1e-5 * apart,
            "{name}: {packed}, not {apart}"
        );
    }
}

/// Returns the held-out loss of examples in rows of `time` tokens.
fn held_out(name: &str, examples: &[Sequence], time: usize) -> f64 {
    together_and_apart(name, examples, time).0
}

#[test]
fn losses_do_not_depend_on_the_length_of_a_row() {
    let completions = expected().completions;
    let examples: Vec<Sequence> = completions
        .iter()
        .map(|one| sequence(&one.example))
        .collect();
    // Their rotary embeddings change beyond 20 tokens.
    for name in ["phi3", "dynamic"] {
        let lengths: BTreeSet<usize> = examples.iter().map(|one| one.len() - 1).collect();
        assert!(lengths.range(..=20).next().is_some() && lengths.range(21..).next().is_some());
        let mut sums = (0.0, 0.0);
        for example in &examples {
            let own = held_out(name, std::slice::from_ref(example), example.len() - 1);
            let weight = example
                .iter()
                .skip(1)
                .filter(|(_, has_loss)| *has_loss)
                .count() as f64;
            sums = (sums.0 + own * weight, sums.1 + weight);
        }
        let apart = sums.0 / sums.1;
        let longest = lengths.last().unwrap();
        for time in [*longest, longest + 1, 200] {
            let packed = held_out(name, &examples, time);
            assert!(
                (packed - apart).abs() < 1e-5 * apart,
                "{name}, {time}: {packed}, not {apart}"
            );
        }
    }
}

#[test]
fn wrong_lines_are_refused_by_number() {
    let folder = copy("plain");
    let good = json!({ "prompt": "a", "completion": "b" });
    let chat = json!({ "messages": [{ "role": "user", "content": "a" }] });
    let refused = |lines: &[String]| read(folder.path(), lines, 8).unwrap_err();
    let behind = |line: &str| refused(&[good.to_string(), String::new(), line.to_owned()]);
    let marked = format!("\u{feff}{good}");
    assert_eq!(
        read(folder.path(), &[marked], 8),
        read(folder.path(), &[&good], 8)
    );
    let wrong_lists = [
        r#"{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}"#,
        r#"["a", "b", null, null]"#,
    ];
    for line in wrong_lists.into_iter().chain([
        "{\"prompt\": \"a\"}",
        "{}",
        "[1]",
        "{\"prompt\": \"a\",",
        "\"a\"",
    ]) {
        let said = behind(line);
        assert!(
            said.starts_with("data.jsonl: line 3: expected an object with `messages`"),
            "{said}"
        );
    }
    let turn = r#"{"role": "user", "content": "a"}"#;
    for (line, expected) in [
        (
            r#"{"messages": {"role": "assistant", "content": "b"}}"#.to_owned(),
            "messages: expected a list of messages, found {",
        ),
        (
            r#"{"messages": 3}"#.to_owned(),
            "messages: expected a list of messages, found 3",
        ),
        (
            format!(r#"{{"messages": [{turn}, {{"role": "assistant", "content": 3}}]}}"#),
            "messages[1].content: expected a text, or a list of objects with type \"text\"",
        ),
        (
            format!(r#"{{"prompt": [{turn}], "completion": [{turn}, {{"content": "a"}}]}}"#),
            "completion[1].role: expected a text, found {",
        ),
        (
            format!(r#"{{"messages": [{turn}], "chat_template_kwargs": {{"tools": 1}}}}"#),
            "chat_template_kwargs.tools: expected another name",
        ),
    ] {
        let said = behind(&line);
        let expected = format!("data.jsonl: line 3: {expected}");
        assert!(said.starts_with(&expected), "{said}");
    }
    // A key of an object within the line, too.
    for (line, key, column) in [
        (
            r#"{"prompt": "a", "completion": "b", "prompt": "a"}"#,
            "prompt",
            43,
        ),
        (
            r#"{"messages": [{"role": "user", "role": "user"}]}"#,
            "role",
            37,
        ),
    ] {
        let said = behind(line);
        let found = format!("found {key:?} twice, the second time at column {column}");
        let expected = format!("data.jsonl: line 3: expected each key of an object once, {found}");
        assert_eq!(said, expected);
    }
    let said = behind(&chat.to_string());
    assert!(
        said.contains("expected chat_template.jinja, or chat_template in tok"),
        "{said}"
    );
    set_template(folder.path(), expected().templates["pairs"].as_str());
    let said = behind(&chat.to_string());
    assert!(
        said.contains("line 3: expected")
            && said.contains("no reply of the role assistant behind a prompt, but user"),
        "{said}"
    );
    let turn = |role: &str| json!({ "role": role, "content": "b" });
    let turns = [turn("user"), turn("user"), turn("assistant")];
    let said = behind(&json!({ "messages": turns }).to_string());
    assert!(
        said.contains("line 3: expected") && said.contains("Roles must alternate"),
        "{said}"
    );
    let long =
        |words: usize| json!({ "prompt": "x", "completion": " y".repeat(words) }).to_string();
    let said = refused(&[long(20), good.to_string(), long(22), long(3)]);
    let expected = "data.jsonl: line 3: expected at most 9 tokens for --time 8, found 47, the \
                    longest of 2 (of 4) that are too long";
    assert!(said.starts_with(expected), "{said}");
    assert!(refused(&[]).starts_with("data.jsonl: expected examples, found none"));
}

#[test]
fn templates_that_never_end_are_refused() {
    let folder = copy("plain");
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    for (template, expected) in [(endless, "fuel"), ("{% if %}", "syntax error")] {
        set_template(
            folder.path(),
            json!([{ "name": "default", "template": template }]),
        );
        let turn = |role: &str| json!({ "role": role, "content": "b" });
        let line = json!({ "messages": [turn("user"), turn("assistant")] });
        let said = read(folder.path(), &[line], 8).unwrap_err();
        assert!(said.contains(expected), "{said}");
    }
}
