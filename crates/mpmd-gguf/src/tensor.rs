//! The description of a tensor: name, shape, block type, and place in its file.

use std::ops::Range;

use crate::block_type::BlockType;
use crate::error::GgufFlaw;
use crate::limits::MAX_NAME_BYTES;

/// A tensor of a file, without its values.
///
/// The values are rows, one after the other. A row is the innermost dimension, and consists of
/// whole blocks. The rows of a tensor of more than two dimensions are counted over all outer
/// dimensions together. A tensor of one dimension, or of none, is one row.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TensorInfo {
    name: String,
    block_type: BlockType,
    shape: Vec<usize>,
    bytes: u64,
    /// Index of the part of a split file.
    pub(crate) part: usize,
    /// Offset of the values in the part, in bytes.
    pub(crate) offset: u64,
}

impl TensorInfo {
    /// Creates a tensor of a shape, outermost dimension first. Refuses shapes without elements,
    /// with too many, and with rows that are no whole blocks.
    pub(crate) fn new(
        name: &str,
        block_type: BlockType,
        shape: &[u64],
        offset: u64,
    ) -> Result<Self, GgufFlaw> {
        let name = name.to_owned();
        if shape.contains(&0) {
            let shape = shape.to_vec();
            return Err(GgufFlaw::NoElements { name, shape });
        }

        let columns = shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(block_type.elements() as u64) {
            return Err(GgufFlaw::PartialBlock {
                name,
                columns,
                type_name: block_type.name(),
                elements: block_type.elements(),
            });
        }

        let Some(bytes) = bytes_of(block_type, shape) else {
            let shape = shape.to_vec();
            return Err(GgufFlaw::TooLarge { name, shape });
        };
        Ok(Self {
            name,
            block_type,
            shape: shape.iter().map(|dimension| *dimension as usize).collect(),
            bytes,
            part: 0,
            offset,
        })
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type of the blocks.
    pub fn block_type(&self) -> BlockType {
        self.block_type
    }

    /// Returns the shape in row-major order, outermost dimension first. That is the reverse of the
    /// order in the file.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of rows: the product of all dimensions but the innermost.
    pub fn rows(&self) -> usize {
        self.elements() / self.columns()
    }

    /// Returns the number of elements in a row: the innermost dimension.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns the size of the blocks of all rows, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the size of a row's blocks, in bytes.
    pub fn bytes_of_row(&self) -> u64 {
        self.bytes / self.rows() as u64
    }

    /// Returns the byte range of the blocks in the part.
    pub(crate) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }
}

/// Returns the size in bytes of a tensor whose rows are whole blocks; `None` if the number of
/// elements or bytes exceeds an i64.
fn bytes_of(block_type: BlockType, shape: &[u64]) -> Option<u64> {
    let elements = shape
        .iter()
        .try_fold(1u64, |product, dimension| product.checked_mul(*dimension))?;
    let blocks = elements / block_type.elements() as u64;
    let bytes = blocks.checked_mul(block_type.bytes() as u64)?;
    let most = i64::MAX.cast_unsigned().min(isize::MAX as u64);
    (elements <= most && bytes <= most).then_some(bytes)
}

/// Refuses empty and long names of tensors.
pub(crate) fn check_name(name: &str) -> Result<(), GgufFlaw> {
    match name.len() as u64 {
        0 => Err(GgufFlaw::EmptyName),
        found if found > MAX_NAME_BYTES => Err(GgufFlaw::TooMany {
            what: format!("bytes of the tensor's name {name:?}"),
            found,
            limit: MAX_NAME_BYTES,
        }),
        _ => Ok(()),
    }
}
