//! The block's first branch: causal self-attention.
//!
//! One product computes queries, keys and values of all heads of this device. They are then laid
//! out by head, so that each head's products have dense matrices. Probabilities above the diagonal
//! are zero.

use crate::math::{Real, matmul, matmul_nt, matmul_tn};

use super::linear::{LinearShape, linear_forward};
use super::{BlockShape, lanes};

/// Arrays that [`attention_forward`] writes for the backward pass.
#[derive(Debug)]
pub struct AttentionOutputs<'a, T> {
    /// Queries, keys and values: `[3, batch, heads, time, head_dim]`.
    pub qkv: &'a mut [T],
    /// Attention weights: `[batch, heads, time, time]`. Row `i` weighs positions 0 to `i` and sums
    /// to 1; later positions have weight 0.
    pub probabilities: &'a mut [T],
    /// Weighted sums of the values: `[batch, time, heads * head_dim]`.
    pub context: &'a mut [T],
}

/// Returns the number of scratch elements that [`attention_forward`] and
/// [`attention_backward_input`] need.
pub fn attention_scratch(shape: BlockShape) -> usize {
    let head = shape.time * shape.head_dim();
    let forward = 3 * shape.rows() * shape.local_width() + head;
    let backward = shape.rows() * shape.local_width() + shape.time * shape.time + 4 * head;
    forward.max(backward)
}

/// Computes `out = attention(x) w_out`: this device's summand. The caller adds up the summands and
/// then adds the output bias.
///
/// `x` and `out` are `[rows, width]`. The parameters are the tuple (QKV weights, QKV bias, output
/// weights). Fills `outputs` for the backward pass. `scratch` may have any content and is
/// overwritten.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`, or `scratch` is shorter than [`attention_scratch`].
pub fn attention_forward<T: Real>(
    shape: BlockShape,
    out: &mut [T],
    outputs: AttentionOutputs<'_, T>,
    x: &[T],
    (w_qkv, b_qkv, w_out): (&[T], &[T], &[T]),
    scratch: &mut [T],
) {
    let AttentionOutputs { qkv, probabilities, context } = outputs;
    let (rows, local) = (shape.rows(), shape.local_width());
    let (time, head_dim) = (shape.time, shape.head_dim());
    assert_eq!(qkv.len(), 3 * rows * local, "queries, keys and values");
    assert_eq!(probabilities.len(), shape.batch * shape.heads * time * time, "probabilities");
    assert_eq!(context.len(), rows * local, "context");
    let (projected, scratch) = scratch.split_at_mut(3 * rows * local);
    let layer = LinearShape { rows, inputs: shape.width, outputs: 3 * local };
    linear_forward(layer, projected, x, w_qkv, b_qkv);
    let (q, kv) = qkv.split_at_mut(rows * local);
    let (k, v) = kv.split_at_mut(rows * local);
    for (which, heads) in [&mut *q, &mut *k, &mut *v].into_iter().enumerate() {
        for (at, head) in heads.chunks_exact_mut(time * head_dim).enumerate() {
            let columns = Columns::of(shape, at, which, 3 * local);
            columns.gather(head, projected);
        }
    }
    let gathered = &mut scratch[..time * head_dim];
    let heads = (q.chunks_exact(time * head_dim))
        .zip(k.chunks_exact(time * head_dim))
        .zip(v.chunks_exact(time * head_dim))
        .zip(probabilities.chunks_exact_mut(time * time));
    for (at, (((q, k), v), probabilities)) in heads.enumerate() {
        matmul_nt(probabilities, q, k, time, head_dim, time, false);
        causal_softmax(probabilities, time, scale(shape));
        matmul(gathered, probabilities, v, time, time, head_dim, false);
        Columns::of(shape, at, 0, local).scatter(context, gathered);
    }
    matmul(out, context, w_out, rows, local, shape.width, false);
}

