//! Activation functions, with kernels for GELU and SiLU.
//!
//! The kernels keep nothing: the backward pass computes the slope from the input.

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor, bail};
use candle_nn::Module;
pub use candle_nn::activation::{PReLU, prelu};

use super::values::{are_fast, for_rows, result, single, slice, tensor_like, values};
use crate::cuda_layers;
use mpmd_core::cuda::layers;
use mpmd_device::cpu::lanes::exp;

/// The magnitude to which the kernels clamp inputs, so that infinities do not give NaN.
const BOUND: f32 = 1e4;

/// An activation function by its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// GELU by the error function.
    #[default]
    #[serde(alias = "gelu")]
    Gelu,
    /// GELU by the hyperbolic tangent.
    #[serde(alias = "gelu_new")]
    NewGelu,
    /// The positive part.
    Relu,
    /// The square of the positive part.
    Relu2,
    /// The positive part, at most 6.
    Relu6,
    /// `x sigmoid(x)`.
    Silu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// The sigmoid, approximated by three linear pieces.
    HardSigmoid,
    /// The SiLU of the first half of each row, times the second half.
    Swiglu,
    /// The same as `Silu`.
    Swish,
    /// `x tanh(ln(1 + exp(x)))`.
    Mish,
    /// `x hard_sigmoid(x)`.
    HardSwish,
    /// `x`, or this factor times `exp(x) - 1` for negative `x`.
    Elu(f64),
    /// `x`, or this factor times `x` for negative `x`.
    LeakyRelu(f64),
    /// The same as `NewGelu`.
    #[serde(alias = "gelu_pytorch_tanh")]
    GeluPytorchTanh,
}

impl Module for Activation {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let in_single =
            |f: &dyn Fn(&Tensor) -> Result<Tensor>| f(&single(xs)?)?.to_dtype(xs.dtype());
        match *self {
            Self::Gelu => gelu_erf(xs),
            Self::NewGelu | Self::GeluPytorchTanh => gelu(xs),
            Self::Silu | Self::Swish => silu(xs),
            Self::Swiglu => swiglu(xs),
            Self::Relu => xs.relu(),
            Self::Relu2 => xs.relu()?.sqr(),
            Self::Relu6 => xs.clamp(0f32, 6f32),
            Self::Sigmoid => in_single(&candle_nn::ops::sigmoid),
            Self::HardSigmoid => in_single(&candle_nn::ops::hard_sigmoid),
            Self::HardSwish => in_single(&|xs| xs * candle_nn::ops::hard_sigmoid(xs)?),
            Self::Mish => mish(xs),
            Self::Elu(alpha) => in_single(&|xs| xs.elu(alpha)),
            Self::LeakyRelu(slope) => candle_nn::ops::leaky_relu(xs, slope),
        }
    }
}

/// Computes GELU in the form with the hyperbolic tangent.
///
/// # Errors
///
/// If candle fails.
pub fn gelu(xs: &Tensor) -> Result<Tensor> {
    if let Some(y) = cuda_layers::activate(xs, ActivationKernel::Gelu.on_cuda()) {
        return y;
    }
    match are_fast(&[xs]) {
        true => xs.contiguous()?.apply_op1(ActivationKernel::Gelu),
        false => bounded(xs, 1e3, Tensor::gelu),
    }
}

/// Computes GELU in the form with the error function.
///
/// # Errors
///
/// If candle fails.
pub fn gelu_erf(xs: &Tensor) -> Result<Tensor> {
    if let Some(y) = cuda_layers::activate(xs, ActivationKernel::GeluErf.on_cuda()) {
        return y;
    }
    match are_fast(&[xs]) {
        true => xs.contiguous()?.apply_op1(ActivationKernel::GeluErf),
        false => bounded(xs, 1e3, Tensor::gelu_erf),
    }
}

/// Computes `x sigmoid(x)`.
///
/// # Errors
///
/// If candle fails.
pub fn silu(xs: &Tensor) -> Result<Tensor> {
    if let Some(y) = cuda_layers::activate(xs, ActivationKernel::Silu.on_cuda()) {
        return y;
    }
    match are_fast(&[xs]) {
        true => xs.contiguous()?.apply_op1(ActivationKernel::Silu),
        false => bounded(xs, 1e3, Tensor::silu),
    }
}

/// Computes `silu(a) b` for each row `[a, b]` of two halves.
///
/// # Errors
///
/// If the length of a row is odd.
pub fn swiglu(xs: &Tensor) -> Result<Tensor> {
    let width = xs.dim(D::Minus1)?;
    if !width.is_multiple_of(2) {
        bail!(
            "swiglu: the input is {:?}: expected rows of two halves",
            xs.dims()
        );
    }

    // `chunk` makes no halves of rows of width 0.
    let half = width / 2;
    let gate = xs.narrow(D::Minus1, 0, half)?;
    silu(&gate)? * xs.narrow(D::Minus1, half, half)?
}

/// Computes `x tanh(ln(1 + exp(x)))`.
///
/// # Errors
///
/// If candle fails.
pub fn mish(xs: &Tensor) -> Result<Tensor> {
    // The slope of candle's form is a product of zero and infinity above 88.
    bounded(xs, 80.0, candle_nn::ops::mish)
}

