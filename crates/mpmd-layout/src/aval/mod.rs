//! Abstract values: the shape and [`DType`] of an array without its contents. Also arrays of host
//! values.

mod dtype;

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

pub use dtype::{DType, Element};

use crate::tree::Leaf;

/// Shape and dtype of an array. Clones share the shape.
///
/// A scalar has shape `[]` and one element. Dimensions of size 0 are allowed.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct ShapedArray {
    shape: Arc<[usize]>,
    dtype: DType,
}

/// The reason why values do not match a shape or dtype. Always the caller's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AvalError {
    /// The shape takes more bytes than a process can address.
    #[error("{dtype}{shape:?} has more bytes than can be addressed")]
    TooLarge {
        /// The requested shape.
        shape: Vec<usize>,
        /// The requested dtype.
        dtype: DType,
    },
    /// There are more or fewer values than the shape has elements.
    #[error("{at}: shape {:?} has {} elements, but {found} values are \
        given", expected.shape(), expected.elements())]
    Elements {
        /// The line of the program that passes the values.
        at: &'static Location<'static>,
        /// Expected shape and dtype of the values.
        expected: ShapedArray,
        /// Number of values given.
        found: usize,
    },
    /// The number of bytes given differs from the array's size in bytes.
    #[error("{at}: {expected} has {} bytes, but {found} are given", expected.bytes())]
    Length {
        /// The line of the program that passes the bytes.
        at: &'static Location<'static>,
        /// Expected shape and dtype.
        expected: ShapedArray,
        /// Number of bytes given.
        found: usize,
    },
    /// The elements were read or given as another type than the array's.
    #[error("{at}: the elements are {expected}, and are read as {found}: read them as {expected}")]
    DType {
        /// The line of the program that reads the elements.
        at: &'static Location<'static>,
        /// The dtype of the array.
        expected: DType,
        /// The dtype with which the elements are read or given.
        found: DType,
    },
    /// Some bytes are not valid values of the dtype (a bool that is neither 0 nor 1).
    #[error("{at}: the bytes of {aval} are not all values of {}", aval.dtype())]
    BitPattern {
        /// The line of the program that reads the elements.
        at: &'static Location<'static>,
        /// Shape and dtype that the bytes should have.
        aval: ShapedArray,
    },
    /// The text is not the name of a dtype.
    #[error("unknown dtype `{found}`; known are {}", DType::ALL.map(DType::name).join(", "))]
    UnknownDType {
        /// The text that is not a name.
        found: String,
    },
}

impl ShapedArray {
    /// Creates the description of an array of `shape` and `dtype`.
    ///
    /// # Panics
    ///
    /// If [`try_new`](Self::try_new) fails.
    #[track_caller]
    pub fn new(shape: &[usize], dtype: DType) -> Self {
        Self::try_new(shape, dtype).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Creates the description of an array of `shape` and `dtype`.
    ///
    /// # Errors
    ///
    /// If the size in bytes, with dimensions of size 0 counted as 1, exceeds `isize::MAX`. This
    /// also rules out that a stride overflows.
    pub fn try_new(shape: &[usize], dtype: DType) -> Result<Self, AvalError> {
        let bytes = shape
            .iter()
            .try_fold(dtype.size(), |bytes, dim| bytes.checked_mul((*dim).max(1)));

        match bytes {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(Self {
                shape: shape.into(),
                dtype,
            }),
            _ => Err(AvalError::TooLarge {
                shape: shape.to_vec(),
                dtype,
            }),
        }
    }

    /// Creates the description of an array of [`DType::Object`]: a scalar, with one object on each
    /// device.
    pub fn object() -> Self {
        Self {
            shape: [].into(),
            dtype: DType::Object,
        }
    }

    /// Returns the size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// True if the elements are Rust objects ([`DType::Object`]) instead of numbers.
    pub fn is_object(&self) -> bool {
        self.dtype == DType::Object
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of dimensions; 0 for a scalar.
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Returns the number of elements; 1 for a scalar.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the size of the whole array in bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

impl fmt::Display for ShapedArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, dim) in self.shape.iter().enumerate() {
            let separator = if i == 0 { "" } else { "," };
            write!(f, "{separator}{dim}")?;
        }
        f.write_str("]")
    }
}

impl Leaf for ShapedArray {}

macro_rules! shorthands {
    ($($name:ident $dtype:ident $text:literal),*) => {$(
        #[doc = concat!("Returns a [`ShapedArray`] of `", $text, "` with these dimensions: \
            `", stringify!($name), "([64, 256])`.")]
        ///
        /// # Panics
        ///
        /// If [`ShapedArray::try_new`] fails.
        #[track_caller]
        pub fn $name(shape: impl AsRef<[usize]>) -> ShapedArray {
            ShapedArray::new(shape.as_ref(), DType::$dtype)
        }
    )*};
}

shorthands! {
    bools Bool "bool", i8s I8 "i8", i16s I16 "i16", i32s I32 "i32", i64s I64 "i64",
    u8s U8 "u8", u16s U16 "u16", u32s U32 "u32", u64s U64 "u64",
    bf16s Bf16 "bf16", f16s F16 "f16", f32s F32 "f32", f64s F64 "f64",
    c64s C64 "c64", c128s C128 "c128"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_have_one_element_and_empty_dimensions_none() {
        assert_eq!(
            (f32s([]).elements(), f32s([]).bytes(), f32s([]).ndim()),
            (1, 4, 0)
        );
        assert_eq!(
            (c128s([3, 0, 4]).elements(), c128s([3, 0, 4]).bytes()),
            (0, 0)
        );
        assert_eq!(bf16s([64, 256]).bytes(), 64 * 256 * 2);
    }

    #[test]
    fn display_is_dtype_and_shape() {
        assert_eq!(f32s([64, 256]).to_string(), "f32[64,256]");
        assert_eq!(bools(vec![]).to_string(), "bool[]");
    }

    #[test]
    fn too_large_shapes_are_refused_even_if_empty() {
        let half = isize::MAX as usize / 2;
        assert!(ShapedArray::try_new(&[half], DType::U8).is_ok());
        assert!(ShapedArray::try_new(&[half], DType::F32).is_err());
        assert!(ShapedArray::try_new(&[half, half, 0], DType::U8).is_err());
        assert!(matches!(
            ShapedArray::try_new(&[usize::MAX, 2], DType::U8),
            Err(AvalError::TooLarge {
                dtype: DType::U8,
                ..
            })
        ));
    }

    #[test]
    #[should_panic(expected = "more bytes than can be addressed")]
    fn new_panics_where_try_new_fails() {
        let _ = f64s([usize::MAX]);
    }
}
