//! A sender waits for its send: it stays pending while the receiver is stopped, and fails with it.

use std::time::Duration;

use mpmd_tests::programs::STOPPED;
use mpmd_tests::{Carrier, Job, over_each_carrier};

over_each_carrier! {
    send_to_a_stopped_process_fails_and_names_it
    send_to_a_continued_process_completes
}

/// Starts a job of two processes, stops the second, and lets the first send to it. Returns once the
/// first has found its handle pending.
fn pending(carrier: Carrier, peer_timeout: Duration) -> Job {
    let processes = carrier
        .processes(env!("CARGO_BIN_EXE_named"), 2)
        .peer_timeout(peer_timeout);
    let mut job = Job::start(processes, &["sending"]);
    job.wait_for_output("ready\n").unwrap();
    job.stop(1).unwrap();
    std::fs::write(job.folder().join(STOPPED), "").expect("the test's own folder");
    job.wait_for_output_of(0, "pending\n").unwrap();
    job
}

fn send_to_a_stopped_process_fails_and_names_it(carrier: Carrier) {
    let mut job = pending(carrier, Duration::from_secs(3));
    let end = job.wait_for(0).unwrap();
    assert_eq!(end.code(), 1, "{}", job.report());
    let said = end
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("failed: "));
    assert!(
        said.is_some_and(|said| said.contains("process 1 is gone")),
        "{}",
        job.report()
    );
    job.kill(1).unwrap();
    job.wait();
}

fn send_to_a_continued_process_completes(carrier: Carrier) {
    let mut job = pending(carrier, Duration::from_secs(30));
    job.resume(1).unwrap();
    for said in job.wait_well() {
        assert!(said.ends_with("taken\n"), "{said}");
    }
}
