//! Granite: Llama with factors of embedding, scores, residuals and logits.

use super::{Defaults, Family, LLAMA, PLAIN, base};

pub(super) const FAMILY: Family = Family {
    name: "granite",
    read: |keys| {
        let mut config = base(
            keys,
            &Defaults {
                divides: false,
                ..LLAMA
            },
        )?;
        config.qkv_bias = keys.flag("attention_bias", false)?;
        config.out_bias = config.qkv_bias;
        config.mlp_bias = keys.flag("mlp_bias", false)?;
        config.embedding_scale = keys.number("embedding_multiplier", 1.0)?;
        config.residual_scale = keys.number("residual_multiplier", 1.0)?;
        config.logits_divisor = keys.positive("logits_scaling")?.unwrap_or(1.0);
        let scale = keys.number("attention_multiplier", 1.0)?;
        config
            .layers
            .iter_mut()
            .for_each(|layer| layer.scale = scale);
        Ok(config)
    },
    ..PLAIN
};
