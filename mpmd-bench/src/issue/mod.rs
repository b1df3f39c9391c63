//! Measures the time in which a process issues the steps of a job, call by call and replayed. Most
//! of these operations concern other processes only.
//!
//! Stand-ins simulate the other processes, and the measured process runs its own kernels on their
//! data.

mod peers;
mod step;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use mpmd_core::prelude::Program;
use mpmd_core::{Captured, ProcessId};

use crate::case::{Case, show};
use crate::options::Options;
use peers::Peers;
use step::{Given, Results, Steps};

#[derive(Args, Clone, Debug)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    options: Options,
    /// Processes, each with one device and one stage.
    #[arg(long, default_value_t = 64)]
    #[arg(value_parser = RangedU64ValueParser::<usize>::new().range(2..=4096))]
    ranks: usize,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 64)]
    #[arg(value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 16))]
    microbatches: usize,
    /// The measured process; by default the one in the middle.
    #[arg(long)]
    rank: Option<u32>,
}

/// Measures the time in which one process issues a step of a 1F1B schedule, as seen by its own
/// thread. Prints it for steps issued call by call and replayed.
///
/// If a step has more operations here than the program may run ahead, it takes as long as the
/// device needs for them.
pub(super) fn replay(args: &ReplayArgs) -> Result<ExitCode> {
    let (ranks, microbatches) = (args.ranks, args.microbatches);
    let rank = ProcessId(args.rank.unwrap_or(ranks as u32 / 2));
    ensure!(rank.index() < ranks, "--rank is one of the {ranks} ranks, from 0, not {rank}");
    let repeats = args.options.repeats.max(1);
    let peers = Peers::new(rank, ranks);
    let mut p = Program::builder().devices(ranks).over(peers.clone())?;
    let steps = Steps::new(&mut p, microbatches)?;
    let (operations, arrivals) = steps.arrivals(rank);
    let mut given = steps.given(&mut p)?;
    let mut timed =
        |p: &mut Program,
         issue: &mut dyn FnMut(&mut Program, Given) -> mpmd_core::Result<Results>| {
            // The messages that the other processes would have sent by then.
            peers.send(p.operations(), &arrivals);
            let taken = std::mem::take(&mut given);
            let inputs = taken.1.clone();
            let start = Instant::now();
            let sums = issue(p, taken)?;
            let took = start.elapsed();
            // The device catches up before the next step.
            sums[rank.index()].block_until_ready()?;
            given = (sums, inputs);
            Ok(took)
        };
    // The first step creates the plans.
    let mut issue = |p: &mut Program, x| steps.step(p, x);
    let first = timed(&mut p, &mut issue)?;
    let issued =
        (0..repeats).map(|_| timed(&mut p, &mut issue)).collect::<mpmd_core::Result<Vec<_>>>()?;
    let mut captured: Option<Captured<Given, Results>> = None;
    let capture = timed(&mut p, &mut |p, x| {
        let (sums, step) = p.capture(x, |p, x| steps.step(p, x))?;
        captured = Some(step);
        Ok(sums)
    })?;
    let captured = captured.expect("the step was captured");
    ensure!(
        captured.operations() == operations,
        "a step of {operations} operations has {captured:?}"
    );
    let mut again = |p: &mut Program, x| captured.replay(p, x);
    let replayed =
        (0..repeats).map(|_| timed(&mut p, &mut again)).collect::<mpmd_core::Result<Vec<_>>>()?;
    p.finish()?;
    let here = captured.operations_here();
    let job = format!("{ranks} ranks x {microbatches}, rank {rank}");
    let (all, own) =
        (format!("{job}, {operations} operations"), format!("{job}, {here} operations"));
    let cases = [
        Case::micros("first step", &all, [first]),
        Case::micros("step issued", &all, issued.iter().copied()),
        Case::micros("step captured", &all, [capture]),
        Case::micros("step replayed", &own, replayed.iter().copied()),
        per_operation("op issued", &all, issued.iter().map(|time| each_of(*time, operations))),
        per_operation("op replayed", &own, replayed.iter().map(|time| each_of(*time, here as u64))),
    ];
    show(&cases, args.options.json);
    Ok(ExitCode::SUCCESS)
}

/// Returns the microseconds of each of `count` operations that took `time` together.
fn each_of(time: Duration, count: u64) -> f64 {
    time.as_secs_f64() * 1e6 / count.max(1) as f64
}

/// Creates a case measured in microseconds, of an operation.
fn per_operation(
    name: &'static str,
    parameters: impl Into<String>,
    samples: impl IntoIterator<Item = f64>,
) -> Case {
    Case {
        name,
        parameters: parameters.into(),
        unit: "us",
        samples: samples.into_iter().collect(),
        beside: None,
    }
}
