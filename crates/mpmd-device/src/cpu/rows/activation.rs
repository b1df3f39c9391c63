//! Elementwise activation functions: GELU in both forms, and SiLU.

use crate::cpu::lanes::exp;
use crate::cpu::widest::widest;

/// The magnitude to which the kernels clamp inputs, so that infinities do not give NaN.
const BOUND: f32 = 1e4;

/// An elementwise activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Curve {
    /// GELU in the form with the hyperbolic tangent.
    Gelu,
    /// GELU in the form with the error function.
    GeluErf,
    /// `x sigmoid(x)`.
    Silu,
}

impl Curve {
    /// Writes the function of each element of `x` to `out`, up to the shorter length.
    pub fn forward(self, x: &[f32], out: &mut [f32]) {
        match self {
            Self::Gelu => gelu(x, out),
            Self::GeluErf => gelu_erf(x, out),
            Self::Silu => silu(x, out),
        }
    }

    /// Writes the gradient of the input `x` to `d_x`, from the gradient `d` of the result, up to
    /// the shortest length.
    pub fn backward(self, x: &[f32], d: &[f32], d_x: &mut [f32]) {
        match self {
            Self::Gelu => gelu_gradient(x, d, d_x),
            Self::GeluErf => gelu_erf_gradient(x, d, d_x),
            Self::Silu => silu_gradient(x, d, d_x),
        }
    }
}

widest!(fn gelu = gelu_row(x: &[f32], out: &mut [f32]));

#[inline(always)]
fn gelu_row(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = x.max(-BOUND) * gelu_weight(*x).0;
    }
}

widest!(fn gelu_gradient = gelu_gradient_row(x: &[f32], d: &[f32], d_x: &mut [f32]));

#[inline(always)]
fn gelu_gradient_row(x: &[f32], d: &[f32], d_x: &mut [f32]) {
    for (d_x, (x, d)) in d_x.iter_mut().zip(x.iter().zip(d)) {
        let x = x.clamp(-BOUND, BOUND);
        let (weight, slope) = gelu_weight(x);
        *d_x = d * (weight + x * weight * (1.0 - weight) * slope);
    }
}

widest!(fn gelu_erf = gelu_erf_row(x: &[f32], out: &mut [f32]));

#[inline(always)]
fn gelu_erf_row(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = x.max(-BOUND) * normal(*x).0;
    }
}

widest!(fn gelu_erf_gradient = gelu_erf_gradient_row(x: &[f32], d: &[f32], d_x: &mut [f32]));

#[inline(always)]
fn gelu_erf_gradient_row(x: &[f32], d: &[f32], d_x: &mut [f32]) {
    for (d_x, (x, d)) in d_x.iter_mut().zip(x.iter().zip(d)) {
        let x = x.clamp(-BOUND, BOUND);
        let (share, density) = normal(x);
        *d_x = d * (share + x * density);
    }
}

widest!(fn silu = silu_row(x: &[f32], out: &mut [f32]));

#[inline(always)]
fn silu_row(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = x.max(-BOUND) * sigmoid(*x);
    }
}

widest!(fn silu_gradient = silu_gradient_row(x: &[f32], d: &[f32], d_x: &mut [f32]));

