//! The job of the example `pipeline`: four stages of two matrix products each, every stage
//! tensor-parallel over two devices, trained by gradient descent.
//!
//! The code does not mention which process owns which device. The same calls run as one process, or
//! as eight processes with one device each.

mod check;
mod stages;

use std::marker::PhantomData;

pub use check::{CheckReport, check};
use mpmd::aval::ShapedArray;
use mpmd::pipeline::{Loss, Microbatch, Pipeline, Schedule};
use mpmd::prelude::*;
use mpmd::random::{Key, normal_f64, uniform_f64};
use mpmd::sharding::Sharding;
use mpmd::train::Sgd;
use mpmd::train::optimizer::Optimizer;
pub use stages::Number;
use stages::{Products, SquareError, StageWeights};

/// Number of stages of the pipeline.
const STAGES: usize = 4;
/// Number of devices of the job: two for each stage.
pub const DEVICES: usize = 8;
/// Learning rate with which the figures of [`check()`] were computed. It also suits random weights.
pub const LEARNING_RATE: f64 = 0.04;

/// The sizes, the learning rate and the initial values of a job.
#[derive(Clone, Debug)]
pub struct JobSettings {
    /// Columns of the activations, and rows and columns of the weights.
    pub width: usize,
    /// Rows of the whole batch.
    pub batch: usize,
    /// Microbatches of a step. The update uses the mean of their gradients.
    pub microbatches: usize,
    /// True if a microbatch is a slice of the batch. Otherwise each is the whole batch.
    pub slice: bool,
    /// Learning rate of gradient descent.
    pub learning_rate: f64,
    /// Initial weights and batch.
    pub start: InitialValues,
}

/// Initial weights and batch. Labels are seven times the inputs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum InitialValues {
    /// The values for which [`check`] knows the results.
    Check,
    /// Random values, for any width. Activations keep their size through the stages, so that the
    /// loss is finite.
    Random,
}

impl InitialValues {
    /// Returns element `[row, column]` of `WA` (`matrix` 0) or `WB` (`matrix` 1) of a stage: close
    /// to the identity.
    fn weight(self, [stage, matrix, row, column]: [usize; 4], width: usize) -> f64 {
        let noise = match self {
            Self::Check => {
                let [a, b, c] = if matrix == 0 { [3, 5, 2] } else { [5, 2, 3] };
                ((a * row + b * column + c * stage) % 7) as f64 / 20.0 - 3.0 / 20.0
            }
            Self::Random => {
                let key = Key(0x3ea7).fold_in((2 * stage + matrix) as u64);
                0.1 * normal_f64(key, (row * width + column) as u64) / (width as f64).sqrt()
            }
        };
        if row == column { 1.1 + noise } else { noise }
    }

    fn input(self, row: usize, column: usize, width: usize) -> f64 {
        let place = row * width + column;
        match self {
            Self::Check => (place + 1) as f64 / 32.0,
            // Up to one half, as in the check. Larger inputs would need a smaller learning rate.
            Self::Random => uniform_f64(Key(0x1297), place as u64) / 2.0,
        }
    }
}

/// A training job: the pipeline, its optimiser and its batch.
pub struct TrainingJob {
    pipeline: Pipeline<MpmdArray, Loss<MpmdArray>>,
    optimizer: Optimizer,
    schedule: Schedule,
    microbatches: Vec<LabelledInput>,
    learning_rate: f64,
}

/// The inputs and labels of one microbatch.
struct LabelledInput {
    /// The inputs, on the first stage.
    x: MpmdArray,
    /// The labels, on the last stage.
    labels: MpmdArray,
}

