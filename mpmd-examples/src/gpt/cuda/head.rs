//! From rows to logits and a loss: [`head`](crate::gpt::head) and [`loss`](crate::gpt::loss) on a CUDA device.

use mpmd_core::cuda::Part;
use mpmd_core::prelude::*;

use super::device::{Device, Product, size};
use super::norm::{NormOutputs, Rows, norm_backward_input, norm_backward_weight, norm_forward};
use super::sums::sum_doubles;
use crate::gpt::head::{HeadGradients, HeadParameters, HeadResiduals};
use crate::gpt::{BYTES, BlockShape};

fn rows(shape: BlockShape) -> Rows {
    Rows { rows: shape.rows(), width: shape.width }
}

/// The logits of `x`, written to `residuals.probabilities`.
pub(crate) fn logits(
    device: Device<'_>,
    shape: BlockShape,
    p: &HeadParameters<Part<'_>>,
    residuals: &HeadResiduals<Part<'_>>,
    x: Part<'_>,
) -> Result<()> {
    let HeadResiduals { norm_hat: hat, norm_inv_std: inv_std, norm_out: out, probabilities } = *residuals;
    norm_forward(device, rows(shape), NormOutputs { hat, inv_std, out }, x, (p.norm_gain, p.norm_bias))?;
    device.matmul(Product::new(shape.rows(), shape.width, BYTES), probabilities, out, p.weight)
}

/// `sum`, a double, is the sum over the rows of the cross-entropy of `targets` in nats.
pub(crate) fn forward(
    device: Device<'_>,
    shape: BlockShape,
    p: &HeadParameters<Part<'_>>,
    residuals: &HeadResiduals<Part<'_>>,
    sum: Part<'_>,
    (x, targets): (Part<'_>, Part<'_>),
) -> Result<()> {
    logits(device, shape, p, residuals, x)?;
    let rows = shape.rows();
    let losses = device.doubles(rows)?;
    let args = [residuals.probabilities.into(), (&losses).into(), targets.into(), size(rows)?.into()];
    device.rows("cross_entropy", rows, &args)?;
    sum_doubles(device, sum, (&losses).into(), rows)
}

/// The gradient `dx` of the head's input, and the weight residuals, of the loss sum times `factor`, a double.
pub(crate) fn backward_input(
    device: Device<'_>,
    shape: BlockShape,
    p: &HeadParameters<Part<'_>>,
    residuals: &HeadResiduals<Part<'_>>,
    gradients: &HeadGradients<Part<'_>>,
    dx: Part<'_>,
    (targets, factor): (Part<'_>, Part<'_>),
) -> Result<()> {
    let HeadGradients { d_norm, d_logits } = *gradients;
    let count = shape.rows();
    let args =
        [d_logits.into(), residuals.probabilities.into(), targets.into(), factor.into(), size(count)?.into()];
    device.rows("cross_entropy_gradient", count, &args)?;
    device.matmul_nt(Product::new(count, BYTES, shape.width), d_norm, d_logits, p.weight)?;
    let kept = (residuals.norm_hat, residuals.norm_inv_std, p.norm_gain);
    norm_backward_input(device, rows(shape), dx, None, d_norm, kept)
}

/// *Adds* the gradients of the parameters. Of the residuals it reads `norm_hat` and `norm_out`, in this order.
pub(crate) fn backward_weight(
    device: Device<'_>,
    shape: BlockShape,
    (norm_hat, norm_out): (Part<'_>, Part<'_>),
    gradients: &HeadGradients<Part<'_>>,
    d: &HeadParameters<Part<'_>>,
) -> Result<()> {
    let product = Product::new(shape.width, shape.rows(), BYTES).added();
    device.matmul_tn(product, d.weight, norm_out, gradients.d_logits)?;
    norm_backward_weight(device, rows(shape), (d.norm_gain, d.norm_bias), gradients.d_norm, norm_hat)
}
