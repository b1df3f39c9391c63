//! Layer norm and RMS norm.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, Shape, Tensor, bail};
use mpmd_core::cuda::layers;

use super::linear::bias_gradient;
use super::op::{CudaLayer, LayerArgument, LayerOp, fit, issue};
use crate::cuda::tensor;
use crate::pass::device_gradient;

/// Normalises the rows of `x` `[..., width]`. `weight` and `bias` are `[width]`.
pub(crate) fn norm(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    remove_mean: bool,
    eps: f64,
) -> Option<Result<Tensor>> {
    if !fit(&[x, weight]) || bias.is_some_and(|bias| !fit(&[x, bias])) {
        return None;
    }

    let width = weight.elem_count();
    let rows = x.elem_count() / width.max(1);
    let sizes = layers::CudaNorm {
        rows,
        width,
        eps: eps as f32,
        remove_mean,
    };

    let operation = LayerOp(CudaRowNorm {
        sizes,
        statistics: OnceLock::new(),
    });

    let compute = || {
        let x = x.contiguous()?;
        let weight = weight.contiguous()?;
        match bias {
            None => x.apply_op2(&weight, operation),
            Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, operation),
        }
    };
    Some(compute())
}

/// The operation that normalises rows.
struct CudaRowNorm {
    sizes: layers::CudaNorm,
    /// Two numbers for each row, which the forward pass saves for the backward pass.
    statistics: OnceLock<Tensor>,
}

impl CudaRowNorm {
    fn rows(
        &self,
        x: LayerArgument<'_>,
        weight: LayerArgument<'_>,
        bias: Option<LayerArgument<'_>>,
    ) -> Result<(CudaStorage, Shape)> {
        let shape = x.layout.shape().clone();
        let kept = Shape::from((self.sizes.rows, 2));
        let mut statistics = None;

        let y = issue(|on| {
            on.made(&shape, x.storage.dtype(), |y| {
                let bias = bias.map(|bias| bias.part(on)).transpose()?;
                let weight = weight.part(on)?;
                let forward = |into| {
                    self.sizes
                        .forward(&on.kernels(), x.part(on)?, weight, bias, y, into)
                };
                statistics = Some(on.made(&kept, DType::F32, forward)?);
                Ok(())
            })
        })?;

        if let Some(statistics) = statistics {
            self.statistics.get_or_init(|| tensor(statistics, &kept));
        }
        Ok((y, shape))
    }

    /// Returns the gradients of input and weight. The weight's is `None` if a pass adds or defers
    /// it.
    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(statistics) = self.statistics.get() else {
            bail!("a norm's backward pass before its forward pass");
        };

        let sizes = self.sizes;
        let d_x = match x.track_op() {
            true => Some(issue(|on| {
                on.tensor_like(x, |d_x| {
                    on.with(
                        [x, weight, gradient, statistics],
                        |[x, weight, d_y, statistics]| {
                            sizes.backward(&on.kernels(), x, weight, d_y, statistics, d_x)
                        },
                    )
                })
            })?),
            false => None,
        };

        let x = x.detach();
        let gradient = gradient.clone();
        let statistics = statistics.clone();

        let d_weight = device_gradient(weight, move |into| {
            into.add_by(|on, sums| {
                on.with([&x, &gradient, &statistics], |[x, d_y, statistics]| {
                    sizes.backward_weight(&on.kernels(), x, d_y, statistics, sums, None)
                })
            })
        })?;
        Ok((d_x, d_weight))
    }
}

impl CudaLayer<2> for CudaRowNorm {
    const NAME: &'static str = "norm";

    fn forward(&self, [x, weight]: [LayerArgument<'_>; 2]) -> Result<(CudaStorage, Shape)> {
        self.rows(x, weight, None)
    }

    fn backward(
        &self,
        [x, weight]: [&Tensor; 2],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 2]> {
        let (d_x, d_weight) = self.gradients(x, weight, gradient)?;
        Ok([d_x, d_weight])
    }
}

impl CudaLayer<3> for CudaRowNorm {
    const NAME: &'static str = "norm with bias";

    fn forward(&self, [x, weight, bias]: [LayerArgument<'_>; 3]) -> Result<(CudaStorage, Shape)> {
        self.rows(x, weight, Some(bias))
    }

    fn backward(
        &self,
        [x, weight, bias]: [&Tensor; 3],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let (d_x, d_weight) = self.gradients(x, weight, gradient)?;
        Ok([d_x, d_weight, bias_gradient(bias, gradient)?])
    }
}
