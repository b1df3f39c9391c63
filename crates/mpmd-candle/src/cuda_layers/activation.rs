//! Activation functions.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, Result, Shape, Tensor};
use mpmd_core::cuda::layers::{self, Curve};

use super::op::{Argument, Layer, Op, fit, issue};

/// Computes an activation function of each element.
pub(crate) fn activate(x: &Tensor, curve: Curve) -> Option<Result<Tensor>> {
    fit(&[x]).then(|| x.contiguous()?.apply_op1(Op(Activation(curve))))
}

/// The operation of an activation function. It keeps nothing.
struct Activation(Curve);

impl Layer<1> for Activation {
    const NAME: &'static str = "activation";

    fn forward(&self, [x]: [Argument<'_>; 1]) -> Result<(CudaStorage, Shape)> {
        let shape = x.layout.shape().clone();
        let size = (1, shape.elem_count());
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
        let size = (1, x.elem_count());
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
