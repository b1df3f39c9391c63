//! Measures an array that goes around a ring of processes: the time of one hop.
//!
//! The program on each process waits for the array before it issues the next hop, as in ring
//! attention without overlap. With more processes than cores the time is that of the system's
//! scheduler. Then compare it with the time of an array of 8 bytes.

use std::time::{Duration, Instant};

use mpmd_core::prelude::{MpmdArray, Program};
use mpmd_core::{Error, Result, Simulation};
use mpmd_launch::JobEnv;
use mpmd_layout::aval::u8s;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::DeviceKind;

use super::array::{arrive, broadcast_from_first};
use super::found::{Samples, Test};
use super::pace::Pace;
use crate::job::check_transport;
use crate::options::{Carrier, Size};

/// The most rounds of a size by default, and the bytes that all its rounds move per process.
const ROUNDS: u64 = 10_000;
const BYTES: u64 = ROUNDS * (64 << 10);
/// The fewest rounds of a size by default.
const LEAST_ROUNDS: u64 = 20;

/// Measures rings as one process of a job, with all its processes. Blocks until all sizes are
/// measured.
pub(super) fn in_job(
    env: &JobEnv,
    carrier: Carrier,
    device: DeviceKind,
    (sizes, rounds): (&[Size], Option<u64>),
    pace: &Pace,
) -> anyhow::Result<Vec<Samples>> {
    let mut p = Program::builder().devices(env.processes).device_kinds(&[device]).from_env()?;
    check_transport(&p, carrier.name())?;
    let found = measure(&mut p, sizes, rounds, pace)?;
    p.finish()?;
    Ok(found)
}

/// Measures rings of `processes` threads of this process. Blocks until all sizes are measured.
pub(super) fn in_threads(
    processes: usize,
    device: DeviceKind,
    sizes: &[Size],
    rounds: Option<u64>,
    pace: &Pace,
) -> Result<Vec<Samples>> {
    let simulation =
        Simulation::new(processes, processes).settings(|program| program.device_kinds(&[device]));
    let results = simulation.run(|p| measure(p, sizes, rounds, pace));
    let mut found = results.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(if found.is_empty() { Vec::new() } else { found.swap_remove(0) })
}

fn measure(
    p: &mut Program,
    sizes: &[Size],
    rounds: Option<u64>,
    pace: &Pace,
) -> Result<Vec<Samples>> {
    let devices = p.topology().device_ids().to_vec();
    let ring: Vec<Sharding> = devices.iter().copied().map(Sharding::single_device).collect();
    let mut found = Vec::new();
    for Size(bytes) in sizes.iter().copied() {
        let usual = (BYTES / bytes as u64).clamp(LEAST_ROUNDS, ROUNDS);
        let repeats = pace.repeats_at(bytes);
        let rounds = rounds.unwrap_or(usual).div_ceil(repeats as u64).max(1);
        let x = p.array_from_fn(u8s([bytes]), &ring[0], |_, mut view| Ok(view.fill(7u8)?))?;
        arrive(&x)?;
        // Every process maps the memory once.
        let (mut x, _) = go_around(p, &ring, x, 2)?;
        let mut samples = Samples::new(Test::Ring(ring.len()), bytes);
        for _ in 0..repeats {
            let (last, time) = go_around(p, &ring, x, rounds)?;
            x = last;
            samples.add(rounds * ring.len() as u64, time);
        }
        if let Some(values) = x.to_host()?
            && values.bytes().iter().any(|byte| *byte != 7)
        {
            return Err(Error::kernel(format!("{bytes} bytes have changed on their way")));
        }
        // No process begins the next size while others measure.
        broadcast_from_first(p)?;
        found.push(samples);
    }
    Ok(found)
}

/// Sends the array `rounds` times around all processes. All must call this. Returns the array and
/// the time.
fn go_around(
    p: &mut Program,
    ring: &[Sharding],
    mut x: MpmdArray,
    rounds: u64,
) -> Result<(MpmdArray, Duration)> {
    let start = Instant::now();
    for _ in 0..rounds {
        for next in ring[1..].iter().chain(&ring[..1]) {
            x = p.device_put(&x, next)?;
            arrive(&x)?;
        }
    }
    Ok((x, start.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_threads_measure_each_hop() {
        let pace = Pace { repeats: 2, sample: Duration::from_micros(200) };
        let sizes = [Size(8), Size(100 << 10)];
        let found = in_threads(3, DeviceKind::Cpu, &sizes, Some(5), &pace).unwrap();
        let shape = |found: &Samples| (found.test, found.bytes, found.samples.len());
        let shapes: Vec<_> = found.iter().map(shape).collect();
        assert_eq!(shapes, [(Test::Ring(3), 8, 2), (Test::Ring(3), 100 << 10, 2)]);
    }
}