/// Computes gradients from `d_out` `[rows, width]`, the gradient of the branch's complete output.
///
/// `d_qkv` `[rows, 3, heads * head_dim]` becomes the gradient of the projections. `d_x` `[rows,
/// width]` becomes this device's summand of the gradient of the input. `qkv` and `probabilities`
/// are those of [`AttentionOutputs`]. `scratch` may have any content and is overwritten.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`, or `scratch` is shorter than [`attention_scratch`].
pub fn attention_backward_input<T: Real>(
    shape: BlockShape,
    d_x: &mut [T],
    d_qkv: &mut [T],
    d_out: &[T],
    (qkv, probabilities): (&[T], &[T]),
    (w_qkv, w_out): (&[T], &[T]),
    scratch: &mut [T],
) {
    let (rows, local) = (shape.rows(), shape.local_width());
    let (time, head_dim) = (shape.time, shape.head_dim());
    assert_eq!(
        (qkv.len(), d_qkv.len()),
        (3 * rows * local, 3 * rows * local),
        "queries, keys and values"
    );
    assert_eq!(probabilities.len(), shape.batch * shape.heads * time * time, "probabilities");
    let (d_context, scratch) = scratch.split_at_mut(rows * local);
    let (d_scores, scratch) = scratch.split_at_mut(time * time);
    let (d_gathered, scratch) = scratch.split_at_mut(time * head_dim);
    let d_head = &mut scratch[..time * head_dim];
    matmul_nt(d_context, d_out, w_out, rows, shape.width, local, false);
    let (q, kv) = qkv.split_at(rows * local);
    let (k, v) = kv.split_at(rows * local);
    let heads = (q.chunks_exact(time * head_dim))
        .zip(k.chunks_exact(time * head_dim))
        .zip(v.chunks_exact(time * head_dim))
        .zip(probabilities.chunks_exact(time * time));
    for (at, (((q, k), v), probabilities)) in heads.enumerate() {
        Columns::of(shape, at, 0, local).gather(d_gathered, d_context);
        matmul_tn(d_head, probabilities, d_gathered, time, time, head_dim, false);
        Columns::of(shape, at, 2, 3 * local).scatter(d_qkv, d_head);
        matmul_nt(d_scores, d_gathered, v, time, head_dim, time, false);
        causal_softmax_backward(d_scores, probabilities, time, scale(shape));
        matmul(d_head, d_scores, k, time, time, head_dim, false);
        Columns::of(shape, at, 0, 3 * local).scatter(d_qkv, d_head);
        matmul_tn(d_head, d_scores, q, time, time, head_dim, false);
        Columns::of(shape, at, 1, 3 * local).scatter(d_qkv, d_head);
    }
    matmul_nt(d_x, d_qkv, w_qkv, rows, 3 * local, shape.width, false);
}

/// The position of one head of one sequence in a matrix of all rows.
struct Columns {
    /// Index of the head's first element in the matrix.
    start: usize,
    /// Distance between two rows of the matrix, in elements.
    stride: usize,
    head_dim: usize,
}

impl Columns {
    /// Returns the position of one head of one sequence, where `at` is `sequence * heads + head`.
    ///
    /// `which` is 0 for queries, 1 for keys and 2 for values. `stride` is the length of a row, in
    /// elements.
    fn of(shape: BlockShape, at: usize, which: usize, stride: usize) -> Self {
        let (sequence, head) = (at / shape.heads, at % shape.heads);
        let head_dim = shape.head_dim();
        let start = sequence * shape.time * stride + which * shape.local_width() + head * head_dim;
        Self { start, stride, head_dim }
    }

    fn gather<T: Copy>(&self, head: &mut [T], rows: &[T]) {
        let rows = rows[self.start..].chunks(self.stride);
        for (head, row) in head.chunks_exact_mut(self.head_dim).zip(rows) {
            head.copy_from_slice(&row[..self.head_dim]);
        }
    }

    fn scatter<T: Copy>(&self, rows: &mut [T], head: &[T]) {
        let rows = rows[self.start..].chunks_mut(self.stride);
        for (head, row) in head.chunks_exact(self.head_dim).zip(rows) {
            row[..self.head_dim].copy_from_slice(head);
        }
    }
}

/// Returns the factor of attention scores, `1 / sqrt(head_dim)`.
fn scale<T: Real>(shape: BlockShape) -> T {
    T::of((shape.head_dim() as f64).sqrt().recip())
}

/// Turns scores `[time, time]` into probabilities, in place. Row `i` becomes the softmax of its
/// first `i + 1` elements times `scale`, followed by zeros.
fn causal_softmax<T: Real>(scores: &mut [T], time: usize, scale: T) {
    for (i, row) in scores.chunks_exact_mut(time).enumerate() {
        let (seen, hidden) = row.split_at_mut(i + 1);
        let largest = lanes::max(seen);
        for score in &mut *seen {
            *score = (scale * (*score - largest)).exp_in_loop();
        }
        let share = T::ONE / lanes::sum(seen);
        for score in seen {
            *score *= share;
        }
        hidden.fill(T::ZERO);
    }
}

