//! Attention without a matrix of scores in memory.

use mpmd_device::cuda::kernels::{
    ATTENTION_64, ATTENTION_64_BY_32, ATTENTION_128, ATTENTION_128_BY_32, ATTENTION_256,
    ATTENTION_256_BY_16, SourcePair, attention_shared,
};

use super::{Arg, Cuda, CudaPart, LayerCall, capped, product};
use crate::error::{Error, Result};
use mpmd_layout::aval::DType;

/// The vectors of attention heads in an array. The vector of a head begins at element `sequence *
/// strides[0] + token * strides[1] + head * strides[2]`, and is dense.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    pub(super) part: CudaPart<'a>,
    pub(super) strides: [usize; 3],
}

impl<'a> Heads<'a> {
    /// Describes vectors by the distances in elements between sequences, tokens and heads.
    pub fn new(part: impl Into<CudaPart<'a>>, strides: [usize; 3]) -> Self {
        Self {
            part: part.into(),
            strides,
        }
    }

    /// Describes vectors in a matrix `[sequences * time, columns]`: the vectors of successive heads
    /// begin `head` columns apart.
    ///
    /// If query, key and value of each head are side by side, `columns` is `heads * 3 * dim`, and
    /// `head` is `3 * dim`. Their parts begin at the elements 0, `dim` and `2 * dim` of the matrix.
    pub fn in_rows(
        part: impl Into<CudaPart<'a>>,
        time: usize,
        columns: usize,
        head: usize,
    ) -> Self {
        Self::new(part, [time.saturating_mul(columns), columns, head])
    }

    /// Checks that the array has vectors of `dim` elements for these numbers of sequences, tokens
    /// and heads.
    pub(super) fn check(
        &self,
        call: &LayerCall<'_>,
        name: &str,
        counts: [usize; 3],
        dim: usize,
    ) -> Result<()> {
        if counts.contains(&0) || dim == 0 {
            return call.has(&[(name, &self.part, 0)]);
        }

        let last = counts
            .iter()
            .zip(self.strides)
            .fold(dim, |sum, (count, stride)| {
                sum.saturating_add(product(&[count - 1, stride]))
            });
        call.has(&[(name, &self.part, last)])
    }

    pub(super) fn args(&self) -> [Arg<'a>; 4] {
        let [sequence, token, head] = self.strides;
        [self.part.into(), sequence.into(), token.into(), head.into()]
    }
}

/// The mask: the keys that each query sees.
#[derive(Clone, Copy, Debug)]
pub enum CudaMask<'a> {
    /// All keys.
    None,
    /// The keys up to the query's own position. With fewer queries than keys, the last query has
    /// the position of the last key.
    Causal,
    /// The keys from a first key up to the query's own position. Has the index of the first key for
    /// each query, `u32`, and the distance between sequences in these indices. The distance is 0 if
    /// all sequences share them.
    CausalFrom(CudaPart<'a>, usize),
    /// Numbers of `f32` that are added to the scaled scores, dense along keys. The array has the
    /// distances in elements between sequences, heads and queries.
    Additive(CudaPart<'a>, [usize; 3]),
}

/// Attention, `softmax(scale q kᵀ + mask) v`, for each head. Memory does not grow with the square
/// of the number of tokens.
///
/// A query that sees no key gives NaN.
#[derive(Clone, Copy, Debug)]
pub struct CudaAttention<'a> {
    /// Number of sequences.
    pub batch: usize,
    /// Number of heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values. Each serves `heads / groups` consecutive heads.
    pub groups: usize,
    /// Number of queries of a sequence.
    pub queries: usize,
    /// Number of keys of a sequence.
    pub keys: usize,
    /// Length of the vector of a query, key, value and result: at most 256.
    pub dim: usize,
    /// Factor by which the products of queries and keys are scaled.
    pub scale: f32,
    /// A scaled score `x` becomes `cap tanh(x / cap)` before the mask.
    pub cap: Option<f32>,
    /// The keys that queries see.
    pub mask: CudaMask<'a>,
}

