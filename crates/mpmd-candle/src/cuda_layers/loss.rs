//! The cross-entropy.

use std::sync::OnceLock;

use candle_core::{CudaStorage, D, DType, Result, Shape, Tensor, bail};
use mpmd_core::cuda::CudaPart;
use mpmd_core::cuda::layers::CudaCrossEntropy;

use super::op::{CudaLayer, LayerArgument, LayerOp, fit, issue};
use crate::cuda::tensor;
use crate::cuda::{OnCuda, are_on_cuda};

/// Returns the sum of `weight * cross-entropy` over all rows, and the sum of the weights, both f32.
/// A target that is no class gives NaN.
pub(crate) fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    weights: Option<&Tensor>,
) -> Option<Result<(Tensor, Tensor)>> {
    let is_known = matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64);
    if !is_known || !fit(&[logits]) || !are_on_cuda(&[targets]) || !weights.is_none_or(is_on_cuda) {
        return None;
    }

    let compute = || {
        let flat = |x: &Tensor| x.detach().flatten_all()?.contiguous();
        let weights = weights
            .map(|weights| flat(&weights.to_dtype(DType::F32)?))
            .transpose()?;

        let loss = CudaLossSum {
            targets: flat(targets)?,
            weights,
            kept: OnceLock::new(),
        };

        let total = logits.contiguous()?.apply_op1(LayerOp(loss))?;
        Ok((total.get(0)?, total.detach().get(1)?))
    };
    Some(compute())
}

fn is_on_cuda(tensor: &Tensor) -> bool {
    are_on_cuda(&[tensor])
}

/// The operation that computes the sum of the weighted losses and the sum of the weights.
struct CudaLossSum {
    /// The class of each row.
    targets: Tensor,
    weights: Option<Tensor>,
    /// Two numbers for each row of logits, which the forward pass keeps for the backward pass.
    kept: OnceLock<Tensor>,
}

impl CudaLossSum {
    /// Calls `f` with this loss over `classes` classes, in the form that mpmd's kernels take.
    fn with<R>(
        &self,
        on: &OnCuda<'_>,
        classes: usize,
        f: impl FnOnce(CudaCrossEntropy<'static>) -> mpmd_core::Result<R>,
    ) -> mpmd_core::Result<R> {
        let rows = self.targets.elem_count();
        let loss = |targets: CudaPart<'static>, weights| CudaCrossEntropy {
            rows,
            classes,
            targets,
            weights,
        };

        match &self.weights {
            None => on.with([&self.targets], |[targets]| f(loss(targets, None))),
            Some(weights) => on.with([&self.targets, weights], |[targets, weights]| {
                f(loss(targets, Some(weights)))
            }),
        }
    }
}

impl CudaLayer<1> for CudaLossSum {
    const NAME: &'static str = "cross-entropy";

    fn forward(&self, [logits]: [LayerArgument<'_>; 1]) -> Result<(CudaStorage, Shape)> {
        let classes = logits.layout.dim(D::Minus1)?;
        let shape = Shape::from(2);
        let kept = Shape::from((self.targets.elem_count(), 2));
        let mut normalizers = None;

        let total = issue(|on| {
            on.made(&shape, DType::F32, |total| {
                let forward = |into| {
                    let logits = logits.part(on)?;
                    self.with(on, classes, |loss| {
                        loss.forward(&on.kernels(), logits, total, into)
                    })
                };
                normalizers = Some(on.made(&kept, DType::F32, forward)?);
                Ok(())
            })
        })?;

        if let Some(normalizers) = normalizers {
            self.kept.get_or_init(|| tensor(normalizers, &kept));
        }
        Ok((total, shape))
    }

    fn backward(
        &self,
        [logits]: [&Tensor; 1],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        let Some(kept) = self.kept.get() else {
            bail!("the backward pass of a cross-entropy before its forward pass");
        };
        let classes = logits.dim(D::Minus1)?;

        let d_logits = issue(|on| {
            on.tensor_like(logits, |d_logits| {
                on.with([logits, kept, gradient], |[logits, kept, d_loss]| {
                    self.with(on, classes, |loss| {
                        let cuda = on.kernels();
                        loss.backward(&cuda, logits, kept, 1.0, Some(d_loss), d_logits)
                    })
                })
            })
        })?;
        Ok([Some(d_logits)])
    }
}
