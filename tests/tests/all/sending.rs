//! A sender waits for its send: it stays pending while the receiver is stopped, and fails with it.

use std::time::Duration;

use mpmd_tests::programs::STOPPED;
use mpmd_tests::{Carrier, Job, JobOptions, over_each_carrier};
use rustix::process::Signal;

over_each_carrier! {
    send_to_a_stopped_process_fails_and_names_it
    send_to_a_continued_process_completes
}

/// Starts a job of two processes, stops the second, and lets the first send to it. Returns once the
/// first has found its handle pending.
fn pending(carrier: Carrier, peer_timeout: Duration) -> Job {
    let options = JobOptions::new(env!("CARGO_BIN_EXE_named"), 2).over(carrier);
    let mut job = Job::start(options.peer_timeout(peer_timeout), &["sending"]);
    job.wait_for_output("ready\n");
    job.processes[1].signal(Signal::STOP);
    std::fs::write(job.folder().join(STOPPED), "").expect("the test's own folder");
    let deadline = job.deadline();
    job.processes[0].wait_for_output("pending\n", deadline);
    job
}

fn send_to_a_stopped_process_fails_and_names_it(carrier: Carrier) {
    let mut job = pending(carrier, Duration::from_secs(3));
    let deadline = job.deadline();
    let end = job.processes[0].wait(deadline);
    assert_eq!(end.code, 1, "{}", job.report());
    let said = end.stdout.lines().find_map(|line| line.strip_prefix("failed: "));
    assert!(said.is_some_and(|said| said.contains("process 1 is gone")), "{}", job.report());
    job.processes[1].signal(Signal::KILL);
    job.wait();
}

fn send_to_a_continued_process_completes(carrier: Carrier) {
    let mut job = pending(carrier, Duration::from_secs(30));
    job.processes[1].signal(Signal::CONT);
    for said in job.wait_well() {
        assert!(said.ends_with("taken\n"), "{said}");
    }
}
