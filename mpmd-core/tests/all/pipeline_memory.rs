//! The memory of a step equals its plan, and nothing new is mapped after the third step. Time is
//! simulated, and passes are long: a program thread that is late would keep its arrays for longer.

use std::time::Duration;

use mpmd_base::block::thread;
use mpmd_core::pipeline::{Loss, Microbatch, MicrobatchShapes, Pipeline, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::{ProcessId, Simulation};

use crate::blank_stages::{Blank, Residuals, write};

/// Elements of an activation, and of a residual; `PARAMS` is the elements of a stage's parameters,
/// `RESIDUALS` the residuals of a pass.
const ACTIVATION: usize = 16 << 10;
const PARAMS: usize = 64 << 10;
const RESIDUALS: usize = 10;
const STEPS: usize = 16;
/// The seed of all jobs.
const SEED: u64 = 1;
/// Tolerance in bytes for the losses, which are added up one by one.
const SMALL: u64 = 4 << 10;

fn take(time: u64) -> Result<()> {
    thread::sleep(Duration::from_secs(time));
    Ok(())
}

/// Returns a stage whose passes sleep. It has residuals and split gradients, or it `keeps` its
/// inputs and has one backward pass.
fn pass<O>(keeps: bool) -> Blank<fn(u64) -> Result<()>, O> {
    // The first two stay; the others are released, and two are added.
    let residuals = Residuals { forward: RESIDUALS, weight: 4, kept: 2 };
    Blank::new(take, ACTIVATION, (!keeps).then_some(residuals))
}

/// A kernel in place of an optimizer: overwrites the parameters in place.
struct Update;

impl Kernel for Update {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (params, _): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(params.clone()).alias("0", ""))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        _: (View<'_>, View<'_>),
        mut params: ViewMut<'_>,
    ) -> Result<()> {
        take(1)?;
        write(&mut params)
    }
}

/// Memory of one process in bytes: the plan's expected peak and bound, and the measured peak.
#[derive(Debug)]
struct MeasuredPeak {
    expected: u64,
    at_most: u64,
    peak: u64,
    /// Bytes mapped after the third step, and after the last one.
    mapped: [u64; 2],
}

fn train(p: &mut Program, schedule: &Schedule, how: Options) -> Result<MeasuredPeak> {
    let count = schedule.stages();
    let ranks = p.mesh(&[("rank", schedule.ranks())])?.split("rank")?;
    let meshes: Vec<_> = (0..count).map(|stage| ranks[schedule.rank_of(stage)].clone()).collect();
    let params = meshes
        .iter()
        .map(|mesh| {
            p.array_from_fn(f32s([PARAMS]), mesh.replicated(), |_, mut view| write(&mut view))
        })
        .collect::<Result<Vec<_>>>()?;
    // Arrays that an optimiser would hold.
    let beside = meshes
        .iter()
        .map(|mesh| {
            p.array_from_fn(f32s([PARAMS / 2]), mesh.replicated(), |_, mut view| write(&mut view))
        })
        .collect::<Result<Vec<_>>>()?;
    let (last, mut params) = (count - 1, params.into_iter());
    let keeps = how == Options::KeepsInputs;
    let mut next = || params.next().expect("one for each stage");
    let pass_of = |stage: usize| pass(keeps).frozen(how == Options::Frozen && 2 * stage < count);
    let end = pass::<Loss<MpmdArray>>(keeps);
    let mut pipeline = if last == 0 {
        Pipeline::first(end, &meshes[0], next())?
    } else {
        let mut front = Pipeline::first(pass_of(0), &meshes[0], next())?;
        for (stage, mesh) in meshes.iter().enumerate().take(last).skip(1) {
            front = front.then(pass_of(stage), mesh, next())?;
        }
        front.then(end, &meshes[last], next())?
    };
    (0..count).for_each(|stage| pipeline.recompute(stage, how == Options::Again));
    pipeline.buffer_gradients(how == Options::InOrder);
    let updates = meshes
        .iter()
        .map(|mesh| p.jit(Update).on(mesh).outputs(mesh.replicated()).donate("0").build())
        .collect::<Result<Vec<_>>>()?;
    let shapes = MicrobatchShapes::new(f32s([ACTIVATION])).side(last, &f32s([ACTIVATION]));
    let plan = pipeline.memory(p, schedule, &shapes, &beside)?;
    pipeline.map_memory(p, schedule, &shapes, &beside)?;
    let planned = plan.of(p.topology().devices_of(p.process()));
    let mut found = MeasuredPeak {
        expected: planned.expected,
        at_most: planned.at_most,
        peak: 0,
        mapped: [0; 2],
    };
    for step in 0..3 + STEPS {
        let mut made = |mesh: &mpmd_core::topology::Mesh| {
            p.array_from_fn(f32s([ACTIVATION]), mesh.replicated(), |_, mut view| write(&mut view))
        };
        let batch = (0..schedule.microbatches())
            .map(|_| Ok(Microbatch::new(made(&meshes[0])?).side(last, made(&meshes[last])?)))
            .collect::<Result<Vec<_>>>()?;
        let output = pipeline.train_step(p, schedule, batch)?;
        for (stage, (update, gradients)) in updates.iter().zip(output.gradients).enumerate() {
            let Some((_, gradient)) = gradients.into_iter().next() else { continue };
            let params = pipeline.params(stage).remove(0).1;
            pipeline.set_params(stage, vec![update.call(p, (params, gradient))?])?;
        }
        p.step_end()?;
        // A frozen stage may begin the next step before the others have ended this one.
        if step == 2 || step == 2 + STEPS || how == Options::Frozen {
            output.loss.sum.block_until_ready()?;
            for stage in 0..count {
                pipeline
                    .params(stage)
                    .iter()
                    .try_for_each(|(_, array)| array.block_until_ready().map(drop))?;
            }
            for process in 0..p.processes() as u32 {
                p.broadcast_value(ProcessId(process), (), || Ok(()))?;
            }
        }
        if step == 2 || step == 2 + STEPS {
            found.mapped[usize::from(step > 2)] = p.memory().mapped;
            found.peak = p.memory().recent_peak + p.memory().staging_recent_peak;
            p.forget_memory_peak();
        }
    }
    Ok(found)
}

