//! Reductions: the functions that combine the values of several devices, element by element.

use std::fmt;

use half::{bf16, f16};
use num_complex::Complex;

use mpmd_layout::aval::{DType, Element};

/// The kind of a collective operation. Devices are identified by their index along the axis.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum CollectiveKind {
    /// Every device gets the element-wise reduction of all devices' values along the axis.
    AllReduce(Reduce),
    /// Every device gets the values of all devices, in the order of the devices.
    AllGather,
    /// Every device gets its own part of the reduction over the axis.
    ReduceScatter(Reduce),
    /// Every device gets one block of values from each device.
    AllToAll,
    /// Devices send their values to others: pairs (index of the sender, index of the receiver).
    Permute(Vec<(usize, usize)>),
}

/// The operation of a reducing collective, applied element by element.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Reduce {
    /// The sum, added in the order of the devices along the axis. Integer sums wrap.
    Sum,
    /// The largest value, or NaN if any value is NaN. Of 0 and -0, the one of the earlier device.
    Max,
    /// The smallest value, or NaN if any value is NaN. Of 0 and -0, the one of the earlier device.
    Min,
}

impl Reduce {
    /// Returns true if this operation is defined for elements of the dtype. `bool` has no
    /// reduction; complex numbers have only sums.
    pub fn is_defined_for(self, dtype: DType) -> bool {
        match dtype {
            DType::Bool | DType::Object => false,
            DType::C64 | DType::C128 => self == Self::Sum,
            _ => true,
        }
    }
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Min => "min",
        })
    }
}

/// An element type that collectives can reduce: integers, floats, and complex numbers (sums only).
pub trait Reducible: Element + sealed::Combine {}

mod sealed {
    /// The reductions of two values. `self` comes from the earlier device.
    ///
    /// The method names are chosen not to clash with methods of callers' traits.
    pub trait Combine: Sized {
        fn plus(self, other: Self) -> Self;
        fn larger(self, other: Self) -> Self;
        fn smaller(self, other: Self) -> Self;
    }
}

impl CollectiveKind {
    /// Returns the name of the kernel context's method for this kind.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Permute(_) => "permute",
        }
    }
}

/// Reduces each element of `others` into the element of `values` with the same index. `others` has
/// the values of a later device. Ignores surplus elements of the longer slice.
pub fn combine<T: Reducible>(reduce: Reduce, values: &mut [T], others: &[T]) {
    let pairs = values.iter_mut().zip(others);
    match reduce {
        Reduce::Sum => pairs.for_each(|(value, other)| *value = value.plus(*other)),
        Reduce::Max => pairs.for_each(|(value, other)| *value = value.larger(*other)),
        Reduce::Min => pairs.for_each(|(value, other)| *value = value.smaller(*other)),
    }
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Reducible for $t {}

        impl sealed::Combine for $t {
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn larger(self, other: Self) -> Self {
                Ord::max(self, other)
            }

            fn smaller(self, other: Self) -> Self {
                Ord::min(self, other)
            }
        }
    )*};
}

macro_rules! floats {
    ($($t:ty),*) => {$(
        impl Reducible for $t {}

        impl sealed::Combine for $t {
            fn plus(self, other: Self) -> Self {
                self + other
            }

            // Comparisons with NaN are false, so a NaN in `other` is returned.
            fn larger(self, other: Self) -> Self {
                if self.is_nan() || self >= other { self } else { other }
            }

            fn smaller(self, other: Self) -> Self {
                if self.is_nan() || self <= other { self } else { other }
            }
        }
    )*};
}

macro_rules! complex {
    ($($t:ty),*) => {$(
        impl Reducible for $t {}

        impl sealed::Combine for $t {
            fn plus(self, other: Self) -> Self {
                self + other
            }

            // Never called: such declarations are refused.
            fn larger(self, _: Self) -> Self {
                self
            }

            fn smaller(self, _: Self) -> Self {
                self
            }
        }
    )*};
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);
floats!(bf16, f16, f32, f64);
complex!(Complex<f32>, Complex<f64>);

#[cfg(test)]
mod tests {
    use super::*;

    fn of<T: Reducible>(reduce: Reduce, parts: &[T]) -> T {
        let mut values = [parts[0]];
        parts[1..]
            .iter()
            .for_each(|part| combine(reduce, &mut values, &[*part]));
        values[0]
    }

    #[test]
    fn integers_wrap_and_floats_propagate_nan() {
        assert_eq!(of(Reduce::Sum, &[250u8, 10]), 4);
        assert_eq!(of(Reduce::Max, &[-3i32, 2, 1]), 2);
        assert_eq!(of(Reduce::Min, &[-3i64, 2, -4]), -4);
        assert_eq!(
            of(Reduce::Sum, &[1.0f32, 1e8, -1e8]),
            0.0,
            "in the order of the devices"
        );
        for reduce in [Reduce::Sum, Reduce::Max, Reduce::Min] {
            for parts in [
                [f32::NAN, 1.0, 2.0],
                [1.0, f32::NAN, 2.0],
                [1.0, 2.0, f32::NAN],
            ] {
                assert!(of(reduce, &parts).is_nan(), "{reduce} of {parts:?}");
            }
        }
        assert!(of(Reduce::Max, &[-0.0f64, 0.0]).is_sign_negative());
        assert_eq!(
            of(Reduce::Max, &[bf16::from_f32(1.5), bf16::from_f32(-2.0)]),
            bf16::from_f32(1.5)
        );
        assert_eq!(
            of(
                Reduce::Sum,
                &[Complex::new(1.0f32, 2.0), Complex::new(3.0, 4.0)]
            ),
            Complex::new(4.0, 6.0)
        );
    }

    #[test]
    fn bool_and_complex_lack_unordered_reductions() {
        assert!(
            DType::ALL
                .iter()
                .filter(|dtype| Reduce::Sum.is_defined_for(**dtype))
                .count()
                == 14
        );
        assert!(
            !Reduce::Max.is_defined_for(DType::C64) && !Reduce::Min.is_defined_for(DType::C128)
        );
        assert!(Reduce::Max.is_defined_for(DType::Bf16));
    }
}
