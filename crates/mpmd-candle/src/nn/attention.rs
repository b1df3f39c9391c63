//! Attention in memory that does not grow with the square of the sequence's length.
//!
//! The kernel computes the scores of a block of queries at a time and drops them. It keeps two
//! numbers for each query, its `Normalizer`, from which the backward pass computes the
//! probabilities again. A block ignores the keys before and after those that its queries see.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use candle_core::{
    CpuStorage, CustomOp1, CustomOp3, D, DType, Layout, Result, Shape, Tensor, bail,
};
pub use candle_nn::attention::*;
use rayon::prelude::*;

use super::softmax::softmax;
use super::values::{TensorValues, are_fast, exact, result, single, slice, tensor_like, values};
use crate::cuda_layers;
use crate::matmul::{Matrix, multiply_here};
use crate::pass::{attends, keeps};
use mpmd_device::cpu::rows;
use mpmd_device::cpu::rows::attention::{Scores, probabilities, score_gradients};
use mpmd_device::cpu::rows::softmax::Normalizer;

/// The number of queries in a block. The scores of a block are computed together.
const BLOCK: usize = 64;

/// The keys that each query sees.
#[derive(Clone, Debug, Default)]
pub enum Mask {
    /// All keys.
    #[default]
    None,
    /// The keys up to the query's own position. With fewer queries than keys, the last query is at
    /// the last key.
    Causal,
    /// The keys from a first one up to the query's own position: a sliding window, or the query's
    /// own sequence in a row of several sequences. The `u32` tensor has the index of each query's
    /// first key, in the shape `[batch, queries]` or `[1, queries]`.
    CausalFrom(Tensor),
    /// Numbers that are added to the scaled scores, for instance minus infinity for a hidden key.
    /// The shape is, or broadcasts to, `[batch, heads, queries, keys]`.
    Additive(Tensor),
}

/// Computes `softmax(scale q kᵀ + mask) v` for each head.
///
/// The shapes are `[batch, heads, queries, dim]` for `q`, `[batch, groups, keys, dim]` for `k`, and
/// `[batch, groups, keys, out_dim]` for `v`. The result is `[batch, heads, queries, out_dim]`. Each
/// group of keys and values serves `heads / groups` consecutive heads.
///
/// A query that sees no key gives NaN.
///
/// # Errors
///
/// If the shapes do not fit each other. The message names them.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Mask, scale: f64) -> Result<Tensor> {
    attention_to([q, k, v], mask, scale, None)
}

/// Computes [`attention`] with capped scores: a score becomes `cap tanh(score / cap)`. On the CPU,
/// the memory grows with the square of the sequence's length.
///
/// # Errors
///
/// As for [`attention`], and if the cap is not more than zero.
pub fn capped_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Mask,
    scale: f64,
    cap: f64,
) -> Result<Tensor> {
    if cap.is_nan() || cap <= 0.0 {
        bail!("attention with scores up to {cap}: expected a cap of more than 0");
    }
    attention_to([q, k, v], mask, scale, Some(cap))
}

/// Computes attention with or without a cap of the scores.
fn attention_to(
    [q, k, v]: [&Tensor; 3],
    mask: Mask,
    scale: f64,
    cap: Option<f64>,
) -> Result<Tensor> {
    let (mask, sight) = match mask {
        Mask::None => (None, SightByPosition::All),
        Mask::Causal => (None, SightByPosition::Causal),
        Mask::CausalFrom(first) => {
            let sizes = AttentionSizes::of(q, k, v)?;
            check_first_keys(&first, sizes)?;
            let sight = cuda_layers::CudaSight::From(first.clone());
            if let Some(y) = cuda_layers::attention([q, k, v], sight, scale, cap) {
                return y;
            }
            (None, SightByPosition::From(first_keys(&first, sizes)?))
        }
        Mask::Additive(mask) => (Some(mask), SightByPosition::All),
    };

    let scoring = Scoring {
        mask,
        sight,
        scale,
        cap,
    };
    attend(q, k, v, scoring)
}

