//! `mpmd check -n N -- program`: runs the program in a dry run, which always ends, and judges it by
//! that.

use std::process::{Command, Output};

use mpmd_record::dry_run::{DryRun, DryRunEnd};
use mpmd_tests::{bare_command, package_program};

fn check(args: &[&str]) -> Output {
    let mut command: Command = bare_command(package_program("mpmd-cli", "mpmd"));
    command
        .arg("check")
        .args(args)
        .output()
        .expect("mpmd is there")
}

fn named(program: &str) -> [&str; 3] {
    ["--", env!("CARGO_BIN_EXE_named"), program]
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn endless_program_is_proved_by_two_equal_steps() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let out = folder.path().join("dry_run.json");
    let file = out.to_str().expect("its name is plain");
    let done = check(&[&["-n", "4", "--out", file][..], &named("looping")].concat());
    let (said, errors) = (text(&done.stdout), text(&done.stderr));
    assert_eq!(done.status.code(), Some(0), "{said}{errors}");
    assert!(said.contains(" are equal, 24 operations each"), "{said}");
    assert!(
        said.contains("issue    all 4 processes issue the same operations\n"),
        "{said}"
    );
    assert!(
        said.contains("ends over tags, direction, pair, single"),
        "{said}"
    );
    // Three microbatches on their way around the ring.
    let bytes = 2 * 128 * 256 * 4 + 4 * 8 * 4;
    let link = format!("3 to 0: {:.1} KiB in 3 messages", f64::from(bytes) / 1024.0);
    assert!(said.contains(&link), "{link}: {said}");
    let dry_run = DryRun::read(&out).expect("it was kept");
    assert_eq!(
        (dry_run.end, dry_run.processes, dry_run.devices.len()),
        (DryRunEnd::Steady, 4, 4)
    );
    assert!(
        dry_run
            .lines
            .iter()
            .any(|line| line.starts_with("tests/src/programs/looping.rs:")),
        "{:?}",
        dry_run.lines
    );
}

/// Checks `looping` with the given number of steps, and returns the report's lines on steps.
fn steps_line(args: &[&str], steps: &str) -> String {
    let looping = [&named("looping")[..], &[steps]].concat();
    let done = check(&[&["-n", "4"], args, &looping].concat());
    let said = text(&done.stdout);
    assert_eq!(done.status.code(), Some(0), "{said}{}", text(&done.stderr));
    let (_, line) = said.split_once("\nsteps    ").expect("a line of steps");
    let (line, _) = line.split_once("\nissue ").expect("a line of issue");
    line.to_owned()
}

#[test]
fn steps_that_are_asked_for_run_though_two_are_equal() {
    let whole = steps_line(&["--steps", "21"], "20");
    assert_eq!(whole, "20, to the end of the program");
    let cut = steps_line(&["--steps", "17"], "20");
    assert!(
        cut.starts_with("16 and 17 are equal, 24 operations each;"),
        "{cut}"
    );
}

#[test]
fn check_stops_at_equal_steps_and_says_how_to_go_on() {
    let stopped = steps_line(&[], "20");
    assert!(
        stopped.contains(" are equal, 24 operations each;"),
        "{stopped}"
    );
    assert!(!stopped.starts_with("16 and 17"), "{stopped}");
    assert!(stopped.contains("--steps K"), "{stopped}");
    assert!(stopped.contains("docs/guide/testing.md"), "{stopped}");
}

#[test]
fn memory_above_budget_and_unequal_steps_are_reported() {
    let done = check(
        &[
            &["-n", "2", "--steps", "1", "--budget", "64KiB"][..],
            &named("looping"),
        ]
        .concat(),
    );
    let said = text(&done.stdout);
    assert_eq!(done.status.code(), Some(1), "{said}{}", text(&done.stderr));
    assert!(said.contains("1 run, no two in succession equal"), "{said}");
    assert!(
        said.contains("above the budget of 64.0 KiB, in operation "),
        "{said}"
    );
    assert!(said.contains("tests/src/programs/looping.rs:"), "{said}");
}

