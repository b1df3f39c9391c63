//! Measures arrays by `device_put`, from program to program, with all layers of the framework.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use mpmd_base::ProcessId;
use mpmd_core::prelude::{MpmdArray, Program, spec};
use mpmd_core::{Result, Simulation};
use mpmd_layout::aval::u8s;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::DeviceKind;

use super::handover::handover;
use super::p2p_case::P2pCase;
use super::pace::{self, SamplePace};
use super::samples::{P2pTest, Samples};
use crate::job::check_transport;
use crate::options::{Carrier, Size};

/// The process that takes the times.
pub(super) const FIRST: ProcessId = ProcessId(0);

/// Measures transfers of arrays, as one of the two processes of a job. Blocks until all sizes are
/// measured.
pub(super) fn in_job(
    carrier: Carrier,
    device: DeviceKind,
    sizes: &[Size],
    cases: &[P2pCase],
    pace: &SamplePace,
) -> anyhow::Result<Vec<Samples>> {
    let mut p = Program::builder()
        .devices(2)
        .device_kinds(&[device])
        .from_env()?;
    check_transport(&p, carrier.name())?;
    let found = measure(&mut p, sizes, cases, pace)?;
    p.finish()?;
    Ok(found)
}

/// Measures transfers of arrays between two threads of this process. Blocks until all sizes are
/// measured.
pub(super) fn in_threads(
    device: DeviceKind,
    sizes: &[Size],
    cases: &[P2pCase],
    pace: &SamplePace,
) -> Result<Vec<Samples>> {
    let simulation = Simulation::new(2, 2).settings(|program| program.device_kinds(&[device]));
    let mut results = simulation.run(|p| measure(p, sizes, cases, pace));
    let other = results.pop().map(|result| result.map(drop));
    let found = results.pop().unwrap_or_else(|| Ok(Vec::new()));
    other.map_or(Ok(()), |result| result).and(found)
}

/// The first device of each process, as shardings: `here` on process 0, `there` on process 1.
pub(super) struct DevicePair {
    pub(super) here: Sharding,
    pub(super) there: Sharding,
}

fn measure(
    p: &mut Program,
    sizes: &[Size],
    cases: &[P2pCase],
    pace: &SamplePace,
) -> Result<Vec<Samples>> {
    let devices = p.topology().device_ids().to_vec();
    let pair = DevicePair {
        here: Sharding::single_device(devices[0]),
        there: Sharding::single_device(devices[1]),
    };

    let on_gpu = p.topology().kind_of(devices[1]) == Some(DeviceKind::Cuda);
    let mut found = Vec::new();
    for Size(bytes) in sizes.iter().copied() {
        // First, while the memory is still new to the processes.
        let handed = match cases.contains(&P2pCase::Handover) {
            true => handover(p, &pair, bytes, pace)?,
            false => Vec::new(),
        };
        let x = p.array_from_fn(u8s([bytes]), &pair.here, |_, mut view| Ok(view.fill(7u8)?))?;
        x.block_until_ready()?;

        if cases.contains(&P2pCase::Latency) {
            found.push(round_trips(p, &pair, &x, bytes, pace)?);
        }
        if cases.contains(&P2pCase::Bandwidth) {
            found.push(bandwidth(p, &pair, &x, P2pTest::Bandwidth, bytes, pace)?);
        }
        if cases.contains(&P2pCase::Handover) && on_gpu && bytes > 1 {
            // In two parts, so that the receiver must copy them into one array.
            let halves = p.mesh_of(&[("half", 2)], &devices)?.sharding(spec!["half"]);
            let even = bytes / 2 * 2;
            let x = p.array_from_fn(u8s([even]), &halves, |_, mut view| Ok(view.fill(7u8)?))?;
            found.push(bandwidth(p, &pair, &x, P2pTest::OneCopy, bytes, pace)?);
        }
        found.extend(handed);
    }
    Ok(found)
}

/// Measures round trips of `x` between the two devices. Both processes must call this.
fn round_trips(
    p: &mut Program,
    pair: &DevicePair,
    x: &MpmdArray,
    bytes: usize,
    pace: &SamplePace,
) -> Result<Samples> {
    // The receiver also waits, so that the programs on both sides take part in every hop.
    let hop = |p: &mut Program, x: &MpmdArray, to: &Sharding| {
        let y = p.device_put(x, to)?;
        arrive(&y).map(|()| y)
    };
    let run = |p: &mut Program, rounds: u64| -> Result<Duration> {
        let start = Instant::now();
        let mut x = x.clone();
        for _ in 0..rounds {
            let y = hop(p, &x, &pair.there)?;
            x = hop(p, &y, &pair.here)?;
        }
        Ok(start.elapsed())
    };

    let one = SamplePace::warm(bytes, 1, |rounds| run(p, rounds).map(|time| (rounds, time)))?;
    // All processes must issue the same operations, so process 0 decides.
    let rounds = p.broadcast_value(FIRST, 1, || Ok(pace.rounds(one)))?;

    let mut found = Samples::new(P2pTest::Latency, bytes);
    for _ in 0..pace.repeats_at(bytes) {
        found.add(rounds, run(p, rounds)?);
    }
    Ok(found)
}

/// Blocks until this process's shards of `x` have arrived. Does not wait for sends of this process.
pub(super) fn arrive(x: &MpmdArray) -> Result<()> {
    if x.is_fully_remote() {
        Ok(())
    } else {
        x.block_until_ready().map(drop)
    }
}

/// Measures a stream of transfers of `x`, until the receiver has confirmed the last one. Returns
/// samples of `test` for arrays of `bytes` bytes. Both processes must call this.
fn bandwidth(
    p: &mut Program,
    pair: &DevicePair,
    x: &MpmdArray,
    test: P2pTest,
    bytes: usize,
    pace: &SamplePace,
) -> Result<Samples> {
    // A copying device still has work while the host learns of the end of an earlier copy.
    let window = pace::window(bytes).max(if test == P2pTest::OneCopy { 4 } else { 0 });

    let done = p.array_from_fn(u8s([1]), &pair.there, |_, mut view| Ok(view.fill(1u8)?))?;
    let run = |p: &mut Program, arrays: u64| -> Result<Duration> {
        let start = Instant::now();
        let mut under_way: VecDeque<MpmdArray> = VecDeque::with_capacity(window);
        for _ in 0..arrays {
            if under_way.len() == window
                && let Some(oldest) = under_way.pop_front()
            {
                // Only the receiver waits here, and only its memory limits the window.
                arrive(&oldest)?;
            }
            under_way.push_back(p.device_put(x, &pair.there)?);
        }
        for y in under_way {
            arrive(&y)?;
        }
        // The receiver's confirmation: its program sends it after all arrays have arrived.
        arrive(&p.device_put(&done, &pair.here)?)?;
        Ok(start.elapsed())
    };

    let one = SamplePace::warm(bytes, window, |arrays| {
        run(p, arrays).map(|time| (arrays, time))
    })?;
    let arrays = p.broadcast_value(FIRST, 1, || Ok(pace.rounds(one).max(window as u64)))?;

    let mut found = Samples::new(test, bytes);
    for _ in 0..pace.repeats_at(bytes) {
        found.add(arrays, run(p, arrays)?);
    }
    Ok(found)
}
