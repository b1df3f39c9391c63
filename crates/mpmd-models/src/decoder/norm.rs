//! The norms of a decoder.

use mpmd::candle::candle_core::D;
use mpmd::candle::nn::{Init, LayerNorm, Module, VarBuilder, layer_norm, rms_norm};
use mpmd::candle::{Cx, Result, Tensor};

use crate::config::{self, ModelConfig};
use crate::decoder::devices::{self, DeviceDivision};

/// A layer norm or RMS norm over the last dimension.
pub(super) struct NormLayer {
    norm: LayerNorm,
    adds_one: bool,
    /// Number of elements in a row, summed over the devices that divide it.
    width: usize,
}

impl NormLayer {
    pub(super) fn new(config: &ModelConfig, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let norm = match config.norm {
            config::NormKind::Layer => layer_norm(width, config.norm_eps, vb)?,
            _ => rms_norm(width, config.norm_eps, vb)?.into_inner(),
        };
        Ok(Self {
            norm,
            adds_one: config.norm == config::NormKind::RmsPlusOne,
            width,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.adds_one {
            true => LayerNorm::rms_norm((self.norm.weight() + 1.0)?, self.norm.eps()).forward(x),
            false => self.norm.forward(x),
        }
    }

    /// Computes the norm of rows that differ between the devices along `axes`. Gradients of the
    /// weight are summed over these devices.
    pub(super) fn inside(&self, x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
        if axes.is_empty() {
            return self.forward(x);
        }
        let weight = devices::inside(self.norm.weight(), cx, axes)?;
        let norm = LayerNorm::rms_norm(weight, self.norm.eps());
        Self { norm, ..*self }.forward(x)
    }

    /// Computes the norm of rows that the devices along `axes` divide.
    pub(super) fn over(&self, x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
        if axes.is_empty() {
            return self.forward(x);
        }
        let sum = devices::sum(&x.sqr()?.sum_keepdim(D::Minus1)?, cx, axes)?;
        let mean = (devices::inside(&sum, cx, axes)? / self.width as f64)?;
        let x = x.broadcast_div(&(mean + self.norm.eps())?.sqrt()?)?;
        x.broadcast_mul(&(self.norm.weight() + if self.adds_one { 1.0 } else { 0.0 })?)
    }
}

/// Layer norms without bias over single heads. Each head has its own weight.
pub(super) struct HeadNorms {
    norm: LayerNorm,
    /// The weights, `[heads, head_dim]`.
    weights: Tensor,
}

impl HeadNorms {
    pub(super) fn new(config: &ModelConfig, heads: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let dim = config.head_dim;
        let weight = |head| vb.pp(head).get_with_hints(dim, "weight", Init::Const(1.0));
        let weights: Vec<Tensor> = (0..heads).map(weight).collect::<Result<_>>()?;
        let weights = Tensor::stack(&weights, 0)?;
        let norm = LayerNorm::new_no_bias(weights.get(0)?.ones_like()?, config.norm_eps);
        Ok(Self { norm, weights })
    }

    /// Computes the norms of this device's heads, `[batch, time, heads, head_dim]`. The devices
    /// along `axes` have different heads.
    pub(super) fn inside(
        &self,
        x: &Tensor,
        over: DeviceDivision,
        cx: &Cx<'_>,
        axes: &[&str],
    ) -> Result<Tensor> {
        let own = x.dim(2)?;
        let parts = self.weights.dim(0)? / own;
        // Several devices may have the same heads of keys.
        let first = over.place(cx)? * parts / over.parts() * own;
        let weights = devices::inside(&self.weights, cx, axes)?.narrow(0, first, own)?;
        self.norm.forward(x)?.broadcast_mul(&weights)
    }
}
