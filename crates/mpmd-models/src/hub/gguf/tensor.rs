//! Reading a tensor of a folder from a GGUF file, which may have it packed and in another order.

use std::ops::Range;
use std::path::Path;

use mpmd::Result;
use mpmd::aval::DType;
use mpmd::train::tensors::hash_samples;
use mpmd_gguf::{BlockType, GgufFile};

use super::keys::of_gguf;
use crate::hub::content::fold;
use mpmd::random::Key;

/// A tensor of a folder that a GGUF file holds, alone or in one tensor with others.
#[derive(Clone, Debug)]
pub(crate) struct PackedTensor {
    pub(super) file: GgufFile,
    /// The name of the tensor in the file.
    pub(super) name: String,
    /// First row of the tensor in the file.
    pub(super) first: usize,
    /// Number of rows: 1 for a vector.
    pub(super) rows: usize,
    pub(super) order: RowOrder,
    /// Number that is added to the values of the file.
    pub(super) shift: f32,
    /// True if folders have the matrix as `[inputs, outputs]`; the file has it as `[outputs,
    /// inputs]`.
    pub(super) is_turned: bool,
    pub(super) block_type: BlockType,
    /// Number of elements and of bytes of the file's tensor.
    pub(super) elements: u64,
    pub(super) bytes: u64,
}

/// The order of the rows of a matrix, or of the elements of a vector, in a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum RowOrder {
    /// As in folders.
    Same,
    /// Row `i` of each half of a head follows row `i` of the other half. Folders have one half
    /// after the other.
    Interleaved {
        /// Number of rows of a head.
        dim: usize,
    },
    /// All heads of the queries, then of the keys, then of the values. Folders have the three of
    /// each head in turn.
    ByKind {
        /// Number of heads of each kind.
        heads: usize,
        /// Number of rows of a head.
        dim: usize,
    },
}

impl RowOrder {
    /// Returns the number of rows of a group: rows that lie together in folders and in files.
    /// `None` if all rows do.
    fn group(self) -> Option<usize> {
        match self {
            Self::Same => None,
            Self::Interleaved { dim } | Self::ByKind { dim, .. } => Some(dim),
        }
    }

    /// Returns the index in the file of a group of rows.
    fn group_in_file(self, group: usize) -> usize {
        match self {
            Self::Same | Self::Interleaved { .. } => group,
            Self::ByKind { heads, .. } => group % 3 * heads + group / 3,
        }
    }

    /// Returns the index in the file, within its group, of row `row` of a group.
    fn row_in_file(self, row: usize) -> usize {
        match self {
            Self::Interleaved { dim } => {
                let half = dim / 2;
                2 * (row % half) + row / half
            }
            Self::Same | Self::ByKind { .. } => row,
        }
    }
}

impl PackedTensor {
    /// Returns the path of the file that holds the tensor.
    pub(crate) fn path(&self) -> &Path {
        self.file.path_of(&self.name).unwrap_or(self.file.path())
    }

    /// True if folders have the matrix transposed.
    pub(crate) fn is_turned(&self) -> bool {
        self.is_turned
    }

    /// Returns the dtype that holds every value: that of the file, or f32 if the file packs them or
    /// something is added.
    pub(super) fn dtype(&self) -> DType {
        match self.block_type {
            BlockType::F16 if self.shift == 0.0 => DType::F16,
            BlockType::BF16 if self.shift == 0.0 => DType::Bf16,
            _ => DType::F32,
        }
    }

    /// Returns the number of bytes of the file that hold so many elements, rounded up.
    pub(crate) fn bytes_of(&self, elements: usize) -> u64 {
        let bytes = u128::from(self.bytes) * elements as u128;
        bytes.div_ceil(u128::from(self.elements.max(1))) as u64
    }

    /// Reads the rows `rows` of a matrix, or these elements of a vector, and the columns `columns`
    /// of each. `columns` is `None` for a vector. Rows are those of the file's orientation.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn read(
        &self,
        rows: Range<usize>,
        columns: Option<Range<usize>>,
        values: &mut [f32],
    ) -> Result<()> {
        let width = columns.as_ref().map_or(1, ExactSizeIterator::len);
        match self.order.group() {
            None => self.read_as_stored(rows, columns, values)?,
            Some(dim) => {
                let mut start = rows.start;
                let mut rest = &mut *values;
                while start < rows.end {
                    let group = start / dim;
                    let end = rows.end.min((group + 1) * dim);
                    let (own, after) = rest.split_at_mut((end - start) * width);
                    let within = start - group * dim..end - group * dim;
                    self.read_group(group, dim, within, columns.clone(), own)?;
                    rest = after;
                    start = end;
                }
            }
        }
        if self.shift != 0.0 {
            values.iter_mut().for_each(|value| *value += self.shift);
        }
        Ok(())
    }

    /// Reads the rows `rows` of a group of `dim` rows.
    fn read_group(
        &self,
        group: usize,
        dim: usize,
        rows: Range<usize>,
        columns: Option<Range<usize>>,
        values: &mut [f32],
    ) -> Result<()> {
        let start = self.order.group_in_file(group) * dim;
        if !matches!(self.order, RowOrder::Interleaved { .. }) {
            let rows = start + rows.start..start + rows.end;
            return self.read_as_stored(rows, columns, values);
        }
        let width = values.len() / rows.len();
        let mut whole = vec![0.0; dim * width];
        self.read_as_stored(start..start + dim, columns, &mut whole)?;
        for (row, values) in rows.zip(values.chunks_exact_mut(width.max(1))) {
            let from = self.order.row_in_file(row) * width;
            values.copy_from_slice(&whole[from..from + width]);
        }
        Ok(())
    }

    /// Reads rows in the order of the file.
    fn read_as_stored(
        &self,
        rows: Range<usize>,
        columns: Option<Range<usize>>,
        values: &mut [f32],
    ) -> Result<()> {
        let (rows, columns) = match columns {
            Some(columns) => (self.first + rows.start..self.first + rows.end, columns),
            None => (self.first..self.first + 1, rows),
        };
        let read = self.file.read_rows(&self.name, rows, columns, values);
        read.map_err(of_gguf)
    }

    /// Returns a hash of the type of the blocks, and of `samples` samples of their bytes.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn hash_samples(&self, samples: u64) -> Result<u64> {
        let all = self.file.tensor_bytes(&self.name).map_err(of_gguf)?;
        let row = self.file.bytes_of_row(&self.name).map_err(of_gguf)?;
        let start = all.range.start + self.first as u64 * row;
        let range = start..start + self.rows as u64 * row;
        let hash = hash_samples(all.file, range, samples);
        let hash = hash.map_err(|why| {
            mpmd::Error::Environment(format!("{}: {}: {why}", all.path.display(), self.name))
        })?;
        let form = format!("{} {} {}", self.block_type.name(), self.rows, row);
        Ok(fold(Key(hash), form.as_bytes()).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_are_those_of_the_two_halves_in_turn() {
        let order = RowOrder::Interleaved { dim: 6 };
        let found: Vec<usize> = (0..6).map(|row| order.row_in_file(row)).collect();
        assert_eq!(found, [0, 2, 4, 1, 3, 5]);
    }

    #[test]
    fn kinds_of_each_head_are_found_behind_all_heads_of_the_kinds_before() {
        let order = RowOrder::ByKind { heads: 2, dim: 4 };
        let found: Vec<usize> = (0..6).map(|group| order.group_in_file(group)).collect();
        // The query, key and value of head 0, and then those of head 1.
        assert_eq!(found, [0, 2, 4, 1, 3, 5]);
    }
}
