//! Layer norm and RMS norm: scale each row to variance 1, then scale and shift each column.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor, bail};
pub use candle_nn::LayerNormConfig;
use candle_nn::{Init, Module, VarBuilder};

use super::values::{
    add_columns, are_fast, bias_gradient, for_rows, in_layer, name_of, result, single, slice,
    tensor_like, values,
};
use crate::cuda_layers;
use crate::pass::weight_gradient;
use mpmd_device::cpu::rows::norm::{self, Norm, RowStatistics};

/// A layer that scales each row to mean 0 and variance 1, then scales and shifts each column.
/// Without `remove_mean` it keeps the mean and scales to mean square 1.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
    name: Option<String>,
}

impl LayerNorm {
    /// Creates a layer from the scale `[width]` and the shift `[width]` of each column. `eps` is
    /// added to the variance.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self {
            weight,
            bias: Some(bias),
            remove_mean: true,
            eps,
            name: None,
        }
    }

    /// Creates a layer from the scale `[width]` of each column. `eps` is added to the variance.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self {
            weight,
            bias: None,
            remove_mean: true,
            eps,
            name: None,
        }
    }

    /// Creates a layer that keeps the mean, from the scale `[width]` of each column. `eps` is added
    /// to the mean square.
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self {
            weight,
            bias: None,
            remove_mean: false,
            eps,
            name: None,
        }
    }

    /// Returns the scale of each column: `[width]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the shift of each column: `[width]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the number added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Returns true if the layer subtracts the mean of each row.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let norm = RowNorm {
            remove_mean: self.remove_mean,
            eps: self.eps,
        };
        in_layer(
            self.name.as_deref(),
            norm.apply(x, &self.weight, self.bias.as_ref()),
        )
    }
}

/// Creates a layer norm with the variables `weight` and, if the norm is affine, `bias`. Reads
/// `gamma` and `beta` if only these exist.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn layer_norm<C: Into<LayerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<LayerNorm> {
    let LayerNormConfig {
        eps,
        remove_mean,
        affine,
    } = config.into();

    let variable = |name: &str, old: &str, value| {
        let is_old = !vb.contains_tensor(name) && vb.contains_tensor(old);
        vb.get_with_hints(size, if is_old { old } else { name }, Init::Const(value))
    };
    let weight = variable("weight", "gamma", 1.0)?;
    let bias = if affine {
        Some(variable("bias", "beta", 0.0)?)
    } else {
        None
    };

    Ok(LayerNorm {
        weight,
        bias,
        remove_mean,
        eps,
        name: name_of(&vb),
    })
}

/// Creates a layer norm with the variable `weight`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    layer_norm(
        size,
        LayerNormConfig {
            eps,
            remove_mean: true,
            affine: false,
        },
        vb,
    )
}

/// A layer that scales each row to mean square 1, then scales each column.
#[derive(Clone, Debug)]
pub struct RmsNorm(LayerNorm);

impl RmsNorm {
    /// Creates a layer from the scale `[width]` of each column. `eps` is added to the mean square.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self(LayerNorm::rms_norm(weight, eps))
    }

    /// Returns the layer as a [`LayerNorm`] that keeps the mean.
    pub fn into_inner(self) -> LayerNorm {
        self.0
    }

    /// Returns the scale of each column: `[width]`.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// Returns the number added to the mean square.
    pub fn eps(&self) -> f64 {
        self.0.eps()
    }

    /// Does the same as `forward`. In `candle_nn` only `forward_diff` has a gradient; here both
    /// have one.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit each other.
    pub fn forward_diff(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}

impl Module for RmsNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}

/// Creates an RMS norm with the variable `weight`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    let config = LayerNormConfig {
        eps,
        remove_mean: false,
        affine: false,
    };
    Ok(RmsNorm(layer_norm(size, config, vb)?))
}

/// The operation that normalises rows.
#[derive(Clone, Copy)]
pub(super) struct RowNorm {
    pub(super) remove_mean: bool,
    pub(super) eps: f64,
}

