//! Reads of regions, compared with decoding whole tensors.

use std::fs::{self, File};
use std::ops::Range;
use std::path::PathBuf;

use fastrand::Rng;
use mpmd_gguf::{BlockType, GgufError, GgufFile, GgufWriter};
use tempfile::TempDir;

/// Shape of the tensors: rows over the first two dimensions, each of several blocks.
const SHAPE: [usize; 3] = [3, 5, 768];
const ROWS: usize = SHAPE[0] * SHAPE[1];

/// An open file with a tensor of each type, named after it, of random blocks.
struct AllTypes {
    file: GgufFile,
    path: PathBuf,
    /// Removes the file at the end.
    _folder: TempDir,
}

impl AllTypes {
    fn new(seed: u64) -> Self {
        let rng = &mut Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all.gguf");
        let mut header = GgufWriter::new();
        for block_type in BlockType::ALL {
            header
                .declare(block_type.name(), block_type, &SHAPE)
                .unwrap();
        }

        let mut tensors = header.write(File::create(&path).unwrap()).unwrap();
        for block_type in BlockType::ALL {
            let blocks = SHAPE.iter().product::<usize>() / block_type.elements();
            let bytes = std::iter::repeat_with(|| rng.u8(..)).take(blocks * block_type.bytes());
            tensors.write(&bytes.collect::<Vec<u8>>()).unwrap();
        }
        tensors.finish().unwrap();
        Self {
            file: GgufFile::open(&path).unwrap(),
            path,
            _folder: folder,
        }
    }
}

/// Decodes a whole tensor from its bytes in the file.
fn decode_whole(file: &GgufFile, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    let place = file.tensor_bytes(name).unwrap();
    let bytes = fs::read(place.path).unwrap();
    let mut values = vec![0.0; tensor.elements()];
    let range = place.range.start as usize..place.range.end as usize;
    tensor.block_type().decode(&bytes[range], &mut values);
    values
}

fn random_range(rng: &mut Rng, length: usize) -> Range<usize> {
    let start = rng.usize(..=length);
    start..rng.usize(start..=length)
}

#[test]
fn regions_equal_parts_of_the_whole_tensor() {
    let AllTypes { file, .. } = &AllTypes::new(1);
    let rng = &mut Rng::with_seed(11);
    for block_type in BlockType::ALL {
        let name = block_type.name();
        let tensor = file.tensor(name).unwrap();
        assert_eq!((tensor.rows(), tensor.columns()), (ROWS, SHAPE[2]));
        let whole = decode_whole(file, name);

        let mut regions = vec![(0..ROWS, 0..SHAPE[2]), (14..15, 767..768), (0..0, 0..1)];
        regions.extend((0..200).map(|_| (random_range(rng, ROWS), random_range(rng, SHAPE[2]))));
        for (rows, columns) in regions {
            let mut values = vec![f32::NAN; rows.len() * columns.len()];
            file.read_rows(name, rows.clone(), columns.clone(), &mut values)
                .unwrap();
            let expected = rows
                .clone()
                .flat_map(|row| &whole[row * SHAPE[2]..][columns.clone()]);
            let same = values
                .iter()
                .zip(expected)
                .all(|(found, expected)| found.to_bits() == expected.to_bits());
            assert!(same, "{name}, rows {rows:?}, columns {columns:?}");
        }
    }
}

#[test]
fn reads_longer_than_a_chunk_are_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.gguf");
    let elements = 300_032;
    let mut header = GgufWriter::new();
    header.declare("long", BlockType::F16, &[elements]).unwrap();
    let values: Vec<f32> = (0..elements).map(|index| (index % 2000) as f32).collect();
    let mut blocks = vec![0; 2 * elements];
    BlockType::F16.encode(&values, &mut blocks).unwrap();
    let mut tensors = header.write(File::create(&path).unwrap()).unwrap();
    tensors.write(&blocks).unwrap();
    tensors.finish().unwrap();

    let file = GgufFile::open(&path).unwrap();
    let mut found = vec![0.0; elements - 3];
    file.read_rows("long", 0..1, 2..elements - 1, &mut found)
        .unwrap();
    assert!(found == values[2..elements - 1]);
}

#[test]
fn only_bytes_of_touched_blocks_are_read() {
    // The file ends with the blocks of the region.
    let AllTypes { file, path, .. } = &AllTypes::new(2);
    let place = file.tensor_bytes("Q4_K").unwrap();
    let row = file.bytes_of_row("Q4_K").unwrap();
    assert_eq!(row, 3 * 144);
    // Row 4 up to and with its second block.
    let end = place.range.start + 4 * row + 2 * 144;
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(end)
        .unwrap();

    let mut values = vec![0.0; 256];
    file.read_rows("Q4_K", 4..5, 256..512, &mut values).unwrap();
    file.read_rows("Q4_K", 4..5, 200..456, &mut values).unwrap();
    let cut = file
        .read_rows("Q4_K", 4..5, 257..513, &mut values)
        .unwrap_err();
    assert!(matches!(cut, GgufError::Cut { .. }), "{cut}");
    let cut = file
        .read_blocks("Q4_K", 4 * row..5 * row, &mut vec![0; 432])
        .unwrap_err();
    assert!(
        matches!(&cut, GgufError::Cut { end: wanted, .. } if *wanted == end + 144),
        "{cut}"
    );
}

#[test]
fn blocks_are_read_as_they_are() {
    let AllTypes { file, path, .. } = &AllTypes::new(3);
    let place = file.tensor_bytes("Q6_K").unwrap();
    let bytes = fs::read(path).unwrap();
    let mut blocks = vec![0; 425];
    file.read_blocks("Q6_K", 5..430, &mut blocks).unwrap();
    assert_eq!(blocks, bytes[place.range.start as usize..][5..430]);
}

#[test]
fn regions_outside_are_refused() {
    let AllTypes { file, path, .. } = &AllTypes::new(4);
    let backwards = Range { start: 2, end: 1 };
    let outside = [
        (0..16, 0..768),
        (0..15, 0..769),
        (16..16, 0..1),
        (backwards, 0..1),
    ];
    for (rows, columns) in outside {
        let refused = file.read_rows("F32", rows, columns, &mut []).unwrap_err();
        assert!(
            matches!(refused, GgufError::OutsideTensor { .. }),
            "{refused}"
        );
    }

    let bytes = file.tensor("F32").unwrap().bytes();
    let refused = file.read_blocks("F32", 0..bytes + 1, &mut []).unwrap_err();
    assert!(
        matches!(refused, GgufError::OutsideTensor { .. }),
        "{refused}"
    );
    let refused = file.read_rows("none", 0..1, 0..1, &mut [0.0]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!("{}: it has no tensor \"none\"", path.display())
    );
}
