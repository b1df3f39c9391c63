//! Peers that break the protocol.

use super::breach::MOST_KEPT;
use super::history::{ShownOperations, ShownRecord};
use super::*;
use crate::control;

/// Returns a job of three processes with one operation issued. Process 1 sends wrong messages to
/// process 0.
fn job() -> Job {
    let mut job = Job::new(3, 1, 0);
    for process in 0..3 {
        job.issue(process, 7, "op");
    }
    job.dead[1] = true;
    job.liar = Some(1);
    job
}

fn piece(kind: MessageKind, op: u64, bytes: u64) -> Header {
    Header {
        op,
        bytes,
        hash: 7,
        ..Header::new(kind)
    }
}

/// Asserts that process 0 has lost process 1 for the reason `why`, and goes on with process 2.
fn lost(mut job: Job, why: &str) {
    let [(0, failure)] = &job.lost[..] else {
        panic!("one loss: {:?}", job.lost)
    };
    assert_eq!(
        (failure.kind, failure.process),
        (FailureKind::PeerLost, ProcessId(1))
    );
    assert!(
        failure
            .message
            .contains("process 1 is gone (it broke the protocol: "),
        "{failure}"
    );
    assert!(failure.message.contains(why), "{failure}");
    assert_eq!(job.silent, [(0, 1)], "transfers in flight are given up");
    assert!(
        job.routers[0].early.is_empty() && job.routers[0].parked.is_empty(),
        "it keeps nothing"
    );
    // Later messages of process 1 are ignored.
    job.say(1, 0, piece(MessageKind::Eager, 1, 3), &[1, 2, 3]);
    job.say(1, 0, Header::new(MessageKind::Failure), &[]);
    assert!(job.routers[0].early.is_empty() && job.routers[0].failed().is_none());
    job.expect(0, 1, (1, 90), 3);
    assert!(job.outcomes[&(0, (1, 90))].is_err());
    for (key, bytes) in [((1, 91), 3), ((1, 92), 100_000)] {
        job.expect(0, 2, key, bytes);
        job.offer(2, 0, key, bytes);
        job.run(5);
        assert_eq!(job.outcomes[&(0, key)].as_ref().unwrap(), &body(key, bytes));
    }
}

#[test]
fn eager_pieces_beyond_their_credit_lose_the_sender() {
    for op in [1, 2] {
        let mut job = job();
        let pieces = EAGER_CREDIT / (EAGER_BYTES + EAGER_OVERHEAD);
        for number in 0..=pieces {
            assert!(job.lost.is_empty(), "piece {number}");
            let header = Header {
                piece: number,
                ..piece(MessageKind::Eager, op, EAGER_BYTES)
            };
            job.say(1, 0, header, &[0; EAGER_BYTES as usize]);
        }
        lost(job, "beyond its credit of 1048576");
    }
}

#[test]
fn large_piece_without_a_grant_loses_its_sender() {
    let mut eager = job();
    eager.say(
        1,
        0,
        piece(MessageKind::Eager, 1, EAGER_BYTES + 1),
        &[0; EAGER_BYTES as usize + 1],
    );
    lost(
        eager,
        "it sent piece 0 of operation 1, of 16385 bytes, without a grant",
    );
    for (op, is_expected) in [(1, true), (1, false), (2, false), (u64::MAX, false)] {
        let mut job = job();
        if is_expected {
            // A small piece: it was never granted.
            job.expect(0, 1, (1, 0), 100);
        }
        job.say(1, 0, piece(MessageKind::Data, op, 100), &[0; 100]);
        let outcome = job.outcomes.get(&(0, (1, 0)));
        assert!(outcome.is_none_or(Result::is_err), "never delivered");
        lost(
            job,
            &format!("it sent piece 0 of operation {op} without a grant"),
        );
    }
}

#[test]
fn piece_of_another_length_is_its_senders_fault() {
    for (expected, bytes) in [(100, 99), (100, 0), (100_000, 100_001), (100_000, u64::MAX)] {
        let mut job = job();
        job.expect(0, 1, (1, 0), expected);
        let kind = if expected > EAGER_BYTES {
            MessageKind::Data
        } else {
            MessageKind::Eager
        };
        // No body: the router decides by the header alone, before memory is taken.
        job.say(1, 0, piece(kind, 1, bytes), &[]);
        let failure = job.outcomes[&(0, (1, 0))].as_ref().unwrap_err();
        assert_eq!(
            (failure.kind, failure.process),
            (FailureKind::Transport, ProcessId(1))
        );
        let says = format!("process 1 sent {bytes} bytes for piece 0 of operation 1 (op)");
        assert!(failure.message.starts_with(&says), "{failure}");
        assert!(
            failure.message.ends_with(&format!("which has {expected}")),
            "{failure}"
        );
        lost(job, &format!("it sent {bytes} bytes for piece 0"));
    }
}

