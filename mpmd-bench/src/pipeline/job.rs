//! The work of each process of the job: steps of the pipeline and, alternately, its kernels alone.

use std::time::{Duration, Instant};

use mpmd_core::pipeline::{Loss, Microbatch, Pipeline};
use mpmd_core::prelude::*;
use mpmd_core::{Jit, ProcessId};
use mpmd_schedule::Schedule;
use serde::{Deserialize, Serialize};

use super::alone::{Alone, Took};
use super::mlp::{Shape, Values};
use super::stage::{Last, Layer, Middle, Update};

/// The numbers of steps of a measurement: unmeasured ones first, then measured ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) warm_up: usize,
    pub(super) repeats: usize,
}

/// The measurements of one schedule, the same on every process except for the times of steps.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) samples: Vec<Sample>,
    /// The mean loss of the last step.
    pub(super) loss: f32,
}

/// The learning rate, for the gradient of the mean loss.
const RATE: f64 = 0.01;

/// The measurements of one step: its time, and the times that it is compared with.
#[derive(Debug)]
pub(super) struct Sample {
    /// The time from the moment at which every process is ready until this process knows that all
    /// have ended the step.
    pub(super) step: Duration,
    /// The measurements of each process, in the order of processes. Process `i` has stage `i`.
    pub(super) parts: Vec<Part>,
}

/// The measurements of one process, for its stage and one step.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Part {
    /// The times of the kernels of each action, run alone, in the schedule's order.
    pub(super) actions: Vec<Took>,
    /// The time of the update's kernels, run alone.
    pub(super) update: Took,
    /// Payload bytes that the process sent to other processes in the step.
    pub(super) sent: u64,
}

/// Runs `pace.warm_up + pace.repeats` steps of one schedule, and after each step its kernels alone.
/// All processes must call this together; it blocks until all steps have ended.
///
/// # Errors
///
/// If an operation of the pipeline fails, or if there is no memory for the kernels alone.
pub(super) fn measure(
    p: &mut Program,
    shape: &Shape,
    schedule: &Schedule,
    pace: Pace,
) -> Result<Measured> {
    let mut job = Job::new(p, shape)?;
    let me = p.process().index();
    let mut alone = Alone::new(*shape, me)?;
    let (mut samples, mut mean) = (Vec::with_capacity(pace.repeats), 0.0);
    for step in 0..pace.warm_up + pace.repeats {
        meet(p)?;
        let before = sent(p);
        let start = Instant::now();
        let loss = job.step(p, schedule)?;
        // The first process waits for the others. It sends them nothing before the next step.
        for other in (1..p.processes()).rev() {
            agree(p, other, (), || Ok(()))?;
        }
        let step_time = start.elapsed();
        // Once all have met, each process has received everything: no byte of this step is still
        // to be counted. The kernels alone begin together, too.
        meet(p)?;
        let sent = sent(p) - before;
        let (actions, update) = alone.run(&schedule.rows()[me])?;
        let part = Part { actions, update, sent };
        mean = agree(p, shape.stages - 1, 0.0, || loss.mean())?;
        let parts = agree_all(p, part)?;
        if step >= pace.warm_up {
            samples.push(Sample { step: step_time, parts });
        }
    }
    Ok(Measured { samples, loss: mean })
}

/// Sends this process's `mine` to all others. Returns the values of all processes, in the order of
/// processes. All processes must call this together.
fn agree_all<T: Clone + Serialize + for<'a> Deserialize<'a>>(
    p: &mut Program,
    mine: T,
) -> Result<Vec<T>> {
    (0..p.processes()).map(|process| agree(p, process, mine.clone(), || Ok(mine.clone()))).collect()
}

/// Blocks until every process has called this.
fn meet(p: &mut Program) -> Result<()> {
    (0..p.processes()).try_for_each(|process| agree(p, process, (), || Ok(())))
}

fn agree<T: Serialize + for<'a> Deserialize<'a>>(
    p: &mut Program,
    from: usize,
    in_dry_run: T,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    p.broadcast_value(ProcessId(from as u32), in_dry_run, f)
}

