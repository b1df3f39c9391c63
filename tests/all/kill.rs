//! A process dies, or stops, in the middle of a job. The others soon end, each with an error that
//! names the process and the waiting operation.

use std::time::Duration;

use mpmd_tests::{Carrier, FaultOutcome, Job, ProcessEnd, Processes, over_each_carrier};
use rustix::process::Signal;

over_each_carrier! {
    killed_process_is_named_by_all_others_in_five_seconds
    stopped_process_is_named_by_all_others_after_timeout
    stop_shorter_than_peer_timeout_is_no_failure
}

const PROCESSES: usize = 4;

/// Time limit for the end of all other processes.
const SOON: Duration = Duration::from_secs(5);

/// Returns true if the error names the waiting operation and its line in the program.
fn names_an_operation(error: &str) -> bool {
    let operation = error
        .split("operation ")
        .skip(1)
        .any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    operation && error.contains("tests/src/programs/looping.rs:")
}

fn options(carrier: Carrier, peer_timeout: Duration) -> Processes {
    carrier
        .processes(env!("CARGO_BIN_EXE_named"), PROCESSES)
        .peer_timeout(peer_timeout)
}

/// Starts a job, sends a signal to process `victim` after step 6, and waits for the end of the
/// others.
fn inject_fault(options: Processes, mode: &str, victim: usize, signal: Signal) -> FaultOutcome {
    let mut job = Job::start(options, &["looping", mode]);
    // Late enough that all are at work.
    job.wait_for_output("step 6\n").unwrap();
    job.inject_fault(victim, signal)
}

fn check_errors(victim: usize, ended: &[ProcessEnd], report: &str) {
    for end in ended {
        assert_eq!(
            end.code(),
            1,
            "victim {victim}: everybody else ends with an error\n{report}"
        );
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

fn killed_process_is_named_by_all_others_in_five_seconds(carrier: Carrier) {
    let mut waited = 0;
    let victims = if carrier.is_thorough() {
        0..PROCESSES
    } else {
        0..2
    };
    for mode in ["reading", "running-ahead", "large"] {
        for victim in victims.clone() {
            let options = options(carrier, Duration::from_secs(30));
            let FaultOutcome {
                ended,
                took,
                report,
            } = inject_fault(options, mode, victim, Signal::KILL);
            println!("{mode}, victim {victim}: all had ended after {took:?}");
            check_errors(victim, &ended, &report);
            assert!(
                took <= SOON,
                "{mode}, victim {victim}: the last ended after {took:?}\n{report}"
            );
            waited += usize::from(ended.iter().any(|end| end.stderr.contains("waited for it")));
        }
    }
    // If no operation waits at the moment of death, the error names the latest one. That cannot
    // happen every time.
    assert!(waited > 0, "no error names an operation that waited");
}

fn stopped_process_is_named_by_all_others_after_timeout(carrier: Carrier) {
    for victim in [0, 2] {
        let options = options(carrier, Duration::from_secs(3));
        let FaultOutcome { ended, report, .. } =
            inject_fault(options, "running-ahead", victim, Signal::STOP);
        check_errors(victim, &ended, &report);
    }
}

fn stop_shorter_than_peer_timeout_is_no_failure(carrier: Carrier) {
    let mut job = Job::start(
        options(carrier, Duration::from_secs(20)),
        &["looping", "reading"],
    );
    job.wait_for_output("step 5\n").unwrap();
    job.stop(1).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    job.resume(1).unwrap();
    let steps = job.output(3).unwrap().lines().count();
    job.wait_for_output(&format!("step {}\n", steps + 20))
        .unwrap();
    job.end();
}
