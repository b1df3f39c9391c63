//! Values of metadata: numbers, texts and arrays.

use crate::value_type::ValueType;

/// A value of metadata, of one of the format's 13 types.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the variants are named after their types")]
pub enum MetadataValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(String),
    Array(MetadataArray),
}

/// An array in metadata. All its elements have one type.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(
    missing_docs,
    reason = "the variants are named after their elements' types"
)]
pub enum MetadataArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Text(TextArray),
    Array(Vec<MetadataArray>),
}

/// The texts of an array, such as a vocabulary. They lie in one allocation.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct TextArray {
    text: String,
    /// End of each text in `text`, in bytes.
    ends: Vec<usize>,
}

impl TextArray {
    /// Creates an empty array with room for `texts` texts.
    pub(crate) fn with_capacity(texts: usize) -> Self {
        Self {
            text: String::new(),
            ends: Vec::with_capacity(texts),
        }
    }

    /// Appends a text.
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    /// Returns the number of texts.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns true if the array has no text.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the text at `index`, or `None` beyond the last.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1],
        };
        Some(&self.text[start..end])
    }

    /// Iterates over the texts.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}

impl<T: AsRef<str>> FromIterator<T> for TextArray {
    fn from_iter<I: IntoIterator<Item = T>>(texts: I) -> Self {
        let mut array = Self::default();
        texts.into_iter().for_each(|text| array.push(text.as_ref()));
        array
    }
}

impl MetadataValue {
    /// Returns the name of the value's type, such as `"u32"` or `"array of text"`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Array(array) => array.type_name(),
            other => other.value_type().name(),
        }
    }

    pub(crate) fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F32(_) => ValueType::F32,
            Self::F64(_) => ValueType::F64,
            Self::Bool(_) => ValueType::Bool,
            Self::Text(_) => ValueType::Text,
            Self::Array(_) => ValueType::Array,
        }
    }

    /// Returns an integer of any type as i128; `None` for other values.
    pub(crate) fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(value) => value.into(),
            Self::I8(value) => value.into(),
            Self::U16(value) => value.into(),
            Self::I16(value) => value.into(),
            Self::U32(value) => value.into(),
            Self::I32(value) => value.into(),
            Self::U64(value) => value.into(),
            Self::I64(value) => value.into(),
            _ => return None,
        })
    }
}

impl MetadataArray {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(values) => values.len(),
            Self::I8(values) => values.len(),
            Self::U16(values) => values.len(),
            Self::I16(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::U64(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::Bool(values) => values.len(),
            Self::Text(values) => values.len(),
            Self::Array(values) => values.len(),
        }
    }

    /// Returns true if the array has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the name of the array's type, such as `"array of f32"`.
    pub fn type_name(&self) -> &'static str {
        self.element_type().array_name()
    }

    pub(crate) fn element_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F32(_) => ValueType::F32,
            Self::F64(_) => ValueType::F64,
            Self::Bool(_) => ValueType::Bool,
            Self::Text(_) => ValueType::Text,
            Self::Array(_) => ValueType::Array,
        }
    }

    /// Returns integers of any type as i128; `None` for other elements.
    pub(crate) fn integers(&self) -> Option<Vec<i128>> {
        Some(match self {
            Self::U8(values) => widened(values),
            Self::I8(values) => widened(values),
            Self::U16(values) => widened(values),
            Self::I16(values) => widened(values),
            Self::U32(values) => widened(values),
            Self::I32(values) => widened(values),
            Self::U64(values) => widened(values),
            Self::I64(values) => widened(values),
            _ => return None,
        })
    }
}

fn widened<T: Copy + Into<i128>>(values: &[T]) -> Vec<i128> {
    values.iter().map(|value| (*value).into()).collect()
}

/// Implements `From` for a type of numbers, its arrays, and their variants.
macro_rules! value_from {
    ($($variant:ident: $type:ty),*) => {$(
        impl From<$type> for MetadataValue {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }

        impl From<Vec<$type>> for MetadataValue {
            fn from(values: Vec<$type>) -> Self {
                Self::Array(MetadataArray::$variant(values))
            }
        }
    )*};
}

value_from!(
    U8: u8, I8: i8, U16: u16, I16: i16, U32: u32, I32: i32, U64: u64, I64: i64, F32: f32, F64: f64,
    Bool: bool
);

impl From<&str> for MetadataValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<TextArray> for MetadataValue {
    fn from(texts: TextArray) -> Self {
        Self::Array(MetadataArray::Text(texts))
    }
}

impl From<MetadataArray> for MetadataValue {
    fn from(array: MetadataArray) -> Self {
        Self::Array(array)
    }
}
