//! Sums and maxima of slices, in a fixed order that fills the lanes of a vector register.
//!
//! Floating-point addition is not associative. The compiler may not reorder a plain loop's sum, so
//! it stays scalar. The order here is explicit: element `i` is added to partial result `i % 16`,
//! and the 16 results are combined pairwise. The result depends only on the values, not on the
//! machine.

use crate::math::Real;

/// Number of partial results. It is enough for four independent chains of the narrowest vector
/// registers.
const LANES: usize = 16;

/// Returns the sum of the elements, or zero if there are none.
pub(super) fn sum<T: Real>(x: &[T]) -> T {
    sum_of(x, |x| x)
}

/// Returns the sum of `f` of each element.
#[inline(always)]
pub(super) fn sum_of<T: Real>(x: &[T], f: impl Fn(T) -> T) -> T {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
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

/// Returns the sum of the products of corresponding elements.
///
/// # Panics
///
/// Panics if the lengths differ.
pub(super) fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    assert_eq!(x.len(), y.len(), "elements of a dot product");
    let ((x_chunks, x_rest), (y_chunks, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut lanes = [T::ZERO; LANES];
    for (x, y) in x_chunks.iter().zip(y_chunks) {
        for (lane, (x, y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
            *lane += *x * *y;
        }
    }
    for (lane, (x, y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane += *x * *y;
    }
    combine(lanes, |a, b| a + b)
}

/// Returns the largest element. It may ignore a NaN, which later shows in the exponentials.
///
/// # Panics
///
/// Panics if `x` is empty.
pub(super) fn max<T: Real>(x: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [x[0]; LANES];
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

#[inline(always)]
fn combine<T: Real>(mut lanes: [T; LANES], f: impl Fn(T, T) -> T) -> T {
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
        for len in 1..70 {
            // Integers: every order gives the same sum.
            let x: Vec<f32> = (0..len).map(|i| ((i * 37) % 23) as f32 - 11.0).collect();
            let y: Vec<f32> = (0..len).map(|i| ((i * 5) % 7) as f32).collect();
            assert_eq!(sum(&x), x.iter().sum::<f32>(), "{len}");
            assert_eq!(sum_of(&x, |x| x * x), x.iter().map(|x| x * x).sum::<f32>(), "{len}");
            assert_eq!(dot(&x, &y), x.iter().zip(&y).map(|(x, y)| x * y).sum::<f32>(), "{len}");
            assert_eq!(max(&x), x.iter().copied().fold(f32::MIN, f32::max), "{len}");
        }
        assert_eq!(sum::<f64>(&[]), 0.0);
    }
}
