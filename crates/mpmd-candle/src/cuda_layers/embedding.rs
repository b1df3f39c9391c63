//! The embedding.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, Shape, Tensor};
use mpmd_core::cuda::layers;

use super::op::{CudaLayer, LayerArgument, LayerOp, fit, issue};
use crate::cuda::are_on_cuda;
use crate::cuda::on_cuda;
use crate::pass::device_gradient;

/// Looks up the rows `indices` of a contiguous `table` `[rows, width]`. The result has shape
/// `shape`. An index beyond the table gives NaN in a pass; outside of a pass it makes the CUDA
/// device fail.
pub(crate) fn embedding(
    table: &Tensor,
    indices: &Tensor,
    shape: &[usize],
) -> Option<Result<Tensor>> {
    are_on_cuda(&[table, indices]).then(|| {
        let indices = indices.flatten_all()?.contiguous()?;
        let is_known = matches!(indices.dtype(), DType::U8 | DType::U32 | DType::I64);
        let (entries, width) = table.dims2()?;

        let sizes = layers::CudaEmbedding {
            tokens: indices.elem_count(),
            entries,
            width,
        };
        let is_fit = is_known && fit(&[table]);

        table.apply_op1(LayerOp(CudaRowLookup {
            indices,
            sizes,
            is_fit,
            shape: shape.to_vec(),
        }))
    })
}

/// The operation that copies rows of a table.
struct CudaRowLookup {
    /// The index of each row of the result.
    indices: Tensor,
    sizes: layers::CudaEmbedding,
    /// True if mpmd's kernels compute the lookup; else candle does.
    is_fit: bool,
    shape: Vec<usize>,
}

impl CudaLayer<1> for CudaRowLookup {
    const NAME: &'static str = "embedding";

    fn forward(&self, [table]: [LayerArgument<'_>; 1]) -> Result<(CudaStorage, Shape)> {
        let shape = Shape::from(self.shape.clone());
        if !self.is_fit {
            let (indices, layout) = self.indices.storage_and_layout();
            let rows = table
                .storage
                .index_select(on_cuda(&indices)?, table.layout, layout, 0)?;
            return Ok((rows, shape));
        }
        let rows = issue(|on| {
            on.made(&shape, table.storage.dtype(), |y| {
                on.with([&self.indices], |[indices]| {
                    self.sizes
                        .forward(&on.kernels(), table.part(on)?, indices, None, y)
                })
            })
        })?;
        Ok((rows, shape))
    }

    fn backward(
        &self,
        [table]: [&Tensor; 1],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        let gradient = gradient.clone();
        let indices = self.indices.clone();
        let sizes = self.sizes;
        let is_fit = self.is_fit;
        let like = table.detach();

        let d_table = device_gradient(table, move |into| {
            if is_fit {
                return into.add_by(|on, sums| {
                    on.with([&indices, &gradient], |[indices, d_y]| {
                        sizes.backward(&on.kernels(), indices, d_y, sums)
                    })
                });
            }
            let gradient = gradient.reshape(((), like.dim(1)?))?;
            into.add(&like.zeros_like()?.index_add(&indices, &gradient, 0)?)
        })?;

        Ok([d_table])
    }
}
