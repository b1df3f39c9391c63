//! The gradients of parameters on a CUDA device.

use candle_core::{DType, Result, Shape, Tensor, bail};
use mpmd_core::cuda::CudaPart;
use mpmd_core::cuda::layers::{ResultTarget, add_to};
use mpmd_core::kernel::ViewMut;

use super::OnCuda;
use super::tensors::tensor;

/// A parameter's gradient on a CUDA device, to which layers add.
pub(crate) enum DeviceGradient<'a> {
    /// The memory of an array that holds the gradient.
    Part(&'a OnCuda<'a>, CudaPart<'a>),
    /// A tensor of the parameter's shape, if no pass collects the gradient. `None` stands for
    /// zeros.
    Tensor(Option<&'a OnCuda<'a>>, Option<Tensor>, Shape),
}

impl OnCuda<'_> {
    /// Returns the output `view` as the gradient of a parameter.
    pub(crate) fn gradient<'g>(&'g self, view: &'g mut ViewMut<'_>) -> DeviceGradient<'g> {
        DeviceGradient::Part(self, view.into())
    }
}

impl DeviceGradient<'_> {
    /// Adds `more`, the gradient of one use of the parameter, in the parameter's shape.
    pub(crate) fn add(&mut self, more: &Tensor) -> Result<()> {
        match self {
            Self::Part(on, sums) => on.add_to(more, *sums).map_err(candle_core::Error::wrap),
            Self::Tensor(_, sum, _) => {
                *sum = Some(match sum.take() {
                    Some(sum) => (sum + more)?,
                    None => more.clone(),
                });
                Ok(())
            }
        }
    }

    /// Adds `d_yᵀ x`, the gradient of a linear layer's weight. With `group`, adds it at this index
    /// of the gradient's first dimension. `d_y` is `[rows, outputs]` and `x` is `[rows, inputs]`,
    /// both contiguous.
    pub(crate) fn add_product(
        &mut self,
        d_y: &Tensor,
        x: &Tensor,
        group: Option<usize>,
    ) -> Result<()> {
        match self {
            Self::Part(on, sums) => {
                let size = d_y.dim(1)? * x.dim(1)?;
                let sums = sums.at(group.unwrap_or(0) * size);

                let added = match d_y.dtype() {
                    DType::F32 | DType::BF16 => on.add_product(d_y, x, sums),
                    _ => on.add_to(&d_y.t()?.matmul(x)?.to_dtype(DType::F32)?, sums),
                };
                added.map_err(candle_core::Error::wrap)
            }
            Self::Tensor(_, _, shape) => {
                let more = d_y.t()?.matmul(x)?;
                let Some(group) = group else {
                    return self.add(&more);
                };

                let behind = shape.dims()[0] - group - 1;
                self.add(&more.unsqueeze(0)?.pad_with_zeros(0, group, behind)?)
            }
        }
    }

    /// Adds the gradient of one use of the parameter, which `work` computes in f32.
    pub(crate) fn add_by(
        &mut self,
        work: impl FnOnce(&OnCuda<'_>, ResultTarget<'_>) -> mpmd_core::Result<()>,
    ) -> Result<()> {
        match self {
            Self::Part(on, sums) => work(on, add_to(*sums)).map_err(candle_core::Error::wrap),
            Self::Tensor(on, _, shape) => {
                let on = *on;
                let shape = shape.clone();
                let Some(on) = on else {
                    bail!("a gradient on a CUDA device outside of a pass")
                };
                let more = on.made(&shape, DType::F32, |part| work(on, part.into()));
                let more = more.map_err(candle_core::Error::wrap)?;
                self.add(&tensor(more, &shape))
            }
        }
    }
}
