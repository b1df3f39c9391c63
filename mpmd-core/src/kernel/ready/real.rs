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

/// Evaluates `$call` with `$t` as the type of elements of `$dtype`; for complex dtypes and objects,
/// `$other` instead.
macro_rules! with_real {
    ($dtype:expr, $t:ident => $call:expr, $other:expr) => {
        with_real! {
            @ $dtype, $t => $call, $other;
            Bool bool, I8 i8, I16 i16, I32 i32, I64 i64, U8 u8, U16 u16, U32 u32, U64 u64,
            Bf16 half::bf16, F16 half::f16, F32 f32, F64 f64
        }
    };
    (@ $dtype:expr, $t:ident => $call:expr, $other:expr; $($name:ident $element:ty),+) => {
        match $dtype {
            $(DType::$name => {
                type $t = $element;
                $call
            })+
            DType::C64 | DType::C128 | DType::Object => $other,
        }
    };
}
pub(super) use with_real;