/// The pipeline's options: none, or one that changes its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Options {
    Plain,
    /// All forward passes are recomputed in the backward passes.
    Again,
    /// Gradients are buffered, and weight gradients are added in ascending order of microbatches.
    InOrder,
    /// Stages keep their inputs, and have one backward pass.
    KeepsInputs,
    /// The parameters of the lower half of the stages are frozen.
    Frozen,
}

/// Returns a line for each process with a measured peak more than 10 % from the expected one or
/// above the bound. Also one if its mapped memory changed during the steps.
fn off(simulation: &Simulation, schedule: &Schedule, how: Options, what: &str) -> Vec<String> {
    let mut off = Vec::new();
    let simulation = simulation.clone().seed(SEED).delays(SEED, Duration::ZERO);
    for (process, found) in simulation.run(|p| train(p, schedule, how)).into_iter().enumerate() {
        let found = found.unwrap();
        let MeasuredPeak { expected, at_most, peak, mapped } = found;
        let ratio = peak as f64 / expected as f64;
        let share = peak as f64 / at_most as f64;
        let line = format!(
            "{what}, process {process}: {ratio:.3} of what is expected, {share:.3} of the bound: \
             {found:?}"
        );
        // Frozen stages have no backward passes that pace them: only the bound holds.
        let most = if how == Options::Frozen { f64::INFINITY } else { 1.1 };
        let is_above = peak > at_most + SMALL;
        if !(0.9..=most).contains(&ratio) || is_above || mapped[0] != mapped[1] {
            off.push(line);
        }
    }
    off
}

#[test]
fn step_memory_matches_its_plan_and_stays_flat() {
    let mut all = Vec::new();
    for name in ["gpipe", "1f1b"] {
        for (stages, processes) in [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)] {
            let schedule = Schedule::named(name, stages, 8, None).unwrap();
            for zero_copy in [false, true] {
                let mut simulation = Simulation::new(processes, stages);
                if zero_copy {
                    simulation = simulation.zero_copy(&vec![0; processes]);
                }
                let how = if zero_copy { "handed over" } else { "copied" };
                let what = format!("{name}, {stages} stages, {processes} processes, {how}");
                all.extend(off(&simulation, &schedule, Options::Plain, &what));
            }
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn step_memory_matches_its_plan_with_several_stages_per_rank() {
    let mut all = Vec::new();
    for (name, chunks, how, ranks, processes) in [
        ("interleaved", 2, Options::Plain, 4, 4),
        ("zb-h1", 1, Options::Plain, 4, 2),
        ("zb1p", 2, Options::Plain, 2, 2),
        ("zbv", 2, Options::Plain, 4, 4),
        ("dualpipev", 2, Options::Plain, 4, 2),
        ("bfs", 2, Options::Plain, 2, 2),
        ("bfs", 2, Options::InOrder, 2, 1),
        ("1f1b", 1, Options::Again, 4, 4),
        ("zbv", 2, Options::Again, 2, 2),
    ] {
        let schedule = Schedule::named(name, ranks, 8, Some(chunks)).unwrap();
        let mut simulation = Simulation::new(processes, ranks);
        if processes == ranks {
            simulation = simulation.zero_copy(&vec![0; processes]);
        }
        let what = format!("{name}, {how:?}, {ranks} ranks, {processes} processes");
        all.extend(off(&simulation, &schedule, how, &what));
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn step_memory_matches_its_plan_with_frozen_stages() {
    let mut all = Vec::new();
    for (name, ranks, processes) in
        [("gpipe", 2, 1), ("1f1b", 4, 4), ("zb-h1", 4, 2), ("interleaved", 2, 2)]
    {
        let schedule = Schedule::named(name, ranks, 8, None).unwrap();
        for zero_copy in [false, true] {
            let mut simulation = Simulation::new(processes, ranks);
            if zero_copy {
                simulation = simulation.zero_copy(&vec![0; processes]);
            }
            let what = format!("{name}, {ranks} ranks, {processes} processes, {zero_copy}");
            all.extend(off(&simulation, &schedule, Options::Frozen, &what));
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn kept_inputs_are_part_of_the_planned_memory() {
    let mut all = Vec::new();
    for (name, ranks, processes) in
        [("gpipe", 2, 1), ("1f1b", 4, 4), ("1f1b", 2, 2), ("zb-h1", 2, 2), ("interleaved", 2, 2)]
    {
        let schedule = Schedule::named(name, ranks, 8, None).unwrap();
        for zero_copy in [false, true] {
            let mut simulation = Simulation::new(processes, ranks);
            if zero_copy {
                simulation = simulation.zero_copy(&vec![0; processes]);
            }
            let what = format!("{name}, {ranks} ranks, {processes} processes, {zero_copy}");
            all.extend(off(&simulation, &schedule, Options::KeepsInputs, &what));
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}
