//! The float types that optimisers compute with.

use std::ops::{Add, Div, Mul, Sub};

use mpmd_core::aval::Element;
use mpmd_core::cuda::Arg;

/// A floating-point type of parameters: `f32` or `f64`.
pub trait Float:
    Element
    + Add<Output = Self>
    + Default
    + Div<Output = Self>
    + Into<Arg<'static>>
    + Mul<Output = Self>
    + Sub<Output = Self>
{
    /// Converts `value` to the nearest value of this type.
    fn from_double(value: f64) -> Self;
    /// Converts this value to double precision, without rounding.
    fn double(self) -> f64;
    /// Returns the square root.
    fn root(self) -> Self;
}

macro_rules! float {
    ($type:ident) => {
        impl Float for $type {
            fn from_double(value: f64) -> Self {
                value as $type
            }
            fn double(self) -> f64 {
                f64::from(self)
            }
            fn root(self) -> Self {
                self.sqrt()
            }
        }
    };
}

float!(f32);
float!(f64);

/// Number of elements that are summed as one block, as by a thread block of a CUDA device.
pub(super) const BLOCK: usize = 4096;
/// Number of partial sums of a block.
pub(super) const LANES: usize = 256;

/// Returns the sum of the squares of an array's elements, in double precision. The order of
/// additions is fixed and the same as on CUDA devices: within blocks, then likewise over the
/// blocks' sums.
pub fn square_sum<T: Float>(array: &[T]) -> f64 {
    let mut sums = block_sums(array, |x| x.double() * x.double());
    while sums.len() > 1 {
        sums = block_sums(&sums, |sum| sum);
    }
    sums.first().copied().unwrap_or(0.0)
}

/// Sums `term` over each block: first per lane, then by a binary tree over the lanes.
fn block_sums<T: Copy>(array: &[T], term: impl Fn(T) -> f64) -> Vec<f64> {
    let sum = |block: &[T]| {
        let mut lanes = [0.0; LANES];
        for row in block.chunks(LANES) {
            lanes
                .iter_mut()
                .zip(row)
                .for_each(|(lane, x)| *lane += term(*x));
        }
        let mut half = LANES / 2;
        while half > 0 {
            let (low, high) = lanes.split_at_mut(half);
            low.iter_mut()
                .zip(high)
                .for_each(|(low, high)| *low += *high);
            half /= 2;
        }
        lanes[0]
    };
    array.chunks(BLOCK).map(sum).collect()
}

/// Returns (factor, norm) for the global norm of all gradients. The factor reduces the norm to
/// `limit`, and is 1 if the norm is not above `limit`. `square_sums` has the [`square_sum`] of each
/// gradient, in the order of the parameters.
///
/// If the norm is not finite, the factor is zero or NaN: the caller should check the norm.
pub fn clip_factor(square_sums: impl IntoIterator<Item = f64>, limit: f64) -> (f64, f64) {
    let norm = square_sums.into_iter().fold(0.0, |sum, x| sum + x).sqrt();
    (if norm <= limit { 1.0 } else { limit / norm }, norm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_scales_the_global_norm_to_the_limit() {
        let arrays = [vec![3.0f32, 0.0], vec![4.0]];
        let sums = || arrays.iter().map(|array| square_sum(array));
        assert_eq!(clip_factor(sums(), 2.5), (0.5, 5.0));
        assert_eq!(clip_factor(sums(), 5.0), (1.0, 5.0));
        assert_eq!(clip_factor(sums(), f64::INFINITY), (1.0, 5.0));
        assert_eq!(clip_factor([0.0], 1.0), (1.0, 0.0));
        assert!(clip_factor([f64::NAN], 1.0).0.is_nan());
    }
}