impl CudaAttention<'_> {
    /// Describes causal attention among `time` tokens. `scale` is one over the square root of
    /// `dim`.
    pub fn causal(batch: usize, heads: usize, time: usize, dim: usize) -> Self {
        Self {
            batch,
            heads,
            groups: heads,
            queries: time,
            keys: time,
            dim,
            scale: (dim as f32).sqrt().recip(),
            cap: None,
            mask: CudaMask::Causal,
        }
    }

    /// Computes `out`, which has the shape of `q`. `normalizers`, `[batch, heads, queries, 2]` of
    /// `f32`, gets two numbers per query for the backward pass: the largest score, and one over the
    /// sum of the exponentials.
    ///
    /// # Errors
    ///
    /// If sizes, lengths or dtypes do not fit, or the driver refuses the work.
    pub fn forward<'x>(
        &self,
        cuda: &Cuda<'_>,
        [q, k, v]: [Heads<'x>; 3],
        out: Heads<'x>,
        normalizers: impl Into<CudaPart<'x>>,
    ) -> Result<()> {
        let normalizers = normalizers.into();

        let (call, tiles) = self.call(cuda, "attention", OF_FORWARD, &q)?;
        let is_empty = self.check(&call, [&q, &k, &v], &[("the result", &out)], &normalizers)?;
        call.writes(&[&out.part, &normalizers])?;
        if is_empty {
            return Ok(());
        }

        let Self {
            batch,
            heads,
            queries,
            ..
        } = *self;
        let mut args = Vec::new();
        [q, k, v, out]
            .iter()
            .for_each(|heads| args.extend(heads.args()));
        args.push(normalizers.into());
        args.extend(self.sizes());

        let blocks = product(&[queries.div_ceil(tiles.rows), heads, batch]);
        call.shared("attention", blocks, tiles.shared(OF_FORWARD), &args)
    }

    /// Computes the gradients of queries, keys and values from the result, its gradient, and the
    /// `normalizers` of the forward pass.
    ///
    /// # Errors
    ///
    /// If sizes, lengths or dtypes do not fit, the device has no memory left, or the driver
    /// refuses the work.
    pub fn backward<'x>(
        &self,
        cuda: &Cuda<'_>,
        [q, k, v]: [Heads<'x>; 3],
        [out, d_out]: [Heads<'x>; 2],
        normalizers: impl Into<CudaPart<'x>>,
        [d_q, d_k, d_v]: [Heads<'x>; 3],
    ) -> Result<()> {
        let normalizers = normalizers.into();

        let (call, tiles) = self.call(cuda, "gradient of attention", OF_GRADIENTS, &q)?;
        let of_queries = [("the result", &out), ("d_out", &d_out), ("d_q", &d_q)];
        let is_empty = self.check(&call, [&q, &k, &v], &of_queries, &normalizers)?;
        let Self {
            batch,
            heads,
            groups,
            queries,
            keys,
            dim,
            ..
        } = *self;
        for (name, heads) in [("d_k", &d_k), ("d_v", &d_v)] {
            heads.check(&call, name, [batch, keys, groups], dim)?;
        }
        call.writes(&[&d_q.part, &d_k.part, &d_v.part])?;
        if is_empty {
            return Ok(());
        }

        let rows = product(&[batch, heads, queries]);
        let means = cuda.scratch(DType::F32, rows)?;
        let mut args: Vec<_> = [out, d_out].iter().flat_map(Heads::args).collect();
        args.extend([
            small(heads),
            small(queries),
            rows.into(),
            small(dim),
            (&means).into(),
        ]);
        call.blocks("attention_means", rows.div_ceil(8), &args)?;

        let of_queries = (
            &[d_q][..],
            product(&[queries.div_ceil(tiles.rows), heads, batch]),
        );
        let of_keys = (
            &[d_k, d_v][..],
            product(&[keys.div_ceil(tiles.rows), groups, batch]),
        );
        let both = [
            ("attention_queries", of_queries),
            ("attention_keys", of_keys),
        ];

        for (function, (results, blocks)) in both {
            let mut args = Vec::new();
            [q, k, v, d_out]
                .iter()
                .chain(results)
                .for_each(|heads| args.extend(heads.args()));
            args.extend([normalizers.into(), (&means).into()]);
            args.extend(self.sizes());
            call.shared(function, blocks, tiles.shared(OF_GRADIENTS), &args)?;
        }
        Ok(())
    }

    /// Creates the call of a pass whose blocks keep `count` tiles in shared memory. Chooses the
    /// largest tiles that fit in a block's shared memory.
    fn call<'x>(
        &self,
        cuda: &'x Cuda<'x>,
        name: &'static str,
        count: usize,
        q: &Heads<'_>,
    ) -> Result<(LayerCall<'x>, &'static Tiles)> {
        let dim = self.dim;
        let most = cuda.shared_bytes();
        let Some(smallest) = tiles(dim).last() else {
            let why = format!("{name}: heads have {dim} elements: expected at most 256");
            return Err(Error::kernel(why));
        };

        let tiles = tiles(dim).find(|tiles| tiles.shared(count) <= most).ok_or_else(|| {
            let least = smallest.shared(count);
            Error::kernel(format!(
                "{name}: a block for heads of {dim} elements needs {least} bytes of shared memory, \
                 and this device gives a block at most {most}"
            ))
        })?;

        Ok((LayerCall::new(cuda, name, tiles.source, &q.part)?, tiles))
    }

    /// Checks the arguments of the forward and backward pass. `of_queries` are arrays with a vector
    /// for each query. Returns true if there is nothing to compute.
    fn check(
        &self,
        call: &LayerCall<'_>,
        [q, k, v]: [&Heads<'_>; 3],
        of_queries: &[(&str, &Heads<'_>)],
        normalizers: &CudaPart<'_>,
    ) -> Result<bool> {
        let Self {
            batch,
            heads,
            groups,
            queries,
            keys,
            dim,
            ..
        } = *self;

        if groups == 0 || !heads.is_multiple_of(groups) {
            return call.fail(&format!(
                "{heads} heads cannot share {groups} heads of keys"
            ));
        }
        if [heads, queries, keys]
            .iter()
            .any(|count| *count > i32::MAX as usize)
        {
            return call.fail(&format!(
                "{heads} heads, {queries} queries or {keys} keys: too many"
            ));
        }

        for (name, heads_of) in [("q", q)].iter().chain(of_queries) {
            heads_of.check(call, name, [batch, queries, heads], dim)?;
        }
        for (name, heads_of) in [("k", k), ("v", v)] {
            heads_of.check(call, name, [batch, keys, groups], dim)?;
        }

        let rows = product(&[batch, heads, queries]);
        call.has_f32(&[("normalizers", normalizers, product(&[rows, 2]))])?;

        match self.mask {
            CudaMask::Causal | CudaMask::CausalFrom(..) if queries > keys => {
                return call.fail(&format!("{queries} causal queries to {keys} keys"));
            }
            CudaMask::CausalFrom(first, stride) if rows > 0 => {
                let least = product(&[batch - 1, stride]).saturating_add(queries);
                call.one("the first keys", &first, DType::U32, least)?;
            }
            CudaMask::Additive(mask, [sequence, head, query]) if rows > 0 => {
                let strides = [(batch, sequence), (heads, head), (queries, query)];
                let last = strides.iter().fold(keys, |sum, (count, stride)| {
                    sum.saturating_add(product(&[count - 1, *stride]))
                });
                call.has_f32(&[("the mask", &mask, last)])?;
            }
            _ => {}
        }

        Ok(rows == 0 || dim == 0)
    }

    /// Returns the arguments that the kernels of both passes share.
    fn sizes(&self) -> Vec<Arg<'_>> {
        let Self {
            heads,
            groups,
            queries,
            keys,
            dim,
            scale,
            cap,
            mask,
            ..
        } = *self;

        let causal = matches!(mask, CudaMask::Causal | CudaMask::CausalFrom(..));
        let (first, stride) = match mask {
            CudaMask::CausalFrom(first, stride) => (Some(first), stride),
            _ => (None, 0),
        };
        let (mask, strides) = match mask {
            CudaMask::Additive(mask, strides) => (Some(mask), strides),
            _ => (None, [0; 3]),
        };

        let mut args: Vec<_> = [heads, groups, queries, keys, dim].map(small).into();
        args.push(scale.into());
        args.extend(capped(cap));
        args.push(u32::from(causal).into());
        args.extend([first.into(), stride.into(), mask.into()]);
        args.extend(strides.map(Arg::from));
        args
    }
}

/// Returns the argument for a size. `check` has found the size to be below 2^31.
fn small(size: usize) -> Arg<'static> {
    (size as u32).into()
}

/// Returns the source for heads of `dim` elements. `None` if `dim` is too large.
pub(super) fn source(dim: usize) -> Option<&'static SourcePair> {
    tiles(dim).next().map(|tiles| tiles.source)
}

