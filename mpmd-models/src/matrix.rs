//! The matrices of a decoder: as they are trained, or packed for inference.

use mpmd::candle::nn::{Embedding, Linear, Module, PackedLinear};
use mpmd::candle::{Result, Tensor};

/// A linear layer.
#[derive(Clone, Debug)]
pub(crate) enum Matrix {
    Plain(Linear),
    Packed(PackedLinear),
}

impl Matrix {
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(linear) => linear.forward(x),
            Self::Packed(packed) => packed.forward(x),
        }
    }

    /// Packs the weight, unless it is. With `in_half` its elements are rounded to `bf16`.
    pub(crate) fn pack(&mut self, in_half: bool) -> Result<()> {
        if let Self::Plain(linear) = self {
            *self = Self::Packed(PackedLinear::new(linear, in_half)?);
        }
        Ok(())
    }
}

/// A table, of which each token has a row.
#[derive(Debug)]
pub(crate) enum Table {
    Plain(Embedding),
    Packed(PackedLinear),
}

impl Table {
    pub(crate) fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(embedding) => embedding.forward(tokens),
            Self::Packed(packed) => packed.rows(tokens),
        }
    }
}
