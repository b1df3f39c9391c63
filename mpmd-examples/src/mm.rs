//! The arithmetic of the pipeline job: stages of two matrix products, the mean square error, and
//! their gradients.
//!
//! A stage is `y = x WA WB`, with `x` and `y` of shape `[rows, width]`. Under tensor parallelism a
//! device holds some columns of `WA` and the same rows of `WB`. Its result for `y`, and for the
//! gradient of `x`, is then one summand. The sum over the devices is the full result. The functions
//! here serve both cases: `hidden` is the number of those columns on the device.
//!
//! # The check job
//!
//! [`reference_run`] trains a small fixed instance in one process and uses only this module. The
//! distributed job must reproduce these properties:
//!
//! - The loss of a microbatch is the mean square over *its own* elements. The gradients of the
//!   microbatches are **summed**, not averaged, before the update.
//! - Unsliced, each of the [`MICROBATCHES`] microbatches is the whole batch of [`BATCH`] rows. All
//!   their losses are equal, and the summed gradient is `MICROBATCHES` times that of the batch.
//! - Sliced, microbatch `m` is row `m` alone. Its mean is over `1/BATCH` of the elements, so each
//!   row weighs `BATCH` times as much as in the loss of the batch. `MICROBATCHES` equals `BATCH`,
//!   so the two factors are equal. The summed gradients and all weights are then the same with and
//!   without slicing, up to rounding. The mean of the sliced losses is the unsliced loss.
//! - The losses of a step are those before its update.

use crate::math::{Real, matmul, matmul_nt, matmul_tn};

/// Number of stages of the check job.
pub const STAGES: usize = 4;
/// Number of microbatches in a step of the check job.
pub const MICROBATCHES: usize = 4;
/// Number of rows in the whole batch of the check job.
pub const BATCH: usize = 4;
/// Width of the activations, and of both weights, of the check job.
pub const WIDTH: usize = 4;
/// Step size of plain gradient descent in the check job.
pub const LEARNING_RATE: f64 = 0.01;

/// The sizes of the arrays of a stage on one device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StageShape {
    /// Rows of the microbatch.
    pub rows: usize,
    /// Width of the stage's input and output.
    pub width: usize,
    /// Columns of `WA`, and rows of `WB`, on this device.
    pub hidden: usize,
}

impl StageShape {
    /// Returns the number of elements of the stage's input, which is also that of its output.
    pub fn activations(&self) -> usize {
        self.rows * self.width
    }

    /// Returns the number of elements of the product `x WA`.
    pub fn hidden_activations(&self) -> usize {
        self.rows * self.hidden
    }

    /// Returns the number of elements of `WA` on this device, which is also that of `WB`.
    pub fn weights(&self) -> usize {
        self.width * self.hidden
    }
}

/// Computes `h = x WA` and `y = h WB`.
///
/// Shapes: `x` and `y` `[rows, width]`, `h` `[rows, hidden]`, `wa` `[width, hidden]`, `wb`
/// `[hidden, width]`. With a part of the hidden columns, `y` is one summand of the output.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn stage_forward<T: Real>(
    shape: StageShape,
    y: &mut [T],
    h: &mut [T],
    x: &[T],
    wa: &[T],
    wb: &[T],
) {
    let StageShape { rows, width, hidden } = shape;
    matmul(h, x, wa, rows, width, hidden, false);
    matmul(y, h, wb, rows, hidden, width, false);
}

/// Computes `dh = dy WBᵀ` and `dx = dh WAᵀ`: the gradients of `h = x WA` and of the stage's input,
/// from `dy`, the gradient of the stage's output.
///
/// Shapes are as in [`stage_forward`]. With a part of the hidden columns, `dx` is one summand.
/// [`stage_backward_weights`] needs `dh`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn stage_backward_input<T: Real>(
    shape: StageShape,
    dx: &mut [T],
    dh: &mut [T],
    dy: &[T],
    wa: &[T],
    wb: &[T],
) {
    let StageShape { rows, width, hidden } = shape;
    matmul_nt(dh, dy, wb, rows, width, hidden, false);
    matmul_nt(dx, dh, wa, rows, hidden, width, false);
}

