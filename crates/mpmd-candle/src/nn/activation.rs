//! Activation functions, with kernels for GELU and SiLU.
//!
//! The kernels keep nothing: the backward pass computes the slope from the input.

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor, bail};
use candle_nn::Module;
pub use candle_nn::activation::{PReLU, prelu};

use super::values::{are_fast, for_rows, result, single, slice, tensor_like, values};
use crate::cuda_layers;
use mpmd_core::cuda::layers;
use mpmd_device::cpu::rows::activation::Curve;

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

    /// Returns the same function for kernels on the CPU.
    fn on_cpu(self) -> Curve {
        match self {
            Self::Gelu => Curve::Gelu,
            Self::GeluErf => Curve::GeluErf,
            Self::Silu => Curve::Silu,
        }
    }

    pub(super) fn forward(self, x: &[f32]) -> Vec<f32> {
        let curve = self.on_cpu();
        let mut out = vec![0.0; x.len()];
        for_rows(&mut out, 1, |first, out| curve.forward(&x[first..], out));
        out
    }

    /// Returns the gradient of the input `x` from the gradient `d` of the result.
    pub(super) fn backward(self, x: &[f32], d: &[f32]) -> Vec<f32> {
        let curve = self.on_cpu();
        let mut d_x = vec![0.0; x.len()];
        for_rows(&mut d_x, 1, |first, d_x| {
            curve.backward(&x[first..], &d[first..], d_x);
        });
        d_x
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
