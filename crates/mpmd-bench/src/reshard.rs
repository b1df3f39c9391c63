//! Measures resharding from four devices to four, in one process and over several, beside plain
//! copies of as many bytes: by a thread of the host, or by the driver within a GPU's memory.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use mpmd_base::DeviceId;
use mpmd_core::prelude::{MpmdArray, Program, spec};
use mpmd_core::{MoveOptions, Simulation};
use mpmd_device::copy::copy_region;
use mpmd_launch::JobEnv;
use mpmd_layout::aval::f32s;
use mpmd_layout::sharding::{Layout, Sharding};
use mpmd_layout::topology::{DeviceKind, Mesh};

use crate::case::{BenchOutput, Case};
use crate::direct::{self, Copies, Way};
use crate::host;
use crate::job::run_as_job;
use crate::memcpy;
use crate::options::{BenchOptions, DeviceOption};

/// Number of devices of the job: four that have the array, and four others.
const DEVICES: usize = 8;

/// The minimum number of bytes of one sample, so that reading the clock costs nothing.
const SAMPLE_BYTES: usize = 32 << 20;

/// Number of moves in one sample on a GPU, where a move takes at least about ten microseconds.
const ROUNDS_ON_GPU: usize = 16;

#[derive(Args, Clone, Debug)]
pub(crate) struct ReshardArgs {
    #[command(flatten)]
    options: BenchOptions,
    #[command(flatten)]
    on: DeviceOption,
    /// The transport of the messages: `shm` or `tcp` between processes, or `inproc` between
    /// threads.
    #[arg(long, default_value = "shm")]
    transport: String,
    /// Numbers of processes; each divides 8.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    processes: Vec<usize>,
    /// Sizes of the array, in MiB; each is a power of two.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64")]
    mib: Vec<usize>,
}

