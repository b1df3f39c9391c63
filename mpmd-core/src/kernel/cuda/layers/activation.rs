//! Activation functions, alone and as gates.

use mpmd_device::cuda::kernels::ACTIVATION;

use super::{Cuda, CudaPart, LayerCall, MatrixShape, ResultTarget, args, fours, product};
use crate::error::Result;

/// An activation function.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ActivationCurve {
    /// GELU in the form with the hyperbolic tangent.
    Gelu,
    /// GELU in the form with the error function.
    GeluErf,
    /// `x sigmoid(x)`.
    Silu,
}

impl ActivationCurve {
    /// Returns the function's number in the CUDA kernels.
    fn number(self) -> u32 {
        match self {
            Self::Gelu => 0,
            Self::GeluErf => 1,
            Self::Silu => 2,
        }
    }
}

/// Computes `y = curve(x + bias)`. `x` and `y` are `[rows, width]`; `bias` has one element for each
/// column. `y` may be `x`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn activate<'x>(
    cuda: &Cuda<'_>,
    curve: ActivationCurve,
    shape: MatrixShape,
    x: impl Into<CudaPart<'x>>,
    bias: Option<CudaPart<'x>>,
    y: impl Into<CudaPart<'x>>,
) -> Result<()> {
    let x = x.into();
    let y = y.into();

    let call = LayerCall::new(cuda, "activation", &ACTIVATION, &x)?;
    let MatrixShape { rows, width } = shape;
    let all = shape.elements();
    call.has(&[("x", &x, all), ("y", &y, all)])?;
    bias.iter()
        .try_for_each(|bias| call.has(&[("the bias", bias, width)]))?;
    call.writes(&[&y])?;

    let args = args![rows, width, curve.number(), x, bias, y];
    call.over("activate", fours(rows, width), args)
}

/// Computes the gradient `d_x` of `x` from `d_y`, the gradient of `curve(x + bias)`. `d_x` may be
/// `d_y`. The gradient of the bias is [`sum_rows`](super::sum_rows) of `d_x`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn activate_backward<'x>(
    cuda: &Cuda<'_>,
    curve: ActivationCurve,
    shape: MatrixShape,
    x: impl Into<CudaPart<'x>>,
    bias: Option<CudaPart<'x>>,
    d_y: impl Into<CudaPart<'x>>,
    d_x: impl Into<ResultTarget<'x>>,
) -> Result<()> {
    let x = x.into();
    let d_y = d_y.into();
    let ResultTarget { part: d_x, adds } = d_x.into();

    let call = LayerCall::new(cuda, "gradient of an activation", &ACTIVATION, &x)?;
    let MatrixShape { rows, width } = shape;
    let all = shape.elements();
    call.has(&[("x", &x, all), ("d_y", &d_y, all), ("d_x", &d_x, all)])?;
    bias.iter()
        .try_for_each(|bias| call.has(&[("the bias", bias, width)]))?;
    call.writes(&[&d_x])?;

    let args = args![
        rows,
        width,
        curve.number(),
        x,
        bias,
        d_y,
        d_x,
        u32::from(adds)
    ];
    call.over("activate_backward", fours(rows, width), args)
}

/// The inputs `a` and `b` of a gate, `curve(a) b`. If both are halves of the same rows, `stride` is
/// `2 * width` and `b` begins at element `width`.
#[derive(Clone, Copy, Debug)]
pub struct GateHalves<'a> {
    /// The input of the curve.
    pub a: CudaPart<'a>,
    /// The factor of the curve's value.
    pub b: CudaPart<'a>,
    /// Number of elements between the starts of successive rows of `a`, and of `b`.
    pub stride: usize,
}

/// Computes `y = curve(a) b`. All are `[rows, width]`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn gate<'x>(
    cuda: &Cuda<'_>,
    curve: ActivationCurve,
    shape: MatrixShape,
    halves: GateHalves<'x>,
    y: impl Into<CudaPart<'x>>,
) -> Result<()> {
    let GateHalves { a, b, stride } = halves;
    let y = y.into();

    let call = LayerCall::new(cuda, "gate", &ACTIVATION, &a)?;
    let MatrixShape { rows, width } = shape;
    let last = in_rows(rows, width, stride);
    call.has(&[
        ("a", &a, last),
        ("b", &b, last),
        ("y", &y, shape.elements()),
    ])?;
    call.writes(&[&y])?;

    let args = args![rows, width, stride, curve.number(), a, b, y];
    call.over("gate", fours(rows, width), args)
}

/// Computes the gradients of `a` and `b` from `d_y`, the gradient of `curve(a) b`. The gradients
/// have the same layout as `a` and `b`, and may overwrite them.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn gate_backward<'x>(
    cuda: &Cuda<'_>,
    curve: ActivationCurve,
    shape: MatrixShape,
    halves: GateHalves<'x>,
    d_y: impl Into<CudaPart<'x>>,
    [d_a, d_b]: [CudaPart<'x>; 2],
) -> Result<()> {
    let GateHalves { a, b, stride } = halves;
    let d_y = d_y.into();

    let call = LayerCall::new(cuda, "gradient of a gate", &ACTIVATION, &a)?;
    let MatrixShape { rows, width } = shape;
    let last = in_rows(rows, width, stride);
    call.has(&[
        ("a", &a, last),
        ("b", &b, last),
        ("d_a", &d_a, last),
        ("d_b", &d_b, last),
    ])?;
    call.has(&[("d_y", &d_y, shape.elements())])?;
    call.writes(&[&d_a, &d_b])?;

    let args = args![rows, width, stride, curve.number(), a, b, d_y, d_a, d_b];
    call.over("gate_backward", fours(rows, width), args)
}

/// Returns the minimum number of elements of an array with `stride` elements between the starts of
/// its rows.
fn in_rows(rows: usize, width: usize, stride: usize) -> usize {
    rows.checked_sub(1)
        .map_or(0, |last| product(&[last, stride]).saturating_add(width))
}
