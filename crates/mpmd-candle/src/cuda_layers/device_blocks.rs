//! Attention to keys and values in blocks.

use candle_core::{Result, Shape, Tensor};
use mpmd_core::cuda::CudaPart;
use mpmd_core::cuda::layers::{self, Heads};
use mpmd_device::cpu::paged::BLOCK;

use super::op::{fit, issue};
use crate::cuda::tensor;

/// The keys and values of an attention layer on a CUDA device, in blocks of tokens.
#[derive(Clone, Debug)]
pub(crate) struct DeviceBlocks {
    /// The number of blocks, the number of key heads, and the elements per key.
    sizes: [usize; 3],
    keys: Tensor,
    values: Tensor,
}

/// Position of the first token, number of tokens, and block indices of a sequence.
type Sequence<'a> = (usize, usize, &'a [u32]);

/// The scale, the cap and the window of `PagedScores`.
type Scores = (f64, Option<f64>, Option<usize>);

/// Computes [`PagedCache::attention`](crate::nn::PagedCache::attention), which has checked the
/// arguments. The first call allocates `cache` with `sizes`. Returns `None` if mpmd's kernels
/// cannot compute it.
pub(crate) fn paged(
    cache: &mut Option<DeviceBlocks>,
    sizes: [usize; 3],
    [q, k, v]: [&Tensor; 3],
    sequences: &[Sequence<'_>],
    scores: Scores,
) -> Option<Result<Tensor>> {
    fit(&[q, k, v]).then(|| {
        let cache = match cache {
            Some(cache) => cache,
            None => cache.insert(DeviceBlocks::new(sizes, q)?),
        };
        cache.attention([q, k, v], sequences, scores)
    })
}

impl DeviceBlocks {
    fn new(sizes: [usize; 3], like: &Tensor) -> Result<Self> {
        let elements = sizes.iter().product::<usize>() * BLOCK;
        let zeros = || Tensor::zeros(elements, like.dtype(), like.device());
        Ok(Self {
            sizes,
            keys: zeros()?,
            values: zeros()?,
        })
    }

    fn attention(
        &mut self,
        [q, k, v]: [&Tensor; 3],
        sequences: &[Sequence<'_>],
        (scale, cap, window): Scores,
    ) -> Result<Tensor> {
        let (tokens, heads, dim) = q.dims3()?;
        let most = sequences
            .iter()
            .map(|sequence| sequence.2.len())
            .max()
            .unwrap_or(0)
            .max(1);

        let mut owners = Vec::new();
        let mut positions = Vec::new();
        let mut tables = Vec::new();
        for (number, (start, rows, blocks)) in sequences.iter().enumerate() {
            owners.extend(std::iter::repeat_n(number as u32, *rows));
            positions.extend((*start..start + rows).map(|position| position as u32));
            tables.extend_from_slice(blocks);
            // No block has this number.
            tables.resize((number + 1) * most, u32::MAX);
        }

        let words = |words: Vec<u32>| {
            let count = words.len();
            Tensor::from_vec(words, count, q.device())
        };
        let numbers = [words(owners)?, words(positions)?, words(tables)?];

        let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
        let [blocks, groups, _] = self.sizes;
        let shape = Shape::from((tokens, heads, dim));
        let in_rows =
            |part: CudaPart<'static>, heads: usize| Heads::new(part, [0, heads * dim, dim]);
        let scores = layers::AttentionScores {
            scale: scale as f32,
            cap: cap.map(|cap| cap as f32),
            window,
        };

        let out = issue(|on| {
            let [keys, values] = [on.writable(&self.keys)?, on.writable(&self.values)?];
            let paged = layers::PagedKeysValues {
                blocks,
                groups,
                dim,
                keys,
                values,
            };
            on.made(&shape, q.dtype(), |out| {
                on.with(numbers.each_ref(), |[sequences, positions, tables]| {
                    let rows = layers::PagedTokens {
                        tokens,
                        sequences,
                        positions,
                        tables,
                        most,
                    };
                    on.with([&q, &k, &v], |[q, k, v]| {
                        let cuda = on.kernels();
                        paged.write(&cuda, &rows, in_rows(k, groups), in_rows(v, groups))?;
                        let q = in_rows(q, heads);
                        let out = in_rows(out, heads);
                        paged.attend(&cuda, &rows, heads, scores, q, out)
                    })
                })
            })
        })?;
        Ok(tensor(out, &shape))
    }
}