/// Replaces `d_scores`, the gradient of the probabilities, by the gradient of the scores before
/// `scale`. Both arrays are `[time, time]`.
fn causal_softmax_backward<T: Real>(
    d_scores: &mut [T],
    probabilities: &[T],
    time: usize,
    scale: T,
) {
    let rows = d_scores.chunks_exact_mut(time).zip(probabilities.chunks_exact(time));
    for (i, (d_row, row)) in rows.enumerate() {
        let (seen, hidden) = d_row.split_at_mut(i + 1);
        let row = &row[..=i];
        let mean = lanes::dot(seen, row);
        for (d, probability) in seen.iter_mut().zip(row) {
            *d = scale * *probability * (*d - mean);
        }
        hidden.fill(T::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::linear::linear_backward_weights;
    use crate::gpt::testing::{assert_gradient, random};

    const SHAPE: BlockShape =
        BlockShape { batch: 2, time: 3, width: 4, heads_total: 2, heads: 2, hidden: 5 };

    struct Forward {
        out: Vec<f64>,
        qkv: Vec<f64>,
        probabilities: Vec<f64>,
        context: Vec<f64>,
    }

    fn forward(x: &[f64], w_qkv: &[f64], b_qkv: &[f64], w_out: &[f64]) -> Forward {
        let nan = |len| vec![f64::NAN; len];
        let mut f =
            Forward { out: nan(24), qkv: nan(72), probabilities: nan(36), context: nan(24) };
        let outputs = AttentionOutputs {
            qkv: &mut f.qkv,
            probabilities: &mut f.probabilities,
            context: &mut f.context,
        };
        let scratch = &mut nan(attention_scratch(SHAPE));
        attention_forward(SHAPE, &mut f.out, outputs, x, (w_qkv, b_qkv, w_out), scratch);
        f
    }

    #[test]
    fn attention_equals_its_definition() {
        let (x, w_qkv, b_qkv, w_out) = (random(24, 1), random(48, 2), random(12, 3), random(16, 4));
        let f = forward(&x, &w_qkv, &b_qkv, &w_out);
        // Index: [which][sequence][time][column]. Head h has columns 2h and 2h + 1.
        let project = |which: usize, row: usize, column: usize| -> f64 {
            let at = which * 4 + column;
            b_qkv[at] + (0..4).map(|i| x[row * 4 + i] * w_qkv[i * 12 + at]).sum::<f64>()
        };
        for (row, column) in (0..6).flat_map(|row| (0..4).map(move |column| (row, column))) {
            let (first, head) = (row / 3 * 3, column / 2 * 2);
            let weights: Vec<f64> = (first..=row)
                .map(|other| {
                    let dot: f64 =
                        (head..head + 2).map(|c| project(0, row, c) * project(1, other, c)).sum();
                    (dot / 2.0f64.sqrt()).exp()
                })
                .collect();
            let values =
                (first..=row).zip(&weights).map(|(other, w)| w * project(2, other, column));
            let expected = values.sum::<f64>() / weights.iter().sum::<f64>();
            assert!((f.context[row * 4 + column] - expected).abs() < 1e-12, "{row} {column}");
        }
    }

    #[test]
    fn softmax_of_large_scores_is_finite() {
        let mut scores = vec![1e30f32, 7.0, 7.0, 900.0, 1000.0, 7.0, -1e30, -1e30, -1e30];
        causal_softmax(&mut scores, 3, 1.0);
        assert_eq!(scores[..6], [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
        assert!(scores[6..].iter().all(|p| (p - 1.0 / 3.0).abs() < 1e-6), "{scores:?}");
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let mut leaves = [random(24, 1), random(48, 2), random(12, 3), random(16, 4)];
        let dy = random(24, 5);
        let f = forward(&leaves[0], &leaves[1], &leaves[2], &leaves[3]);
        let mut gradients = [24, 48, 12, 16].map(|len| vec![0.0; len]);
        let [d_x, d_w, d_b, d_w_out] = &mut gradients;
        let mut d_qkv = vec![f64::NAN; 72];
        attention_backward_input(
            SHAPE,
            d_x,
            &mut d_qkv,
            &dy,
            (&f.qkv, &f.probabilities),
            (&leaves[1], &leaves[3]),
            &mut vec![f64::NAN; attention_scratch(SHAPE)],
        );
        let layer = LinearShape { rows: 6, inputs: 4, outputs: 12 };
        linear_backward_weights(layer, d_w, d_b, &leaves[0], &d_qkv);
        matmul_tn(d_w_out, &f.context, &dy, 4, 6, 4, true);
        let value = |l: &[Vec<f64>; 4]| lanes::dot(&dy, &forward(&l[0], &l[1], &l[2], &l[3]).out);
        for (at, gradient) in gradients.iter().enumerate() {
            assert_gradient(&format!("leaf {at}"), gradient, &mut leaves, |l| &mut l[at], value);
        }
    }
}
