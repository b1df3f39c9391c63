//! One process runs another program than the rest: every process ends with an error that shows both
//! sides, none waits for ever, and none goes on with another operation's data.

use std::time::Duration;

use mpmd_tests::{Carrier, Job, JobOptions, over_each_carrier};

over_each_carrier! {
    an_extra_transfer_that_meets_anothers_message
    an_operation_skipped_in_which_nobody_else_takes_part
    an_extra_operation_in_which_nobody_else_takes_part
    a_whole_microbatch_left_out_of_many_that_look_alike_is_found_with_the_step
    a_program_that_ends_a_step_early
    one_operation_more_or_less_at_the_very_end
}

const PROCESSES: usize = 4;

/// What a process says that issued an operation, up to the operation's number.
fn issued(process: usize) -> String {
    format!("process {process} issued operation ")
}

/// Runs the job in which process `who` departs in the way `how`; returns what each process said for
/// an error.
fn errors(carrier: Carrier, how: &str, who: usize, elements: usize) -> Vec<String> {
    let options = JobOptions::new(env!("CARGO_BIN_EXE_named"), PROCESSES).over(carrier);
    let options = options.patience(Duration::from_secs(15));
    let (who, elements) = (who.to_string(), elements.to_string());
    let mut job = Job::start(options, &["diverging", how, &who, &elements]);
    let ended = job.wait();
    let report = job.report();
    for (process, end) in ended.iter().enumerate() {
        assert_eq!(end.code, 1, "process {process} must end with an error:\n{report}");
        // What the same operations bring is what was asked for; a step that looks alike ends with
        // it.
        let delivered = if how == "skip-microbatch" { "step 2" } else { "WRONG" };
        assert!(!end.stdout.contains(delivered), "process {process} got wrong data:\n{report}");
        assert!(end.stderr.contains("the programs diverged"), "process {process}:\n{report}");
        assert!(
            !end.stderr.contains("still waiting"),
            "process {process} waited too long:\n{report}"
        );
    }
    ended.into_iter().map(|end| end.stderr).collect()
}

/// Both sides of the difference are shown, with what was issued and the line that did.
fn check_both_shown(carrier: Carrier, how: &str, who: usize, elements: usize) {
    for (process, error) in errors(carrier, how, who, elements).into_iter().enumerate() {
        let shown = error.matches("issued operation ").count();
        let lines = error.matches("tests/src/programs/diverging.rs:").count();
        assert!(
            error.contains(&issued(who)),
            "{how}: process {process} does not say what {who} did: {error}"
        );
        assert!(
            shown == 2 && lines == 2,
            "{how}: process {process} does not show both sides: {error}"
        );
    }
}

/// The one that issued less has nothing to show for it.
fn check_one_shown(carrier: Carrier, how: &str, who: usize) {
    for (process, error) in errors(carrier, how, who, 16).into_iter().enumerate() {
        let lines = error.matches("tests/src/programs/diverging.rs:").count();
        assert!(
            error.contains("has issued only") && lines == 1,
            "{how}: process {process}: {error}"
        );
        assert!(error.contains(&format!("process {who} ")), "{how}: process {process}: {error}");
    }
}

fn an_extra_transfer_that_meets_anothers_message(carrier: Carrier) {
    // The receiver, and one that sees nothing of it; unasked, and by request.
    for (who, elements) in [(2, 16), (2, 20_000), (0, 16)] {
        check_both_shown(carrier, "extra-put", who, elements);
    }
}

fn an_operation_skipped_in_which_nobody_else_takes_part(carrier: Carrier) {
    for who in [3, 1] {
        check_both_shown(carrier, "skip-aside", who, 16);
    }
}

fn an_extra_operation_in_which_nobody_else_takes_part(carrier: Carrier) {
    for who in [2, 0] {
        check_both_shown(carrier, "extra-jit", who, 16);
    }
}

fn a_whole_microbatch_left_out_of_many_that_look_alike_is_found_with_the_step(carrier: Carrier) {
    for who in [0, 2, 3] {
        for (process, error) in errors(carrier, "skip-microbatch", who, 16).into_iter().enumerate()
        {
            let lines = error.matches("tests/src/programs/diverging.rs:").count();
            let steps = error.contains(" after 2 steps") && error.contains(" after 1 steps");
            assert!(
                lines == 2 && steps && error.contains(&issued(who)),
                "process {process}: {error}"
            );
        }
    }
}

fn a_program_that_ends_a_step_early(carrier: Carrier) {
    check_one_shown(carrier, "end-early", 3);
    check_one_shown(carrier, "end-early", 1);
}

fn one_operation_more_or_less_at_the_very_end(carrier: Carrier) {
    for who in [1, 2] {
        check_one_shown(carrier, "extra-at-end", who);
        check_one_shown(carrier, "missing-at-end", who);
    }
}
