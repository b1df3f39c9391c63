//! Functions of elements: arithmetic, comparisons, conversions and choices, with numpy's
//! broadcasting.

use mpmd_layout::aval::DType;

use super::block::{Block, Held, for_dtype, for_rows, unsupported};
use crate::api::compute::node::{Binary, Comparison, Scalar, Unary};
use crate::error::Result;

/// A number: whole ones wrap.
pub(super) trait Number: Held {
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn negated(self) -> Self;
    fn absolute(self) -> Self;
    fn of_scalar(scalar: Scalar) -> Self;

    fn is_nan(self) -> bool {
        false
    }

    fn larger(self, other: Self) -> Self {
        match self.is_nan() || self >= other {
            true => self,
            false => other,
        }
    }

    fn smaller(self, other: Self) -> Self {
        match self.is_nan() || self <= other {
            true => self,
            false => other,
        }
    }
}

macro_rules! whole_numbers {
    ($($type:ty: $absolute:expr;)*) => {$(
        impl Number for $type {
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn minus(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }

            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            fn negated(self) -> Self {
                self.wrapping_neg()
            }

            fn absolute(self) -> Self {
                let absolute: fn($type) -> $type = $absolute;
                absolute(self)
            }

            fn of_scalar(scalar: Scalar) -> Self {
                match scalar {
                    Scalar::Int(value) => value as $type,
                    Scalar::Float(value) => value as $type,
                    Scalar::Bool(value) => value.into(),
                }
            }
        }
    )*};
}

whole_numbers! {
    i32: |x| x.wrapping_abs();
    i64: |x| x.wrapping_abs();
    u8: |x| x;
    u32: |x| x;
}

macro_rules! floats {
    ($($type:ident)*) => {$(
        impl Number for $type {
            fn plus(self, other: Self) -> Self {
                self + other
            }

            fn minus(self, other: Self) -> Self {
                self - other
            }

            fn times(self, other: Self) -> Self {
                self * other
            }

            fn negated(self) -> Self {
                -self
            }

            fn absolute(self) -> Self {
                self.abs()
            }

            fn is_nan(self) -> bool {
                self.is_nan()
            }

            fn of_scalar(scalar: Scalar) -> Self {
                match scalar {
                    Scalar::Int(value) => value as $type,
                    Scalar::Float(value) => value as $type,
                    Scalar::Bool(value) => u8::from(value).into(),
                }
            }
        }

        impl FloatFunctions for $type {
            fn unary(f: Unary) -> Option<fn(Self) -> Self> {
                Some(match f {
                    Unary::Exp => $type::exp,
                    Unary::Log => $type::ln,
                    Unary::Sqrt => $type::sqrt,
                    Unary::Sin => $type::sin,
                    Unary::Cos => $type::cos,
                    Unary::Tanh => $type::tanh,
                    Unary::Sigmoid => |x| 1.0 / (1.0 + (-x).exp()),
                    Unary::Neg | Unary::Abs | Unary::Not => return None,
                })
            }

            fn quotient(self, other: Self) -> Self {
                self / other
            }

            fn power(self, exponent: Self) -> Self {
                self.powf(exponent)
            }
        }
    )*};
}

/// Functions of floats alone.
trait FloatFunctions: Number {
    fn unary(f: Unary) -> Option<fn(Self) -> Self>;
    fn quotient(self, other: Self) -> Self;
    fn power(self, exponent: Self) -> Self;
}

floats! { f32 f64 }

/// Calls a generic function for the type of a dtype of numbers.
macro_rules! for_number {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            mpmd_layout::aval::DType::I32 => {
                type $T = i32;
                $body
            }
            mpmd_layout::aval::DType::I64 => {
                type $T = i64;
                $body
            }
            mpmd_layout::aval::DType::U8 => {
                type $T = u8;
                $body
            }
            mpmd_layout::aval::DType::U32 => {
                type $T = u32;
                $body
            }
            mpmd_layout::aval::DType::F32 => {
                type $T = f32;
                $body
            }
            mpmd_layout::aval::DType::F64 => {
                type $T = f64;
                $body
            }
            other => Err($crate::api::compute::eval::block::unsupported(other)),
        }
    };
}
pub(super) use for_number;

