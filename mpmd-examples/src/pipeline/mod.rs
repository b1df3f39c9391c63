//! The pipeline job: four stages of two matrix products each. Each stage is tensor-parallel over
//! two devices. Training is gradient descent, with the microbatches in GPipe's order.
//!
//! The code does not mention which process owns which device. The same calls run as one process, or
//! as eight processes with one device each.

mod check;
mod kernels;

use std::marker::PhantomData;

pub use check::{Report, check};
use kernels::{Backward, BackwardLoss, Forward, ForwardLoss, Mean, Update};
pub use kernels::{Layer, Meter, Number};
use mpmd::Jit;
use mpmd::aval::ShapedArray;
use mpmd::prelude::*;
use mpmd::random::{Key, normal_f64, uniform_f64};
use mpmd::sharding::Sharding;
use mpmd::topology::Mesh;

use crate::mm;

/// Number of stages of the pipeline.
pub const STAGES: usize = 4;
/// Number of devices of the job: two for each stage.
pub const DEVICES: usize = 8;

/// The sizes, the learning rate and the initial values of a job.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Columns of the activations, and rows and columns of the weights.
    pub width: usize,
    /// Rows of the whole batch.
    pub batch: usize,
    /// Microbatches of a step. Their gradients are summed.
    pub microbatches: usize,
    /// True if a microbatch is a slice of the batch. Otherwise each is the whole batch.
    pub slice: bool,
    /// Step size of the update.
    pub learning_rate: f64,
    /// Initial weights and batch.
    pub start: Start,
}

/// Initial weights and batch. Labels are seven times the inputs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Start {
    /// The values of the check job, [`mm`].
    Check,
    /// Random values, for any width.
    ///
    /// They are scaled so that activations keep their size through the stages. Weights from the
    /// standard normal distribution would multiply it by the square root of the width, eight times
    /// over. The loss would be useless in the first step and not finite after it.
    Random,
}

impl Start {
    fn wa(self, stage: usize, row: usize, column: usize, width: usize) -> f64 {
        match self {
            Self::Check => mm::initial_wa(stage, row, column),
            Self::Random => random_weight(2 * stage, row, column, width),
        }
    }

    fn wb(self, stage: usize, row: usize, column: usize, width: usize) -> f64 {
        match self {
            Self::Check => mm::initial_wb(stage, row, column),
            Self::Random => random_weight(2 * stage + 1, row, column, width),
        }
    }

    fn input(self, row: usize, column: usize, width: usize) -> f64 {
        match self {
            Self::Check => mm::input(row, column),
            // Up to one half, as in the check job. Larger inputs would need a smaller learning
            // rate.
            Self::Random => uniform_f64(Key(0x1297), (row * width + column) as u64) / 2.0,
        }
    }
}

/// Returns element `[row, column]` of random matrix number `matrix`, which is close to the
/// identity. The noise adds little to the size of the product, at any width.
fn random_weight(matrix: usize, row: usize, column: usize, width: usize) -> f64 {
    let noise = normal_f64(Key(0x3ea7).fold_in(matrix as u64), (row * width + column) as u64);
    let diagonal = if row == column { 1.1 } else { 0.0 };
    diagonal + 0.1 * noise / (width as f64).sqrt()
}

/// One forward or backward pass in the schedule.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Task {
    /// True for the backward pass.
    pub backward: bool,
    /// Index of the stage.
    pub stage: usize,
    /// Index of the microbatch.
    pub microbatch: usize,
}

/// Returns the GPipe schedule: all forward passes, then all backward passes. Passes that can run at
/// the same time on different stages are adjacent.
pub fn gpipe(stages: usize, microbatches: usize) -> Vec<Task> {
    let task = |backward| {
        move |i| Task { backward, stage: i % stages.max(1), microbatch: i / stages.max(1) }
    };
    let mut forward: Vec<_> = (0..stages * microbatches).map(task(false)).collect();
    forward.sort_by_key(|task| (task.microbatch + task.stage, task.stage));
    let mut backward: Vec<_> = (0..stages * microbatches).map(task(true)).collect();
    // In the backward pass, later stages come first.
    backward.sort_by_key(|task| {
        let from_last = stages - 1 - task.stage;
        (task.microbatch + from_last, from_last)
    });
    forward.extend(backward);
    forward
}

/// A training job: its stages, kernels and batch.
pub struct Pipeline<T: Number> {
    stages: Vec<Stage<T>>,
    forward_loss: Jit<ForwardLoss<T>>,
    backward_loss: Jit<BackwardLoss<T>>,
    mean: Jit<Mean<T>>,
    /// Inputs by microbatch, on the first stage.
    inputs: Vec<MpmdArray>,
    /// Labels by microbatch, on the last stage.
    labels: Vec<MpmdArray>,
    /// The number 1, the cotangent of the loss, on the last stage.
    one: MpmdArray,
    learning_rate: MpmdArray,
    meter: Meter,
}

struct Stage<T: Number> {
    mesh: Mesh,
    weights: Layer<MpmdArray>,
    forward: Jit<Forward<T>>,
    backward: Jit<Backward<T>>,
    update: Jit<Update<T>>,
}

