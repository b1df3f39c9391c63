//! Nothing that an operation needs may be held by a later one: programs that would else stop for ever.

use mpmd_tests::programs::simulated;
use mpmd_tests::{Job, JobOptions};

fn check(name: &str, processes: usize, lines: usize) {
    let mut job = Job::start(JobOptions::new(env!("CARGO_BIN_EXE_named"), processes), &[name]);
    let said = job.wait_well();
    assert_eq!(said.iter().flat_map(|said| said.lines()).count(), lines, "{said:#?}");
    assert_eq!(said, simulated(name, processes, &[]));
}

#[test]
fn a_later_transfer_that_is_ready_first_lets_an_earlier_one_pass_in_both_directions() {
    check("crossing", 2, 4);
}

#[test]
fn two_arrays_of_which_only_one_fits_arrive_one_after_the_other() {
    check("budget", 3, 2);
}
