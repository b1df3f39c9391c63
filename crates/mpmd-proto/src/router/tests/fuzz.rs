//! Random messages of a faulty peer to the router of a correct process. A third process is correct
//! too.

use mpmd_fuzz::{Rng, integer, mutate};

use super::breach::{KEPT_OVERHEAD, MOST_KEPT};
use super::history::{ShownOperations, ShownRecord};
use super::*;
use crate::control;

/// The faulty process, which sends any message to process 0. Processes 0 and 2 are correct.
const LIAR: usize = 1;

const SIZES: [u64; 6] = [0, 1, 100, EAGER_BYTES, EAGER_BYTES + 1, 20_000];

/// A piece of an operation: (sender, receiver, bytes, true if the receiver knows the size).
type Piece = (usize, usize, u64, bool);

fn hash(op: u64) -> u128 {
    u128::from(op) + 77
}

fn one_of<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())]
}

/// Returns a program of a few operations with pieces between the faulty peer, the router and the
/// third process.
fn operations(rng: &mut Rng) -> Vec<Vec<Piece>> {
    let piece = |rng: &mut Rng| {
        let (from, to) = one_of(rng, &[(1, 0), (1, 0), (0, 1), (0, 2), (2, 0), (2, 0)]);
        (from, to, one_of(rng, &SIZES), rng.u8(..4) > 0)
    };
    (0..rng.usize(1..7))
        .map(|_| (0..rng.usize(..4)).map(|_| piece(rng)).collect())
        .collect()
}

impl Job {
    /// Issues the next operation of a correct process and offers or expects its pieces. Does
    /// nothing at the program's end.
    fn issue_next(&mut self, process: usize, operations: &[Vec<Piece>]) {
        let Some(pieces) = operations.get(self.routers[process].count() as usize) else {
            return;
        };
        let op = self.issue(process, hash(self.routers[process].count() + 1), "op");
        for (number, (from, to, bytes, is_known)) in (0..).zip(pieces) {
            let (key, peer) = ((op, number), ProcessId(*from as u32));
            if *to == process && *is_known {
                self.expect(process, *from, key, *bytes);
            } else if *to == process {
                let size = PieceSize {
                    likely: bytes / 2,
                    most: *bytes,
                };
                let hash = self.hash(process, op);
                let now = at(self.now);
                self.routers[process].expect_any_size(peer, key, hash, size, key, now);
            } else if *from == process {
                let to = ProcessId(*to as u32);
                let hash = self.hash(process, op);
                self.routers[process].announce(to, key, hash, *bytes, body(key, *bytes));
            }
        }
        self.act(process);
    }
}

/// Returns a message of the faulty peer: any message that a transport lets through. `None` if a
/// transport would refuse the header.
fn lie(rng: &mut Rng, job: &Job, operations: &[Vec<Piece>]) -> Option<(Header, Vec<u8>)> {
    use MessageKind::*;
    let count = job.routers[0].count();
    let pieces = [Eager, Eager, Offer, Grant, Data, Data, Credit, AskTaken];
    let words = [
        Poison, Probe, Answer, Heartbeat, Step, Goodbye, Records, Failure, Batch,
    ];
    let kind = if rng.u8(..5) > 0 {
        one_of(rng, &pieces)
    } else {
        one_of(rng, &words)
    };
    let op = if rng.u8(..12) > 0 {
        rng.u64(..count + 3)
    } else {
        integer(rng)
    };
    let piece = if rng.u8(..12) > 0 {
        rng.u64(..4)
    } else {
        integer(rng)
    };
    let known = usize::try_from(op.wrapping_sub(1))
        .ok()
        .and_then(|at| operations.get(at));
    let known = known
        .and_then(|pieces| pieces.get(piece as usize))
        .map(|piece| piece.2);
    let bytes = match rng.u8(..8) {
        0 => integer(rng),
        1 => one_of(rng, &SIZES),
        _ => known.unwrap_or(3),
    };
    let counted = if rng.u8(..8) > 0 {
        rng.u64(..count + 3)
    } else {
        integer(rng)
    };
    let subject = if matches!(kind, Heartbeat | Step | Goodbye) {
        counted
    } else {
        op
    };
    let hash = match rng.u8(..40) {
        0 => u128::from(rng.u64(..)),
        1 => 0,
        _ if subject == 0 => 0,
        _ => u128::from(subject).wrapping_add(77),
    };
    let text = words_of(rng, kind, job);
    let bytes = text.as_ref().map_or(bytes, |text| text.len() as u64);
    let header = Header {
        kind,
        epoch: 1,
        op,
        piece,
        bytes,
        hash,
        count: counted,
    };
    let header = Header::decode(&header.encode()).ok()?;
    // Of a long payload only the first bytes are delivered.
    let short = header.payload_bytes().min(30_000) as usize;
    Some((header, text.unwrap_or_else(|| vec![0xee; short])))
}

