//! Blocks made of f32.

use half::{bf16, f16};
use thiserror::Error;

use crate::block_type::BlockType;

/// An error of [`BlockType::encode`].
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum EncodeError {
    /// The block type can only be read.
    #[error("{} blocks can be read, but not be made here", .0.name())]
    NoEncoder(BlockType),

    /// A quantised block cannot hold the value.
    #[error("{value} cannot be stored in a block of {}", block_type.name())]
    OutOfRange {
        /// The type of the block.
        block_type: BlockType,
        /// The value: infinite, NaN, or beyond the largest scale.
        value: f32,
    },
}

impl BlockType {
    /// Returns true if [`encode`](Self::encode) can make blocks of this type.
    pub const fn has_encoder(self) -> bool {
        matches!(
            self,
            Self::F32 | Self::F16 | Self::BF16 | Self::Q4_0 | Self::Q8_0
        )
    }

    /// Encodes whole blocks. They are equal to the bit to those of GGUF's own tools. F16 and BF16
    /// round to the nearest value, and to even if two are as near.
    ///
    /// # Errors
    ///
    /// If the type has no encoder, or a value is beyond the range of a quantised block. `blocks`
    /// may be partly written then.
    ///
    /// # Panics
    ///
    /// If `values` are not whole blocks, or `blocks` does not have as many.
    pub fn encode(self, values: &[f32], blocks: &mut [u8]) -> Result<(), EncodeError> {
        self.assert_lengths(blocks, values);
        match self {
            Self::F32 => encode_each(values, blocks, |[value], block| {
                *block = value.to_le_bytes();
                Ok(())
            }),
            Self::F16 => encode_each(values, blocks, |[value], block| {
                *block = f16::from_f32(*value).to_le_bytes();
                Ok(())
            }),
            Self::BF16 => encode_each(values, blocks, |[value], block| {
                *block = bf16::from_f32(*value).to_le_bytes();
                Ok(())
            }),
            Self::Q4_0 => encode_each(values, blocks, q4_0),
            Self::Q8_0 => encode_each(values, blocks, q8_0),
            other => Err(EncodeError::NoEncoder(other)),
        }
    }
}

/// Encodes blocks of `E` elements to `B` bytes each.
fn encode_each<const E: usize, const B: usize>(
    values: &[f32],
    blocks: &mut [u8],
    encode: impl Fn(&[f32; E], &mut [u8; B]) -> Result<(), EncodeError>,
) -> Result<(), EncodeError> {
    let values = values.as_chunks::<E>().0;
    let blocks = blocks.as_chunks_mut::<B>().0;
    values
        .iter()
        .zip(blocks)
        .try_for_each(|(values, block)| encode(values, block))
}

/// The value of largest magnitude becomes -8, so its sign is that of the scale's opposite.
fn q4_0(values: &[f32; 32], block: &mut [u8; 18]) -> Result<(), EncodeError> {
    let largest = largest_magnitude(BlockType::Q4_0, values)?;
    let scale = largest / -8.0;
    let inverse = inverse(scale);
    block[..2].copy_from_slice(&scale_bytes(BlockType::Q4_0, scale, largest)?);
    // Values round to the nearest, by the cut after the addition.
    let quants = values.map(|value| ((value * inverse + 8.5) as u8).min(15));
    for i in 0..16 {
        block[2 + i] = quants[i] | quants[i + 16] << 4;
    }
    Ok(())
}

/// The value of largest magnitude becomes 127 or -127.
fn q8_0(values: &[f32; 32], block: &mut [u8; 34]) -> Result<(), EncodeError> {
    let largest = largest_magnitude(BlockType::Q8_0, values)?;
    let scale = largest.abs() / 127.0;
    let inverse = inverse(scale);
    block[..2].copy_from_slice(&scale_bytes(BlockType::Q8_0, scale, largest)?);
    for i in 0..32 {
        // Halves round away from zero.
        let quant = (values[i] * inverse).round() as i8;
        block[2 + i] = quant.cast_unsigned();
    }
    Ok(())
}

/// Returns the value of largest magnitude: the first one of equal magnitude. Refuses values that
/// are not finite.
fn largest_magnitude(block_type: BlockType, values: &[f32; 32]) -> Result<f32, EncodeError> {
    if let Some(&value) = values.iter().find(|value| !value.is_finite()) {
        return Err(EncodeError::OutOfRange { block_type, value });
    }
    let larger = |a: f32, b: f32| if b.abs() > a.abs() { b } else { a };
    Ok(values[1..]
        .iter()
        .fold(values[0], |largest, value| larger(largest, *value)))
}

fn inverse(scale: f32) -> f32 {
    match scale == 0.0 {
        true => 0.0,
        false => 1.0 / scale,
    }
}

/// Returns the scale in half precision. Refuses an infinite one.
fn scale_bytes(block_type: BlockType, scale: f32, largest: f32) -> Result<[u8; 2], EncodeError> {
    let half = f16::from_f32(scale);
    match half.is_finite() {
        true => Ok(half.to_le_bytes()),
        false => Err(EncodeError::OutOfRange {
            block_type,
            value: largest,
        }),
    }
}
