//! Measures training steps of a pipeline, beside an ideal in which only the kernels take time.
//!
//! Each step alternates with its kernels alone, on all processes at the same time. Shared memory,
//! clock rates and noise so affect both. The ideal is the schedule's own order with these kernel
//! times and moves that cost nothing.

mod alone;
mod ideal;
mod job;
mod mlp;
mod stage;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use mpmd_core::Simulation;
use mpmd_core::prelude::Program;
use mpmd_launch::JobEnv;
use mpmd_schedule::{Action, ActionKind, Schedule};

use crate::case::{Case, show};
use crate::job::{check_transport, run_as_job};
use crate::options::{Carrier, Options};
use alone::Took;
use job::{Measured, Pace, Part};
use mlp::Shape;

/// If the elapsed time of kernels is more than this multiple of their CPU time, other programs were
/// using the cores.
const BUSY: f64 = 1.2;

#[derive(Args, Clone, Debug)]
pub(crate) struct PipelineArgs {
    #[command(flatten)]
    options: Options,
    /// Rows and columns of every matrix.
    #[arg(long, default_value_t = 512, value_parser = count(1 << 20))]
    dim: usize,
    /// Layers, divided evenly among the stages.
    #[arg(long, default_value_t = 4, value_parser = count(1 << 20))]
    layers: usize,
    /// Stages, each its own process.
    #[arg(long, default_value_t = 2, value_parser = count(256))]
    stages: usize,
    /// Rows of a microbatch.
    #[arg(long, default_value_t = 64, value_parser = count(1 << 20))]
    microbatch: usize,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8, value_parser = count(1 << 16))]
    microbatches: usize,
    /// Names of schedules: 1f1b, gpipe.
    #[arg(long, value_delimiter = ',', default_value = "1f1b,gpipe")]
    schedule: Vec<String>,
    /// The transport of the messages.
    #[arg(long, value_enum, default_value = "shm")]
    transport: Carrier,
    /// Number of steps before the first measured one.
    #[arg(long, default_value_t = 3)]
    warm_up: usize,
}

