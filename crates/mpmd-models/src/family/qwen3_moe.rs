//! Qwen 3 with experts in some layers.

use mpmd::Result;

use super::{Defaults, Family, PLAIN, base, qwen2, sparse, window};
use crate::config::{ConfigKeys, HeadNorm, ModelConfig};

pub(super) const FAMILY: Family = Family {
    name: "qwen3_moe",
    read,
    ..PLAIN
};

const DEFAULTS: Defaults = Defaults {
    hidden_size: 2048,
    intermediate_size: 6144,
    layers: 24,
    groups: Some(4),
    ..qwen2::DEFAULTS
};

fn read(keys: &ConfigKeys<'_>) -> Result<ModelConfig> {
    let mut config = base(keys, &DEFAULTS)?;
    config.qkv_bias = keys.flag("attention_bias", false)?;
    config.out_bias = config.qkv_bias;
    config.head_norm = Some(HeadNorm::Head);
    let is_used = keys.flag("use_sliding_window", false)?;
    let window = window(keys, Some(4096))?.filter(|_| is_used);
    // `transformers` has the window in all layers.
    keys.get::<usize>("max_window_layers", "a number of layers")?;
    config
        .layers
        .iter_mut()
        .for_each(|layer| layer.window = window);
    sparse(keys, &mut config, [128, 8, 768])?;
    Ok(config)
}
