//! Qwen 2 and 2.5: biases of queries, keys and values, and a sliding window in the upper layers.

use mpmd::Result;

use super::{Defaults, Family, LLAMA, PLAIN, base, slide, window};
use crate::config::{ConfigKeys, ModelConfig, RopeDefaults};

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    read: |keys| {
        let mut config = base(keys, &DEFAULTS)?;
        config.qkv_bias = true;
        keys.only("use_mrope", false)?;
        windows(keys, config)
    },
    ..PLAIN
};

pub(super) const DEFAULTS: Defaults = Defaults {
    vocab_size: 151_936,
    intermediate_size: 22_016,
    groups: Some(32),
    rope: RopeDefaults {
        positions: 32_768,
        ..LLAMA.rope
    },
    divides: false,
    ..LLAMA
};

/// Sets the sliding window of the layers from `max_window_layers` on, if `use_sliding_window` is
/// true.
pub(super) fn windows(keys: &ConfigKeys<'_>, mut config: ModelConfig) -> Result<ModelConfig> {
    let is_used = keys.flag("use_sliding_window", false)?;
    let window = window(keys, Some(4096))?.filter(|_| is_used);
    let full: usize = keys.or("max_window_layers", "a number of layers", 28)?;
    slide(keys, &mut config, window, |layer| {
        window.is_some() && layer >= full
    })?;
    Ok(config)
}
