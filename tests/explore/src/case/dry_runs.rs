//! The bytes in the dry run of a random program are those that its processes then send.

use std::time::Duration;

use mpmd_base::block::{now, since, thread};
use mpmd_core::Program;
use mpmd_core::dry_run::DryRun;
use mpmd_core::pipeline::flow::Flow;

use super::*;

/// Waits up to 20 seconds until this process has sent the `expected` bytes to each process. Returns
/// the bytes sent so far, by receiver.
fn sent(p: &Program, expected: &[u64]) -> Vec<u64> {
    let begin = now();
    loop {
        let sent = p.metrics().bytes_sent;
        if sent == expected || since(begin) > Duration::from_secs(20) {
            return sent;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Checks the nodes that take each transfer: they are on its receiver, and come after the sender's
/// node that makes the transfer, if any.
fn assert_before(flow: &Flow, seed: u64) {
    for (number, transfer) in flow.transfers.iter().enumerate() {
        let process = |node: u32| flow.lanes[flow.nodes[node as usize].lane as usize];
        let made = (transfer.after != u32::MAX).then_some(transfer.after);
        assert!(
            made.is_none_or(|made| process(made) == transfer.from),
            "seed {seed}"
        );
        for (taker, node) in (0..).zip(&flow.nodes) {
            let (start, len) = node.takes;
            if flow.takes[start as usize..(start + len) as usize].contains(&(number as u32)) {
                assert!(
                    process(taker) == transfer.to && made.is_none_or(|made| made < taker),
                    "seed {seed}"
                );
            }
        }
    }
}

#[test]
fn seeds_of_60_programs_send_the_bytes_of_their_dry_run() {
    let mut crossed = 0;
    for seed in (1..).step_by(ORDERS as usize).take(60) {
        let case = Case {
            zero_copy: Vec::new(),
            faults: Vec::new(),
            ..Case::new(seed)
        };
        let processes = case.processes;
        let issue = |p: &mut Program| {
            execute(
                p,
                &case.steps,
                &case.removed,
                &Wrongs::default(),
                &Arc::default(),
            )
        };
        let builder = Program::builder().devices(case.devices).hosts(&case.hosts);
        let mut p = builder.dry_run(processes).unwrap();
        assert!(issue(&mut p).unwrap().is_empty(), "it owns nothing");
        let dry_run = p.dry_run().unwrap();
        let operations = p.operations();
        assert_eq!(dry_run.operations.len() as u64, operations);
        let mut expected = vec![vec![0; processes]; processes];
        for ((from, to), link) in dry_run.links(1..operations + 1) {
            expected[from as usize][to as usize] = link.bytes;
            crossed += link.messages;
        }
        let (results, _) = case.simulation().run_reported(|p| {
            issue(p)?;
            Ok((p.operations(), sent(p, &expected[p.process().index()])))
        });
        for (process, result) in results.into_iter().enumerate() {
            let (issued, sent) = result.unwrap();
            assert_eq!(issued, operations, "seed {seed}");
            assert_eq!(
                sent, expected[process],
                "seed {seed}, process {process}\n{case}"
            );
        }
        // The transfers of the flow have the same bytes between processes. Both sides post every
        // transfer.
        let flow = dry_run.flow().flow;
        let mut moved = vec![vec![0; processes]; processes];
        flow.transfers
            .iter()
            .for_each(|t| moved[t.from as usize][t.to as usize] += t.bytes);
        assert_eq!(moved, expected);
        assert_eq!(
            flow.posts.iter().map(Vec::len).sum::<usize>(),
            2 * flow.transfers.len()
        );
        assert_before(&flow, seed);
        let again: DryRun =
            serde_json::from_str(&serde_json::to_string(&dry_run).unwrap()).unwrap();
        assert_eq!(again, dry_run);
    }
    assert!(crossed > 1000, "only {crossed} messages");
}
