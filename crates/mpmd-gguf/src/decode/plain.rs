//! Blocks of one floating-point number.

use half::f16;
use half::slice::HalfFloatSliceExt as _;

/// Number of elements that [`f16s`] converts at a time.
const CHUNK: usize = 64;

pub(super) fn f32(block: &[u8; 4], values: &mut [f32; 1]) {
    values[0] = f32::from_le_bytes(*block);
}

pub(super) fn bf16(block: &[u8; 2], values: &mut [f32; 1]) {
    let [low, high] = *block;
    values[0] = f32::from_le_bytes([0, 0, low, high]);
}

/// Converts half-precision numbers in chunks, with the processor's instruction for it.
pub(super) fn f16s(blocks: &[u8], values: &mut [f32]) {
    let mut halves = [f16::ZERO; CHUNK];
    for (blocks, values) in blocks.chunks(2 * CHUNK).zip(values.chunks_mut(CHUNK)) {
        let halves = &mut halves[..values.len()];
        for (half, bytes) in halves.iter_mut().zip(blocks.as_chunks().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        halves.convert_to_f32_slice(values);
    }
}
