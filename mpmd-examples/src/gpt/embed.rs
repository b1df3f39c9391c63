//! The first layer of the model: turns bytes and their positions into rows.

use crate::math::Real;

use super::{BYTES, BlockShape};

super::leaves! {
    /// Parameters of the embedding.
    pub struct EmbedParameters {
        /// A row for each byte value: `[BYTES, width]`.
        bytes,
        /// A row for each position of a sequence: `[time, width]`.
        positions,
    }
}

/// Computes `x = bytes[token] + positions[place]`, with `tokens` `[batch, time]` and `x` `[batch,
/// time, width]`. `place` is the token's index in its sequence.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn embed_forward<T: Real>(
    shape: BlockShape,
    p: &EmbedParameters<&[T]>,
    x: &mut [T],
    tokens: &[u8],
) {
    let width = shape.width;
    assert_lens(shape, p.bytes.len(), p.positions.len(), x.len(), tokens.len());
    let places = p.positions.chunks_exact(width).cycle();
    for ((x, token), position) in x.chunks_exact_mut(width).zip(tokens).zip(places) {
        let byte = &p.bytes[usize::from(*token) * width..][..width];
        for (x, (byte, position)) in x.iter_mut().zip(byte.iter().zip(position)) {
            *x = *byte + *position;
        }
    }
}

/// *Adds* the gradients of both tables to `gradients`, in the order of the rows. `dx` is the
/// gradient of [`embed_forward`]'s `x`.
///
/// No layer precedes the embedding. Its residual is the tokens, and its weight residual is `dx`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn embed_backward_weight<T: Real>(
    shape: BlockShape,
    gradients: &mut EmbedParameters<&mut [T]>,
    dx: &[T],
    tokens: &[u8],
) {
    let width = shape.width;
    let EmbedParameters { bytes, positions } = gradients;
    assert_lens(shape, bytes.len(), positions.len(), dx.len(), tokens.len());
    for (dx, token) in dx.chunks_exact(width).zip(tokens) {
        let byte = &mut bytes[usize::from(*token) * width..][..width];
        byte.iter_mut().zip(dx).for_each(|(d, dx)| *d += *dx);
    }
    for dx in dx.chunks_exact(shape.time * width) {
        positions.iter_mut().zip(dx).for_each(|(d, dx)| *d += *dx);
    }
}

fn assert_lens(shape: BlockShape, bytes: usize, positions: usize, x: usize, tokens: usize) {
    let BlockShape { time, width, .. } = shape;
    assert_eq!((bytes, positions), (BYTES * width, time * width), "elements of the tables");
    assert_eq!((x, tokens), (shape.rows() * width, shape.rows()), "elements of rows and tokens");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::lanes::dot;
    use crate::gpt::testing::{assert_gradient, random};

    #[test]
    fn gradients_equal_finite_differences() {
        let shape = BlockShape { batch: 2, time: 3, width: 2, heads_total: 1, heads: 1, hidden: 1 };
        // A byte that occurs three times gets three gradients.
        let tokens = [7, 255, 7, 0, 7, 9];
        let mut p = EmbedParameters { bytes: random(BYTES * 2, 1), positions: random(6, 2) };
        let dx = random(12, 3);
        let forward = |p: &EmbedParameters<Vec<f64>>| {
            let mut x = vec![f64::NAN; 12];
            embed_forward(shape, &p.each(|leaf| leaf.as_slice()), &mut x, &tokens);
            x
        };
        assert_eq!(forward(&p)[8], p.bytes[14] + p.positions[2]);
        let mut gradients = p.each(|leaf| vec![0.0; leaf.len()]);
        embed_backward_weight(
            shape,
            &mut gradients.each_mut(|leaf| leaf.as_mut_slice()),
            &dx,
            &tokens,
        );
        let value = |p: &EmbedParameters<Vec<f64>>| dot(&dx, &forward(p));
        assert_gradient("bytes", &gradients.bytes, &mut p, |p| &mut p.bytes, value);
        assert_gradient("positions", &gradients.positions, &mut p, |p| &mut p.positions, value);
    }
}
