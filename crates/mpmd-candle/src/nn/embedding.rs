//! The embedding: a table with a row for each index.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};

use super::values::{are_fast, in_layer, name_of, offsets, values};
use crate::cuda_layers;
use crate::pass::{keeps, weight_gradient};

/// A layer that looks up the rows of a table by index.
#[derive(Clone, Debug)]
pub struct Embedding {
    embeddings: Tensor,
    hidden_size: usize,
    name: Option<String>,
}

impl Embedding {
    /// Creates a layer from its table `[indices, hidden_size]`.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        Self {
            embeddings,
            hidden_size,
            name: None,
        }
    }

    /// Returns the table: `[indices, hidden_size]`.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }

    /// Returns the length of a row.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    fn compute(&self, indexes: &Tensor) -> Result<Tensor> {
        let (rows, width) = self.embeddings.dims2()?;
        if width != self.hidden_size {
            bail!(
                "the table is [{rows}, {width}]: expected [_, {}]",
                self.hidden_size
            );
        }

        let mut shape = indexes.dims().to_vec();
        shape.push(width);
        let table = self.embeddings.contiguous()?;
        if let Some(rows) = cuda_layers::embedding(&table, indexes, &shape) {
            return rows;
        }

        if !are_fast(&[&table]) {
            return table
                .index_select(&indexes.flatten_all()?, 0)?
                .reshape(shape);
        }

        let indices = indices(indexes)?;
        if let Some(index) = indices.iter().find(|index| **index as usize >= rows) {
            bail!("index {index} is not in the table of {rows} rows");
        }
        if table.track_op() {
            keeps(size_of_val(&*indices) as u64);
        }

        table.apply_op1(RowLookup { indices, shape })
    }
}

impl Module for Embedding {
    fn forward(&self, indexes: &Tensor) -> Result<Tensor> {
        in_layer(self.name.as_deref(), self.compute(indexes))
    }
}

/// Creates an embedding with the variable `weight`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder) -> Result<Embedding> {
    let init = Init::Randn {
        mean: 0.0,
        stdev: 1.0,
    };
    let embeddings = vb.get_with_hints((in_size, out_size), "weight", init)?;
    Ok(Embedding {
        embeddings,
        hidden_size: out_size,
        name: name_of(&vb),
    })
}

/// Returns the elements of a tensor of indices, row-major. Indices outside of the range of `u32`
/// become `u32::MAX`.
///
/// # Errors
///
/// If the dtype is not u8, u32 or i64.
pub(super) fn indices(tensor: &Tensor) -> Result<Vec<u32>> {
    match tensor.dtype() {
        DType::U8 | DType::U32 => tensor.flatten_all()?.to_dtype(DType::U32)?.to_vec1(),
        DType::I64 => {
            let indices = tensor.flatten_all()?.to_vec1::<i64>()?;
            Ok(indices
                .into_iter()
                .map(|index| u32::try_from(index).unwrap_or(u32::MAX))
                .collect())
        }
        dtype => bail!("the indices are {dtype:?}: expected u8, u32 or i64"),
    }
}

/// The operation that copies rows of a table.
struct RowLookup {
    indices: Vec<u32>,
    /// The shape of the result. Its last dimension is the length of a row.
    shape: Vec<usize>,
}

impl RowLookup {
    fn rows<T: Copy>(&self, table: &[T], width: usize) -> Vec<T> {
        let mut out = Vec::with_capacity(self.indices.len() * width);
        for index in &self.indices {
            out.extend_from_slice(&table[*index as usize * width..][..width]);
        }
        out
    }
}

impl CustomOp1 for RowLookup {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, table: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (from, to) = offsets(layout)?;
        let width = layout.dims()[1];
        let rows = match table {
            CpuStorage::F32(table) => CpuStorage::F32(self.rows(&table[from..to], width)),
            CpuStorage::F16(table) => CpuStorage::F16(self.rows(&table[from..to], width)),
            CpuStorage::BF16(table) => CpuStorage::BF16(self.rows(&table[from..to], width)),
            _ => bail!("the table is not of f32, f16 or bf16"),
        };
        Ok((rows, self.shape.clone().into()))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        let indices = self.indices.clone();
        let width = table.dim(1)?;

        weight_gradient(table, move |into| {
            let gradient = values(&gradient)?;
            for (at, index) in indices.iter().enumerate() {
                let sums = &mut into[*index as usize * width..][..width];
                sums.iter_mut()
                    .zip(&gradient[at * width..])
                    .for_each(|(sum, d)| *sum += *d);
            }
            Ok(())
        })
    }
}
