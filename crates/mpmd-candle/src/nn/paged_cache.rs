//! Attention of several sequences to keys and values that stay from pass to pass, in blocks.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};
pub use mpmd_device::cpu::paged::BLOCK;
use mpmd_device::cpu::paged::{KeyValueBlocks, Query, Scores};
use rayon::prelude::*;

use super::values::values;
use crate::cuda_layers;

/// The largest number of tokens in one part of a pass's attention.
const ROWS: usize = 16;

/// The keys and values of an attention layer, in blocks of [`BLOCK`] tokens. Sequences with equal
/// beginnings may share blocks.
#[derive(Clone, Debug)]
pub struct PagedCache {
    paged: KeyValueBlocks,
    /// The blocks on a CUDA device, created by the first pass on that device.
    on_cuda: Option<cuda_layers::DeviceBlocks>,
    blocks: usize,
    heads: usize,
    dim: usize,
}

/// Consecutive tokens of one sequence in a pass.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PagedRows {
    /// Position of the first of these tokens in the sequence.
    pub start: usize,
    /// Number of tokens in the pass.
    pub rows: usize,
    /// Indices of the sequence's blocks, in order: enough blocks for `start + rows` tokens.
    pub blocks: Vec<u32>,
}

/// The scale, cap and window of an attention's scores.
#[derive(Clone, Copy, Debug)]
pub struct PagedScores {
    /// Factor that multiplies the products of queries and keys.
    pub scale: f64,
    /// If set, a score `x` becomes `cap tanh(x / cap)`.
    pub cap: Option<f64>,
    /// Number of keys that a query sees, including its own. `None` for all keys up to its own.
    pub window: Option<usize>,
}

impl PagedCache {
    /// Creates a cache of `blocks` blocks for `heads` key heads, with `dim` elements per key.
    pub fn new(blocks: usize, heads: usize, dim: usize) -> Self {
        Self {
            paged: KeyValueBlocks::zeros(blocks, heads, dim),
            on_cuda: None,
            blocks,
            heads,
            dim,
        }
    }

    /// Writes the keys and values of a pass to the cache, and computes the causal attention of its
    /// queries. Returns `[tokens, heads, dim]`. There is no gradient.
    ///
    /// `q` is `[tokens, heads, dim]`; `k` and `v` are `[tokens, key heads, dim]`. Tokens are in the
    /// order of `sequences`. Each key head serves `heads / key heads` consecutive heads.
    ///
    /// The bits of a token's result do not depend on the other sequences of the pass, nor on the
    /// division of its sequence over passes.
    ///
    /// # Errors
    ///
    /// If shapes do not fit, or a sequence has too few blocks or a block that does not exist.
    pub fn attention(
        &mut self,
        [q, k, v]: [&Tensor; 3],
        sequences: &[PagedRows],
        scores: PagedScores,
    ) -> Result<Tensor> {
        let groups = self.heads;
        let dim = self.dim;
        let tokens: usize = sequences.iter().map(|sequence| sequence.rows).sum();
        let heads = self.check_tensors([q, k, v], tokens)?;
        self.check_blocks(sequences)?;
        if heads == 0 || dim == 0 {
            return Tensor::zeros((tokens, heads, dim), DType::F32, q.device());
        }

        let sizes = [self.blocks, groups, dim];
        let rows: Vec<(usize, usize, &[u32])> = sequences
            .iter()
            .map(|one| (one.start, one.rows, &one.blocks[..]))
            .collect();
        let factors = (scores.scale, scores.cap, scores.window);
        if let Some(out) = cuda_layers::paged(&mut self.on_cuda, sizes, [q, k, v], &rows, factors) {
            // The host's blocks were never touched.
            self.paged = KeyValueBlocks::zeros(0, groups, dim);
            return out;
        }

        let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
        let [q, k, v] = [values(&q)?, values(&k)?, values(&v)?];
        self.write(&k, &v, sequences);
        let parts = self.parts(sequences);
        let results: Vec<Vec<f32>> = parts
            .par_iter()
            .map(|part| self.attend(part, &q, heads, scores))
            .collect();

        let width = heads * dim;
        let own = heads / groups * dim;
        let mut out = vec![0.0; tokens * width];
        for (part, result) in parts.iter().zip(&results) {
            for (row, result) in part.rows.clone().zip(result.chunks_exact(own)) {
                let at = row * width + part.group * own;
                out[at..][..own].copy_from_slice(result);
            }
        }
        Tensor::from_vec(out, (tokens, heads, dim), &Device::Cpu)
    }

