//! Rotary position embeddings.

use mpmd_device::cuda::kernels::ROTARY;

use super::{Cuda, CudaPart, Heads, LayerCall, product};
use crate::error::Result;
use mpmd_layout::aval::DType;

/// The choice of each token's row in the tables of cosines and sines, which are `f32` and `[_, dim
/// / 2]`.
#[derive(Clone, Copy, Debug)]
pub enum RotaryAngles<'a> {
    /// Token `t` of sequence `s` uses row `s * n + t`, where `n` is this number. With `n` 0 all
    /// sequences use the same rows.
    ByTime(usize),
    /// The index of each token's row, `u32`. It must be below the tables' number of rows.
    ByPosition(CudaPart<'a>),
}

/// A rotary embedding: rotates pairs of elements in each head's vectors by angles that depend on
/// the token.
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'a> {
    /// Number of sequences.
    pub batch: usize,
    /// Number of tokens of a sequence.
    pub time: usize,
    /// Number of heads.
    pub heads: usize,
    /// Number of elements of a vector that are rotated, counted from its start: an even number.
    pub dim: usize,
    /// True if the rotated pairs are the elements `(2i, 2i + 1)`. False for the pairs `(i, i + dim
    /// / 2)`.
    pub beside: bool,
    /// The choice of each token's row in the tables.
    pub angles: RotaryAngles<'a>,
}

impl Rotary<'_> {
    /// Rotates the vectors of `x`, with the result in `y`. `y` may be `x`. With `is_back` rotates
    /// in the other direction, which computes the gradient of `x` from that of `y`.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, or the driver refuses the work.
    pub fn rotate<'x>(
        &self,
        cuda: &Cuda<'_>,
        is_back: bool,
        x: Heads<'x>,
        [cos, sin]: [CudaPart<'x>; 2],
        y: Heads<'x>,
    ) -> Result<()> {
        let Self {
            batch,
            time,
            heads,
            dim,
            beside,
            angles,
        } = *self;

        let call = LayerCall::new(cuda, "rotary embedding", &ROTARY, &x.part)?;
        if !dim.is_multiple_of(2) {
            return call.fail(&format!("{dim} elements have no pairs"));
        }

        let tokens = product(&[batch, time]);
        let half = dim / 2;
        x.check(&call, "x", [batch, time, heads], dim)?;
        y.check(&call, "y", [batch, time, heads], dim)?;
        call.writes(&[&y.part])?;

        let all = product(&[tokens, heads, half]);
        if all == 0 {
            return Ok(());
        }

        let (rows, stride, positions) = match angles {
            RotaryAngles::ByTime(stride) => (
                product(&[batch - 1, stride]).saturating_add(time),
                stride,
                None,
            ),
            RotaryAngles::ByPosition(positions) => {
                call.one("the positions", &positions, DType::U32, tokens)?;
                (1, 0, Some(positions))
            }
        };
        let table = product(&[rows, half]);
        call.has_f32(&[("the cosines", &cos, table), ("the sines", &sin, table)])?;

        let mut args = vec![tokens.into(), time.into(), heads.into(), half.into()];
        let direction = if is_back { -1f32 } else { 1.0 };
        args.extend([u32::from(beside).into(), direction.into()]);
        args.extend([x, y].iter().flat_map(Heads::args));
        args.extend([cos.into(), sin.into(), stride.into(), positions.into()]);
        call.over("rotate", all, &args)
    }
}
