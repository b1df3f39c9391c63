//! A linear layer for inference. Its weight is packed once.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::Module;
use mpmd_device::cpu::packed::{PANEL, PackedWeight};
use rayon::prelude::*;

use super::linear::Linear;
use super::values::{single, values};
use crate::cx::Cx;

/// The number of weight elements that [`PackedLinear::of_rows`] reads at once.
const BLOCK: usize = 1 << 20;

/// A linear layer without gradients: `y = x wᵀ + b`. The bits of a row of `y` do not depend on the
/// number of rows of `x`. Clones share the weight.
#[derive(Clone, Debug)]
pub struct PackedLinear {
    weight: Arc<PackedWeight>,
    bias: Option<Tensor>,
}

impl PackedLinear {
    /// Packs the weight of a layer. If `in_half` is true, its elements are rounded to `bf16`. Sums
    /// are always in f32.
    ///
    /// # Errors
    ///
    /// If the weight is not of a float type in host memory.
    pub fn new(layer: &Linear, in_half: bool) -> Result<Self> {
        let (rows, columns) = layer.weight().dims2()?;
        let mut weight = PackedWeight::zeros(rows, columns, in_half);
        let source = single(layer.weight())?.contiguous()?;
        weight.set_rows(0, &values(&source)?);

        let bias = layer.bias().map(single).transpose()?;
        Ok(Self {
            weight: Arc::new(weight),
            bias,
        })
    }

    /// Packs a weight `[rows, columns]`, without a bias. Each call of `read` fills a slice with the
    /// given rows, row-major. `in_half` is as for [`PackedLinear::new`].
    ///
    /// # Errors
    ///
    /// Returns the error of `read`.
    pub fn of_rows(
        rows: usize,
        columns: usize,
        in_half: bool,
        mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<Self> {
        let mut weight = PackedWeight::zeros(rows, columns, in_half);
        // A block has whole panels.
        let step = (BLOCK / columns.max(1)).next_multiple_of(PANEL).max(PANEL);
        let mut values = Vec::new();
        for first in (0..rows).step_by(step) {
            let block = first..rows.min(first + step);
            values.resize(block.len() * columns, 0.0);
            read(block, &mut values)?;
            weight.set_rows(first, &values);
        }
        Ok(Self {
            weight: Arc::new(weight),
            bias: None,
        })
    }

    /// Computes the layer as [`Linear::forward_over`] does.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Cx::all_reduce`].
    pub fn forward_over(&self, x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
        let product = Self {
            weight: self.weight.clone(),
            bias: None,
        };
        let y = axes
            .iter()
            .rev()
            .try_fold(product.forward(x)?, |y, axis| cx.all_reduce(&y, axis))?;
        self.bias
            .as_ref()
            .map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
    }

    /// Returns the number of rows of the weight.
    pub fn outputs(&self) -> usize {
        self.weight.rows()
    }

    /// Returns the weight's rows at `indices`. The result has the shape of `indices`, followed by
    /// the number of columns.
    ///
    /// # Errors
    ///
    /// If `indices` are not u32, or an index is beyond the weight's rows.
    pub fn rows(&self, indices: &Tensor) -> Result<Tensor> {
        let rows = self.weight.rows();
        let columns = self.weight.columns();
        let mut shape = indices.dims().to_vec();
        shape.push(columns);

        let indices = indices.flatten_all()?.to_vec1::<u32>()?;
        let mut out = vec![0.0; indices.len() * columns];
        for (index, out) in indices.iter().zip(out.chunks_exact_mut(columns.max(1))) {
            if *index as usize >= rows {
                bail!("index {index} of an embedding with {rows} rows");
            }
            self.weight.row(*index as usize, out);
        }
        Tensor::from_vec(out, shape, &Device::Cpu)
    }
}

impl Module for PackedLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = self.weight.rows();
        let columns = self.weight.columns();
        let Some((&last, leading)) = x.dims().split_last() else {
            bail!("the input has no dimension: expected [..., {columns}]");
        };
        if last != columns || x.dtype() != DType::F32 {
            bail!(
                "the input is {:?} {:?}: expected F32 [..., {columns}]",
                x.dtype(),
                x.dims()
            );
        }

        let m = leading.iter().product::<usize>();
        let panels = self.weight.panels();
        let x = x.contiguous()?;
        let x = values(&x)?;
        // `[panels, m, PANEL]`. Each thread gets several panels, and so reads `x` less often.
        let mut parts = vec![0.0; panels * m * PANEL];
        let each = panels.div_ceil(4 * rayon::current_num_threads()).max(1);
        let all = parts.par_chunks_mut((each * m * PANEL).max(1)).enumerate();
        // Sums of no products stay 0.
        all.filter(|_| columns > 0).for_each(|(at, out)| {
            let first = at * each;
            self.weight
                .multiply(&x, first..panels.min(first + each), out);
        });

        let mut out = vec![0.0; m * rows];
        out.par_chunks_mut(rows.max(1))
            .enumerate()
            .for_each(|(row, out)| {
                for (panel, out) in out.chunks_mut(PANEL).enumerate() {
                    out.copy_from_slice(&parts[(panel * m + row) * PANEL..][..out.len()]);
                }
            });

        let mut shape = leading.to_vec();
        shape.push(rows);
        let y = Tensor::from_vec(out, shape, &Device::Cpu)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}
