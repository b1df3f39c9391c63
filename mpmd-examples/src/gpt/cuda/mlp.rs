//! The block's second branch: [`mlp`](crate::gpt::mlp) on a CUDA device.

use mpmd_core::cuda::Part;
use mpmd_core::prelude::*;

use super::device::{Device, Product, size};
use crate::gpt::BlockShape;

/// `out = gelu(x w_up + b_up) w_down`, this device's summand, without the bias of the way back.
pub(crate) fn mlp_forward(
    device: Device<'_>,
    shape: BlockShape,
    out: Part<'_>,
    (activated, slope): (Part<'_>, Part<'_>),
    x: Part<'_>,
    (w_up, b_up, w_down): (Part<'_>, Part<'_>, Part<'_>),
) -> Result<()> {
    let BlockShape { width, hidden, .. } = shape;
    let rows = shape.rows();
    // The sums before GELU are needed only here, so the slopes take their place.
    device.matmul(Product::new(rows, width, hidden), slope, x, w_up)?;
    let args = [activated.into(), slope.into(), b_up.into(), size(rows)?.into(), size(hidden)?.into()];
    device.rows("bias_gelu", rows, &args)?;
    device.matmul(Product::new(rows, hidden, width), out, activated, w_down)
}

/// From `d_out`, the gradient of the branch's whole output: `d_pre`, that of the sums before GELU, and `d_x`, this
/// device's summand of that of the input.
pub(crate) fn mlp_backward_input(
    device: Device<'_>,
    shape: BlockShape,
    (d_x, d_pre): (Part<'_>, Part<'_>),
    d_out: Part<'_>,
    slope: Part<'_>,
    (w_up, w_down): (Part<'_>, Part<'_>),
) -> Result<()> {
    let BlockShape { width, hidden, .. } = shape;
    let rows = shape.rows();
    device.matmul_nt(Product::new(rows, width, hidden), d_pre, d_out, w_down)?;
    let elements = rows * hidden;
    device.elements("multiply", elements, &[d_pre.into(), slope.into(), elements.into()])?;
    device.matmul_nt(Product::new(rows, hidden, width), d_x, d_pre, w_up)
}
