//! Jobs that fail: `mpmd run` names the process at fault and the cause.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, ProcessEnd, Sandbox, over_each_carrier, package_program};

over_each_carrier! {
    the_process_that_diverged_is_named
    a_divergence_found_on_the_way_blames_no_other
    two_processes_that_diverged_are_both_named
    a_program_without_finish_fails_the_job
    an_error_of_the_program_reaches_all
}

/// Runs a job of `processes` processes by `mpmd run` over `carrier`, and waits for its end.
fn launched(carrier: Carrier, processes: usize, program: &[&str]) -> ProcessEnd {
    let site = Sandbox::new().unwrap();
    let mut command = site.command(package_program("mpmd-cli", "mpmd"));
    carrier.set(
        command
            .args(["run", "-n", &processes.to_string(), "--"])
            .args(program),
    );
    let mut launcher = site.start(command, "launcher").unwrap();
    launcher
        .wait(Instant::now() + Duration::from_secs(60))
        .unwrap()
}

/// Fails unless the launcher's last line begins with `mpmd: ` and `expected`, and its exit code is
/// not 0.
fn check_cause(end: &ProcessEnd, expected: &str) {
    let last = end.stderr.lines().last().unwrap_or_default();
    assert!(
        last.starts_with(&format!("mpmd: {expected}")),
        "{expected} is not said:\n{}",
        end.stderr
    );
    assert_ne!(end.code(), 0, "{}", end.stderr);
}

fn the_process_that_diverged_is_named(carrier: Carrier) {
    for culprit in [0, 2] {
        let end = launched(
            carrier,
            4,
            &[
                env!("CARGO_BIN_EXE_unfinished"),
                "diverged",
                &culprit.to_string(),
            ],
        );
        let first = format!(
            "process {culprit} failed first: it ended with exit code 1; the programs diverged"
        );
        check_cause(&end, &first);
    }
}

fn a_divergence_found_on_the_way_blames_no_other(carrier: Carrier) {
    let ways = [
        "extra-put",
        "skip-aside",
        "extra-jit",
        "skip-microbatch",
        "end-early",
        "extra-at-end",
    ];
    let number = if carrier.is_thorough() { ways.len() } else { 3 };
    for (place, how) in ways.into_iter().enumerate().take(number) {
        // The skipped operation runs on process 3 only.
        let culprit = if how == "skip-aside" { 3 } else { place % 4 };
        let program = [
            env!("CARGO_BIN_EXE_named"),
            "diverging",
            how,
            &culprit.to_string(),
            "16",
        ];
        let end = launched(carrier, 4, &program);
        let last = end.stderr.lines().last().unwrap_or_default();
        if !last.starts_with("mpmd: processes ") {
            check_cause(&end, &format!("process {culprit} failed first: "));
            continue;
        }
        // Before the other processes reach the operation, it is not known which of the two is
        // right.
        let (both, _) = last
            .split_once(" failed first; the programs diverged")
            .unwrap_or_default();
        assert!(
            both.split(' ').any(|word| word == culprit.to_string()),
            "{how}, {culprit}: {}",
            end.stderr
        );
    }
}

fn two_processes_that_diverged_are_both_named(carrier: Carrier) {
    let program = [
        env!("CARGO_BIN_EXE_named"),
        "diverging",
        "extra-jit",
        "1",
        "16",
    ];
    let end = launched(carrier, 2, &program);
    check_cause(
        &end,
        "processes 0 and 1 failed first; the programs diverged: they first differ at operation",
    );
    assert!(
        end.stderr
            .lines()
            .last()
            .is_some_and(|line| line.contains("diverging.rs:")),
        "{}",
        end.stderr
    );
}

fn a_program_without_finish_fails_the_job(carrier: Carrier) {
    let ended =
        "process 1 ended before its program finished: its `Program` was dropped without `finish`";
    for (how, work, why) in [
        ("dropped", "well", ended),
        ("failed", "badly", "the kernel is out of paper"),
    ] {
        let end = launched(carrier, 3, &[env!("CARGO_BIN_EXE_unfinished"), how, "1"]);
        check_cause(&end, "process 1 failed first: it ended with exit code 0; ");
        assert_eq!(
            end.stdout,
            format!("[1] the work ended {work}\n"),
            "{}",
            end.stderr
        );
        let last = end.stderr.lines().last().unwrap_or_default();
        assert!(last.contains(why), "{}", end.stderr);
        // The process itself reports it; the others repeat it, which is not shown.
        let mut said = end.stderr.lines().filter(|line| line.contains(why));
        assert!(
            said.next().is_some_and(|line| line.starts_with("[1] ")),
            "{}",
            end.stderr
        );
        assert!(said.eq([last]), "{}", end.stderr);
    }
}

fn an_error_of_the_program_reaches_all(carrier: Carrier) {
    let end = launched(
        carrier,
        3,
        &[env!("CARGO_BIN_EXE_unfinished"), "error", "1"],
    );
    let why = "process 1 ended before its program finished: the disk is full";
    check_cause(
        &end,
        &format!("process 1 failed first: it ended with exit code 1; {why}"),
    );
    // The processes print it too, but it is shown once.
    assert_eq!(
        end.stderr.matches("the disk is full").count(),
        1,
        "{}",
        end.stderr
    );
}

#[test]
fn panic_of_all_processes_is_shown_once() {
    let end = launched(
        Carrier::SHM,
        3,
        &[env!("CARGO_BIN_EXE_unfinished"), "panic", "0"],
    );
    assert_eq!(end.code(), 101, "{}", end.stderr);
    let shared = "mpmd: all 3 processes failed with exit code 101: thread 'main' \
                  panicked at tests/src/bin/unfinished.rs:";
    assert!(end.stderr.contains(shared), "{}", end.stderr);
    assert_eq!(
        end.stderr.matches("the printer burns").count(),
        1,
        "{}",
        end.stderr
    );
}

#[test]
fn spares_and_restarts_need_a_program_that_recovers() {
    let program = [env!("CARGO_BIN_EXE_named"), "hello"];
    let site = Sandbox::new().unwrap();
    let mut command = site.command(package_program("mpmd-cli", "mpmd"));
    command
        .args(["run", "-n", "2", "--spares", "1", "--"])
        .args(program);
    let mut launcher = site.start(command, "launcher").unwrap();
    let end = launcher
        .wait(Instant::now() + Duration::from_secs(60))
        .unwrap();
    let why = "the job has spares or restarts (--spares, --restart of mpmd run), but this program";
    check_cause(
        &end,
        &format!("all 2 processes failed with exit code 1: {why}"),
    );
    assert_eq!(
        (end.code(), end.stderr.matches(why).count()),
        (1, 1),
        "{}",
        end.stderr
    );
    assert_eq!(end.stdout, "", "{}", end.stderr);
}
