//! Measures schedules with passes that take a set time and compute nothing, beside their
//! simulation.
//!
//! Two cores cannot compute for eight ranks at once, but they can wait for eight. So each schedule
//! shows the bubbles that it would have with a machine for each rank.

mod stage;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use mpmd_base::ProcessId;
use mpmd_core::pipeline::{Loss, Microbatch, Pipeline};
use mpmd_core::prelude::{MpmdArray, Program, f32s};
use mpmd_launch::JobEnv;
use mpmd_schedule::check::{Budget, Channel};
use mpmd_schedule::flow::Leaves;
use mpmd_schedule::simulate::simulate_schedule;
use mpmd_schedule::{Builtin, Costs, Schedule, StageCosts, by_cost, is_by_cost};

use crate::case::{Beside, Case, show};
use crate::job::{check_transport, run_as_job};
use crate::options::Carrier;
use stage::{ELEMENTS, Passes, Waits, WaitsLast};

#[derive(Args, Clone, Debug)]
pub(crate) struct SchedulesArgs {
    /// Print one line of JSON for each case instead of a table.
    #[arg(long)]
    json: bool,
    /// Number of measured steps of each schedule.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Ranks, each its own process.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: u16,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65536))]
    microbatches: u32,
    /// Stages on each rank; by default the schedule's own number.
    #[arg(long)]
    chunks: Option<usize>,
    /// Names of schedules; by default all that exist for these numbers. `ByCost` is the order that
    /// is found for the costs.
    #[arg(long, value_delimiter = ',')]
    schedule: Vec<String>,
    /// The length of a pass in milliseconds, if there is no file of costs.
    #[arg(long, default_value_t = 10.0)]
    unit_ms: f64,
    /// Costs of each stage in seconds, as TOML.
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Compute both gradients in one pass if the schedule has them as one. The gradient for the
    /// previous stage is then sent at the end of the pass, as the literature assumes.
    #[arg(long)]
    fused: bool,
    /// The maximum number of forward passes that a rank may hold at a time, for `ByCost`.
    #[arg(long)]
    activations: Option<u64>,
    /// The transport of the messages.
    #[arg(long, value_enum, default_value = "shm")]
    transport: Carrier,
}

/// A schedule to measure, with the costs of its stages in seconds.
struct Planned {
    schedule: Schedule,
    costs: Costs,
    fused: bool,
}

/// Measures the steps of each schedule and prints the results. Starts a job with a process per
/// rank, or works as one of its processes.
pub(super) fn schedules(args: &SchedulesArgs) -> Result<ExitCode> {
    let planned = args.planned()?;
    let ranks = usize::from(args.ranks);
    let Some(env) = JobEnv::from_env()? else {
        ensure!(args.transport != Carrier::Inproc, "every rank is a process of its own");
        return Ok(ExitCode::from(run_as_job(ranks, args.transport.name())?));
    };
    ensure!(env.processes == ranks, "{ranks} ranks need as many processes, not {}", env.processes);
    let mut p = Program::builder().devices(ranks).from_env()?;
    check_transport(&p, args.transport.name())?;
    let first = p.process() == ProcessId(0);
    let mut cases = Vec::with_capacity(planned.len());
    for planned in &planned {
        let steps = measure(&mut p, planned, args.repeats.max(1))?;
        let parameters = format!(
            "{}, {ranks} ranks of {}, {} microbatches, {}",
            planned.schedule.name(),
            planned.schedule.stages() / ranks,
            planned.schedule.microbatches(),
            args.transport.name()
        );
        let mut case = Case::micros("step", parameters, steps);
        case.beside = Some(Beside::Ratio("simulated", 1e6 * planned.simulated()?));
        cases.push(case);
    }
    p.finish()?;
    if first {
        show(&cases, args.json);
    }
    Ok(ExitCode::SUCCESS)
}

