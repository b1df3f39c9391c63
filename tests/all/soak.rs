//! Thousands of transfers with handles and futures dropped at any time. Every array that is checked
//! is right, nothing stays in use, and memory, open files and threads are flat.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, Job, over_each_carrier};

const PROCESSES: usize = 4;
const SEED: u64 = 20_251_121;

const TRANSFERS: usize = 10_000;

/// Bytes that the pools of a warm run may still take from the system.
const LITTLE: u64 = 16 << 20;

/// Size in bytes of a pool's largest segment. A warm pool may take one more: an unusual backlog of
/// small buffers fills the last one.
const SEGMENT: u64 = 32 << 20;

/// Bytes that a pool of shared memory may keep for reuse, and that a transport may keep for its
/// largest backlog. With shared memory the four processes map each other's pools.
const KEPT: u64 = 64 << 20;

/// The test takes a few seconds over any transport.
const LONG: Duration = Duration::from_secs(200);

/// The variable with the seconds that the test takes at least, for `cargo xtask soak`.
const SECONDS: &str = "MPMD_SOAK_SECONDS";

/// Number of files that a warm run may still open.
const FILES: u64 = 64;

over_each_carrier! {
    transfers_dropped_at_any_time_leave_nothing
}

fn transfers_dropped_at_any_time_leave_nothing(carrier: Carrier) {
    let seconds = std::env::var(SECONDS).map_or(0, |text| text.parse().expect("seconds"));
    let deadline = LONG + 2 * Duration::from_secs(seconds);
    let options = carrier
        .processes(env!("CARGO_BIN_EXE_named"), PROCESSES)
        .deadline(deadline);
    let begin = Instant::now();
    let numbers = [TRANSFERS.to_string(), SEED.to_string(), seconds.to_string()];
    let mut job = Job::start(options, &["soak", &numbers[0], &numbers[1], &numbers[2]]);
    let said = job.wait_well();
    println!("it took {:?}", begin.elapsed());
    let mut looked_at = 0;
    let mut to_look_at = Vec::new();
    for (process, said) in said.iter().enumerate() {
        println!("process {process}:\n{said}");
        let numbers = |line: &str| -> Vec<u64> {
            let line = said.lines().find_map(|said| said.strip_prefix(line));
            let words = line.unwrap_or_default().split(' ');
            words.filter_map(|word| word.parse().ok()).collect()
        };
        let (warm, end) = (numbers("warm: "), numbers("end: "));
        let (
            [_, mapped_warm, resident_warm, files_warm, threads_warm],
            [live, mapped, resident, files, threads],
        ) = (&warm[..], &end[..])
        else {
            panic!(
                "process {process} does not print its memory use:\n{}",
                job.report()
            )
        };
        assert_eq!(*live, 0, "process {process}");
        // Pools that grow have more segments, each with a file.
        assert!(
            *files <= files_warm + FILES,
            "process {process}: {files_warm}, then {files} files"
        );
        assert_eq!(threads, threads_warm, "process {process}");
        let (more, more_resident) = match carrier {
            Carrier::SHM => (KEPT, PROCESSES as u64 * KEPT),
            _ => (LITTLE + SEGMENT, KEPT),
        };
        assert!(
            *mapped <= mapped_warm + more,
            "process {process}: {mapped_warm}, then {mapped} mapped"
        );
        assert!(
            *resident <= resident_warm + more_resident,
            "process {process}: {resident_warm}, then {resident}"
        );
        let [here, all] = numbers("looked at ")[..] else {
            panic!("{}", job.report())
        };
        looked_at += here;
        to_look_at.push(all);
    }
    assert_eq!(
        to_look_at, [looked_at; PROCESSES],
        "every array is looked at, on exactly one process"
    );
    assert!(
        looked_at as usize > TRANSFERS / 4,
        "only {looked_at} of {TRANSFERS} are looked at"
    );
}
