//! Types of array elements.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use num_complex::Complex;
use serde::{Deserialize, Serialize};

use super::AvalError;
use crate::tree::Leaf;

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// Boolean: one byte, 0 or 1.
    Bool,
    /// Signed integer, 8 bits.
    I8,
    /// Signed integer, 16 bits.
    I16,
    /// Signed integer, 32 bits.
    I32,
    /// Signed integer, 64 bits.
    I64,
    /// Unsigned integer, 8 bits.
    U8,
    /// Unsigned integer, 16 bits.
    U16,
    /// Unsigned integer, 32 bits.
    U32,
    /// Unsigned integer, 64 bits.
    U64,
    /// bfloat16: the upper 16 bits of an `f32`.
    Bf16,
    /// IEEE half precision, 16 bits.
    F16,
    /// IEEE single precision, 32 bits.
    F32,
    /// IEEE double precision, 64 bits.
    F64,
    /// Complex number of two `f32`, 64 bits in all.
    C64,
    /// Complex number of two `f64`, 128 bits in all.
    C128,
    /// A Rust value of any type that stays on its device. It cannot be moved as bytes.
    Object,
}

impl DType {
    /// Every dtype except [`DType::Object`].
    pub const ALL: [Self; 15] = [
        Self::Bool,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::Bf16,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::C64,
        Self::C128,
    ];

    /// Returns the size of one element in bytes; 0 for objects.
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 | Self::Bf16 | Self::F16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 | Self::C64 => 8,
            Self::C128 => 16,
            Self::Object => 0,
        }
    }

    /// Returns the bytes of the number that changes no other number when it is added, down to the
    /// bits: `-0.0` of floating-point types, 0 of integers. A multiple of them fills an element.
    ///
    /// `0.0` would not do: `-0.0 + 0.0` is `0.0`.
    pub const fn sum_identity(self) -> &'static [u8] {
        match self {
            Self::Bf16 | Self::F16 => const { &0x8000u16.to_ne_bytes() },
            Self::F32 | Self::C64 => const { &(-0.0f32).to_ne_bytes() },
            Self::F64 | Self::C128 => const { &(-0.0f64).to_ne_bytes() },
            _ => &[0],
        }
    }

    /// Returns the short name, such as `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::C64 => "c64",
            Self::C128 => "c128",
            Self::Object => "object",
        }
    }

    /// Returns the name in numpy and JAX, such as `float32`.
    const fn long_name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::C64 => "complex64",
            Self::C128 => "complex128",
            Self::Object => "object",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Parses the short name or the name in numpy and JAX: `f32` or `float32`. Fails for any other
/// text.
impl FromStr for DType {
    type Err = AvalError;

    fn from_str(text: &str) -> Result<Self, AvalError> {
        let named = |dtype: &Self| dtype.name() == text || dtype.long_name() == text;
        let found = Self::ALL.into_iter().find(named);
        found.ok_or_else(|| AvalError::UnknownDType {
            found: text.to_owned(),
        })
    }
}

impl Leaf for DType {}

/// A Rust type that stands for the elements of arrays.
pub trait Element:
    bytemuck::NoUninit + bytemuck::CheckedBitPattern + fmt::Debug + PartialEq + Send + Sync
{
    /// The dtype of this type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($element:ty => $dtype:ident),*) => {$(
        impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    bool => Bool, i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u16 => U16, u32 => U32,
    u64 => U64, bf16 => Bf16, f16 => F16, f32 => F32, f64 => F64, Complex<f32> => C64,
    Complex<f64> => C128
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agrees<E: Element>() {
        assert_eq!(E::DTYPE.size(), size_of::<E>(), "{}", E::DTYPE);
        assert!(align_of::<E>() <= 64, "the alignment of all buffers");
    }

    fn keeps_bits<E: Element + std::ops::Add<Output = E> + Copy>(values: &[E]) {
        let identity = E::DTYPE.sum_identity();
        let bytes: Vec<u8> = identity
            .iter()
            .copied()
            .cycle()
            .take(size_of::<E>())
            .collect();
        let identity = bytemuck::checked::pod_read_unaligned::<E>(&bytes);
        for value in values {
            for sum in [*value + identity, identity + *value] {
                assert_eq!(bytemuck::bytes_of(&sum), bytemuck::bytes_of(value));
            }
        }
    }

    #[test]
    fn identity_of_sums_changes_no_bit() {
        keeps_bits(&[
            0.0f32,
            -0.0,
            1.5,
            -1.5,
            f32::MIN_POSITIVE / 2.0,
            f32::INFINITY,
        ]);
        keeps_bits(&[0.0f64, -0.0, 1.5, f64::NEG_INFINITY]);
        keeps_bits(&[bf16::ZERO, bf16::NEG_ZERO, bf16::ONE]);
        keeps_bits(&[f16::ZERO, f16::NEG_ZERO, f16::ONE]);
        keeps_bits(&[Complex::new(-0.0f32, 0.0), Complex::new(0.0, -0.0)]);
        keeps_bits(&[Complex::new(-0.0f64, 0.0), Complex::new(0.0, -0.0)]);
        keeps_bits(&[0u64, 7, u64::MAX]);
        keeps_bits(&[0i8, i8::MIN]);
    }

    #[test]
    fn sizes_are_those_of_the_rust_types() {
        agrees::<bool>();
        agrees::<i8>();
        agrees::<i16>();
        agrees::<i32>();
        agrees::<i64>();
        agrees::<u8>();
        agrees::<u16>();
        agrees::<u32>();
        agrees::<u64>();
        agrees::<bf16>();
        agrees::<f16>();
        agrees::<f32>();
        agrees::<f64>();
        agrees::<Complex<f32>>();
        agrees::<Complex<f64>>();
    }

    #[test]
    fn names_round_trip_also_through_serde() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(dtype.long_name().parse(), Ok(dtype));
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.name());
            assert_eq!(
                serde_json::from_value::<DType>(dtype.name().into()).unwrap(),
                dtype
            );
        }
        let error = "float".parse::<DType>().unwrap_err().to_string();
        assert!(
            error.contains("`float`") && error.contains("bf16"),
            "{error}"
        );
    }
}
