//! Softmax of rows, and its logarithm.

use candle_core::shape::Dim;
use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor};

use super::values::{
    TensorValues, are_fast, exact, for_rows, result, single, slice, tensor_like, values,
};
use crate::cuda_layers;
use mpmd_device::cpu::rows;

/// Computes the softmax along dimension `dim`.
///
/// # Errors
///
/// If there is no such dimension.
pub fn softmax<D: Dim>(xs: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(xs.shape(), "softmax")?;
    along(xs, dim, RowSoftmax { is_log: false }, |xs| {
        candle_nn::ops::softmax(xs, dim)
    })
}

/// Computes the softmax of each row.
///
/// # Errors
///
/// If the input has no dimension.
pub fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    softmax(xs, D::Minus1)
}

/// Computes the logarithm of the softmax along dimension `d`.
///
/// # Errors
///
/// If there is no such dimension.
pub fn log_softmax<D: Dim>(xs: &Tensor, d: D) -> Result<Tensor> {
    let dim = d.to_index(xs.shape(), "log-softmax")?;
    along(xs, dim, RowSoftmax { is_log: true }, |xs| {
        candle_nn::ops::log_softmax(xs, dim)
    })
}

/// Applies the kernel `rows` if `dim` is the last dimension and the kernel can take `xs`. Else
/// calls `compose`. Returns an empty tensor unchanged, since candle has no maximum of an empty
/// tensor.
fn along(
    xs: &Tensor,
    dim: usize,
    rows: RowSoftmax,
    compose: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if xs.elem_count() == 0 {
        return Ok(xs.clone());
    }
    if dim + 1 == xs.rank()
        && let Some(y) = cuda_layers::softmax(xs, rows.is_log)
    {
        return y;
    }

    if are_fast(&[xs]) && dim + 1 == xs.rank() {
        return xs.contiguous()?.apply_op1(rows);
    }
    compose(&single(xs)?)?.to_dtype(xs.dtype())
}

/// The operation that computes the softmax of rows, or its logarithm. The backward pass needs only
/// the result.
struct RowSoftmax {
    is_log: bool,
}

impl RowSoftmax {
    fn forward(&self, x: &[f32], width: usize) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        for_rows(&mut out, width, |first, out| {
            let rows = x[first * width..].chunks_exact(width);
            for (out, x) in out.chunks_exact_mut(width).zip(rows) {
                rows::softmax::softmax(x, self.is_log, out);
            }
        });
        out
    }
}

impl CustomOp1 for RowSoftmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        result(
            self.forward(&slice(x, layout)?, layout.dim(D::Minus1)?),
            layout.shape(),
            x,
        )
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        let width = x.dim(D::Minus1)?;
        let mut d_x = vec![0.0; x.elem_count()];
        {
            // The sum of a row of rounded halves is not 1.
            let y = match exact(y)? {
                Some(y) => y,
                None => TensorValues::Copied(self.forward(&values(x)?, width)),
            };
            let y: &[f32] = &y;
            let gradient: &[f32] = &values(&gradient)?;
            for_rows(&mut d_x, width, |first, d_x| {
                let rows = y[first * width..].chunks_exact(width);
                let rows = rows.zip(gradient[first * width..].chunks_exact(width));
                for (d_x, (y, d)) in d_x.chunks_exact_mut(width).zip(rows) {
                    rows::softmax::softmax_gradient(y, d, self.is_log, d_x);
                }
            });
        }
        tensor_like(d_x, x).map(Some)
    }
}
