//! Blocks of 32 elements with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! A block begins with the scale; those named `_1` have a minimum after it. Of 4-bit elements, byte
//! `i` holds element `i` in its low half and element `i + 16` in its high half. The fifth bits are
//! a u32 before them, bit `i` for element `i`.

use super::half_at;

pub(super) fn q4_0(block: &[u8; 18], values: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let quants = &block[2..18];
    for i in 0..16 {
        values[i] = scale * (f32::from(quants[i] & 15) - 8.0);
        values[i + 16] = scale * (f32::from(quants[i] >> 4) - 8.0);
    }
}

pub(super) fn q4_1(block: &[u8; 20], values: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let minimum = half_at(block, 2);
    let quants = &block[4..20];
    for i in 0..16 {
        values[i] = scale * f32::from(quants[i] & 15) + minimum;
        values[i + 16] = scale * f32::from(quants[i] >> 4) + minimum;
    }
}

pub(super) fn q5_0(block: &[u8; 22], values: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let quants = five_bits(&block[2..22]);
    for i in 0..32 {
        values[i] = scale * (f32::from(quants[i]) - 16.0);
    }
}

pub(super) fn q5_1(block: &[u8; 24], values: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let minimum = half_at(block, 2);
    let quants = five_bits(&block[4..24]);
    for i in 0..32 {
        values[i] = scale * f32::from(quants[i]) + minimum;
    }
}

pub(super) fn q8_0(block: &[u8; 34], values: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let quants = &block[2..34];
    for i in 0..32 {
        values[i] = f32::from(quants[i].cast_signed()) * scale;
    }
}

/// Returns 5-bit elements. `packed` has the 32 high bits, then 16 bytes of low bits.
fn five_bits(packed: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    let low = &packed[4..20];
    let mut quants = [0; 32];
    for i in 0..16 {
        quants[i] = low[i] & 15 | ((high >> i & 1) as u8) << 4;
        quants[i + 16] = low[i] >> 4 | ((high >> (i + 16) & 1) as u8) << 4;
    }
    quants
}
