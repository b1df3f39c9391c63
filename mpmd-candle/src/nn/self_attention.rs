//! Attention of a sequence to itself, from one matrix with the queries, keys and values of all
//! heads.
//!
//! The kernel reads and writes the heads where they are, so nothing is copied or joined. Otherwise
//! it computes as [`attention`](super::attention()) does.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::attention::{BLOCK, Mask, Normalizer, attention, probabilities, score_gradients};
use super::values::{are_fast, exact, result, slice, tensor_like, values};
use crate::matmul::{Matrix, multiply_here, multiply_strided};
use crate::pass::keeps;
use mpmd_device::cpu::lanes;

/// Computes `softmax(scale q kᵀ + mask) v` for each head, where one tensor has queries, keys and
/// values.
///
/// `qkv` is `[batch, time, heads * 3 * dim]`: for each head its query, its key and its value. So a
/// linear layer that makes it can be divided over devices by heads. The result is `[batch, time,
/// heads * dim]`.
///
/// # Errors
///
/// If the heads do not divide the columns, or the mask does not fit.
pub fn self_attention(qkv: &Tensor, heads: usize, mask: Mask, scale: f64) -> Result<Tensor> {
    let &[batch, time, columns] = qkv.dims() else {
        bail!("self_attention of {:?}: expected [batch, time, heads * 3 * dim]", qkv.dims());
    };
    if heads == 0 || !columns.is_multiple_of(3 * heads) {
        bail!(
            "self_attention of {:?} with {heads} heads: expected [batch, time, heads * 3 * dim]",
            qkv.dims()
        );
    }
    let dim = columns / (3 * heads);
    if !matches!(mask, Mask::None | Mask::Causal) || !are_fast(&[qkv]) {
        let parts = qkv.reshape((batch, time, heads, 3, dim))?.transpose(1, 2)?;
        let part = |which: usize| parts.narrow(3, which, 1)?.squeeze(3);
        let y = attention(&part(0)?, &part(1)?, &part(2)?, mask, scale)?;
        return y.transpose(1, 2)?.reshape((batch, time, heads * dim));
    }
    if qkv.track_op() {
        keeps((batch * heads * time * size_of::<Normalizer>()) as u64);
    }
    let sizes = Sizes { batch, time, heads, dim };
    let is_causal = matches!(mask, Mask::Causal);
    let scale = scale as f32;
    let operation = SelfAttention { sizes, is_causal, scale, normalizers: OnceLock::new() };
    qkv.contiguous()?.apply_op1(operation)
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    time: usize,
    heads: usize,
    dim: usize,
}

impl Sizes {
    /// Returns the columns of the input: queries, keys and values of all heads.
    fn columns(self) -> usize {
        3 * self.width()
    }

    /// Returns the columns of the result.
    fn width(self) -> usize {
        self.heads * self.dim
    }

    /// Returns some rows of one part of a head: its queries (0), keys (1) or values (2).
    /// `sequence` are the rows of one sequence.
    fn part(
        self,
        sequence: &[f32],
        head: usize,
        which: usize,
        first: usize,
        rows: usize,
    ) -> Matrix<'_> {
        let start = first * self.columns() + (3 * head + which) * self.dim;
        Matrix::strided(&sequence[start..], rows, self.dim, self.columns())
    }

    /// Returns some rows of a head in the result of one sequence, or in its gradient.
    fn head(self, sequence: &[f32], head: usize, first: usize, rows: usize) -> Matrix<'_> {
        let start = first * self.width() + head * self.dim;
        Matrix::strided(&sequence[start..], rows, self.dim, self.width())
    }
}

/// The arrays of one head of a sequence that the backward pass reads: (input; result, unless it is
/// rounded to half precision; gradient of the result; normalizers).
type Given<'a> = (&'a [f32], Option<&'a [f32]>, &'a [f32], &'a [Normalizer]);

/// The operation of [`self_attention`].
struct SelfAttention {
    sizes: Sizes,
    is_causal: bool,
    scale: f32,
    /// One for each query, for the backward pass: `[batch, heads, time]`.
    normalizers: OnceLock<Vec<Normalizer>>,
}