impl TrainingJob {
    /// Issues operations that create the weights and the batch on their devices.
    ///
    /// # Errors
    ///
    /// If the job does not have [`DEVICES`] devices, if the width is odd, or if `slice` is true and
    /// the microbatches do not divide the batch.
    pub fn new<T: Number>(p: &mut Program, settings: &JobSettings) -> Result<Self> {
        let JobSettings {
            width,
            batch,
            microbatches,
            slice,
            learning_rate,
            start,
        } = *settings;
        let meshes = p
            .mesh(&[("stage", STAGES), ("model", DEVICES / STAGES)])?
            .split("stage")?;

        let mut layer = |stage: usize| {
            // Each device has columns of `WA` and the same rows of `WB`.
            let specs = [spec![None, "model"], spec!["model", None]];
            let mut weights = |matrix: usize| {
                let sharding = meshes[stage].sharding(specs[matrix].clone());
                let element = move |i, j| start.weight([stage, matrix, i, j], width);
                filled::<T>(p, [width, width], &sharding, element)
            };
            Ok::<_, Error>(StageWeights {
                wa: weights(0)?,
                wb: weights(1)?,
            })
        };

        let last = STAGES - 1;
        let mut pipeline = Pipeline::first(Products::<T>(PhantomData), &meshes[0], layer(0)?)?;
        for (stage, mesh) in meshes.iter().enumerate().take(last).skip(1) {
            pipeline = pipeline.then(Products::<T>(PhantomData), mesh, layer(stage)?)?;
        }
        let pipeline = pipeline.then(SquareError::<T>(PhantomData), &meshes[last], layer(last)?)?;
        let optimizer = Optimizer::new(p, &pipeline, Sgd::default())?;
        let schedule = Schedule::gpipe(STAGES, microbatches)?;

        let mut data = |stage: usize, factor: f64| {
            let element = move |i, j| factor * start.input(i, j, width);
            let whole = filled::<T>(p, [batch, width], &meshes[stage].replicated(), element)?;
            match slice {
                true => whole.microbatches(p, 0, microbatches),
                false => Ok(vec![whole; microbatches]),
            }
        };
        let inputs = data(0, 1.0)?;
        let labels = data(last, 7.0)?;
        let microbatches = inputs
            .into_iter()
            .zip(labels)
            .map(|(x, labels)| LabelledInput { x, labels })
            .collect();
        Ok(Self {
            pipeline,
            optimizer,
            schedule,
            microbatches,
            learning_rate,
        })
    }

    /// Issues one step and returns at once. Returns (losses, figures), both on the last stage. The
    /// losses are those of each microbatch before the update. The figures are those of
    /// [`Optimizer::step`]; the first is the mean loss.
    ///
    /// # Errors
    ///
    /// If the job is known to have failed.
    pub fn step(&mut self, p: &mut Program) -> Result<(Vec<MpmdArray>, MpmdArray)> {
        let microbatches = self.microbatches.iter().map(|LabelledInput { x, labels }| {
            Microbatch::new(x.clone()).side(STAGES - 1, labels.clone())
        });

        let mut output = self
            .pipeline
            .train_step(p, &self.schedule, microbatches.collect())?;
        let losses = std::mem::take(&mut output.losses)
            .into_iter()
            .map(|loss| loss.sum);
        let losses = losses.collect();

        let figures = self
            .optimizer
            .step(p, &mut self.pipeline, output, self.learning_rate)?;
        p.step_end()?;
        Ok((losses, figures))
    }
}

/// Issues an operation that fills a matrix by a function of row and column, and returns without
/// waiting. Each process fills the shards of its own devices.
fn filled<T: Number>(
    p: &mut Program,
    shape: [usize; 2],
    sharding: &Sharding,
    element: impl Fn(usize, usize) -> f64 + Send + Sync + 'static,
) -> Result<MpmdArray> {
    let aval = ShapedArray::try_new(&shape, T::DTYPE)?;
    p.array_from_fn(aval, sharding, move |region, mut view| {
        let places = region
            .range(0)
            .flat_map(|row| region.range(1).map(move |column| (row, column)));
        for (value, (row, column)) in view.as_mut_slice::<T>()?.iter_mut().zip(places) {
            *value = T::from_double(element(row, column));
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_with_random_weights_is_finite_and_falls() {
        let settings = JobSettings {
            width: 64,
            batch: 16,
            microbatches: 4,
            slice: true,
            learning_rate: LEARNING_RATE,
            start: InitialValues::Random,
        };
        let job = |p: &mut Program| {
            let mut job = TrainingJob::new::<f32>(p, &settings)?;
            let mut means = Vec::new();
            for _ in 0..8 {
                let (_, figures) = job.step(p)?;
                means.extend(figures.to_host()?.map(|f| f.to_vec::<f64>()).transpose()?);
            }
            Ok(means.iter().map(|figures| figures[0]).collect::<Vec<_>>())
        };
        let means = mpmd::testing::simulate(2, DEVICES, 1, job);
        assert!(
            means[0].as_ref().unwrap().is_empty(),
            "the losses are the last stage's"
        );
        let means = means[1].as_ref().unwrap();
        assert!(means.iter().all(|loss| loss.is_finite()), "{means:?}");
        assert!(means[7] < means[0] / 2.0, "{means:?}");
    }
}