#[inline(always)]
fn silu_gradient_row(x: &[f32], d: &[f32], d_x: &mut [f32]) {
    for (d_x, (x, d)) in d_x.iter_mut().zip(x.iter().zip(d)) {
        *d_x = d * silu_slope(*x);
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    // `exp` ends at 80.
    let share = 1.0 / (1.0 + exp(-x));
    if x < -80.0 { 0.0 } else { share }
}

#[inline(always)]
fn silu_slope(x: f32) -> f32 {
    let share = sigmoid(x);
    let x = x.clamp(-BOUND, BOUND);
    share + x * share * (1.0 - share)
}

/// Returns the factor of `x` in GELU, `(1 + tanh u) / 2`, and the derivative of `2u`. Here `u` is
/// `sqrt(2/pi) (x + 0.044715 x^3)`.
///
/// The factor is equal to `1 / (1 + e^(-2u))`, which needs one exponential and one division.
#[inline(always)]
fn gelu_weight(x: f32) -> (f32, f32) {
    const TWICE: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;
    const TWICE_CUBE: f32 = TWICE * 0.044_715;
    let square = x * x;
    (
        sigmoid(x * (TWICE + TWICE_CUBE * square)),
        TWICE + 3.0 * TWICE_CUBE * square,
    )
}

/// Returns the cumulative distribution function and the density of the standard normal
/// distribution.
///
/// The error of the distribution function is below 1e-7. It follows formula 7.1.26 of Abramowitz
/// and Stegun, "Handbook of Mathematical Functions", and shares an exponential with the density.
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    const DENSITY: f32 = std::f32::consts::FRAC_1_SQRT_2 * std::f32::consts::FRAC_2_SQRT_PI / 2.0;
    let power = exp(-0.5 * x * x);
    let t = 1.0 / (1.0 + 0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2 * x.abs());
    let mut series = 1.061_405_4;
    for coefficient in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
        series = series * t + coefficient;
    }

    let tail = 0.5 * series * t * power;
    (if x > 0.0 { 1.0 - tail } else { tail }, power * DENSITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::rows::tests::{LENGTHS, bits, row};

    #[test]
    fn widths_give_the_same_bits() {
        for len in LENGTHS {
            let (x, d) = (row(len, 1), row(len, 2));
            let (mut a, mut b) = (row(len, 0), row(len, 0));
            type Forward = fn(&[f32], &mut [f32]);
            let forward: [(Curve, Forward); 3] = [
                (Curve::Gelu, gelu_row),
                (Curve::GeluErf, gelu_erf_row),
                (Curve::Silu, silu_row),
            ];
            for (curve, plain) in forward {
                curve.forward(&x, &mut a);
                plain(&x, &mut b);
                assert_eq!(bits(&a), bits(&b), "{curve:?} {len}");
            }
            type Backward = fn(&[f32], &[f32], &mut [f32]);
            let backward: [(Curve, Backward); 3] = [
                (Curve::Gelu, gelu_gradient_row),
                (Curve::GeluErf, gelu_erf_gradient_row),
                (Curve::Silu, silu_gradient_row),
            ];
            for (curve, plain) in backward {
                curve.backward(&x, &d, &mut a);
                plain(&x, &d, &mut b);
                assert_eq!(bits(&a), bits(&b), "{curve:?} {len}");
            }
        }
    }

    fn forward(curve: Curve, x: &[f32]) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len()];
        curve.forward(x, &mut y);
        y
    }

    fn slopes(curve: Curve, x: &[f32]) -> Vec<f32> {
        let mut slopes = vec![f32::NAN; x.len()];
        curve.backward(x, &vec![1.0; x.len()], &mut slopes);
        slopes
    }

    #[test]
    fn curves_and_slopes_match_the_definitions() {
        let tanh = |x: f64| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        };
        // The error function by its series, which has enough digits for the points below.
        let erf = |x: f64| {
            let z = x / std::f64::consts::SQRT_2;
            let (mut term, mut sum) = (z, z);
            for n in 1..100 {
                term *= -z * z / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            0.5 * x * (1.0 + sum * 2.0 / std::f64::consts::PI.sqrt())
        };
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let curves: [(Curve, &dyn Fn(f64) -> f64); 3] = [
            (Curve::Gelu, &tanh),
            (Curve::GeluErf, &erf),
            (Curve::Silu, &silu),
        ];
        let points: Vec<f32> = (-1000..=1000).map(|i| i as f32 * 0.004).collect();
        for (at, (curve, exact)) in curves.into_iter().enumerate() {
            let y = forward(curve, &points);
            let slopes = self::slopes(curve, &points);
            for ((x, y), slope) in points.iter().zip(y).zip(slopes) {
                let x = f64::from(*x);
                let error = (f64::from(y) - exact(x)).abs();
                assert!(error < 1e-6 * (1.0 + x.abs()), "curve {at} at {x}: {y}");
                let expected = (exact(x + 1e-5) - exact(x - 1e-5)) / 2e-5;
                let error = (f64::from(slope) - expected).abs();
                assert!(error < 3e-6, "slope {at} at {x}: {slope}, not {expected}");
            }
            let ends = [100.0, -100.0];
            let (y, slopes) = (forward(curve, &ends), self::slopes(curve, &ends));
            assert!(y[0] == 100.0 && y[1].abs() < 1e-25, "curve {at}: {y:?}");
            assert!(
                slopes[0] == 1.0 && slopes[1].abs() < 1e-25,
                "curve {at}: {slopes:?}"
            );
        }
    }
}
