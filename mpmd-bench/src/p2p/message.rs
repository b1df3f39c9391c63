//! Measures messages directly over a transport, without arrays, operations or a router.

use std::sync::Arc;

use anyhow::{Context, Result};
use mpmd_base::ProcessId;
use mpmd_base::block::Spin;
use mpmd_launch::JobEnv;
use mpmd_transport::inproc::{Fabric, Faults};
use mpmd_transport::{Pool, Transport};

use super::ends::{Ends, NEXT, READY};
use super::found::{Samples, Test};
use super::meet::Meeting;
use super::pace::{self, Pace};
use super::words::Case;
use crate::options::{Carrier, Size};

/// Measures messages as one of the two processes of a job. Blocks until all sizes are measured.
/// Returns the results on process 0, and an empty list on process 1.
pub(super) fn in_job(
    env: &JobEnv,
    carrier: Carrier,
    spin: Spin,
    (sizes, cases): (&[Size], &[Case]),
    pace: &Pace,
) -> Result<Vec<Samples>> {
    let pool = Pool::new("bench", None);
    let meeting = Meeting::of(env, carrier, spin, &pool)?;
    // Zero-copy transfers need memory from the transport's arena.
    let pool =
        meeting.transport.arena().map_or(pool, |arena| Pool::in_arena("bench", None, &arena));
    let found = measure(meeting.transport.clone(), pool, sizes, cases, pace)?;
    meeting.leave()?;
    Ok(found)
}

/// Measures messages between two threads of this process. Blocks until all sizes are measured.
pub(super) fn in_threads(sizes: &[Size], cases: &[Case], pace: &Pace) -> Result<Vec<Samples>> {
    let fabric = Fabric::new(2, Faults::default());
    let one = |process| {
        measure(fabric.endpoint(ProcessId(process)), Pool::new("bench", None), sizes, cases, pace)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| one(1));
        let found = one(0);
        other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        found
    })
}

/// Runs all sizes on one of the two processes: process 0 measures, process 1 answers.
fn measure(
    transport: Arc<dyn Transport>,
    pool: Pool,
    sizes: &[Size],
    cases: &[Case],
    pace: &Pace,
) -> Result<Vec<Samples>> {
    let ends = Ends::start(transport, pool);
    let mut found = Vec::new();
    for Size(bytes) in sizes.iter().copied() {
        let at = || format!("measuring messages of {bytes} bytes");
        ends.prepare(bytes, if ends.is_first() { 1 } else { pace::window(bytes) })
            .with_context(at)?;
        if ends.is_first() {
            ends.hear(READY).with_context(at)?;
            if cases.contains(&Case::Latency) {
                found.push(latency(&ends, bytes, pace).with_context(at)?);
            }
            if cases.contains(&Case::Bandwidth) {
                found.push(bandwidth(&ends, bytes, pace).with_context(at)?);
            }
            ends.say(NEXT);
        } else {
            ends.say(READY);
            ends.hear(NEXT).with_context(at)?;
        }
    }
    Ok(found)
}

fn latency(ends: &Ends, bytes: usize, pace: &Pace) -> Result<Samples> {
    ends.ping(0, true)?;
    let rounds = pace.rounds(Pace::warm(bytes, 1, |rounds| ends.ping(rounds, false))?);
    let mut latency = Samples::new(Test::Latency, bytes);
    for _ in 0..pace.repeats_at(bytes) {
        let (rounds, time) = ends.ping(rounds, false)?;
        latency.add(rounds, time);
    }
    Ok(latency)
}

fn bandwidth(ends: &Ends, bytes: usize, pace: &Pace) -> Result<Samples> {
    // At least the whole window, so that every buffer is used.
    let window = pace::window(bytes);
    ends.stream(1, window, true)?;
    let one = Pace::warm(bytes, window, |messages| ends.stream(messages, window, false))?;
    let messages = pace.rounds(one).max(window as u64);
    let mut bandwidth = Samples::new(Test::Bandwidth, bytes);
    for _ in 0..pace.repeats_at(bytes) {
        let (messages, time) = ends.stream(messages, window, false)?;
        bandwidth.add(messages, time);
    }
    Ok(bandwidth)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn two_threads_measure_small_and_large_messages() {
        let pace = Pace { repeats: 2, sample: Duration::from_micros(200) };
        let sizes = [1, 16 << 10, (16 << 10) + 1, 3 << 20].map(Size);
        let found = in_threads(&sizes, &[Case::Latency, Case::Bandwidth], &pace).unwrap();
        let expected: Vec<_> = sizes
            .iter()
            .flat_map(|size| [(Test::Latency, size.0), (Test::Bandwidth, size.0)])
            .collect();
        assert_eq!(
            found.iter().map(|found| (found.test, found.bytes)).collect::<Vec<_>>(),
            expected
        );
        assert!(found.iter().all(|found| found.samples.len() == 2));
        assert!(found.iter().flat_map(|found| &found.samples).all(|sample| *sample > 0.0));
    }
}
