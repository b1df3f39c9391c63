//! StableLM: Llama with layer norms, and with rotary embeddings on a quarter of each head.

use super::{Defaults, Family, LLAMA, PLAIN, base, dropout};
use crate::config::{HeadNorm, NormKind, RopeDefaults};

pub(super) const FAMILY: Family = Family {
    name: "stablelm",
    read: |keys| {
        let mut config = base(keys, &DEFAULTS)?;
        keys.only("head_dim", config.hidden_size / config.num_attention_heads)?;
        config.norm = NormKind::Layer;
        config.qkv_bias = keys.flag("use_qkv_bias", false)?;
        config.head_norm = keys
            .flag("qk_layernorm", false)?
            .then_some(HeadNorm::EachHead);
        config.is_parallel = keys.flag("use_parallel_residual", false)?;
        if config.is_parallel {
            // One norm for both.
            config.norm_names[2] = config.norm_names[0];
        }
        let shares = ["attention_dropout", "hidden_dropout"].map(|key| (key, 0.0));
        config.dropout = dropout(keys, &shares)?;
        Ok(config)
    },
    words: &[
        ("rms_norm_eps", "layer_norm_eps"),
        ("q_norm", "q_layernorm.norms"),
        ("k_norm", "k_layernorm.norms"),
    ],
    ..PLAIN
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 50_304,
    intermediate_size: 6912,
    hidden_size: 2560,
    groups: Some(32),
    norm_eps: 1e-5,
    rope: RopeDefaults {
        share: Some(("partial_rotary_factor", 0.25)),
        positions: 4096,
        ..LLAMA.rope
    },
    ..LLAMA
};
