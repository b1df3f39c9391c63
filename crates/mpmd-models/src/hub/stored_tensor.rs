//! The tensors of a model's files, and the reading of parameters from them.

use std::iter;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::{bf16, f16};
use mpmd::Result;
use mpmd::aval::{DType, ShapedArray};
use mpmd::kernel::ViewMut;
use mpmd::region::Region;
use mpmd::train::tensors::TensorFile;

use crate::error::unexpected;
use crate::family::{ParameterSource, TensorRows};
use crate::hub::adapter_matrices::AdapterMatrices;
use crate::hub::gguf::PackedTensor;
use crate::hub::initial::InitialValues;

/// The dtypes that weights may have in files, for messages.
pub(crate) const DTYPES: &str = "f32, bf16 or f16";
/// Number of elements that are read and converted in one step.
const BLOCK: usize = 1 << 18;

/// A tensor in the files of a model, or of a new model that has no files yet.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor {
    pub(crate) origin: ValueOrigin,
    /// The tensor's name in the file.
    pub(crate) name: String,
    pub(crate) aval: ShapedArray,
    pub(crate) adapter: Option<TensorAdapter>,
}

/// The matrices of an adapter beside a tensor: their product is added to its values.
#[derive(Clone, Debug)]
pub(crate) struct TensorAdapter {
    pub(crate) matrices: Arc<AdapterMatrices>,
    /// True if the tensor is `[inputs, outputs]`.
    pub(crate) is_transposed: bool,
}

/// The source of a tensor's values.
#[derive(Clone, Debug)]
pub(crate) enum ValueOrigin {
    File(TensorFile),
    /// A GGUF file.
    Packed(PackedTensor),
    /// Drawn at random: the model is new and has no files of weights. The dtype of
    /// [`StoredTensor::aval`] is that in which the tensor will be saved; the values are f32.
    New(InitialValues),
}

/// Returns the first value that is infinite or NaN. `None` if all values are finite. Checks whole
/// blocks without a branch for each value.
pub(crate) fn not_finite(values: &[f32]) -> Option<f32> {
    let is_finite = |block: &&[f32]| block.iter().fold(true, |all, one| all & one.is_finite());
    let block = values.chunks(1 << 12).find(|block| !is_finite(block))?;
    block.iter().copied().find(|value| !value.is_finite())
}

/// Reads regions of one parameter from the tensors that it is stored in.
pub(crate) struct ParameterReader {
    pub(crate) source: ParameterSource,
    /// The tensor of the parameter, or several that are stacked.
    pub(crate) tensors: Vec<StoredTensor>,
    /// Counter of the bytes that are read from files.
    pub(crate) read: Arc<AtomicU64>,
}

impl ParameterReader {
    /// Reads a region of the parameter as f32, row-major.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or a value is infinite or NaN.
    pub(crate) fn read(&self, region: &Region, values: &mut [f32]) -> Result<()> {
        if self.source.stacked.is_none() {
            return self.counted(0, region).read(&self.source, region, values);
        }
        let tensors = region.range(0);
        let region = Region::new(region.ranges().skip(1).collect());
        let parts = values.chunks_exact_mut(region.elements().max(1));
        tensors.zip(parts).try_for_each(|(tensor, values)| {
            self.counted(tensor, &region)
                .read(&self.source, &region, values)
        })
    }

    /// Reads a region of the parameter into the memory of an f32 array.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read).
    pub(crate) fn read_into(&self, region: &Region, view: &mut ViewMut<'_>) -> Result<()> {
        let ParameterSource {
            rows,
            is_transposed,
            stacked,
            ..
        } = &self.source;
        let aval = &self.tensors[0].aval;
        let all = TensorRows::block(0, aval.shape().first().copied().unwrap_or(1));
        // Without a copy, if the parameter is the tensor.
        if stacked.is_none()
            && !is_transposed
            && *rows == all
            && aval.dtype() == DType::F32
            && let tensor @ StoredTensor {
                origin: ValueOrigin::File(file),
                name,
                adapter: None,
                ..
            } = &self.tensors[0]
        {
            self.counted(0, region);
            file.read(name, region, view.as_bytes_mut())?;
            return tensor.check_finite(view.as_mut_slice()?, "finite values");
        }
        self.read(region, view.as_mut_slice()?)
    }

    /// Returns the tensor of this index, and counts the bytes of its region as read.
    fn counted(&self, tensor: usize, region: &Region) -> &StoredTensor {
        let stored = &self.tensors[tensor];
        let bytes = match &stored.origin {
            ValueOrigin::File(_) => (region.elements() * stored.aval.dtype().size()) as u64,
            ValueOrigin::Packed(packed) => packed.bytes_of(region.elements()),
            ValueOrigin::New(_) => 0,
        };
        self.read.fetch_add(bytes, Ordering::Relaxed);
        stored
    }
}

