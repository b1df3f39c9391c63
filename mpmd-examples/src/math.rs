//! Arithmetic of the example programs: `f32` and `f64` behind one trait, matrix products, and
//! random values that depend only on a seed and a counter.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use mpmd_device::cpu::matmul::Scalar;
pub use mpmd_device::cpu::matmul::{matmul, matmul_nt, matmul_tn};
use mpmd_train::optimizer::Float;

/// A floating-point type of the examples: `f32` or `f64`.
pub trait Real:
    Scalar
    + Float
    + Add<Output = Self>
    + AddAssign
    + Debug
    + Default
    + Display
    + Div<Output = Self>
    + Mul<Output = Self>
    + MulAssign
    + Neg<Output = Self>
    + PartialOrd
    + Sub<Output = Self>
    + SubAssign
    + Sum
{
    /// Converts to the nearest value of this type.
    fn of(value: f64) -> Self;
    /// Converts to double precision, without rounding.
    fn to_f64(self) -> f64;
}

macro_rules! real {
    ($type:ident) => {
        impl Real for $type {
            fn of(value: f64) -> Self {
                value as $type
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
        }
    };
}

real!(f32);
real!(f64);

/// Returns 64 random bits for position `counter` in the random stream of `seed`.
///
/// Depends only on its arguments: every process draws the same value for a position, in any order.
pub fn random_bits(seed: u64, counter: u64) -> u64 {
    // The constant is odd, so all places of a stream have different inputs.
    scramble(scramble(seed).wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// Returns a random value in `[-1, 1)` for position `counter` in the random stream of `seed`.
pub fn random_unit(seed: u64, counter: u64) -> f64 {
    // A double holds 53 bits exactly.
    (random_bits(seed, counter) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Applies the last step of splitmix64: a bijection in which every input bit affects every output
/// bit.
fn scramble(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_units_fill_their_range_evenly() {
        for seed in [0, 1, u64::MAX] {
            let values: Vec<f64> = (0..10_000).map(|i| random_unit(seed, i)).collect();
            assert!(values.iter().all(|v| (-1.0..1.0).contains(v)));
            let mean = values.iter().sum::<f64>() / 1e4;
            let variance = values.iter().map(|v| v * v).sum::<f64>() / 1e4;
            assert!(mean.abs() < 0.03, "{mean}");
            assert!((variance - 1.0 / 3.0).abs() < 0.02, "{variance}");
        }
    }

    #[test]
    fn random_bits_differ_by_stream_and_place() {
        let mut seen: Vec<u64> =
            (0..50).flat_map(|seed| (0..50).map(move |i| random_bits(seed, i))).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 2500);
    }
}
