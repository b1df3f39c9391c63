//! Qwen 3: norms of each head's queries and keys.

use super::qwen2::{self, windows};
use super::{Defaults, Family, PLAIN, base};
use crate::config::HeadNorm;

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    read: |keys| {
        let mut config = base(
            keys,
            &Defaults {
                head_dim: Some(128),
                ..qwen2::DEFAULTS
            },
        )?;
        config.qkv_bias = keys.flag("attention_bias", false)?;
        config.out_bias = config.qkv_bias;
        config.head_norm = Some(HeadNorm::Head);
        windows(keys, config)
    },
    ..PLAIN
};
