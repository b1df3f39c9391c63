//! Blocks of 256 elements with scales of scales: Q2_K to Q6_K.
//!
//! A block has a scale in half precision, and groups of 16 or 32 elements with a small integer
//! scale each. Q2_K, Q4_K and Q5_K have minimums in the same form.

use super::half_at;

/// Number of elements in a block.
const ELEMENTS: usize = 256;

/// 84 bytes: 16 scales with minimums in the high halves, 64 bytes of 2-bit elements, the scale and
/// the minimum.
pub(super) fn q2_k(block: &[u8; 84], values: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 80);
    let minimum = half_at(block, 82);
    let groups = &block[..16];
    let quants = &block[16..80];

    for (group, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let group_scale = scale * f32::from(groups[group] & 15);
        let group_minimum = minimum * f32::from(groups[group] >> 4);
        let quants = two_bits(quants, group);
        for i in 0..16 {
            values[i] = group_scale * f32::from(quants[i]) - group_minimum;
        }
    }
}

/// 110 bytes: 32 bytes of high bits, 64 bytes of the lower two, 12 bytes of 6-bit scales, the
/// scale. An element without the high bit is lower by 4.
pub(super) fn q3_k(block: &[u8; 110], values: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 108);
    let high = &block[..32];
    let quants = &block[32..96];
    let groups = &block[96..108];

    for (group, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // Of each scale, four bits are in the first 8 bytes and two in the last 4.
        let low = groups[group % 8] >> (group / 8 * 4) & 15;
        let top = groups[8 + group % 4] >> (group / 4 * 2) & 3;
        let group_scale = scale * (f32::from(low | top << 4) - 32.0);

        let quants = two_bits(quants, group);
        let high = &high[group % 2 * 16..][..16];
        let bit = group / 2;
        for i in 0..16 {
            let quant = quants[i] | (high[i] >> bit & 1) << 2;
            values[i] = group_scale * (f32::from(quant) - 4.0);
        }
    }
}

/// 144 bytes: the scale, the minimum, 12 bytes of 6-bit scales and minimums, 128 bytes of 4-bit
/// elements.
pub(super) fn q4_k(block: &[u8; 144], values: &mut [f32; ELEMENTS]) {
    let groups = ScaledGroups::new(&block[..16]);
    let quants = &block[16..144];
    for (pair, values) in values.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let quants = &quants[pair * 32..][..32];
        let low = groups.group(2 * pair);
        let high = groups.group(2 * pair + 1);
        for i in 0..32 {
            values[i] = low.scale * f32::from(quants[i] & 15) - low.minimum;
            values[i + 32] = high.scale * f32::from(quants[i] >> 4) - high.minimum;
        }
    }
}

/// 176 bytes: as [`q4_k`], with 32 bytes of fifth bits before the elements. Bit `g` of byte `i` is
/// for element `i` of group `g`.
pub(super) fn q5_k(block: &[u8; 176], values: &mut [f32; ELEMENTS]) {
    let groups = ScaledGroups::new(&block[..16]);
    let fifth = &block[16..48];
    let quants = &block[48..176];

    for (pair, values) in values.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let quants = &quants[pair * 32..][..32];
        let low = groups.group(2 * pair);
        let high = groups.group(2 * pair + 1);
        for i in 0..32 {
            let bits = fifth[i] >> (2 * pair);
            let low_quant = quants[i] & 15 | (bits & 1) << 4;
            let high_quant = quants[i] >> 4 | (bits >> 1 & 1) << 4;
            values[i] = low.scale * f32::from(low_quant) - low.minimum;
            values[i + 32] = high.scale * f32::from(high_quant) - high.minimum;
        }
    }
}

/// 210 bytes: 128 bytes of lower four bits, 64 bytes of upper two, 16 scales of 8 bits, the scale.
pub(super) fn q6_k(block: &[u8; 210], values: &mut [f32; ELEMENTS]) {
    let scale = half_at(block, 208);
    let low = &block[..128];
    let high = &block[128..192];
    let groups = &block[192..208];

    for (group, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let group_scale = scale * f32::from(groups[group].cast_signed());
        // Each half of the block has 64 bytes of low bits, for two elements each, and 32 bytes of
        // high bits, for four.
        let half = group / 8;
        let inside = group % 8;
        let low = &low[half * 64 + inside % 4 * 16..][..16];
        let high = &high[half * 32 + inside % 2 * 16..][..16];
        let low_shift = inside / 4 * 4;
        let high_shift = inside / 2 * 2;
        for i in 0..16 {
            let quant = low[i] >> low_shift & 15 | (high[i] >> high_shift & 3) << 4;
            values[i] = group_scale * (f32::from(quant) - 32.0);
        }
    }
}

/// Returns the 2-bit elements of a group of 16. Each half of `quants` is 32 bytes with four
/// elements each, for eight groups.
fn two_bits(quants: &[u8], group: usize) -> [u8; 16] {
    let bytes = &quants[group / 8 * 32 + group % 2 * 16..][..16];
    let shift = group % 8 / 2 * 2;
    let mut elements = [0; 16];
    for i in 0..16 {
        elements[i] = bytes[i] >> shift & 3;
    }
    elements
}

/// Scales and minimums of the eight groups of Q4_K and Q5_K.
struct ScaledGroups<'a> {
    scale: f32,
    minimum: f32,
    /// 12 bytes. Groups 0 to 3: six bits of each scale, then of each minimum. Groups 4 to 7: the
    /// lower four bits of scale and minimum are in the last bytes, the upper two above those six
    /// bits.
    packed: &'a [u8],
}

/// Scale and minimum of a group of 32 elements.
struct GroupScale {
    scale: f32,
    minimum: f32,
}

impl<'a> ScaledGroups<'a> {
    /// Reads the first 16 bytes of a block.
    fn new(start: &'a [u8]) -> Self {
        Self {
            scale: half_at(start, 0),
            minimum: half_at(start, 2),
            packed: &start[4..16],
        }
    }

    fn group(&self, group: usize) -> GroupScale {
        let packed = self.packed;
        let (scale, minimum) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => (
                packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
                packed[group + 4] >> 4 | packed[group] >> 6 << 4,
            ),
        };
        GroupScale {
            scale: self.scale * f32::from(scale),
            minimum: self.minimum * f32::from(minimum),
        }
    }
}
