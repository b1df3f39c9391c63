//! `cargo xtask soak`: hours of transfers, objects, training, kills and stops over every transport.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::commands::{cargo_in, run};

/// Environment variable with the minimum seconds of each long job.
const SECONDS: &str = "MPMD_SOAK_SECONDS";

/// Number of transports that the long jobs take turns with.
const CARRIERS: u32 = 5;

/// The tests of each round, in order, as (package, part of their names). They end or replace
/// processes, train, and move arrays.
const ROUND: [(&str, &str); 6] = [
    ("mpmd-tests", "kill::"),
    ("mpmd-tests", "fault_injection::"),
    ("mpmd-tests", "recovery::"),
    ("mpmd-tests", "transfers::"),
    ("mpmd-tests", "train_gpt::"),
    ("mpmd-train", "kills"),
];

/// Parses `--minutes N`; returns `None` for other arguments.
pub(crate) fn parse(arguments: &[&str]) -> Option<Duration> {
    match arguments {
        ["--minutes", minutes] => minutes
            .parse()
            .ok()
            .map(|n: u64| Duration::from_secs(60 * n)),
        _ => None,
    }
}

/// Runs long jobs over each transport for half of the time, and checks that their memory, open
/// files and threads stay flat. Then repeats the tests of deaths, stops, training and transfers.
pub(crate) fn soak(root: &Path, time: Duration) -> anyhow::Result<ExitCode> {
    let begin = Instant::now();
    let seconds = (time / (2 * CARRIERS)).as_secs().to_string();
    println!("long jobs over {CARRIERS} transports, {seconds} s each");
    tests(root, "mpmd-tests", "soak::", Some(&seconds))?;

    let mut rounds = 0;
    while begin.elapsed() < time {
        for (package, name) in ROUND {
            tests(root, package, name, None)?;
        }
        rounds += 1;
        println!(
            "{rounds} rounds, {:.0} minutes",
            begin.elapsed().as_secs_f64() / 60.0
        );
    }

    println!("all passed: long jobs, and {rounds} rounds of faults");
    Ok(ExitCode::SUCCESS)
}

/// Runs the tests of a package whose names contain `name`, one after the other.
fn tests(root: &Path, package: &str, name: &str, seconds: Option<&str>) -> anyhow::Result<()> {
    let mut command = cargo_in(root, &["test", "--quiet", "--tests", "--package", package]);
    if package == "mpmd-tests" {
        command.args(["--features", "ucx"]);
    }
    // Shows the memory of the long jobs and the time after which a lost process was named.
    command.args(["--", name, "--test-threads=1", "--show-output"]);
    command.envs(seconds.map(|seconds| (SECONDS, seconds)));
    run(&mut command)
}
