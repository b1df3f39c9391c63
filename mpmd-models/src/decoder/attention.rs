//! The attention of a decoder's layer.

use mpmd::candle::nn::{self, Mask, VarBuilder};
use mpmd::candle::{Device, Result, Tensor};

use super::norm::Norm;

use crate::config::{Config, HeadNorm, LayerConfig};
use crate::lora::{Lora, Projection};
use crate::rope::Angles;

/// Causal attention, in which groups of query heads share keys and values.
pub(super) struct Attention {
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    /// The norms of queries and keys.
    norms: Option<(HeadNorm, [Norm; 2])>,
    head_dim: usize,
    angles: Option<Angles>,
    layer: LayerConfig,
    cap: Option<f64>,
}

impl Attention {
    pub(super) fn new(
        config: &Config,
        lora: Option<Lora>,
        layer: LayerConfig,
        angles: &[Angles],
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let (width, dim) = (config.hidden_size, config.head_dim);
        let (queries, keys) = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let projection = |name, inputs, outputs, bias| {
            Projection::new((inputs, outputs), bias, lora, &vb.pp(name))
        };
        let norms = |kind| {
            let sizes = if kind == HeadNorm::Head { [dim; 2] } else { [queries, keys] };
            let norm = |name, size| Norm::new(config, size, vb.pp(name));
            Result::Ok((kind, [norm("q_norm", sizes[0])?, norm("k_norm", sizes[1])?]))
        };
        Ok(Self {
            q: projection("q_proj", width, queries, config.qkv_bias)?,
            k: projection("k_proj", width, keys, config.qkv_bias)?,
            v: projection("v_proj", width, keys, config.qkv_bias)?,
            o: projection("o_proj", queries, width, config.out_bias)?,
            norms: config.head_norm.map(norms).transpose()?,
            head_dim: dim,
            angles: layer.rope.and_then(|rope| angles.get(rope).cloned()),
            layer,
            cap: config.score_cap,
        })
    }

    pub(super) fn forward(&self, x: &Tensor, starts: Option<&Tensor>) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        // `[batch, time, heads, head_dim]`.
        let heads = |x: Tensor| x.reshape((batch, time, (), self.head_dim));
        let normed = |x: Tensor, which: usize| match &self.norms {
            None => heads(x),
            Some((HeadNorm::Head, norms)) => norms[which].forward(&heads(x)?),
            Some((HeadNorm::Width, norms)) => heads(norms[which].forward(&x)?),
        };
        let rotated = |x: Tensor| match &self.angles {
            Some(angles) => angles.rotate(&x),
            None => Ok(x),
        };
        let q = rotated(normed(self.q.forward(x)?, 0)?)?.transpose(1, 2)?;
        let k = rotated(normed(self.k.forward(x)?, 1)?)?.transpose(1, 2)?;
        let v = heads(self.v.forward(x)?)?.transpose(1, 2)?;
        let (first, scale) = (first_keys(self.layer.window, starts, time)?, self.layer.scale);
        let out = match (self.cap, first) {
            (None, None) => nn::attention(&q, &k, &v, Mask::Causal, scale)?,
            (None, Some(first)) => nn::attention(&q, &k, &v, Mask::CausalFrom(first), scale)?,
            (Some(cap), first) => {
                let mask = first.map(|first| hidden(&first, time)).transpose()?;
                nn::ops::sdpa(&q, &k, &v, mask.as_ref(), true, scale as f32, cap as f32)?
            }
        };
        self.o.forward(&out.transpose(1, 2)?.reshape((batch, time, ()))?)
    }
}

/// Returns the first key that each query sees, `[batch, time]` or `[1, time]`: that of its window and
/// of its sequence. `None` if each sees all before it.
fn first_keys(
    window: Option<usize>,
    starts: Option<&Tensor>,
    time: usize,
) -> Result<Option<Tensor>> {
    let Some(window) = window.filter(|window| *window < time) else { return Ok(starts.cloned()) };
    let first = (0..time).map(|query| (query + 1).saturating_sub(window) as u32);
    let first = Tensor::from_vec(first.collect(), (1, time), &Device::Cpu)?;
    starts.map_or(Ok(first.clone()), |starts| starts.broadcast_maximum(&first)).map(Some)
}

/// Returns the mask `[batch, 1, time, time]` that hides the keys before the first of each query.
fn hidden(first: &Tensor, time: usize) -> Result<Tensor> {
    let (batch, first) = (first.dim(0)?, first.flatten_all()?.to_vec1::<u32>()?);
    let terms = first.iter().flat_map(|first| {
        (0..time).map(|key| if key < *first as usize { f32::NEG_INFINITY } else { 0.0 })
    });
    Tensor::from_vec(terms.collect(), (batch, 1, time, time), &Device::Cpu)
}