#[test]
fn piece_of_unknown_size_is_bounded() {
    for bytes in [0, 40_000, 40_001, u64::MAX] {
        let mut job = job();
        let (hash, now) = (job.hash(0, 1), at(job.now));
        let size = PieceSize {
            likely: 30_000,
            most: 40_000,
        };
        job.routers[0].expect_any_size(ProcessId(1), (1, 0), hash, size, (1, 0), now);
        job.act(0);
        job.say(1, 0, piece(MessageKind::Data, 1, bytes), &[]);
        assert_eq!(
            job.outcomes[&(0, (1, 0))].is_ok(),
            bytes <= 40_000,
            "{bytes}"
        );
        if bytes > 40_000 {
            lost(job, &format!("it sent {bytes} bytes for piece 0"));
        }
    }
}

#[test]
fn heartbeat_with_a_huge_count_hides_no_difference() {
    let mut job = job();
    job.say(
        1,
        0,
        Header {
            count: u64::MAX,
            hash: 3,
            ..Header::new(MessageKind::Heartbeat)
        },
        &[],
    );
    job.say(
        1,
        0,
        Header {
            count: 3,
            hash: 99,
            ..Header::new(MessageKind::Heartbeat)
        },
        &[],
    );
    job.say(
        1,
        0,
        Header {
            count: u64::MAX - 1,
            hash: 3,
            ..Header::new(MessageKind::Step)
        },
        &[],
    );
    job.issue(0, 8, "second");
    assert!(job.routers[0].peers[1].disputed.is_none());
    job.issue(0, 9, "third");
    assert!(
        job.routers[0].peers[1].disputed.is_some(),
        "its third operation is another one"
    );
}

#[test]
fn records_with_an_impossible_count_end_a_dispute() {
    let mut job = job();
    let record = |op| ShownRecord {
        op,
        hash: 7,
        what: "op".to_owned(),
        values: None,
        steps: 0,
    };
    let shown = ShownOperations {
        count: u64::MAX,
        records: vec![record(1)],
    };
    let body = control::encode(&shown).unwrap();
    job.say(1, 0, Header::new(MessageKind::Records), &body);
    let failure = job.routers[0].failed().expect("settled at once");
    assert!(
        failure
            .message
            .contains("process 0 has issued only 1 operations"),
        "{failure}"
    );
    for shown in [
        ShownOperations {
            count: 1,
            records: vec![record(1), record(u64::MAX)],
        },
        ShownOperations {
            count: 2,
            records: vec![record(2), record(1)],
        },
    ] {
        let mut job = self::job();
        job.say(
            1,
            0,
            Header::new(MessageKind::Records),
            &control::encode(&shown).unwrap(),
        );
        lost(job, "its list of operations is not valid");
    }
    let mut cut_off = self::job();
    cut_off.say(
        1,
        0,
        Header::new(MessageKind::Records),
        &body[..body.len() - 1],
    );
    lost(cut_off, "its list of operations is not valid");
}

#[test]
fn messages_that_nothing_waits_for_are_bounded() {
    let failure = Failure::new(FailureKind::Kernel, ProcessId(1), 1, "x".repeat(900_000));
    let text = control::encode(&failure).unwrap();
    // Each text counts 16 KiB; the rest of it is cut.
    let mut job = job();
    for number in 0.. {
        assert!(number < (2 * MOST_KEPT) >> 14, "no end");
        if !job.lost.is_empty() {
            assert!(number > (MOST_KEPT >> 14) - 100, "{number} texts");
            break;
        }
        let header = Header {
            piece: number,
            ..piece(MessageKind::Poison, 1, text.len() as u64)
        };
        job.say(1, 0, header, &text);
        assert!(job.routers[0].peers[1].kept <= MOST_KEPT);
    }
    lost(job, "bytes of messages that nothing here waits for");
    for (kind, op) in [
        (MessageKind::Offer, 1),
        (MessageKind::Grant, 1),
        (MessageKind::Offer, 2),
    ] {
        let mut job = self::job();
        job.routers[0].peers[1].kept = MOST_KEPT - 1;
        job.say(1, 0, piece(kind, op, 100), &[]);
        lost(job, "bytes of messages that nothing here waits for");
    }
}

