//! A process dies, or stops, while 64 MiB are on their way to it or from it. The others end with an
//! error that names it. A seed decides the moment.

use std::time::Duration;

use mpmd_tests::{Carrier, FaultOutcome, Job, Processes, over_each_carrier, rng_of_this_run};
use rustix::process::Signal;

/// Time limit for the end of all processes after a death.
const SOON: Duration = Duration::from_secs(5);

/// The latest moment of a signal, in milliseconds. Longer than one transfer takes, so that a signal
/// can hit any part of it.
const WITHIN_MILLIS: usize = 150;

over_each_carrier! {
    process_killed_during_transfers_is_named_in_five_seconds
    process_stopped_during_transfers_is_named_after_timeout
}

/// Starts a job with large transfers, sends a signal to process `victim` after `delay`, and waits
/// for the end of the others.
fn inject_fault(
    options: Processes,
    how: &str,
    victim: usize,
    delay: Duration,
    signal: Signal,
) -> FaultOutcome {
    let mut job = Job::start(options, &["flooding", how, &victim.to_string()]);
    // All have seen a transfer end, and another one is always in flight.
    job.wait_for_output("round 3\n").unwrap();
    std::thread::sleep(delay);
    job.inject_fault(victim, signal)
}

/// Sends the signal to a sending or receiving process at a random moment, in jobs of 2 and of 4
/// processes, `times` each. Checks that the others name it. Returns the longest time that they took
/// to end.
fn inject_faults(
    carrier: Carrier,
    peer_timeout: Duration,
    times: usize,
    signal: Signal,
) -> Duration {
    let mut random = rng_of_this_run();
    let mut longest = Duration::ZERO;
    let mut waited = 0;
    for processes in [2, 4] {
        for how in ["sends", "receives"].repeat(times) {
            let victim = random.usize(..processes);
            let delay = Duration::from_micros(random.usize(..1000 * WITHIN_MILLIS) as u64);
            let options = carrier.processes(env!("CARGO_BIN_EXE_named"), processes);
            let outcome = inject_fault(
                options.peer_timeout(peer_timeout),
                how,
                victim,
                delay,
                signal,
            );
            let told = format!("process {victim} of {processes} {how}, struck after {delay:?}");
            println!("{told}: all had ended after {:?}", outcome.took);
            for end in &outcome.ended {
                assert_eq!(
                    end.code(),
                    1,
                    "{told}: the others end with an error\n{}",
                    outcome.report
                );
                let named = end.stderr.contains(&format!("process {victim} is gone"));
                assert!(named, "{told}: it is not named\n{}", outcome.report);
                assert!(
                    !end.stdout.contains("WRONG"),
                    "{told}: wrong data\n{}",
                    outcome.report
                );
                waited += usize::from(end.stderr.contains("tests/src/programs/flooding.rs:"));
            }
            longest = longest.max(outcome.took);
        }
    }
    // If no operation waits at the moment of death, the error names the latest one. That cannot
    // happen every time.
    assert!(waited > 0, "no error names an operation that was under way");
    longest
}

fn process_killed_during_transfers_is_named_in_five_seconds(carrier: Carrier) {
    let times = if carrier.is_thorough() { 4 } else { 2 };
    let longest = inject_faults(carrier, Duration::from_secs(30), times, Signal::KILL);
    assert!(longest <= SOON, "the last ended after {longest:?}");
}

fn process_stopped_during_transfers_is_named_after_timeout(carrier: Carrier) {
    let times = if carrier.is_thorough() { 2 } else { 1 };
    inject_faults(carrier, Duration::from_secs(2), times, Signal::STOP);
}
