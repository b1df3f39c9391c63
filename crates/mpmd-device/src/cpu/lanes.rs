//! Sums, maxima and exponentials of slices, in forms that the compiler vectorises.
//!
//! The compiler may not reorder a plain loop's sum, so it stays scalar. The order here is explicit:
//! element `i` is added to partial result `i % 16`, and the 16 results are combined pairwise. The
//! result depends only on the values.

/// The number of partial results: enough for four independent chains of narrow vector registers.
const LANES: usize = 16;

/// Returns the sum of the elements, or zero if there are none.
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    sum_of(x, |x| x)
}

/// Returns the sum of `f(x)` over all elements.
#[inline(always)]
pub fn sum_of(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];

    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += f(*x);
        }
    }

    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += f(*x);
    }
    combine(lanes, |a, b| a + b)
}

/// Returns the dot product of two slices of the same length.
#[inline(always)]
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    sum_of_both(x, y, |x, y| x * y)
}

/// Returns the sum of `f(x, y)` over pairs of elements of two slices of the same length.
#[inline(always)]
pub fn sum_of_both(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    debug_assert_eq!(x.len(), y.len(), "elements of a sum");
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let (y_chunks, y_rest) = y.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];

    for (x, y) in x_chunks.iter().zip(y_chunks) {
        for (lane, (x, y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
            *lane += f(*x, *y);
        }
    }
    for (lane, (x, y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane += f(*x, *y);
    }

    combine(lanes, |a, b| a + b)
}

/// Returns the largest element, or minus infinity if there is none. It may ignore a NaN.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];

    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *x);
        }
    }

    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, *x);
    }

    combine(lanes, larger)
}

/// Returns e to the power `x`, with a relative error below 3e-7. A NaN stays a NaN.
///
/// Below -80 the result is zero, since slow subnormal numbers could follow from smaller results.
/// Above 80 the result is e to the power 80.
///
/// The code has no branches or calls. It computes `e^x = 2^n e^r` with an integer `n` and `|r|` of
/// at most half of ln 2. For such `r`, seven terms of the series are exact to the last bit or two.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
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

#[inline(always)]
fn combine(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut len = LANES;
    while len > 1 {
        len /= 2;
        for i in 0..len {
            lanes[i] = f(lanes[i], lanes[i + len]);
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_use_all_elements_of_any_length() {
        for len in 0..70 {
            // Integers: every order gives the same sum.
            let x: Vec<f32> = (0..len).map(|i| ((i * 37) % 23) as f32 - 11.0).collect();
            let y: Vec<f32> = (0..len).map(|i| ((i * 5) % 7) as f32).collect();
            assert_eq!(sum(&x), x.iter().sum::<f32>(), "{len}");
            assert_eq!(
                sum_of(&x, |x| x * x),
                x.iter().map(|x| x * x).sum::<f32>(),
                "{len}"
            );
            assert_eq!(
                dot(&x, &y),
                x.iter().zip(&y).map(|(x, y)| x * y).sum::<f32>(),
                "{len}"
            );
            let expected = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&x), expected, "{len}");
        }
    }

    #[test]
    fn exponentials_are_near_the_exact_values() {
        for i in -80_000..=80_000 {
            let x = i as f32 * 1e-3;
            let (fast, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(
                (fast / exact - 1.0).abs() < 3e-7,
                "e^{x} = {exact}, not {fast}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        for x in [-81.0, f32::NEG_INFINITY, f32::MIN] {
            assert_eq!(exp(x), 0.0, "{x}");
        }
        assert_eq!(exp(f32::INFINITY), exp(80.0));
        assert!(exp(f32::NAN).is_nan());
    }
}
