//! A part of a Llama-type model, with the parameter names of model hubs.

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd::aval::{DType, ShapedArray};
use mpmd::candle::candle_core::{Error as CandleError, bail};
use mpmd::candle::nn::ops::silu;
use mpmd::candle::nn::{
    self, Embedding, Linear, Mask, Module, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm,
};
use mpmd::candle::{Result, Tensor, stage};
use mpmd::{Error, Result as CoreResult};

use crate::config::Config;
use crate::lora::{Lora, Projection};
use crate::rope::Angles;

/// Name of the embedding's table, `[vocab_size, hidden_size]`.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the output's weight, `[vocab_size, hidden_size]`.
pub(crate) const OUTPUT: &str = "lm_head.weight";

/// Some layers of a model. The first part has the embedding too, the last part the output.
pub struct Part {
    embedding: Option<Embedding>,
    layers: Vec<Layer>,
    head: Option<(RmsNorm, Linear)>,
}

impl Part {
    /// Creates the layers `layers` from parameters with the names of model hubs.
    ///
    /// A part with all layers of a model with tied embeddings asks for no output weight. A last
    /// part without the embedding asks for one in any case.
    ///
    /// # Errors
    ///
    /// As [`VarBuilder::get_with_hints`].
    pub fn new(
        config: &Config,
        lora: Option<Lora>,
        angles: &Angles,
        layers: Range<usize>,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let (tokens, width) = (config.vocab_size, config.hidden_size);
        let model = vb.pp("model");
        let first = layers.start == 0;
        let embedding = first.then(|| embedding(tokens, width, model.pp("embed_tokens")));
        let embedding = embedding.transpose()?;
        let head = if layers.end == config.num_hidden_layers {
            let output = match &embedding {
                Some(embedding) if config.tie_word_embeddings => {
                    Linear::new(embedding.embeddings().clone(), None)
                }
                _ => linear_no_bias(width, tokens, vb.pp("lm_head"))?,
            };
            Some((rms_norm(width, config.rms_norm_eps, model.pp("norm"))?, output))
        } else {
            None
        };
        let layer = |layer| {
            let vb = model.pp("layers").pp(layer);
            Layer::new(config, lora, angles, &vb)
        };
        Ok(Self { embedding, layers: layers.map(layer).collect::<Result<_>>()?, head })
    }

    /// Computes the part's layers. `x` are tokens `[batch, time]` for the first part, otherwise the
    /// outputs of the part before. `starts` is the first token that each token sees, `[batch,
    /// time]`, if it is not the sequence's first. Returns `[batch, time, hidden_size]`, from the
    /// last part too.
    ///
    /// # Errors
    ///
    /// If a token has no row in the embedding, or shapes do not fit.
    pub fn forward(&self, x: Tensor, starts: Option<&Tensor>) -> Result<Tensor> {
        let x = match &self.embedding {
            Some(embedding) => embedding.forward(&x)?,
            None => x,
        };
        self.layers.iter().try_fold(x, |x, layer| layer.forward(&x, starts))
    }

    /// Computes the logits `[batch, time, vocab_size]` from the outputs of the last layer.
    ///
    /// # Errors
    ///
    /// If this is not the last part.
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let Some((norm, output)) = &self.head else {
            bail!("a part of the model without its output");
        };
        output.forward(&norm.forward(x)?)
    }
}

/// Returns the name and shape of each parameter of a model. The dtype is f32.
///
/// # Errors
///
/// If a shape has too many elements.
pub(crate) fn shapes_of(config: &Config) -> CoreResult<BTreeMap<String, ShapedArray>> {
    let failed = |why: CandleError| Error::kernel(why.to_string());
    // No parameter depends on the angles. Those of a wrong `head_dim` could take all memory.
    let angles = Angles::new(&config.rope, 2, 0).map_err(failed)?;
    let (all, owned) = (0..config.num_hidden_layers, config.clone());
    let whole = stage(
        move |vb| Part::new(&owned, None, &angles, all.clone(), &vb),
        |part, x: Tensor, _| part.forward(x, None),
    )?;
    let shapes = whole.shapes();
    debug_assert!(shapes.values().all(|aval| aval.dtype() == DType::F32));
    Ok(shapes)
}

/// A decoder layer: attention, then an MLP, each on the normed input and added to it.
struct Layer {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

impl Layer {
    fn new(
        config: &Config,
        lora: Option<Lora>,
        angles: &Angles,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let norm = |name| rms_norm(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            attention_norm: norm("input_layernorm")?,
            attention: Attention::new(config, lora, angles, &vb.pp("self_attn"))?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(config, lora, &vb.pp("mlp"))?,
        })
    }

    fn forward(&self, x: &Tensor, starts: Option<&Tensor>) -> Result<Tensor> {
        let x = (x + self.attention.forward(&self.attention_norm.forward(x)?, starts)?)?;
        &x + self.mlp.forward(&self.mlp_norm.forward(&x)?)?
    }
}

/// Causal attention, in which groups of query heads share keys and values.
struct Attention {
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    head_dim: usize,
    angles: Angles,
}

impl Attention {
    fn new(
        config: &Config,
        lora: Option<Lora>,
        angles: &Angles,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let width = config.hidden_size;
        let (queries, keys) = (config.num_attention_heads, config.num_key_value_heads);
        let (queries, keys) = (queries * config.head_dim, keys * config.head_dim);
        let projection = |name, inputs, outputs| {
            Projection::new((inputs, outputs), config.attention_bias, lora, &vb.pp(name))
        };
        Ok(Self {
            q: projection("q_proj", width, queries)?,
            k: projection("k_proj", width, keys)?,
            v: projection("v_proj", width, keys)?,
            o: projection("o_proj", queries, width)?,
            head_dim: config.head_dim,
            angles: angles.clone(),
        })
    }

    fn forward(&self, x: &Tensor, starts: Option<&Tensor>) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        // `[batch, time, heads, head_dim]`.
        let heads = |x: Tensor| x.reshape((batch, time, (), self.head_dim));
        let q = self.angles.rotate(&heads(self.q.forward(x)?)?)?.transpose(1, 2)?;
        let k = self.angles.rotate(&heads(self.k.forward(x)?)?)?.transpose(1, 2)?;
        let v = heads(self.v.forward(x)?)?.transpose(1, 2)?;
        let scale = (self.head_dim as f64).sqrt().recip();
        let mask = starts.map_or(Mask::Causal, |starts| Mask::CausalFrom(starts.clone()));
        let out = nn::attention(&q, &k, &v, mask, scale)?;
        self.o.forward(&out.transpose(1, 2)?.reshape((batch, time, ()))?)
    }
}

/// The MLP of a layer: `down(silu(gate(x)) up(x))`.
struct Mlp {
    gate: Projection,
    up: Projection,
    down: Projection,
}

impl Mlp {
    fn new(config: &Config, lora: Option<Lora>, vb: &VarBuilder<'_>) -> Result<Self> {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let projection = |name, inputs, outputs| {
            Projection::new((inputs, outputs), config.mlp_bias, lora, &vb.pp(name))
        };
        Ok(Self {
            gate: projection("gate_proj", width, inner)?,
            up: projection("up_proj", width, inner)?,
            down: projection("down_proj", inner, width)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&(silu(&self.gate.forward(x)?)? * self.up.forward(x)?)?)
    }
}
