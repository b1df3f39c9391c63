//! Measures proofs and simulations of schedules of many ranks and microbatches.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use mpmd_schedule::check::{Channel, Queues, check};
use mpmd_schedule::flow::{Flow, Leaves};
use mpmd_schedule::simulate::simulate_schedule;
use mpmd_schedule::{Builtin, Costs, Schedule, lower};

use crate::case::{Case, Output};
use crate::options::Options;

/// The goal for proof and simulation of a schedule with fewer than `LARGE` actions, in
/// microseconds.
const GOAL: f64 = 1e6;
/// The goal for proof and simulation of a larger schedule, in microseconds.
const LARGE_GOAL: f64 = 60e6;
/// The number of actions from which a schedule is large, and measured only once.
const LARGE: usize = 1 << 22;

/// Options of `mpmd bench check`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    options: Options,
    /// Ranks and microbatches; 1024x4096 takes some GiB
    #[arg(long, value_name = "PxM", value_delimiter = ',')]
    #[arg(default_values_t = ["64x1024".to_owned()])]
    sizes: Vec<String>,
    /// Names of schedules
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    #[arg(default_values_t = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"].map(str::to_owned))]
    schedules: Vec<String>,
}

/// Measures for each schedule: the proof over tags, the proof over a single queue, and proof and
/// simulation from the actions. Prints the results.
pub(crate) fn check_schedules(args: &CheckArgs) -> Result<()> {
    let mut cases = Output::new(args.options.json);
    for size in &args.sizes {
        let numbers =
            size.split_once('x').and_then(|(p, m)| Some((p.parse().ok()?, m.parse().ok()?)));
        let (ranks, microbatches) =
            numbers.with_context(|| format!("{size:?} is no size, as 64x1024"))?;
        for name in &args.schedules {
            let builtin =
                Builtin::named(name).with_context(|| format!("there is no schedule {name:?}"))?;
            let schedule = builtin.schedule(ranks, microbatches, builtin.default_chunks())?;
            measure(&schedule, size, args.options.repeats, &mut cases)?;
        }
    }
    cases.end();
    Ok(())
}

fn measure(schedule: &Schedule, size: &str, repeats: usize, cases: &mut Output) -> Result<()> {
    let actions: usize = schedule.rows().iter().map(Vec::len).sum();
    let (repeats, goal) = if actions < LARGE { (repeats, GOAL) } else { (1, LARGE_GOAL) };
    let parameters = |measured: &str| format!("{measured}, {} {size}", schedule.name());
    let flow = Flow::of_lowered(&lower(schedule)?, Leaves::InOrder)?;
    for channel in [Channel::TAGS, Channel::rendezvous(Queues::Single)] {
        let times = timed(repeats, || {
            ensure!(black_box(check(&flow, channel)).is_ok());
            Ok(())
        })?;
        cases.push(Case::micros("prove", parameters(&channel.to_string()), times));
    }
    drop(flow);
    let costs = Costs::units(schedule.stages());
    let times = timed(repeats, || {
        let flow = Flow::of_schedule(schedule)?;
        ensure!(check(&flow, Channel::TAGS).is_ok());
        drop(flow);
        let made = simulate_schedule(schedule, &costs, Leaves::InOrder, Channel::TAGS)?;
        ensure!(black_box(made.simulated.makespan) > 0.0);
        Ok(())
    })?;
    cases.push(Case::micros("prove, simulate", parameters("tags"), times).within(goal));
    Ok(())
}

fn timed(repeats: usize, mut what: impl FnMut() -> Result<()>) -> Result<Vec<Duration>> {
    let one = |_| {
        let start = Instant::now();
        what()?;
        Ok(start.elapsed())
    };
    (0..repeats.max(1)).map(one).collect()
}
