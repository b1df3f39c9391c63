//! Softmax, dropout and rotary embeddings: operations that keep no more than their arguments.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, D, DType, Result, Shape, Tensor};
use mpmd_core::cuda::CudaPart;
use mpmd_core::cuda::layers::{self, Heads, MatrixShape, RotaryAngles};
use mpmd_layout::random::Key;

use super::op::{CudaLayer, LayerArgument, LayerOp, fit, issue};
use crate::cuda::OnCuda;

/// Computes the softmax of each row, or its logarithm.
pub(crate) fn softmax(x: &Tensor, is_log: bool) -> Option<Result<Tensor>> {
    fit(&[x]).then(|| x.contiguous()?.apply_op1(LayerOp(CudaSoftmax { is_log })))
}

/// Sets each element to zero with the probability `drop_p`, and scales the others. A key drops the
/// same elements as on the CPU.
pub(crate) fn dropout(x: &Tensor, key: Key, drop_p: f32) -> Option<Result<Tensor>> {
    fit(&[x]).then(|| {
        x.contiguous()?
            .apply_op1(LayerOp(CudaDropout { key, drop_p }))
    })
}

/// Rotates the pairs `(i, i + dim / 2)` of the rows of `x` `[batch, time, heads, dim]`. `cos` and
/// `sin` are `[batch or 1, time, dim / 2]`.
pub(crate) fn rotary(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Option<Result<Tensor>> {
    let is_fixed = |angles: &Tensor| angles.device().is_cuda() && !angles.track_op();
    if !fit(&[x]) || !is_fixed(cos) || !is_fixed(sin) || cos.dims() != sin.dims() {
        return None;
    }
    let table = |angles: &Tensor| angles.to_dtype(DType::F32)?.contiguous();
    let rotate = || {
        x.contiguous()?.apply_op1(LayerOp(CudaRotation {
            cos: table(cos)?,
            sin: table(sin)?,
        }))
    };
    Some(rotate())
}

struct CudaSoftmax {
    is_log: bool,
}

impl CudaLayer<1> for CudaSoftmax {
    const NAME: &'static str = "softmax";

    fn forward(&self, [x]: [LayerArgument<'_>; 1]) -> Result<(CudaStorage, Shape)> {
        let width = x.layout.dim(D::Minus1)?;
        let size = MatrixShape::new(x.layout.shape().elem_count() / width.max(1), width);
        map(x, |on, x, y| {
            layers::softmax(&on.kernels(), size, self.is_log, x, y)
        })
    }

    fn backward(
        &self,
        [x]: [&Tensor; 1],
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        let width = x.dim(D::Minus1)?;
        let size = MatrixShape::new(x.elem_count() / width.max(1), width);

        let d_x = issue(|on| {
            on.tensor_like(x, |d_x| {
                on.with([y, gradient], |[y, d_y]| {
                    layers::softmax_backward(&on.kernels(), size, self.is_log, y, d_y, d_x)
                })
            })
        })?;
        Ok([Some(d_x)])
    }
}

struct CudaDropout {
    key: Key,
    drop_p: f32,
}

impl CudaDropout {
    fn run(
        &self,
        on: &OnCuda<'_>,
        elements: usize,
        x: CudaPart<'static>,
        y: CudaPart<'static>,
    ) -> mpmd_core::Result<()> {
        layers::dropout(&on.kernels(), elements, self.key, self.drop_p, x, y)
    }
}

impl CudaLayer<1> for CudaDropout {
    const NAME: &'static str = "dropout";

    fn forward(&self, [x]: [LayerArgument<'_>; 1]) -> Result<(CudaStorage, Shape)> {
        let elements = x.layout.shape().elem_count();
        map(x, |on, x, y| self.run(on, elements, x, y))
    }

    fn backward(
        &self,
        [x]: [&Tensor; 1],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        back(x, gradient, |on, d_y, d_x| {
            self.run(on, x.elem_count(), d_y, d_x)
        })
    }
}

struct CudaRotation {
    cos: Tensor,
    sin: Tensor,
}

impl CudaRotation {
    fn run(
        &self,
        on: &OnCuda<'_>,
        dims: &[usize],
        is_back: bool,
        [x, y]: [CudaPart<'static>; 2],
    ) -> mpmd_core::Result<()> {
        let [batch, time, heads, dim] = [0, 1, 2, 3].map(|at| dims[at]);
        let angles = RotaryAngles::ByTime(if self.cos.dims()[0] == 1 { 0 } else { time });
        let rotary = layers::Rotary {
            batch,
            time,
            heads,
            dim,
            beside: false,
            angles,
        };

        let [x, y] = [x, y].map(|part| Heads::new(part, [time * heads * dim, heads * dim, dim]));
        on.with([&self.cos, &self.sin], |tables| {
            rotary.rotate(&on.kernels(), is_back, x, tables, y)
        })
    }
}

impl CudaLayer<1> for CudaRotation {
    const NAME: &'static str = "rotary embedding";

    fn forward(&self, [x]: [LayerArgument<'_>; 1]) -> Result<(CudaStorage, Shape)> {
        let dims = x.layout.dims().to_vec();
        map(x, |on, x, y| self.run(on, &dims, false, [x, y]))
    }

    fn backward(
        &self,
        [x]: [&Tensor; 1],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        back(x, gradient, |on, d_y, d_x| {
            self.run(on, x.dims(), true, [d_y, d_x])
        })
    }
}

/// Creates a result with the shape and dtype of `x`, which `fill` writes.
fn map(
    x: LayerArgument<'_>,
    fill: impl FnOnce(&OnCuda<'_>, CudaPart<'static>, CudaPart<'static>) -> mpmd_core::Result<()>,
) -> Result<(CudaStorage, Shape)> {
    let shape = x.layout.shape().clone();
    let y = issue(|on| on.made(&shape, x.storage.dtype(), |y| fill(on, x.part(on)?, y)))?;
    Ok((y, shape))
}

/// Creates the gradient of `x`, which `fill` computes from `gradient`, the gradient of the result.
fn back(
    x: &Tensor,
    gradient: &Tensor,
    fill: impl FnOnce(&OnCuda<'_>, CudaPart<'static>, CudaPart<'static>) -> mpmd_core::Result<()>,
) -> Result<[Option<Tensor>; 1]> {
    let d_x = issue(|on| on.tensor_like(x, |d_x| on.with([gradient], |[d_y]| fill(on, d_y, d_x))))?;
    Ok([Some(d_x)])
}
