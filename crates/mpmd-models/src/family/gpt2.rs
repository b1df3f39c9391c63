//! GPT-2: learned positions, layer norms, and transposed weights with one for queries, keys and
//! values.

use mpmd::Result;

use super::{Defaults, Family, LLAMA, TensorRows, base, check_heads, dropout};
use crate::config::{ConfigKeys, ModelConfig, NormKind, RopeDefaults};

pub(super) const FAMILY: Family = Family {
    name: "gpt2",
    read,
    words: &[
        ("hidden_size", "n_embd"),
        ("intermediate_size", "n_inner"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("max_position_embeddings", "n_positions"),
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("model", "transformer"),
        ("embed_tokens", "wte"),
        ("embed_positions", "wpe"),
        ("layers", "h"),
        ("norm", "ln_f"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        ("self_attn", "attn"),
        ("q_proj", "c_attn"),
        ("k_proj", "c_attn"),
        ("v_proj", "c_attn"),
        ("o_proj", "c_proj"),
        ("up_proj", "c_fc"),
        ("down_proj", "c_proj"),
    ],
    fused,
    is_transposed: true,
    ignored: &["attn.bias", "attn.masked_bias"],
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 50_257,
    hidden_size: 768,
    layers: 12,
    heads: 12,
    norm_eps: 1e-5,
    is_tied: true,
    activation: ("activation_function", "gelu_new"),
    rope: RopeDefaults {
        positions: 1024,
        ..LLAMA.rope
    },
    is_rotary: false,
    ..LLAMA
};

fn read(keys: &ConfigKeys<'_>) -> Result<ModelConfig> {
    let mut config = base(keys, &DEFAULTS)?;
    check_heads(keys, &config)?;
    config.intermediate_size = keys.size("intermediate_size", 4 * config.hidden_size)?;
    config.learned_positions = true;
    config.norm = NormKind::Layer;
    config.qkv_bias = true;
    config.out_bias = true;
    config.mlp_bias = true;
    config.is_gated = false;
    let shares = ["attn_pdrop", "resid_pdrop", "embd_pdrop"].map(|key| (key, 0.1));
    config.dropout = dropout(keys, &shares)?;
    let is_scaled = keys.flag("scale_attn_weights", true)?;
    let by_layer = keys.flag("scale_attn_by_inverse_layer_idx", false)?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let own = if is_scaled { layer.scale } else { 1.0 };
        layer.scale = if by_layer {
            own / (index + 1) as f64
        } else {
            own
        };
    }
    // Other names of numbers above.
    for key in ["n_ctx", "n_special"] {
        keys.get::<usize>(key, "a number")?;
    }
    keys.flag("predict_special_tokens", true)?;
    Ok(config)
}

fn fused(config: &ModelConfig, projection: &str) -> Option<TensorRows> {
    let place = ["q_proj", "k_proj", "v_proj"]
        .iter()
        .position(|name| *name == projection)?;
    Some(TensorRows::block(
        place * config.hidden_size,
        config.hidden_size,
    ))
}
