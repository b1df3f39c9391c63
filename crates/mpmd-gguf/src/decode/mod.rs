//! Blocks as f32. Each family of block types is a file here.
//!
//! All products and sums are in f32 and in the order that the format's own tools use, so values are
//! the same to the bit.

mod k_quants;
mod legacy;
mod nonlinear;
mod plain;

use half::f16;

use crate::block_type::BlockType;

impl BlockType {
    /// Decodes whole blocks to f32. The values are equal to the bit to those of GGUF's own tools;
    /// a NaN is some NaN.
    ///
    /// # Panics
    ///
    /// If `blocks` are not whole blocks, or `values` does not have as many elements.
    pub fn decode(self, blocks: &[u8], values: &mut [f32]) {
        self.assert_lengths(blocks, values);
        match self {
            Self::F32 => decode_each(blocks, values, plain::f32),
            Self::F16 => plain::f16s(blocks, values),
            Self::BF16 => decode_each(blocks, values, plain::bf16),
            Self::Q4_0 => decode_each(blocks, values, legacy::q4_0),
            Self::Q4_1 => decode_each(blocks, values, legacy::q4_1),
            Self::Q5_0 => decode_each(blocks, values, legacy::q5_0),
            Self::Q5_1 => decode_each(blocks, values, legacy::q5_1),
            Self::Q8_0 => decode_each(blocks, values, legacy::q8_0),
            Self::Q2_K => decode_each(blocks, values, k_quants::q2_k),
            Self::Q3_K => decode_each(blocks, values, k_quants::q3_k),
            Self::Q4_K => decode_each(blocks, values, k_quants::q4_k),
            Self::Q5_K => decode_each(blocks, values, k_quants::q5_k),
            Self::Q6_K => decode_each(blocks, values, k_quants::q6_k),
            Self::IQ4_NL => decode_each(blocks, values, nonlinear::iq4_nl),
            Self::IQ4_XS => decode_each(blocks, values, nonlinear::iq4_xs),
            Self::MXFP4 => decode_each(blocks, values, nonlinear::mxfp4),
        }
    }

    /// Panics unless `blocks` are whole blocks that hold as many elements as `values`.
    pub(crate) fn assert_lengths(self, blocks: &[u8], values: &[f32]) {
        assert!(
            blocks.len().is_multiple_of(self.bytes())
                && blocks.len() / self.bytes() * self.elements() == values.len(),
            "{} bytes of {} are not {} elements",
            blocks.len(),
            self.name(),
            values.len()
        );
    }
}

/// Decodes blocks of `B` bytes to `E` elements each.
fn decode_each<const B: usize, const E: usize>(
    blocks: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; E]),
) {
    let blocks = blocks.as_chunks::<B>().0;
    let values = values.as_chunks_mut::<E>().0;
    for (block, values) in blocks.iter().zip(values) {
        decode(block, values);
    }
}

/// Returns the half-precision number at byte `at` of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