/// Computes [`attention`] with queries, keys and values in one tensor.
///
/// `qkv` is `[batch, time, heads * 3 * dim]`, with query, key and value of each head side by side.
/// So the linear layer that computes `qkv` can be divided over devices by heads. The result is
/// `[batch, time, heads * dim]`.
///
/// # Errors
///
/// If the last dimension is no multiple of `3 * heads`, or the mask does not fit.
pub fn self_attention(qkv: &Tensor, heads: usize, mask: Mask, scale: f64) -> Result<Tensor> {
    let (batch, time, columns) = qkv.dims3()?;
    if heads == 0 || !columns.is_multiple_of(3 * heads) {
        bail!(
            "self_attention of {:?} with {heads} heads: expected [batch, time, heads * 3 * dim]",
            qkv.dims()
        );
    }
    let dim = columns / (3 * heads);

    if let (Mask::None | Mask::Causal, is_causal) = (&mask, matches!(mask, Mask::Causal))
        && let Some(y) = cuda_layers::self_attention(qkv, heads, is_causal, scale)
    {
        return y;
    }

    let parts = qkv
        .reshape((batch, time, heads, 3, dim))?
        .permute((3, 0, 2, 1, 4))?;

    let sight = match mask {
        Mask::None => Some(SightByPosition::All),
        Mask::Causal => Some(SightByPosition::Causal),
        _ => None,
    };

    let y = match sight.filter(|_| are_fast(&[qkv])) {
        Some(sight) => {
            let groups = heads;
            let queries = time;
            let keys = time;
            let out_dim = dim;
            let sizes = AttentionSizes {
                batch,
                heads,
                groups,
                queries,
                keys,
                dim,
                out_dim,
            };
            let operation = AttentionOp::new(sizes, None, sight, scale, qkv.track_op());
            parts.contiguous()?.apply_op1(SelfAttention(operation))?
        }
        None => attention(&parts.get(0)?, &parts.get(1)?, &parts.get(2)?, mask, scale)?,
    };

    y.transpose(1, 2)?.reshape((batch, time, heads * dim))
}

/// The mask, scale and cap that turn the products of queries and keys into scores.
pub(super) struct Scoring {
    /// Numbers that are added to the scaled scores.
    pub(super) mask: Option<Tensor>,
    pub(super) sight: SightByPosition,
    pub(super) scale: f64,
    /// A scaled score `x` becomes `cap tanh(x / cap)`.
    pub(super) cap: Option<f64>,
}

/// A rule for the keys that a query sees, given its position.
#[derive(Clone)]
pub(super) enum SightByPosition {
    All,
    Causal,
    /// The keys from a first one up to the query's own position. The slice has the index of each
    /// query's first key: `[batch, queries]`.
    From(Arc<[u32]>),
}

impl SightByPosition {
    /// Returns the range of keys that query `query` of sequence `sequence` sees.
    fn of(&self, sizes: AttentionSizes, sequence: usize, query: usize) -> Range<usize> {
        let AttentionSizes { queries, keys, .. } = sizes;
        match self {
            Self::All => 0..keys,
            Self::Causal => 0..keys - queries + query + 1,
            Self::From(first) => {
                first[sequence * queries + query] as usize..keys - queries + query + 1
            }
        }
    }
}

/// Returns an error unless `first` can hold the index of the first key that each query sees: u32,
/// `[batch, queries]`, or `[1, queries]` for all sequences.
fn check_first_keys(first: &Tensor, sizes: AttentionSizes) -> Result<()> {
    let AttentionSizes { batch, queries, .. } = sizes;
    if first.dtype() != DType::U32
        || !matches!(*first.dims(), [n, q] if q == queries && (n == batch || n == 1))
    {
        let dims = first.dims();
        let dtype = first.dtype();
        bail!(
            "attention with first keys {dtype:?} {dims:?}: expected U32 {:?}",
            [batch, queries]
        );
    }
    Ok(())
}

