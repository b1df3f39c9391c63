//! Mixtral: Mistral with experts in each layer.

use super::{Defaults, Family, PLAIN, base, dropout, experts, mistral, window};
use crate::config::{ExpertsConfig, RopeDefaults};

pub(super) const FAMILY: Family = Family {
    name: "mixtral",
    read: |keys| {
        let mut config = base(keys, &DEFAULTS)?;
        let window = window(keys, None)?;
        let experts = experts(keys, config.num_hidden_layers, 8, 2)?;
        config.experts = Some(ExpertsConfig {
            width: config.intermediate_size,
            ..experts
        });
        for layer in &mut config.layers {
            layer.window = window;
            layer.has_experts = true;
        }
        let shares = ["attention_dropout", "router_jitter_noise"].map(|key| (key, 0.0));
        config.dropout = dropout(keys, &shares)?;
        Ok(config)
    },
    words: &[
        ("mlp", "block_sparse_moe"),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
        ("num_experts", "num_local_experts"),
        ("moe_intermediate_size", "intermediate_size"),
    ],
    ..PLAIN
};

const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-5,
    rope: RopeDefaults {
        theta: ("rope_theta", 1e6),
        ..mistral::DEFAULTS.rope
    },
    ..mistral::DEFAULTS
};