/// Returns the control payload of a kind that has one: valid, mutated, or empty. `None` for other
/// kinds.
fn words_of(rng: &mut Rng, kind: MessageKind, job: &Job) -> Option<Vec<u8>> {
    let mut text = match kind {
        MessageKind::Poison | MessageKind::Failure => {
            let length = one_of(rng, &[5, 5, 5, 20_000]);
            let failure =
                crate::Failure::new(FailureKind::Kernel, ProcessId(1), 1, "x".repeat(length));
            control::encode(&failure)
        }
        MessageKind::Goodbye if rng.bool() => Ok(Vec::new()),
        MessageKind::Goodbye => control::encode(&crate::Failure::new(
            FailureKind::Left,
            ProcessId(1),
            0,
            "why",
        )),
        MessageKind::Answer => {
            let chain = vec!["process 1 waits".to_owned(); rng.usize(..40)];
            control::encode(&ProbeAnswer {
                count: integer(rng),
                doing: "computes".to_owned(),
                chain,
            })
        }
        MessageKind::Records => {
            let mut shown = job.routers[2].history.show(rng.u64(..9));
            if rng.bool() {
                shown.count = integer(rng);
            }
            if rng.u8(..4) == 0 {
                let op = integer(rng);
                let (hash, what) = (hash(op & 0xff), String::new());
                shown.records.push(ShownRecord {
                    op,
                    hash,
                    what,
                    values: None,
                    steps: 0,
                });
            }
            control::encode::<ShownOperations>(&shown)
        }
        _ => return None,
    }
    .expect("it is short");
    if rng.u8(..3) == 0 {
        mutate(rng, &mut text);
    }
    Some(text)
}

/// Asserts the limits on the memory that a router keeps for each peer, and checks the counters
/// behind them.
fn check_bounds(router: &Router<Bytes>) {
    let parked = || {
        router
            .parked
            .values()
            .flatten()
            .map(|message| (message.from, &message.header, &message.incoming))
    };
    for (index, peer) in router.peers.iter().enumerate() {
        let process = ProcessId(index as u32);
        let early = || {
            router
                .early
                .iter()
                .filter(|((from, _), _)| *from == process)
                .map(|(_, early)| early)
        };
        let waiting = early().filter_map(|early| match early {
            EarlyMessage::Cargo(header, body) => Some((process, header, body)),
            EarlyMessage::Offered(_) | EarlyMessage::Poison(_) => None,
        });
        let eager = waiting
            .chain(parked())
            .filter(|(from, ..)| *from == process);
        let eager = eager.filter(|(_, header, _)| header.kind == MessageKind::Eager);
        let unclaimed: usize = eager.map(|(.., body)| body.len()).sum();
        assert!(
            unclaimed as u64 <= EAGER_CREDIT,
            "{unclaimed} bytes of process {index} are unclaimed"
        );
        let others = parked().filter(|(from, ..)| *from == process).count() + peer.granted.len();
        let kept = early().map(EarlyMessage::cost).sum::<u64>() + others as u64 * KEPT_OVERHEAD;
        assert_eq!(kept, peer.kept, "of process {index}");
        assert!(kept <= MOST_KEPT && (!peer.broken || kept == 0));
        assert!(peer.shown.as_ref().is_none_or(ShownOperations::is_sound));
        let answer = peer.answer.iter();
        let lines: Vec<_> = answer
            .flat_map(|answer| answer.chain.iter().chain([&answer.doing]))
            .collect();
        assert!(lines.len() <= 17 && lines.iter().all(|line| line.len() <= 4096));
    }
}

#[test]
fn fuzz_router() {
    mpmd_fuzz::cases("router", |rng| {
        let (with_liar, with_other) = (rng.bool(), rng.bool());
        let lends = |a: usize, b: usize| {
            if a.min(b) == 0 && a.max(b) == LIAR {
                with_liar
            } else {
                with_other
            }
        };
        let mut job = Job::zero_copy(3, rng.u64(..), rng.u64(..4), lends);
        (job.liar, job.dead[LIAR]) = (Some(LIAR), true);
        let operations = operations(rng);
        for _ in 0..rng.usize(..24) {
            match rng.u8(..8) {
                0 => job.issue_next(2, &operations),
                1 | 2 => job.issue_next(0, &operations),
                3 => job.step(),
                4 if rng.u8(..8) == 0 => job.now += rng.u64(..200_000),
                4 if rng.u8(..4) == 0 => job.routers[0].forget(rng.u64(..8)),
                _ => {
                    if let Some((header, body)) = lie(rng, &job, &operations) {
                        job.say(LIAR, 0, header, &body);
                        check_bounds(&job.routers[0]);
                    }
                }
            }
        }
        for _ in 0..operations.len() {
            job.issue_next(0, &operations);
            job.issue_next(2, &operations);
        }
        job.run(20);
        check_bounds(&job.routers[0]);
        let has_failed = job.routers[0].failed().is_some();
        for (op, pieces) in (1..).zip(&operations) {
            for (number, (from, to, bytes, is_known)) in (0..).zip(pieces) {
                let key = (op, number);
                match job.outcomes.get(&(*to, key)) {
                    Some(Ok(found)) if *from == LIAR => {
                        let length = found.len() as u64;
                        assert!(
                            length == *bytes || (!is_known && length < *bytes),
                            "{key:?}: {length}"
                        );
                    }
                    Some(Ok(found)) => assert_eq!(*found, body(key, *bytes), "{key:?}"),
                    found if *from != LIAR && *to != LIAR => {
                        assert!(has_failed, "{key:?} from {from} to {to}: {found:?}");
                    }
                    _ => {}
                }
            }
        }
    });
}
