//! Three small programs over two halves of eight devices, each at 1, 2 and 4 processes: nine runs.

use mpmd_tests::{Job, JobOptions};

/// The lines of all processes' owners; how many processes said that they own nothing.
fn run(name: &str, processes: usize) -> (Vec<String>, usize) {
    let mut job = Job::start(JobOptions::new(env!("CARGO_BIN_EXE_named"), processes), &[name]);
    let said = job.wait_well().concat();
    let remote = said.lines().filter(|line| *line == "remote").count();
    let mut owners: Vec<String> = said.lines().filter(|line| *line != "remote").map(str::to_owned).collect();
    owners.sort();
    (owners, remote)
}

/// Devices `first` to `first + 3` see the right values, and the processes that own none of them nothing.
fn check(name: &str, first: usize) {
    let expected: Vec<String> = (first..first + 4).map(|device| format!("{device} all right")).collect();
    for processes in [1, 2, 4] {
        assert_eq!(run(name, processes), (expected.clone(), processes / 2), "{name}, {processes} processes");
    }
}

#[test]
fn host_values_are_placed_on_the_front() {
    check("device_put_uncommitted", 0);
}

#[test]
fn an_array_moves_from_the_front_to_the_back() {
    check("device_put_across_meshes", 4);
}

#[test]
fn kernels_run_before_and_after_a_move() {
    check("jit_and_transfer", 4);
}
