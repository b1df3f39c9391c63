//! Calls of methods among four processes, with objects that are made and dropped at any time, a
//! panic, and a killed process. `MPMD_TESTS_CALLS` sets the number of calls.

use std::time::Duration;

use mpmd_tests::{Carrier, Job};

const PROCESSES: usize = 4;

/// Bytes that a warm run may still take from the system.
const LITTLE: u64 = 16 << 20;

/// Returns the number of calls.
fn calls() -> usize {
    let asked = std::env::var("MPMD_TESTS_CALLS").ok();
    asked.map_or(100_000, |calls| {
        calls.parse().expect("MPMD_TESTS_CALLS is a number")
    })
}

fn start(args: &[&str]) -> Job {
    let program = env!("CARGO_BIN_EXE_named");
    let limit = Duration::from_secs(120 + calls() as u64 / 500);
    let processes = Carrier::SHM.processes(program, PROCESSES).deadline(limit);
    Job::start(processes.peer_timeout(Duration::from_secs(10)), args)
}

/// Checks that each process's line `left` says that no value is left, and that at most `more` bytes
/// were taken since the program was warm.
fn check_left(outputs: &[&str], more: u64, report: &str) {
    for said in outputs {
        let left = said
            .lines()
            .find_map(|line| line.strip_prefix("left "))
            .unwrap_or_default();
        let words: Vec<u64> = left
            .split(' ')
            .filter_map(|word| word.parse().ok())
            .collect();
        let [left, warm, end] = words[..] else {
            panic!("no line `left`:\n{report}")
        };
        assert_eq!(left, 0, "{report}");
        assert!(end <= warm + more, "{warm}, then {end} resident");
    }
}

#[test]
fn calls_and_drops_leave_no_value_and_no_memory() {
    let mut job = start(&["counters", &calls().to_string(), "1"]);
    let outputs = job.wait_well();
    check_left(
        &outputs.iter().map(String::as_str).collect::<Vec<_>>(),
        LITTLE,
        &job.report(),
    );
}

#[test]
fn panicking_call_fails_later_ones_and_nothing_is_left() {
    let calls = calls();
    let args = [
        "counters",
        &calls.to_string(),
        "2",
        &(calls - 1).to_string(),
    ];
    let mut job = start(&args);
    let ends = job.wait().to_vec();
    let report = job.report();
    let outputs: Vec<&str> = ends.iter().map(|end| end.stdout.as_str()).collect();
    // The backtrace of a panic takes much memory.
    check_left(&outputs, u64::MAX / 2, &report);
    let failed: Vec<&str> = ends
        .iter()
        .flat_map(|end| end.stdout.lines())
        .filter(|line| line.starts_with("failed 3 times, same true: "))
        .collect();
    let [failed] = failed[..] else {
        panic!("one process sees the errors:\n{report}")
    };
    assert!(
        failed.contains("a negative input") && failed.contains("counters.rs:"),
        "{failed}"
    );
}

#[test]
fn killed_process_is_named_by_all_others() {
    let mut job = start(&["counters", "100000000", "3"]);
    job.wait_for_output("calls 10000\n").unwrap();
    job.kill(2).unwrap();
    for (process, end) in job
        .wait()
        .into_iter()
        .enumerate()
        .filter(|(process, _)| *process != 2)
    {
        assert_eq!(end.code(), 1, "process {process}:\n{}", job.report());
        assert!(end.stderr.contains("process 2 is gone"), "{}", end.stderr);
    }
}
