//! Operations issued as parts of a span. Every process issues them with steps of its own.

use super::disputes::diverged;
use super::*;

/// A replayed step. The hash before it and its first operation determine the hash of each
/// operation.
struct Replay {
    before: u64,
    hash: u128,
}

impl OpSpan for Replay {
    fn hash_at(&self, op: u64) -> u128 {
        self.hash + u128::from(op - self.before)
    }

    fn describe(&self, op: u64) -> String {
        format!("{} of the replay of step {}", op - self.before, self.hash)
    }

    fn values(&self) -> Option<ValueHashes> {
        None
    }
}

fn replay(before: u64, hash: u128) -> Arc<dyn OpSpan> {
    Arc::new(Replay { before, hash })
}

impl Job {
    fn issue_span(&mut self, process: usize, op: u64, span: &Arc<dyn OpSpan>) {
        let now = at(self.now);
        self.routers[process].issue_span(op, span, || now);
        self.act(process);
    }

    fn leave(&mut self, process: usize) {
        let now = at(self.now);
        self.routers[process].goodbye(None, now);
        self.act(process);
    }

    fn end_step(&mut self, process: usize, step: u64) {
        self.routers[process].step_end(step);
        self.act(process);
    }
}

#[test]
fn every_piece_of_a_span_arrives_at_any_delay_and_pace() {
    const OPS: usize = 40;
    for seed in 0..100 {
        let mut seeded = Seeded(seed);
        let processes = 2 + seeded.next(5) as usize;
        let program = program(processes, OPS, &mut seeded);
        let mut job = Job::new(processes, seed, seeded.next(40));
        let mut unready: Vec<(usize, usize, PieceKey, u64)> = Vec::new();
        let takes_part = |process: usize, index: usize| {
            program[index % OPS]
                .iter()
                .any(|(from, to, _)| [*from, *to].contains(&process))
        };
        // Two replays with the end of a step between; each process has one span for each.
        let total = 2 * OPS;
        let spans: Vec<[Arc<dyn OpSpan>; 2]> = (0..processes)
            .map(|_| [replay(0, 1000), replay(OPS as u64, 5000)])
            .collect();
        let mut next = vec![0; processes];
        while next.iter().any(|next| *next < total) || !unready.is_empty() {
            let process = seeded.next(processes as u64) as usize;
            if next[process] < total {
                let at = next[process];
                let end = if at < OPS { OPS } else { total };
                let index = (at..end).find(|index| takes_part(process, *index));
                let op = index.map_or(end, |index| index + 1);
                job.issue_span(process, op as u64, &spans[process][at / OPS]);
                let moves = index.map_or(&[][..], |index| &program[index % OPS]);
                for (piece, (from, to, bytes)) in moves.iter().enumerate() {
                    let key = (op as u64, piece as u64);
                    if *to == process {
                        job.expect(process, *from, key, *bytes);
                    }
                    if *from == process {
                        unready.push((process, *to, key, *bytes));
                    }
                }
                next[process] = op;
                if op == OPS {
                    job.end_step(process, 1);
                }
            }
            if !unready.is_empty() && seeded.next(2) == 0 {
                let (process, to, key, bytes) =
                    unready.swap_remove(seeded.next(unready.len() as u64) as usize);
                job.offer(process, to, key, bytes);
            }
            job.step();
        }
        (0..processes).for_each(|process| job.leave(process));
        job.run(1000);
        for op in 1..=total {
            for (piece, (_, to, bytes)) in program[(op - 1) % OPS].iter().enumerate() {
                let key = (op as u64, piece as u64);
                let outcome = job
                    .outcomes
                    .get(&(*to, key))
                    .unwrap_or_else(|| panic!("seed {seed}: {key:?}"));
                assert_eq!(
                    outcome.as_ref().expect("delivered"),
                    &body(key, *bytes),
                    "seed {seed}"
                );
            }
        }
        for router in &job.routers {
            assert!(
                router.failed().is_none(),
                "seed {seed}: {:?}",
                router.failed()
            );
            assert!(
                router.still_here().is_empty() && router.trouble().is_none(),
                "seed {seed}"
            );
        }
    }
}

/// One process is ahead, inside its span or beyond it; heartbeats tell its count. The other process
/// then issues its operations in larger strides.
#[test]
fn counts_inside_a_span_are_compared() {
    for (ahead, equal) in [(30, true), (100, true), (30, false), (100, false)] {
        let mut job = Job::new(2, 7, 0);
        job.issue_span(0, ahead, &replay(0, 1000));
        // A heartbeat carries the count and the hash at it.
        job.run(600);
        let span = replay(0, if equal { 1000 } else { 2000 });
        job.issue_span(1, 10, &span);
        job.run(5);
        assert!(job.routers[1].failed().is_none(), "not there yet");
        job.issue_span(1, 100, &span);
        job.run(4000);
        if equal {
            assert!(job.routers.iter().all(|router| router.failed().is_none()));
        } else {
            let failure = job.routers[0].failed().expect("found");
            assert_eq!(failure.kind, FailureKind::Diverged);
        }
    }
}

#[test]
fn replay_and_issued_operations_differ_at_the_first() {
    let mut job = Job::new(2, 3, 2);
    for process in 0..2 {
        job.issue(process, 9, "device_put");
    }
    job.issue_span(0, 6, &replay(1, 1000));
    for hash in 10..15 {
        job.issue(1, hash, "jit");
    }
    job.expect(0, 1, (6, 0), 8);
    job.offer(1, 0, (6, 0), 8);
    let text = diverged(job);
    assert!(text.contains("first differ at operation 2"), "{text}");
    assert!(
        text.contains("process 0 issued operation 2 (1 of the replay of step 1000)"),
        "{text}"
    );
    assert!(
        text.contains("process 1 issued operation 2 (jit) at"),
        "{text}"
    );
}

#[test]
fn replays_of_different_steps_are_told_apart() {
    let mut job = Job::new(2, 3, 2);
    job.issue_span(0, 50, &replay(0, 1000));
    job.issue_span(1, 50, &replay(0, 3000));
    // No operation has pieces: the ends of the steps find the difference.
    (0..2).for_each(|process| job.end_step(process, 1));
    let text = diverged(job);
    assert!(
        text.contains("process 0 issued operation 1 (1 of the replay of step 1000)"),
        "{text}"
    );
    assert!(
        text.contains("process 1 issued operation 1 (1 of the replay of step 3000)"),
        "{text}"
    );
}

#[test]
fn leaving_after_fewer_replays_is_found() {
    let mut job = Job::new(2, 3, 2);
    for process in 0..2 {
        job.issue_span(process, 50, &replay(0, 1000));
    }
    job.issue_span(0, 100, &replay(50, 1100));
    (0..2).for_each(|process| job.leave(process));
    let text = diverged(job);
    assert!(text.contains("operation 51"), "{text}");
    assert!(
        text.contains("process 1 has issued only 50 operations"),
        "{text}"
    );
}

#[test]
fn wait_inside_a_span_is_reported_with_its_operation() {
    let mut job = Job::new(2, 3, 0);
    job.issue_span(0, 40, &replay(0, 1000));
    job.expect(0, 1, (40, 0), 100);
    job.run(61_000);
    assert!(
        job.reports[0].contains("operation 40 (40 of the replay of step 1000)"),
        "{:?}",
        job.reports
    );
}