impl RowNorm {
    /// Normalises the rows of `x` `[..., width]`. `weight` and `bias` are `[width]`.
    pub(super) fn apply(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let width = weight.dims1()?;
        if x.dims().last() != Some(&width) || width == 0 {
            bail!("the input is {:?}: expected [..., {width}]", x.dims());
        }
        if let Some(bias) = bias
            && bias.dims() != [width]
        {
            bail!("the bias is {:?}: expected [{width}]", bias.dims());
        }

        if let Some(y) = cuda_layers::norm(x, weight, bias, self.remove_mean, self.eps) {
            return y;
        }
        if are_fast(&[x, weight]) && bias.is_none_or(|bias| are_fast(&[bias])) {
            let x = x.contiguous()?;
            let weight = weight.contiguous()?;
            return match bias {
                None => x.apply_op2(&weight, *self),
                Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, *self),
            };
        }

        self.compose(x, weight, bias)
    }

    /// Does the same as `apply` with operations of candle.
    fn compose(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let dtype = x.dtype();
        let x = single(x)?;
        let x = match self.remove_mean {
            true => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
            false => x,
        };
        let variance = x.sqr()?.mean_keepdim(D::Minus1)?;
        let x = x.broadcast_div(&(variance + self.eps)?.sqrt()?)?;

        let mut x = x.broadcast_mul(&single(weight)?)?;
        if let Some(bias) = bias {
            x = x.broadcast_add(&single(bias)?)?;
        }
        x.to_dtype(dtype)
    }

    /// Returns the norm of the kernels on the CPU.
    fn on_cpu(&self) -> Norm {
        Norm {
            remove_mean: self.remove_mean,
            eps: self.eps as f32,
        }
    }

    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let width = weight.len();
        let kernel = self.on_cpu();
        let mut out = vec![0.0; x.len()];
        for_rows(&mut out, width, |first, out| {
            let rows = x[first * width..].chunks_exact(width);
            for (out, x) in out.chunks_exact_mut(width).zip(rows) {
                norm::forward(kernel, x, weight, bias, out);
            }
        });
        out
    }

    /// Returns the gradients of the input and of the weight.
    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let statistics: Arc<[RowStatistics]> = {
            let x = values(x)?;
            let width = weight.elem_count();
            x.chunks_exact(width)
                .map(|row| norm::statistics(self.on_cpu(), row))
                .collect()
        };

        let d_x = if x.track_op() {
            let d_x = self.backward_input(
                &values(x)?,
                &values(weight)?,
                &values(gradient)?,
                &statistics,
            );
            Some(tensor_like(d_x, x)?)
        } else {
            None
        };

        let x = x.detach();
        let gradient = gradient.clone();
        let d_weight = weight_gradient(weight, move |into| {
            let x = values(&x)?;
            let gradient = values(&gradient)?;
            let width = into.len();
            add_columns(into, statistics.len(), |row, at, sums| {
                let columns = row * width + at..row * width + at + sums.len();
                let (x, d) = (&x[columns.clone()], &gradient[columns]);
                norm::add_weight_gradient(statistics[row], x, d, sums);
            });
            Ok(())
        })?;

        Ok((d_x, d_weight))
    }

    fn backward_input(
        &self,
        x: &[f32],
        weight: &[f32],
        gradient: &[f32],
        statistics: &[RowStatistics],
    ) -> Vec<f32> {
        let width = weight.len();
        let kernel = self.on_cpu();
        let mut d_x = vec![0.0; x.len()];
        for_rows(&mut d_x, width, |first, d_x| {
            let x = &x[first * width..];
            let gradient = &gradient[first * width..];

            let rows = x.chunks_exact(width).zip(gradient.chunks_exact(width));
            let rows = d_x
                .chunks_exact_mut(width)
                .zip(rows)
                .zip(&statistics[first..]);
            for ((d_x, (x, gradient)), statistics) in rows {
                norm::input_gradient(kernel, *statistics, x, weight, gradient, d_x);
            }
        });
        d_x
    }
}

impl CustomOp2 for RowNorm {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let y = self.forward(&slice(x, x_layout)?, &slice(weight, weight_layout)?, None);
        result(y, x_layout.shape(), x)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.backward(x, weight, &gradient.contiguous()?)
    }
}

impl CustomOp3 for RowNorm {
    fn name(&self) -> &'static str {
        "norm with bias"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let weight = slice(weight, weight_layout)?;
        let bias = slice(bias, bias_layout)?;
        let y = self.forward(&slice(x, x_layout)?, &weight, Some(&bias));
        result(y, x_layout.shape(), x)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let (d_x, d_weight) = self.backward(x, weight, &gradient)?;
        Ok((d_x, d_weight, bias_gradient(bias, gradient)?))
    }
}