/// Runs `mpmd check` on a program in which one process diverges in the way `how`. Returns (exit
/// code, standard output, standard error).
fn diverging(how: &str, culprit: &str) -> (Option<i32>, String, String) {
    let done = check(&[&["-n", "4"][..], &named("diverging"), &[how, culprit, "8"]].concat());
    (done.status.code(), text(&done.stdout), text(&done.stderr))
}

#[test]
fn diverging_process_fails_the_check() {
    for (how, what) in [
        ("extra-jit", "jit Aside"),
        ("extra-put", "device_put"),
        ("skip-aside", "jit Forward"),
        ("skip-microbatch", "array_from_fn"),
        ("other-value", "device_put"),
    ] {
        let (code, said, errors) = diverging(how, "1");
        assert_eq!(code, Some(1), "{how}: {said}{errors}");
        assert!(
            said.contains("issue    processes 0, 2 to 3 issue the same operations\n"),
            "{how}: {said}"
        );
        let (_, shown) = said
            .split_once("issue    process 1 parts from process 0 at operation ")
            .expect(how);
        let shown: Vec<&str> = shown.lines().take(3).collect();
        for (line, process) in shown[1..].iter().zip(["process 0: ", "process 1: "]) {
            assert!(line.trim_start().starts_with(process), "{how}: {said}");
            assert!(
                line.contains(&format!("operation {} (", shown[0])),
                "{how}: {said}"
            );
            assert!(
                line.contains("tests/src/programs/diverging.rs:"),
                "{how}: {said}"
            );
        }
        assert!(shown[2].contains(what), "{how}: {said}");
    }
    // If two processes differ, neither is known to be right: process 0 may be the wrong one.
    let (code, said, _) = diverging("extra-jit", "0");
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("issue    processes 1 to 3 part from process 0 at operation "),
        "{said}"
    );
}

#[test]
fn same_operations_by_other_code_pass() {
    let (code, said, errors) = diverging("same-value", "1");
    assert_eq!(code, Some(0), "{said}{errors}");
    assert!(
        said.contains("issue    all 4 processes issue the same operations\n"),
        "{said}"
    );
}

#[test]
fn a_process_that_fails_its_dry_run_is_named() {
    let (code, said, errors) = diverging("unguarded-read", "3");
    assert_eq!(code, Some(2), "{said}{errors}");
    assert!(
        errors.contains("failed in its dry run (exit status: "),
        "{errors}"
    );
    assert!(
        errors.contains(" as process 3; as process 0 its dry run ended"),
        "{errors}"
    );
    assert!(
        errors.contains("the last stage's values are not here"),
        "{errors}"
    );
}

#[test]
fn a_checked_training_writes_no_file() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let losses = folder.path().join("losses");
    let train = package_program("mpmd-examples", "train_gpt");
    let words = [
        "-n",
        "2",
        "--",
        train.to_str().expect("its name is plain"),
        "--losses-out",
    ];
    let done = check(&[&words[..], &[losses.to_str().expect("its name is plain")]].concat());
    let said = text(&done.stdout);
    assert_eq!(done.status.code(), Some(0), "{said}{}", text(&done.stderr));
    assert!(
        said.contains("issue    all 2 processes issue the same operations\n"),
        "{said}"
    );
    assert!(
        !losses.exists(),
        "a dry run as process 0 has written the losses"
    );
}

#[test]
fn failed_dry_run_shows_the_programs_error() {
    for (args, expected) in [
        (
            &["-n", "2", "--", "true"][..],
            "true ended without writing a dry run",
        ),
        (
            &["-n", "2", "--", "mpmd-no-such-program"],
            "there is no program mpmd-no-such-program",
        ),
        (
            &["-n", "2", "--peer-timeout", "0.2", "--", "sleep", "20"],
            "sleep has not ended its dry run after 200ms",
        ),
        (
            &["-n", "2", "--", env!("CARGO_BIN_EXE_named"), "nobody"],
            "no program is named \"nobody\"",
        ),
        (
            &["-n", "3", "--", env!("CARGO_BIN_EXE_named"), "looping"],
            "cannot be spread evenly over 3 processes",
        ),
    ] {
        let done = check(args);
        let errors = text(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{errors}");
        assert!(errors.contains(expected), "{expected}: {errors}");
    }
}
