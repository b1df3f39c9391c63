//! The metadata of a header.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Read;

use super::input::{HeaderError, HeaderInput};
use crate::error::GgufFlaw;
use crate::limits::{MAX_ARRAY_DEPTH, MAX_INNER_ARRAYS, MAX_KEY_BYTES};
use crate::value_type::ValueType;
use crate::values::{MetadataArray, MetadataValue, TextArray};

/// Bytes before the elements of an array: their type and number.
pub(super) const ARRAY_BYTES: u64 = 4 + 8;
/// Bytes before a text: its length.
pub(super) const LENGTH_BYTES: u64 = 8;
/// Bytes of the shortest key with its value.
pub(super) const LEAST_ENTRY_BYTES: u64 = LENGTH_BYTES + 1 + 4 + 1;

/// Reads `count` keys with their values.
pub(super) fn read_values<R: Read>(
    input: &mut HeaderInput<R>,
    count: u64,
) -> Result<BTreeMap<String, MetadataValue>, HeaderError> {
    let mut values = BTreeMap::new();
    let mut reader = ValueReader {
        input,
        key: String::new(),
        text: Vec::new(),
        inner_arrays: 0,
    };
    for index in 0..count {
        reader.read_key(index)?;
        let value = reader.read_value()?;
        match values.entry(reader.key.clone()) {
            Entry::Vacant(vacant) => _ = vacant.insert(value),
            Entry::Occupied(twice) => return Err(GgufFlaw::KeyTwice(twice.key().clone()).into()),
        }
    }
    Ok(values)
}

struct ValueReader<'a, R> {
    input: &'a mut HeaderInput<R>,
    /// The key whose value is read.
    key: String,
    /// Memory for the bytes of texts.
    text: Vec<u8>,
    /// Number of arrays inside others so far.
    inner_arrays: u64,
}

