//! Runs the kernels alone, on plain buffers: without operations, transfers or waits.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use mpmd_core::{Error, Result};
use mpmd_schedule::{Action, ActionKind};
use mpmd_transport::memory::{OwnedBuffer, Pool};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::mlp::{self, Shape, Values, Weights};

/// One stage's kernels with their own memory, to be run without the framework.
pub(super) struct Alone {
    shape: Shape,
    stage: usize,
    pool: Pool,
    weights: Vec<(Floats, Floats)>,
    gradients: Vec<(Floats, Floats)>,
    /// The input of each pass; `y` is the output. There is one of each, so their memory is warm.
    x: Floats,
    y: Floats,
    /// The gradient of the output; on the last stage, the labels.
    dy: Floats,
    dx: Floats,
    /// The residuals of each microbatch from its forward pass until its weight gradient is
    /// computed.
    kept: Vec<Option<Kept>>,
    /// Residuals for reuse. The one freed last is reused first.
    free: Vec<Kept>,
}

/// The residuals of one microbatch: the inputs of the layers, and the gradients of their outputs.
struct Kept {
    inputs: Vec<Floats>,
    gradients: Vec<Floats>,
}

/// A slice of `f32` with the alignment of arrays. The start of a matrix within a cache line affects
/// the speed of a product.
struct Floats(OwnedBuffer);

impl Floats {
    fn new(pool: &Pool, values: &[f32]) -> Result<Self> {
        let buffer = pool.allocate(size_of_val(values));
        let buffer =
            buffer.map_err(|error| Error::Environment(format!("memory of the bench: {error}")))?;
        let mut floats = Self(buffer);
        floats.copy_from_slice(values);
        Ok(floats)
    }

    fn zeros(pool: &Pool, len: usize) -> Result<Self> {
        Self::new(pool, &vec![0.0; len])
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        bytemuck::cast_slice(&self.0)
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// A measured time, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct Took {
    /// Elapsed time in nanoseconds.
    pub(super) wall: u64,
    /// CPU time of the measuring thread in nanoseconds, without waits for a core.
    pub(super) own: u64,
}

/// The readings of (elapsed time, this thread's CPU time) at one moment.
struct Clocks(Instant, Duration);

impl Clocks {
    fn now() -> Self {
        let own = clock_gettime(ClockId::ThreadCPUTime);
        // A thread's CPU time is not negative, and its nanoseconds are less than a second.
        Self(Instant::now(), Duration::new(own.tv_sec as u64, own.tv_nsec as u32))
    }

    fn elapsed(&self) -> Took {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let wall = nanos(self.0.elapsed());
        Took { wall, own: nanos(Self::now().1.saturating_sub(self.1)) }
    }
}

impl Alone {
    /// Allocates and fills the arrays of a stage, except for residuals, which `run` allocates.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    pub(super) fn new(shape: Shape, stage: usize) -> Result<Self> {
        let (dim, len, layers) = (shape.dim, shape.activations(), shape.layers_of_stage());
        let (first, pool) = (stage * layers, Pool::new("alone", None));
        let of = |values: Values, len| Floats::new(&pool, &values.vec(dim, len));
        let weights = (first..first + layers).map(|layer| {
            Ok((of(Values::Matrix(layer), dim * dim)?, of(Values::Bias(layer), dim)?))
        });
        let gradients =
            (0..layers).map(|_| Ok((Floats::zeros(&pool, dim * dim)?, Floats::zeros(&pool, dim)?)));
        Ok(Self {
            shape,
            stage,
            weights: weights.collect::<Result<_>>()?,
            gradients: gradients.collect::<Result<_>>()?,
            x: of(Values::Input(0), len)?,
            y: Floats::zeros(&pool, len)?,
            dy: of(Values::Labels(0), len)?,
            dx: Floats::zeros(&pool, len)?,
            kept: (0..shape.microbatches).map(|_| None).collect(),
            free: Vec::new(),
            pool,
        })
    }

