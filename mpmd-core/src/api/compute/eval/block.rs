//! The values of one device: a block of elements of one dtype, in row-major order.

use std::borrow::Cow;

use mpmd_layout::aval::{DType, Element};
use mpmd_layout::region::Region;

use crate::error::{Error, Result};
use crate::kernel::{View, ViewMut};

/// A block of values of one of the dtypes that functions compute with.
#[derive(Clone, Debug)]
pub(in crate::api::compute) struct Block<'a> {
    pub(super) shape: Vec<usize>,
    pub(super) values: Values<'a>,
}

/// The values of a block.
#[derive(Clone, Debug)]
pub(super) enum Values<'a> {
    Bool(Cow<'a, [bool]>),
    I32(Cow<'a, [i32]>),
    I64(Cow<'a, [i64]>),
    U8(Cow<'a, [u8]>),
    U32(Cow<'a, [u32]>),
    F32(Cow<'a, [f32]>),
    F64(Cow<'a, [f64]>),
}

/// A type of elements of blocks.
pub(super) trait Held: Element + Copy + PartialOrd + Default {
    /// Makes values of a list.
    fn values(list: Cow<'_, [Self]>) -> Values<'_>;

    /// Returns the elements. `None` if the values have another type.
    fn of<'b>(values: &'b Values<'_>) -> Option<&'b [Self]>;
}

macro_rules! held {
    ($($type:ty: $variant:ident)*) => {
        $(
            impl Held for $type {
                fn values(list: Cow<'_, [Self]>) -> Values<'_> {
                    Values::$variant(list)
                }

                fn of<'b>(values: &'b Values<'_>) -> Option<&'b [Self]> {
                    match values {
                        Values::$variant(list) => Some(list),
                        _ => None,
                    }
                }
            }
        )*

        /// Calls a generic function for the type of a dtype.
        macro_rules! for_dtype {
            ($dtype:expr, $T:ident => $body:expr) => {
                match $dtype {
                    $(<$type as mpmd_layout::aval::Element>::DTYPE => {
                        type $T = $type;
                        $body
                    })*
                    other => Err($crate::api::compute::eval::block::unsupported(other)),
                }
            };
        }
        pub(super) use for_dtype;
    };
}

held! { bool: Bool i32: I32 i64: I64 u8: U8 u32: U32 f32: F32 f64: F64 }

/// Returns the error for a dtype that no function has: the trace refuses it.
pub(super) fn unsupported(dtype: DType) -> Error {
    Error::kernel(format!("compute has no {dtype}"))
}

impl<'a> Block<'a> {
    /// Returns the values of an input.
    pub(in crate::api::compute) fn of_view(view: &View<'a>) -> Result<Self> {
        let shape = view.shape().to_vec();
        for_dtype!(view.global().dtype(), T => {
            let values = T::values(Cow::Borrowed(view.as_slice::<T>()?));
            Ok(Block { shape, values })
        })
    }

    /// Makes a block of a list with as many elements as the shape has.
    pub(super) fn new<T: Held>(shape: &[usize], list: Vec<T>) -> Block<'static> {
        Block {
            shape: shape.to_vec(),
            values: T::values(Cow::Owned(list)),
        }
    }

    /// Returns the elements.
    pub(super) fn list<T: Held>(&self) -> Result<&[T]> {
        T::of(&self.values).ok_or_else(|| unsupported(T::DTYPE))
    }

    /// Copies the values to an output.
    pub(in crate::api::compute) fn copy_to(&self, output: &mut ViewMut<'_>) -> Result<()> {
        for_dtype!(output.global().dtype(), T => {
            let list = self.list::<T>()?;
            let to = output.as_mut_slice::<T>()?;
            if to.len() != list.len() {
                return Err(Error::kernel("a result has other elements than its output"));
            }
            to.copy_from_slice(list);
            Ok(())
        })
    }

    /// Returns the part `part` of a block that has the region `own` of an array.
    pub(super) fn cut(&self, own: &Region, part: &Region) -> Result<Block<'static>> {
        let shape: Vec<usize> = part.ranges().map(|range| range.len()).collect();
        let starts: Vec<usize> = part
            .ranges()
            .zip(own.ranges())
            .map(|(part, own)| part.start - own.start)
            .collect();
        for_dtype!(self.dtype(), T => {
            let list = self.list::<T>()?;
            let mut cut = Vec::with_capacity(shape.iter().product());
            for_rows(&shape, |row| {
                let start = row.iter().zip(&starts).map(|(at, start)| at + start);
                let at = offset(&self.shape, start);
                let len = shape.last().copied().unwrap_or(1);
                cut.extend_from_slice(&list[at..at + len]);
            });
            Ok(Block::new(&shape, cut))
        })
    }

    /// Returns the dtype.
    pub(super) fn dtype(&self) -> DType {
        match self.values {
            Values::Bool(_) => DType::Bool,
            Values::I32(_) => DType::I32,
            Values::I64(_) => DType::I64,
            Values::U8(_) => DType::U8,
            Values::U32(_) => DType::U32,
            Values::F32(_) => DType::F32,
            Values::F64(_) => DType::F64,
        }
    }
}

/// Returns the index of an element in row-major order.
pub(super) fn offset(shape: &[usize], at: impl Iterator<Item = usize>) -> usize {
    shape
        .iter()
        .zip(at)
        .fold(0, |offset, (size, at)| offset * size + at)
}

/// Calls `f` with the index of the first element of each row of a shape: of each run of elements
/// along the last dimension, in order. A shape without dimensions has one row.
pub(super) fn for_rows(shape: &[usize], mut f: impl FnMut(&[usize])) {
    if shape.contains(&0) {
        return;
    }
    let mut at = vec![0; shape.len()];
    loop {
        f(&at);
        // The next row: the last dimension stays at 0.
        let mut dim = shape.len().saturating_sub(1);
        loop {
            if dim == 0 {
                return;
            }
            dim -= 1;
            at[dim] += 1;
            if at[dim] < shape[dim] {
                break;
            }
            at[dim] = 0;
        }
    }
}