/// Returns a block of this shape in which each element is `value`.
pub(super) fn filled(shape: &[usize], dtype: DType, value: Scalar) -> Result<Block<'static>> {
    let count = shape.iter().product();
    match (dtype, value) {
        (DType::Bool, Scalar::Bool(value)) => Ok(Block::new(shape, vec![value; count])),
        (dtype, value) => for_number!(dtype, T => {
            Ok(Block::new(shape, vec![T::of_scalar(value); count]))
        }),
    }
}

pub(super) fn unary(f: Unary, x: &Block<'_>) -> Result<Block<'static>> {
    let shape = &x.shape;
    match (f, x.dtype()) {
        (Unary::Not, _) => Ok(map(shape, x.list::<bool>()?, |x| !x)),
        (Unary::Neg, dtype) => for_number!(dtype, T => {
            Ok(map(shape, x.list::<T>()?, Number::negated))
        }),
        (Unary::Abs, dtype) => for_number!(dtype, T => {
            Ok(map(shape, x.list::<T>()?, Number::absolute))
        }),
        (f, DType::F64) => float_unary::<f64>(f, x),
        (f, _) => float_unary::<f32>(f, x),
    }
}

fn float_unary<T: FloatFunctions>(f: Unary, x: &Block<'_>) -> Result<Block<'static>> {
    let f = T::unary(f).ok_or_else(|| unsupported(T::DTYPE))?;
    Ok(map(&x.shape, x.list::<T>()?, f))
}

fn map<T: Held, R: Held>(shape: &[usize], x: &[T], f: impl Fn(T) -> R) -> Block<'static> {
    Block::new(shape, x.iter().map(|x| f(*x)).collect())
}

/// Converts elements as `as` does.
#[expect(clippy::unnecessary_cast, reason = "one of the types is the same")]
pub(super) fn cast(x: &Block<'_>, to: DType) -> Result<Block<'static>> {
    let shape = &x.shape;
    if x.dtype() == to {
        return for_dtype!(to, T => Ok(map(shape, x.list::<T>()?, |x| x)));
    }
    if let Ok(x) = x.list::<bool>() {
        return for_number!(to, T => Ok(map(shape, x, |x| T::of_scalar(Scalar::Int(x.into())))));
    }
    for_number!(x.dtype(), From => {
        let x = x.list::<From>()?;
        match to {
            DType::Bool => Ok(map(shape, x, |x| x != From::default())),
            DType::I32 => Ok(map(shape, x, |x| x as i32)),
            DType::I64 => Ok(map(shape, x, |x| x as i64)),
            DType::U8 => Ok(map(shape, x, |x| x as u8)),
            DType::U32 => Ok(map(shape, x, |x| x as u32)),
            DType::F32 => Ok(map(shape, x, |x| x as f32)),
            DType::F64 => Ok(map(shape, x, |x| x as f64)),
            other => Err(unsupported(other)),
        }
    })
}

pub(super) fn binary(
    f: Binary,
    shape: &[usize],
    a: &Block<'_>,
    b: &Block<'_>,
) -> Result<Block<'static>> {
    match (f, a.dtype()) {
        (Binary::And, _) => zip(shape, a, b, |a: bool, b: bool| a && b),
        (Binary::Or, _) => zip(shape, a, b, |a: bool, b: bool| a || b),
        (Binary::Div | Binary::Pow, DType::F64) => float_binary::<f64>(f, shape, a, b),
        (Binary::Div | Binary::Pow, _) => float_binary::<f32>(f, shape, a, b),
        (f, dtype) => for_number!(dtype, T => match f {
            Binary::Add => zip(shape, a, b, T::plus),
            Binary::Sub => zip(shape, a, b, T::minus),
            Binary::Mul => zip(shape, a, b, T::times),
            Binary::Maximum => zip(shape, a, b, T::larger),
            _ => zip(shape, a, b, T::smaller),
        }),
    }
}

fn float_binary<T: FloatFunctions>(
    f: Binary,
    shape: &[usize],
    a: &Block<'_>,
    b: &Block<'_>,
) -> Result<Block<'static>> {
    match f {
        Binary::Div => zip(shape, a, b, T::quotient),
        _ => zip(shape, a, b, T::power),
    }
}