impl<T: Number> Pipeline<T> {
    /// Issues the making of weights and batch, each on the devices that own them, and binds the
    /// kernels.
    ///
    /// # Errors
    ///
    /// If the job has not [`DEVICES`] devices, the width is odd, or `slice` is asked for and the
    /// microbatches do not divide the batch.
    pub fn new(p: &mut Program, settings: &Settings) -> Result<Self> {
        let Settings { width, batch, microbatches, start, .. } = *settings;
        let meshes = p.mesh(&[("stage", STAGES), ("model", DEVICES / STAGES)])?.split("stage")?;
        let meter = Meter::default();
        let mut stages = Vec::with_capacity(STAGES);
        for (s, mesh) in meshes.iter().enumerate() {
            let split = layer_sharding(mesh);
            let weights = Layer {
                wa: matrix::<T>(p, width, width, &split.wa, move |i, j| start.wa(s, i, j, width))?,
                wb: matrix::<T>(p, width, width, &split.wb, move |i, j| start.wb(s, i, j, width))?,
            };
            let forward =
                p.jit(Forward(meter.clone(), PhantomData)).on(mesh).outputs(mesh.replicated());
            let backward = p.jit(Backward(meter.clone(), PhantomData)).on(mesh);
            let update = p.jit(Update(meter.clone(), PhantomData)).on(mesh).outputs(&split);
            stages.push(Stage {
                mesh: mesh.clone(),
                weights,
                forward: forward.build()?,
                backward: backward.outputs((mesh.replicated(), &split)).donate("3").build()?,
                update: update.donate("0").donate("1").build()?,
            });
        }
        let (first, last) = (&meshes[0], &meshes[STAGES - 1]);
        let forward_loss = p.jit(ForwardLoss(meter.clone(), PhantomData)).on(last);
        let backward_loss = p.jit(BackwardLoss(meter.clone(), PhantomData)).on(last);
        let forward_loss = forward_loss.outputs(last.replicated()).build()?;
        let split = layer_sharding(last);
        let backward_loss =
            backward_loss.outputs((last.replicated(), &split)).donate("4").build()?;
        let mean = p.jit(Mean(PhantomData)).on(last).outputs(last.replicated()).build()?;

        let input = move |i, j| start.input(i, j, width);
        let inputs = matrix::<T>(p, batch, width, &first.replicated(), input)?;
        let labels =
            matrix::<T>(p, batch, width, &last.replicated(), move |i, j| 7.0 * input(i, j))?;
        let mut cut = |whole: &MpmdArray| match settings.slice {
            true => whole.microbatches(p, 0, microbatches),
            false => Ok(vec![whole.clone(); microbatches]),
        };
        let (inputs, labels) = (cut(&inputs)?, cut(&labels)?);
        let one = p.device_put(&MpmdArray::scalar(T::ONE), last.replicated())?;
        let learning_rate = MpmdArray::scalar(T::of(settings.learning_rate));
        Ok(Self {
            stages,
            forward_loss,
            backward_loss,
            mean,
            inputs,
            labels,
            one,
            learning_rate,
            meter,
        })
    }

    /// Issues one step and returns at once. Returns the loss of each microbatch before the step's
    /// update, as scalars on the last stage.
    ///
    /// # Errors
    ///
    /// If the job is known to have failed.
    pub fn step(&mut self, p: &mut Program) -> Result<Vec<MpmdArray>> {
        let mut gradients = Vec::with_capacity(STAGES);
        for stage in &self.stages {
            gradients.push(Some(stage.zeros(p)?));
        }
        // By stage and microbatch: the activations from the stage before, and the gradients from
        // the stage after.
        let mut xs = vec![self.inputs.iter().cloned().map(Some).collect::<Vec<_>>(); 1];
        xs.resize(STAGES, vec![None; self.inputs.len()]);
        let mut dys = vec![vec![None; self.inputs.len()]; STAGES];
        let mut losses = Vec::with_capacity(self.inputs.len());
        let missing = || Error::kernel("the schedule uses an activation that is not there");
        for Task { backward, stage: s, microbatch } in gpipe(STAGES, self.inputs.len()) {
            let (stage, last) = (&self.stages[s], s == STAGES - 1);
            let (weights, label) = (stage.weights.clone(), || self.labels[microbatch].clone());
            if !backward {
                let x = xs[s][microbatch].clone().ok_or_else(missing)?;
                if last {
                    losses.push(self.forward_loss.call(p, (weights, x, label()))?);
                } else {
                    let y = stage.forward.call(p, (weights, x))?;
                    xs[s + 1][microbatch] =
                        Some(p.device_put(&y, self.stages[s + 1].mesh.replicated())?);
                }
            } else {
                // Taken: this is the last use, so the next step can reuse the memory.
                let x = xs[s][microbatch].take().ok_or_else(missing)?;
                let sums = gradients[s].take().ok_or_else(missing)?;
                let (dx, sums) = if last {
                    self.backward_loss.call(p, (weights, x, label(), self.one.clone(), sums))?
                } else {
                    let dy = dys[s][microbatch].take().ok_or_else(missing)?;
                    stage.backward.call(p, (weights, x, dy, sums))?
                };
                gradients[s] = Some(sums);
                if s > 0 {
                    dys[s - 1][microbatch] =
                        Some(p.device_put(&dx, self.stages[s - 1].mesh.replicated())?);
                }
            }
        }
        for (stage, sums) in self.stages.iter_mut().zip(gradients) {
            let sums = sums.ok_or_else(missing)?;
            stage.weights =
                stage.update.call(p, (stage.weights.clone(), sums, self.learning_rate.clone()))?;
        }
        p.step_end()?;
        Ok(losses)
    }