impl SelfAttention {
    /// Returns the number of keys that at least one query of a block sees.
    fn keys(&self, first: usize, rows: usize) -> usize {
        if self.is_causal { first + rows } else { self.sizes.time }
    }

    /// Returns the number of keys that the query at position `at` sees.
    fn seen(&self, at: usize) -> usize {
        if self.is_causal { at + 1 } else { self.sizes.time }
    }

    fn forward(&self, qkv: &[f32]) -> (Vec<f32>, Vec<Normalizer>) {
        let sizes = self.sizes;
        let Sizes { batch, time, heads, .. } = sizes;
        let (columns, width) = (sizes.columns(), sizes.width());
        let mut out = vec![0.0; batch * time * width];
        let mut normalizers = vec![Normalizer::default(); batch * heads * time];
        if out.is_empty() {
            return (out, normalizers);
        }
        let sequences = qkv.par_chunks(time * columns).zip(out.par_chunks_mut(time * width));
        let sequences = sequences.zip(normalizers.par_chunks_mut(heads * time));
        sequences.for_each_init(Vec::new, |scores: &mut Vec<f32>, ((qkv, out), normalizers)| {
            for (at, out) in out.chunks_mut(BLOCK * width).enumerate() {
                let (first, rows) = (at * BLOCK, out.len() / width);
                let keys = self.keys(first, rows);
                scores.resize(rows * keys, 0.0);
                for head in 0..heads {
                    let part = |which, first, rows| sizes.part(qkv, head, which, first, rows);
                    multiply_here(scores, part(0, first, rows), part(1, 0, keys).t(), false);
                    let normalizers = &mut normalizers[head * time + first..][..rows];
                    let all = scores.chunks_exact_mut(keys).zip(normalizers).enumerate();
                    for (i, (row, normalizer)) in all {
                        row.iter_mut().for_each(|x| *x *= self.scale);
                        *normalizer = probabilities(row, 0..self.seen(first + i));
                    }
                    let (scores, v) = (Matrix::new(scores, rows, keys), part(2, 0, keys));
                    multiply_strided((&mut out[head * sizes.dim..], width), scores, v, false);
                }
            }
        });
        (out, normalizers)
    }

    /// Returns the gradient of queries, keys and values.
    fn backward(
        &self,
        qkv: &[f32],
        out: Option<&[f32]>,
        d_out: &[f32],
        normalizers: &[Normalizer],
    ) -> Vec<f32> {
        let sizes = self.sizes;
        let Sizes { time, heads, .. } = sizes;
        let (columns, width) = (sizes.columns(), sizes.width());
        let mut d_qkv = vec![0.0; qkv.len()];
        if d_qkv.is_empty() {
            return d_qkv;
        }
        let sequences = d_qkv.par_chunks_mut(time * columns).enumerate();
        sequences.for_each_init(
            || (Vec::new(), Vec::new()),
            |scratch, (at, d_qkv)| {
                let qkv = &qkv[at * time * columns..][..time * columns];
                let out = out.map(|out| &out[at * time * width..][..time * width]);
                let d_out = &d_out[at * time * width..][..time * width];
                for head in 0..heads {
                    let normalizers = &normalizers[(at * heads + head) * time..][..time];
                    for first in (0..time).step_by(BLOCK) {
                        let place = (head, first, BLOCK.min(time - first));
                        self.backward_block(place, (qkv, out, d_out, normalizers), d_qkv, scratch);
                    }
                }
            },
        );
        d_qkv
    }

