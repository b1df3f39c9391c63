//! Tokenizers as people have them, and texts that are hard for them.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mpmd::testing::{Processes, Simulation};
use mpmd::train::data::TextBytes;
use mpmd::{Error, Program, Result};
use mpmd_models::{Folder, Tokens};
use serde_json::{Value, json};

use crate::folders::{copy, open, tokens};

/// Rewrites the tokenizer of a folder, changed by `change`.
pub(crate) fn change_tokenizer(folder: &Path, change: impl FnOnce(&mut Value)) {
    let file = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut tokenizer);
    fs::write(&file, tokenizer.to_string()).unwrap();
}

/// Returns the tokens of a text file with this content.
fn ids(folder: &Folder, text: &str) -> Result<Vec<u32>> {
    let text = TextBytes::of_files(&[text.as_bytes().to_vec()])?;
    Ok(Tokens::of(&text, folder)?.ids().to_vec())
}

#[test]
fn dropout_left_in_the_file_is_off() {
    let folder = copy("plain");
    change_tokenizer(folder.path(), |tokenizer| {
        tokenizer["model"]["dropout"] = json!(0.3)
    });
    let opened = Folder::open(folder.path()).unwrap();
    assert_eq!(tokens(&opened).ids(), tokens(&open("plain")).ids());
}

#[test]
fn tokenizers_that_blow_texts_up_are_refused() {
    let replace = |pattern: Value, content: &str| {
        let kind = "Replace";
        json!({ "type": kind, "pattern": pattern, "content": content })
    };
    let of_text = |content: &str| replace(json!({ "String": "a" }), content);
    for (normalizers, found) in [
        (json!([of_text(&"a".repeat(3000))]), "3000"),
        (
            json!([of_text(&"a".repeat(9)), of_text(&"a".repeat(9))]),
            "81",
        ),
        (
            json!([replace(json!({ "Regex": "" }), &"a".repeat(99))]),
            "100",
        ),
    ] {
        let folder = copy("plain");
        change_tokenizer(folder.path(), |tokenizer| {
            tokenizer["normalizer"] = json!({ "type": "Sequence", "normalizers": normalizers });
        });
        let said = ids(&Folder::open(folder.path()).unwrap(), "a")
            .unwrap_err()
            .to_string();
        let expected = format!(
            "tokenizer.json: normalizer: expected rules that make a text at most 64 times as \
             long, found {found}"
        );
        assert!(said.ends_with(&expected), "{said}");
    }
}

#[test]
fn words_after_a_million_blanks_are_split() {
    let folder = open("plain");
    let (before, after) = ("the fox", " jumps over the lazy dog. The river");
    let blanks = " ".repeat(1_000_000);
    let found = ids(&folder, &format!("{before}{blanks}{after}")).unwrap();
    let expected = [before, &blanks, after].map(|part| ids(&folder, part).unwrap());
    assert!(found == expected.concat());
    assert!(expected[2].len() > 8, "words, not one piece");
}

#[test]
fn pattern_engine_that_gives_up_is_an_error() {
    let folder = copy("plain");
    change_tokenizer(folder.path(), |tokenizer| {
        let pattern = json!({ "Regex": "(?:a|aa)*[cd]" });
        tokenizer["pre_tokenizer"] =
            json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false });
    });
    let opened = Folder::open(folder.path()).unwrap();
    ids(&opened, "aaac").unwrap();
    let failed = ids(&opened, &format!("{}x, then cd", "a".repeat(100))).unwrap_err();
    assert!(matches!(&failed, Error::Environment(_)), "{failed:?}");
    let said = failed.to_string();
    let expected = "the tokenizer: its patterns cannot split the text (";
    assert!(
        said.starts_with(expected) && said.contains("retry-limit"),
        "{said}"
    );
}

#[test]
fn one_process_tokenises_and_all_get_the_tokens() {
    let (folder, calls) = (open("plain"), AtomicUsize::new(0));
    let make = || {
        calls.fetch_add(1, Ordering::Relaxed);
        Ok(tokens(&folder))
    };
    let results = Simulation::new(3, 6).run(|p| Tokens::spread(p, make));
    assert_eq!(calls.into_inner(), 1);
    for found in results {
        assert_eq!(found.unwrap().ids(), tokens(&folder).ids());
    }
    let none = Simulation::new(2, 2).run(|p| Tokens::spread(p, || Ok(tokens(&folder).first(0))));
    assert!(
        none.into_iter()
            .all(|found| found.unwrap().ids().is_empty())
    );
    let failing = || Err(Error::Environment("a text of another planet".to_owned()));
    for failed in Simulation::new(3, 3).run(|p| Tokens::spread(p, failing)) {
        assert_eq!(failed.unwrap_err().to_string(), "a text of another planet");
    }
}

/// The environment variable that marks a process as part of the test's job.
const SLOW: &str = "SLOW_TOKENS";

/// The program of each process of the job: process 0 takes three seconds to make tokens. Does
/// nothing when the test runner calls it.
#[test]
fn slow_process() {
    if std::env::var_os(SLOW).is_none() {
        return;
    }
    let folder = open("plain");
    let make = || {
        std::thread::sleep(Duration::from_secs(3));
        Ok(tokens(&folder))
    };
    let result = Program::builder().devices(2).run(|p| -> Result<()> {
        println!("{:?}", Tokens::spread(p, make)?);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn tokens_may_take_longer_than_the_peer_timeout() {
    let job = Processes::new(2, std::env::current_exe().unwrap())
        .args(["--exact", "tokenizers::slow_process", "--nocapture"])
        .env(SLOW, "yes")
        .peer_timeout(Duration::from_secs(1));
    let ends = job.start().unwrap().wait().unwrap();
    let expected = format!("{:?}", tokens(&open("plain")));
    for end in &ends {
        assert!(end.code() == 0 && end.stdout.contains(&expected), "{end:?}");
    }
}
