//! Conversions between the dtypes of real numbers, with the rules of Rust's `as`.

use half::{bf16, f16};

use mpmd_layout::aval::Element;

/// A number that holds the value of any real dtype.
pub(super) enum Wide {
    Signed(i64),
    Unsigned(u64),
    Float(f64),
}

/// An element type of real numbers or booleans.
pub(super) trait Real: Element {
    /// Converts without loss.
    fn wide(self) -> Wide;

    /// Converts as Rust's `as` does. A `bool` is true unless the number is zero.
    fn narrow(wide: Wide) -> Self;
}

macro_rules! real {
    ($($t:ident as $wide:ident),*) => {$(
        impl Real for $t {
            #[inline(always)]
            fn wide(self) -> Wide {
                Wide::$wide(self.into())
            }

            #[inline(always)]
            fn narrow(wide: Wide) -> Self {
                match wide {
                    Wide::Signed(number) => number as $t,
                    Wide::Unsigned(number) => number as $t,
                    Wide::Float(number) => number as $t,
                }
            }
        }
    )*};
}

real!(i8 as Signed, i16 as Signed, i32 as Signed, i64 as Signed);
real!(u8 as Unsigned, u16 as Unsigned, u32 as Unsigned, u64 as Unsigned);
real!(f32 as Float, f64 as Float);

macro_rules! half {
    ($($t:ident),*) => {$(
        impl Real for $t {
            #[inline(always)]
            fn wide(self) -> Wide {
                Wide::Float(self.into())
            }

            #[inline(always)]
            fn narrow(wide: Wide) -> Self {
                match wide {
                    Wide::Signed(number) => $t::from_f64(number as f64),
                    Wide::Unsigned(number) => $t::from_f64(number as f64),
                    Wide::Float(number) => $t::from_f64(number),
                }
            }
        }
    )*};
}

half!(f16, bf16);

impl Real for bool {
    #[inline(always)]
    fn wide(self) -> Wide {
        Wide::Unsigned(self.into())
    }

    #[inline(always)]
    fn narrow(wide: Wide) -> Self {
        match wide {
            Wide::Signed(number) => number != 0,
            Wide::Unsigned(number) => number != 0,
            Wide::Float(number) => number != 0.0,
        }
    }
}

/// Evaluates `$call` with `$t` as the type of elements of `$dtype`; for complex dtypes, `$other`
/// instead.
macro_rules! with_real {
    ($dtype:expr, $t:ident => $call:expr, $other:expr) => {
        match $dtype {
            DType::Bool => {
                type $t = bool;
                $call
            }
            DType::I8 => {
                type $t = i8;
                $call
            }
            DType::I16 => {
                type $t = i16;
                $call
            }
            DType::I32 => {
                type $t = i32;
                $call
            }
            DType::I64 => {
                type $t = i64;
                $call
            }
            DType::U8 => {
                type $t = u8;
                $call
            }
            DType::U16 => {
                type $t = u16;
                $call
            }
            DType::U32 => {
                type $t = u32;
                $call
            }
            DType::U64 => {
                type $t = u64;
                $call
            }
            DType::Bf16 => {
                type $t = half::bf16;
                $call
            }
            DType::F16 => {
                type $t = half::f16;
                $call
            }
            DType::F32 => {
                type $t = f32;
                $call
            }
            DType::F64 => {
                type $t = f64;
                $call
            }
            DType::C64 | DType::C128 | DType::Object => $other,
        }
    };
}
pub(super) use with_real;