/// Measures five cases for each size and number of processes: rows to columns, rows to other
/// devices, replication, chunks to chunks of the other dimension, and regions of different shapes
/// to rows. Prints the results; starts the jobs if this process is not in one.
pub(super) fn reshard(args: &ReshardArgs) -> Result<ExitCode> {
    if JobEnv::from_env()?.is_some() {
        let mut p = Program::builder()
            .devices(DEVICES)
            .device_kinds(&[args.on.device])
            .from_env()?;
        measure(&mut p, args)?;
        p.finish()?;
        return Ok(ExitCode::SUCCESS);
    }

    for processes in &args.processes {
        anyhow::ensure!(
            *processes > 0 && DEVICES.is_multiple_of(*processes),
            "{DEVICES} devices cannot be spread evenly over {processes} processes"
        );
    }
    for mib in &args.mib {
        anyhow::ensure!(mib.is_power_of_two(), "{mib} MiB is no power of two");
    }

    for processes in args.processes.iter().copied() {
        if args.transport == "inproc" {
            let simulation = Simulation::new(processes, DEVICES);
            let simulation = simulation.settings(|program| program.device_kinds(&[args.on.device]));
            for result in simulation.run(|p| measure(p, args)) {
                result?;
            }
            continue;
        }

        let code = run_as_job(processes, &args.transport)?;
        if code != 0 {
            return Ok(ExitCode::from(code));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(p: &mut Program, args: &ReshardArgs) -> mpmd_core::Result<()> {
    // Both meshes are on every process. With several processes, opposite devices of the two meshes
    // are never on the same process.
    let even: Vec<DeviceId> = (0..4).map(|i| DeviceId(2 * i)).collect();
    let odd: Vec<DeviceId> = (0..4).map(|i| DeviceId((2 * i + 5) % 8)).collect();
    let here = p.mesh_of(&[("x", 4)], &even)?;
    let there = p.mesh_of(&[("x", 4)], &odd)?;

    let on_gpu = args.on.device == DeviceKind::Cuda;
    let mut cases = BenchOutput::new(args.options.json);
    for mib in args.mib.iter().copied() {
        let bytes = mib << 20;

        let rows = here.sharding(spec!["x"]);
        let columns = here.sharding(spec![None, "x"]);
        let mut turned = even.clone();
        turned.rotate_left(1);
        let chunks = Sharding::chunk(0, even.clone())?;
        for (name, from, to, copies) in [
            ("rows to columns", &rows, columns, 1),
            ("to other devices", &rows, there.sharding(spec!["x"]), 1),
            ("replicate", &rows, here.replicated(), 4),
            ("chunks to chunks", &chunks, Sharding::chunk(1, turned)?, 1),
            ("regions to rows", &regions(&even, bytes)?, rows.clone(), 1),
        ] {
            let [times, plain] = put(p, args, bytes, &here, [from, &to])?;
            let parameters = format!("{mib} MiB, {} processes", p.processes());
            if p.process().0 == 0 {
                let moved = Case::bandwidth(name, parameters, bytes * copies, times);
                cases.extend(beside(moved, args, bytes, plain));
            }
        }

        if p.process().0 == 0 && !on_gpu {
            if p.processes() == 1 {
                cases.extend(copies(args, bytes, &here)?);
            }
            cases.extend(by_all_cores(args, bytes));
        }
        // The other processes wait here, so that these copies have the machine to themselves.
        meet(p, &here)?;
    }

    if on_gpu && p.processes() == 1 {
        let repeats = args.options.repeats.clamp(1, 10);
        for mib in args.mib.iter().copied() {
            cases.extend(host::cases(p, mib << 20, repeats)?);
        }
    }

    if p.process().0 == 0 {
        cases.end();
    }
    Ok(())
}

/// Returns the shape of a matrix of `bytes` bytes, a power of two, with at least as many columns as
/// rows.
fn shape(bytes: usize) -> [usize; 2] {
    let rows = 1 << ((bytes / 4).ilog2() / 2);
    [rows, bytes / 4 / rows]
}

/// Returns a sharding of the matrix into four regions of different shapes.
fn regions(devices: &[DeviceId], bytes: usize) -> mpmd_core::Result<Sharding> {
    let [rows, columns] = shape(bytes);
    let top = rows / 4;
    let left = columns / 4;
    let right = columns * 3 / 4;
    let parts = [
        [(0, top), (0, columns)],
        [(top, rows), (0, left)],
        [(top, rows), (left, right)],
        [(top, rows), (right, columns)],
    ];
    let parts = parts.into_iter().map(|part| part.into_iter().collect());
    Ok(Sharding::enumerated(
        devices.iter().copied().zip(parts).collect(),
    )?)
}

/// Returns the mean times of a `device_put` and of a plain copy, one of each per sample. A
/// `device_put` includes allocation, and ends when the array is on every device.
fn put(
    p: &mut Program,
    args: &ReshardArgs,
    bytes: usize,
    mesh: &Mesh,
    [from, to]: [&Sharding; 2],
) -> mpmd_core::Result<[Vec<Duration>; 2]> {
    let x = p.array_from_fn(f32s(shape(bytes)), from, |_, mut view| {
        Ok(view.fill(1.0f32)?)
    })?;
    x.block_until_ready()?;

    let measures = p.process().0 == 0;
    in_turns(args, bytes, measures, |rounds| {
        // The other processes wait here while process 0 copies.
        meet(p, mesh)?;
        let start = Instant::now();
        for _ in 0..rounds {
            let y: MpmdArray =
                p.device_put_with(&x, to, MoveOptions::default().may_alias(false))?;
            y.block_until_ready()?;
        }
        meet(p, mesh)?;
        Ok(start.elapsed())
    })
}

/// Blocks until every process has called this. Does nothing with one process.
fn meet(p: &mut Program, mesh: &Mesh) -> mpmd_core::Result<()> {
    if p.processes() == 1 {
        return Ok(());
    }
    // Each process sends its part when it issues this, after it has waited for its earlier
    // operations.
    let here = p.array_from_fn(f32s([4]), mesh.sharding(spec!["x"]), |_, mut view| {
        Ok(view.fill(0.0f32)?)
    })?;
    p.device_put(&here, mesh.replicated())?
        .block_until_ready()
        .map(drop)
}

/// Measures one thread's copies of a matrix of `bytes` bytes from rows to columns, without the
/// framework, beside plain copies.
fn copies(args: &ReshardArgs, bytes: usize, mesh: &Mesh) -> mpmd_core::Result<[Case; 2]> {
    let layout = |sharding: Sharding| sharding.layout(&shape(bytes));
    let rows = layout(mesh.sharding(spec!["x"]))?;
    let columns = layout(mesh.sharding(spec![None, "x"]))?;
    let buffers = |layout: &Layout| -> Vec<Vec<u8>> {
        layout
            .regions()
            .iter()
            .map(|region| vec![1; region.elements() * 4])
            .collect()
    };
    let sources = buffers(&rows);
    let mut targets = buffers(&columns);

    let mut copy = || {
        for (to, target) in columns.regions().iter().zip(&mut targets) {
            for (from, source) in rows.regions().iter().zip(&sources) {
                if let Some(piece) = from.intersect(to) {
                    copy_region(source, from, target, to, &piece, 4);
                }
            }
        }
        std::hint::black_box(&mut targets);
    };

    let [times, plain] = in_turns(args, bytes, true, |rounds| {
        let start = Instant::now();
        (0..rounds).for_each(|_| copy());
        Ok(start.elapsed())
    })?;
    let parameters = format!("{} MiB, rows to columns", bytes >> 20);
    let copied = Case::bandwidth("copy_region", parameters, bytes, times);
    Ok(beside(copied, args, bytes, plain))
}

/// Alternates samples of moves of `bytes` bytes with samples of plain copies, so that both see the
/// same load of the machine. `moves` makes the given number of moves and returns their total time.
/// No bytes are copied if `measures` is false. Returns the mean times of a move and of a copy,
/// without the first sample.
fn in_turns(
    args: &ReshardArgs,
    bytes: usize,
    measures: bool,
    mut moves: impl FnMut(usize) -> mpmd_core::Result<Duration>,
) -> mpmd_core::Result<[Vec<Duration>; 2]> {
    let on_gpu = args.on.device == DeviceKind::Cuda;
    let rounds = if on_gpu {
        ROUNDS_ON_GPU
    } else {
        (SAMPLE_BYTES / bytes).max(1)
    };

    let on_device = (on_gpu && measures)
        .then(|| Copies::new(Way::OnDevice, bytes))
        .transpose()?;
    let copied = if measures && !on_gpu { bytes } else { 0 };
    let source = vec![7u8; copied];
    let mut target = vec![0u8; copied];

    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..=args.options.repeats.min(10) {
        times[0].push(moves(rounds)? / rounds as u32);
        if let Some(copies) = &on_device {
            times[1].push(copies.time(rounds)?);
            continue;
        }
        let start = Instant::now();
        for _ in 0..rounds {
            target.copy_from_slice(std::hint::black_box(&source));
            std::hint::black_box(&mut target);
        }
        times[1].push(start.elapsed() / rounds as u32);
    }
    Ok(times.map(|times| times.into_iter().skip(1).collect()))
}

/// Returns two cases: `moved` with its ratio to plain copies of `bytes` bytes, and the plain
/// copies.
fn beside(moved: Case, args: &ReshardArgs, bytes: usize, plain: Vec<Duration>) -> [Case; 2] {
    if args.on.device == DeviceKind::Cuda {
        let plain = direct::case(Way::OnDevice, bytes, plain);
        return [moved.ratio_to("device_copy", &plain), plain];
    }
    let plain = Case::bandwidth(
        "memcpy",
        format!("{} MiB, 1 thread", bytes >> 20),
        bytes,
        plain,
    );
    [moved.beside(&plain), plain]
}

/// Measures plain copies by one thread per core, up to the number of devices that hold the array.
/// `None` on a machine with one core.
fn by_all_cores(args: &ReshardArgs, bytes: usize) -> Option<Case> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = cores.min(DEVICES / 2);
    (threads > 1).then(|| memcpy::plain(bytes, threads, args.options.repeats.clamp(1, 10)))
}
