//! The embedding.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use crate::cuda::{are_on_cuda, bridge::on_cuda};
use crate::pass::device_gradient;

/// Returns the rows of a contiguous `table` `[rows, width]` for `indices`, in this shape.
pub(crate) fn embedding(
    table: &Tensor,
    indices: &Tensor,
    shape: &[usize],
) -> Option<Result<Tensor>> {
    are_on_cuda(&[table, indices]).then(|| {
        let indices = indices.flatten_all()?.contiguous()?;
        table.apply_op1(Lookup { indices, shape: shape.to_vec() })
    })
}

/// The operation that copies rows of a table.
struct Lookup {
    /// The index of each row of the result.
    indices: Tensor,
    shape: Vec<usize>,
}

impl CustomOp1 for Lookup {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("a layer for CUDA devices on the CPU")
    }

    fn cuda_fwd(&self, table: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (indices, indices_layout) = self.indices.storage_and_layout();
        let rows = table.index_select(on_cuda(&indices)?, layout, indices_layout, 0)?;
        Ok((rows, self.shape.clone().into()))
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let (gradient, indices) = (gradient.contiguous()?, self.indices.clone());
        let like = table.detach();
        device_gradient(table, move |into| {
            let gradient = gradient.reshape(((), like.dim(1)?))?;
            into.add(&like.zeros_like()?.index_add(&indices, &gradient, 0)?)
        })
    }
}
