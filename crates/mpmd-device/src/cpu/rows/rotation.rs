//! The rotation of pairs, for rotary embeddings.

use crate::cpu::widest::widest;

widest!(
    /// Rotates the pairs of element `i` of the first and of the second half of `x` by the angles
    /// with the cosines `cos` and the sines `direction * sin`. Writes them to `out`, of the same
    /// length as `x`.
    ///
    /// # Panics
    ///
    /// If `x` or `out` has fewer elements than `cos`.
    pub fn rotate =
        rotate_row(x: &[f32], cos: &[f32], sin: &[f32], direction: f32, out: &mut [f32])
);

#[inline(always)]
fn rotate_row(x: &[f32], cos: &[f32], sin: &[f32], direction: f32, out: &mut [f32]) {
    let half = cos.len();
    let (out_a, out_b) = out.split_at_mut(half);
    let (a, b) = x.split_at(half);
    let pairs = out_a.iter_mut().zip(out_b).zip(a.iter().zip(b));
    for (((out_a, out_b), (a, b)), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
        let sin = direction * sin;
        *out_a = a * cos - b * sin;
        *out_b = a * sin + b * cos;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::rows::tests::{LENGTHS, bits, row};

    #[test]
    fn widths_give_the_same_bits() {
        for len in LENGTHS {
            let (x, cos, sin) = (row(2 * len, 1), row(len, 2), row(len, 3));
            let (mut a, mut b) = (row(2 * len, 0), row(2 * len, 0));
            rotate(&x, &cos, &sin, -1.0, &mut a);
            rotate_row(&x, &cos, &sin, -1.0, &mut b);
            assert_eq!(bits(&a), bits(&b), "{len}");
        }
    }
}
