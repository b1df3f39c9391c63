//! Causal self-attention: [`attention`](crate::gpt::attention) on a CUDA device.
//!
//! One call computes a product for all heads of all sequences. The products cover whole squares:
//! scores above the diagonal are computed, then set to zero.

use mpmd::cuda::Part;
use mpmd::prelude::*;

use super::device::{Device, Product, size};
use super::sums::add_column_sums;
use crate::gpt::BlockShape;
use crate::gpt::linear::LinearShape;

/// Arrays that [`attention_forward`] writes for the backward pass, as on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionOutputs<'a> {
    /// Queries, keys and values: `[3, batch, heads, time, head_dim]`.
    pub(crate) qkv: Part<'a>,
    /// Attention weights: `[batch, heads, time, time]`.
    pub(crate) probabilities: Part<'a>,
    /// Weighted sums of the values: `[batch, time, heads * head_dim]`.
    pub(crate) context: Part<'a>,
}

/// Issues `out = attention(x) w_out`: this device's summand, without the output bias. Also fills
/// `outputs`.
pub(crate) fn attention_forward(
    device: Device<'_>,
    shape: BlockShape,
    out: Part<'_>,
    outputs: AttentionOutputs<'_>,
    x: Part<'_>,
    (w_qkv, b_qkv, w_out): (Part<'_>, Part<'_>, Part<'_>),
) -> Result<()> {
    let AttentionOutputs { qkv, probabilities, context } = outputs;
    let (rows, local, width) = (shape.rows(), shape.local_width(), shape.width);
    let projected = device.floats(3 * rows * local)?;
    device.matmul(Product::new(rows, width, 3 * local), (&projected).into(), x, w_qkv)?;
    split_heads(device, shape, 3, qkv, (&projected).into(), Some(b_qkv))?;
    let Heads { q, k, v, square, head } = Heads::of(shape, qkv);
    device.matmul_nt(square, probabilities, q, k)?;
    let args = [
        probabilities.into(),
        size(heads_rows(shape))?.into(),
        size(shape.time)?.into(),
        scale(shape).into(),
    ];
    device.rows("causal_softmax", heads_rows(shape), &args)?;
    // The projections are no longer needed, so the product overwrites them.
    device.matmul(head, (&projected).into(), probabilities, v)?;
    merge_heads(device, shape, 1, context, (&projected).into())?;
    device.matmul(Product::new(rows, local, width), out, context, w_out)
}

/// Issues the computation of `d_qkv` `[rows, 3, heads * head_dim]` and `d_x` from `d_out`, the
/// gradient of the branch's complete output. `d_x` is this device's summand of the gradient of the
/// input.
pub(crate) fn attention_backward_input(
    device: Device<'_>,
    shape: BlockShape,
    (d_x, d_qkv): (Part<'_>, Part<'_>),
    d_out: Part<'_>,
    (qkv, probabilities): (Part<'_>, Part<'_>),
    (w_qkv, w_out): (Part<'_>, Part<'_>),
) -> Result<()> {
    let (rows, local, width) = (shape.rows(), shape.local_width(), shape.width);
    let Heads { q, k, v, square, head } = Heads::of(shape, qkv);
    let by_head = device.floats(3 * rows * local)?;
    let by_head = Part::from(&by_head);
    let d_gathered = device.floats(rows * local)?;
    let d_gathered = Part::from(&d_gathered);
    let d_scores = device.floats(heads_rows(shape) * shape.time)?;
    let d_scores = Part::from(&d_scores);
    // The gradients of the queries overwrite this later.
    let d_context = by_head;
    device.matmul_nt(Product::new(rows, width, local), d_context, d_out, w_out)?;
    split_heads(device, shape, 1, d_gathered, d_context, None)?;
    let Heads { q: d_q, k: d_k, v: d_v, .. } = Heads::of(shape, by_head);
    device.matmul_tn(head, d_v, probabilities, d_gathered)?;
    device.matmul_nt(square, d_scores, d_gathered, v)?;
    let args = [
        d_scores.into(),
        probabilities.into(),
        size(heads_rows(shape))?.into(),
        size(shape.time)?.into(),
        scale(shape).into(),
    ];
    device.rows("causal_softmax_backward", heads_rows(shape), &args)?;
    device.matmul(head, d_q, d_scores, k)?;
    device.matmul_tn(head, d_k, d_scores, q)?;
    merge_heads(device, shape, 3, d_qkv, by_head)?;
    device.matmul_nt(Product::new(rows, 3 * local, width), d_x, d_qkv, w_qkv)
}

/// *Adds* the gradients of a linear layer's weights to `dw` and of its bias to `dbias`. `x` is the
/// layer's input, and `dz` the gradient of its output.
pub(crate) fn linear_backward_weights(
    device: Device<'_>,
    shape: LinearShape,
    (dw, dbias): (Part<'_>, Part<'_>),
    x: Part<'_>,
    dz: Part<'_>,
) -> Result<()> {
    let LinearShape { rows, inputs, outputs } = shape;
    device.matmul_tn(Product::new(inputs, rows, outputs).added(), dw, x, dz)?;
    add_column_sums(device, (rows, outputs), dbias, dz, None)
}

/// Queries, keys and values by head, and the sizes of their products.
struct Heads<'a> {
    q: Part<'a>,
    k: Part<'a>,
    v: Part<'a>,
    /// Product that gives `[time, time]` for each head.
    square: Product,
    /// Product of `[time, time]` with `[time, head_dim]`, for each head.
    head: Product,
}