impl<R: Read> ValueReader<'_, R> {
    fn read_key(&mut self, index: u64) -> Result<(), HeaderError> {
        let place = format_args!("metadata key {index}");
        let key = self.input.text(&mut self.text, MAX_KEY_BYTES, &place)?;
        if key.is_empty() {
            return Err(GgufFlaw::EmptyKey.into());
        }
        key.clone_into(&mut self.key);
        Ok(())
    }

    fn read_value(&mut self) -> Result<MetadataValue, HeaderError> {
        let place = format_args!("metadata {:?}", self.key);
        let id = self.input.u32(&place)?;
        Ok(match self.value_type(id)? {
            ValueType::U8 => MetadataValue::U8(u8::from_le_bytes(self.input.fixed(&place)?)),
            ValueType::I8 => MetadataValue::I8(i8::from_le_bytes(self.input.fixed(&place)?)),
            ValueType::U16 => MetadataValue::U16(u16::from_le_bytes(self.input.fixed(&place)?)),
            ValueType::I16 => MetadataValue::I16(i16::from_le_bytes(self.input.fixed(&place)?)),
            ValueType::U32 => MetadataValue::U32(self.input.u32(&place)?),
            ValueType::I32 => MetadataValue::I32(i32::from_le_bytes(self.input.fixed(&place)?)),
            ValueType::F32 => MetadataValue::F32(f32::from_le_bytes(self.input.fixed(&place)?)),
            ValueType::Bool => {
                let [byte] = self.input.fixed(&place)?;
                MetadataValue::Bool(self.read_bool(byte)?)
            }
            ValueType::Text => {
                let text = self.input.text(&mut self.text, u64::MAX, &place)?;
                MetadataValue::Text(text.to_owned())
            }
            ValueType::Array => MetadataValue::Array(self.read_array(1)?),
            ValueType::U64 => MetadataValue::U64(self.input.u64(&place)?),
            ValueType::I64 => MetadataValue::I64(i64::from_le_bytes(self.input.fixed(&place)?)),
            ValueType::F64 => MetadataValue::F64(f64::from_le_bytes(self.input.fixed(&place)?)),
        })
    }

    /// Reads an array at a depth, which is 1 outside of other arrays.
    fn read_array(&mut self, depth: u32) -> Result<MetadataArray, HeaderError> {
        let place = format_args!("metadata {:?}", self.key);
        let id = self.input.u32(&place)?;
        let count = self.input.u64(&place)?;
        Ok(match self.value_type(id)? {
            ValueType::U8 => {
                MetadataArray::U8(self.input.numbers(count, u8::from_le_bytes, &place)?)
            }
            ValueType::I8 => {
                MetadataArray::I8(self.input.numbers(count, i8::from_le_bytes, &place)?)
            }
            ValueType::U16 => {
                MetadataArray::U16(self.input.numbers(count, u16::from_le_bytes, &place)?)
            }
            ValueType::I16 => {
                MetadataArray::I16(self.input.numbers(count, i16::from_le_bytes, &place)?)
            }
            ValueType::U32 => {
                MetadataArray::U32(self.input.numbers(count, u32::from_le_bytes, &place)?)
            }
            ValueType::I32 => {
                MetadataArray::I32(self.input.numbers(count, i32::from_le_bytes, &place)?)
            }
            ValueType::F32 => {
                MetadataArray::F32(self.input.numbers(count, f32::from_le_bytes, &place)?)
            }
            ValueType::Bool => {
                let bytes = self.input.numbers(count, u8::from_le_bytes, &place)?;
                let bools = bytes.into_iter().map(|byte| self.read_bool(byte));
                MetadataArray::Bool(bools.collect::<Result<_, _>>()?)
            }
            ValueType::Text => MetadataArray::Text(self.read_texts(count)?),
            ValueType::Array => MetadataArray::Array(self.read_inner_arrays(count, depth)?),
            ValueType::U64 => {
                MetadataArray::U64(self.input.numbers(count, u64::from_le_bytes, &place)?)
            }
            ValueType::I64 => {
                MetadataArray::I64(self.input.numbers(count, i64::from_le_bytes, &place)?)
            }
            ValueType::F64 => {
                MetadataArray::F64(self.input.numbers(count, f64::from_le_bytes, &place)?)
            }
        })
    }

    fn read_texts(&mut self, count: u64) -> Result<TextArray, HeaderError> {
        let place = format_args!("metadata {:?}", self.key);
        self.input.require(count, LENGTH_BYTES, &place)?;
        let mut texts = TextArray::with_capacity(count as usize);
        for index in 0..count {
            let place = format_args!("metadata {:?}[{index}]", self.key);
            texts.push(self.input.text(&mut self.text, u64::MAX, &place)?);
        }
        Ok(texts)
    }

    fn read_inner_arrays(
        &mut self,
        count: u64,
        depth: u32,
    ) -> Result<Vec<MetadataArray>, HeaderError> {
        if depth == MAX_ARRAY_DEPTH {
            return Err(GgufFlaw::ArrayDepth(self.key.clone()).into());
        }
        let place = format_args!("metadata {:?}", self.key);
        self.input.require(count, ARRAY_BYTES, &place)?;

        self.inner_arrays += count;
        if self.inner_arrays > MAX_INNER_ARRAYS {
            return Err(GgufFlaw::TooMany {
                what: format!("arrays inside arrays, up to metadata {:?}", self.key),
                found: self.inner_arrays,
                limit: MAX_INNER_ARRAYS,
            }
            .into());
        }
        (0..count).map(|_| self.read_array(depth + 1)).collect()
    }

    fn read_bool(&self, byte: u8) -> Result<bool, GgufFlaw> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(GgufFlaw::NotBool {
                key: self.key.clone(),
                found,
            }),
        }
    }

    fn value_type(&self, id: u32) -> Result<ValueType, GgufFlaw> {
        ValueType::of(id).ok_or_else(|| GgufFlaw::ValueType {
            key: self.key.clone(),
            id,
        })
    }
}
