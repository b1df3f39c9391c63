//! GPT-NeoX and Pythia: attention and MLP side by side, and one tensor with the queries, keys and
//! values of each head in turn.

use mpmd::Result;

use super::{Defaults, Family, LLAMA, PLAIN, TensorRows, base, check_heads, dropout};
use crate::config::{ConfigKeys, ModelConfig, NormKind, RopeDefaults};

pub(super) const FAMILY: Family = Family {
    name: "gpt_neox",
    read,
    words: &[
        ("rms_norm_eps", "layer_norm_eps"),
        ("model", "gpt_neox"),
        ("embed_tokens", "embed_in"),
        ("lm_head", "embed_out"),
        ("norm", "final_layer_norm"),
        ("self_attn", "attention"),
        ("q_proj", "query_key_value"),
        ("k_proj", "query_key_value"),
        ("v_proj", "query_key_value"),
        ("o_proj", "dense"),
        ("up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"),
    ],
    fused,
    ignored: &[
        "rotary_emb.inv_freq",
        "attention.bias",
        "attention.masked_bias",
    ],
    ..PLAIN
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 50_432,
    hidden_size: 6144,
    intermediate_size: 24_576,
    layers: 44,
    heads: 64,
    norm_eps: 1e-5,
    activation: ("hidden_act", "gelu"),
    rope: RopeDefaults {
        theta: ("rotary_emb_base", 10_000.0),
        share: Some(("rotary_pct", 0.25)),
        ..LLAMA.rope
    },
    ..LLAMA
};

fn read(keys: &ConfigKeys<'_>) -> Result<ModelConfig> {
    let mut config = base(keys, &DEFAULTS)?;
    check_heads(keys, &config)?;
    config.norm = NormKind::Layer;
    config.qkv_bias = keys.flag("attention_bias", true)?;
    config.out_bias = config.qkv_bias;
    config.mlp_bias = true;
    config.is_gated = false;
    config.is_parallel = keys.flag("use_parallel_residual", true)?;
    let shares = [
        "attention_dropout",
        "hidden_dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout_prob",
    ];
    config.dropout = dropout(keys, &shares.map(|key| (key, 0.0)))?;
    Ok(config)
}

fn fused(config: &ModelConfig, projection: &str) -> Option<TensorRows> {
    let place = ["q_proj", "k_proj", "v_proj"]
        .iter()
        .position(|name| *name == projection)?;
    let len = config.head_dim;
    let blocks = config.num_attention_heads;
    Some(TensorRows {
        first: place * len,
        len,
        stride: 3 * len,
        blocks,
    })
}