/// Returns the payload bytes that this process has sent so far. The empty values of `meet` have
/// none.
fn sent(p: &Program) -> u64 {
    p.metrics().bytes_sent.iter().sum()
}

/// The pipeline, its data and its optimiser.
struct Job {
    stages: Pipeline<MpmdArray, Loss<MpmdArray>>,
    /// Inputs and labels by microbatch, the same in every step.
    data: Vec<(MpmdArray, MpmdArray)>,
    updates: Vec<Jit<Update>>,
}

/// The loss of one step. Only the process of the last stage can read it.
struct StepLoss(Loss<MpmdArray>);

impl StepLoss {
    fn mean(&self) -> Result<f32> {
        let value = |array: &MpmdArray| -> Result<f32> {
            let host =
                array.to_host()?.ok_or_else(|| Error::kernel("a loss on another process"))?;
            Ok(host.to_vec::<f32>()?[0])
        };
        Ok(value(&self.0.sum)? / value(&self.0.weight)?)
    }
}

impl Job {
    fn new(p: &mut Program, shape: &Shape) -> Result<Self> {
        let meshes = p.mesh(&[("stage", shape.stages)])?.split("stage")?;
        let (dim, per_stage, last) = (shape.dim, shape.layers_of_stage(), shape.stages - 1);
        let make = |p: &mut Program, stage: usize, aval: ShapedArray, values: Values| {
            p.array_from_fn(aval, meshes[stage].replicated(), move |_, mut view| {
                values.fill(dim, view.as_mut_slice()?);
                Ok(())
            })
        };
        let layers = |p: &mut Program, stage: usize| {
            (stage * per_stage..(stage + 1) * per_stage)
                .map(|layer| {
                    let w = make(p, stage, f32s([dim, dim]), Values::Matrix(layer))?;
                    Ok(Layer { w, b: make(p, stage, f32s([dim]), Values::Bias(layer))? })
                })
                .collect::<Result<Vec<_>>>()
        };
        let stages = if last == 0 {
            Pipeline::first(Last(*shape), &meshes[0], layers(p, 0)?)?
        } else {
            let mut stages = Pipeline::first(Middle(*shape), &meshes[0], layers(p, 0)?)?;
            for (stage, mesh) in meshes.iter().enumerate().take(last).skip(1) {
                stages = stages.then(Middle(*shape), mesh, layers(p, stage)?)?;
            }
            stages.then(Last(*shape), &meshes[last], layers(p, last)?)?
        };
        let data = (0..shape.microbatches)
            .map(|microbatch| {
                let aval = f32s([shape.rows, dim]);
                let x = make(p, 0, aval.clone(), Values::Input(microbatch))?;
                Ok((x, make(p, last, aval, Values::Labels(microbatch))?))
            })
            .collect::<Result<Vec<_>>>()?;
        // The gradients are sums over rows.
        let rate = RATE / (shape.rows * shape.microbatches) as f64;
        let updates = meshes
            .iter()
            .map(|mesh| {
                p.jit(Update(rate as f32)).on(mesh).outputs(mesh.replicated()).donate("0").build()
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { stages, data, updates })
    }

    /// Runs one training step and the update of all stages. Blocks until both have ended on this
    /// process.
    fn step(&mut self, p: &mut Program, schedule: &Schedule) -> Result<StepLoss> {
        let last = self.updates.len() - 1;
        let batch = self
            .data
            .iter()
            .map(|(x, labels)| Microbatch::new(x.clone()).side(last, labels.clone()));
        let output = self.stages.train_step(p, schedule, batch.collect())?;
        for (stage, (update, gradients)) in self.updates.iter().zip(output.gradients).enumerate() {
            let arrays = |named: Vec<(String, MpmdArray)>| {
                named.into_iter().map(|(_, array)| array).collect()
            };
            let (params, gradients): (Vec<_>, Vec<_>) =
                (arrays(self.stages.params(stage)), arrays(gradients));
            self.stages.set_params(stage, update.call(p, (params, gradients))?)?;
        }
        p.step_end()?;
        for stage in 0..=last {
            for (_, array) in self.stages.params(stage) {
                array.block_until_ready()?;
            }
        }
        output.loss.sum.block_until_ready()?;
        Ok(StepLoss(output.loss))
    }
}