/// Computes an elementwise function by `f`, with inputs clamped to `[-bound, bound]`. The function
/// is the identity above `bound`, and constant below `-bound`.
fn bounded(xs: &Tensor, bound: f64, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let single = single(xs)?;
    let y = f(&single.clamp(-bound, bound)?)?;
    // A NaN is not below the bound.
    single
        .lt(bound)?
        .where_cond(&y, &single)?
        .to_dtype(xs.dtype())
}

impl Activation {
    /// Returns the elementwise kernel of this function; `None` if there is none.
    pub(super) fn curve(self) -> Option<ActivationKernel> {
        match self {
            Self::Gelu => Some(ActivationKernel::GeluErf),
            Self::NewGelu | Self::GeluPytorchTanh => Some(ActivationKernel::Gelu),
            Self::Silu | Self::Swish => Some(ActivationKernel::Silu),
            _ => None,
        }
    }
}

/// An elementwise activation function that has a kernel.
#[derive(Clone, Copy)]
pub(super) enum ActivationKernel {
    Gelu,
    GeluErf,
    Silu,
}

impl ActivationKernel {
    /// Returns the same function for kernels on CUDA devices.
    pub(super) fn on_cuda(self) -> layers::ActivationCurve {
        match self {
            Self::Gelu => layers::ActivationCurve::Gelu,
            Self::GeluErf => layers::ActivationCurve::GeluErf,
            Self::Silu => layers::ActivationCurve::Silu,
        }
    }

    pub(super) fn forward(self, x: &[f32]) -> Vec<f32> {
        match self {
            Self::Gelu => map(x, |x| x.max(-BOUND) * gelu_weight(x).0),
            Self::GeluErf => map(x, |x| x.max(-BOUND) * normal(x).0),
            Self::Silu => map(x, |x| x.max(-BOUND) * sigmoid(x)),
        }
    }

    /// Returns the gradient of the input `x` from the gradient `d` of the result.
    pub(super) fn backward(self, x: &[f32], d: &[f32]) -> Vec<f32> {
        match self {
            Self::Gelu => map_both(x, d, |x, d| {
                let x = x.clamp(-BOUND, BOUND);
                let (weight, slope) = gelu_weight(x);
                d * (weight + x * weight * (1.0 - weight) * slope)
            }),
            Self::GeluErf => map_both(x, d, |x, d| {
                let x = x.clamp(-BOUND, BOUND);
                let (share, density) = normal(x);
                d * (share + x * density)
            }),
            Self::Silu => map_both(x, d, |x, d| d * silu_slope(x)),
        }
    }
}

impl CustomOp1 for ActivationKernel {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        result(self.forward(&slice(x, layout)?), layout.shape(), x)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        let d_x = self.backward(&values(x)?, &values(&gradient)?);
        tensor_like(d_x, x).map(Some)
    }
}

#[inline(always)]
fn map(x: &[f32], f: impl Fn(f32) -> f32 + Sync) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for_rows(&mut out, 1, |first, out| {
        out.iter_mut()
            .zip(&x[first..])
            .for_each(|(out, x)| *out = f(*x));
    });
    out
}

#[inline(always)]
fn map_both(x: &[f32], d: &[f32], f: impl Fn(f32, f32) -> f32 + Sync) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for_rows(&mut out, 1, |first, out| {
        let terms = x[first..].iter().zip(&d[first..]);
        out.iter_mut()
            .zip(terms)
            .for_each(|(out, (x, d))| *out = f(*x, *d));
    });
    out
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
        let curves: [(ActivationKernel, &dyn Fn(f64) -> f64); 3] = [
            (ActivationKernel::Gelu, &tanh),
            (ActivationKernel::GeluErf, &erf),
            (ActivationKernel::Silu, &silu),
        ];
        let points: Vec<f32> = (-1000..=1000).map(|i| i as f32 * 0.004).collect();
        for (at, (curve, exact)) in curves.into_iter().enumerate() {
            let y = curve.forward(&points);
            let slopes = curve.backward(&points, &vec![1.0; points.len()]);
            for ((x, y), slope) in points.iter().zip(y).zip(slopes) {
                let x = f64::from(*x);
                let error = (f64::from(y) - exact(x)).abs();
                assert!(error < 1e-6 * (1.0 + x.abs()), "curve {at} at {x}: {y}");
                let expected = (exact(x + 1e-5) - exact(x - 1e-5)) / 2e-5;
                let error = (f64::from(slope) - expected).abs();
                assert!(error < 3e-6, "slope {at} at {x}: {slope}, not {expected}");
            }
            let (y, slopes) = (
                curve.forward(&[100.0, -100.0]),
                curve.backward(&[100.0, -100.0], &[1.0; 2]),
            );
            assert!(y[0] == 100.0 && y[1].abs() < 1e-25, "curve {at}: {y:?}");
            assert!(
                slopes[0] == 1.0 && slopes[1].abs() < 1e-25,
                "curve {at}: {slopes:?}"
            );
        }
    }
}
