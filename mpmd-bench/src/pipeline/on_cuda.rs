//! Measures pipeline steps on GPUs: the idle time of their devices, beside the simulation.
//!
//! The times of kernels come from the devices' own clocks, which are recorded in a job's traces. So
//! each schedule runs as its own job, which writes a trace, and all figures come from it. The
//! simulation uses passes and moves of the traced lengths and nothing else.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use mpmd_core::Role;
use mpmd_core::prelude::Program;
use mpmd_launch::{Launch, OutputMode, variables};
use mpmd_record::trace::{ProcessTrace, Run};
use mpmd_schedule::Schedule;
use mpmd_schedule::timeline::{Kind, Timeline};

use super::{PipelineArgs, check, job, parameters};
use crate::case::{Case, show};

/// The figures of one schedule from the trace of its job.
#[derive(Debug)]
struct Measured {
    /// The seconds from the start of the first pass of each step to the end of its last pass.
    spans: Vec<f64>,
    /// The share of this time in which the devices compute no pass, in percent, for each step.
    idle: Vec<f64>,
    /// The share of the simulated step in which the devices compute no pass, in percent.
    simulated: f64,
}

/// Runs a traced job for each schedule, one after another, and prints the figures of the traces.
/// Returns the exit code of a job that fails.
pub(super) fn measure(args: &PipelineArgs, schedules: &[Schedule]) -> Result<ExitCode> {
    let mut cases = Vec::new();
    for schedule in schedules {
        let folder = tempfile::tempdir().context("making a folder for traces")?;
        let launch = Launch::new(args.stages, std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .args(["--only", schedule.name()])
            .transport(Some(args.transport.name().to_owned()))
            .env(variables::TRACE, folder.path())
            .output(OutputMode::Quiet0);
        let outcome = launch.run()?;
        if outcome.code() != 0 {
            return Ok(ExitCode::from(u8::try_from(outcome.code()).unwrap_or(1)));
        }
        let (traces, problems) = ProcessTrace::read_all(folder.path())?;
        let run = Run::merge(&traces, problems);
        let (first, last) = (args.warm_up as u64 + 1, args.steps() as u64);
        let run = run.of_steps(first..=last).map_err(anyhow::Error::msg)?;
        cases.extend(of_found(&parameters(args, schedule), &found(&run, args.stages)?));
    }
    show(&cases, args.options.json);
    Ok(ExitCode::SUCCESS)
}

/// Does the work of one process of a job of [`measure`]: runs the steps of the schedule named
/// `only`. With `--check`, process 0 fails if a loss is wrong.
pub(super) fn as_one(
    p: &mut Program,
    args: &PipelineArgs,
    schedules: &[Schedule],
    only: &str,
) -> Result<()> {
    let schedule = schedules.iter().find(|schedule| schedule.name() == only);
    let schedule = schedule.with_context(|| format!("--only {only} is none of the schedules"))?;
    let losses = job::steps(p, &args.shape(), schedule, args.learning_rate, args.steps())?;
    if args.check && p.process().0 == 0 {
        let mut expected = check::losses(&args.shape(), args.learning_rate, args.steps());
        if let (Some(last), Some(expect)) = (expected.last_mut(), args.expect) {
            *last = expect;
        }
        let off = check::first_off(&losses, &expected);
        ensure!(off.is_none(), "{}: {}", schedule.name(), off.unwrap_or_default());
    }
    Ok(())
}

fn of_found(parameters: &str, found: &Measured) -> [Case; 3] {
    let points = |name, samples| Case {
        name,
        parameters: parameters.to_owned(),
        unit: "points",
        samples,
        beside: None,
    };
    let simulated = points("simulated idle", vec![found.simulated]);
    let spans = found.spans.iter().map(|span| Duration::from_secs_f64(*span));
    let passes = Case::micros("passes", parameters, spans);
    [passes, points("idle", found.idle.clone()).over("simulation", &simulated), simulated]
}

/// Computes the figures of a traced run with `devices` devices. Fails if the trace has no passes or
/// no schedule.
fn found(run: &Run, devices: usize) -> Result<Measured> {
    let plan = run.plan().context("the trace is compared with the simulation of its schedule")?;
    let mut found =
        Measured { spans: Vec::new(), idle: Vec::new(), simulated: idle_of(&plan, devices) };
    for step in &run.steps {
        let passes = run.kernels.iter().filter(|kernel| {
            let operation = run.operations.get(&(kernel.process, kernel.op));
            let label = operation.and_then(|operation| operation.label);
            kernel.op > step.ops.0
                && kernel.op <= step.ops.1
                && label.is_some_and(|label| is_pass(label.role))
        });
        let spans: Vec<(f64, f64)> = passes.map(|kernel| (kernel.start, kernel.end)).collect();
        let (span, idle) = idle(&spans, devices);
        found.spans.push(span);
        found.idle.push(idle);
    }
    ensure!(found.spans.iter().any(|span| *span > 0.0), "the trace has no passes");
    Ok(found)
}

fn is_pass(role: Role) -> bool {
    matches!(role, Role::Forward | Role::BackwardInput | Role::BackwardWeight | Role::Recompute)
}

fn idle_of(plan: &Timeline, devices: usize) -> f64 {
    let kinds = [Kind::Forward, Kind::Backward, Kind::BackwardInput, Kind::BackwardWeight];
    let bars = plan.rows.iter().flat_map(|row| &row.bars).filter(|bar| kinds.contains(&bar.kind));
    idle(&bars.map(|bar| (bar.start, bar.end)).collect::<Vec<_>>(), devices).1
}

/// Returns (the time from the first start to the last end, the share of the devices' time outside
/// of all spans in percent). `spans` are (start, end) pairs.
fn idle(spans: &[(f64, f64)], devices: usize) -> (f64, f64) {
    let begin = spans.iter().map(|(begin, _)| *begin).fold(f64::INFINITY, f64::min);
    let end = spans.iter().map(|(_, end)| *end).fold(f64::NEG_INFINITY, f64::max);
    if end <= begin {
        return (0.0, 0.0);
    }
    let busy: f64 = spans.iter().map(|(begin, end)| end - begin).sum();
    (end - begin, 100.0 * (1.0 - busy / (devices as f64 * (end - begin))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_outside_of_passes_is_idle() {
        // Two devices are busy for 3 and 2 of 4 seconds.
        let (span, points) = idle(&[(1.0, 2.0), (3.0, 5.0), (2.0, 4.0)], 2);
        assert!((span - 4.0).abs() < 1e-9 && (points - 37.5).abs() < 1e-9, "{span} {points}");
        assert_eq!(idle(&[], 2), (0.0, 0.0));
    }
}
