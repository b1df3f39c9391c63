//! Processes die in the middle of a job, and others take their places. The results have the bits of
//! an undisturbed job.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, Sandbox, package_program};

const PROCESSES: usize = 3;
const STEPS: &str = "400";

/// Number of processes that may be killed.
const RESTARTS: &str = "4";

/// The longest time for a job.
const LONG: Duration = Duration::from_secs(100);

/// Runs the program under `mpmd run` with these options. Returns its sums and its output.
fn run(carrier: Carrier, options: &[&str]) -> (Vec<String>, String) {
    let site = Sandbox::new().unwrap();
    let mut command = site.command(package_program("mpmd-cli", "mpmd"));
    command.args(["run", "-n", &PROCESSES.to_string(), "--no-prefix"]).args(options);
    command.args(["--", env!("CARGO_BIN_EXE_recovering"), STEPS]);
    carrier.set(&mut command);
    let mut launcher = site.start(command, "launcher").unwrap();
    let end = launcher.wait(Instant::now() + LONG).unwrap();
    assert_eq!(end.code(), 0, "{end:?}");
    let sums = end.stdout.lines().filter(|line| line.starts_with("sum "));
    (sums.map(str::to_owned).collect(), end.stderr)
}

fn killed_processes_are_replaced(carrier: Carrier) {
    let (expected, _) = run(carrier, &[]);
    assert!(expected.len() == PROCESSES && expected.iter().all(|sum| *sum == expected[0]));
    let options = ["--restart", RESTARTS, "--chaos", "0.4"];
    let (sums, errors) = run(carrier, &options);
    assert!(errors.contains("chaos kills"), "{errors}");
    assert!(errors.contains("epoch 2 begins"), "{errors}");
    assert_eq!(sums, expected, "{errors}");
}

#[test]
fn killed_processes_are_replaced_over_tcp() {
    killed_processes_are_replaced(Carrier::TCP);
}

#[test]
fn killed_processes_are_replaced_over_shared_memory() {
    killed_processes_are_replaced(Carrier::SHM);
}
