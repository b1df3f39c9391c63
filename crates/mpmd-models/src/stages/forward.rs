//! The forward passes of a microbatch through the stages of a model, up to its loss.

use mpmd::aval::{ShapedArray, f32s};
use mpmd::candle::candle_core::Error as CandleError;
use mpmd::candle::nn::loss::cross_entropy_sum;
use mpmd::candle::{Cx, Result, Tensor};
use mpmd::pipeline::Loss;

use crate::config::ModelConfig;
use crate::decoder::{Balance, Decoder};

/// The forward passes of a model's stages.
///
/// The tensors between stages are the outputs of layers, `[batch, time, hidden_size]`. If experts
/// are balanced by a loss, its sums `[2, experts]` follow them.
#[derive(Clone, Copy)]
pub(crate) struct StageForward {
    /// True if a row may have several packed sequences.
    is_packed: bool,
    /// The loss that balances experts. `None` without such a loss.
    balanced: Option<Balanced>,
}

/// The settings of the loss that balances experts.
#[derive(Clone, Copy)]
struct Balanced {
    experts: usize,
    /// Number of layers that have experts.
    layers: usize,
    factor: f64,
}

impl StageForward {
    /// Creates the forward passes of a model. Only passes that train have the loss that balances
    /// experts.
    pub(crate) fn new(config: &ModelConfig, trains: bool, is_packed: bool) -> Self {
        let layers = config
            .layers
            .iter()
            .filter(|layer| layer.has_experts)
            .count();
        let experts = config.experts.filter(|_| trains && layers > 0);
        let balanced = experts.and_then(|experts| {
            Some(Balanced {
                experts: experts.count,
                layers,
                factor: experts.balance?,
            })
        });
        Self {
            is_packed,
            balanced,
        }
    }

    /// Computes a part's layers. `x` has tokens or the outputs of the previous stage, and perhaps
    /// the sums of the balancing loss.
    pub(crate) fn run(
        self,
        part: &Decoder,
        x: Vec<Tensor>,
        cx: &Cx<'_>,
    ) -> Result<(Tensor, Option<Balance>)> {
        let starts = self.side(cx, "starts")?;
        let mut x = x.into_iter();
        let first = x.next();
        let before = x.next();
        let first = first.ok_or_else(|| CandleError::msg("a stage without inputs"))?;
        let Some(Balanced { experts, .. }) = self.balanced else {
            return Ok((part.forward(first, starts.as_ref(), cx)?, None));
        };
        let mut balance = Balance::new(experts, before, starts.as_ref())?;
        Ok((
            part.balanced(first, starts.as_ref(), &mut balance, cx)?,
            Some(balance),
        ))
    }

    /// Computes a stage other than the last. Returns the inputs of the next stage.
    pub(crate) fn forward(
        self,
        part: &Decoder,
        x: Vec<Tensor>,
        cx: &Cx<'_>,
    ) -> Result<Vec<Tensor>> {
        let (x, balance) = self.run(part, x, cx)?;
        Ok([x]
            .into_iter()
            .chain(balance.map(|balance| balance.sums))
            .collect())
    }

    /// Returns the shapes of the inputs of the next stage.
    pub(crate) fn shapes(self, x: &ShapedArray, width: usize) -> Vec<ShapedArray> {
        let sums = self.balanced.map(|balanced| f32s([2, balanced.experts]));
        [sequences(x, width)].into_iter().chain(sums).collect()
    }

    /// Returns the function with which the last stage computes the loss. It computes the logits of
    /// `at_once` tokens of each sequence at a time. In training, the loss that balances experts is
    /// added for each token.
    pub(crate) fn loss(
        self,
        at_once: usize,
    ) -> impl Fn(&Decoder, Vec<Tensor>, &mut Cx<'_>) -> Result<Loss<Tensor>> + Send + Sync + 'static
    {
        move |part, x, cx| {
            let (x, balance) = self.run(part, x, cx)?;
            let targets = cx.side("targets")?;
            let weights = self.side(cx, "weights")?;
            let (batch, time, _) = x.dims3()?;
            let of = |start: usize| {
                let len = at_once.min(time - start);
                let logits = part.logits(&x.narrow(1, start, len)?, cx)?;
                let weights = weights
                    .as_ref()
                    .map(|weights| weights.narrow(1, start, len));
                let weights = weights.transpose()?;
                cross_entropy_sum(&logits, &targets.narrow(1, start, len)?, weights.as_ref())
            };
            let (mut sum, mut weight) = of(0)?;
            for start in (0..time).step_by(at_once).skip(1) {
                let (more, tokens) = of(start)?;
                sum = (sum + more)?;
                weight = (weight + tokens)?;
            }
            if let (Some(balance), Some(Balanced { layers, factor, .. }), true) =
                (balance, self.balanced, cx.is_training())
            {
                let loss = (balance.loss(batch * time, layers)? * factor)?;
                sum = (sum + (loss * &weight)?)?;
            }
            Ok(Loss::new(sum, weight))
        }
    }

    /// Returns the side input `name` of packed sequences. `None` if rows are not packed.
    fn side(self, cx: &Cx<'_>, name: &str) -> Result<Option<Tensor>> {
        self.is_packed.then(|| cx.side(name)).transpose()
    }
}

/// Returns the shapes of the outputs of [`StageForward::loss`]: a sum and a weight.
pub(crate) fn loss_shapes(_: &ShapedArray) -> Loss<ShapedArray> {
    Loss::new(f32s([]), f32s([]))
}

/// Returns the shape of `x`, `[batch, time, …]`, with `width` as its last dimension.
pub(crate) fn sequences(x: &ShapedArray, width: usize) -> ShapedArray {
    f32s([x.shape()[0], x.shape()[1], width])
}
