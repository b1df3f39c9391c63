//! Sums, biases, conversions and dropout.

use mpmd_device::cuda::kernels::ELEMENTWISE;

use super::{Cuda, CudaPart, LayerCall, MatrixShape, args, fours};
use crate::error::Result;
use mpmd_layout::aval::DType;
use mpmd_layout::random::Key;

/// Computes `y = a + b` for `elements` elements. `y` may be `a` or `b`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn add<'x>(
    cuda: &Cuda<'_>,
    elements: usize,
    a: impl Into<CudaPart<'x>>,
    b: impl Into<CudaPart<'x>>,
    y: impl Into<CudaPart<'x>>,
) -> Result<()> {
    add_bias(
        cuda,
        MatrixShape::new(1, elements),
        a,
        None,
        Some(b.into()),
        y,
    )
}

/// Computes `y = x + bias + residual`, where either may be absent. `x`, `residual` and `y` are
/// `[rows, width]`; `bias` has one element for each column. `y` may be `x` or `residual`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn add_bias<'x>(
    cuda: &Cuda<'_>,
    shape: MatrixShape,
    x: impl Into<CudaPart<'x>>,
    bias: Option<CudaPart<'x>>,
    residual: Option<CudaPart<'x>>,
    y: impl Into<CudaPart<'x>>,
) -> Result<()> {
    let x = x.into();
    let y = y.into();

    let call = LayerCall::new(cuda, "sum", &ELEMENTWISE, &x)?;
    let MatrixShape { rows, width } = shape;
    let all = shape.elements();
    call.has(&[("x", &x, all), ("y", &y, all)])?;
    bias.iter()
        .try_for_each(|bias| call.has(&[("the bias", bias, width)]))?;
    residual
        .iter()
        .try_for_each(|more| call.has(&[("the residual", more, all)]))?;
    call.writes(&[&y])?;

    let args = args![rows, width, x, bias, residual, y];
    call.over("add_bias", fours(rows, width), args)
}

/// Computes `y += factor x` for `elements` elements. `y` has the dtype of `x`, or `f32`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn add_scaled<'x>(
    cuda: &Cuda<'_>,
    elements: usize,
    factor: f32,
    x: impl Into<CudaPart<'x>>,
    y: impl Into<CudaPart<'x>>,
) -> Result<()> {
    let x = x.into();
    let y = y.into();

    let call = LayerCall::new(cuda, "scaled sum", &ELEMENTWISE, &x)?;
    call.has(&[("x", &x, elements)])?;
    let function = match y.dtype() {
        DType::F32 => "add_scaled_f32",
        _ => "add_scaled",
    };
    match y.dtype() {
        DType::F32 => call.has_f32(&[("y", &y, elements)])?,
        _ => call.has(&[("y", &y, elements)])?,
    }

    call.writes(&[&y])?;
    let args = args![elements, factor, x, y];
    call.over(function, elements.div_ceil(4), args)
}

/// Copies `elements` elements of `f32` or `bf16` to an array of either dtype. Rounds to nearest
/// even.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn convert<'x>(
    cuda: &Cuda<'_>,
    elements: usize,
    x: impl Into<CudaPart<'x>>,
    y: impl Into<CudaPart<'x>>,
) -> Result<()> {
    let x = x.into();
    let y = y.into();

    let from_f32 = x.dtype() == DType::F32;
    let call = LayerCall::new(
        cuda,
        "conversion",
        &ELEMENTWISE,
        if from_f32 { &y } else { &x },
    )?;

    call.one("x", &x, x.dtype(), elements)?;
    call.one(
        "y",
        &y,
        if from_f32 { y.dtype() } else { DType::F32 },
        elements,
    )?;

    call.writes(&[&y])?;
    let args = args![elements, x, y];
    let function = if from_f32 { "from_f32" } else { "to_f32" };
    call.over(function, elements.div_ceil(4), args)
}

/// Sets elements to zero with the probability `drop_p`, and multiplies the others by `1 / (1 -
/// drop_p)`. The probability is rounded to a multiple of 2^-16 below 1. `y` may be `x`.
///
/// The choice depends only on `key` and the element's index, and equals the choice on the host. The
/// 16-bit words of [`bits(key, i)`](mpmd_layout::random::bits) decide for the elements `4i` to `4i
/// + 3`. The same call computes the gradient of `x` from that of `y`.
///
/// # Errors
///
/// If `drop_p` is not in `[0, 1)`. If lengths or dtypes do not fit, or the driver refuses the work.
pub fn dropout<'x>(
    cuda: &Cuda<'_>,
    elements: usize,
    key: Key,
    drop_p: f32,
    x: impl Into<CudaPart<'x>>,
    y: impl Into<CudaPart<'x>>,
) -> Result<()> {
    /// The number of different 16-bit random words.
    const DRAWS: f64 = 65536.0;

    let x = x.into();
    let y = y.into();
    let call = LayerCall::new(cuda, "dropout", &ELEMENTWISE, &x)?;
    if !(0.0..1.0).contains(&drop_p) {
        return call.fail(&format!(
            "the probability is {drop_p}: expected a number in [0, 1)"
        ));
    }

    call.has(&[("x", &x, elements), ("y", &y, elements)])?;
    call.writes(&[&y])?;

    // Below 2^16.
    let limit = (f64::from(drop_p) * DRAWS).round().min(DRAWS - 1.0) as u32;
    let scale = (DRAWS / (DRAWS - f64::from(limit))) as f32;
    let args = args![elements, key.0, limit, scale, x, y];
    call.over("dropout", elements.div_ceil(4), args)
}
