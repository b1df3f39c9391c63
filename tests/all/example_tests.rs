//! Three small programs over two halves of eight devices, each at 1, 2 and 4 processes.

use mpmd_tests::{Carrier, Job, over_each_carrier};

over_each_carrier! {
    host_values_are_placed_on_the_front
    an_array_moves_from_the_front_to_the_back
    kernels_run_before_and_after_a_move
}

/// Returns the lines about all shards, and the number of processes without shards.
fn run(carrier: Carrier, name: &str, processes: usize) -> (Vec<String>, usize) {
    let options = carrier.processes(env!("CARGO_BIN_EXE_named"), processes);
    let mut job = Job::start(options, &[name]);
    let said = job.wait_well().concat();
    let remote = said.lines().filter(|line| *line == "remote").count();
    let mut owners: Vec<String> = said
        .lines()
        .filter(|line| *line != "remote")
        .map(str::to_owned)
        .collect();
    owners.sort();
    (owners, remote)
}

/// Checks that devices `first` to `first + 3` have the right values, and that other processes
/// report no shards.
fn check(carrier: Carrier, name: &str, first: usize) {
    let expected: Vec<String> = (first..first + 4)
        .map(|device| format!("{device} all right"))
        .collect();
    for processes in [1, 2, 4]
        .into_iter()
        .filter(|processes| carrier.takes(*processes))
    {
        let found = run(carrier, name, processes);
        assert_eq!(
            found,
            (expected.clone(), processes / 2),
            "{name}, {processes} processes"
        );
    }
}

fn host_values_are_placed_on_the_front(carrier: Carrier) {
    check(carrier, "device_put_uncommitted", 0);
}

fn an_array_moves_from_the_front_to_the_back(carrier: Carrier) {
    check(carrier, "device_put_across_meshes", 4);
}

fn kernels_run_before_and_after_a_move(carrier: Carrier) {
    check(carrier, "jit_and_transfer", 4);
}
