//! The header of one file: the bytes before the tensors' values.

mod input;
mod output;
mod tensors;
mod values;

use std::collections::BTreeMap;
use std::io::Read;

pub(crate) use self::input::HeaderError;
use self::input::HeaderInput;
pub(crate) use self::output::header_bytes;
use crate::error::GgufFlaw;
use crate::limits::{MAX_KEYS, MAX_TENSORS};
use crate::tensor::TensorInfo;
use crate::values::MetadataValue;

/// The first bytes of a file.
const MAGIC: [u8; 4] = *b"GGUF";
/// Key of the alignment of the tensors' values.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
/// Alignment in bytes of a file without that key.
pub(crate) const DEFAULT_ALIGNMENT: u32 = 32;
/// The version that is written. Version 2 has the same layout.
const VERSION: u32 = 3;

/// The header of a file.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) values: BTreeMap<String, MetadataValue>,
    pub(crate) tensors: BTreeMap<String, TensorInfo>,
}

impl Header {
    /// Reads the header of a file of `size` bytes from its start.
    pub(crate) fn read(input: impl Read, size: u64) -> Result<Self, HeaderError> {
        let mut input = HeaderInput::new(input, size);
        check_version(&mut input)?;
        let tensor_count = read_count(
            &mut input,
            "tensors",
            tensors::LEAST_ENTRY_BYTES,
            MAX_TENSORS,
        )?;
        let key_count = read_count(
            &mut input,
            "metadata keys",
            values::LEAST_ENTRY_BYTES,
            MAX_KEYS,
        )?;

        let values = values::read_values(&mut input, key_count)?;
        let alignment = alignment(&values)?;
        let tensors = tensors::read_tensors(&mut input, tensor_count)?;
        let start = input.position().next_multiple_of(alignment);
        let tensors = tensors::place_tensors(tensors, start, alignment, size)?;
        Ok(Self { values, tensors })
    }
}

fn check_version<R: Read>(input: &mut HeaderInput<R>) -> Result<(), HeaderError> {
    let magic: [u8; 4] = input.fixed(&"the start of the file")?;
    if magic != MAGIC {
        return Err(GgufFlaw::NotGguf(magic.to_vec()).into());
    }
    match input.u32(&"the version")? {
        2 | VERSION => Ok(()),
        swapped if swapped.swap_bytes() <= VERSION && swapped != 0 => {
            Err(GgufFlaw::BigEndian.into())
        }
        other => Err(GgufFlaw::Version(other).into()),
    }
}

/// Reads a number of entries, and checks that entries of `least_bytes` bytes fit into the file.
fn read_count<R: Read>(
    input: &mut HeaderInput<R>,
    what: &str,
    least_bytes: u64,
    limit: u64,
) -> Result<u64, HeaderError> {
    let count = input.u64(&format_args!("the number of {what}"))?;
    input.require(
        count,
        least_bytes,
        &format_args!("a list of {count} {what}"),
    )?;
    match count > limit {
        true => Err(GgufFlaw::TooMany {
            what: what.to_owned(),
            found: count,
            limit,
        }
        .into()),
        false => Ok(count),
    }
}

/// Returns the alignment of the tensors' values in bytes.
fn alignment(values: &BTreeMap<String, MetadataValue>) -> Result<u64, GgufFlaw> {
    let value = values.get(ALIGNMENT_KEY);
    let alignment = value.map_or(Ok(DEFAULT_ALIGNMENT), parse_alignment)?;
    Ok(alignment.into())
}

/// Returns the value of `general.alignment`. Refuses values that are no u32 or no power of two.
pub(crate) fn parse_alignment(value: &MetadataValue) -> Result<u32, GgufFlaw> {
    match value {
        MetadataValue::U32(alignment) if alignment.is_power_of_two() => Ok(*alignment),
        MetadataValue::U32(other) => Err(GgufFlaw::Alignment(other.to_string())),
        other => Err(GgufFlaw::Alignment(other.type_name().to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Headers with all types of values, and one without metadata.
    fn samples() -> Vec<Vec<u8>> {
        vec![
            include_bytes!("../../tests/golden/metadata.gguf").to_vec(),
            include_bytes!("../../tests/golden/split-00001-of-00003.gguf").to_vec(),
        ]
    }

    #[test]
    fn file_that_shrinks_meanwhile_is_cut() {
        let [whole, _] = <[Vec<u8>; 2]>::try_from(samples()).expect("two samples");
        for end in [0, 20, 200] {
            let read = Header::read(&whole[..end], whole.len() as u64);
            assert!(
                matches!(read, Err(HeaderError::Cut(wanted)) if wanted > end as u64),
                "{read:?}"
            );
        }
    }

    #[test]
    fn fuzz_gguf_headers() {
        mpmd_fuzz::bytes("gguf-headers", &samples(), |bytes| {
            let size = bytes.len() as u64;
            let Ok(header) = Header::read(bytes, size) else {
                return;
            };
            let mut tensors: Vec<&TensorInfo> = header.tensors.values().collect();
            tensors.sort_by_key(|tensor| tensor.offset);
            let mut end = 0;
            for tensor in tensors {
                let range = tensor.range();
                assert!(end <= range.start && range.end <= size, "{tensor:?}");
                let blocks = &bytes[range.start as usize..range.end as usize];
                let mut values = vec![0.0; tensor.elements()];
                assert_eq!(values.len(), tensor.rows() * tensor.columns());
                tensor.block_type().decode(blocks, &mut values);
                end = range.end;
            }

            // The metadata can be written, and are the same when they are read again.
            let values: Vec<_> = header.values.clone().into_iter().collect();
            let written = header_bytes(&values, &[], 1);
            let again = Header::read(&written[..], written.len() as u64).expect("it was valid");
            let again: Vec<_> = again.values.into_iter().collect();
            assert_eq!(header_bytes(&again, &[], 1), written);
        });
    }
}
