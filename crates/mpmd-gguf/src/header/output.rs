//! The bytes of a header.

use super::{MAGIC, VERSION};
use crate::tensor::TensorInfo;
use crate::values::{MetadataArray, MetadataValue};

/// Returns the header of a file with these values and tensors, without the padding at its end. The
/// tensors' values follow one after the other, each at the next multiple of `alignment`.
pub(crate) fn header_bytes(
    values: &[(String, MetadataValue)],
    tensors: &[TensorInfo],
    alignment: u64,
) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    header.extend_from_slice(&(values.len() as u64).to_le_bytes());
    for (key, value) in values {
        put_text(&mut header, key);
        put_value(&mut header, value);
    }

    let mut offset = 0;
    for tensor in tensors {
        put_tensor(&mut header, tensor, offset);
        offset += tensor.bytes().next_multiple_of(alignment);
    }
    header
}

fn put_tensor(header: &mut Vec<u8>, tensor: &TensorInfo, offset: u64) {
    put_text(header, tensor.name());
    header.extend_from_slice(&(tensor.shape().len() as u32).to_le_bytes());
    // The innermost dimension comes first in the file.
    for dimension in tensor.shape().iter().rev() {
        header.extend_from_slice(&(*dimension as u64).to_le_bytes());
    }
    header.extend_from_slice(&tensor.block_type().id().to_le_bytes());
    header.extend_from_slice(&offset.to_le_bytes());
}

fn put_text(header: &mut Vec<u8>, text: &str) {
    header.extend_from_slice(&(text.len() as u64).to_le_bytes());
    header.extend_from_slice(text.as_bytes());
}

/// Writes the number of the value's type, and the value.
fn put_value(header: &mut Vec<u8>, value: &MetadataValue) {
    header.extend_from_slice(&value.value_type().id().to_le_bytes());
    match value {
        MetadataValue::U8(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::I8(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::U16(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::I16(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::U32(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::I32(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::U64(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::I64(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::F32(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::F64(value) => header.extend_from_slice(&value.to_le_bytes()),
        MetadataValue::Bool(value) => header.push((*value).into()),
        MetadataValue::Text(text) => put_text(header, text),
        MetadataValue::Array(array) => put_array(header, array),
    }
}

/// Writes the number of the elements' type, the number of elements, and the elements.
fn put_array(header: &mut Vec<u8>, array: &MetadataArray) {
    header.extend_from_slice(&array.element_type().id().to_le_bytes());
    header.extend_from_slice(&(array.len() as u64).to_le_bytes());
    match array {
        MetadataArray::U8(values) => header.extend_from_slice(values),
        MetadataArray::I8(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::U16(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::I16(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::U32(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::I32(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::U64(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::I64(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::F32(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::F64(values) => put_numbers(header, values, |value| value.to_le_bytes()),
        MetadataArray::Bool(values) => put_numbers(header, values, |value| [value.into()]),
        MetadataArray::Text(texts) => texts.iter().for_each(|text| put_text(header, text)),
        MetadataArray::Array(arrays) => {
            arrays.iter().for_each(|array| put_array(header, array));
        }
    }
}

fn put_numbers<T: Copy, const N: usize>(
    header: &mut Vec<u8>,
    values: &[T],
    to_bytes: impl Fn(T) -> [u8; N],
) {
    for value in values {
        header.extend_from_slice(&to_bytes(*value));
    }
}
