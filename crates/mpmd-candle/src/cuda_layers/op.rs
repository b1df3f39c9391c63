//! Operations of candle on CUDA devices with mpmd's kernels.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor,
    bail,
};
use mpmd_core::cuda::CudaPart;

use crate::cuda::OnCuda;
use crate::pass;

/// An operation on `N` contiguous tensors of a CUDA device.
pub(super) trait CudaLayer<const N: usize>: Send + Sync + 'static {
    const NAME: &'static str;

    /// Issues the forward pass. Returns the memory and shape of the result.
    fn forward(&self, x: [LayerArgument<'_>; N]) -> Result<(CudaStorage, Shape)>;

    /// Issues the backward pass for the contiguous gradient of the result `y`. Returns the
    /// gradients of the arguments.
    fn backward(
        &self,
        x: [&Tensor; N],
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; N]>;
}

/// An argument of a forward pass.
#[derive(Clone, Copy)]
pub(super) struct LayerArgument<'a> {
    pub(super) storage: &'a CudaStorage,
    pub(super) layout: &'a Layout,
}

impl LayerArgument<'_> {
    /// Returns the elements, for mpmd's kernels.
    pub(super) fn part(&self, on: &OnCuda<'_>) -> mpmd_core::Result<CudaPart<'static>> {
        on.part(self.storage, self.layout, false)
    }
}

/// A [`CudaLayer`] as a custom operation of candle.
pub(super) struct LayerOp<T>(pub(super) T);

fn on_the_cpu<T>() -> Result<T> {
    bail!("a layer of a CUDA device on the CPU")
}

impl<T: CudaLayer<1>> CustomOp1 for LayerOp<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        on_the_cpu()
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.0.forward([LayerArgument { storage, layout }])
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [d_x] = self.0.backward([x], y, &gradient.contiguous()?)?;
        Ok(d_x)
    }
}

impl<T: CudaLayer<2>> CustomOp2 for LayerOp<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        on_the_cpu()
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        a_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let argument = |storage, layout| LayerArgument { storage, layout };
        self.0
            .forward([argument(a, a_layout), argument(b, b_layout)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [d_a, d_b] = self.0.backward([a, b], y, &gradient.contiguous()?)?;
        Ok((d_a, d_b))
    }
}

impl<T: CudaLayer<3>> CustomOp3 for LayerOp<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        on_the_cpu()
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        a_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
        c: &CudaStorage,
        c_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let argument = |storage, layout| LayerArgument { storage, layout };
        self.0.forward([
            argument(a, a_layout),
            argument(b, b_layout),
            argument(c, c_layout),
        ])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [d_a, d_b, d_c] = self.0.backward([a, b, c], y, &gradient.contiguous()?)?;
        Ok((d_a, d_b, d_c))
    }
}

/// Returns true if mpmd's kernels can compute with these tensors. The thread must be in a pass on a
/// CUDA device, and all tensors must be there, all f32 or all bf16.
pub(super) fn fit(tensors: &[&Tensor]) -> bool {
    let dtype = tensors.first().map(|tensor| tensor.dtype());
    matches!(dtype, Some(DType::F32 | DType::BF16))
        && tensors
            .iter()
            .all(|x| Some(x.dtype()) == dtype && x.device().is_cuda())
        && pass::with_cuda(|_| ()).is_some()
}

/// Calls `f` with the CUDA device of this thread's pass. Fails outside of such a pass.
pub(super) fn issue<R>(f: impl FnOnce(&OnCuda<'_>) -> mpmd_core::Result<R>) -> Result<R> {
    match pass::with_cuda(f) {
        Some(issued) => issued.map_err(candle_core::Error::wrap),
        None => bail!("a layer of a CUDA device outside of its pass"),
    }
}
