//! A process dies, or stops, in the middle: the others end soon, each with an error that says who,
//! and what waited for it.

use std::time::Duration;

use mpmd_tests::{Carrier, Ended, Job, JobOptions, Struck, over_each_carrier};
use rustix::process::Signal;

over_each_carrier! {
    a_killed_process_is_named_by_every_other_within_five_seconds
    a_stopped_process_is_named_by_every_other_when_patience_is_over
    a_stop_shorter_than_patience_is_no_failure
}

const PROCESSES: usize = 4;

/// The time within which everybody must have ended.
const SOON: Duration = Duration::from_secs(5);

/// A part of the error that says which operation, on which line of the program, waited.
fn names_an_operation(error: &str) -> bool {
    let operation = error
        .split("operation ")
        .skip(1)
        .any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    operation && error.contains("tests/src/programs/looping.rs:")
}

fn options(carrier: Carrier, patience: Duration) -> JobOptions {
    JobOptions::new(env!("CARGO_BIN_EXE_named"), PROCESSES).over(carrier).patience(patience)
}

/// Strikes process `victim` while all are at work.
fn strike(options: JobOptions, mode: &str, victim: usize, signal: Signal) -> Struck {
    let mut job = Job::start(options, &["looping", mode]);
    // Far enough that all are at work.
    job.wait_for_output("step 6\n");
    job.strike(victim, signal)
}

fn check_errors(victim: usize, ended: &[Ended], report: &str) {
    for end in ended {
        assert_eq!(end.code, 1, "victim {victim}: everybody else ends with an error\n{report}");
        let gone = format!("process {victim} is gone");
        assert!(
            end.stderr.contains(&gone),
            "victim {victim} is not named in {}\n{report}",
            end.stderr
        );
        assert!(
            names_an_operation(&end.stderr),
            "no operation is named in {}\n{report}",
            end.stderr
        );
    }
}

fn a_killed_process_is_named_by_every_other_within_five_seconds(carrier: Carrier) {
    let mut waited = 0;
    let victims = if carrier.is_thorough() { 0..PROCESSES } else { 0..2 };
    for mode in ["reading", "running-ahead", "large"] {
        for victim in victims.clone() {
            let options = options(carrier, Duration::from_secs(30));
            let Struck { ended, took, report } = strike(options, mode, victim, Signal::KILL);
            check_errors(victim, &ended, &report);
            assert!(
                took <= SOON,
                "{mode}, victim {victim}: the last ended after {took:?}\n{report}"
            );
            waited += usize::from(ended.iter().any(|end| end.stderr.contains("waited for it")));
        }
    }
    // A death between two waits is named with what was at hand; it cannot be so every time.
    assert!(waited > 0, "no error names an operation that waited");
}

fn a_stopped_process_is_named_by_every_other_when_patience_is_over(carrier: Carrier) {
    for victim in [0, 2] {
        let options = options(carrier, Duration::from_secs(3));
        let Struck { ended, report, .. } = strike(options, "running-ahead", victim, Signal::STOP);
        check_errors(victim, &ended, &report);
    }
}

fn a_stop_shorter_than_patience_is_no_failure(carrier: Carrier) {
    let mut job = Job::start(options(carrier, Duration::from_secs(20)), &["looping", "reading"]);
    job.wait_for_output("step 5\n");
    job.processes[1].signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(2));
    job.processes[1].signal(Signal::CONT);
    let steps = job.processes[3].output().lines().count();
    job.wait_for_output(&format!("step {}\n", steps + 20));
    for process in &mut job.processes {
        process.signal(Signal::KILL);
    }
    job.wait();
}