/// Returns the index of the first key that each query sees: `[batch, queries]`. Fails if it is
/// behind the query's own position.
fn first_keys(first: &Tensor, sizes: AttentionSizes) -> Result<Arc<[u32]>> {
    let AttentionSizes {
        batch,
        queries,
        keys,
        ..
    } = sizes;
    let first = first
        .broadcast_as((batch, queries))?
        .flatten_all()?
        .to_vec1::<u32>()?;

    for (at, first) in first.iter().enumerate() {
        let own = (keys + at % queries).checked_sub(queries);
        if own.is_none_or(|own| *first as usize > own) {
            bail!(
                "attention: query {} of {queries} cannot begin at key {first} of {keys}",
                at % queries
            );
        }
    }
    Ok(first.into())
}

/// Computes [`attention`] with an additive mask, a mask by position or both. With a cap, scores
/// become `cap tanh(score / cap)`.
pub(super) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, scoring: Scoring) -> Result<Tensor> {
    let Scoring {
        mask,
        sight,
        scale,
        cap,
    } = scoring;
    let sizes = AttentionSizes::of(q, k, v)?;
    if !matches!(sight, SightByPosition::All) && sizes.queries > sizes.keys {
        bail!(
            "causal attention of {} queries to {} keys",
            sizes.queries,
            sizes.keys
        );
    }

    let scores = (sizes.batch, sizes.heads, sizes.queries, sizes.keys);
    let mask = mask
        .map(|mask| single(&mask)?.broadcast_as(scores))
        .transpose()?;

    let on_cuda = match (&mask, &sight) {
        (None, SightByPosition::All) => Some(cuda_layers::CudaSight::All),
        (None, SightByPosition::Causal) => Some(cuda_layers::CudaSight::Causal),
        (Some(mask), SightByPosition::All) if !mask.track_op() && mask.stride()[3] == 1 => {
            Some(cuda_layers::CudaSight::Additive(mask.clone()))
        }
        _ => None,
    };
    if let Some(y) = on_cuda.and_then(|sight| cuda_layers::attention([q, k, v], sight, scale, cap))
    {
        return y;
    }

    let is_plain = mask
        .as_ref()
        .is_none_or(|mask| are_fast(&[mask]) && !mask.track_op());
    if !is_plain || cap.is_some() || !are_fast(&[q, k, v]) {
        let scoring = Scoring {
            mask,
            sight,
            scale,
            cap,
        };
        return compose(q, k, v, scoring, sizes);
    }
    // Only the last dimension must be dense: a mask without heads is not copied for each head.
    let mask = match mask {
        Some(mask) if mask.stride()[3] != 1 => Some(mask.contiguous()?),
        mask => mask,
    };

    let is_tracked = q.track_op() || k.track_op() || v.track_op();
    let operation = AttentionOp::new(sizes, mask, sight, scale, is_tracked);
    q.contiguous()?
        .apply_op3(&k.contiguous()?, &v.contiguous()?, operation)
}

