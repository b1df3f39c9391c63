//! Layer norm: [`norm`](crate::gpt::norm) on a CUDA device.

use mpmd_core::cuda::Part;
use mpmd_core::prelude::*;

use super::device::{Device, size};
use super::sums::add_column_sums;

/// Rows that are normalised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    /// How many.
    pub(crate) rows: usize,
    /// Their columns: at least one.
    pub(crate) width: usize,
}

impl Rows {
    /// As kernels are told it.
    fn sizes(self) -> Result<(u32, u32, f32)> {
        Ok((size(self.rows)?, size(self.width)?, (1.0 / self.width as f64) as f32))
    }
}

/// What [`norm_forward`] writes; the same as on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormOutputs<'a> {
    /// `[rows, width]`.
    pub(crate) hat: Part<'a>,
    /// `[rows]`.
    pub(crate) inv_std: Part<'a>,
    /// `[rows, width]`.
    pub(crate) out: Part<'a>,
}

/// What a block's path is joined by before the norm: `y = x + (branch + bias)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Join<'a> {
    pub(crate) y: Part<'a>,
    pub(crate) branch: Part<'a>,
    pub(crate) bias: Part<'a>,
}

/// Normalises the rows of `x`.
pub(crate) fn norm_forward(
    device: Device<'_>,
    shape: Rows,
    outputs: NormOutputs<'_>,
    x: Part<'_>,
    (gain, bias): (Part<'_>, Part<'_>),
) -> Result<()> {
    let NormOutputs { hat, inv_std, out } = outputs;
    let (rows, width, share) = shape.sizes()?;
    device.rows(
        "norm_forward",
        shape.rows,
        &[
            hat.into(),
            inv_std.into(),
            out.into(),
            x.into(),
            gain.into(),
            bias.into(),
            rows.into(),
            width.into(),
            share.into(),
        ],
    )
}

/// Joins the branch to the path and normalises what comes out.
pub(crate) fn branch_norm_forward(
    device: Device<'_>,
    shape: Rows,
    outputs: NormOutputs<'_>,
    x: Part<'_>,
    join: Join<'_>,
    (gain, bias): (Part<'_>, Part<'_>),
) -> Result<()> {
    let NormOutputs { hat, inv_std, out } = outputs;
    let Join { y, branch, bias: branch_bias } = join;
    let (rows, width, share) = shape.sizes()?;
    device.rows(
        "branch_norm_forward",
        shape.rows,
        &[
            y.into(),
            hat.into(),
            inv_std.into(),
            out.into(),
            x.into(),
            branch.into(),
            branch_bias.into(),
            gain.into(),
            bias.into(),
            rows.into(),
            width.into(),
            share.into(),
        ],
    )
}

/// `y += branch + bias`.
pub(crate) fn add_branch(
    device: Device<'_>,
    shape: Rows,
    y: Part<'_>,
    branch: Part<'_>,
    bias: Part<'_>,
) -> Result<()> {
    let (rows, width, _) = shape.sizes()?;
    let args = [y.into(), branch.into(), bias.into(), rows.into(), width.into()];
    device.rows("add_branch", shape.rows, &args)
}

/// `dx = base +` the gradient of the norm's input, from `d_out`, that of its result.
pub(crate) fn norm_backward_input(
    device: Device<'_>,
    shape: Rows,
    dx: Part<'_>,
    base: Option<Part<'_>>,
    d_out: Part<'_>,
    (hat, inv_std, gain): (Part<'_>, Part<'_>, Part<'_>),
) -> Result<()> {
    let (rows, width, share) = shape.sizes()?;
    device.rows(
        "norm_backward_input",
        shape.rows,
        &[
            dx.into(),
            // Where there is none it is not looked at.
            base.unwrap_or(dx).into(),
            u32::from(base.is_some()).into(),
            d_out.into(),
            hat.into(),
            inv_std.into(),
            gain.into(),
            rows.into(),
            width.into(),
            share.into(),
        ],
    )
}

/// *Adds* the gradients of gain and bias.
pub(crate) fn norm_backward_weight(
    device: Device<'_>,
    shape: Rows,
    (d_gain, d_bias): (Part<'_>, Part<'_>),
    d_out: Part<'_>,
    hat: Part<'_>,
) -> Result<()> {
    add_column_sums(device, (shape.rows, shape.width), d_bias, d_out, Some((d_gain, hat)))
}