    /// Issues the mean of a step's losses, on the last stage, and returns at once.
    ///
    /// # Errors
    ///
    /// If there are no losses.
    pub fn mean(&self, p: &mut Program, losses: Vec<MpmdArray>) -> Result<MpmdArray> {
        self.mean.call(p, losses)
    }

    /// Returns the weights of a stage after the steps issued so far.
    pub fn weights(&self, stage: usize) -> &Layer<MpmdArray> {
        &self.stages[stage].weights
    }

    /// Waits until this process has finished its part of all work issued so far.
    ///
    /// # Errors
    ///
    /// If a part of that work failed.
    pub fn block_until_ready(&self) -> Result<()> {
        for array in self.stages.iter().flat_map(|stage| stage.weights.leaves()) {
            array.block_until_ready()?;
        }
        Ok(())
    }

    /// Returns the meter of the time spent in this process's kernels.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }
}

impl<T: Number> Stage<T> {
    fn zeros(&self, p: &mut Program) -> Result<Layer<MpmdArray>> {
        let split = layer_sharding(&self.mesh);
        let zeros = |_: &Region, mut view: ViewMut<'_>| Ok(view.fill(T::ZERO)?);
        Ok(Layer {
            wa: p.array_from_fn(self.weights.wa.aval().clone(), &split.wa, zeros)?,
            wb: p.array_from_fn(self.weights.wb.aval().clone(), &split.wb, zeros)?,
        })
    }
}

/// Returns the shardings of a stage's weights: columns of `WA` and rows of `WB` are split, so that
/// each device uses its own part of `x WA`.
fn layer_sharding(mesh: &Mesh) -> Layer<Sharding> {
    Layer { wa: mesh.sharding(spec![None, "model"]), wb: mesh.sharding(spec!["model", None]) }
}

/// Issues the making of a matrix from a function of row and column, and returns without waiting.
/// Owners fill their own parts.
fn matrix<T: Number>(
    p: &mut Program,
    rows: usize,
    columns: usize,
    sharding: &Sharding,
    element: impl Fn(usize, usize) -> f64 + Send + Sync + 'static,
) -> Result<MpmdArray> {
    let aval = ShapedArray::try_new(&[rows, columns], T::DTYPE)?;
    p.array_from_fn(aval, sharding, move |region, mut view| {
        let places =
            region.range(0).flat_map(|row| region.range(1).map(move |column| (row, column)));
        for (value, (row, column)) in view.as_mut_slice::<T>()?.iter_mut().zip(places) {
            *value = T::of(element(row, column));
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(stages: usize, microbatches: usize) -> String {
        let name = |task: &Task| {
            let direction = if task.backward { 'B' } else { 'F' };
            format!("{direction}{}.{}", task.stage, task.microbatch)
        };
        gpipe(stages, microbatches).iter().map(name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn gpipe_follows_the_diagonals() {
        assert_eq!(
            text(4, 4),
            "F0.0 F0.1 F1.0 F0.2 F1.1 F2.0 F0.3 F1.2 F2.1 F3.0 F1.3 F2.2 F3.1 F2.3 F3.2 F3.3 \
             B3.0 B3.1 B2.0 B3.2 B2.1 B1.0 B3.3 B2.2 B1.1 B0.0 B2.3 B1.2 B0.1 B1.3 B0.2 B0.3"
        );
        assert_eq!(text(2, 3), "F0.0 F0.1 F1.0 F0.2 F1.1 F1.2 B1.0 B1.1 B0.0 B1.2 B0.1 B0.2");
    }

    #[test]
    fn loss_with_random_weights_is_finite_and_falls() {
        let settings = Settings {
            width: 64,
            batch: 16,
            microbatches: 4,
            slice: true,
            learning_rate: 0.01,
            start: Start::Random,
        };
        let job = |p: &mut Program| {
            let mut job = Pipeline::<f32>::new(p, &settings)?;
            let mut means = Vec::new();
            for _ in 0..8 {
                let losses = job.step(p)?;
                let mean = job.mean(p, losses)?;
                means.extend(mean.to_host()?.map(|mean| mean.to_vec::<f32>()).transpose()?);
            }
            Ok(means.concat())
        };
        let means = mpmd::testing::simulate(2, DEVICES, 1, job);
        assert!(means[0].as_ref().unwrap().is_empty(), "the losses are the last stage's");
        let means = means[1].as_ref().unwrap();
        assert!(means.iter().all(|loss| loss.is_finite()), "{means:?}");
        assert!(means[7] < means[0] / 2.0, "{means:?}");
    }
}