    /// Runs the kernels of the actions of `order`, then those of an update that changes no weights.
    /// Returns (the time of each action in that order, the time of the update).
    ///
    /// # Errors
    ///
    /// If there is not enough memory for the microbatches in flight.
    pub(super) fn run(&mut self, order: &[Action]) -> Result<(Vec<Took>, Took)> {
        let mut first = true;
        let times = order
            .iter()
            .map(|action| {
                let start = Clocks::now();
                match action.kind {
                    ActionKind::Forward => self.forward(action.microbatch)?,
                    ActionKind::BackwardInput => self.backward_input(action.microbatch),
                    ActionKind::BackwardWeight => {
                        self.backward_weight(action.microbatch, &mut first)
                    }
                    _ => {
                        self.backward_input(action.microbatch);
                        self.backward_weight(action.microbatch, &mut first);
                    }
                }
                Ok(start.elapsed())
            })
            .collect::<Result<_>>()?;
        let start = Clocks::now();
        for ((w, b), (dw, db)) in self.weights.iter_mut().zip(&self.gradients) {
            // A rate of 0 takes as long, and the next run computes with the same values.
            mlp::update(w, dw, 0.0);
            mlp::update(b, db, 0.0);
        }
        Ok((times, start.elapsed()))
    }

    fn is_last(&self) -> bool {
        self.stage + 1 == self.shape.stages
    }

    fn forward(&mut self, microbatch: usize) -> Result<()> {
        let (len, layers) = (self.shape.activations(), self.weights.len());
        let new = || (0..layers).map(|_| Floats::zeros(&self.pool, len)).collect::<Result<_>>();
        let mut kept = match self.free.pop() {
            Some(kept) => kept,
            None => Kept { inputs: new()?, gradients: new()? },
        };
        let mut inputs: Vec<&mut [f32]> =
            kept.inputs.iter_mut().map(|input| &mut **input).collect();
        let output = &mut kept.gradients[layers - 1];
        mlp::forward(&self.shape, &borrowed(&self.weights), &self.x, &mut inputs, output);
        if self.is_last() {
            std::hint::black_box(mlp::loss(&self.shape, output, &self.dy));
        } else {
            self.y.copy_from_slice(output);
        }
        self.kept[microbatch] = Some(kept);
        Ok(())
    }

    fn backward_input(&mut self, microbatch: usize) {
        let last = self.is_last();
        let Some(kept) = &mut self.kept[microbatch] else { return };
        if let Some(output) = kept.gradients.last_mut() {
            if last {
                output.iter_mut().for_each(|d| *d *= std::hint::black_box(1.0));
            } else {
                mlp::through_relu(output, &self.dy);
            }
        }
        let inputs: Vec<&[f32]> = kept.inputs.iter().map(|input| &**input).collect();
        let mut gradients: Vec<&mut [f32]> =
            kept.gradients.iter_mut().map(|gradient| &mut **gradient).collect();
        let dx = (self.stage > 0).then_some(&mut *self.dx);
        mlp::backward_input(&self.shape, &borrowed(&self.weights), &inputs, &mut gradients, dx);
    }

    fn backward_weight(&mut self, microbatch: usize, first: &mut bool) {
        let Some(kept) = self.kept[microbatch].take() else { return };
        if std::mem::take(first) {
            for (dw, db) in &mut self.gradients {
                dw.fill(0.0);
                db.fill(0.0);
            }
        }
        for (at, (dw, db)) in self.gradients.iter_mut().enumerate() {
            mlp::backward_weight(&self.shape, &kept.inputs[at], &kept.gradients[at], dw, db);
        }
        self.free.push(kept);
    }
}

fn borrowed(weights: &[(Floats, Floats)]) -> Vec<Weights<'_>> {
    weights.iter().map(|(w, b)| (&**w, &**b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_schedule::Schedule;

    #[test]
    fn every_action_has_a_time_and_memory_is_used_again() {
        let shape = Shape { dim: 8, layers: 4, stages: 2, rows: 3, microbatches: 6 };
        for (schedule, most) in [
            (Schedule::one_f_one_b(2, 6).unwrap(), [2, 1]),
            (Schedule::gpipe(2, 6).unwrap(), [6, 6]),
        ] {
            for (stage, most) in most.into_iter().enumerate() {
                let mut alone = Alone::new(shape, stage).unwrap();
                let weights = |alone: &Alone| {
                    alone.weights.iter().flat_map(|(w, _)| w.to_vec()).collect::<Vec<_>>()
                };
                let before = weights(&alone);
                for _ in 0..2 {
                    let (times, _) = alone.run(&schedule.rows()[stage]).unwrap();
                    assert_eq!(times.len(), 12);
                    assert!(alone.kept.iter().all(Option::is_none));
                    assert_eq!(alone.free.len(), most, "{} stage {stage}", schedule.name());
                }
                assert_eq!(weights(&alone), before);
                assert!(alone.gradients.iter().all(|(dw, _)| dw.iter().any(|d| *d != 0.0)));
            }
        }
    }
}
