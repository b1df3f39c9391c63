//! Sums, biases and conversions.

use mpmd_device::cuda::kernels::ELEMENTWISE;

use super::{Call, Cuda, Grid, Part, or_null, product};
use crate::error::Result;

/// Computes `y = a + b` of so many elements. `y` may be `a` or `b`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses.
pub fn add<'x>(
    cuda: &Cuda<'_>,
    elements: usize,
    a: impl Into<Part<'x>>,
    b: impl Into<Part<'x>>,
    y: impl Into<Part<'x>>,
) -> Result<()> {
    add_bias(cuda, (1, elements), a, None, Some(b.into()), y)
}

/// Computes `y = x + bias + residual`, where either may be absent. `x`, `residual` and `y` are
/// `[rows, width]`; `bias` has one element for each column. `y` may be `x` or `residual`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses.
pub fn add_bias<'x>(
    cuda: &Cuda<'_>,
    (rows, width): (usize, usize),
    x: impl Into<Part<'x>>,
    bias: Option<Part<'x>>,
    residual: Option<Part<'x>>,
    y: impl Into<Part<'x>>,
) -> Result<()> {
    let (x, y) = (x.into(), y.into());
    let call = Call::new(cuda, "sum", &ELEMENTWISE, &x)?;
    let all = product(&[rows, width]);
    call.has(&[("x", &x, all), ("y", &y, all)])?;
    bias.iter().try_for_each(|bias| call.has(&[("the bias", bias, width)]))?;
    residual.iter().try_for_each(|more| call.has(&[("the residual", more, all)]))?;
    call.writes(&[&y])?;
    let args = [all.into(), width.into(), x.into(), or_null(bias), or_null(residual), y.into()];
    call.launch("add_bias", Grid::over(all.div_ceil(4)), &args)
}