/// Computes the same as [`attention`] with operations of candle.
fn compose(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scoring: Scoring,
    sizes: AttentionSizes,
) -> Result<Tensor> {
    let Scoring {
        mask,
        sight,
        scale,
        cap,
    } = scoring;
    let AttentionSizes {
        batch,
        heads,
        groups,
        queries,
        keys,
        ..
    } = sizes;

    let dtype = q.dtype();
    let q = single(q)?;
    let k = single(k)?;
    let v = single(v)?;

    // Gives each head its own keys or values.
    let spread = |x: &Tensor| {
        let (_, _, keys, dim) = x.dims4()?;
        if heads == groups {
            return x.contiguous();
        }
        x.unsqueeze(2)?
            .broadcast_as((batch, groups, heads / groups, keys, dim))?
            .contiguous()?
            .reshape((batch, heads, keys, dim))
    };

    let mut scores = (q.contiguous()?.matmul(&spread(&k)?.t()?)? * scale)?;
    if let Some(cap) = cap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    if let Some(mask) = mask {
        scores = (scores + mask.to_dtype(q.dtype())?)?;
    }

    if !matches!(sight, SightByPosition::All) {
        let rows = if matches!(sight, SightByPosition::From(_)) {
            batch
        } else {
            1
        };
        let hidden = (0..rows * queries * keys).map(|at| {
            let row = at / keys;
            let key = at % keys;
            let sees = sight.of(sizes, row / queries, row % queries).contains(&key);
            if sees { 0.0 } else { f32::NEG_INFINITY }
        });
        let hidden = Tensor::from_vec(hidden.collect(), (rows, 1, queries, keys), q.device())?;
        scores = scores.broadcast_add(&hidden.to_dtype(q.dtype())?)?;
    }

    softmax(&scores, D::Minus1)?
        .matmul(&spread(&v)?)?
        .to_dtype(dtype)
}

/// The sizes of the tensors of an attention.
#[derive(Clone, Copy)]
struct AttentionSizes {
    batch: usize,
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    dim: usize,
    out_dim: usize,
}

impl AttentionSizes {
    fn of(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        if let (
            &[batch, heads, queries, dim],
            &[k_batch, groups, keys, k_dim],
            &[v_batch, v_groups, v_keys, out_dim],
        ) = (q.dims(), k.dims(), v.dims())
            && (batch, dim) == (k_batch, k_dim)
            && (batch, groups, keys) == (v_batch, v_groups, v_keys)
            && groups > 0
            && heads.is_multiple_of(groups)
            // Scores of no elements have no gradients, but the values do.
            && (dim > 0 || out_dim == 0)
        {
            return Ok(Self {
                batch,
                heads,
                groups,
                queries,
                keys,
                dim,
                out_dim,
            });
        }

        bail!(
            "attention of q {:?}, k {:?} and v {:?}: expected [batch, heads, queries, dim], \
             [batch, groups, keys, dim] and [batch, groups, keys, out_dim], where groups divides \
             heads and dim is not 0",
            q.dims(),
            k.dims(),
            v.dims()
        )
    }
}

/// The operation of [`attention`].
struct AttentionOp {
    sizes: AttentionSizes,
    /// An additive mask: `[batch, heads, queries, keys]` with dense rows.
    mask: Option<Tensor>,
    sight: SightByPosition,
    scale: f32,
    /// One normalizer per query, saved for the backward pass: `[batch, heads, queries]`.
    normalizers: OnceLock<Vec<Normalizer>>,
}

/// A block of consecutive queries of one head.
#[derive(Clone)]
struct QueryBlock {
    /// The index `sequence * heads + head`.
    head: usize,
    /// The index of the block's first query.
    first: usize,
    rows: usize,
    /// A range of keys with all keys that the block's queries see.
    keys: Range<usize>,
}

impl AttentionOp {
    /// Creates the operation. If `is_tracked` is true, it saves normalizers for a backward pass.
    fn new(
        sizes: AttentionSizes,
        mask: Option<Tensor>,
        sight: SightByPosition,
        scale: f64,
        is_tracked: bool,
    ) -> Self {
        attends(sizes.dim);
        if is_tracked {
            keeps((sizes.batch * sizes.heads * sizes.queries * size_of::<Normalizer>()) as u64);
        }
        Self {
            sizes,
            mask,
            sight,
            scale: scale as f32,
            normalizers: OnceLock::new(),
        }
    }

    fn block(&self, head: usize, first: usize, rows: usize) -> QueryBlock {
        let sees = |row| {
            self.sight
                .of(self.sizes, head / self.sizes.heads, first + row)
        };
        let start = match self.sight {
            SightByPosition::From(_) => (0..rows).map(|row| sees(row).start).min().unwrap_or(0),
            _ => 0,
        };

        QueryBlock {
            head,
            first,
            rows,
            keys: start..sees(rows - 1).end,
        }
    }