    /// Returns the number of query heads. Fails if shapes or dtypes do not fit.
    fn check_tensors(&self, [q, k, v]: [&Tensor; 3], tokens: usize) -> Result<usize> {
        let groups = self.heads;
        let dim = self.dim;
        match *q.dims() {
            [count, heads, own]
                if (count, own) == (tokens, dim)
                    && groups > 0
                    && heads.is_multiple_of(groups)
                    && [k, v].iter().all(|x| x.dims() == [tokens, groups, dim])
                    && [q, k, v].iter().all(|x| x.dtype() == DType::F32) =>
            {
                Ok(heads)
            }
            _ => bail!(
                "attention of q {:?}, k {:?} and v {:?}: expected F32 [{tokens}, _, {dim}] and \
                 [{tokens}, {groups}, {dim}]",
                q.dims(),
                k.dims(),
                v.dims()
            ),
        }
    }

    /// Returns an error if a sequence has too few blocks, or a block that does not exist.
    fn check_blocks(&self, sequences: &[PagedRows]) -> Result<()> {
        for PagedRows {
            start,
            rows,
            blocks,
        } in sequences
        {
            let needed = (start + rows).div_ceil(BLOCK);
            let all = self.blocks;
            if blocks.len() < needed || blocks.iter().any(|block| *block as usize >= all) {
                bail!("{needed} blocks of {all} are needed for a sequence, found {blocks:?}");
            }
        }
        Ok(())
    }

    /// Writes the keys and values of the tokens of a pass to their blocks.
    fn write(&mut self, k: &[f32], v: &[f32], sequences: &[PagedRows]) {
        let width = self.heads * self.dim;
        let mut row = 0;
        for PagedRows {
            start,
            rows,
            blocks,
        } in sequences
        {
            for position in *start..start + rows {
                let [keys, values] = [k, v].map(|x| &x[row * width..][..width]);
                let block = blocks[position / BLOCK] as usize;
                self.paged.set(block, position % BLOCK, keys, values);
                row += 1;
            }
        }
    }

    /// Divides the tokens of a pass into parts of up to [`ROWS`] tokens, for each head of keys.
    fn parts<'a>(&self, sequences: &'a [PagedRows]) -> Vec<PassPart<'a>> {
        let mut parts = Vec::new();
        let mut first = 0;
        for sequence in sequences {
            for start in (0..sequence.rows).step_by(ROWS) {
                let rows = first + start..first + sequence.rows.min(start + ROWS);
                let position = sequence.start + start;
                parts.extend((0..self.heads).map(|group| PassPart {
                    rows: rows.clone(),
                    position,
                    group,
                    sequence,
                }));
            }
            first += sequence.rows;
        }
        parts
    }

    /// Returns the attention of one part: `[tokens, heads of its group, dim]`. `q` has the queries
    /// of the whole pass.
    fn attend(
        &self,
        part: &PassPart<'_>,
        q: &[f32],
        heads: usize,
        scores: PagedScores,
    ) -> Vec<f32> {
        let PagedScores { scale, cap, window } = scores;
        let dim = self.dim;
        let shared = heads / self.heads;
        let queries: Vec<Query<'_>> = part
            .rows
            .clone()
            .flat_map(|row| {
                let position = part.position + row - part.rows.start;
                let start = window.map_or(0, |window| (position + 1).saturating_sub(window));
                (0..shared).map(move |head| (row, head, start..position + 1))
            })
            .map(|(row, head, seen)| {
                let at = row * heads * dim + (part.group * shared + head) * dim;
                Query {
                    elements: &q[at..][..dim],
                    seen,
                }
            })
            .collect();

        let scores = Scores {
            scale: scale as f32,
            cap: cap.map(|cap| cap as f32),
        };
        let mut out = vec![0.0; queries.len() * dim];
        self.paged.attend(
            part.group,
            &part.sequence.blocks,
            &queries,
            scores,
            &mut out,
        );
        out
    }
}

