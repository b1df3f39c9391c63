//! Kernels on rows of matrices: what the layers of a model compute beside products. They work on
//! one thread, in `f32`, and give the same bits at each width of vectors.

pub mod activation;
pub mod attention;
pub mod norm;
pub mod rotation;
pub mod softmax;

use super::lanes;
use super::widest::widest;

widest!(
    /// Adds the elements of `row` to those of `sums`, up to the shorter length.
    pub fn add = add_elements(sums: &mut [f32], row: &[f32])
);

#[inline(always)]
fn add_elements(sums: &mut [f32], row: &[f32]) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum += *x;
    }
}

widest!(
    /// Returns the dot product of two slices of the same length.
    pub fn dot = lanes_dot(x: &[f32], y: &[f32]) -> f32
);

#[inline(always)]
fn lanes_dot(x: &[f32], y: &[f32]) -> f32 {
    lanes::dot(x, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths of rows below, at and above those of vectors and partial sums.
    pub(super) const LENGTHS: [usize; 8] = [1, 3, 8, 15, 16, 33, 64, 259];

    /// Returns a row of numbers between -3 and 3.
    pub(super) fn row(len: usize, seed: usize) -> Vec<f32> {
        let angle = |at: usize| (at * 7 + seed * 131) as f32 * 0.37;
        (0..len).map(|at| 3.0 * angle(at).sin()).collect()
    }

    /// Returns the bits of numbers, of which a NaN is equal to itself.
    pub(super) fn bits(row: &[f32]) -> Vec<u32> {
        row.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn widths_give_the_same_bits() {
        for len in LENGTHS {
            let (x, y) = (row(len, 1), row(len, 2));
            assert_eq!(dot(&x, &y).to_bits(), lanes_dot(&x, &y).to_bits(), "{len}");
            let (mut a, mut b) = (x.clone(), x);
            add(&mut a, &y);
            add_elements(&mut b, &y);
            assert_eq!(bits(&a), bits(&b), "{len}");
        }
    }
}
