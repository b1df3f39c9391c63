//! Processes that share memory know the amounts that they lend to and borrow from each peer.

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, Job};

#[test]
fn lent_and_borrowed_memory_is_reported_until_it_is_back() {
    let mut job = Job::prepare(Carrier::TCP.processes(env!("CARGO_BIN_EXE_named"), 3));
    for process in 0..3 {
        let mut command = job.command(process);
        command.arg("holdings").env(variables::TRANSPORT, "shm");
        job.spawn(command);
    }
    let said = job.wait_well();
    let expected = [
        "1.0 MiB live, 0 B cached, 2.0 MiB lent (to 1: 1.0 MiB, to 2: 1.0 MiB), nothing borrowed, \
         1.0 MiB at most",
        "1.0 MiB live, 0 B cached, 1.0 MiB lent (to 2: 1.0 MiB), 1.0 MiB borrowed (from 0: 1.0 \
         MiB), 1.0 MiB at most",
        "0 B live, 0 B cached, nothing lent, 2.0 MiB borrowed (from 0: 1.0 MiB, from 1: 1.0 MiB), \
         0 B at most",
    ];
    for (process, (said, expected)) in said.iter().zip(expected).enumerate() {
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), 2, "{said}");
        assert!(
            lines[0].starts_with(&format!("memory of process {process}: {expected}, ")),
            "{said}"
        );
        let kept = if process < 2 { "1.0 MiB" } else { "0 B" };
        let expected = format!(
            "memory of process {process}: 0 B live, {kept} cached, nothing lent, nothing \
             borrowed, {kept} at most, "
        );
        assert!(lines[1].starts_with(&expected), "{said}");
    }
}
