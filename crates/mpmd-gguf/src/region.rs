//! Reads regions of tensors: only the blocks that a region touches.

use std::fmt;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use crate::block_type::BlockType;
use crate::error::GgufError;
use crate::file::{GgufFile, GgufPart};
use crate::tensor::TensorInfo;

/// Limit on the bytes of blocks that are read at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// Number of elements in the largest block.
const MOST_ELEMENTS: usize = 256;

impl GgufFile {
    /// Reads the elements of a region of a tensor into `values`, in row-major order, as f32. Reads
    /// only the blocks that the region touches. `columns` may begin and end inside of blocks.
    ///
    /// The rows of a tensor of more than two dimensions are counted over all outer dimensions
    /// together: row `r` of expert `e` is row `e * shape[1] + r`. A tensor of one dimension is one
    /// row.
    ///
    /// # Errors
    ///
    /// If there is no such tensor, the region is not inside it, or the file cannot be read.
    /// `values` may be partly written then.
    ///
    /// # Panics
    ///
    /// If the length of `values` is not the number of elements in the region.
    pub fn read_rows(
        &self,
        name: &str,
        rows: Range<usize>,
        columns: Range<usize>,
        values: &mut [f32],
    ) -> Result<(), GgufError> {
        let tensor = self.tensor(name)?;
        if !is_inside(&rows, tensor.rows()) || !is_inside(&columns, tensor.columns()) {
            let region = format_args!("rows {rows:?}, columns {columns:?}");
            let whole = format_args!("{} rows of {} columns", tensor.rows(), tensor.columns());
            return Err(self.outside(tensor, &region, &whole));
        }
        assert_eq!(
            values.len(),
            rows.len() * columns.len(),
            "values of rows {rows:?}, columns {columns:?} of {name:?}"
        );
        if values.is_empty() {
            return Ok(());
        }

        // Whole rows follow each other without a gap.
        let mut reader = ElementReader::new(self.part_of(tensor), tensor);
        let row = tensor.columns();
        if columns.len() == row {
            return reader.read(rows.start * row, values);
        }
        for (row_index, values) in rows.zip(values.chunks_exact_mut(columns.len())) {
            reader.read(row_index * row + columns.start, values)?;
        }
        Ok(())
    }

    /// Reads a byte range of a tensor's blocks as they are in the file. Row `r` begins at byte
    /// `r * bytes_of_row(name)`.
    ///
    /// # Errors
    ///
    /// If there is no such tensor, the range is not inside its [`TensorInfo::bytes`], or the file
    /// cannot be read.
    ///
    /// # Panics
    ///
    /// If the length of `blocks` is not that of the range.
    pub fn read_blocks(
        &self,
        name: &str,
        range: Range<u64>,
        blocks: &mut [u8],
    ) -> Result<(), GgufError> {
        let tensor = self.tensor(name)?;
        if range.start > range.end || range.end > tensor.bytes() {
            let region = format_args!("bytes {range:?}");
            let whole = format_args!("{} bytes", tensor.bytes());
            return Err(self.outside(tensor, &region, &whole));
        }
        let wanted = range.end - range.start;
        assert_eq!(blocks.len() as u64, wanted, "bytes {range:?} of {name:?}");
        self.part_of(tensor)
            .read_at(blocks, tensor.offset + range.start)
    }

    fn outside(
        &self,
        tensor: &TensorInfo,
        region: &dyn fmt::Display,
        whole: &dyn fmt::Display,
    ) -> GgufError {
        GgufError::OutsideTensor {
            path: self.part_of(tensor).path.clone(),
            name: tensor.name().to_owned(),
            region: region.to_string(),
            whole: whole.to_string(),
        }
    }
}

impl GgufPart {
    /// Fills `bytes` from an offset in the file.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), GgufError> {
        let read = self.file.read_exact_at(bytes, offset);
        read.map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => self.cut(offset + bytes.len() as u64),
            _ => GgufError::Io {
                path: self.path.clone(),
                source,
            },
        })
    }
}

/// Reads elements of one tensor.
struct ElementReader<'a> {
    part: &'a GgufPart,
    block_type: BlockType,
    /// Offset of the tensor in the part, in bytes.
    offset: u64,
    /// Memory for the blocks of a chunk.
    blocks: Vec<u8>,
}

impl<'a> ElementReader<'a> {
    fn new(part: &'a GgufPart, tensor: &TensorInfo) -> Self {
        Self {
            part,
            block_type: tensor.block_type(),
            offset: tensor.offset,
            blocks: Vec::new(),
        }
    }

    /// Reads the elements from `first` on, counted over all rows, into `values`.
    fn read(&mut self, first: usize, mut values: &mut [f32]) -> Result<(), GgufError> {
        let block_type = self.block_type;
        let most_blocks = CHUNK_BYTES / block_type.bytes();
        let mut block = first / block_type.elements();
        let mut skipped = first % block_type.elements();
        while !values.is_empty() {
            let wanted = (skipped + values.len()).div_ceil(block_type.elements());
            let count = wanted.min(most_blocks);
            self.blocks.resize(count * block_type.bytes(), 0);
            let offset = self.offset + (block * block_type.bytes()) as u64;
            self.part.read_at(&mut self.blocks, offset)?;

            // Only the first block is begun in the middle.
            let elements = values.len().min(count * block_type.elements() - skipped);
            let (chunk, rest) = values.split_at_mut(elements);
            decode_from(block_type, &self.blocks, skipped, chunk);
            values = rest;
            block += count;
            skipped = 0;
        }
        Ok(())
    }
}

/// Decodes the elements of `blocks` from `skipped` on, as many as `values` has. The first and the
/// last block may be decoded in part.
fn decode_from(block_type: BlockType, blocks: &[u8], skipped: usize, values: &mut [f32]) {
    let elements = block_type.elements();
    let mut decoded = [0.0; MOST_ELEMENTS];
    let decoded = &mut decoded[..elements];
    let mut blocks = blocks;
    let mut values = values;
    if skipped > 0 {
        let (first, other_blocks) = blocks.split_at(block_type.bytes());
        let length = values.len().min(elements - skipped);
        let (begun, other_values) = values.split_at_mut(length);
        block_type.decode(first, decoded);
        begun.copy_from_slice(&decoded[skipped..skipped + length]);
        (blocks, values) = (other_blocks, other_values);
    }

    let whole = values.len() / elements;
    let (whole_blocks, last) = blocks.split_at(whole * block_type.bytes());
    let (whole_values, ended) = values.split_at_mut(whole * elements);
    block_type.decode(whole_blocks, whole_values);
    if !ended.is_empty() {
        block_type.decode(last, decoded);
        ended.copy_from_slice(&decoded[..ended.len()]);
    }
}

fn is_inside(range: &Range<usize>, length: usize) -> bool {
    range.start <= range.end && range.end <= length
}
