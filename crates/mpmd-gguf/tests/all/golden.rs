//! Blocks made by the format's own package: `golden/make_golden.py`.

use std::fs;
use std::path::PathBuf;

use mpmd_gguf::{BlockType, EncodeError};

/// Returns the path of a file in `golden/`.
pub(crate) fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

/// Blocks of a type and their values.
struct Vectors {
    blocks: Vec<u8>,
    values: Vec<f32>,
}

fn vectors(block_type: BlockType, suffix: &str) -> Vectors {
    let path = golden(&format!("{}.{suffix}", block_type.name()));
    let mut blocks = fs::read(path).unwrap();
    let count = blocks.len() / (block_type.bytes() + 4 * block_type.elements());
    let values = blocks.split_off(count * block_type.bytes());
    let values = values.as_chunks().0.iter().copied().map(f32::from_le_bytes);
    Vectors {
        blocks,
        values: values.collect(),
    }
}

#[test]
fn decoded_blocks_equal_the_package_to_the_bit() {
    for block_type in BlockType::ALL {
        let Vectors { blocks, values } = vectors(block_type, "decoded");
        assert!(values.len() >= 2048, "{block_type:?}");
        let mut decoded = vec![0.0; values.len()];
        block_type.decode(&blocks, &mut decoded);
        for (index, (found, expected)) in decoded.iter().zip(&values).enumerate() {
            let same = found.to_bits() == expected.to_bits();
            assert!(
                same || found.is_nan() && expected.is_nan(),
                "{block_type:?}, element {index}: {found:e} is not {expected:e}"
            );
        }
    }
}

#[test]
fn encoded_blocks_equal_the_package_to_the_bit() {
    let encoders = BlockType::ALL
        .into_iter()
        .filter(|known| known.has_encoder());
    for block_type in encoders {
        let Vectors { blocks, values } = vectors(block_type, "encoded");
        let mut encoded = vec![0; blocks.len()];
        block_type.encode(&values, &mut encoded).unwrap();
        let found = encoded.chunks(block_type.bytes());
        for (index, (found, expected)) in found.zip(blocks.chunks(block_type.bytes())).enumerate() {
            let values = &values[index * block_type.elements()..][..block_type.elements()];
            assert_eq!(
                found, expected,
                "{block_type:?}, block {index} of {values:?}"
            );
        }
    }
}

#[test]
fn values_out_of_range_are_refused() {
    for block_type in [BlockType::Q4_0, BlockType::Q8_0] {
        for value in [f32::NAN, f32::NEG_INFINITY, f32::MAX] {
            let mut values = [1.0; 32];
            values[31] = value;
            let refused = block_type.encode(&values, &mut vec![0; block_type.bytes()]);
            assert!(
                matches!(refused, Err(EncodeError::OutOfRange { value: said, .. })
                    if said.to_bits() == value.to_bits()),
                "{block_type:?}: {refused:?}"
            );
        }
    }
}

#[test]
fn values_too_small_for_a_scale_become_zero() {
    for block_type in [BlockType::Q4_0, BlockType::Q8_0] {
        let mut blocks = vec![0; block_type.bytes()];
        let values: Vec<f32> = (0..32).map(|index| index as f32 * -1e-41).collect();
        block_type.encode(&values, &mut blocks).unwrap();
        let mut decoded = [1.0; 32];
        block_type.decode(&blocks, &mut decoded);
        assert_eq!(decoded, [0.0; 32], "{block_type:?}");
    }
}

#[test]
fn types_without_encoder_say_so() {
    for block_type in BlockType::ALL {
        let mut blocks = vec![0; block_type.bytes()];
        let encoded = block_type.encode(&vec![0.0; block_type.elements()], &mut blocks);
        let expected = match block_type.has_encoder() {
            true => Ok(()),
            false => Err(EncodeError::NoEncoder(block_type)),
        };
        assert_eq!(encoded, expected);
    }
}
