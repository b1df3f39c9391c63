//! Phi 3 and 4: one tensor for queries, keys and values, and one for both inputs of the MLP.

use super::{Defaults, Family, LLAMA, PLAIN, TensorRows, base, dropout, window};
use crate::config::{ModelConfig, RopeDefaults};

pub(super) const FAMILY: Family = Family {
    name: "phi3",
    read: |keys| {
        let mut config = base(keys, &DEFAULTS)?;
        let window = window(keys, None)?;
        config
            .layers
            .iter_mut()
            .for_each(|layer| layer.window = window);
        let shares = ["attention_dropout", "resid_pdrop", "embd_pdrop"].map(|key| (key, 0.0));
        config.dropout = dropout(keys, &shares)?;
        for key in ["attention_bias", "mlp_bias", "lm_head_bias"] {
            keys.only(key, false)?;
        }
        for key in ["full_attn_mod", "interpolate_factor"] {
            keys.only(key, 1)?;
        }
        Ok(config)
    },
    words: &[
        ("q_proj", "qkv_proj"),
        ("k_proj", "qkv_proj"),
        ("v_proj", "qkv_proj"),
        ("gate_proj", "gate_up_proj"),
        ("up_proj", "gate_up_proj"),
    ],
    fused,
    ..PLAIN
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 32_064,
    hidden_size: 3072,
    intermediate_size: 8192,
    norm_eps: 1e-5,
    rope: RopeDefaults {
        share: Some(("partial_rotary_factor", 1.0)),
        positions: 4096,
        ..LLAMA.rope
    },
    divides: false,
    ..LLAMA
};

fn fused(config: &ModelConfig, projection: &str) -> Option<TensorRows> {
    let inner = config.intermediate_size;
    let queries = config.num_attention_heads * config.head_dim;
    let keys = config.num_key_value_heads * config.head_dim;
    let (start, rows) = match projection {
        "q_proj" => (0, queries),
        "k_proj" => (queries, keys),
        "v_proj" => (queries + keys, keys),
        "gate_proj" => (0, inner),
        "up_proj" => (inner, inner),
        _ => return None,
    };
    Some(TensorRows::block(start, rows))
}
