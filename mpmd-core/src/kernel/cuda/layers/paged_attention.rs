//! Attention to keys and values that stay from pass to pass, in blocks.

use mpmd_device::cpu::paged::BLOCK;
use mpmd_device::cuda::kernels::PAGED;

use super::{Arg, Cuda, CudaPart, Heads, LayerCall, THREADS, args, capped, product};
use crate::error::Result;
use mpmd_layout::aval::DType;

/// Number of keys that a block of threads reads: one for each thread.
const KEYS: usize = THREADS as usize;
/// Maximum number of elements of scratch memory for partial results.
const ROOM: usize = 1 << 24;

/// The cached keys and values of a layer, in blocks of 16 tokens. Sequences with equal beginnings
/// may share the blocks of these tokens.
#[derive(Clone, Copy, Debug)]
pub struct PagedKeysValues<'a> {
    /// Number of blocks.
    pub blocks: usize,
    /// Number of heads of keys and values.
    pub groups: usize,
    /// Elements of a key and of a value: at most 256.
    pub dim: usize,
    /// The keys, `[blocks, groups, dim, 16]`.
    pub keys: CudaPart<'a>,
    /// The values, `[blocks, groups, 16, dim]`.
    pub values: CudaPart<'a>,
}

/// The scaling of the scores of queries and keys, and the number of keys that a query sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionScores {
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// A scaled score `x` becomes `cap tanh(x / cap)`.
    pub cap: Option<f32>,
    /// Number of keys that a query sees, including its own token's. `None` for all.
    pub window: Option<usize>,
}

/// The tokens of a pass, which may be of several sequences. All numbers are `u32`.
#[derive(Clone, Copy, Debug)]
pub struct PagedTokens<'a> {
    /// Number of tokens.
    pub tokens: usize,
    /// The sequence of each token: a row of `tables`.
    pub sequences: CudaPart<'a>,
    /// The position of each token in its sequence.
    pub positions: CudaPart<'a>,
    /// The blocks of each sequence in order: `[sequences, most]`. A sequence may have fewer than
    /// `most`.
    pub tables: CudaPart<'a>,
    /// Number of columns of `tables`: the maximum number of blocks of a sequence.
    pub most: usize,
}

impl PagedKeysValues<'_> {
    /// Writes the keys and values of a pass's tokens to their blocks. `k` and `v` are laid out as
    /// for one sequence. Skips a token if its block does not exist.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, or the driver refuses the work.
    pub fn write<'x>(
        &self,
        cuda: &Cuda<'_>,
        rows: &PagedTokens<'x>,
        k: Heads<'x>,
        v: Heads<'x>,
    ) -> Result<()> {
        let Self {
            groups,
            dim,
            keys,
            values,
            ..
        } = *self;

        let call = LayerCall::new(cuda, "write to blocks", &PAGED, &k.part)?;
        self.check(&call, rows)?;
        k.check(&call, "k", [1, rows.tokens, groups], dim)?;
        v.check(&call, "v", [1, rows.tokens, groups], dim)?;
        call.writes(&[&keys, &values])?;

        let all = product(&[rows.tokens, groups, dim]);
        if all == 0 {
            return Ok(());
        }

        let mut args = self.args(rows);
        args.push(rows.tokens.into());
        for Heads {
            part,
            strides: [_, token, head],
        } in [k, v]
        {
            args.extend([part.into(), token.into(), head.into()]);
        }
        args.extend([keys.into(), values.into()]);
        call.over("paged_write", all, &args)
    }

    /// Computes the causal attention of the queries of a pass, with `heads` heads, to the keys
    /// written before. `heads / groups` consecutive heads of queries use one head of keys. A
    /// token's result does not depend, to the bit, on the rest of the pass, or on how its sequence
    /// is divided over passes. If a key's block does not exist, the result is NaN.
    ///
    /// # Errors
    ///
    /// If sizes, lengths or dtypes do not fit, the device has no memory left, or the driver
    /// refuses the work.
    pub fn attend<'x>(
        &self,
        cuda: &Cuda<'_>,
        rows: &PagedTokens<'x>,
        heads: usize,
        scores: AttentionScores,
        q: Heads<'x>,
        out: Heads<'x>,
    ) -> Result<()> {
        let Self {
            groups,
            dim,
            keys,
            values,
            ..
        } = *self;

        let call = LayerCall::new(cuda, "attention to blocks", &PAGED, &q.part)?;
        self.check(&call, rows)?;
        if groups == 0 || !heads.is_multiple_of(groups) || dim > 256 {
            let why = format!("{heads} heads of {dim} elements, and {groups} heads of keys");
            return call.fail(&why);
        }
        q.check(&call, "q", [1, rows.tokens, heads], dim)?;
        out.check(&call, "the result", [1, rows.tokens, heads], dim)?;
        call.writes(&[&out.part])?;

        let parts = product(&[rows.most, BLOCK]).div_ceil(KEYS);
        let AttentionScores { scale, cap, window } = scores;
        let window = window.unwrap_or(usize::MAX);
        let each = product(&[heads, parts, dim + 2]);
        if product(&[rows.tokens, heads, dim, parts]) == 0 {
            return Ok(());
        }

        // The number of tokens at once for which scratch memory has room.
        let step = (ROOM / each).clamp(1, rows.tokens);
        let results = cuda.scratch(DType::F32, product(&[step, each]))?;
        let [_, q_token, q_head] = q.strides;
        let [_, out_token, out_head] = out.strides;

        for first in (0..rows.tokens).step_by(step) {
            let tokens = step.min(rows.tokens - first);
            let mut args = self.args(rows);
            args.extend([first, heads, parts, window].map(Arg::from));
            args.push(scale.into());
            args.extend(capped(cap));
            args.extend([q.part.into(), q_token.into(), q_head.into()]);
            args.extend([keys.into(), values.into(), (&results).into()]);
            call.blocks("paged_parts", product(&[tokens, heads, parts]), &args)?;

            let args = args![
                first,
                heads,
                parts,
                dim,
                window,
                rows.positions,
                &results,
                out.part,
                out_token,
                out_head
            ];
            call.blocks("paged_join", product(&[tokens, heads]), args)?;
        }

        Ok(())
    }

    fn check(&self, call: &LayerCall<'_>, rows: &PagedTokens<'_>) -> Result<()> {
        let all = product(&[self.blocks, self.groups, self.dim, BLOCK]);
        call.has(&[
            ("the keys", &self.keys, all),
            ("the values", &self.values, all),
        ])?;

        let PagedTokens {
            tokens,
            sequences,
            positions,
            tables,
            most,
        } = rows;

        call.one("the sequences", sequences, DType::U32, *tokens)?;
        call.one("the positions", positions, DType::U32, *tokens)?;
        call.one(
            "the tables",
            tables,
            DType::U32,
            if *tokens > 0 { *most } else { 0 },
        )
    }

    /// Returns the arguments that all kernels of paged attention share.
    fn args<'x>(&self, rows: &PagedTokens<'x>) -> Vec<Arg<'x>> {
        vec![
            self.blocks.into(),
            self.groups.into(),
            self.dim.into(),
            rows.tables.into(),
            rows.most.into(),
            rows.sequences.into(),
            rows.positions.into(),
        ]
    }
}
