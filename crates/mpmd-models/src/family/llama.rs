//! Llama and the many models in its form.

use super::{Family, LLAMA, PLAIN, base};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    read: |keys| {
        let mut config = base(keys, &LLAMA)?;
        config.qkv_bias = keys.flag("attention_bias", false)?;
        config.out_bias = config.qkv_bias;
        config.mlp_bias = keys.flag("mlp_bias", false)?;
        Ok(config)
    },
    ..PLAIN
};
