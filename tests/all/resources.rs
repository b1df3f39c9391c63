//! Programs that would deadlock if a later operation held a resource that an earlier one needs.

use mpmd_tests::programs::simulated;
use mpmd_tests::{Carrier, Job, over_each_carrier};

over_each_carrier! {
    ready_later_transfers_do_not_block_earlier_ones
    two_arrays_with_room_for_one_both_arrive
}

fn check(carrier: Carrier, name: &str, processes: usize, lines: usize) {
    let options = carrier.processes(env!("CARGO_BIN_EXE_named"), processes);
    let mut job = Job::start(options, &[name]);
    let said = job.wait_well();
    assert_eq!(
        said.iter().flat_map(|said| said.lines()).count(),
        lines,
        "{said:#?}"
    );
    assert_eq!(said, simulated(name, processes, &[]));
}

fn ready_later_transfers_do_not_block_earlier_ones(carrier: Carrier) {
    check(carrier, "crossing", 2, 4);
}

fn two_arrays_with_room_for_one_both_arrive(carrier: Carrier) {
    check(carrier, "budget", 3, 2);
}
