//! Gemma 2: norms before and after attention and MLP, caps, and a window in every other layer.

use mpmd::Result;

use super::{Defaults, Family, LLAMA, PLAIN, base, slide, window};
use crate::config::{ConfigKeys, ModelConfig, NormKind, RopeDefaults};

pub(super) const FAMILY: Family = Family {
    name: "gemma2",
    read: |keys| {
        let mut config = gemma(keys, &DEFAULTS, Some(30.0))?;
        config.score_cap = cap(keys, "attn_logit_softcapping", Some(50.0))?;
        let window = window(keys, Some(4096))?;
        slide(keys, &mut config, window, |layer| {
            window.is_some() && layer % 2 == 0
        })?;
        Ok(config)
    },
    ..PLAIN
};

pub(super) const DEFAULTS: Defaults = Defaults {
    vocab_size: 256_000,
    hidden_size: 2304,
    intermediate_size: 9216,
    layers: 26,
    heads: 8,
    groups: Some(4),
    head_dim: Some(256),
    norm_eps: 1e-6,
    is_tied: true,
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    rope: RopeDefaults {
        positions: 8192,
        ..LLAMA.rope
    },
    is_rotary: true,
    divides: true,
};

/// Reads the settings that Gemma 2 and Gemma 3 have in common.
pub(super) fn gemma(
    keys: &ConfigKeys<'_>,
    or: &Defaults,
    logits_cap: Option<f64>,
) -> Result<ModelConfig> {
    let mut config = base(keys, or)?;
    config.qkv_bias = keys.flag("attention_bias", false)?;
    config.out_bias = config.qkv_bias;
    config.norm = NormKind::RmsPlusOne;
    config.norm_names = [
        Some("input_layernorm"),
        Some("post_attention_layernorm"),
        Some("pre_feedforward_layernorm"),
        Some("post_feedforward_layernorm"),
    ];
    // A multiplication rounds it to the dtype of the embedding.
    config.embedding_scale = (config.hidden_size as f64).sqrt();
    config.logits_cap = cap(keys, "final_logit_softcapping", logits_cap)?;
    let scalar = keys.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    config
        .layers
        .iter_mut()
        .for_each(|layer| layer.scale = scalar.sqrt().recip());
    keys.only("use_bidirectional_attention", false)?;
    // Some configs have the window twice.
    if let Some(window) = keys.get::<usize>("sliding_window", "a size")? {
        keys.only("sliding_window_size", window)?;
    }
    // Old configs have it beside `hidden_activation`, which alone counts.
    keys.get::<String>("hidden_act", "a name")?;
    Ok(config)
}

/// Reads a soft limit on scores or logits. `None` if the key is null.
fn cap(keys: &ConfigKeys<'_>, key: &str, default: Option<f64>) -> Result<Option<f64>> {
    keys.unless_null(key, default, |keys, key| {
        Ok(keys.positive(key)?.unwrap_or_default())
    })
}
