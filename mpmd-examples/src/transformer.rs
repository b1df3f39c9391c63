//! A byte-level decoder-only transformer, cut into stages.
//!
//! Parameters are named by their layer in the whole model, so they start with the same values for
//! every number of stages. The devices along [`MODEL_AXIS`] divide the heads and the hidden columns
//! of each block.

use std::ops::Range;

use mpmd::candle::nn::{self, Activation, Embedding, Init, LayerNorm, Linear, Mask, Module};
use mpmd::candle::{Cx, Result, Tensor, VarBuilder};

use mpmd::job::at_least;

/// The axis of a stage's mesh that divides the sequences of a microbatch.
pub const DATA_AXIS: &str = "data";
/// The axis of a stage's mesh that divides the matrices of its blocks.
pub const MODEL_AXIS: &str = "model";
/// Number of values of a byte, which is also the number of logits.
pub const BYTES: usize = 256;

/// The sizes of a model.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ModelSizes {
    /// Number of blocks
    #[arg(long, default_value_t = 4, value_parser = at_least(1))]
    pub layers: usize,
    /// Width of the model: columns of the activations between blocks. The MLPs have four times as
    /// many hidden columns
    #[arg(long, default_value_t = 128, value_parser = at_least(1))]
    pub width: usize,
    /// Attention heads of a block
    #[arg(long, default_value_t = 4, value_parser = at_least(1))]
    pub heads: usize,
    /// Bytes of a sequence
    #[arg(long, default_value_t = 128, value_parser = at_least(1))]
    pub time: usize,
}

/// Consecutive blocks of the model, with the embedding if the stage is the first, and the head if
/// it is the last.
pub struct ModelPart {
    embeddings: Option<[Embedding; 2]>,
    blocks: Vec<TransformerBlock>,
    head: Option<(LayerNorm, Linear)>,
}

struct TransformerBlock {
    norms: [LayerNorm; 2],
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
    /// Columns of an attention head.
    dim: usize,
}

impl ModelPart {
    /// Creates the blocks in the range `blocks`. `ends` is `[true for the embedding, true for the
    /// head]`.
    ///
    /// # Errors
    ///
    /// If [`VarBuilder::get`] fails.
    pub fn new(
        vb: &VarBuilder,
        sizes: ModelSizes,
        blocks: Range<usize>,
        ends: [bool; 2],
    ) -> Result<Self> {
        let ModelSizes { width, time, .. } = sizes;
        let table = |name: &str, rows: usize, stdev: f64| {
            let table = vb
                .pp("embed")
                .get_with_hints((rows, width), name, normal(stdev));
            table.map(|table| Embedding::new(table, width))
        };
        let embeddings = || -> Result<[Embedding; 2]> {
            Ok([table("bytes", BYTES, 0.5)?, table("positions", time, 0.1)?])
        };
        let head = || -> Result<(LayerNorm, Linear)> {
            let weight = normal(0.1 / (width as f64).sqrt());
            let weight = vb
                .pp("head")
                .get_with_hints((BYTES, width), "weight", weight)?;
            Ok((
                nn::layer_norm(width, 1e-5, vb.pp("head.norm"))?,
                Linear::new(weight, None),
            ))
        };

        let blocks = blocks.map(|at| TransformerBlock::new(&vb.pp(format!("blocks.{at}")), sizes));
        Ok(Self {
            embeddings: ends[0].then(embeddings).transpose()?,
            blocks: blocks.collect::<Result<_>>()?,
            head: ends[1].then(head).transpose()?,
        })
    }

    /// Computes the activations after the last block, `[batch, time, width]`. In the first stage
    /// `x` has bytes, `[batch, time]`; in others, the activations before the first block.
    ///
    /// # Errors
    ///
    /// If candle fails.
    pub fn forward(&self, mut x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        if let Some([bytes, positions]) = &self.embeddings {
            let (batch, time) = x.dims2()?;
            let places = Tensor::arange(0, time as u32, x.device())?;
            let places = places.unsqueeze(0)?.broadcast_as((batch, time))?;
            x = (bytes.forward(&x)? + positions.forward(&places)?)?;
        }
        self.blocks
            .iter()
            .try_fold(x, |x, block| block.forward(&x, cx))
    }

    /// Computes the logits of the next byte at each position, `[batch, time, 256]`. Takes the same
    /// `x` as [`forward`](Self::forward).
    ///
    /// # Errors
    ///
    /// If candle fails, or the part is not the last.
    pub fn logits(&self, x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let x = self.forward(x, cx)?;
        match &self.head {
            Some((norm, head)) => head.forward(&norm.forward(&x)?),
            None => mpmd::candle::candle_core::bail!("only the last stage has logits"),
        }
    }
}

impl TransformerBlock {
    /// Creates a block. The initial weights of its residual branches shrink with the number of
    /// blocks, so that the variance of the activations does not grow with depth.
    fn new(
        vb: &VarBuilder,
        ModelSizes {
            layers,
            width,
            heads,
            ..
        }: ModelSizes,
    ) -> Result<Self> {
        let linear = |name: &str, inputs: usize, outputs: usize, fan: usize| {
            let vb = vb.pp(name);
            let stdev = (fan as f64).sqrt().recip();
            let weight = vb.get_with_hints((outputs, inputs), "weight", normal(stdev))?;
            let bias = vb.get_with_hints(outputs, "bias", Init::Const(0.0))?;
            Ok::<_, mpmd::candle::candle_core::Error>(Linear::new(weight, Some(bias)))
        };
        let norm = |name| nn::layer_norm(width, 1e-5, vb.pp(name));

        let hidden = 4 * width;
        Ok(Self {
            norms: [norm("norm1")?, norm("norm2")?],
            qkv: linear("qkv", width, 3 * width, width)?,
            out: linear("out", width, width, 2 * layers * width)?,
            up: linear("up", width, hidden, width)?,
            down: linear("down", hidden, width, 2 * layers * hidden)?,
            dim: width / heads,
        })
    }

    fn forward(&self, x: &Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let [norm1, norm2] = &self.norms;
        let scale = (self.dim as f64).sqrt().recip();
        let qkv = self
            .qkv
            .forward(&cx.replicated(&norm1.forward(x)?, MODEL_AXIS)?)?;
        // With several devices, each has some of the heads.
        let heads = qkv.dim(2)? / (3 * self.dim);
        let context = nn::self_attention(&qkv, heads, Mask::Causal, scale)?;
        let x = (x + self.out.forward_over(&context, cx, &[MODEL_AXIS])?)?;
        let hidden = cx.replicated(&norm2.forward(&x)?, MODEL_AXIS)?;
        let hidden = self.up.forward_activated(&hidden, Activation::NewGelu)?;
        &x + self.down.forward_over(&hidden, cx, &[MODEL_AXIS])?
    }
}

fn normal(stdev: f64) -> Init {
    Init::Randn { mean: 0.0, stdev }
}
