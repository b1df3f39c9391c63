//! The float types that optimisers compute with.

use std::ops::{Add, Div, Mul, Sub};

use mpmd_core::aval::Element;

/// A floating-point type of parameters: `f32` or `f64`.
pub trait Float:
    Element
    + Add<Output = Self>
    + Default
    + Div<Output = Self>
    + Mul<Output = Self>
    + Sub<Output = Self>
{
    /// Converts to the nearest value of this type.
    fn from_double(value: f64) -> Self;
    /// Converts to double precision, without rounding.
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

/// Returns the sum of the squares of an array's elements, in doubles and in their order.
pub fn square_sum<T: Float>(array: &[T]) -> f64 {
    array.iter().fold(0.0, |sum, x| sum + x.double() * x.double())
}

/// Returns (factor, norm). The factor reduces the global norm of all gradients to at most `limit`,
/// and is 1 if the norm is not above it. `square_sums` are the [`square_sum`]s of the gradients, in
/// the order of the parameters.
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
