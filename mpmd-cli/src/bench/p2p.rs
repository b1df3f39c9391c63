//! Arrays from one process to another.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use mpmd_core::launch::JobEnv;
use mpmd_core::prelude::{MpmdArray, Program};
use mpmd_core::sharding::Sharding;
use mpmd_core::{Simulation, aval};

use super::{Case, Options, run_as_job, show};

#[derive(Args, Clone, Debug)]
pub(crate) struct P2pArgs {
    #[command(flatten)]
    options: Options,
    /// What carries the messages: `tcp` between two processes, or `inproc` between two threads.
    #[arg(long, default_value = "tcp")]
    transport: String,
    /// Sizes for the bandwidth, in MiB.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64")]
    mib: Vec<usize>,
}

pub(super) fn p2p(args: &P2pArgs) -> Result<ExitCode> {
    if JobEnv::from_env()?.is_some() {
        let mut p = Program::from_env()?;
        measure(&mut p, args)?;
        p.finish()?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.transport == "inproc" {
        for result in Simulation::new(2, 2).run(|p| measure(p, args)) {
            result?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::from(run_as_job(2, &args.transport)?))
}

fn measure(p: &mut Program, args: &P2pArgs) -> mpmd_core::Result<()> {
    let devices = p.topology().device_ids().to_vec();
    let (here, there) = (Sharding::single_device(devices[0]), Sharding::single_device(devices[1]));
    let first = p.process().0 == 0;
    let mut cases = vec![latency(p, args, &here, &there)?];
    for mib in &args.mib {
        cases.push(stream(p, args, mib << 20, &here, &there)?);
    }
    if first {
        cases.extend(args.mib.iter().map(|mib| memcpy(args, mib << 20)));
        show(&cases, args.options.json);
    }
    Ok(())
}

/// Half the time of there and back of 8 bytes, between arrays.
fn latency(p: &mut Program, args: &P2pArgs, here: &Sharding, there: &Sharding) -> mpmd_core::Result<Case> {
    const ROUNDS: u32 = 50;
    let mut x = p.make(aval::f64s([]), here, |_, mut view| Ok(view.fill(1.0f64)?))?;
    x.block_until_ready()?;
    let mut times = Vec::new();
    for repeat in 0..=args.options.repeats {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            let y = p.device_put(&x, there)?;
            // Waits on the receiver too, so that the program on both sides takes part in every hop.
            y.block_until_ready()?;
            x = p.device_put(&y, here)?;
            x.block_until_ready()?;
        }
        if repeat > 0 {
            times.push(start.elapsed() / (2 * ROUNDS));
        }
    }
    Ok(Case::micros("put latency", format!("8 B, {}", args.transport), times))
}

/// Arrays of `bytes` one after another, until the last has arrived.
fn stream(
    p: &mut Program,
    args: &P2pArgs,
    bytes: usize,
    here: &Sharding,
    there: &Sharding,
) -> mpmd_core::Result<Case> {
    let arrays = (256 << 20) / bytes.max(16 << 20);
    let aval = aval::u8s([bytes]);
    let x = p.make(aval, here, |_, mut view| Ok(view.fill(7u8)?))?;
    x.block_until_ready()?;
    let done = p.make(aval::u8s([1]), there, |_, mut view| Ok(view.fill(1u8)?))?;
    let mut times = Vec::new();
    for repeat in 0..=args.options.repeats.min(10) {
        let start = Instant::now();
        let moved: Vec<MpmdArray> =
            (0..arrays).map(|_| p.device_put(&x, there)).collect::<mpmd_core::Result<_>>()?;
        for y in moved {
            y.block_until_ready()?;
        }
        // The receiver's word that all of it is there; put only after the program there has waited.
        p.device_put(&done, here)?.block_until_ready()?;
        if repeat > 0 {
            times.push(start.elapsed());
        }
    }
    let parameters = format!("{} MiB, {}", bytes >> 20, args.transport);
    Ok(Case::bandwidth("put bandwidth", parameters, arrays * bytes, times))
}

/// A plain copy of as many bytes, for comparison.
fn memcpy(args: &P2pArgs, bytes: usize) -> Case {
    let source = vec![7u8; bytes];
    let mut target = vec![0u8; bytes];
    let times: Vec<Duration> = (0..=args.options.repeats.min(10))
        .map(|_| {
            let start = Instant::now();
            target.copy_from_slice(&source);
            std::hint::black_box(&mut target);
            start.elapsed()
        })
        .skip(1)
        .collect();
    Case::bandwidth("memcpy", format!("{} MiB", bytes >> 20), bytes, times)
}
