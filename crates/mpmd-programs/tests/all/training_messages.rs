//! Messages of `finetune` about texts that are too short, and about a model that it does not keep.

use std::fs;
use std::process::Output;

use crate::finetune::{FINETUNE, bare};
use crate::folders::{path, text};

/// Runs a training on the model of the tests, with windows of 8 tokens.
fn train(args: &[&str]) -> (Output, String) {
    let mut command = bare(FINETUNE);
    command.arg("--model").arg(path("plain")).args(args);
    let output = command.args(["--time", "8"]).output().unwrap();
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    (output, said)
}

#[test]
fn training_that_keeps_nothing_warns_first() {
    let text = text();
    let steps = [text.to_str().unwrap(), "--steps", "1"];
    let said = |args: &[&str]| {
        let (output, said) = train(&[&steps[..], args].concat());
        assert_eq!(output.status.code(), Some(0), "{said}");
        said
    };
    let warning = "warning: the trained model is not kept: give --save";
    let kept_nothing = said(&[]);
    let at = kept_nothing.find(warning);
    assert!(
        at.is_some() && at < kept_nothing.find("step 1/1"),
        "{kept_nothing}"
    );
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().to_str().unwrap();
    assert!(!said(&["--checkpoints", to]).contains(warning));
}

#[test]
fn too_short_text_is_named_by_its_option_and_time() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.txt");
    fs::write(&empty, "").unwrap();
    let empty = empty.to_str().unwrap();
    let text = text();
    let text = text.to_str().unwrap();
    for (args, option) in [
        (&[empty][..], "TEXT"),
        (&["--evaluate", empty], "--evaluate"),
        (&[text, "--held-out", empty], "--held-out"),
    ] {
        let (output, said) = train(args);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let named = format!("{option} {empty}: ");
        assert!(
            said.contains(&named) && said.contains("--time 8") && !said.contains("training text"),
            "{said}"
        );
    }
}
