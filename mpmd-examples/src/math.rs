//! Numbers the example programs compute with: `f32` and `f64` behind one trait, matrix products, and
//! random values that depend on a seed and a counter alone.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use mpmd_core::backend::cpu::matmul::Scalar;
pub use mpmd_core::backend::cpu::matmul::{matmul, matmul_nt, matmul_tn};

/// A floating-point type the examples run in: `f32` or `f64`.
pub trait Real:
    Scalar
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
    /// The nearest value of this type.
    fn of(value: f64) -> Self;
    /// The same value in double precision.
    fn to_f64(self) -> f64;
    /// e to this power.
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
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
            fn exp(self) -> Self {
                $type::exp(self)
            }
            fn ln(self) -> Self {
                $type::ln(self)
            }
            fn tanh(self) -> Self {
                $type::tanh(self)
            }
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
        }
    };
}

real!(f32);
real!(f64);

/// 64 random bits for place `counter` of the stream `seed`.
///
/// A function of its arguments alone: every process draws the same value for the same place, in any
/// order and without having drawn the ones before it.
pub fn random_bits(seed: u64, counter: u64) -> u64 {
    // The odd constant walks the whole range, so places of one stream never share an input.
    scramble(scramble(seed).wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// A random value in `[-1, 1)` for place `counter` of the stream `seed`.
pub fn random_unit(seed: u64, counter: u64) -> f64 {
    // 53 bits are what a double holds exactly.
    (random_bits(seed, counter) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// The finishing step of splitmix64: a bijection in which every input bit reaches every output bit.
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
    fn streams_and_places_differ() {
        let mut seen: Vec<u64> =
            (0..50).flat_map(|seed| (0..50).map(move |i| random_bits(seed, i))).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 2500);
    }
}
