//! One router that hears of a peer's end: the differences that it finds before the peer does.

use super::*;

/// Returns a job of two in which process 1 has issued `ops` operations, with hashes 1, 2, ….
fn after(ops: u64) -> Job {
    let mut job = Job::new(2, 1, 0);
    for op in 1..=ops {
        job.issue(1, u128::from(op), "op");
    }
    job
}

/// Delivers a message of process 0 to process 1. Returns the operation that process 1 then
/// disputes, if any.
fn disputed(job: &mut Job, kind: MessageKind, count: u64) -> Option<u64> {
    let header = Header {
        epoch: 1,
        count,
        hash: u128::from(count),
        ..Header::new(kind)
    };
    job.routers[1].arrived(ProcessId(0), header, Vec::new(), &[], at(0));
    job.act(1);
    shown(job)
}

/// Returns the operation at which process 1 disputes with process 0, from the records that it
/// sends. `None` if it sends none.
fn shown(job: &Job) -> Option<u64> {
    let records = job
        .flying
        .iter()
        .filter(|message| message.header.kind == MessageKind::Records);
    let ops: Vec<u64> = records.map(|message| message.header.op).collect();
    assert!(ops.len() <= 1, "{ops:?}");
    ops.first().copied()
}

#[test]
fn goodbye_one_operation_short_is_disputed_at_once() {
    for expects in [false, true] {
        let mut job = after(3);
        if expects {
            job.expect(1, 0, (3, 0), 10);
        }
        assert_eq!(
            disputed(&mut job, MessageKind::Goodbye, 2),
            Some(3),
            "expects a piece: {expects}"
        );
        assert_eq!(
            job.routers[1].still_here(),
            [ProcessId(0)],
            "it is not settled yet"
        );
    }
}

#[test]
fn goodbye_after_as_many_operations_is_no_dispute() {
    let mut job = after(3);
    job.expect(1, 0, (3, 0), 10);
    assert_eq!(disputed(&mut job, MessageKind::Goodbye, 3), None);
    assert!(
        job.routers[1].still_here().is_empty() && job.outcomes.is_empty(),
        "the piece may be on its way"
    );
}

#[test]
fn piece_expected_beyond_a_goodbye_is_disputed_at_once() {
    let mut job = after(2);
    assert_eq!(disputed(&mut job, MessageKind::Goodbye, 2), None);
    job.issue(1, 3, "op");
    assert_eq!(shown(&job), None, "it may have no part in it");
    job.expect(1, 0, (3, 0), 10);
    assert_eq!(shown(&job), Some(3));
}

#[test]
fn goodbye_one_operation_ahead_waits_for_the_own_end() {
    let mut job = after(2);
    assert_eq!(disputed(&mut job, MessageKind::Goodbye, 3), None);
    job.routers[1].goodbye(None, at(0));
    job.act(1);
    assert_eq!(shown(&job), Some(3));
}

#[test]
fn own_end_one_operation_short_of_a_heartbeat_is_disputed() {
    let mut job = after(2);
    assert_eq!(
        disputed(&mut job, MessageKind::Heartbeat, 3),
        None,
        "it may get there"
    );
    job.routers[1].goodbye(None, at(0));
    job.act(1);
    assert_eq!(shown(&job), Some(3));
}

#[test]
fn end_of_the_epoch_ends_all_waits() {
    let mut job = Job::new(3, 3, 2);
    job.issue(0, 9, "device_put");
    job.expect(0, 1, (1, 0), 100);
    job.expect(0, 2, (1, 1), 100);
    job.run(1000);
    let now = at(job.now);
    job.routers[0].suspect(ProcessId(2), "its connection was closed", now);
    job.routers[0].epoch_over(ProcessId(1));
    job.act(0);

    for piece in [0, 1] {
        let failure = job.outcomes[&(0, (1, piece))].as_ref().unwrap_err();
        assert_eq!(failure.kind, FailureKind::PeerLost);
        assert_eq!(failure.process, ProcessId(2), "the lost one: {failure}");
    }
    job.expect(0, 1, (1, 2), 100);
    assert!(job.outcomes[&(0, (1, 2))].is_err(), "a later wait");

    // Without a known loss, the process that has left is the reason.
    job.routers[1].epoch_over(ProcessId(0));
    let said = job.routers[1].trouble().unwrap().to_string();
    assert!(said.contains("process 0 has left the epoch"), "{said}");
}
