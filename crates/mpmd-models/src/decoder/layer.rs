//! A layer of a decoder.

use mpmd::candle::nn::VarBuilder;
use mpmd::candle::{Cx, Result, Tensor};

use super::DecoderPlan;
use super::attention::{AttentionLayer, SeenKeys};
use super::balance::Balance;
use super::experts::ExpertLayer;
use super::mlp::Mlp;
use super::norm::NormLayer;

use crate::decoder::matrix::MatrixForm;
use crate::rope::RopeRotation;

/// A decoder layer: attention and an MLP or experts, each added to the residual stream, with norms
/// before and after them.
pub(super) struct DecoderLayer {
    attention: AttentionLayer,
    mlp: FeedForward,
    /// The norms before and after attention, and before and after the MLP.
    norms: [Option<NormLayer>; 4],
    is_parallel: bool,
    residual_scale: f64,
}

/// The MLP or the experts that follow the attention in a layer.
enum FeedForward {
    Mlp(Box<Mlp>),
    Experts(Box<ExpertLayer>),
}

impl DecoderLayer {
    pub(super) fn new(plan: DecoderPlan<'_>, index: usize, vb: &VarBuilder<'_>) -> Result<Self> {
        let config = plan.config;
        let norm = |which: usize| {
            let name = config.norm_names[which];
            name.map(|name| NormLayer::new(config, config.hidden_size, vb.pp(name)))
                .transpose()
        };
        let layer = config.layers[index];
        let vb_mlp = vb.pp("mlp");
        let mlp = match config.experts.filter(|_| layer.has_experts) {
            Some(experts) => {
                FeedForward::Experts(Box::new(ExpertLayer::new(plan, experts, &vb_mlp)?))
            }
            None => {
                // Of a model with experts, `peft` knows no matrices of LoRA but the attention's.
                let lora = plan.lora.filter(|_| config.experts.is_none());
                let plan = DecoderPlan { lora, ..plan };
                let mlp = Mlp::new(plan, config.intermediate_size, &vb_mlp)?;
                FeedForward::Mlp(Box::new(mlp))
            }
        };
        Ok(Self {
            attention: AttentionLayer::new(plan, layer, &vb.pp("self_attn"))?,
            mlp,
            norms: [norm(0)?, norm(1)?, norm(2)?, norm(3)?],
            is_parallel: config.is_parallel,
            residual_scale: config.residual_scale,
        })
    }

    /// Converts the weights of all projections to a form for inference.
    pub(super) fn pack(&mut self, form: MatrixForm) -> Result<()> {
        self.attention.pack(form)?;
        match &mut self.mlp {
            FeedForward::Mlp(mlp) => mlp.pack(form),
            FeedForward::Experts(experts) => experts.pack(form),
        }
    }

    pub(super) fn forward(
        &self,
        x: &Tensor,
        keys: SeenKeys<'_>,
        rotations: &[RopeRotation],
        balance: Option<&mut Balance>,
        cx: &Cx<'_>,
    ) -> Result<Tensor> {
        let attend = |x: &Tensor| self.attention.forward(x, keys, rotations, cx);
        let attended = (x + self.part(x, 0, attend)?)?;
        let inputs = if self.is_parallel { x } else { &attended };
        &attended
            + self.part(inputs, 2, |x| match &self.mlp {
                FeedForward::Mlp(mlp) => mlp.forward(x, cx),
                FeedForward::Experts(experts) => experts.forward(x, balance, cx),
            })?
    }

    /// Returns the term that attention or MLP adds to the residual stream, norms included. `first`
    /// is the index of the norm before `part` in `norms`.
    fn part(
        &self,
        x: &Tensor,
        first: usize,
        part: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut y = match &self.norms[first] {
            Some(norm) => part(&norm.forward(x)?)?,
            None => part(x)?,
        };
        if let Some(norm) = &self.norms[first + 1] {
            y = norm.forward(&y)?;
        }
        scaled(y, self.residual_scale)
    }
}

/// Returns the product of a tensor and a number, rounded to the tensor's dtype.
pub(super) fn scaled(x: Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 { Ok(x) } else { x * factor }
}
