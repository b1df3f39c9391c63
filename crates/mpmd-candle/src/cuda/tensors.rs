//! Tensors that mpmd's kernels fill and read.

use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Layout, Shape, Storage, Tensor};
use mpmd_core::Result;
use mpmd_core::cuda::CudaPart;

use super::OnCuda;
use super::bridge::on_cuda;
use crate::dtypes::refused;

impl OnCuda<'_> {
    /// Allocates memory of this shape and dtype. `fill` must write all of its elements.
    pub(crate) fn made(
        &self,
        shape: &Shape,
        dtype: DType,
        fill: impl FnOnce(CudaPart<'static>) -> Result<()>,
    ) -> Result<CudaStorage> {
        let storage = self.uninitialized(shape, dtype).map_err(refused)?;
        fill(self.part(&storage, &Layout::contiguous(shape), true)?)?;
        Ok(storage)
    }

    /// Creates a tensor with the shape and dtype of `like`. `fill` must write all of its elements.
    pub(crate) fn tensor_like(
        &self,
        like: &Tensor,
        fill: impl FnOnce(CudaPart<'static>) -> Result<()>,
    ) -> Result<Tensor> {
        Ok(tensor(
            self.made(like.shape(), like.dtype(), fill)?,
            like.shape(),
        ))
    }

    /// Returns the elements of a contiguous tensor for a kernel that overwrites them.
    pub(crate) fn writable(&self, tensor: &Tensor) -> Result<CudaPart<'static>> {
        let (storage, layout) = tensor.storage_and_layout();
        self.part(on_cuda(&storage).map_err(refused)?, layout, true)
    }

    /// Calls `f` with the elements of contiguous tensors.
    pub(crate) fn with<const N: usize, R>(
        &self,
        tensors: [&Tensor; N],
        f: impl FnOnce([CudaPart<'static>; N]) -> Result<R>,
    ) -> Result<R> {
        let storages = tensors.map(Tensor::storage_and_layout);
        let mut parts = Vec::with_capacity(N);
        for (storage, layout) in &storages {
            let storage = on_cuda(storage).map_err(refused)?;
            parts.push(self.part(storage, layout, false)?);
        }
        let mut parts = parts.into_iter();
        f(std::array::from_fn(|_| {
            parts.next().expect("one for each tensor")
        }))
    }
}

/// Creates a tensor without gradient from device memory.
pub(crate) fn tensor(storage: CudaStorage, shape: &Shape) -> Tensor {
    Tensor::from_storage(
        Storage::Cuda(storage),
        shape.clone(),
        BackpropOp::none(),
        false,
    )
}