    /// Returns the index of the group of keys and values that `head` uses, over all sequences.
    fn group(&self, head: usize) -> usize {
        head / (self.sizes.heads / self.sizes.groups)
    }

    /// Returns what the products of query `row` of a block with the block's keys become.
    fn scores<'a>(
        &self,
        block: &QueryBlock,
        row: usize,
        mask: Option<&'a MaskValues<'_>>,
    ) -> Scores<'a> {
        let query = block.first + row;
        let seen = self
            .sight
            .of(self.sizes, block.head / self.sizes.heads, query);
        let mask = mask.map(|mask| &mask.row(self.sizes, block.head, query)[block.keys.clone()]);
        Scores {
            scale: self.scale,
            mask,
            first: seen.start - block.keys.start,
            end: seen.end - block.keys.start,
        }
    }

    fn mask(&self) -> Result<Option<MaskValues<'_>>> {
        self.mask.as_ref().map(MaskValues::of).transpose()
    }

    fn forward(&self, q: &[f32], k: &[f32], v: &[f32]) -> Result<(Vec<f32>, Vec<Normalizer>)> {
        let AttentionSizes {
            batch,
            heads,
            queries,
            keys,
            dim,
            out_dim,
            ..
        } = self.sizes;
        let mask = self.mask()?;
        let mask = mask.as_ref();

        let mut out = vec![0.0; batch * heads * queries * out_dim];
        let mut normalizers = vec![Normalizer::default(); batch * heads * queries];
        if out.is_empty() || keys == 0 {
            return Ok((out, normalizers));
        }

        let all = out
            .par_chunks_mut(queries * out_dim)
            .zip(normalizers.par_chunks_mut(queries));
        all.enumerate().for_each(|(head, (out, normalizers))| {
            let group = self.group(head);
            let k = &k[group * keys * dim..];
            let v = &v[group * keys * out_dim..];

            let blocks = out
                .par_chunks_mut(BLOCK * out_dim)
                .zip(normalizers.par_chunks_mut(BLOCK));
            blocks
                .enumerate()
                .for_each_init(Vec::new, |scores: &mut Vec<f32>, (at, place)| {
                    let (out, normalizers) = place;
                    let block = self.block(head, at * BLOCK, normalizers.len());
                    let rows = block.rows;
                    let start = block.keys.start;
                    let keys = block.keys.len();
                    scores.resize(rows * keys, 0.0);

                    let q = &q[(head * queries + block.first) * dim..][..rows * dim];
                    let k = Matrix::new(&k[start * dim..][..keys * dim], keys, dim);
                    multiply_here(scores, Matrix::new(q, rows, dim), k.t(), false);
                    let all = scores.chunks_exact_mut(keys).zip(&mut *normalizers);
                    for (i, (row, normalizer)) in all.enumerate() {
                        *normalizer = probabilities(row, self.scores(&block, i, mask));
                    }

                    let v = Matrix::new(&v[start * out_dim..][..keys * out_dim], keys, out_dim);
                    multiply_here(out, Matrix::new(scores, rows, keys), v, false);
                });
        });
        Ok((out, normalizers))
    }

    /// Returns the gradients of queries, keys and values.
    fn backward(&self, from: &BackwardArrays<'_>) -> Result<[Vec<f32>; 3]> {
        let AttentionSizes {
            batch,
            heads,
            groups,
            queries,
            keys,
            dim,
            out_dim,
        } = self.sizes;
        let mask = self.mask()?;

        let mut d_q = vec![0.0; batch * heads * queries * dim];
        let mut d_k = vec![0.0; batch * groups * keys * dim];
        let mut d_v = vec![0.0; batch * groups * keys * out_dim];
        if d_q.is_empty() || d_v.is_empty() {
            return Ok([d_q, d_k, d_v]);
        }
        // A group's gradients are sums over its heads, so one thread computes them.
        let shared = heads / groups;
        let parts = d_q.par_chunks_mut(shared * queries * dim).zip(
            d_k.par_chunks_mut(keys * dim)
                .zip(d_v.par_chunks_mut(keys * out_dim)),
        );

        parts.enumerate().for_each_init(
            BlockScratch::default,
            |scratch, (group, (d_q, (d_k, d_v)))| {
                for (at, d_q) in d_q.chunks_mut(queries * dim).enumerate() {
                    let head = group * shared + at;
                    for (at, d_q) in d_q.chunks_mut(BLOCK * dim).enumerate() {
                        let block = self.block(head, at * BLOCK, d_q.len() / dim);
                        let into = BlockGradients { d_q, d_k, d_v };
                        self.backward_block(&block, from, mask.as_ref(), into, scratch);
                    }
                }
            },
        );
        Ok([d_q, d_k, d_v])
    }

    /// Computes the gradient of a block's queries. Adds the block's contribution to the gradients
    /// of its group's keys and values. `scratch` may have any content.
    fn backward_block(
        &self,
        block: &QueryBlock,
        from: &BackwardArrays<'_>,
        mask: Option<&MaskValues<'_>>,
        into: BlockGradients<'_>,
        scratch: &mut BlockScratch,
    ) {
        let BlockGradients { d_q, d_k, d_v } = into;
        let BlockScratch { scores, d_scores } = scratch;
        let AttentionSizes {
            queries,
            keys: all_keys,
            dim,
            out_dim,
            ..
        } = self.sizes;
        let &QueryBlock {
            head,
            first,
            rows,
            ref keys,
        } = block;
        let start = keys.start;
        let keys = keys.len();
        let group = self.group(head);
        let at = head * queries + first;

        let k = &from.k[(group * all_keys + start) * dim..][..keys * dim];
        let k = Matrix::new(k, keys, dim);
        let v = &from.v[(group * all_keys + start) * out_dim..][..keys * out_dim];
        let v = Matrix::new(v, keys, out_dim);
        let q = Matrix::new(&from.q[at * dim..][..rows * dim], rows, dim);
        let out = from.out.map(|out| &out[at * out_dim..][..rows * out_dim]);
        let d_out = &from.d_out[at * out_dim..][..rows * out_dim];

        scores.resize(rows * keys, 0.0);
        d_scores.resize(rows * keys, 0.0);
        let d_out_rows = Matrix::new(d_out, rows, out_dim);
        multiply_here(scores, q, k.t(), false);
        multiply_here(d_scores, d_out_rows, v.t(), false);

        let rows_of = scores
            .chunks_exact_mut(keys)
            .zip(d_scores.chunks_exact_mut(keys));
        for (i, (row, d_row)) in rows_of.enumerate() {
            let columns = i * out_dim..(i + 1) * out_dim;
            let mean = out.map(|out| rows::dot(&out[columns.clone()], &d_out[columns]));
            let scores = self.scores(block, i, mask);
            score_gradients(row, d_row, scores, from.normalizers[at + i], mean);
        }

        let probabilities = Matrix::new(scores, rows, keys);
        let d_scores = Matrix::new(d_scores, rows, keys);
        let d_k = &mut d_k[start * dim..];
        let d_v = &mut d_v[start * out_dim..];
        multiply_here(
            &mut d_v[..keys * out_dim],
            probabilities.t(),
            d_out_rows,
            true,
        );
        multiply_here(&mut d_k[..keys * dim], d_scores.t(), q, true);
        multiply_here(d_q, d_scores, k, false);
    }
}

