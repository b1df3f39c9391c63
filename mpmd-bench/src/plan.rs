//! Measures planning between two shardings of thousands of devices: the part of one process, cold
//! and from the cache. The list of all pieces shows how the cost grows.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use mpmd_base::{DeviceId, ProcessId};
use mpmd_core::prelude::*;
use mpmd_layout::reshard;
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::{Mesh, Topology};

use crate::case::{Case, Output};
use crate::options::Options;

/// Devices per process; `PER_HOST` is the number of processes per host.
const PER_PROCESS: usize = 8;
const PER_HOST: usize = 4;

/// Options of `mpmd bench plan`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    options: Options,
    /// Numbers of devices; each must be a square.
    #[arg(long, value_delimiter = ',', default_values_t = [256, 1024, 4096, 16384])]
    devices: Vec<usize>,
}

/// Measures planning between meshes of many devices, and prints the results. Cold: from shardings
/// to the part of one process. Cached: again, from the plan cache of `device_put`.
pub(crate) fn plan(args: &PlanArgs) -> Result<()> {
    let mut cases = Output::new(args.options.json);
    for devices in &args.devices {
        let side = devices.isqrt();
        anyhow::ensure!(
            side * side == *devices && *devices > 0,
            "{devices} devices are no square grid"
        );
        for (name, shape, from, to) in pairs(*devices, side)? {
            let mut pieces = 0;
            let times = (0..args.options.repeats)
                .map(|_| cold(*devices, &shape, &from, &to, &mut pieces))
                .collect::<Result<Vec<_>>>()?;
            cases.push(Case::micros(name, format!("cold, {devices} devices, {pieces} own"), times));
            let (pieces, times) = listed(*devices, &shape, &from, &to)?;
            cases.push(Case::micros(name, format!("listed, {devices} devices, {pieces}"), times));
            let times = cached(*devices, &shape, &from, &to, args.options.repeats)?;
            cases.push(Case::micros(name, format!("cached, {devices} devices"), times));
        }
    }
    cases.end();
    Ok(())
}

type Pair = (&'static str, Vec<usize>, MeshOf, MeshOf);

/// A mesh and a spec. Each call of `sharding` creates a sharding that no cache has seen.
struct MeshOf {
    axes: Vec<(&'static str, usize)>,
    devices: Vec<DeviceId>,
    spec: Spec,
}

impl MeshOf {
    fn sharding(&self) -> Result<Sharding> {
        Ok(Mesh::new(&self.axes, self.devices.clone())?.sharding(self.spec.clone()))
    }
}

fn pairs(devices: usize, side: usize) -> Result<Vec<Pair>> {
    let all: Vec<DeviceId> = (0..u32::try_from(devices)?).map(DeviceId).collect();
    // A permutation without pattern: the step is coprime to the number of devices.
    let step = (devices * 5 / 8) | 1;
    let permuted: Vec<DeviceId> = (0..devices).map(|at| all[at * step % devices]).collect();
    let rows = |devices: &[DeviceId], spec| MeshOf {
        axes: vec![("x", devices.len())],
        devices: devices.to_vec(),
        spec,
    };
    let grid = MeshOf {
        axes: vec![("a", side), ("b", side)],
        devices: all.clone(),
        spec: spec!["a", "b"],
    };
    let shape = vec![devices, devices];
    Ok(vec![
        ("rows to grid", shape.clone(), rows(&all, spec!["x"]), grid),
        ("rows permuted", shape.clone(), rows(&all, spec!["x"]), rows(&permuted, spec!["x"])),
        (
            "replicated",
            shape,
            rows(&all[..devices / 2], spec![]),
            rows(&all[devices / 2..], spec![]),
        ),
    ])
}

fn topology(devices: usize) -> Result<Topology> {
    let processes = devices.div_ceil(PER_PROCESS);
    let hosts: Vec<usize> = (0..processes).map(|process| process / PER_HOST).collect();
    Ok(Topology::even(processes, PER_PROCESS).on_hosts(&hosts)?)
}

fn cold(
    devices: usize,
    shape: &[usize],
    from: &MeshOf,
    to: &MeshOf,
    own: &mut usize,
) -> Result<Duration> {
    let topology = topology(devices)?;
    let process = ProcessId((topology.processes() / 2) as u32);
    let (from, to) = (from.sharding()?, to.sharding()?);
    let start = Instant::now();
    let plan = reshard::plan(&*from.layout(shape)?, &*to.layout(shape)?, 4, &topology)?;
    let part = plan.part_of(process);
    let time = start.elapsed();
    *own = black_box(&part).deliveries.len();
    Ok(time)
}

/// Returns (the number of all pieces of all processes, the times to list them). No process ever
/// needs that list.
fn listed(
    devices: usize,
    shape: &[usize],
    from: &MeshOf,
    to: &MeshOf,
) -> Result<(usize, Vec<Duration>)> {
    const REPEATS: usize = 3;
    let topology = topology(devices)?;
    let (from, to) = (from.sharding()?.layout(shape)?, to.sharding()?.layout(shape)?);
    let plan = reshard::plan(&from, &to, 4, &topology)?;
    let times = (0..REPEATS).map(|_| {
        let start = Instant::now();
        (black_box(plan.pieces()).len(), start.elapsed())
    });
    let (counts, times): (Vec<usize>, Vec<Duration>) = times.unzip();
    Ok((counts[0], times))
}

/// Returns the mean times of a `device_put` in a dry run without part in the transfer: one lookup
/// in the plan cache.
fn cached(
    devices: usize,
    shape: &[usize],
    from: &MeshOf,
    to: &MeshOf,
    repeats: usize,
) -> Result<Vec<Duration>> {
    const BATCH: u32 = 64;
    let processes = devices.div_ceil(PER_PROCESS);
    let mut program = Program::builder().devices(processes * PER_PROCESS).dry_run(processes)?;
    let (from, to) = (from.sharding()?, to.sharding()?);
    let aval = f32s([shape[0], shape[1]]);
    let array = program.array_from_fn(aval, &from, |_, _| Ok(()))?;
    drop(program.device_put(&array, &to)?);
    (0..repeats)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..BATCH {
                drop(black_box(program.device_put(&array, &to)?));
            }
            Ok(start.elapsed() / BATCH)
        })
        .collect()
}
