//! A transformer block: [`block`](crate::gpt::block) on a CUDA device.
//!
//! It has the same parts. Between them, devices that share a block add up their summands.

use mpmd::cuda::Part;
use mpmd::prelude::*;

use super::attention::{
    AttentionOutputs, attention_backward_input, attention_forward, linear_backward_weights,
};
use super::device::Device;
use super::mlp::{mlp_backward_input, mlp_forward};
use super::norm::{
    Join, NormOutputs, Rows, add_branch, branch_norm_forward, norm_backward_input,
    norm_backward_weight, norm_forward,
};
use crate::gpt::BlockShape;
use crate::gpt::block::{BlockGradients, BlockInputs, BlockInterior, BlockParameters};
use crate::gpt::linear::LinearShape;

fn rows(shape: BlockShape) -> Rows {
    Rows { rows: shape.rows(), width: shape.width }
}

/// Issues the first part of the forward pass: `partial` becomes this device's summand of the
/// attention branch.
pub(crate) fn forward_attention(
    device: Device<'_>,
    shape: BlockShape,
    p: &BlockParameters<Part<'_>>,
    (inputs, interior): (&BlockInputs<Part<'_>>, &BlockInterior<Part<'_>>),
    partial: Part<'_>,
    x: Part<'_>,
) -> Result<()> {
    let BlockInputs { norm1_hat: hat, norm1_out: out, context, .. } = *inputs;
    let BlockInterior { norm1_inv_std: inv_std, qkv, probabilities, .. } = *interior;
    let outputs = NormOutputs { hat, inv_std, out };
    norm_forward(device, rows(shape), outputs, x, (p.norm1_gain, p.norm1_bias))?;
    let outputs = AttentionOutputs { qkv, probabilities, context };
    attention_forward(device, shape, partial, outputs, out, (p.w_qkv, p.b_qkv, p.w_out))
}

/// Issues the second part of the forward pass. `partial` must hold the complete attention branch,
/// and becomes this device's summand of the MLP branch. `y` becomes `h`, the sum of `x` and the
/// attention branch.
pub(crate) fn forward_mlp(
    device: Device<'_>,
    shape: BlockShape,
    p: &BlockParameters<Part<'_>>,
    (inputs, interior): (&BlockInputs<Part<'_>>, &BlockInterior<Part<'_>>),
    (y, partial): (Part<'_>, Part<'_>),
    x: Part<'_>,
) -> Result<()> {
    let BlockInputs { norm2_hat: hat, norm2_out: out, activated, .. } = *inputs;
    let BlockInterior { norm2_inv_std: inv_std, slope, .. } = *interior;
    let (outputs, join) =
        (NormOutputs { hat, inv_std, out }, Join { y, branch: partial, bias: p.b_out });
    branch_norm_forward(device, rows(shape), outputs, x, join, (p.norm2_gain, p.norm2_bias))?;
    mlp_forward(device, shape, partial, (activated, slope), out, (p.w_up, p.b_up, p.w_down))
}

/// Issues the last part of the forward pass: adds the complete MLP branch in `partial`, and its
/// bias, to `y`.
pub(crate) fn forward_end(
    device: Device<'_>,
    shape: BlockShape,
    p: &BlockParameters<Part<'_>>,
    (y, partial): (Part<'_>, Part<'_>),
) -> Result<()> {
    add_branch(device, rows(shape), y, partial, p.b_down)
}

/// Issues the first part of the input gradient: `gradients.d_norm2` becomes this device's summand
/// of the gradient at the second norm's output.
pub(crate) fn backward_mlp(
    device: Device<'_>,
    shape: BlockShape,
    p: &BlockParameters<Part<'_>>,
    interior: &BlockInterior<Part<'_>>,
    gradients: &BlockGradients<Part<'_>>,
    dy: Part<'_>,
) -> Result<()> {
    let BlockGradients { d_norm2, d_pre, d_mlp, .. } = *gradients;
    device.cuda().copy(dy, d_mlp)?;
    mlp_backward_input(device, shape, (d_norm2, d_pre), dy, interior.slope, (p.w_up, p.w_down))
}

/// Issues the second part of the input gradient. `gradients.d_norm2` must hold the complete sum.
/// `gradients.d_norm1` becomes this device's summand of the gradient at the first norm's output.
pub(crate) fn backward_attention(
    device: Device<'_>,
    shape: BlockShape,
    p: &BlockParameters<Part<'_>>,
    (inputs, interior): (&BlockInputs<Part<'_>>, &BlockInterior<Part<'_>>),
    gradients: &BlockGradients<Part<'_>>,
) -> Result<()> {
    let BlockGradients { d_norm1, d_qkv, d_attention, d_norm2, d_mlp, .. } = *gradients;
    let kept = (inputs.norm2_hat, interior.norm2_inv_std, p.norm2_gain);
    norm_backward_input(device, rows(shape), d_attention, Some(d_mlp), d_norm2, kept)?;
    let kept = (interior.qkv, interior.probabilities);
    attention_backward_input(device, shape, (d_norm1, d_qkv), d_attention, kept, (p.w_qkv, p.w_out))
}

/// Issues the last part of the input gradient: `dx` becomes the gradient of the block's input.
/// `gradients.d_norm1` must hold the complete sum.
pub(crate) fn backward_end(
    device: Device<'_>,
    shape: BlockShape,
    p: &BlockParameters<Part<'_>>,
    (inputs, interior): (&BlockInputs<Part<'_>>, &BlockInterior<Part<'_>>),
    gradients: &BlockGradients<Part<'_>>,
    dx: Part<'_>,
) -> Result<()> {
    let kept = (inputs.norm1_hat, interior.norm1_inv_std, p.norm1_gain);
    norm_backward_input(
        device,
        rows(shape),
        dx,
        Some(gradients.d_attention),
        gradients.d_norm1,
        kept,
    )
}

/// Issues the weight gradient: *adds* the gradients of the block's parameters to `d`.
pub(crate) fn backward_weight(
    device: Device<'_>,
    shape: BlockShape,
    inputs: &BlockInputs<Part<'_>>,
    g: &BlockGradients<Part<'_>>,
    d: &BlockParameters<Part<'_>>,
) -> Result<()> {
    let BlockShape { width, hidden, .. } = shape;
    let (all, local) = (shape.rows(), shape.local_width());
    let layer = |inputs, outputs| LinearShape { rows: all, inputs, outputs };
    norm_backward_weight(
        device,
        rows(shape),
        (d.norm1_gain, d.norm1_bias),
        g.d_norm1,
        inputs.norm1_hat,
    )?;
    let gradients = (d.w_qkv, d.b_qkv);
    linear_backward_weights(device, layer(width, 3 * local), gradients, inputs.norm1_out, g.d_qkv)?;
    let gradients = (d.w_out, d.b_out);
    linear_backward_weights(device, layer(local, width), gradients, inputs.context, g.d_attention)?;
    norm_backward_weight(
        device,
        rows(shape),
        (d.norm2_gain, d.norm2_bias),
        g.d_norm2,
        inputs.norm2_hat,
    )?;
    let gradients = (d.w_up, d.b_up);
    linear_backward_weights(device, layer(width, hidden), gradients, inputs.norm2_out, g.d_pre)?;
    let gradients = (d.w_down, d.b_down);
    linear_backward_weights(device, layer(hidden, width), gradients, inputs.activated, g.d_mlp)
}