/// A part of a pass: some tokens of one sequence, and one key head.
struct PassPart<'a> {
    /// The indices of the tokens in the pass.
    rows: Range<usize>,
    /// The position of the first token in its sequence.
    position: usize,
    group: usize,
    sequence: &'a PagedRows,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Mask, attention};

    #[test]
    fn passes_of_several_sequences_equal_whole_ones() {
        let (heads, groups, dim) = (6, 2, 4);
        let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap();
        let lengths = [37, 5, 18];
        let tables: [Vec<u32>; 3] = [vec![4, 1, 9], vec![7], vec![2, 0]];
        let inputs = lengths.map(|length| {
            [
                random(&[length, heads, dim]),
                random(&[length, groups, dim]),
                random(&[length, groups, dim]),
            ]
        });
        for window in [None, Some(7)] {
            let scores = PagedScores {
                scale: 0.6,
                cap: None,
                window,
            };
            let mut cache = PagedCache::new(10, groups, dim);
            let mut found = lengths.map(|_| Vec::new());
            // Each pass has some tokens of each sequence.
            for [a, b, c] in [
                [0..20, 0..1, 0..0],
                [20..21, 1..2, 0..17],
                [21..37, 2..5, 17..18],
            ] {
                let ranges = [a, b, c];
                let rows = ranges.iter().zip(&tables).map(|(range, table)| PagedRows {
                    start: range.start,
                    rows: range.len(),
                    blocks: table.clone(),
                });
                let rows: Vec<PagedRows> = rows.collect();
                let joined = [0, 1, 2].map(|which| {
                    let parts = ranges.iter().zip(&inputs).map(|(range, inputs)| {
                        inputs[which].narrow(0, range.start, range.len()).unwrap()
                    });
                    Tensor::cat(&parts.collect::<Vec<_>>(), 0).unwrap()
                });
                let out = cache.attention(joined.each_ref(), &rows, scores).unwrap();
                let mut first = 0;
                for (range, found) in ranges.iter().zip(&mut found) {
                    found.push(out.narrow(0, first, range.len()).unwrap());
                    first += range.len();
                }
            }
            for ((length, inputs), found) in lengths.iter().zip(&inputs).zip(&found) {
                let [q, k, v] = inputs
                    .each_ref()
                    .map(|x| x.unsqueeze(0).unwrap().transpose(1, 2).unwrap());
                let first = (0..*length as u32)
                    .map(|at| window.map_or(0, |window| (at + 1).saturating_sub(window as u32)));
                let first = Tensor::from_vec(first.collect(), (1, *length), &Device::Cpu).unwrap();
                let whole = attention(&q, &k, &v, Mask::CausalFrom(first), 0.6).unwrap();
                let whole = whole.squeeze(0).unwrap().transpose(0, 1).unwrap();
                let off = (Tensor::cat(found, 0).unwrap() - whole)
                    .unwrap()
                    .abs()
                    .unwrap();
                let off = off.max_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(off < 2e-6, "{window:?}: {off}");
            }
        }
    }

    #[test]
    fn wrong_blocks_are_refused() {
        let mut cache = PagedCache::new(2, 1, 4);
        let x = Tensor::zeros((3, 1, 4), DType::F32, &Device::Cpu).unwrap();
        let scores = PagedScores {
            scale: 1.0,
            cap: None,
            window: None,
        };
        let mut said = |start, rows, blocks: &[u32]| {
            let rows = PagedRows {
                start,
                rows,
                blocks: blocks.to_vec(),
            };
            cache
                .attention([&x, &x, &x], &[rows], scores)
                .unwrap_err()
                .to_string()
        };
        assert!(
            said(14, 3, &[1]).contains("2 blocks of 2 are needed"),
            "too few"
        );
        assert!(
            said(0, 3, &[2]).contains("1 blocks of 2 are needed"),
            "no such block"
        );
        assert!(
            said(0, 2, &[0]).contains("expected F32 [2, _, 4]"),
            "other tokens"
        );
    }
}
