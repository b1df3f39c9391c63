//! Processes whose programs differ: how the first difference is found, and by whom.

use super::*;

/// Runs a diverging job and returns the one message that all processes fail with.
pub(super) fn diverged(mut job: Job) -> String {
    job.run(4000);
    let messages: Vec<String> = job
        .routers
        .iter()
        .map(|router| {
            let failure = router.failed().expect("every process fails");
            assert_eq!(failure.kind, FailureKind::Diverged);
            failure.message.clone()
        })
        .collect();
    assert!(
        job.outcomes.values().all(Result::is_err),
        "nothing is delivered"
    );
    assert!(
        messages.windows(2).all(|pair| pair[0] == pair[1]),
        "{messages:?}"
    );
    messages[0].clone()
}

#[test]
fn extra_operation_is_found_by_the_next_message() {
    for seed in 0..20 {
        let mut job = Job::new(2, seed, 30);
        for (process, ops) in [(0, [11, 50, 60]), (1, [11, 61, 70])] {
            for (i, hash) in ops.into_iter().enumerate() {
                job.issue(process, hash, &format!("put {hash}"));
                let key = (i as u64 + 1, 0);
                match process {
                    0 => job.offer(0, 1, key, 100),
                    _ if i > 0 => job.expect(1, 0, key, 100),
                    _ => {}
                }
            }
        }
        let text = diverged(job);
        assert!(
            text.contains("process 0 issued operation 2 (put 50)"),
            "{text}"
        );
        assert!(
            text.contains("process 1 issued operation 2 (put 61)"),
            "{text}"
        );
    }
}

#[test]
fn extra_operation_without_messages_is_found_at_step_end() {
    let mut job = Job::new(4, 7, 10);
    for process in 0..4 {
        for op in 1..=3 {
            job.issue(process, op, "same");
        }
        if process == 2 {
            job.issue(process, 99, "extra, without messages");
        } else {
            job.issue(process, 4, "same");
        }
        job.routers[process].step_end(1);
        job.act(process);
    }
    let text = diverged(job);
    assert!(
        text.contains("operation 4 (extra, without messages)"),
        "{text}"
    );
}

#[test]
fn a_skipped_operation_is_found_at_goodbye() {
    let mut job = Job::new(2, 8, 10);
    job.issue(0, 1, "both");
    job.issue(1, 1, "both");
    job.issue(1, 2, "only here");
    job.expect(1, 0, (2, 0), 10);
    job.routers[0].goodbye(None, at(0));
    job.act(0);
    let text = diverged(job);
    assert!(
        text.contains("process 0 has issued only 1 operations"),
        "{text}"
    );
    assert!(
        text.contains("process 1 issued operation 2 (only here)"),
        "{text}"
    );
}

#[test]
fn extra_last_operation_is_found_by_both() {
    for first in [0, 1] {
        let mut job = Job::new(2, 8, 10);
        job.issue(0, 1, "both");
        job.issue(1, 1, "both");
        job.issue(1, 2, "only here");
        for process in [first, 1 - first] {
            job.routers[process].goodbye(None, at(0));
            job.act(process);
            job.run(50);
        }
        assert!(
            job.routers
                .iter()
                .all(|router| router.still_here().is_empty()),
            "settled on both sides"
        );
        let text = diverged(job);
        assert!(
            text.contains("process 1 issued operation 2 (only here)"),
            "{text}"
        );
    }
}

#[test]
fn peer_is_still_here_until_dispute_ends() {
    let mut job = Job::new(2, 8, 10);
    job.issue(0, 1, "one way");
    job.issue(1, 2, "another way");
    for process in 0..2 {
        job.routers[process].goodbye(None, at(0));
        job.act(process);
    }
    for _ in 0..5000 {
        if job.routers[0].still_here().is_empty() || job.routers[0].failed().is_some() {
            break;
        }
        job.step();
    }
    assert!(
        job.routers[0].failed().is_some(),
        "still here until the dispute has ended"
    );
}

#[test]
fn step_end_at_another_operation_is_named() {
    let mut job = Job::new(2, 13, 5);
    for process in 0..2 {
        job.issue(process, 1, "op");
    }
    // The hash that comes with operations includes the ends of steps.
    job.routers[0].step_end(1);
    job.act(0);
    job.issue(0, 22, "op");
    job.issue(1, 2, "op");
    let text = diverged(job);
    assert!(
        text.contains("process 0 issued operation 2 (op) at"),
        "{text}"
    );
    assert!(
        text.contains("after 1 steps; process 1 issued operation 2 (op) at"),
        "{text}"
    );
    assert!(text.ends_with("after 0 steps"), "{text}");
}

#[test]
fn operation_forgotten_by_one_side_is_no_difference() {
    let mut job = Job::new(2, 12, 3);
    for process in 0..2 {
        job.issue(process, 7, "device_put");
        job.issue(process, 8, "device_put");
    }
    // Process 0 goes on with operations of others. Its pieces of the first two operations, one each
    // way, are slow.
    for op in 3..10_000 {
        job.issue(0, op, "elsewhere");
    }
    job.expect(0, 1, (1, 0), 10);
    job.expect(1, 0, (2, 0), 100_000);
    job.run(400);
    job.offer(1, 0, (1, 0), 10);
    job.offer(0, 1, (2, 0), 100_000);
    job.run(50);
    assert!(job.routers.iter().all(|router| router.failed().is_none()));
    assert!(job.outcomes[&(0, (1, 0))].is_ok() && job.outcomes[&(1, (2, 0))].is_ok());
}

#[test]
fn operation_forgotten_by_one_side_is_compared() {
    // Each case: the sender; true if the receiver expects first; the process that issues more.
    for case in 0..8 {
        let (from, asks_first, ahead) = (case & 1, case & 2 == 0, case >> 2);
        for bytes in [10, 100_000] {
            let mut job = Job::new(2, case as u64, 0);
            job.issue(0, 7, "device_put");
            job.issue(1, 8, "device_put of other values");
            for op in 3..10_000 {
                job.issue(ahead, op, "elsewhere");
            }
            for turn in [asks_first, !asks_first] {
                match turn {
                    true => job.expect(1 - from, from, (1, 0), bytes),
                    false => job.offer(from, 1 - from, (1, 0), bytes),
                }
                // Too early for a heartbeat.
                job.run(5);
            }
            assert!(
                !job.outcomes.values().any(Result::is_ok),
                "{bytes} bytes of case {case} are delivered"
            );
            job.run(4000);
            for router in &job.routers {
                let kind = router.failed().map(|failure| failure.kind);
                assert_eq!(
                    kind,
                    Some(FailureKind::Diverged),
                    "{bytes} bytes, case {case}"
                );
            }
        }
    }
}
