//! Layer norm: scales each row to mean 0 and variance 1, then scales and shifts each column.

use super::lanes;
use crate::math::Real;

/// Number added to each row's variance. It prevents a division by zero.
pub const EPSILON: f64 = 1e-5;

/// Arrays that [`norm_forward`] writes: the result `out`, and the others for the backward pass.
#[derive(Debug)]
pub struct NormOutputs<'a, T> {
    /// The rows at mean 0 and variance 1: `[rows, width]`.
    pub hat: &'a mut [T],
    /// One over the standard deviation of each row: `[rows]`.
    pub inv_std: &'a mut [T],
    /// `hat * gain + bias`: `[rows, width]`.
    pub out: &'a mut [T],
}

/// Normalises the rows of `x` `[rows, width]` into `outputs`. `gain` and `bias` are `[width]`.
///
/// # Panics
///
/// Panics if the slices do not fit each other, or the width is zero.
pub fn norm_forward<T: Real>(outputs: NormOutputs<'_, T>, x: &[T], gain: &[T], bias: &[T]) {
    let NormOutputs { hat, inv_std, out } = outputs;
    let width = gain.len();
    assert_rows(width, inv_std.len(), [x.len(), hat.len(), out.len()]);
    assert_eq!(bias.len(), width, "elements of the bias");
    let share = T::of(1.0 / width as f64);
    let epsilon = T::of(EPSILON);
    let rows =
        hat.chunks_exact_mut(width).zip(out.chunks_exact_mut(width)).zip(x.chunks_exact(width));
    for (((hat, out), x), inv_std) in rows.zip(inv_std) {
        let mean = lanes::sum(x) * share;
        let variance = lanes::sum_of(x, |x| (x - mean) * (x - mean)) * share;
        let inv = T::ONE / (variance + epsilon).sqrt();
        *inv_std = inv;
        for (hat, x) in hat.iter_mut().zip(x) {
            *hat = (*x - mean) * inv;
        }
        for ((out, hat), (gain, bias)) in out.iter_mut().zip(&*hat).zip(gain.iter().zip(bias)) {
            *out = *hat * *gain + *bias;
        }
    }
}

/// *Adds* the gradient of the norm's input to `dx`. `d_out` is the gradient of the norm's output.
/// `hat` and `inv_std` are those of [`NormOutputs`].
///
/// # Panics
///
/// Panics if the slices do not fit each other, or the width is zero.
pub fn norm_backward_input<T: Real>(
    dx: &mut [T],
    d_out: &[T],
    hat: &[T],
    inv_std: &[T],
    gain: &[T],
) {
    let width = gain.len();
    assert_rows(width, inv_std.len(), [dx.len(), d_out.len(), hat.len()]);
    let share = T::of(1.0 / width as f64);
    let rows =
        dx.chunks_exact_mut(width).zip(d_out.chunks_exact(width)).zip(hat.chunks_exact(width));
    let mut d_hat = vec![T::ZERO; width];
    for (((dx, d_out), hat), inv) in rows.zip(inv_std) {
        for ((d_hat, d_out), gain) in d_hat.iter_mut().zip(d_out).zip(gain) {
            *d_hat = *d_out * *gain;
        }
        // Mean and variance depend on all elements of the row. These terms subtract their part of
        // the gradient.
        let mean = lanes::sum(&d_hat) * share;
        let along = lanes::dot(&d_hat, hat) * share;
        for ((dx, d_hat), hat) in dx.iter_mut().zip(&d_hat).zip(hat) {
            *dx += *inv * (*d_hat - mean - *hat * along);
        }
    }
}

/// *Adds* the gradient of the gain to `d_gain` and that of the bias to `d_bias`. `d_out` is the
/// gradient of the norm's output, and `hat` that of [`NormOutputs`].
///
/// # Panics
///
/// Panics if the slices do not fit each other, or the width is zero.
pub fn norm_backward_weight<T: Real>(d_gain: &mut [T], d_bias: &mut [T], d_out: &[T], hat: &[T]) {
    let width = d_gain.len();
    assert_rows(width, hat.len() / width.max(1), [d_out.len(), hat.len()]);
    assert_eq!(d_bias.len(), width, "elements of the bias");
    for (d_out, hat) in d_out.chunks_exact(width).zip(hat.chunks_exact(width)) {
        let columns = d_gain.iter_mut().zip(d_bias.iter_mut());
        for ((d_gain, d_bias), (d_out, hat)) in columns.zip(d_out.iter().zip(hat)) {
            *d_gain += *d_out * *hat;
            *d_bias += *d_out;
        }
    }
}

fn assert_rows<const N: usize>(width: usize, rows: usize, lens: [usize; N]) {
    assert!(width > 0, "a layer norm of no width");
    assert_eq!(lens, [rows * width; N], "elements of {rows} rows of {width}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::testing::{assert_gradient, random};

    #[test]
    fn rows_are_normalised_scaled_and_shifted() {
        let (mut hat, mut inv_std, mut out) = (vec![0.0; 8], vec![0.0; 2], vec![0.0; 8]);
        let x = [1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 5.0];
        let outputs = NormOutputs { hat: &mut hat, inv_std: &mut inv_std, out: &mut out };
        norm_forward::<f64>(outputs, &x, &[2.0; 4], &[0.5; 4]);
        let std = (3.5f64 + EPSILON).sqrt();
        for (at, expected) in [-2.0, -1.0, 0.0, 3.0].into_iter().enumerate() {
            assert!((hat[at] - expected / std).abs() < 1e-12, "{hat:?}");
            assert!((out[at] - (2.0 * expected / std + 0.5)).abs() < 1e-12, "{out:?}");
        }
        assert!((inv_std[0] - 1.0 / std).abs() < 1e-12);
        assert_eq!(out[4..], [0.5; 4], "a row without variance is all bias");
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let (rows, width) = (3, 5);
        let mut leaves = [random(rows * width, 1), random(width, 2), random(width, 3)];
        let dy = random(rows * width, 4);
        let forward = |leaves: &[Vec<f64>; 3]| {
            let (mut hat, mut inv_std, mut out) = (vec![0.0; 15], vec![0.0; 3], vec![0.0; 15]);
            let outputs = NormOutputs { hat: &mut hat, inv_std: &mut inv_std, out: &mut out };
            norm_forward(outputs, &leaves[0], &leaves[1], &leaves[2]);
            (hat, inv_std, out)
        };
        let (hat, inv_std, _) = forward(&leaves);
        // The gradients are added to these values.
        let mut gradients = [vec![1.0; 15], vec![1.0; 5], vec![1.0; 5]];
        let [dx, d_gain, d_bias] = &mut gradients;
        norm_backward_input(dx, &dy, &hat, &inv_std, &leaves[1]);
        norm_backward_weight(d_gain, d_bias, &dy, &hat);
        gradients.iter_mut().flatten().for_each(|d| *d -= 1.0);
        let value = |leaves: &[Vec<f64>; 3]| lanes::dot(&dy, &forward(leaves).2);
        for (at, gradient) in gradients.iter().enumerate() {
            assert_gradient(&format!("leaf {at}"), gradient, &mut leaves, |l| &mut l[at], value);
        }
    }
}