impl StoredTensor {
    /// Returns a hash of the dtype and of `samples` samples of the values. `None` if the model is
    /// new.
    pub(crate) fn hash_samples(&self, samples: u64) -> Result<Option<u64>> {
        match &self.origin {
            ValueOrigin::File(file) => file.hash_samples(&self.name, samples).map(Some),
            ValueOrigin::Packed(packed) => packed.hash_samples(samples).map(Some),
            ValueOrigin::New(_) => Ok(None),
        }
    }

    /// Returns the path of the tensor's file. `None` if the model is new.
    pub(crate) fn path(&self) -> Option<&Path> {
        match &self.origin {
            ValueOrigin::File(file) => Some(file.path()),
            ValueOrigin::Packed(packed) => Some(packed.path()),
            ValueOrigin::New(_) => None,
        }
    }

    /// True if the file has the matrix as `[outputs, inputs]` although folders have it transposed.
    pub(crate) fn is_turned(&self) -> bool {
        matches!(&self.origin, ValueOrigin::Packed(packed) if packed.is_turned())
    }

    /// Returns an error if a value is infinite or NaN. `values` are some elements of the tensor, or
    /// their sums with an adapter, as `expected` says.
    fn check_finite(&self, values: &[f32], expected: &str) -> Result<()> {
        match not_finite(values) {
            None => Ok(()),
            Some(found) => {
                let file = self.path().unwrap_or(Path::new("a new model"));
                Err(unexpected(file, &self.name, expected, found))
            }
        }
    }

    /// Reads a region of a parameter, row-major. `source` has the rows of this tensor that form the
    /// parameter.
    fn read(&self, source: &ParameterSource, region: &Region, values: &mut [f32]) -> Result<()> {
        let rows = region.range(0);
        let inner: Vec<Range<usize>> = region.ranges().skip(1).collect();
        let width = inner.iter().map(|range| range.len()).product::<usize>();
        for (first, range) in source.rows.places() {
            let found = rows.start.max(first)..rows.end.min(first + range.len());
            if !found.is_empty() && width > 0 {
                let place = range.start + found.start - first..range.start + found.end - first;
                let into = &mut values[(found.start - rows.start) * width..][..found.len() * width];
                match (source.is_transposed && !self.is_turned(), &inner[..]) {
                    (true, [columns]) => self.read_transposed(columns.clone(), place, into)?,
                    _ => self.read_rows(place, &inner, into)?,
                }
            }
        }
        Ok(())
    }

    /// Reads the rows `rows`, block by block, and converts each element to f32. `inner` has the
    /// ranges of the other dimensions.
    fn read_rows(
        &self,
        rows: Range<usize>,
        inner: &[Range<usize>],
        values: &mut [f32],
    ) -> Result<()> {
        let width = values.len() / rows.len();
        let step = match &self.origin {
            // It reads in its own steps.
            ValueOrigin::Packed(_) => rows.len(),
            _ => (BLOCK / width).max(1),
        };
        let dtype = self.aval.dtype();
        let mut bytes = Vec::new();
        for (start, values) in rows
            .clone()
            .step_by(step)
            .zip(values.chunks_mut(step * width))
        {
            let block = iter::once(start..rows.end.min(start + step)).chain(inner.iter().cloned());
            let block = Region::new(block.collect());
            match &self.origin {
                ValueOrigin::New(initial) => initial.fill(self.aval.shape(), &block, values),
                ValueOrigin::Packed(packed) => {
                    packed.read(block.range(0), inner.first().cloned(), values)?;
                    self.check_finite(values, "finite values")?;
                }
                ValueOrigin::File(file) => {
                    bytes.resize(values.len() * dtype.size(), 0);
                    file.read(&self.name, &block, &mut bytes)?;
                    convert(&bytes, dtype, values);
                    self.check_finite(values, "finite values")?;
                }
            }

            if let Some(adapter) = &self.adapter {
                adapter.matrices.add(&block, adapter.is_transposed, values);
                self.check_finite(values, "finite sums with the adapter")?;
            }
        }
        Ok(())
    }

    /// Reads the rows `rows` and columns `columns` of a matrix, and writes them transposed, block
    /// by block.
    fn read_transposed(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        values: &mut [f32],
    ) -> Result<()> {
        let height = rows.len();
        let width = columns.len();
        let step = (BLOCK / width).max(1);
        let mut block = Vec::new();
        for start in rows.clone().step_by(step) {
            let part = start..rows.end.min(start + step);
            block.resize(part.len() * width, 0.0);
            self.read_rows(part, std::slice::from_ref(&columns), &mut block)?;
            for (row, found) in block.chunks_exact(width).enumerate() {
                let column = values[start - rows.start + row..]
                    .iter_mut()
                    .step_by(height);
                column.zip(found).for_each(|(value, found)| *value = *found);
            }
        }
        Ok(())
    }
}

