//! Blocks whose 4-bit elements are indices of a table: IQ4_NL, IQ4_XS, MXFP4.
//!
//! Byte `i` of 16 bytes holds element `i` in its low half and element `i + 16` in its high half.

use super::half_at;

/// Values of IQ4_NL and IQ4_XS.
const NONLINEAR: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Values of MXFP4, doubled: a sign, two bits of exponent, one of fraction. Minus zero is zero.
const MICROSCALED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 18 bytes: the scale, and 32 elements.
pub(super) fn iq4_nl(block: &[u8; 18], values: &mut [f32; 32]) {
    look_up(&NONLINEAR, half_at(block, 0), &block[2..18], values);
}

/// 136 bytes: the scale, upper two and lower four bits of eight scales, and eight groups of 32
/// elements.
pub(super) fn iq4_xs(block: &[u8; 136], values: &mut [f32; 256]) {
    let scale = half_at(block, 0);
    let upper = u16::from_le_bytes([block[2], block[3]]);
    let lower = &block[4..8];
    let quants = &block[8..136];

    for (group, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = lower[group / 2] >> (group % 2 * 4) & 15;
        let high = (upper >> (2 * group) & 3) as u8;
        let group_scale = scale * (f32::from(low | high << 4) - 32.0);
        look_up(&NONLINEAR, group_scale, &quants[group * 16..][..16], values);
    }
}

/// 17 bytes: the exponent of the scale, and 32 elements.
pub(super) fn mxfp4(block: &[u8; 17], values: &mut [f32; 32]) {
    look_up(&MICROSCALED, half_power(block[0]), &block[1..17], values);
}

/// Returns 2^(exponent - 128): half of the scale, since the table has doubled values. The two
/// smallest are subnormal. 255, which is no number in the standard, is not treated apart, as in
/// GGUF's own tools.
fn half_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => u32::from(exponent - 1) << 23,
    })
}

fn look_up(table: &[i8; 16], scale: f32, quants: &[u8], values: &mut [f32; 32]) {
    let quants = &quants[..16];
    for i in 0..16 {
        values[i] = scale * f32::from(table[usize::from(quants[i] & 15)]);
        values[i + 16] = scale * f32::from(table[usize::from(quants[i] >> 4)]);
    }
}