/// Gradients to which a block adds: of its queries, and of its group's keys and values.
struct BlockGradients<'a> {
    d_q: &'a mut [f32],
    d_k: &'a mut [f32],
    d_v: &'a mut [f32],
}

/// Scratch memory for the scores of a block and their gradients. Its content is arbitrary.
#[derive(Default)]
struct BlockScratch {
    scores: Vec<f32>,
    d_scores: Vec<f32>,
}

/// The arrays that the backward pass reads.
struct BackwardArrays<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    /// The result of the forward pass; `None` if it was rounded to half precision.
    out: Option<&'a [f32]>,
    d_out: &'a [f32],
    normalizers: &'a [Normalizer],
}

/// The elements of a mask `[batch, heads, queries, keys]` with dense rows.
struct MaskValues<'a> {
    values: TensorValues<'a>,
    strides: [usize; 3],
}

impl<'a> MaskValues<'a> {
    fn of(mask: &'a Tensor) -> Result<Self> {
        let values = TensorValues::strided(mask)?;
        Ok(Self {
            values,
            strides: [0, 1, 2].map(|dim| mask.stride()[dim]),
        })
    }

    /// Returns the mask's row of one query. `head` is the index `sequence * heads + head`.
    fn row(&self, sizes: AttentionSizes, head: usize, query: usize) -> &[f32] {
        let at = [head / sizes.heads, head % sizes.heads, query];
        let start: usize = at
            .iter()
            .zip(&self.strides)
            .map(|(at, stride)| at * stride)
            .sum();
        &self.values[start..][..sizes.keys]
    }
}