impl SchedulesArgs {
    /// Returns the schedules to measure, the same on every process. Fails if one does not exist, or
    /// if its simulated step takes an hour or more.
    fn planned(&self) -> Result<Vec<Planned>> {
        let (ranks, microbatches) = (usize::from(self.ranks), self.microbatches as usize);
        ensure!((0.0..=10_000.0).contains(&self.unit_ms), "a pass of {} ms", self.unit_ms);
        let file = self.costs.as_deref().map(read_costs).transpose()?;
        let chunks = match (&file, self.chunks) {
            (Some(costs), None) => Some(costs.stage.len() / ranks),
            (_, chunks) => chunks,
        };
        let costs = |schedule: &Schedule| match &file {
            Some(costs) => costs.clone(),
            None => {
                let pass = self.unit_ms / 1e3;
                let one = StageCosts {
                    forward: pass,
                    backward_input: pass,
                    backward_weight: pass,
                    ..StageCosts::default()
                };
                Costs { unit: "s".to_owned(), stage: vec![one; schedule.stages()] }
            }
        };
        let named = |name: &str| Schedule::named(name, ranks, microbatches, chunks);
        let all = || Builtin::ALL.iter().filter_map(|builtin| named(builtin.name()).ok());
        let mut planned = Vec::new();
        let names: Vec<&str> = self.schedule.iter().map(String::as_str).collect();
        let fixed: Vec<Schedule> = if names.is_empty() {
            all().filter(Schedule::has_backward).collect()
        } else {
            let fixed = names.iter().filter(|name| !is_by_cost(name));
            fixed.map(|name| named(name)).collect::<Result<_, _>>()?
        };
        for schedule in fixed {
            ensure!(schedule.has_backward(), "{} has no backward passes", schedule.name());
            let costs = costs(&schedule);
            ensure!(
                costs.stage.len() == schedule.stages(),
                "costs of {} stages, and {} has {}",
                costs.stage.len(),
                schedule.name(),
                schedule.stages()
            );
            planned.push(Planned { schedule, costs, fused: self.fused });
        }
        if names.iter().any(|name| is_by_cost(name)) {
            let budget = self.activations.map(Budget::Activations);
            let found = by_cost(ranks, microbatches, chunks, file.as_ref(), budget)?;
            let costs = costs(&found.schedule);
            planned.push(Planned { schedule: found.schedule, costs, fused: false });
        }
        // Checked before any process waits that long.
        for one in &planned {
            let seconds = one.simulated()?;
            ensure!(
                seconds < 3600.0,
                "a step of {} would take {seconds:.0} s",
                one.schedule.name()
            );
        }
        Ok(planned)
    }
}

impl Planned {
    /// Returns the simulated length of a step with these costs, in seconds.
    fn simulated(&self) -> Result<f64> {
        let leaves = if self.fused { Leaves::InOrder } else { Leaves::AtOnce };
        let simulated = simulate_schedule(&self.schedule, &self.costs, leaves, Channel::TAGS)?;
        Ok(simulated.simulated.makespan)
    }
}

/// Returns the lengths of `repeats` steps, after one that does not count. Each lasts from the
/// moment at which every process is ready until the first process knows that all are done.
fn measure(p: &mut Program, planned: &Planned, repeats: usize) -> Result<Vec<Duration>> {
    let Planned { schedule, costs, fused } = planned;
    let passes = |stage: usize| Passes { costs: costs.stage[stage], fused: *fused };
    let meshes = p.mesh(&[("rank", schedule.ranks())])?.split("rank")?;
    let mesh = |stage: usize| &meshes[schedule.rank_of(stage)];
    let last = schedule.stages() - 1;
    ensure!(last > 0, "a pipeline of one stage has no schedule to measure");
    let param = |p: &mut Program, stage: usize| {
        p.array_from_fn(f32s([1]), mesh(stage).replicated(), |_, mut w| Ok(w.fill(0.0f32)?))
    };
    let w = param(p, 0)?;
    let mut pipeline = Pipeline::first(Waits(passes(0)), mesh(0), w)?;
    for stage in 1..last {
        let w = param(p, stage)?;
        pipeline = pipeline.then(Waits(passes(stage)), mesh(stage), w)?;
    }
    let w = param(p, last)?;
    let mut pipeline: Pipeline<MpmdArray, Loss<MpmdArray>> =
        pipeline.then(WaitsLast(passes(last)), mesh(last), w)?;
    let host = MpmdArray::from_slice(&[ELEMENTS], &[1.0f32; ELEMENTS])?;
    let x = p.device_put(&host, mesh(0).replicated())?;
    let mut steps = Vec::with_capacity(repeats);
    // The first step connects, maps memory and warms up.
    for step in 0..=repeats {
        meet(p)?;
        let start = Instant::now();
        let microbatches =
            (0..schedule.microbatches()).map(|_| Microbatch::new(x.clone())).collect();
        let output = pipeline.train_step(p, schedule, microbatches)?;
        for (_, gradient) in output.gradients.iter().flatten() {
            gradient.block_until_ready()?;
        }
        // Each other process reports to the first one.
        for other in (1..p.processes()).rev() {
            p.broadcast_value(ProcessId(other as u32), (), || Ok(()))?;
        }
        if step > 0 {
            steps.push(start.elapsed());
        }
        check(&output.gradients, schedule)?;
    }
    Ok(steps)
}

/// Fails unless the gradients on this process show that each stage has seen every microbatch once.
fn check(gradients: &[Vec<(String, MpmdArray)>], schedule: &Schedule) -> Result<()> {
    for (stage, (_, gradient)) in gradients
        .iter()
        .enumerate()
        .flat_map(|(stage, all)| all.iter().map(move |one| (stage, one)))
    {
        if let Some(found) = gradient.to_host()? {
            let (found, expected) = (found.to_vec::<f32>()?[0], schedule.microbatches() as f32);
            ensure!(
                found == expected,
                "{}: stage {stage} saw {found} microbatches of {expected}",
                schedule.name()
            );
        }
    }
    Ok(())
}

/// Reads the costs of stages from a TOML file.
fn read_costs(path: &Path) -> Result<Costs> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| path.display().to_string())
}

fn meet(p: &mut Program) -> mpmd_core::Result<()> {
    (0..p.processes())
        .try_for_each(|process| p.broadcast_value(ProcessId(process as u32), (), || Ok(())))
}
