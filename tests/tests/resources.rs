//! Nothing that an operation needs may be held by a later one: programs that would else stop for
//! ever.

use mpmd_tests::programs::simulated;
use mpmd_tests::{Carrier, Job, JobOptions, over_each_carrier};

over_each_carrier! {
    a_later_transfer_that_is_ready_first_lets_an_earlier_one_pass_in_both_directions
    two_arrays_of_which_only_one_fits_arrive_one_after_the_other
}

fn check(carrier: Carrier, name: &str, processes: usize, lines: usize) {
    let options = JobOptions::new(env!("CARGO_BIN_EXE_named"), processes).over(carrier);
    let mut job = Job::start(options, &[name]);
    let said = job.wait_well();
    assert_eq!(said.iter().flat_map(|said| said.lines()).count(), lines, "{said:#?}");
    assert_eq!(said, simulated(name, processes, &[]));
}

fn a_later_transfer_that_is_ready_first_lets_an_earlier_one_pass_in_both_directions(
    carrier: Carrier,
) {
    check(carrier, "crossing", 2, 4);
}

fn two_arrays_of_which_only_one_fits_arrive_one_after_the_other(carrier: Carrier) {
    check(carrier, "budget", 3, 2);
}
