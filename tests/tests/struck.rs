//! A process dies, or stops, while 64 MiB are on their way to it or from it: the others end with an
//! error that says who. Where exactly it is struck is up to a seed.

use std::time::Duration;

use mpmd_tests::{Carrier, Job, JobOptions, Random, Struck, over_each_carrier};
use rustix::process::Signal;

/// The time within which everybody must have ended where a process dies.
const SOON: Duration = Duration::from_secs(5);

/// Longer than one transfer takes, so that any part of it can be met.
const WITHIN_MILLIS: usize = 150;

over_each_carrier! {
    a_process_killed_in_the_middle_of_large_transfers_is_named_within_five_seconds
    a_process_stopped_in_the_middle_of_large_transfers_is_named_when_patience_is_over
}

/// Strikes process `victim` of a job while large transfers flow.
fn strike(
    options: JobOptions,
    how: &str,
    victim: usize,
    delay: Duration,
    signal: Signal,
) -> Struck {
    let mut job = Job::start(options, &["flooding", how, &victim.to_string()]);
    // All have seen a transfer end, and the next is on its way at any time.
    job.wait_for_output("round 3\n");
    std::thread::sleep(delay);
    job.strike(victim, signal)
}

/// Strikes a process that sends, and one that receives, of 2 and of 4, `times` each; returns how
/// long the others took at most.
fn strike_all(carrier: Carrier, patience: Duration, times: usize, signal: Signal) -> Duration {
    let mut random = Random::of_this_run();
    let mut longest = Duration::ZERO;
    let mut waited = 0;
    for processes in [2, 4] {
        for how in ["sends", "receives"].repeat(times) {
            let victim = random.below(processes);
            let delay = Duration::from_micros(random.below(1000 * WITHIN_MILLIS) as u64);
            let options = JobOptions::new(env!("CARGO_BIN_EXE_named"), processes).over(carrier);
            let struck = strike(options.patience(patience), how, victim, delay, signal);
            let told = format!("process {victim} of {processes} {how}, struck after {delay:?}");
            println!("{told}: all had ended after {:?}", struck.took);
            for end in &struck.ended {
                assert_eq!(end.code, 1, "{told}: the others end with an error\n{}", struck.report);
                let named = end.stderr.contains(&format!("process {victim} is gone"));
                assert!(named, "{told}: it is not named\n{}", struck.report);
                assert!(!end.stdout.contains("WRONG"), "{told}: wrong data\n{}", struck.report);
                waited += usize::from(end.stderr.contains("tests/src/programs/flooding.rs:"));
            }
            longest = longest.max(struck.took);
        }
    }
    // A death between two waits is named with what was at hand; it cannot be so every time.
    assert!(waited > 0, "no error names an operation that was under way");
    longest
}

fn a_process_killed_in_the_middle_of_large_transfers_is_named_within_five_seconds(
    carrier: Carrier,
) {
    let times = if carrier.is_thorough() { 4 } else { 2 };
    let longest = strike_all(carrier, Duration::from_secs(30), times, Signal::KILL);
    assert!(longest <= SOON, "the last ended after {longest:?}");
}

fn a_process_stopped_in_the_middle_of_large_transfers_is_named_when_patience_is_over(
    carrier: Carrier,
) {
    let times = if carrier.is_thorough() { 2 } else { 1 };
    strike_all(carrier, Duration::from_secs(2), times, Signal::STOP);
}
