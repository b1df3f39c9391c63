//! Numbers the example programs compute with: `f32` and `f64` behind one trait, matrix products,
//! and random values that depend on a seed and a counter alone.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use mpmd::device::cpu::matmul::Scalar;
pub use mpmd::device::cpu::matmul::{matmul, matmul_nt, matmul_tn};

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
    /// e to this power, fast in loops: code without branches or calls, which the compiler
    /// vectorises.
    ///
    /// For `f32` within 3e-7 of the value, relative to it. Below -80 it is zero, so that no product
    /// with a vanishing probability falls into the slow subnormal range; above 80 it is that of 80.
    /// A NaN stays one. For `f64` the same as [`exp`](Self::exp).
    fn exp_in_loop(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;
    /// The square root.
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
            fn tanh(self) -> Self {
                $type::tanh(self)
            }
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
        }
    };
}

real!(f32, exp_f32);
real!(f64, f64::exp);

/// [`Real::exp_in_loop`] for single precision: `e^x = 2^n e^r` with whole `n` and `r` within half
/// of ln 2, where seven terms of the series are exact to the last bit or two.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LIMIT: f32 = 80.0;
    // Added to a small number, it leaves that number's nearest whole one in the lowest bits.
    const ROUND: f32 = (3u32 << 22) as f32;
    // ln 2 in two parts, the first of so few bits that its product with `n` is exact.
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
    // The shift drops all of `ROUND` and makes the whole number an exponent.
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x < -LIMIT { 0.0 } else { series * power }
}

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
    fn the_exponential_for_loops_is_near_the_exact_one() {
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
    fn streams_and_places_differ() {
        let mut seen: Vec<u64> =
            (0..50).flat_map(|seed| (0..50).map(move |i| random_bits(seed, i))).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 2500);
    }
}
