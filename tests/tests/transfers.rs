//! Transfers between processes over tcp give what they give inside one process.

use mpmd_core::launch::variables;
use mpmd_tests::programs::simulated;
use mpmd_tests::{Job, JobOptions};

fn sorted(said: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = said.iter().flat_map(|said| said.lines().map(str::to_owned)).collect();
    lines.sort();
    // What every process says is one line of the job.
    lines.dedup();
    lines
}

fn over_tcp(name: &str, processes: usize) -> Vec<String> {
    let mut job = Job::start(JobOptions::new(env!("CARGO_BIN_EXE_named"), processes), &[name]);
    sorted(&job.wait_well())
}

#[test]
fn every_way_gives_every_owner_the_same_at_any_number_of_processes() {
    let alone = sorted(&simulated("transfers", 1, &[]));
    assert!(alone.len() > 60, "{alone:#?}");
    assert!(alone.iter().any(|line| line.starts_with("a refused cut: ")), "{alone:#?}");
    for processes in [1, 2, 4, 8] {
        assert_eq!(over_tcp("transfers", processes), alone, "{processes} processes over tcp");
        assert_eq!(sorted(&simulated("transfers", processes, &[])), alone, "{processes} processes inproc");
    }
}

/// As on so many hosts: what is between them is the same, but the plans are others.
fn over_hosts(name: &str, processes: usize, hosts: usize) -> Vec<String> {
    let mut job = Job::prepare(JobOptions::new(env!("CARGO_BIN_EXE_named"), processes));
    for process in 0..processes {
        let mut command = job.command(process);
        command.arg(name).env(variables::HOST, format!("host{}", process * hosts / processes));
        job.spawn(command);
    }
    sorted(&job.wait_well())
}

#[test]
fn every_way_gives_every_owner_the_same_on_several_hosts() {
    let alone = sorted(&simulated("transfers", 1, &[]));
    for (processes, hosts) in [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)] {
        assert_eq!(
            over_hosts("transfers", processes, hosts),
            alone,
            "{processes} processes on {hosts} hosts"
        );
    }
    assert_eq!(over_hosts("large", 4, 2), sorted(&simulated("large", 1, &[])));
}

#[test]
fn arrays_come_back_from_a_tour_as_they_were() {
    let lines = over_tcp("transfers", 4);
    let of = |name: &str| {
        let shards = lines.iter().filter_map(|line| line.strip_prefix(name));
        shards.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(of("before the tour").len(), 8);
    assert_eq!(of("before the tour"), of("after the tour"));
}

#[test]
fn messages_around_the_eager_limit_and_beyond_the_eager_credit_arrive() {
    let alone = sorted(&simulated("eager_limit", 1, &[]));
    assert_eq!(alone.len(), 6 + 96);
    for processes in [2, 8] {
        assert_eq!(over_tcp("eager_limit", processes), alone, "{processes} processes");
    }
}

#[test]
fn a_large_array_arrives_whole() {
    assert_eq!(over_tcp("large", 2), sorted(&simulated("large", 1, &[])));
}
