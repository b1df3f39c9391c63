//! The writer, compared with a file of the format's own package, and getters of metadata.

use std::fs;

use mpmd_gguf::{
    BlockType, GgufFile, GgufFlaw, GgufWriter, Metadata, MetadataArray, MetadataValue, TextArray,
    WriteError,
};

use crate::golden::golden;

/// The metadata of `golden/metadata.gguf`, in its order.
fn example_values() -> Vec<(&'static str, MetadataValue)> {
    let long = "long ".repeat(20);
    let texts: TextArray = ["a", "", "ünï", &long].into_iter().collect();
    let arrays = [vec![1, 2], vec![3]].map(MetadataArray::I32).to_vec();
    vec![
        ("general.architecture", "example".into()),
        ("value.u8", 200u8.into()),
        ("value.i8", (-100i8).into()),
        ("value.u16", 60000u16.into()),
        ("value.i16", (-30000i16).into()),
        ("value.u32", 4_000_000_000u32.into()),
        ("value.i32", (-2_000_000_000i32).into()),
        ("value.f32", 0.1f32.into()),
        ("value.bool", true.into()),
        ("value.text", "Grüße, 世界".into()),
        ("value.u64", ((1u64 << 63) + 1).into()),
        ("value.i64", (-(1i64 << 62)).into()),
        ("value.f64", 0.1f64.into()),
        ("array.text", texts.into()),
        ("array.u16", vec![1u16, 2, 65535].into()),
        ("array.f32", vec![0.5f32, -1.5].into()),
        ("array.bool", vec![true, false].into()),
        ("array.arrays", MetadataArray::Array(arrays).into()),
        ("general.alignment", 64u32.into()),
    ]
}

/// Returns the values of a range of integers, divided.
fn quotients(range: std::ops::Range<i32>, divisor: f32) -> Vec<f32> {
    range.map(|index| index as f32 / divisor).collect()
}

fn encoded(block_type: BlockType, values: &[f32]) -> Vec<u8> {
    let mut blocks = vec![0; values.len() / block_type.elements() * block_type.bytes()];
    block_type.encode(values, &mut blocks).unwrap();
    blocks
}

#[test]
fn written_file_equals_the_package_to_the_byte() {
    let mut header = GgufWriter::new();
    for (key, value) in example_values() {
        header.set(key, value).unwrap();
    }

    header
        .declare("four", BlockType::F32, &[2, 3, 5, 7])
        .unwrap();
    header.declare("half", BlockType::F16, &[5, 7]).unwrap();
    header
        .declare("experts", BlockType::Q8_0, &[3, 4, 64])
        .unwrap();
    header.declare("one", BlockType::F32, &[9]).unwrap();

    let mut tensors = header.write(Vec::new()).unwrap();
    let four = encoded(BlockType::F32, &quotients(0..210, 1.0));
    // In pieces of any size.
    four.chunks(100)
        .for_each(|piece| tensors.write(piece).unwrap());
    tensors
        .write(&encoded(BlockType::F16, &quotients(0..35, 8.0)))
        .unwrap();
    tensors
        .write(&encoded(BlockType::Q8_0, &quotients(-300..468, 16.0)))
        .unwrap();
    tensors
        .write(&encoded(BlockType::F32, &quotients(0..9, 1.0)))
        .unwrap();
    let written = tensors.finish().unwrap();
    assert!(written == fs::read(golden("metadata.gguf")).unwrap());
}

#[test]
fn file_of_the_package_has_its_values() {
    let file = GgufFile::open(golden("metadata.gguf")).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.iter().len(), example_values().len());
    for (key, value) in example_values() {
        assert_eq!(metadata.get(key), Some(&value), "{key}");
    }

    let shapes = file.tensors().iter().map(|(name, tensor)| {
        assert_eq!(name, tensor.name());
        (name.as_str(), tensor.shape())
    });
    let expected: [(&str, &[usize]); 4] = [
        ("experts", &[3, 4, 64]),
        ("four", &[2, 3, 5, 7]),
        ("half", &[5, 7]),
        ("one", &[9]),
    ];
    assert_eq!(shapes.collect::<Vec<_>>(), expected);

    let mut values = [0.0; 6];
    file.read_rows("four", 28..30, 2..5, &mut values).unwrap();
    assert_eq!(values, [198.0, 199.0, 200.0, 205.0, 206.0, 207.0]);
    file.read_rows("one", 0..1, 3..9, &mut values).unwrap();
    assert_eq!(values, [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    // Expert 2's row 3. Its values are exact up to half a step of its scale.
    file.read_rows("experts", 11..12, 30..36, &mut values)
        .unwrap();
    for (found, expected) in values.iter().zip(quotients(434..440, 16.0)) {
        assert!(
            (found - expected).abs() < 29.2 / 127.0 * 0.51,
            "{found} {expected}"
        );
    }
}

#[test]
fn getters_convert_numbers() {
    let file = GgufFile::open(golden("metadata.gguf")).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.u64("value.u8").unwrap(), 200);
    assert_eq!(metadata.u64("value.u64").unwrap(), (1 << 63) + 1);
    assert_eq!(metadata.i64("value.i8").unwrap(), -100);
    assert_eq!(metadata.f64("value.f32").unwrap(), f64::from(0.1f32));
    assert_eq!(metadata.f64("value.f64").unwrap(), 0.1);
    assert_eq!(metadata.f64("value.i16").unwrap(), -30000.0);
    assert!(metadata.bool("value.bool").unwrap());
    assert_eq!(metadata.integers("array.u16").unwrap(), [1, 2, 65535]);
    assert_eq!(metadata.numbers("array.u16").unwrap(), [1.0, 2.0, 65535.0]);
    assert_eq!(metadata.numbers("array.f32").unwrap(), [0.5, -1.5]);
    assert_eq!(metadata.array("array.bool").unwrap().len(), 2);
    let texts = metadata.texts("array.text").unwrap();
    assert_eq!(
        (texts.len(), texts.get(2), texts.get(4)),
        (4, Some("ünï"), None)
    );

    let name = metadata.optional("value.text", Metadata::text).unwrap();
    assert_eq!(name, Some("Grüße, 世界"));
    assert_eq!(metadata.optional("none", Metadata::u64).unwrap(), None);
    metadata.optional("value.text", Metadata::u64).unwrap_err();
}

