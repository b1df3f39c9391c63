//! Activation functions, alone and as gates.

use mpmd_device::cuda::kernels::ACTIVATION;

use super::{Call, Cuda, Grid, Part, Target, or_null, product};
use crate::error::Result;

/// A function of one number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Curve {
    /// GELU in the form with the hyperbolic tangent.
    Gelu,
    /// GELU in the form with the error function.
    GeluErf,
    /// `x sigmoid(x)`.
    Silu,
}

impl Curve {
    /// Returns the number by which the kernels know the function.
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
/// If lengths or dtypes do not fit, or the driver refuses.
pub fn activate<'x>(
    cuda: &Cuda<'_>,
    curve: Curve,
    (rows, width): (usize, usize),
    x: impl Into<Part<'x>>,
    bias: Option<Part<'x>>,
    y: impl Into<Part<'x>>,
) -> Result<()> {
    let (x, y) = (x.into(), y.into());
    let call = Call::new(cuda, "activation", &ACTIVATION, &x)?;
    let all = product(&[rows, width]);
    call.has(&[("x", &x, all), ("y", &y, all)])?;
    bias.iter().try_for_each(|bias| call.has(&[("the bias", bias, width)]))?;
    call.writes(&[&y])?;
    let args = [all.into(), width.into(), curve.number().into(), x.into(), or_null(bias), y.into()];
    call.launch("activate", Grid::over(all.div_ceil(4)), &args)
}

/// Computes the gradient of `x` from that of `curve(x + bias)`, `d_y`. `d_x` may be `d_y`. The
/// gradient of the bias is [`sum_rows`](super::sum_rows) of `d_x`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses.
pub fn activate_backward<'x>(
    cuda: &Cuda<'_>,
    curve: Curve,
    (rows, width): (usize, usize),
    x: impl Into<Part<'x>>,
    bias: Option<Part<'x>>,
    d_y: impl Into<Part<'x>>,
    d_x: impl Into<Target<'x>>,
) -> Result<()> {
    let (x, d_y) = (x.into(), d_y.into());
    let Target { part: d_x, adds } = d_x.into();
    let call = Call::new(cuda, "gradient of an activation", &ACTIVATION, &x)?;
    let all = product(&[rows, width]);
    call.has(&[("x", &x, all), ("d_y", &d_y, all), ("d_x", &d_x, all)])?;
    bias.iter().try_for_each(|bias| call.has(&[("the bias", bias, width)]))?;
    call.writes(&[&d_x])?;
    let args = [
        all.into(),
        width.into(),
        curve.number().into(),
        x.into(),
        or_null(bias),
        d_y.into(),
        d_x.into(),
        u32::from(adds).into(),
    ];
    call.launch("activate_backward", Grid::over(all.div_ceil(4)), &args)
}
