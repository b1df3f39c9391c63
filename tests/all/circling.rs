//! An array that goes around a ring of processes many thousand times: its values stay right, and
//! neither loans nor memory grow, also when a holder is killed.

use std::time::Duration;

use mpmd_tests::{Carrier, Job, Processes, rng_of_this_run};

/// Bytes of the array that goes around.
const BYTES: u64 = 64 << 10;

fn options(processes: usize) -> Processes {
    let limit = Duration::from_secs(300);
    Carrier::SHM
        .processes(env!("CARGO_BIN_EXE_named"), processes)
        .deadline(limit)
}

/// Returns (mapped bytes, lent bytes) after each tenth of the rounds.
fn looks(said: &str) -> Vec<(u64, u64)> {
    let look = |line: &str| {
        let (_, numbers) = line.split_once(": mapped ")?;
        let (mapped, lent) = numbers.split_once(" lent ")?;
        Some((mapped.parse().ok()?, lent.parse().ok()?))
    };
    said.lines().filter_map(look).collect()
}

#[test]
fn array_goes_around_with_flat_loans_and_memory() {
    for (processes, rounds) in [(2, "6000"), (4, "3000"), (8, "2000")] {
        let mut job = Job::start(options(processes), &["circling", rounds]);
        for (process, said) in job.wait_well().into_iter().enumerate() {
            let looks = looks(&said);
            assert_eq!(looks.len(), 10, "process {process} of {processes}\n{said}");
            for (mapped, lent) in &looks {
                assert_eq!(
                    *mapped, looks[0].0,
                    "process {process} of {processes}\n{said}"
                );
                // At most once to each other process.
                let most = BYTES * (processes as u64 - 1);
                assert!(*lent <= most, "process {process} of {processes}\n{said}");
                // Only the array's owner has lent it: no other process has made a copy.
                assert!(
                    process == 0 || *lent == 0,
                    "process {process} of {processes}\n{said}"
                );
            }
            assert!(
                said.ends_with("all is back\n"),
                "process {process} of {processes}\n{said}"
            );
        }
    }
}

#[test]
fn memory_comes_back_when_a_process_of_the_ring_dies() {
    let mut random = rng_of_this_run();
    for victim in 0..4 {
        let mut job = Job::start(options(4), &["circling", "100000000"]);
        job.wait_for_output_of(victim, "started\n").unwrap();
        std::thread::sleep(Duration::from_micros(random.usize(..300_000) as u64));
        job.kill(victim).unwrap();
        let ended = job.wait();
        for (process, end) in ended
            .iter()
            .enumerate()
            .filter(|(process, _)| *process != victim)
        {
            assert_eq!(end.code(), 1, "process {process}\n{}", job.report());
            let is_named = end.stderr.contains(&format!("process {victim} is gone"));
            assert!(is_named, "process {process}\n{}", job.report());
            assert!(
                !end.stderr.contains("WRONG"),
                "process {process}\n{}",
                job.report()
            );
            assert!(
                end.stdout.ends_with("all is back\n"),
                "{process}\n{}",
                job.report()
            );
        }
    }
}