#[test]
fn getters_name_expected_and_found() {
    let path = golden("metadata.gguf");
    let file = GgufFile::open(&path).unwrap();
    let metadata = file.metadata();
    let messages = [
        (
            metadata.text("none").map(drop),
            "\"none\": expected a text, found no such key",
        ),
        (
            metadata.text("value.u8").map(drop),
            "\"value.u8\": expected a text, found u8",
        ),
        (
            metadata.u64("value.f32").map(drop),
            "\"value.f32\": expected an integer, found f32",
        ),
        (
            metadata.u64("value.i8").map(drop),
            "\"value.i8\": expected an integer of at least 0, found a negative one",
        ),
        (
            metadata.i64("value.u64").map(drop),
            "\"value.u64\": expected an integer below 2^63, found a larger one",
        ),
        (
            metadata.texts("array.f32").map(drop),
            "\"array.f32\": expected an array of text, found array of f32",
        ),
        (
            metadata.numbers("array.bool").map(drop),
            "\"array.bool\": expected an array of numbers, found array of bool",
        ),
    ];
    for (result, message) in messages {
        let expected = format!("{}: metadata {message}", path.display());
        assert_eq!(result.unwrap_err().to_string(), expected);
    }
}

#[test]
fn writer_refuses_unreadable_files() {
    let mut header = GgufWriter::new();
    assert_eq!(header.set("", 1u8), Err(GgufFlaw::EmptyKey));
    header.set("key", 1u8).unwrap();
    assert_eq!(
        header.set("key", 1u8),
        Err(GgufFlaw::KeyTwice("key".to_owned()))
    );
    let alignment = header.set("general.alignment", 24u32);
    assert_eq!(alignment, Err(GgufFlaw::Alignment("24".to_owned())));
    assert_eq!(
        header.declare("", BlockType::F32, &[1]),
        Err(GgufFlaw::EmptyName)
    );

    header.declare("t", BlockType::F32, &[2]).unwrap();
    let twice = header.declare("t", BlockType::F32, &[2]);
    assert_eq!(twice, Err(GgufFlaw::NameTwice("t".to_owned())));
    let partial = header.declare("q", BlockType::Q4_K, &[128]);
    assert!(matches!(partial, Err(GgufFlaw::PartialBlock { .. })));
    let dimensions = header.declare("d", BlockType::F32, &[1; 5]);
    assert!(matches!(dimensions, Err(GgufFlaw::TooMany { .. })));
}

#[test]
fn writer_counts_the_bytes_of_tensors() {
    let mut header = GgufWriter::new();
    header.declare("t", BlockType::F32, &[2]).unwrap();
    let mut tensors = header.clone().write(Vec::new()).unwrap();
    tensors.write(&[0; 5]).unwrap();
    let long = tensors.write(&[0; 4]);
    assert!(matches!(
        long,
        Err(WriteError::Length {
            found: 9,
            expected: 8,
            ..
        })
    ));

    let mut tensors = header.clone().write(Vec::new()).unwrap();
    tensors.write(&[0; 5]).unwrap();
    let short = tensors.finish();
    assert!(matches!(
        short,
        Err(WriteError::Length {
            found: 5,
            expected: 8,
            ..
        })
    ));
    let none = header.clone().write(Vec::new()).unwrap().finish();
    assert!(matches!(
        none,
        Err(WriteError::Length {
            found: 0,
            expected: 8,
            ..
        })
    ));

    let mut tensors = header.write(Vec::new()).unwrap();
    tensors.write(&[0; 8]).unwrap();
    assert!(matches!(
        tensors.write(&[0; 4]),
        Err(WriteError::NoTensorLeft(4))
    ));
}
