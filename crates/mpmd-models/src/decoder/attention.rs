//! The attention of a decoder's layer.

use mpmd::candle::candle_core::DType;
use mpmd::candle::nn::{self, Mask, PagedCache, PagedScores, VarBuilder};
use mpmd::candle::{Cx, Device, Result, Tensor};

use super::DecoderPlan;
use super::cache::PassRows;
use super::norm::{HeadNorms, NormLayer};
use crate::decoder::devices::DeviceDivision;

use crate::config::{HeadNorm, LayerConfig};
use crate::decoder::lora::Projection;
use crate::decoder::matrix::MatrixForm;
use crate::rope::RopeRotation;

/// Causal attention with grouped queries: each head of keys and values serves a group of query
/// heads.
pub(super) struct AttentionLayer {
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    norms: Option<Norms>,
    head_dim: usize,
    layer: LayerConfig,
    cap: Option<f64>,
    over: DeviceDivision,
}

/// The norms of queries and of keys, by the elements over which a norm is computed (see
/// [`HeadNorm`]).
enum Norms {
    Head([NormLayer; 2]),
    EachHead([HeadNorms; 2]),
    Width([NormLayer; 2]),
}

impl AttentionLayer {
    pub(super) fn new(
        DecoderPlan {
            config, lora, over, ..
        }: DecoderPlan<'_>,
        layer: LayerConfig,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let width = config.hidden_size;
        let dim = config.head_dim;
        let queries = config.num_attention_heads * dim;
        let keys = config.num_key_value_heads * dim;
        let projection = |name, inputs, outputs, bias| {
            Projection::new(inputs, outputs, bias, lora, &vb.pp(name))
        };

        let norm = |name, size| NormLayer::new(config, size, vb.pp(name));
        let each = |name, heads| HeadNorms::new(config, heads, vb.pp(name));
        let norms = |kind| {
            Result::Ok(match kind {
                HeadNorm::Head => Norms::Head([norm("q_norm", dim)?, norm("k_norm", dim)?]),
                HeadNorm::EachHead => Norms::EachHead([
                    each("q_norm", config.num_attention_heads)?,
                    each("k_norm", config.num_key_value_heads)?,
                ]),
                HeadNorm::Width => Norms::Width([norm("q_norm", queries)?, norm("k_norm", keys)?]),
            })
        };

        Ok(Self {
            q: projection("q_proj", width, queries, config.qkv_bias)?,
            k: projection("k_proj", width, keys, config.qkv_bias)?,
            v: projection("v_proj", width, keys, config.qkv_bias)?,
            o: projection("o_proj", queries, width, config.out_bias)?,
            norms: config.head_norm.map(norms).transpose()?,
            head_dim: dim,
            layer,
            cap: config.score_cap,
            over,
        })
    }

    pub(super) fn pack(&mut self, form: MatrixForm) -> Result<()> {
        let all = [&mut self.q, &mut self.k, &mut self.v, &mut self.o];
        all.into_iter()
            .try_for_each(|projection| projection.pack(form))
    }

    /// Computes the attention layer for the hidden states `x`, `[batch, time, hidden_size]`.
    /// `rotations` has one entry for each rotary embedding of the config.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        keys: SeenKeys<'_>,
        rotations: &[RopeRotation],
        cx: &Cx<'_>,
    ) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        let over = self.over;
        let axes = [over.divided(), over.of_keys()];
        // `[batch, time, heads, head_dim]`, of this device's heads.
        let heads = |x: Tensor| x.reshape((batch, time, (), self.head_dim));
        let normed = |x: Tensor, which: usize| match &self.norms {
            None => heads(x),
            Some(Norms::Head(norms)) => norms[which].inside(&heads(x)?, cx, axes[which]),
            Some(Norms::EachHead(norms)) => norms[which].inside(&heads(x)?, over, cx, axes[which]),
            Some(Norms::Width(norms)) => heads(norms[which].over(&x, cx, axes[which])?),
        };

        let rotation = self.layer.rope.and_then(|rope| rotations.get(rope));
        let rotated = |x: Tensor| match rotation {
            Some(rotation) => rotation.rotate(&x),
            None => Ok(x),
        };

        let [of_keys, of_queries] = over.heads(x, cx)?;
        let q = rotated(normed(self.q.part(&of_queries)?, 0)?)?;
        let k = over.repeated(rotated(normed(self.k.part(&of_keys)?, 1)?)?, cx)?;
        let v = over.repeated(heads(self.v.part(&of_keys)?)?, cx)?;

        let LayerConfig { window, scale, .. } = self.layer;
        let out = match keys {
            SeenKeys::Cached(cache, rows) => {
                let scores = PagedScores {
                    scale,
                    cap: self.cap,
                    window,
                };
                // Caches are f32, also if the model computes in another dtype.
                let single = |x: &Tensor| x.squeeze(0)?.to_dtype(DType::F32);
                let [of_q, k, v] = [single(&q)?, single(&k)?, single(&v)?];
                let out = cache.attention([&of_q, &k, &v], &rows.sequences, scores)?;
                out.to_dtype(q.dtype())?
            }
            SeenKeys::Own(starts) => {
                let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
                let mask = mask(window, starts, time, x.device())?;
                let out = match self.cap {
                    None => nn::attention(&q, &k, &v, mask, scale)?,
                    Some(cap) => nn::capped_attention(&q, &k, &v, mask, scale, cap)?,
                };
                out.transpose(1, 2)?
            }
        };

        self.o
            .whole(&out.reshape((batch, time, ()))?, cx, over.divided())
    }
}

/// The keys and values that the tokens of a pass attend to.
pub(super) enum SeenKeys<'a> {
    /// Only the keys of this pass. The tensor has the column at which each token's sequence starts,
    /// `[batch, time]`; without it each row is one sequence.
    Own(Option<&'a Tensor>),
    /// The keys of this pass and the earlier ones in the cache, to which this pass adds its own.
    /// The batch has one row.
    Cached(&'a mut PagedCache, &'a PassRows),
}

/// Returns a causal mask for `time` queries. A query sees no key before its sequence's entry in
/// `starts`, and at most `window` keys.
fn mask(
    window: Option<usize>,
    starts: Option<&Tensor>,
    time: usize,
    device: &Device,
) -> Result<Mask> {
    let Some(window) = window.filter(|window| *window < time) else {
        return Ok(starts.map_or(Mask::Causal, |starts| Mask::CausalFrom(starts.clone())));
    };

    let first = (0..time).map(|query| (query + 1).saturating_sub(window) as u32);
    let first = Tensor::from_vec(first.collect(), (1, time), device)?;
    Ok(Mask::CausalFrom(match starts {
        Some(starts) => starts.broadcast_maximum(&first)?,
        None => first,
    }))
}
