//! The first layer of the model: [`embed`](crate::gpt::embed) on a CUDA device.

use mpmd::cuda::{Grid, Part};
use mpmd::prelude::*;

use super::device::{Device, size};
use crate::gpt::embed::EmbedParameters;
use crate::gpt::{BYTES, BlockShape};

/// Number of tokens that a block checks at once, and of its threads.
const TOKENS: usize = 256;

/// Issues `x = bytes[token] + positions[place]` for every token of `tokens`. `place` is the token's
/// index in its sequence.
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

/// Issues the weight gradient: *adds* the gradients of both tables to `gradients`, in the order of
/// the rows. The bits are the same as on the host.
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
    let args = [
        gradients.bytes.into(),
        dx.into(),
        tokens.into(),
        size(shape.rows())?.into(),
        size(width)?.into(),
    ];
    device.launch("embed_backward_bytes", grid, &args)?;
    let elements = time * width;
    let args = [gradients.positions.into(), dx.into(), size(batch)?.into(), elements.into()];
    device.elements("embed_backward_positions", elements, &args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::cuda::testing::{array, elsewhere, floats, floats_on_device};
    use crate::gpt::embed as host;
    use crate::math::random_bits;

    /// Uses more tokens than a block checks at once, and more columns than a block has threads.
    #[test]
    fn rows_and_table_gradients_are_the_same_bits_as_on_host() {
        if elsewhere!() {
            return;
        }
        let shape =
            BlockShape { batch: 5, time: 67, width: 260, heads_total: 1, heads: 1, hidden: 1 };
        let (rows, width) = (shape.rows(), shape.width);
        let tokens: Vec<u8> =
            (0..rows as u64).map(|i| (random_bits(1, i) % 5 * 63) as u8).collect();
        let (bytes, positions) = (floats(BYTES * width, 1), floats(shape.time * width, 2));
        let dx = floats(rows * width, 3);
        let mut x = vec![0.0; rows * width];
        let p = EmbedParameters { bytes: &bytes[..], positions: &positions[..] };
        host::embed_forward(shape, &p, &mut x, &tokens);
        let (mut d_bytes, mut d_positions) = (bytes.clone(), positions.clone());
        let mut gradients =
            EmbedParameters { bytes: &mut d_bytes[..], positions: &mut d_positions[..] };
        host::embed_backward_weight(shape, &mut gradients, &dx, &tokens);
        let inputs = vec![array(&bytes), array(&positions), array(&dx), array(&tokens)];
        let expected = [x, d_bytes, d_positions];
        let found =
            floats_on_device(inputs, &expected.each_ref().map(Vec::len), move |device, x, y| {
                let p = EmbedParameters { bytes: x[0], positions: x[1] };
                embed_forward(device, shape, &p, y[0], x[3])?;
                device.cuda().copy(x[0], y[1])?;
                device.cuda().copy(x[1], y[2])?;
                let gradients = EmbedParameters { bytes: y[1], positions: y[2] };
                embed_backward_weight(device, shape, &gradients, x[2], x[3])
            });
        assert!(found == expected, "rows or gradients differ");
    }
}
