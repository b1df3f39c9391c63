//! Copies between views and tensors within a device.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, InplaceOp1, Layout, Shape, Storage, StorageRef, Tensor, bail,
};
use mpmd_core::cuda::{CudaPart, Grid};
use mpmd_core::kernel::{View, ViewMut};
use mpmd_core::{Error, Result};
use mpmd_device::cuda::kernels::ADD;
use mpmd_layout::aval::DType;

use super::OnCuda;
use crate::dtypes::{array_type, candle_type, refused};

impl OnCuda<'_> {
    /// Copies the view's values to a new tensor, a variable if `is_variable` is true.
    pub(crate) fn tensor_of(&self, view: &View<'_>, is_variable: bool) -> Result<Tensor> {
        let shape = Shape::from(view.shape());
        let dtype = candle_type(view.global().dtype())?;
        let storage = self.uninitialized(&shape, dtype).map_err(refused)?;

        self.kernels().copy(
            view,
            self.part(&storage, &Layout::contiguous(&shape), true)?,
        )?;
        Ok(Tensor::from_storage(
            Storage::Cuda(storage),
            shape,
            BackpropOp::none(),
            is_variable,
        ))
    }

    /// Overwrites a tensor, which may be a variable, with the view's values.
    pub(crate) fn refresh(&self, tensor: &Tensor, view: &View<'_>) -> Result<()> {
        tensor
            .inplace_op1(&DeviceOverwrite { on: self, view })
            .map_err(refused)
    }

    /// Copies the tensor's values to the view, which has the same shape and dtype.
    pub(crate) fn write(&self, tensor: &Tensor, view: &mut ViewMut<'_>) -> Result<()> {
        self.with_values(tensor, |values| self.kernels().copy(values, view))
    }

    /// Adds the tensor's values to the view's values. Both have the same shape and dtype.
    pub(crate) fn add(&self, tensor: &Tensor, view: &mut ViewMut<'_>) -> Result<()> {
        self.add_to(tensor, view.into())
    }

    /// Adds the tensor's values to `sums`.
    pub(crate) fn add_to(&self, tensor: &Tensor, sums: CudaPart<'_>) -> Result<()> {
        let function = match array_type(tensor.dtype())? {
            DType::F32 => "add_f32",
            DType::F64 => "add_f64",
            DType::F16 => "add_f16",
            DType::Bf16 => "add_bf16",
            other => {
                return Err(Error::kernel(format!(
                    "parameters of dtype {other} have no gradient"
                )));
            }
        };

        let count = tensor.elem_count();
        self.with_values(tensor, |values| {
            let args = [count.into(), sums.into(), values.into()];
            self.kernels()
                .launch(&ADD, function, Grid::over(count), &args)
        })
    }

    /// Calls `f` with the tensor's values, row-major.
    pub(crate) fn with_values<R>(
        &self,
        tensor: &Tensor,
        f: impl FnOnce(CudaPart<'_>) -> Result<R>,
    ) -> Result<R> {
        let tensor = tensor.contiguous().map_err(refused)?;
        let (storage, layout) = tensor.storage_and_layout();
        f(self.part(on_cuda(&storage).map_err(refused)?, layout, false)?)
    }

    /// Calls `f` with the memory from the tensor's first element to its last. The tensor's strides
    /// are offsets in this memory.
    pub(crate) fn with_rest<R>(
        &self,
        tensor: &Tensor,
        f: impl FnOnce(CudaPart<'static>) -> Result<R>,
    ) -> Result<R> {
        let (storage, layout) = tensor.storage_and_layout();
        let storage = on_cuda(&storage).map_err(refused)?;
        let count = tensor.dims().iter().zip(tensor.stride());
        let last: usize = count
            .map(|(size, stride)| size.saturating_sub(1) * stride)
            .sum();
        let rest = Layout::contiguous_with_offset(last + 1, layout.start_offset());
        f(self.part(storage, &rest, false)?)
    }

    /// Allocates device memory for a tensor, with arbitrary values.
    pub(crate) fn uninitialized(
        &self,
        shape: &Shape,
        dtype: candle_core::DType,
    ) -> candle_core::Result<CudaStorage> {
        // SAFETY: the caller issues work that fills it before work that reads it.
        unsafe { self.device.alloc_uninit(shape, dtype) }
    }

    /// Returns the elements of a contiguous tensor for mpmd's kernels.
    pub(crate) fn part(
        &self,
        storage: &CudaStorage,
        layout: &Layout,
        is_writable: bool,
    ) -> Result<CudaPart<'static>> {
        let dtype = array_type(storage.dtype())?;
        let Some((from, to)) = layout.contiguous_offsets() else {
            return Err(Error::kernel(format!(
                "the tensor is not contiguous: {layout:?}"
            )));
        };

        let address = address_of(storage)? + (from * dtype.size()) as u64;
        Ok(CudaPart::foreign(
            &self.compute,
            address,
            dtype,
            to - from,
            is_writable,
        ))
    }
}

/// Returns the CUDA storage of a tensor. Fails if the tensor is not on a CUDA device.
pub(crate) fn on_cuda<'s>(storage: &'s StorageRef<'_>) -> candle_core::Result<&'s CudaStorage> {
    match &**storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("a tensor of a pass on a CUDA device is not on that device"),
    }
}

/// Returns the address of a storage's first element.
fn address_of(storage: &CudaStorage) -> Result<u64> {
    let stream = storage.device.cuda_stream();
    macro_rules! address {
        ($($variant:ident),+) => {
            match &storage.slice {
                $(CudaStorageSlice::$variant(values) => Ok(values.device_ptr(&stream).0),)+
                _ => Err(Error::kernel("a tensor of a dtype without arrays")),
            }
        };
    }
    address!(U8, U32, I16, I32, I64, BF16, F16, F32, F64)
}

/// The operation that overwrites a contiguous tensor with the values of `view`.
struct DeviceOverwrite<'a> {
    on: &'a OnCuda<'a>,
    view: &'a View<'a>,
}

impl InplaceOp1 for DeviceOverwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        bail!("a parameter of a CUDA device is in host memory")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let place = self.on.part(storage, layout, true);
        let copied = place.and_then(|place| self.on.kernels().copy(self.view, place));
        copied.map_err(candle_core::Error::wrap)
    }
}