impl<'a> Heads<'a> {
    /// Splits an array `[3, batch, heads, time, head_dim]` into queries, keys and values, without a
    /// copy.
    fn of(shape: BlockShape, qkv: Part<'a>) -> Self {
        let BlockShape { batch, heads, time, .. } = shape;
        let each = shape.rows() * shape.local_width();
        let square = Product::new(time, shape.head_dim(), time).batch(batch * heads);
        let head = Product::new(time, time, shape.head_dim()).batch(batch * heads);
        Self { q: qkv, k: qkv.at(each), v: qkv.at(2 * each), square, head }
    }
}

/// Issues a copy of `rows` `[batch, time, groups, heads * head_dim]`, plus a bias if there is one,
/// to `by_head` `[groups, batch, heads, time, head_dim]`.
fn split_heads(
    device: Device<'_>,
    shape: BlockShape,
    groups: usize,
    by_head: Part<'_>,
    rows: Part<'_>,
    bias: Option<Part<'_>>,
) -> Result<()> {
    let BlockShape { batch, heads, time, .. } = shape;
    let args = [
        by_head.into(),
        rows.into(),
        // The kernel does not read it if there is no bias.
        bias.unwrap_or(rows).into(),
        u32::from(bias.is_some()).into(),
        size(groups)?.into(),
        size(batch)?.into(),
        size(heads)?.into(),
        size(time)?.into(),
        size(shape.head_dim())?.into(),
    ];
    size(groups * heads_rows(shape))?;
    device.rows("split_heads", groups * heads_rows(shape), &args)
}

/// Issues a copy of `by_head` `[groups, batch, heads, time, head_dim]` to `rows` `[batch, time,
/// groups, heads * head_dim]`.
fn merge_heads(
    device: Device<'_>,
    shape: BlockShape,
    groups: usize,
    rows: Part<'_>,
    by_head: Part<'_>,
) -> Result<()> {
    let BlockShape { batch, heads, time, .. } = shape;
    let args = [
        rows.into(),
        by_head.into(),
        size(groups)?.into(),
        size(batch)?.into(),
        size(heads)?.into(),
        size(time)?.into(),
        size(shape.head_dim())?.into(),
    ];
    size(groups * heads_rows(shape))?;
    device.rows("merge_heads", groups * heads_rows(shape), &args)
}

/// Returns the number of positions of all heads of all sequences.
fn heads_rows(shape: BlockShape) -> usize {
    shape.batch * shape.heads * shape.time
}

/// Returns the factor of attention scores, `1 / sqrt(head_dim)`, as on the host.
fn scale(shape: BlockShape) -> f32 {
    (shape.head_dim() as f64).sqrt().recip() as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::attention as host;
    use crate::gpt::cuda::testing::{array, assert_near, elsewhere, floats, floats_on_device};

    /// A shape in which half of the heads are on another device, and a sequence is longer than a
    /// warp.
    const SHAPE: BlockShape =
        BlockShape { batch: 2, time: 37, width: 24, heads_total: 4, heads: 2, hidden: 1 };

    #[test]
    fn attention_and_its_gradients_match_the_host() {
        if elsewhere!() {
            return;
        }
        let (rows, local, width) = (SHAPE.rows(), SHAPE.local_width(), SHAPE.width);
        let squares = SHAPE.batch * SHAPE.heads * SHAPE.time * SHAPE.time;
        let lens = [rows * width, width * 3 * local, 3 * local, local * width, rows * width];
        let [x, w_qkv, b_qkv, w_out, d_out] =
            std::array::from_fn(|i| floats(lens[i], i as u64 + 1));
        let zeros = |len: usize| vec![0.0f32; len];
        let (mut out, mut qkv, mut probabilities, mut context) =
            (zeros(rows * width), zeros(3 * rows * local), zeros(squares), zeros(rows * local));
        let outputs = host::AttentionOutputs {
            qkv: &mut qkv,
            probabilities: &mut probabilities,
            context: &mut context,
        };
        let scratch = &mut zeros(host::attention_scratch(SHAPE));
        host::attention_forward(SHAPE, &mut out, outputs, &x, (&w_qkv, &b_qkv, &w_out), scratch);
        let (mut d_x, mut d_qkv) = (zeros(rows * width), zeros(3 * rows * local));
        let (kept, weights) = ((&qkv[..], &probabilities[..]), (&w_qkv[..], &w_out[..]));
        host::attention_backward_input(SHAPE, &mut d_x, &mut d_qkv, &d_out, kept, weights, scratch);
        let inputs = [&x, &w_qkv, &b_qkv, &w_out, &d_out].map(|values| array(values)).to_vec();
        let expected = [out, qkv, probabilities, context, d_x, d_qkv];
        let found = floats_on_device(inputs, &expected.each_ref().map(Vec::len), |device, x, y| {
            let outputs = AttentionOutputs { qkv: y[1], probabilities: y[2], context: y[3] };
            attention_forward(device, SHAPE, y[0], outputs, x[0], (x[1], x[2], x[3]))?;
            let (kept, weights) = ((y[1], y[2]), (x[1], x[3]));
            attention_backward_input(device, SHAPE, (y[4], y[5]), x[4], kept, weights)
        });
        let names = ["out", "qkv", "probabilities", "context", "d_x", "d_qkv"];
        for (name, (found, expected)) in names.iter().zip(found.iter().zip(&expected)) {
            assert_near(name, found, expected);
        }
        for (at, row) in found[2].chunks(SHAPE.time).enumerate() {
            assert!(
                row[at % SHAPE.time + 1..].iter().all(|p| *p == 0.0),
                "later positions have no weight"
            );
        }
    }
}
