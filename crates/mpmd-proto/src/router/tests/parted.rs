//! A process that diverges from the others at some operation: no piece of that operation or a later
//! one passes between them.

use super::*;

const OPS: usize = 40;

#[test]
fn no_piece_passes_between_diverged_processes() {
    for seed in 0..100 {
        let mut seeded = Seeded(seed);
        let processes = 2 + seeded.next(4) as usize;
        let program = program(processes, OPS, &mut seeded);
        let (astray, first) = (
            seeded.next(processes as u64) as usize,
            1 + seeded.next(OPS as u64),
        );
        // Zero-copy transfer between no pairs, or between all.
        let mut job = Job::zero_copy(processes, seed, seeded.next(40), |_, _| {
            seed.is_multiple_of(2)
        });
        // Offers and grants arrive before the other side gets to their operations, and after.
        let mut unready: Vec<(usize, usize, PieceKey, u64)> = Vec::new();
        let mut next = vec![0; processes];
        while next.iter().any(|next| *next < OPS) || !unready.is_empty() {
            let process = seeded.next(processes as u64) as usize;
            if next[process] < OPS {
                let op = next[process] as u64 + 1;
                let parted = process == astray && op >= first;
                job.issue(
                    process,
                    u128::from(op) + if parted { 1000 } else { 0 },
                    "op",
                );
                for (piece, (from, to, bytes)) in program[next[process]].iter().enumerate() {
                    let key = (op, piece as u64);
                    if *to == process {
                        job.expect(process, *from, key, *bytes);
                    }
                    if *from == process {
                        unready.push((process, *to, key, *bytes));
                    }
                }
                next[process] += 1;
            }
            if !unready.is_empty() && seeded.next(2) == 0 {
                let (process, to, key, bytes) =
                    unready.swap_remove(seeded.next(unready.len() as u64) as usize);
                job.offer(process, to, key, bytes);
            }
            job.step();
        }
        job.run(4000);
        for ((to, key), outcome) in job.outcomes.iter().filter(|(_, outcome)| outcome.is_ok()) {
            let (from, _, bytes) = program[key.0 as usize - 1][key.1 as usize];
            let parted = key.0 >= first && (from == astray) != (*to == astray);
            assert!(
                !parted,
                "seed {seed}: {key:?} of process {from} reached process {to} after {first}"
            );
            assert_eq!(
                outcome.as_ref().expect("delivered"),
                &body(*key, bytes),
                "seed {seed}"
            );
        }
        for router in &job.routers {
            assert_eq!(
                router.failed().map(|failure| failure.kind),
                Some(FailureKind::Diverged),
                "seed {seed}"
            );
        }
    }
}
