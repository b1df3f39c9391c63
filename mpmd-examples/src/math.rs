//! Arithmetic of the example programs: `f32` and `f64` behind one trait, matrix products, and
//! random values that depend only on a seed and a counter.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use mpmd_core::device::cpu::matmul::Scalar;
pub use mpmd_core::device::cpu::matmul::{matmul, matmul_nt, matmul_tn};
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
    /// Returns e to this power.
    fn exp(self) -> Self;
    /// Returns e to this power, fast in loops: the code has no branches or calls, so the compiler
    /// vectorises it.
    ///
    /// For `f32` the relative error is below 3e-7. Below -80 the result is zero, so that products
    /// with tiny probabilities do not become subnormal, which is slow. Above 80 the result is that
    /// of 80. A NaN stays a NaN. For `f64` this is the same as [`exp`](Self::exp).
    fn exp_in_loop(self) -> Self;
    /// Returns the natural logarithm.
    fn ln(self) -> Self;
    /// Returns the square root.
    fn sqrt(self) -> Self;
}

macro_rules! real {
    ($type:ident, $exp_in_loop:expr) => {
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
            #[inline(always)]
            fn exp_in_loop(self) -> Self {
                $exp_in_loop(self)
            }
            fn ln(self) -> Self {
                $type::ln(self)
            }
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
        }
    };
}

real!(f32, exp_f32);
real!(f64, f64::exp);

/// Implements [`Real::exp_in_loop`] for single precision: `e^x = 2^n e^r` with an integer `n` and
/// `|r|` at most half of ln 2. There seven terms of the series are exact to the last bit or two.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LIMIT: f32 = 80.0;
    // Adding it to a small number rounds that number to an integer, which is left in the lowest
    // bits.
    const ROUND: f32 = (3u32 << 22) as f32;
    // ln 2 in two parts. The first has so few bits that its product with `n` is exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
    let capped = if x > LIMIT { LIMIT } else { x };
    let rounded = capped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = capped - n * LN_2_HIGH - n * LN_2_LOW;
    let mut series = 1.0 / 720.0;
    for factorial in [120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
        series = series * r + 1.0 / factorial;
    }
    // The shift removes all of `ROUND` and makes the integer the exponent.
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x < -LIMIT { 0.0 } else { series * power }
}

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
    fn exp_in_loop_is_near_the_exact_value() {
        for i in -800_000..=800_000 {
            let x = i as f32 * 1e-4;
            let (fast, exact) = (f64::from(x.exp_in_loop()), f64::from(x).exp());
            assert!((fast / exact - 1.0).abs() < 3e-7, "e^{x} = {exact}, not {fast}");
        }
        assert_eq!(0.0f32.exp_in_loop(), 1.0);
        for (x, expected) in [(-81.0, 0.0), (f32::NEG_INFINITY, 0.0), (f32::MIN, 0.0)] {
            assert_eq!(x.exp_in_loop(), expected, "{x}");
        }
        assert_eq!(f32::INFINITY.exp_in_loop(), 80.0f32.exp_in_loop());
        assert!(f32::NAN.exp_in_loop().is_nan());
        assert_eq!(Real::exp_in_loop(1.5f64), 1.5f64.exp());
    }

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
