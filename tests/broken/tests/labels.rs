//! Each wrong program is found as its labels say, in `mpmd check` and in a run.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use mpmd_broken::{Broken, PROGRAMS};
use mpmd_tests::{Carrier, Job, bare_command, package_program};

const PROCESSES: usize = 2;

/// Returns the exit code and the text of `mpmd check` on a program.
fn check(name: &str) -> (Option<i32>, String) {
    let mut command = bare_command(package_program("mpmd-cli", "mpmd"));
    let broken = env!("CARGO_BIN_EXE_broken");
    let args = ["check", "-n", "2", "--", broken, name];
    let done = command.args(args).output().expect("mpmd is there");
    let text = [done.stdout, done.stderr].concat();
    (
        done.status.code(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

/// Returns the label, or fails with the name of the program.
fn label(broken: &Broken, name: &str) -> &'static str {
    broken
        .label(name)
        .unwrap_or_else(|| panic!("{}: no label `{name}`", broken.name))
}

#[test]
fn every_file_is_a_program_with_labels() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let folders = std::fs::read_dir(src)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut files = BTreeSet::new();
    for folder in folders.filter(|path| path.is_dir()) {
        for file in std::fs::read_dir(&folder).unwrap() {
            let file = file.unwrap().path();
            let stem = file.file_stem().unwrap().to_str().unwrap();
            if stem != "mod" {
                files.insert(format!(
                    "{}/{stem}",
                    folder.file_name().unwrap().to_str().unwrap()
                ));
            }
        }
    }
    let listed: BTreeSet<String> = PROGRAMS
        .iter()
        .map(|broken| broken.name.to_owned())
        .collect();
    assert_eq!(files, listed);
    for broken in PROGRAMS {
        for name in ["kind", "found by", "named", "says"] {
            label(broken, name);
        }
    }
}

#[test]
fn check_finds_what_the_labels_say() {
    for broken in PROGRAMS {
        let (code, text) = check(broken.name);
        let expected = match label(broken, "found by") {
            // The program itself fails in its dry run.
            "issue" => Some(2),
            "check" => Some(1),
            "run" => Some(0),
            other => panic!("{}: found by {other}", broken.name),
        };
        assert_eq!(code, expected, "{}: {text}", broken.name);
        if label(broken, "found by") == "issue" {
            let says = label(broken, "says");
            assert!(text.contains(says), "{}: {says}: {text}", broken.name);
        }
    }
}

#[test]
fn runs_end_with_what_the_labels_say() {
    for broken in PROGRAMS {
        let options = Carrier::TCP.processes(env!("CARGO_BIN_EXE_broken"), PROCESSES);
        let options = options.peer_timeout(Duration::from_secs(15));
        let mut job = Job::start(options, &[broken.name]);
        let ended = job.wait();
        let report = job.report();
        let says = label(broken, "says");
        for end in &ended {
            assert_eq!(end.code(), 1, "{}: {report}", broken.name);
        }
        let texts = || ended.iter().map(|end| &end.stderr);
        assert!(
            texts().any(|text| text.contains(says)),
            "{}: {says}: {report}",
            broken.name
        );
        if let Some(line) = broken.line_at_fault() {
            let line = format!("tests/broken/src/{}.rs:{line}", broken.name);
            assert!(
                texts().all(|text| text.contains(&line)),
                "{}: {line}: {report}",
                broken.name
            );
        }
        let named = label(broken, "named");
        if named != "all" {
            let process = format!("process {named}");
            let is_named = texts().all(|text| text.contains(&process));
            assert!(is_named, "{}: {process}: {report}", broken.name);
        }
    }
}
