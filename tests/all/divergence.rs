//! One process runs another program than the rest. Every process ends with an error that shows both
//! sides. None waits for ever, and none continues with another operation's data.

use std::time::Duration;

use mpmd_tests::{Carrier, Job, over_each_carrier};

over_each_carrier! {
    extra_transfer_is_found_by_the_next_message
    skipped_operation_without_messages_is_found
    extra_operation_without_messages_is_found
    skipped_microbatch_is_found_with_the_step
    program_that_ends_a_step_early_is_found
    extra_or_missing_last_operation_is_found
}

const PROCESSES: usize = 4;

/// Returns the text of an error about an operation of `process`, up to the operation's number.
fn issued(process: usize) -> String {
    format!("process {process} issued operation ")
}

/// Runs the job in which one process departs from the program in the way `how`; returns the error
/// output of each process.
fn errors(carrier: Carrier, how: &str, culprit: usize, elements: usize) -> Vec<String> {
    let options = carrier.processes(env!("CARGO_BIN_EXE_named"), PROCESSES);
    let options = options.peer_timeout(Duration::from_secs(15));
    let (culprit, elements) = (culprit.to_string(), elements.to_string());
    let mut job = Job::start(options, &["diverging", how, &culprit, &elements]);
    let ended = job.wait();
    let report = job.report();
    for (process, end) in ended.iter().enumerate() {
        assert_eq!(
            end.code(),
            1,
            "process {process} must end with an error:\n{report}"
        );
        // Operations before the difference deliver right values. A skipped microbatch looks like a
        // later one, so the difference is found at the end of its step.
        let delivered = if how == "skip-microbatch" {
            "step 2"
        } else {
            "WRONG"
        };
        assert!(
            !end.stdout.contains(delivered),
            "process {process} got wrong data:\n{report}"
        );
        assert!(
            end.stderr.contains("the programs diverged"),
            "process {process}:\n{report}"
        );
        assert!(
            !end.stderr.contains("still waiting"),
            "process {process} waited too long:\n{report}"
        );
    }
    ended.into_iter().map(|end| end.stderr).collect()
}

/// Checks that both sides of the difference are shown, with the operations and their lines.
fn check_both_shown(carrier: Carrier, how: &str, culprit: usize, elements: usize) {
    for (process, error) in errors(carrier, how, culprit, elements)
        .into_iter()
        .enumerate()
    {
        let shown = error.matches("issued operation ").count();
        let lines = error.matches("tests/src/programs/diverging.rs:").count();
        assert!(
            error.contains(&issued(culprit)),
            "{how}: process {process} does not name the operation of {culprit}: {error}"
        );
        assert!(
            shown == 2 && lines == 2,
            "{how}: process {process} does not show both sides: {error}"
        );
    }
}

/// Checks that the error shows one operation: the process that issued fewer has none to show.
fn check_one_shown(carrier: Carrier, how: &str, culprit: usize) {
    for (process, error) in errors(carrier, how, culprit, 16).into_iter().enumerate() {
        let lines = error.matches("tests/src/programs/diverging.rs:").count();
        assert!(
            error.contains("has issued only") && lines == 1,
            "{how}: process {process}: {error}"
        );
        assert!(
            error.contains(&format!("process {culprit} ")),
            "{how}: process {process}: {error}"
        );
    }
}

fn extra_transfer_is_found_by_the_next_message(carrier: Carrier) {
    // At the receiver and at a process that takes no part; as an eager message and with a grant.
    for (culprit, elements) in [(2, 16), (2, 20_000), (0, 16)] {
        check_both_shown(carrier, "extra-put", culprit, elements);
    }
}

fn skipped_operation_without_messages_is_found(carrier: Carrier) {
    for culprit in [3, 1] {
        check_both_shown(carrier, "skip-aside", culprit, 16);
    }
}

fn extra_operation_without_messages_is_found(carrier: Carrier) {
    for culprit in [2, 0] {
        check_both_shown(carrier, "extra-jit", culprit, 16);
    }
}

fn skipped_microbatch_is_found_with_the_step(carrier: Carrier) {
    for culprit in [0, 2, 3] {
        for (process, error) in errors(carrier, "skip-microbatch", culprit, 16)
            .into_iter()
            .enumerate()
        {
            let lines = error.matches("tests/src/programs/diverging.rs:").count();
            let steps = error.contains(" after 2 steps") && error.contains(" after 1 steps");
            assert!(
                lines == 2 && steps && error.contains(&issued(culprit)),
                "process {process}: {error}"
            );
        }
    }
}

fn program_that_ends_a_step_early_is_found(carrier: Carrier) {
    check_one_shown(carrier, "end-early", 3);
    check_one_shown(carrier, "end-early", 1);
}

fn extra_or_missing_last_operation_is_found(carrier: Carrier) {
    for culprit in [1, 2] {
        check_one_shown(carrier, "extra-at-end", culprit);
        check_one_shown(carrier, "missing-at-end", culprit);
    }
}
