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
    const MIB: u64 = 1 << 20;
    let mib = |counts: [u64; 3]| counts.map(|count| count * MIB);
    let [lent, borrowed] = [
        [[0, 1, 1], [0, 0, 1], [0, 0, 0]],
        [[0, 0, 0], [1, 0, 0], [1, 1, 0]],
    ];
    for (process, said) in said.iter().enumerate() {
        let own = if process < 2 { MIB } else { 0 };
        let (lent, borrowed) = (mib(lent[process]), mib(borrowed[process]));
        let line = |live, cached, lent: [u64; 3], borrowed: [u64; 3]| {
            format!(
                "{live} live, {cached} cached, lent {lent:?}, borrowed {borrowed:?}, {own} at most"
            )
        };
        let expected = [line(own, 0, lent, borrowed), line(0, own, [0; 3], [0; 3])];
        assert!(
            said.lines().eq(expected.iter().map(String::as_str)),
            "{said}\n{expected:?}"
        );
    }
}
