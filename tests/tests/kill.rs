//! A process dies, or stops, in the middle: the others end soon, each with an error that says who, and
//! what waited for it.

use std::time::{Duration, Instant};

use mpmd_tests::{Ended, Job, JobOptions};
use rustix::process::Signal;

const PROCESSES: usize = 4;

/// The time within which everybody must have ended.
const SOON: Duration = Duration::from_secs(5);

/// A part of the error that says which operation, on which line of the program, waited.
fn names_an_operation(error: &str) -> bool {
    let operation =
        error.split("operation ").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    operation && error.contains("tests/src/programs/looping.rs:")
}

/// How the others end when something happens to process `victim` while all are at work; and after how
/// long the last has ended.
fn strike(mode: &str, patience: Duration, victim: usize, signal: Signal) -> (Vec<Ended>, Duration, String) {
    let options = JobOptions::new(env!("CARGO_BIN_EXE_named"), PROCESSES).patience(patience);
    let mut job = Job::start(options, &["looping", mode]);
    job.wait_for_output("step 20\n");
    let begin = Instant::now();
    job.processes[victim].signal(signal);
    let deadline = job.deadline();
    let mut ended = Vec::new();
    for process in 0..PROCESSES {
        if process != victim {
            ended.push(job.processes[process].wait(deadline));
        }
    }
    let last = ended.iter().map(|end| end.at).max().unwrap_or(begin);
    // One that is stopped does not end by itself.
    job.processes[victim].signal(Signal::KILL);
    job.wait();
    (ended, last - begin, job.report())
}

fn check_errors(victim: usize, ended: &[Ended], report: &str) {
    for end in ended {
        assert_eq!(end.code, 1, "victim {victim}: everybody else ends with an error\n{report}");
        let gone = format!("process {victim} is gone");
        assert!(end.stderr.contains(&gone), "victim {victim} is not named in {}\n{report}", end.stderr);
    }
    // Who waited for it directly.
    assert!(ended.iter().any(|end| names_an_operation(&end.stderr)), "no operation is named\n{report}");
}

#[test]
fn a_killed_process_is_named_by_every_other_within_five_seconds() {
    for mode in ["reading", "running-ahead"] {
        for victim in 0..PROCESSES {
            let (ended, took, report) = strike(mode, Duration::from_secs(30), victim, Signal::KILL);
            check_errors(victim, &ended, &report);
            assert!(took <= SOON, "{mode}, victim {victim}: the last ended after {took:?}\n{report}");
            eprintln!("{mode}, victim {victim}: {took:?}\n{report}");
        }
    }
}

#[test]
fn a_stopped_process_is_named_by_every_other_when_patience_is_over() {
    for victim in [0, 2] {
        let (ended, took, report) = strike("running-ahead", Duration::from_secs(3), victim, Signal::STOP);
        check_errors(victim, &ended, &report);
        eprintln!("stopped {victim}: {took:?}\n{report}");
    }
}