pub(super) fn compare(
    f: Comparison,
    shape: &[usize],
    a: &Block<'_>,
    b: &Block<'_>,
) -> Result<Block<'static>> {
    if a.dtype() == DType::Bool {
        let [a, b] = [cast(a, DType::U8)?, cast(b, DType::U8)?];
        return compare(f, shape, &a, &b);
    }
    for_number!(a.dtype(), T => match f {
        Comparison::Equal => zip(shape, a, b, |a: T, b: T| a == b),
        Comparison::NotEqual => zip(shape, a, b, |a: T, b: T| a != b),
        Comparison::Less => zip(shape, a, b, |a: T, b: T| a < b),
        Comparison::LessEqual => zip(shape, a, b, |a: T, b: T| a <= b),
        Comparison::Greater => zip(shape, a, b, |a: T, b: T| a > b),
        Comparison::GreaterEqual => zip(shape, a, b, |a: T, b: T| a >= b),
    })
}

pub(super) fn select(
    shape: &[usize],
    condition: &Block<'_>,
    yes: &Block<'_>,
    no: &Block<'_>,
) -> Result<Block<'static>> {
    for_dtype!(yes.dtype(), T => {
        let [condition, yes, no] = [condition, yes, no].map(|block| broadcast(block, shape));
        let (condition, yes, no) = (condition?, yes?, no?);
        let chosen = condition.list::<bool>()?.iter().zip(yes.list::<T>()?).zip(no.list::<T>()?);
        let chosen = chosen.map(|((condition, yes), no)| if *condition { *yes } else { *no });
        Ok(Block::new(shape, chosen.collect()))
    })
}

/// Repeats the dimensions of size 1 of a block to this shape.
pub(super) fn broadcast(x: &Block<'_>, shape: &[usize]) -> Result<Block<'static>> {
    for_dtype!(x.dtype(), T => {
        let list = x.list::<T>()?;
        let mut all = Vec::with_capacity(shape.iter().product());
        for_rows(shape, |at| match row(x, list, shape, at) {
            Row::All(row) => all.extend_from_slice(row),
            Row::Repeated(value, len) => all.extend(std::iter::repeat_n(value, len)),
        });
        Ok(Block::new(shape, all))
    })
}

/// The elements of an operand for a row of the result.
enum Row<'a, T> {
    All(&'a [T]),
    /// One element for all of this many.
    Repeated(T, usize),
}

/// Returns the elements of an operand for the row of a result that begins at `at`.
fn row<'a, T: Held>(x: &Block<'_>, list: &'a [T], shape: &[usize], at: &[usize]) -> Row<'a, T> {
    let first = shape.len() - x.shape.len();
    let own = x.shape.iter().zip(&at[first..]);
    let offset = own.fold(0, |offset, (size, at)| {
        offset * size + if *size == 1 { 0 } else { *at }
    });
    let len = shape.last().copied().unwrap_or(1);
    match x.shape.last() {
        Some(own) if *own == len => Row::All(&list[offset..offset + len]),
        _ => Row::Repeated(list[offset], len),
    }
}

/// Computes `f` of the elements of two operands, which are broadcast to `shape`.
fn zip<T: Held, R: Held>(
    shape: &[usize],
    a: &Block<'_>,
    b: &Block<'_>,
    f: impl Fn(T, T) -> R,
) -> Result<Block<'static>> {
    let (x, y) = (a.list::<T>()?, b.list::<T>()?);
    let list = match (x, y) {
        (x, y) if a.shape == shape && b.shape == shape => {
            x.iter().zip(y).map(|(x, y)| f(*x, *y)).collect()
        }
        (x, [y]) if a.shape == shape => x.iter().map(|x| f(*x, *y)).collect(),
        ([x], y) if b.shape == shape => y.iter().map(|y| f(*x, *y)).collect(),
        (x, y) => {
            let mut list = Vec::with_capacity(shape.iter().product());
            for_rows(shape, |at| {
                match (row(a, x, shape, at), row(b, y, shape, at)) {
                    (Row::All(x), Row::All(y)) => {
                        list.extend(x.iter().zip(y).map(|(x, y)| f(*x, *y)))
                    }
                    (Row::All(x), Row::Repeated(y, _)) => list.extend(x.iter().map(|x| f(*x, y))),
                    (Row::Repeated(x, _), Row::All(y)) => list.extend(y.iter().map(|y| f(x, *y))),
                    (Row::Repeated(x, len), Row::Repeated(y, _)) => {
                        list.extend(std::iter::repeat_n(f(x, y), len));
                    }
                }
            });
            list
        }
    };
    Ok(Block::new(shape, list))
}
