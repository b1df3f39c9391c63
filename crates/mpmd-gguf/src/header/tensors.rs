//! The list of tensors in a header.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use super::input::{HeaderError, HeaderInput};
use super::values::LENGTH_BYTES;
use crate::block_type::{BlockType, unreadable_name};
use crate::error::GgufFlaw;
use crate::limits::{MAX_DIMENSIONS, MAX_NAME_BYTES};
use crate::tensor::{TensorInfo, check_name};

/// Bytes of the shortest entry: a name of one byte, no dimension, type and offset.
pub(super) const LEAST_ENTRY_BYTES: u64 = LENGTH_BYTES + 1 + 4 + 4 + 8;

/// Reads `count` entries. The offsets of the tensors are still those in the header: from the start
/// of the values.
pub(super) fn read_tensors<R: Read>(
    input: &mut HeaderInput<R>,
    count: u64,
) -> Result<Vec<TensorInfo>, HeaderError> {
    let mut names = BTreeSet::new();
    let mut tensors = Vec::new();
    let mut bytes = Vec::new();
    for index in 0..count {
        let place = format_args!("the name of tensor {index}");
        let name = input.text(&mut bytes, MAX_NAME_BYTES, &place)?;
        check_name(name)?;
        if !names.insert(name.to_owned()) {
            return Err(GgufFlaw::NameTwice(name.to_owned()).into());
        }
        tensors.push(read_tensor(input, name)?);
    }
    Ok(tensors)
}

fn read_tensor<R: Read>(input: &mut HeaderInput<R>, name: &str) -> Result<TensorInfo, HeaderError> {
    let place = format_args!("the entry of tensor {name:?}");
    let dimensions = input.u32(&place)?;
    if dimensions > MAX_DIMENSIONS {
        return Err(GgufFlaw::TooMany {
            what: format!("dimensions of tensor {name:?}"),
            found: dimensions.into(),
            limit: MAX_DIMENSIONS.into(),
        }
        .into());
    }
    // The innermost dimension comes first in the file.
    let mut shape = input.numbers(dimensions.into(), u64::from_le_bytes, &place)?;
    shape.reverse();

    let id = input.u32(&place)?;
    let block_type = BlockType::from_id(id).ok_or_else(|| {
        let name = name.to_owned();
        match unreadable_name(id) {
            Some(type_name) => GgufFlaw::UnreadableType { name, type_name },
            None => GgufFlaw::UnknownType { name, id },
        }
    })?;
    let offset = input.u64(&place)?;
    Ok(TensorInfo::new(name, block_type, &shape, offset)?)
}

/// Adds `start`, the offset of the values in the file, to the offsets of all tensors. Returns them
/// by name.
///
/// Refuses offsets that are no multiples of `alignment`, values beyond the `size` bytes of the
/// file, and values that overlap.
pub(super) fn place_tensors(
    mut tensors: Vec<TensorInfo>,
    start: u64,
    alignment: u64,
    size: u64,
) -> Result<BTreeMap<String, TensorInfo>, GgufFlaw> {
    for tensor in &mut tensors {
        if !tensor.offset.is_multiple_of(alignment) {
            return Err(GgufFlaw::Unaligned {
                name: tensor.name().to_owned(),
                offset: tensor.offset,
                alignment,
            });
        }

        let end = u128::from(start) + u128::from(tensor.offset) + u128::from(tensor.bytes());
        if end > size.into() {
            return Err(GgufFlaw::TensorBeyondEnd {
                name: tensor.name().to_owned(),
                end,
                bytes: size,
            });
        }
        tensor.offset += start;
    }

    tensors.sort_by_key(|tensor| tensor.offset);
    for pair in tensors.windows(2) {
        if pair[0].range().end > pair[1].offset {
            return Err(GgufFlaw::Overlap {
                first: pair[0].name().to_owned(),
                second: pair[1].name().to_owned(),
            });
        }
    }
    let named = tensors
        .into_iter()
        .map(|tensor| (tensor.name().to_owned(), tensor));
    Ok(named.collect())
}