impl CustomOp3 for AttentionOp {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let AttentionSizes {
            batch,
            heads,
            queries,
            out_dim,
            ..
        } = self.sizes;

        let [keys, values] = [slice(k, k_layout)?, slice(v, v_layout)?];
        let (out, normalizers) = self.forward(&slice(q, q_layout)?, &keys, &values)?;
        self.normalizers.get_or_init(|| normalizers);
        result(out, (batch, heads, queries, out_dim), q)
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(normalizers) = self.normalizers.get() else {
            bail!("attention's backward pass before its forward pass");
        };

        let gradient = gradient.contiguous()?;
        let [d_q, d_k, d_v] = {
            let [q, k, v, d_out] = [values(q)?, values(k)?, values(v)?, values(&gradient)?];
            let out = exact(out)?;
            let out = out.as_deref();
            self.backward(&BackwardArrays {
                q: &q,
                k: &k,
                v: &v,
                out,
                d_out: &d_out,
                normalizers,
            })?
        };

        let needed = |gradient: Vec<f32>, like: &Tensor| {
            like.track_op()
                .then(|| tensor_like(gradient, like))
                .transpose()
        };
        Ok((needed(d_q, q)?, needed(d_k, k)?, needed(d_v, v)?))
    }
}

/// The operation of [`self_attention`]. Its input has query, key and value of each head side by
/// side.
struct SelfAttention(AttentionOp);

impl CustomOp1 for SelfAttention {
    fn name(&self) -> &'static str {
        "self-attention"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let AttentionSizes {
            batch,
            heads,
            queries,
            out_dim,
            ..
        } = self.0.sizes;
        let all = slice(qkv, layout)?;
        let (q, rest) = all.split_at(all.len() / 3);
        let (k, v) = rest.split_at(q.len());
        let (out, normalizers) = self.0.forward(q, k, v)?;
        self.0.normalizers.get_or_init(|| normalizers);
        result(out, (batch, heads, queries, out_dim), qkv)
    }

    fn bwd(&self, qkv: &Tensor, out: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let Some(normalizers) = self.0.normalizers.get() else {
            bail!("attention's backward pass before its forward pass");
        };

        let gradient = gradient.contiguous()?;
        let d_qkv = {
            let [all, d_out] = [values(qkv)?, values(&gradient)?];
            let (q, rest) = all.split_at(all.len() / 3);
            let (k, v) = rest.split_at(q.len());
            let out = exact(out)?;
            let out = out.as_deref();
            self.0
                .backward(&BackwardArrays {
                    q,
                    k,
                    v,
                    out,
                    d_out: &d_out,
                    normalizers,
                })?
                .concat()
        };
        tensor_like(d_qkv, qkv).map(Some)
    }
}
