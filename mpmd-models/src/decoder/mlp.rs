//! The MLP of a decoder's layer.

use mpmd::candle::nn::{Activation, Module, VarBuilder};
use mpmd::candle::{Result, Tensor};

use crate::config::Config;
use crate::lora::{Lora, Projection};

/// Two projections with an activation function between them, and a third one for a gate.
pub(super) struct Mlp {
    gate: Option<Projection>,
    up: Projection,
    down: Projection,
    activation: Activation,
}

impl Mlp {
    /// Creates an MLP with `inner` elements between the projections.
    pub(super) fn new(
        config: &Config,
        inner: usize,
        lora: Option<Lora>,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let width = config.hidden_size;
        let projection = |name, inputs, outputs| {
            Projection::new((inputs, outputs), config.mlp_bias, lora, &vb.pp(name))
        };
        let gate = config.is_gated.then(|| projection("gate_proj", width, inner)).transpose()?;
        Ok(Self {
            gate,
            up: projection("up_proj", width, inner)?,
            down: projection("down_proj", inner, width)?,
            activation: config.activation,
        })
    }

    pub(super) fn pack(&mut self, in_half: bool) -> Result<()> {
        let all = self.gate.iter_mut().chain([&mut self.up, &mut self.down]);
        all.into_iter().try_for_each(|projection| projection.pack(in_half))
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = match &self.gate {
            Some(gate) => (self.activation.forward(&gate.forward(x)?)? * self.up.forward(x)?)?,
            None => self.activation.forward(&self.up.forward(x)?)?,
        };
        self.down.forward(&inner)
    }
}
