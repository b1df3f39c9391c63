//! The block's second branch: a layer to `hidden` columns, GELU, and a layer back.
//!
//! GELU is in the tanh form, `x/2 (1 + tanh u)` with `u = sqrt(2/pi) (x + 0.044715 x^3)`. It is
//! computed as `x / (1 + e^(-2u))`, which is equal. Value and slope together need one exponential
//! and one division.

use crate::math::{Real, matmul, matmul_nt};

use super::BlockShape;
use super::linear::{LinearShape, linear_forward};

/// The factor of `x^3` in GELU's `u = sqrt(2/pi) (x + CUBE x^3)`.
const CUBE: f64 = 0.044_715;

/// Computes `out = gelu(x w_up + b_up) w_down`: this device's summand. The caller adds up the
/// summands and then adds the output bias.
///
/// `x` and `out` are `[rows, width]`. `activated` (GELU's value) and `slope` (its derivative) are
/// `[rows, hidden]`, for the backward pass.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn mlp_forward<T: Real>(
    shape: BlockShape,
    out: &mut [T],
    activated: &mut [T],
    slope: &mut [T],
    x: &[T],
    (w_up, b_up, w_down): (&[T], &[T], &[T]),
) {
    let BlockShape { width, hidden, .. } = shape;
    let rows = shape.rows();
    let up = LinearShape { rows, inputs: width, outputs: hidden };
    // The sums before GELU are needed only here, so the slopes overwrite them.
    linear_forward(up, slope, x, w_up, b_up);
    gelu(activated, slope);
    matmul(out, activated, w_down, rows, hidden, width, false);
}

/// Computes gradients from `d_out` `[rows, width]`, the gradient of the branch's complete output.
///
/// `d_pre` `[rows, hidden]` becomes the gradient of the sums before GELU. `d_x` `[rows, width]`
/// becomes this device's summand of the gradient of the input. `slope` is that of [`mlp_forward`].
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn mlp_backward_input<T: Real>(
    shape: BlockShape,
    d_x: &mut [T],
    d_pre: &mut [T],
    d_out: &[T],
    slope: &[T],
    (w_up, w_down): (&[T], &[T]),
) {
    let BlockShape { width, hidden, .. } = shape;
    let rows = shape.rows();
    assert_eq!(slope.len(), d_pre.len(), "slopes");
    matmul_nt(d_pre, d_out, w_down, rows, width, hidden, false);
    for (d_pre, slope) in d_pre.iter_mut().zip(slope) {
        *d_pre *= *slope;
    }
    matmul_nt(d_x, d_pre, w_up, rows, hidden, width, false);
}

/// Writes GELU of each element of `x` to `y`, and replaces the element by GELU's derivative there.
///
/// # Panics
///
/// Panics if the lengths differ.
pub fn gelu<T: Real>(y: &mut [T], x: &mut [T]) {
    assert_eq!(y.len(), x.len(), "elements of GELU");
    // 2u = (twice + twice_cube x^2) x.
    let twice = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    let (twice, twice_cube, twice_cube_slope) =
        (T::of(twice), T::of(twice * CUBE), T::of(3.0 * twice * CUBE));
    for (y, x) in y.iter_mut().zip(x) {
        let (at, square) = (*x, *x * *x);
        let weight = T::ONE / (T::ONE + (-(at * (twice + twice_cube * square))).exp_in_loop());
        *y = at * weight;
        *x = weight + *y * (T::ONE - weight) * (twice + twice_cube_slope * square);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::lanes::dot;
    use crate::gpt::linear::linear_backward_weights;
    use crate::gpt::testing::{assert_gradient, random};

    #[test]
    fn gelu_and_its_slope_match_the_definition() {
        let exact = |x: f64| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + CUBE * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        };
        let single: Vec<f32> = (-2000..=2000).map(|i| i as f32 * 0.01).collect();
        let (mut y, mut slope) = (vec![0.0; single.len()], single.clone());
        gelu(&mut y, &mut slope);
        let mut double: Vec<f64> = single.iter().copied().map(f64::from).collect();
        let mut y_double = vec![0.0; double.len()];
        gelu(&mut y_double, &mut double);
        for (at, x) in single.iter().enumerate() {
            let x = f64::from(*x);
            let derivative = (exact(x + 1e-5) - exact(x - 1e-5)) / 2e-5;
            assert!((f64::from(y[at]) - exact(x)).abs() < 1e-6 * (1.0 + x.abs()), "{x}");
            assert!((f64::from(slope[at]) - derivative).abs() < 2e-6, "{x}");
            assert!((y_double[at] - exact(x)).abs() < 1e-13 * (1.0 + x.abs()), "{x}");
            assert!((double[at] - derivative).abs() < 1e-8, "{x}");
        }
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let shape = BlockShape { batch: 1, time: 3, width: 4, heads_total: 2, heads: 2, hidden: 5 };
        let up = LinearShape { rows: 3, inputs: 4, outputs: 5 };
        let mut leaves = [random(12, 1), random(20, 2), random(5, 3), random(20, 4)];
        let dy = random(12, 5);
        let forward = |l: &[Vec<f64>; 4]| {
            let (mut out, mut activated, mut slope) = (vec![0.0; 12], vec![0.0; 15], vec![0.0; 15]);
            mlp_forward(shape, &mut out, &mut activated, &mut slope, &l[0], (&l[1], &l[2], &l[3]));
            (out, activated, slope)
        };
        let (_, activated, slope) = forward(&leaves);
        let mut d_pre = vec![0.0; 15];
        let mut gradients = [vec![0.0; 12], vec![0.0; 20], vec![0.0; 5], vec![0.0; 20]];
        let [d_x, d_up, d_bias, d_down] = &mut gradients;
        mlp_backward_input(shape, d_x, &mut d_pre, &dy, &slope, (&leaves[1], &leaves[3]));
        linear_backward_weights(up, d_up, d_bias, &leaves[0], &d_pre);
        crate::math::matmul_tn(d_down, &activated, &dy, 5, 3, 4, true);
        let value = |l: &[Vec<f64>; 4]| dot(&dy, &forward(l).0);
        for (at, gradient) in gradients.iter().enumerate() {
            assert_gradient(&format!("leaf {at}"), gradient, &mut leaves, |l| &mut l[at], value);
        }
    }
}