/// Adds the gradients of the weights: `dwa += xᵀ dh`, `dwb += hᵀ dy`.
///
/// `h` is from [`stage_forward`] and `dh` from [`stage_backward_input`]. The gradients have the
/// shapes of the weights.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn stage_backward_weights<T: Real>(
    shape: StageShape,
    dwa: &mut [T],
    dwb: &mut [T],
    x: &[T],
    h: &[T],
    dh: &[T],
    dy: &[T],
) {
    let StageShape { rows, width, hidden } = shape;
    matmul_tn(dwa, x, dh, width, rows, hidden, true);
    matmul_tn(dwb, h, dy, hidden, rows, width, true);
}

/// Returns the mean of the squared differences over all elements, or zero without elements.
///
/// # Panics
///
/// Panics if the two differ in length.
pub fn mean_square_error<T: Real>(y: &[T], labels: &[T]) -> T {
    assert_eq!(y.len(), labels.len(), "outputs and labels");
    if y.is_empty() {
        return T::ZERO;
    }
    let sum: T = y.iter().zip(labels).map(|(y, label)| (*y - *label) * (*y - *label)).sum();
    sum / T::of(y.len() as f64)
}

/// Computes the gradient of [`mean_square_error`] with respect to `y`, times `cotangent`. The
/// cotangent is the gradient of the final result with respect to this loss: one if the loss is the
/// final result.
///
/// # Panics
///
/// Panics if the slices differ in length.
pub fn mean_square_error_gradient<T: Real>(dy: &mut [T], y: &[T], labels: &[T], cotangent: T) {
    assert_eq!((dy.len(), labels.len()), (y.len(), y.len()), "gradient, labels and outputs");
    let scale = cotangent * T::of(2.0 / y.len() as f64);
    for ((dy, y), label) in dy.iter_mut().zip(y).zip(labels) {
        *dy = scale * (*y - *label);
    }
}

/// Updates weights by plain gradient descent: `w -= learning_rate * gradient`.
///
/// # Panics
///
/// Panics if the two differ in length.
pub fn descend<T: Real>(w: &mut [T], gradient: &[T], learning_rate: T) {
    assert_eq!(w.len(), gradient.len(), "weights and gradient");
    for (w, gradient) in w.iter_mut().zip(gradient) {
        *w -= learning_rate * *gradient;
    }
}

/// Returns element `[row, column]` of the initial `WA` of a stage of the check job.
pub fn initial_wa(stage: usize, row: usize, column: usize) -> f64 {
    ((3 * row + 5 * column + 2 * stage) % 7) as f64 / 20.0 - 3.0 / 20.0 + diagonal(row, column)
}

/// Returns element `[row, column]` of the initial `WB` of a stage of the check job.
pub fn initial_wb(stage: usize, row: usize, column: usize) -> f64 {
    ((5 * row + 2 * column + 3 * stage) % 7) as f64 / 20.0 - 3.0 / 20.0 + diagonal(row, column)
}

/// Returns 1.1 on the diagonal and 0 elsewhere. As an addend of the weights, it keeps the
/// activations at the size of the input through the stages.
fn diagonal(row: usize, column: usize) -> f64 {
    if row == column { 1.1 } else { 0.0 }
}

/// Returns element `[row, column]` of the check job's batch.
pub fn input(row: usize, column: usize) -> f64 {
    (WIDTH * row + column + 1) as f64 / 32.0
}

/// Returns element `[row, column]` of the check job's labels.
pub fn label(row: usize, column: usize) -> f64 {
    7.0 * input(row, column)
}

/// The losses and final weights of the check job.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceRun<T> {
    /// The loss of each microbatch, by step.
    pub losses: Vec<[T; MICROBATCHES]>,
    /// By stage, `WA` and `WB` after the last update, each `[WIDTH, WIDTH]`.
    pub weights: Vec<[Vec<T>; 2]>,
}