#[test]
fn kept_messages_are_subtracted_when_used_or_dropped() {
    let mut job = job();
    let failure = Failure::new(FailureKind::Kernel, ProcessId(1), 1, "why");
    let text = control::encode(&failure).unwrap();
    for (number, kind) in (0..).zip([
        MessageKind::Offer,
        MessageKind::Grant,
        MessageKind::Eager,
        MessageKind::Poison,
        MessageKind::Offer,
    ]) {
        for op in [1, 2] {
            let body = if kind == MessageKind::Poison {
                &text[..]
            } else {
                &[]
            };
            let header = Header {
                piece: number,
                ..piece(kind, op, body.len() as u64)
            };
            job.say(1, 0, header, body);
        }
    }
    job.say(
        1,
        0,
        Header {
            piece: 4,
            ..piece(MessageKind::Eager, 1, 0)
        },
        &[],
    );
    job.issue(0, 7, "second");
    assert!(job.routers[0].peers[1].kept > 0);
    (0..5)
        .filter(|number| *number != 1)
        .for_each(|number| job.expect(0, 1, (1, number), 0));
    job.offer(0, 1, (1, 1), 100_000);
    job.routers[0].forget(2);
    assert_eq!(job.routers[0].peers[1].kept, 0);
}

#[test]
fn credit_for_an_unissued_operation_loses_the_peer() {
    let mut job = Job::zero_copy(3, 1, 0, |a, b| a.max(b) == 1);
    (0..3).for_each(|process| _ = job.issue(process, 7, "op"));
    job.dead[1] = true;
    job.say(
        1,
        0,
        Header {
            op: 1,
            ..Header::new(MessageKind::Credit)
        },
        &[],
    );
    assert_eq!(job.taken[&(0, 1)], 1);
    job.taken.clear();
    job.say(
        1,
        0,
        Header {
            op: 2,
            ..Header::new(MessageKind::Credit)
        },
        &[],
    );
    lost(job, "it took a piece of operation 2, which was not issued");
}

#[test]
fn question_about_pieces_that_are_not_lent_loses_the_peer() {
    let mut job = Job::zero_copy(3, 1, 0, |_, _| false);
    (0..3).for_each(|process| _ = job.issue(process, 7, "op"));
    job.dead[1] = true;
    job.say(
        1,
        0,
        Header {
            op: 1,
            ..Header::new(MessageKind::AskTaken)
        },
        &[],
    );
    lost(
        job,
        "it asked which of its pieces were taken, and lends none",
    );
}

#[test]
fn questions_of_a_peer_take_no_memory_and_one_answer() {
    let mut job = Job::zero_copy(2, 1, 0, |_, _| true);
    (0..2).for_each(|process| _ = job.issue(process, 7, "op"));
    job.expect(0, 1, (1, 0), 100);
    job.offer(1, 0, (1, 0), 100);
    for op in (0..1000).chain([u64::MAX]) {
        job.say(
            1,
            0,
            Header {
                op,
                ..Header::new(MessageKind::AskTaken)
            },
            &[],
        );
    }
    assert_eq!(
        (job.routers[0].peers[1].asked, job.routers[0].peers[1].kept),
        (u64::MAX, 0)
    );
    job.run(3);
    let answers = job
        .flying
        .iter()
        .filter(|message| message.header.kind == MessageKind::Credit);
    assert!(answers.count() <= 1 && job.taken[&(1, 0)] == 1);
}

#[test]
fn second_goodbye_is_ignored() {
    let mut job = job();
    job.say(
        1,
        0,
        Header {
            count: 1,
            hash: 7,
            ..Header::new(MessageKind::Goodbye)
        },
        &[],
    );
    let failure = Failure::new(FailureKind::Left, ProcessId(1), 0, "changed its mind");
    job.say(
        1,
        0,
        Header {
            count: 0,
            ..Header::new(MessageKind::Goodbye)
        },
        &control::encode(&failure).unwrap(),
    );
    assert!(job.lost.is_empty() && job.routers[0].trouble().is_none());
}