/// Parses a number from 1 to `most`. The limit keeps products of sizes from overflowing.
fn count(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// Measures the steps of each schedule and prints the results. Starts a job with a process per
/// stage, or works as one of its processes.
pub(super) fn pipeline(args: &PipelineArgs) -> Result<ExitCode> {
    let schedules = args.schedules()?;
    if let Some(env) = JobEnv::from_env()? {
        let stages = args.stages;
        ensure!(
            env.processes == stages,
            "{stages} stages need as many processes, not {}",
            env.processes
        );
        let mut p = Program::builder().devices(stages).from_env()?;
        check_transport(&p, args.transport.name())?;
        let first = p.process().0 == 0;
        let measured = measure(&mut p, args, &schedules)?;
        p.finish()?;
        if first {
            report(args, &schedules, &measured)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.transport == Carrier::Inproc {
        let simulation = Simulation::new(args.stages, args.stages);
        let mut results = simulation
            .run(|p| measure(p, args, &schedules))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        report(args, &schedules, &results.swap_remove(0))?;
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::from(run_as_job(args.stages, args.transport.name())?))
}

impl PipelineArgs {
    fn shape(&self) -> Shape {
        let Self { dim, layers, stages, microbatch: rows, microbatches, .. } = *self;
        Shape { dim, layers, stages, rows, microbatches }
    }

    fn pace(&self) -> Pace {
        Pace { warm_up: self.warm_up, repeats: self.options.repeats.max(1) }
    }

    /// Returns the schedules of `--schedule`. Fails if one does not exist or if other options are
    /// invalid.
    fn schedules(&self) -> Result<Vec<Schedule>> {
        let (layers, stages) = (self.layers, self.stages);
        ensure!(
            layers.is_multiple_of(stages),
            "{layers} layers cannot be spread evenly over {stages} stages"
        );
        let named = |name: &String| Ok(Schedule::named(name, stages, self.microbatches, Some(1))?);
        self.schedule.iter().map(named).collect()
    }
}

fn measure(
    p: &mut Program,
    args: &PipelineArgs,
    schedules: &[Schedule],
) -> mpmd_core::Result<Vec<Measured>> {
    let one = |schedule| job::measure(p, &args.shape(), schedule, args.pace());
    schedules.iter().map(one).collect()
}

/// Prints the results of all schedules. Fails if `--check` is given and a loss is wrong.
fn report(args: &PipelineArgs, schedules: &[Schedule], measured: &[Measured]) -> Result<()> {
    let mut cases = Vec::new();
    for (schedule, measured) in schedules.iter().zip(measured) {
        cases.extend(of_schedule(args, schedule, measured)?);
    }
    show(&cases, args.options.json);
    let median = |name| cases.iter().find(|case| case.name == name).map(|case| case.quantile(0.5));
    if let (Some(ideal), Some(quiet)) = (median("ideal"), median("quiet ideal"))
        && ideal > BUSY * quiet
    {
        eprintln!(
            "other programs took cores from the kernels alone: an efficiency measured now says \
             little"
        );
    }
    Ok(())
}

fn parameters(args: &PipelineArgs, schedule: &Schedule) -> String {
    let Shape { dim, layers, stages, rows, microbatches } = args.shape();
    let (name, transport) = (schedule.name(), args.transport.name());
    let (stage, per_stage) = (if stages == 1 { "stage" } else { "stages" }, layers / stages);
    format!(
        "{name}, {transport}, {stages} {stage} of {per_stage}x{dim}, {microbatches}x{rows} rows"
    )
}

/// Returns the output lines of one schedule.
fn of_schedule(args: &PipelineArgs, schedule: &Schedule, measured: &Measured) -> Result<Vec<Case>> {
    let (shape, parameters) = (args.shape(), parameters(args, schedule));
    let samples = &measured.samples;
    let steps: Vec<Duration> = samples.iter().map(|sample| sample.step).collect();
    let ideals = |clock: fn(&Took) -> u64| -> Result<Vec<Duration>> {
        samples.iter().map(|sample| ideal_of(schedule, &sample.parts, clock)).collect()
    };
    let (ideals, quiet) = (ideals(|took| took.wall)?, ideals(|took| took.own)?);
    let share = |(ideal, step): (&Duration, &Duration)| ideal.as_secs_f64() / step.as_secs_f64();
    let efficiency = ideals.iter().zip(&steps).map(share).collect();
    let case = |name, unit, samples: Vec<f64>| Case {
        name,
        parameters: parameters.clone(),
        unit,
        samples,
        beside: None,
    };
    let mut cases = vec![
        Case::micros("step", &*parameters, steps.iter().copied()),
        Case::micros("ideal", &*parameters, ideals.iter().copied()),
        Case::micros("quiet ideal", &*parameters, quiet),
        case("efficiency", "ratio", efficiency),
    ];
    for stage in 0..shape.stages {
        for (name, forward) in [("forward", true), ("backward", false)] {
            let times = samples.iter().flat_map(|sample| {
                let row = schedule.rows()[stage].iter().zip(&sample.parts[stage].actions);
                row.filter(move |(action, _)| (action.kind == ActionKind::Forward) == forward)
                    .map(|(_, time)| Duration::from_nanos(time.wall))
            });
            cases.push(Case::micros(name, format!("stage {stage}, {parameters}"), times));
        }
        let updates =
            samples.iter().map(|sample| Duration::from_nanos(sample.parts[stage].update.wall));
        cases.push(Case::micros("update", format!("stage {stage}, {parameters}"), updates));
    }
    let bytes =
        samples.iter().map(|sample| sample.parts.iter().map(|part| part.sent).sum::<u64>() as f64);
    cases.extend([
        case("moved", "bytes/step", bytes.collect()),
        case("loss", "mse", vec![f64::from(measured.loss)]),
    ]);
    Ok(cases)
}

/// Returns the length of an ideal step, in which only kernels take time. `parts` has the kernel
/// times by stage, and `clock` chooses elapsed or CPU time.
///
/// The threads' CPU time gives the ideal of a quiet machine. If the two clocks differ much, the
/// machine was busy, and an efficiency means little.
fn ideal_of(schedule: &Schedule, parts: &[Part], clock: fn(&Took) -> u64) -> Result<Duration> {
    let mut next: Vec<_> = parts.iter().map(|part| part.actions.iter()).collect();
    // The times of each rank are in its own order, in which its actions come.
    let time = |action: Action| {
        let took = next[schedule.rank_of(action.stage)].next();
        Duration::from_nanos(took.map(clock).unwrap_or_default())
    };
    Ok(ideal::makespan(schedule, time, |rank| Duration::from_nanos(clock(&parts[rank].update)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the measurements of a stage from elapsed nanoseconds; the CPU times are half of
    /// them.
    fn part(actions: [u64; 4], update: u64) -> Part {
        let took = |wall| Took { wall, own: wall / 2 };
        Part { actions: actions.map(took).to_vec(), update: took(update), ..Part::default() }
    }

    #[test]
    fn an_ideal_is_made_of_each_actions_own_time() {
        let schedule = Schedule::one_f_one_b(2, 2).unwrap();
        // Rank 0: F0 F1 B0 B1; rank 1: F0 B0 F1 B1.
        let parts = [part([2, 4, 20, 40], 10), part([8, 16, 6, 18], 200)];
        let of = |parts: &[Part], clock| ideal_of(&schedule, parts, clock).unwrap().as_nanos();
        // Rank 1: 2 + 8 + 16 + 6 + 18 = 50, and 200 for its update. Rank 0: B0 from 26 to 46, B1
        // from 50 to 90.
        assert_eq!(of(&parts, |took| took.wall), 250);
        assert_eq!(of(&parts, |took| took.own), 125);
        let parts = [part([2, 4, 20, 40], 10), part([8, 16, 6, 18], 0)];
        assert_eq!(of(&parts, |took| took.wall), 100);
    }
}
