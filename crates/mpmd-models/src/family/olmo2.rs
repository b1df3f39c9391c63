//! OLMo 2: norms after attention and MLP only, and norms of all queries and of all keys.

use super::{Defaults, Family, LLAMA, PLAIN, base};
use crate::config::HeadNorm;

pub(super) const FAMILY: Family = Family {
    name: "olmo2",
    read: |keys| {
        let mut config = base(keys, &DEFAULTS)?;
        config.qkv_bias = keys.flag("attention_bias", false)?;
        config.out_bias = config.qkv_bias;
        config.head_norm = Some(HeadNorm::Width);
        config.norm_names = [
            None,
            Some("post_attention_layernorm"),
            None,
            Some("post_feedforward_layernorm"),
        ];
        Ok(config)
    },
    ..PLAIN
};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 50_304,
    norm_eps: 1e-5,
    divides: false,
    ..LLAMA
};
