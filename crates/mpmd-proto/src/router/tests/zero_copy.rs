//! Processes with zero-copy transfer: no credit, no grants, and reports of pieces that were taken.

use super::disputes::diverged;
use super::*;

/// Returns the number of messages of a kind that are in flight.
fn flying(job: &Job, kind: MessageKind) -> usize {
    job.flying
        .iter()
        .filter(|message| message.header.kind == kind)
        .count()
}

#[test]
fn zero_copy_piece_goes_at_once_and_waits_for_its_operation() {
    let mut job = Job::zero_copy(3, 1, 0, |a, b| a + b == 1);
    let sizes = [0, 10, EAGER_BYTES + 1, 10 << 20, 3 * EAGER_CREDIT];
    for process in [0, 2] {
        for (hash, _) in sizes.iter().enumerate() {
            job.issue(process, hash as u128, "op");
        }
    }
    for (op, bytes) in (1..).zip(sizes) {
        job.offer(0, 1, (op, 0), bytes);
    }
    assert_eq!(
        (flying(&job, MessageKind::Data), job.flying.len()),
        (sizes.len(), sizes.len())
    );
    // Pairs without zero-copy transfer behave as before.
    job.offer(0, 2, (3, 1), EAGER_BYTES + 1);
    assert_eq!(job.flying.len(), sizes.len());
    job.run(5);
    for (op, bytes) in (1..).zip(sizes) {
        job.issue(1, op as u128 - 1, "op");
        job.expect(1, 0, (op, 0), bytes);
        assert_eq!(
            job.outcomes[&(1, (op, 0))].as_ref().unwrap(),
            &body((op, 0), bytes)
        );
    }
    // A piece that is expected first is not asked for either.
    job.expect(1, 0, (5, 1), 1 << 20);
    let now = at(job.now);
    let hash = job.hash(1, 5);
    let size = PieceSize {
        likely: 1 << 20,
        most: 1 << 21,
    };
    job.routers[1].expect_any_size(ProcessId(0), (5, 2), hash, size, (5, 2), now);
    job.routers[1].decline(ProcessId(0), (5, 3), hash, (5, 3), now);
    job.act(1);
    assert_eq!(flying(&job, MessageKind::Grant), 0);
    job.offer(0, 1, (5, 1), 1 << 20);
    for (piece, bytes) in [(2, 5), (3, 1 << 20)] {
        job.routers[0].announce(
            ProcessId(1),
            (5, piece),
            hash,
            bytes,
            body((5, piece), bytes),
        );
    }
    job.act(0);
    assert_eq!(
        (
            flying(&job, MessageKind::Data),
            flying(&job, MessageKind::Offer)
        ),
        (3, 0)
    );
    job.run(5);
    for piece in 1..4 {
        assert!(job.outcomes[&(1, (5, piece))].is_ok(), "piece {piece}");
    }
}

#[test]
fn sender_soon_hears_which_pieces_were_taken() {
    let mut job = Job::zero_copy(2, 1, 0, |_, _| true);
    for process in 0..2 {
        for op in 1..=200 {
            job.issue(process, op, "op");
        }
    }
    for op in (1..=200u64).filter(|op| *op != 90) {
        job.expect(1, 0, (op, 0), 100);
        job.offer(0, 1, (op, 0), 100);
    }
    job.expect(1, 0, (90, 0), 100);
    job.run(1);
    assert_eq!(flying(&job, MessageKind::Credit), 0, "all have arrived");
    let taken = |job: &Job| job.taken.get(&(0, 1)).copied();
    job.run(100);
    assert_eq!(taken(&job), Some(89), "as far as nothing is missing");
    job.offer(0, 1, (90, 0), 100);
    job.run(100);
    assert_eq!(taken(&job), Some(200));
    // Many taken pieces are reported without waiting for a tick.
    for op in 201..=264 {
        job.issue(0, op, "op");
        job.issue(1, op, "op");
        job.expect(1, 0, (op as u64, 0), 100);
        job.offer(0, 1, (op as u64, 0), 100);
    }
    let now = job.now;
    job.run(2);
    assert!(
        taken(&job) > Some(200) && job.now < now + 50,
        "{:?}",
        taken(&job)
    );
    // A piece that arrived and is not expected is not taken; a process that leaves takes nothing
    // more.
    job.issue(0, 265, "op");
    job.offer(0, 1, (265, 0), 100);
    job.run(200);
    assert_eq!(taken(&job), Some(264));
    job.kill(1);
    assert_eq!(taken(&job), Some(u64::MAX));
}

/// Has process 0 ask process 1 up to which operation it has taken.
fn ask(job: &mut Job, op: u64) {
    job.routers[0].ask_taken(ProcessId(1), op);
    job.act(0);
}

