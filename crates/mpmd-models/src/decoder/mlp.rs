//! The MLP of a decoder's layer.

use mpmd::candle::nn::{Activation, Module, VarBuilder};
use mpmd::candle::{Cx, Result, Tensor};

use super::DecoderPlan;
use crate::decoder::devices::DeviceDivision;

use crate::decoder::lora::Projection;
use crate::decoder::matrix::MatrixForm;

/// An MLP: two projections with an activation function between them, and in gated MLPs a third
/// projection for the gate.
pub(super) struct Mlp {
    gate: Option<Projection>,
    up: Projection,
    down: Projection,
    activation: Activation,
    over: DeviceDivision,
}

impl Mlp {
    /// Creates an MLP with the width `inner` between its projections.
    pub(super) fn new(
        DecoderPlan {
            config, lora, over, ..
        }: DecoderPlan<'_>,
        inner: usize,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let width = config.hidden_size;
        let projection = |name, inputs, outputs| {
            Projection::new(inputs, outputs, config.mlp_bias, lora, &vb.pp(name))
        };

        let gate = config
            .is_gated
            .then(|| projection("gate_proj", width, inner))
            .transpose()?;
        Ok(Self {
            gate,
            up: projection("up_proj", width, inner)?,
            down: projection("down_proj", inner, width)?,
            activation: config.activation,
            over,
        })
    }

    pub(super) fn pack(&mut self, form: MatrixForm) -> Result<()> {
        let all = self.gate.iter_mut().chain([&mut self.up, &mut self.down]);
        all.into_iter()
            .try_for_each(|projection| projection.pack(form))
    }

    pub(super) fn forward(&self, x: &Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let x = &self.over.shared(x, cx)?;
        let inner = match &self.gate {
            Some(gate) => (self.activation.forward(&gate.part(x)?)? * self.up.part(x)?)?,
            None => self.activation.forward(&self.up.part(x)?)?,
        };
        self.down.whole(&inner, cx, self.over.divided())
    }
}