/// Runs `steps` steps of the check job in one process. Each microbatch is the whole batch or, if
/// `sliced`, one row of it.
pub fn reference_run<T: Real>(steps: usize, sliced: bool) -> ReferenceRun<T> {
    let rows = if sliced { BATCH / MICROBATCHES } else { BATCH };
    let shape = StageShape { rows, width: WIDTH, hidden: WIDTH };
    let (xs, labels) = (matrix::<T>(input), matrix::<T>(label));
    let mut weights: Vec<[Vec<T>; 2]> = (0..STAGES)
        .map(|s| [matrix(|i, j| initial_wa(s, i, j)), matrix(|i, j| initial_wb(s, i, j))])
        .collect();
    let mut losses = Vec::with_capacity(steps);
    for _ in 0..steps {
        let mut gradients =
            vec![[vec![T::ZERO; shape.weights()], vec![T::ZERO; shape.weights()]]; STAGES];
        losses.push(std::array::from_fn(|microbatch| {
            let start = if sliced { microbatch * shape.activations() } else { 0 };
            let part = start..start + shape.activations();
            add_gradients(shape, &mut gradients, &weights, &xs[part.clone()], &labels[part])
        }));
        for (weights, gradients) in weights.iter_mut().flatten().zip(gradients.iter().flatten()) {
            descend(weights, gradients, T::of(LEARNING_RATE));
        }
    }
    ReferenceRun { losses, weights }
}

/// Runs one microbatch forward and backward through all stages. *Adds* the gradients of the weights
/// to `gradients`, and returns the microbatch's loss.
fn add_gradients<T: Real>(
    shape: StageShape,
    gradients: &mut [[Vec<T>; 2]],
    weights: &[[Vec<T>; 2]],
    x: &[T],
    labels: &[T],
) -> T {
    let mut inputs = vec![x.to_vec()];
    let mut hidden = Vec::new();
    for [wa, wb] in weights {
        let mut y = vec![T::ZERO; shape.activations()];
        let mut h = vec![T::ZERO; shape.hidden_activations()];
        stage_forward(shape, &mut y, &mut h, &inputs[inputs.len() - 1], wa, wb);
        inputs.push(y);
        hidden.push(h);
    }
    let y = &inputs[weights.len()];
    let loss = mean_square_error(y, labels);
    let mut dy = vec![T::ZERO; shape.activations()];
    mean_square_error_gradient(&mut dy, y, labels, T::ONE);
    for (stage, [wa, wb]) in weights.iter().enumerate().rev() {
        let mut dx = vec![T::ZERO; shape.activations()];
        let mut dh = vec![T::ZERO; shape.hidden_activations()];
        stage_backward_input(shape, &mut dx, &mut dh, &dy, wa, wb);
        let [dwa, dwb] = &mut gradients[stage];
        stage_backward_weights(shape, dwa, dwb, &inputs[stage], &hidden[stage], &dh, &dy);
        dy = dx;
    }
    loss
}