/// Returns the tiles for heads of `dim` elements, the best first. Each later one needs less
/// shared memory.
fn tiles(dim: usize) -> impl Iterator<Item = &'static Tiles> {
    let length = TILES
        .iter()
        .map(|tiles| tiles.dim)
        .find(|length| dim <= *length);
    TILES.iter().filter(move |tiles| Some(tiles.dim) == length)
}

/// Number of tiles in the shared memory of a block of the forward pass. The next constant is for
/// gradients.
const OF_FORWARD: usize = 2;
const OF_GRADIENTS: usize = 4;

/// The tile size for vectors of up to `dim` elements, and the CUDA source for it.
struct Tiles {
    dim: usize,
    /// Number of vectors in a tile: `N` in the source.
    rows: usize,
    source: &'static SourcePair,
}

static TILES: [Tiles; 6] = [
    Tiles {
        dim: 64,
        rows: 64,
        source: &ATTENTION_64,
    },
    Tiles {
        dim: 64,
        rows: 32,
        source: &ATTENTION_64_BY_32,
    },
    Tiles {
        dim: 128,
        rows: 64,
        source: &ATTENTION_128,
    },
    Tiles {
        dim: 128,
        rows: 32,
        source: &ATTENTION_128_BY_32,
    },
    Tiles {
        dim: 256,
        rows: 32,
        source: &ATTENTION_256,
    },
    Tiles {
        dim: 256,
        rows: 16,
        source: &ATTENTION_256_BY_16,
    },
];

impl Tiles {
    /// Returns the bytes of shared memory of a block with `count` tiles of vectors.
    fn shared(&self, count: usize) -> u32 {
        attention_shared(self.dim, self.rows, count)
    }
}