/// Converts the little-endian bytes of f32, bf16 or f16 to f32.
pub(crate) fn convert(bytes: &[u8], dtype: DType, values: &mut [f32]) {
    let halves = bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|pair| u16::from_le_bytes(*pair));
    let singles = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|four| f32::from_le_bytes(*four));

    let values = values.iter_mut();
    match dtype {
        DType::Bf16 => values
            .zip(halves)
            .for_each(|(value, bits)| *value = bf16::from_bits(bits).to_f32()),
        DType::F16 => values
            .zip(halves)
            .for_each(|(value, bits)| *value = f16::from_bits(bits).to_f32()),
        _ => values
            .zip(singles)
            .for_each(|(value, single)| *value = single),
    }
}

/// True if two matrices have the same elements. Stops reading at the first block that differs.
pub(crate) fn are_equal(a: &StoredTensor, b: &StoredTensor) -> Result<bool> {
    let (ValueOrigin::File(file), ValueOrigin::File(other)) = (&a.origin, &b.origin) else {
        return Ok(false);
    };
    if a.aval != b.aval {
        return Ok(false);
    }

    let [rows, columns] = *a.aval.shape() else {
        return Ok(false);
    };
    let mut left = Vec::new();
    let mut right = Vec::new();
    let step = (BLOCK / columns.max(1)).max(1);
    for row in (0..rows).step_by(step) {
        for column in (0..columns).step_by(BLOCK) {
            let block = [
                row..rows.min(row + step),
                column..columns.min(column + BLOCK),
            ];
            let block = Region::new(block.to_vec());
            let bytes = block.elements() * a.aval.dtype().size();
            left.resize(bytes, 0);
            right.resize(bytes, 0);
            file.read(&a.name, &block, &mut left)?;
            other.read(&b.name, &block, &mut right)?;
            if left != right {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use mpmd::train::tensors::header;

    use super::*;

    /// Writes the tensor `a` with these bytes to a temporary file.
    fn stored(
        aval: ShapedArray,
        values: impl Iterator<Item = u8>,
    ) -> (tempfile::NamedTempFile, StoredTensor) {
        let arrays = [("a".to_owned(), aval.clone())];
        let (mut bytes, _) = header(&arrays, &BTreeMap::new()).unwrap();
        bytes.extend(values);
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        let stored = StoredTensor {
            origin: ValueOrigin::File(TensorFile::open(file.path()).unwrap()),
            name: "a".to_owned(),
            aval,
            adapter: None,
        };
        (file, stored)
    }

    #[test]
    fn tensors_of_several_blocks_are_read_in_order() {
        let (height, width) = (1300, 500);
        let at = |row: usize, column: usize| bf16::from_f32((row * 7 + column * 3) as f32 % 256.0);
        let values = (0..height).flat_map(|row| (0..width).map(move |column| at(row, column)));
        let aval = ShapedArray::new(&[height, width], DType::Bf16);
        let (_file, stored) = stored(aval, values.flat_map(|value| value.to_le_bytes()));
        for is_transposed in [false, true] {
            // The parameter is the tensor without its first rows or columns.
            let (rows, columns) = if is_transposed {
                (480, 1300)
            } else {
                (1280, 500)
            };
            let rows_of = TensorRows::block(20, rows);
            let source = ParameterSource {
                name: "a".to_owned(),
                stacked: None,
                rows: rows_of,
                is_transposed,
            };
            let region = Region::new(vec![3..rows, 1..columns]);
            let mut found = vec![0.0; region.elements()];
            stored.read(&source, &region, &mut found).unwrap();
            let place = |row: usize, column| match is_transposed {
                true => at(column, row + 20),
                false => at(row + 20, column),
            };
            let expected = (3..rows).flat_map(|row| (1..columns).map(move |column| (row, column)));
            let expected = expected.map(|(row, column)| place(row, column).to_f32());
            assert!(
                found.into_iter().eq(expected),
                "transposed: {is_transposed}"
            );
        }
    }

    #[test]
    fn values_that_are_not_finite_are_refused_by_tensor() {
        let shape = [3, 5000];
        let bytes_of = |dtype, value: f32| match dtype {
            DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let aval = ShapedArray::new(&shape, dtype);
                let value = |at| if at == 12_345 { wrong } else { 60_000.0 };
                let values = (0..aval.elements()).flat_map(|at| bytes_of(dtype, value(at)));
                let (file, stored) = stored(aval, values);
                let reader = ParameterReader {
                    source: ParameterSource {
                        name: "a".to_owned(),
                        stacked: None,
                        rows: TensorRows::block(0, shape[0]),
                        is_transposed: false,
                    },
                    tensors: vec![stored],
                    read: Arc::default(),
                };

                let read = |rows: Range<usize>| {
                    let region = Region::new(vec![rows, 0..shape[1]]);
                    reader.read(&region, &mut vec![0.0; region.elements()])
                };
                read(0..2).unwrap();
                let said = read(1..3).unwrap_err().to_string();
                let file = file.path().display();
                assert_eq!(
                    said,
                    format!("{file}: a: expected finite values, found {wrong}")
                );
            }
        }
    }
}
