//! Bytes and their places become rows: [`embed`](crate::gpt::embed) on a CUDA device.

use mpmd_core::cuda::{Grid, Part};
use mpmd_core::prelude::*;

use super::device::{Device, size};
use crate::gpt::embed::EmbedParameters;
use crate::gpt::{BYTES, BlockShape};

/// Tokens that a block looks at together, and its threads.
const TOKENS: usize = 256;

/// `x = bytes[token] + positions[place]`.
pub(crate) fn embed_forward(
    device: Device<'_>,
    shape: BlockShape,
    p: &EmbedParameters<Part<'_>>,
    x: Part<'_>,
    tokens: Part<'_>,
) -> Result<()> {
    let args = [
        x.into(),
        p.bytes.into(),
        p.positions.into(),
        tokens.into(),
        size(shape.rows())?.into(),
        size(shape.time)?.into(),
        size(shape.width)?.into(),
    ];
    device.rows("embed_forward", shape.rows(), &args)
}

/// *Adds* the gradients of both tables, in the order of the rows: the same bits as on the host.
pub(crate) fn embed_backward_weight(
    device: Device<'_>,
    shape: BlockShape,
    gradients: &EmbedParameters<Part<'_>>,
    dx: Part<'_>,
    tokens: Part<'_>,
) -> Result<()> {
    let BlockShape { batch, time, width, .. } = shape;
    let columns = size(width.div_ceil(TOKENS))?;
    let grid = Grid { blocks: (BYTES as u32, columns, 1), ..Grid::new(1, TOKENS as u32) };
    let args =
        [gradients.bytes.into(), dx.into(), tokens.into(), size(shape.rows())?.into(), size(width)?.into()];
    device.launch("embed_backward_bytes", grid, &args)?;
    let elements = time * width;
    let args = [gradients.positions.into(), dx.into(), size(batch)?.into(), elements.into()];
    device.elements("embed_backward_positions", elements, &args)
}
