//! The network and its arithmetic on slices, for the pipeline's kernels and for the kernels alone.
//!
//! Each layer is `relu(x w + b)` with a square matrix `w`; `x` is `[rows, dim]`. The loss is the
//! mean square error over rows and columns.

use mpmd_device::cpu::matmul::{matmul, matmul_nt, matmul_tn};
use mpmd_layout::random::{Key, uniform_f32};

/// The sizes of the network: each field is a number of things.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Shape {
    /// Rows and columns of every matrix.
    pub(super) dim: usize,
    /// Layers of the whole network.
    pub(super) layers: usize,
    /// Stages of the pipeline, each with the same number of layers.
    pub(super) stages: usize,
    /// Rows of a microbatch.
    pub(super) rows: usize,
    /// Microbatches of a step.
    pub(super) microbatches: usize,
}

impl Shape {
    /// Returns the number of layers of each stage.
    pub(super) fn layers_of_stage(&self) -> usize {
        self.layers / self.stages
    }

    /// Returns the number of elements of a microbatch, the same at every stage.
    pub(super) fn activations(&self) -> usize {
        self.rows * self.dim
    }
}

/// A layer's (matrix, bias). The matrix has `dim` rows and columns, in row-major order.
pub(super) type Weights<'a> = (&'a [f32], &'a [f32]);

/// Computes one stage's layers for a microbatch `x`. Writes the input of layer `l` to `inputs[l]`,
/// the first a copy of `x`, and the result of the last layer to `output`.
pub(super) fn forward(
    shape: &Shape,
    weights: &[Weights<'_>],
    x: &[f32],
    inputs: &mut [&mut [f32]],
    output: &mut [f32],
) {
    let Shape { dim, rows, .. } = *shape;
    inputs[0].copy_from_slice(x);
    for (layer, (w, b)) in weights.iter().enumerate() {
        let (known, next) = inputs.split_at_mut(layer + 1);
        let y = next.first_mut().map_or(&mut *output, |next| next);
        y.chunks_exact_mut(dim).for_each(|row| row.copy_from_slice(b));
        matmul(y, known[layer], w, rows, dim, dim, true);
        y.iter_mut().for_each(|y| *y = y.max(0.0));
    }
}

/// Returns the sum over rows of the mean square error of `output` against `labels`. Replaces
/// `output` by the gradient of this sum before `relu`.
pub(super) fn loss(shape: &Shape, output: &mut [f32], labels: &[f32]) -> f32 {
    let scale = 1.0 / shape.dim as f32;
    let mut sum = 0.0f64;
    for (output, label) in output.iter_mut().zip(labels) {
        let error = *output - label;
        sum += f64::from(error * error);
        *output = if *output > 0.0 { 2.0 * scale * error } else { 0.0 };
    }
    (sum * f64::from(scale)) as f32
}

/// Replaces `output`, the result of `relu`, by the gradient before `relu`. `dy` is the gradient
/// after `relu`.
pub(super) fn through_relu(output: &mut [f32], dy: &[f32]) {
    for (output, dy) in output.iter_mut().zip(dy) {
        *output = if *output > 0.0 { *dy } else { 0.0 };
    }
}

/// Computes from the last of `gradients` those of the earlier layers, and writes them there; all
/// are before `relu`. Also writes the gradient of the stage's input to `dx` if that is given.
pub(super) fn backward_input(
    shape: &Shape,
    weights: &[Weights<'_>],
    inputs: &[&[f32]],
    gradients: &mut [&mut [f32]],
    dx: Option<&mut [f32]>,
) {
    let Shape { dim, rows, .. } = *shape;
    for layer in (1..weights.len()).rev() {
        let (before, after) = gradients.split_at_mut(layer);
        let d = &mut *before[layer - 1];
        matmul_nt(d, after[0], weights[layer].0, rows, dim, dim, false);
        for (d, y) in d.iter_mut().zip(inputs[layer]) {
            *d = if *y > 0.0 { *d } else { 0.0 };
        }
    }
    if let Some(dx) = dx {
        matmul_nt(dx, gradients[0], weights[0].0, rows, dim, dim, false);
    }
}

/// Adds one microbatch's gradients of a layer to `dw` and `db`. `gradient` is that of the layer's
/// output before `relu`.
pub(super) fn backward_weight(
    shape: &Shape,
    input: &[f32],
    gradient: &[f32],
    dw: &mut [f32],
    db: &mut [f32],
) {
    let Shape { dim, rows, .. } = *shape;
    matmul_tn(dw, input, gradient, dim, rows, dim, true);
    for row in gradient.chunks_exact(dim) {
        db.iter_mut().zip(row).for_each(|(db, d)| *db += d);
    }
}

/// Makes a step of gradient descent: subtracts `rate * gradient` from `weights`.
pub(super) fn update(weights: &mut [f32], gradient: &[f32], rate: f32) {
    weights.iter_mut().zip(gradient).for_each(|(w, d)| *w -= rate * d);
}

/// The use of a generated array; the values depend on the use and its number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Values {
    /// The matrix of the layer with this number, counted in the whole network.
    Matrix(usize),
    /// The bias of the layer with this number, counted in the whole network.
    Bias(usize),
    /// The input of the microbatch with this number.
    Input(usize),
    /// The expected output of the microbatch with this number.
    Labels(usize),
}

impl Values {
    /// Fills `values` with uniform pseudo-random values, the same on every process and in every
    /// run. For matrices, the range keeps the size of activations (He et al. 2015: a variance of `2
    /// / dim` for `relu`).
    pub(super) fn fill(self, dim: usize, values: &mut [f32]) {
        let wide = (6.0 / dim as f32).sqrt();
        let (stream, number, low, high) = match self {
            Self::Matrix(layer) => (1, layer, -wide, wide),
            Self::Bias(layer) => (2, layer, -0.1, 0.1),
            Self::Input(microbatch) => (3, microbatch, -1.0, 1.0),
            Self::Labels(microbatch) => (4, microbatch, 0.0, 1.0),
        };
        let key = Key(stream).fold_in(number as u64);
        for (at, value) in (0..).zip(values) {
            *value = low + (high - low) * uniform_f32(key, at);
        }
    }

    pub(super) fn vec(self, dim: usize, len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        self.fill(dim, &mut values);
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_uniform_and_differ_by_use() {
        let values = Values::Input(3).vec(8, 10_000);
        assert!(values.iter().all(|value| (-1.0..1.0).contains(value)));
        let mean = values.iter().sum::<f32>() / 1e4;
        assert!(mean.abs() < 0.03, "{mean}");
        assert_eq!(values, Values::Input(3).vec(8, 10_000));
        assert_ne!(values, Values::Input(2).vec(8, 10_000));
        let (matrix, wide) = (Values::Matrix(0).vec(24, 1000), 0.5);
        assert!(
            matrix.iter().all(|value| value.abs() <= wide)
                && matrix.iter().any(|v| *v > 0.9 * wide)
        );
    }
}