fn matrix<T: Real>(element: impl Fn(usize, usize) -> f64) -> Vec<T> {
    (0..WIDTH * WIDTH).map(|at| T::of(element(at / WIDTH, at % WIDTH))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Results of an independent implementation, with six decimals.
    const LOSSES: [f64; 6] = [2.217942, 1.206537, 0.180603, 0.030177, 0.024658, 0.014348];
    const SLICED_FIRST: [f64; 4] = [0.179679, 1.032449, 2.644327, 5.015312];
    const SLICED_LAST: [f64; 4] = [0.019327, 0.008598, 0.008983, 0.020484];
    const WA0_ROW0: [f64; 4] = [0.983358, 0.129885, 0.048083, -0.062251];
    const WB3_ROW3: [f64; 4] = [0.036992, 0.143912, -0.106465, 1.103899];

    fn assert_near<T: Real>(got: &[T], expected: &[f64], within: f64) {
        assert_eq!(got.len(), expected.len());
        let near = got
            .iter()
            .zip(expected)
            .all(|(got, expected)| (got.to_f64() - expected).abs() <= within);
        assert!(near, "{got:?} instead of {expected:?}");
    }

    fn check<T: Real>() {
        let whole = reference_run::<T>(6, false);
        for (losses, expected) in whole.losses.iter().zip(LOSSES) {
            assert_near(losses, &[expected; 4], 1e-5);
        }
        let sliced = reference_run::<T>(6, true);
        assert_near(&sliced.losses[0], &SLICED_FIRST, 1e-5);
        assert_near(&sliced.losses[5], &SLICED_LAST, 1e-5);
        for run in [&whole, &sliced] {
            assert_near(&run.weights[0][0][..4], &WA0_ROW0, 1e-5);
            assert_near(&run.weights[3][1][12..], &WB3_ROW3, 1e-5);
        }
        for (sliced, losses) in sliced.losses.iter().zip(&whole.losses) {
            let mean = sliced.iter().map(|loss| loss.to_f64()).sum::<f64>() / 4.0;
            assert_near(&losses[..1], &[mean], 1e-5);
        }
        for (one, other) in whole.weights.iter().flatten().zip(sliced.weights.iter().flatten()) {
            assert_near(one, &other.iter().map(|w| w.to_f64()).collect::<Vec<_>>(), 1e-5);
        }
    }

    #[test]
    fn check_job_gives_reference_figures_in_f64() {
        check::<f64>();
    }

    #[test]
    fn check_job_gives_reference_figures_in_f32() {
        check::<f32>();
    }

    #[test]
    fn halves_of_the_hidden_columns_sum_to_the_whole() {
        let whole = StageShape { rows: 3, width: 4, hidden: 6 };
        let half = StageShape { hidden: 3, ..whole };
        let values = |len: usize, seed: u64| -> Vec<f64> {
            (0..len).map(|i| crate::math::random_unit(seed, i as u64)).collect()
        };
        let (x, dy) = (values(12, 1), values(12, 2));
        let (wa, wb) = (values(24, 3), values(24, 4));
        let run = |shape: StageShape, wa: &[f64], wb: &[f64]| {
            let [mut y, mut dx] = [vec![0.0; 12], vec![0.0; 12]];
            let [mut h, mut dh] =
                [vec![0.0; shape.hidden_activations()], vec![0.0; shape.hidden_activations()]];
            let [mut dwa, mut dwb] = [vec![1.0; shape.weights()], vec![1.0; shape.weights()]];
            stage_forward(shape, &mut y, &mut h, &x, wa, wb);
            stage_backward_input(shape, &mut dx, &mut dh, &dy, wa, wb);
            stage_backward_weights(shape, &mut dwa, &mut dwb, &x, &h, &dh, &dy);
            (y, dx, dwa, dwb)
        };
        let columns_of = |matrix: &[f64], part: usize| -> Vec<f64> {
            matrix.chunks(6).flat_map(|row| row[3 * part..3 * part + 3].to_vec()).collect()
        };
        let full = run(whole, &wa, &wb);
        let parts =
            [0, 1].map(|part| run(half, &columns_of(&wa, part), &wb[12 * part..12 * part + 12]));
        let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        assert_near(&full.0, &sum(&parts[0].0, &parts[1].0), 1e-12);
        assert_near(&full.1, &sum(&parts[0].1, &parts[1].1), 1e-12);
        for (part, result) in parts.iter().enumerate() {
            assert_near(&result.2, &columns_of(&full.2, part), 1e-12);
        }
        assert_near(&full.3, &[parts[0].3.as_slice(), &parts[1].3].concat(), 1e-12);
    }

    #[test]
    fn error_gradient_equals_finite_differences() {
        let (y, labels) = ([0.3, -1.2, 2.0], [0.1, 0.4, 2.5]);
        let mut dy = [0.0; 3];
        mean_square_error_gradient(&mut dy, &y, &labels, 2.0);
        for i in 0..3 {
            let shifted = |by: f64| {
                let mut y = y;
                y[i] += by;
                2.0 * mean_square_error(&y, &labels)
            };
            assert!((dy[i] - (shifted(1e-6) - shifted(-1e-6)) / 2e-6).abs() < 1e-8);
        }
    }
}
