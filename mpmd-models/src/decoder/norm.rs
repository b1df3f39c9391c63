//! The norms of a decoder.

use mpmd::candle::nn::{LayerNorm, Module, VarBuilder, layer_norm, rms_norm};
use mpmd::candle::{Result, Tensor};

use crate::config::{self, Config};

/// A norm of rows.
pub(super) struct Norm {
    norm: LayerNorm,
    adds_one: bool,
}

impl Norm {
    pub(super) fn new(config: &Config, width: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let norm = match config.norm {
            config::Norm::Layer => layer_norm(width, config.norm_eps, vb)?,
            _ => rms_norm(width, config.norm_eps, vb)?.into_inner(),
        };
        Ok(Self { norm, adds_one: config.norm == config::Norm::RmsPlusOne })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.adds_one {
            true => LayerNorm::rms_norm((self.norm.weight() + 1.0)?, self.norm.eps()).forward(x),
            false => self.norm.forward(x),
        }
    }
}
