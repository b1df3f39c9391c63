//! Transfers between processes give the same results as inside one process.

use std::collections::BTreeSet;

use mpmd_core::launch::variables;
use mpmd_tests::programs::simulated;
use mpmd_tests::{Carrier, Job, Processes, over_each_carrier};

over_each_carrier! {
    transfers_are_the_same_at_any_number_of_processes
    transfers_are_the_same_on_several_hosts
    every_cell_of_the_routing_table_works
    chunks_lists_parts_and_intermediates_move_alike
    many_leaves_of_mixed_sizes_move_alike
    arrays_come_back_from_a_tour_as_they_were
    messages_around_eager_limit_and_beyond_credit_arrive
    a_large_array_arrives_whole
}

fn sorted(said: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = said
        .iter()
        .flat_map(|said| said.lines().map(str::to_owned))
        .collect();
    lines.sort();
    // Lines that every process prints count once.
    lines.dedup();
    lines
}

fn options(carrier: Carrier, processes: usize) -> Processes {
    carrier.processes(env!("CARGO_BIN_EXE_named"), processes)
}

fn over(carrier: Carrier, name: &str, processes: usize) -> Vec<String> {
    let mut job = Job::start(options(carrier, processes), &[name]);
    sorted(&job.wait_well())
}

fn transfers_are_the_same_at_any_number_of_processes(carrier: Carrier) {
    let alone = sorted(&simulated("transfers", 1, &[]));
    assert!(alone.len() > 60, "{alone:#?}");
    assert!(
        alone.iter().any(|line| line.starts_with("a refused cut: ")),
        "{alone:#?}"
    );
    for processes in [1, 2, 4, 8]
        .into_iter()
        .filter(|processes| carrier.takes(*processes))
    {
        assert_eq!(
            over(carrier, "transfers", processes),
            alone,
            "{processes} processes"
        );
        if carrier.is_thorough() {
            let threads = sorted(&simulated("transfers", processes, &[]));
            assert_eq!(threads, alone, "{processes} processes inproc");
        }
    }
}

/// Runs the program `name` with made-up host names: the transports are the same, but the plans
/// differ. Returns the lines of all processes, sorted, each once.
fn over_hosts(carrier: Carrier, name: &str, processes: usize, hosts: usize) -> Vec<String> {
    let mut job = Job::prepare(options(carrier, processes));
    for process in 0..processes {
        let mut command = job.command(process);
        command.arg(name).env(
            variables::HOST,
            format!("host{}", process * hosts / processes),
        );
        job.spawn(command);
    }
    sorted(&job.wait_well())
}

fn transfers_are_the_same_on_several_hosts(carrier: Carrier) {
    let alone = sorted(&simulated("transfers", 1, &[]));
    let all = [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)];
    for (processes, hosts) in all
        .into_iter()
        .filter(|(processes, _)| carrier.takes(*processes))
    {
        let found = over_hosts(carrier, "transfers", processes, hosts);
        assert_eq!(found, alone, "{processes} processes on {hosts} hosts");
    }
    assert_eq!(
        over_hosts(carrier, "large", 4, 2),
        sorted(&simulated("large", 1, &[]))
    );
}

fn every_cell_of_the_routing_table_works(carrier: Carrier) {
    // Both make each source and target local, remote or partly local.
    let mut seen = BTreeSet::new();
    for processes in [2, 4] {
        seen.extend(over(carrier, "routing", processes));
        if carrier.is_thorough() {
            seen.extend(sorted(&simulated("routing", processes, &[])));
        }
    }
    let sources = [
        "mesh, remote",
        "mesh, local",
        "mesh, partial",
        "single device, remote",
        "single device, local",
        "host array",
        "host scalar",
    ];
    let cells = sources
        .iter()
        .flat_map(|from| ["remote", "local", "partial"].map(|to| format!("{from} to {to}")));
    assert_eq!(seen, cells.collect());
}

fn chunks_lists_parts_and_intermediates_move_alike(carrier: Carrier) {
    let alone = sorted(&simulated("kinds", 1, &[]));
    let orders = alone
        .iter()
        .filter(|line| line.starts_with("chunks "))
        .count();
    assert_eq!(orders, 120 * 5);
    assert!(
        alone
            .iter()
            .any(|line| line.starts_with("by an intermediate")),
        "{alone:#?}"
    );
    for processes in [2, 4, 8]
        .into_iter()
        .filter(|processes| carrier.takes(*processes))
    {
        assert_eq!(
            over(carrier, "kinds", processes),
            alone,
            "{processes} processes"
        );
        if carrier.is_thorough() {
            let threads = sorted(&simulated("kinds", processes, &[]));
            assert_eq!(threads, alone, "{processes} processes inproc");
        }
    }
}

fn many_leaves_of_mixed_sizes_move_alike(carrier: Carrier) {
    let alone = sorted(&simulated("leaves", 1, &[]));
    // 20 large leaves, and all others together.
    assert_eq!(
        alone
            .iter()
            .filter(|line| line.ends_with(" took 21 operations"))
            .count(),
        3
    );
    assert_eq!(
        alone.iter().filter(|line| line.contains(" leaf ")).count(),
        1_000 * (2 + 8 + 1)
    );
    for processes in [2, 4]
        .into_iter()
        .filter(|processes| carrier.takes(*processes))
    {
        // Not by assert_eq: the lines are many.
        assert!(
            over(carrier, "leaves", processes) == alone,
            "{processes} processes"
        );
    }
}

fn arrays_come_back_from_a_tour_as_they_were(carrier: Carrier) {
    let lines = over(carrier, "transfers", 4);
    let of = |name: &str| {
        let shards = lines.iter().filter_map(|line| line.strip_prefix(name));
        shards.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(of("before the tour").len(), 8);
    assert_eq!(of("before the tour"), of("after the tour"));
}

fn messages_around_eager_limit_and_beyond_credit_arrive(carrier: Carrier) {
    let alone = sorted(&simulated("eager_limit", 1, &[]));
    assert_eq!(alone.len(), 6 + 96);
    for processes in [2, 8]
        .into_iter()
        .filter(|processes| carrier.takes(*processes))
    {
        assert_eq!(
            over(carrier, "eager_limit", processes),
            alone,
            "{processes} processes"
        );
    }
}

fn a_large_array_arrives_whole(carrier: Carrier) {
    assert_eq!(
        over(carrier, "large", 2),
        sorted(&simulated("large", 1, &[]))
    );
}
