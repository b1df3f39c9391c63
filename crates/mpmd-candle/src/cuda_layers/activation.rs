//! Activation functions.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result, Shape, Tensor};
use mpmd_core::cuda::layers::{self, ActivationCurve, MatrixShape};

use super::op::{CudaLayer, LayerArgument, LayerOp, fit, issue};

/// Applies an activation function to each element. Returns `None` if mpmd's kernels cannot.
pub(crate) fn activate(x: &Tensor, curve: ActivationCurve) -> Option<Result<Tensor>> {
    fit(&[x]).then(|| x.contiguous()?.apply_op1(LayerOp(CudaActivation(curve))))
}

/// The operation that applies an activation function. It saves nothing for the backward pass.
struct CudaActivation(ActivationCurve);

impl CudaLayer<1> for CudaActivation {
    const NAME: &'static str = "activation";

    fn forward(&self, [x]: [LayerArgument<'_>; 1]) -> Result<(CudaStorage, Shape)> {
        let shape = x.layout.shape().clone();
        let size = MatrixShape::new(1, shape.elem_count());
        let y = issue(|on| {
            on.made(&shape, x.storage.dtype(), |y| {
                layers::activate(&on.kernels(), self.0, size, x.part(on)?, None, y)
            })
        })?;
        Ok((y, shape))
    }

    fn backward(
        &self,
        [x]: [&Tensor; 1],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        let size = MatrixShape::new(1, x.elem_count());
        let d_x = issue(|on| {
            on.tensor_like(x, |d_x| {
                on.with([x, gradient], |[x, d_y]| {
                    layers::activate_backward(&on.kernels(), self.0, size, x, None, d_y, d_x)
                })
            })
        })?;
        Ok([Some(d_x)])
    }
}