    /// Computes the gradient of a block's queries, and adds to those of the head's keys and values.
    /// `scratch` may have any content.
    fn backward_block(
        &self,
        (head, first, rows): (usize, usize, usize),
        (qkv, out, d_out, normalizers): Given<'_>,
        d_qkv: &mut [f32],
        (scores, d_scores): &mut (Vec<f32>, Vec<f32>),
    ) {
        let sizes = self.sizes;
        let (columns, width, dim) = (sizes.columns(), sizes.width(), sizes.dim);
        let keys = self.keys(first, rows);
        let part = |which, first, rows| sizes.part(qkv, head, which, first, rows);
        let (q, k, v) = (part(0, first, rows), part(1, 0, keys), part(2, 0, keys));
        let d_rows = sizes.head(d_out, head, first, rows);
        scores.resize(rows * keys, 0.0);
        d_scores.resize(rows * keys, 0.0);
        multiply_here(scores, q, k.t(), false);
        multiply_here(d_scores, d_rows, v.t(), false);
        let all = scores.chunks_exact_mut(keys).zip(d_scores.chunks_exact_mut(keys));
        for (i, (row, d_row)) in all.enumerate() {
            let place = (first + i) * width + head * dim;
            let columns = place..place + dim;
            let mean = out.map(|out| lanes::dot(&out[columns.clone()], &d_out[columns]));
            row.iter_mut().for_each(|x| *x *= self.scale);
            let factors = (self.scale, normalizers[first + i], mean);
            score_gradients(row, d_row, 0..self.seen(first + i), factors);
        }
        let probabilities = Matrix::new(scores, rows, keys);
        let d_scores = Matrix::new(d_scores, rows, keys);
        let mut add = |which: usize, first: usize, a: Matrix<'_>, b: Matrix<'_>, add| {
            let start = first * columns + (3 * head + which) * dim;
            multiply_strided((&mut d_qkv[start..], columns), a, b, add);
        };
        add(2, 0, probabilities.t(), d_rows, true);
        add(1, 0, d_scores.t(), q, true);
        add(0, first, d_scores, k, false);
    }
}

impl CustomOp1 for SelfAttention {
    fn name(&self) -> &'static str {
        "self-attention"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Sizes { batch, time, .. } = self.sizes;
        let (out, normalizers) = self.forward(&slice(qkv, layout)?);
        self.normalizers.get_or_init(|| normalizers);
        result(out, (batch, time, self.sizes.width()), qkv)
    }

    fn bwd(&self, qkv: &Tensor, out: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let Some(normalizers) = self.normalizers.get() else {
            bail!("attention's backward pass before its forward pass");
        };
        let gradient = gradient.contiguous()?;
        let d_qkv = {
            let (qkv, out, d_out) = (values(qkv)?, exact(out)?, values(&gradient)?);
            self.backward(&qkv, out.as_deref(), &d_out, normalizers)
        };
        tensor_like(d_qkv, qkv).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// Returns (result, gradient) of a function of these values.
    fn run(x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<[Tensor; 2]> {
        let x = Var::from_tensor(x)?;
        let y = f(&x)?;
        let weights = Tensor::arange(0f32, y.elem_count() as f32, &Device::Cpu)?;
        let store = (&y * weights.sin()?.reshape(y.shape())?)?.sum_all()?.backward()?;
        let gradient = store.get(&x).cloned();
        Ok([y.detach(), gradient.ok_or_else(|| candle_core::Error::Msg("no gradient".into()))?])
    }

    #[test]
    fn result_and_gradient_match_attention_on_parts() -> Result<()> {
        for (batch, time, heads, dim) in [(2, 7, 3, 4), (1, 130, 2, 8), (3, 64, 1, 5)] {
            let count = batch * time * heads * 3 * dim;
            let x = (Tensor::arange(0f32, count as f32, &Device::Cpu)? * 1.7)?.sin()?;
            let x = x.reshape((batch, time, heads * 3 * dim))?;
            for mask in [Mask::None, Mask::Causal] {
                let split = |x: &Tensor| {
                    let x = x.reshape((batch, time, heads, 3, dim))?.transpose(1, 2)?;
                    let part = |which| x.narrow(3, which, 1)?.squeeze(3);
                    let y = attention(&part(0)?, &part(1)?, &part(2)?, mask.clone(), 0.4)?;
                    y.transpose(1, 2)?.reshape((batch, time, heads * dim))
                };
                let expected = run(&x, split)?;
                let found = run(&x, |x| self_attention(x, heads, mask.clone(), 0.4))?;
                for (found, expected) in found.iter().zip(&expected) {
                    let error = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
                    assert!(error < 1e-5, "{batch} {time} {heads} {dim} {mask:?}: {error}");
                }
            }
        }
        let odd = Tensor::zeros((1, 2, 10), candle_core::DType::F32, &Device::Cpu)?;
        let why = self_attention(&odd, 2, Mask::None, 1.0).unwrap_err().to_string();
        assert!(why.contains("[1, 2, 10] with 2 heads"), "{why}");
        Ok(())
    }
}