#[test]
fn sender_that_asks_is_told_without_a_tick() {
    let mut job = Job::zero_copy(3, 1, 0, |a, b| a + b == 1);
    for process in 0..2 {
        (1..=3).for_each(|op| _ = job.issue(process, op, "op"));
    }
    let taken = |job: &Job| job.taken.get(&(0, 1)).copied();
    let now = job.now;
    // Asked before the piece has arrived, and while a lower one is missing.
    job.expect(1, 0, (1, 0), 100);
    job.expect(1, 0, (2, 0), 100);
    ask(&mut job, 2);
    job.offer(0, 1, (2, 0), 100);
    job.run(3);
    assert_eq!(taken(&job), None, "operation 1 is missing");
    job.offer(0, 1, (1, 0), 100);
    job.run(3);
    assert_eq!(taken(&job), Some(2));
    // Nobody waits for operation 3 until it is asked for, after it was taken.
    job.offer(0, 1, (3, 0), 100);
    job.run(3);
    job.expect(1, 0, (3, 0), 100);
    job.run(3);
    assert_eq!(taken(&job), Some(2));
    ask(&mut job, 3);
    job.run(3);
    assert_eq!(taken(&job), Some(3));
    // A question that was answered before is not answered again.
    ask(&mut job, 3);
    job.run(3);
    assert_eq!(flying(&job, MessageKind::Credit), 0);
    assert!(job.now < now + 50, "no router was ticked");
    // To a process without zero-copy transfer there is no question.
    job.routers[0].ask_taken(ProcessId(2), 3);
    assert!(!job.routers[0].has_actions());
}

#[test]
fn operation_is_taken_only_with_all_its_pieces() {
    let mut job = Job::zero_copy(2, 1, 0, |_, _| true);
    (0..2).for_each(|process| _ = job.issue(process, 5, "op"));
    ask(&mut job, 1);
    job.offer(0, 1, (1, 0), 100);
    job.run(3);
    // The first piece is here, the second is not. Both are expected within one call.
    let (hash, now) = (job.hash(1, 1), at(job.now));
    for piece in 0..2 {
        job.routers[1].expect(ProcessId(0), (1, piece), hash, 100, (1, piece), now);
    }
    job.act(1);
    job.run(3);
    assert!(job.outcomes.contains_key(&(1, (1, 0))) && job.taken.is_empty());
    job.offer(0, 1, (1, 1), 100);
    job.run(3);
    assert_eq!(job.taken[&(0, 1)], 1);
}

#[test]
fn poison_of_a_lower_piece_lets_the_sender_hear() {
    let mut job = Job::zero_copy(2, 1, 0, |_, _| true);
    for process in 0..2 {
        (1..=2).for_each(|op| _ = job.issue(process, op, "op"));
    }
    job.expect(1, 0, (1, 0), 100);
    job.expect(1, 0, (2, 0), 100);
    job.offer(0, 1, (2, 0), 100);
    ask(&mut job, 2);
    job.run(3);
    assert!(job.taken.is_empty());
    let failure = Failure::new(FailureKind::Kernel, ProcessId(0), 1, "the kernel broke");
    job.routers[0].poison(ProcessId(1), 1, 0, &failure);
    job.act(0);
    job.run(3);
    assert_eq!(job.taken[&(0, 1)], 2);
}

#[test]
fn zero_copy_piece_of_another_program_is_not_delivered() {
    for seed in 0..20 {
        let mut job = Job::zero_copy(2, seed, 30, |_, _| true);
        for (process, ops) in [(0, [11, 50, 60]), (1, [11, 61, 70])] {
            for (i, hash) in ops.into_iter().enumerate() {
                job.issue(process, hash, &format!("put {hash}"));
                let key = (i as u64 + 1, 0);
                match process {
                    0 => job.offer(0, 1, key, 1 << 20),
                    _ if i > 0 => job.expect(1, 0, key, 1 << 20),
                    _ => {}
                }
            }
        }
        let text = diverged(job);
        assert!(
            text.contains("process 0 issued operation 2 (put 50)"),
            "{text}"
        );
    }
}

#[test]
fn poison_and_death_end_waits_for_zero_copy_pieces() {
    let mut job = Job::zero_copy(2, 4, 5, |_, _| true);
    let failure = Failure::new(FailureKind::Kernel, ProcessId(0), 1, "the kernel broke");
    for process in 0..2 {
        for _ in 0..2 {
            job.issue(process, 9, "op");
        }
    }
    job.routers[0].poison(ProcessId(1), 1, 0, &failure);
    job.act(0);
    job.expect(1, 0, (1, 0), 1 << 20);
    job.expect(1, 0, (2, 0), 1 << 20);
    job.run(10);
    assert_eq!(**job.outcomes[&(1, (1, 0))].as_ref().unwrap_err(), failure);
    job.kill(0);
    assert_eq!(
        job.outcomes[&(1, (2, 0))].as_ref().unwrap_err().kind,
        FailureKind::PeerLost
    );
    job.offer(1, 0, (2, 0), 1 << 20);
    assert_eq!(job.discarded, 1, "nobody is there to take it");
}
