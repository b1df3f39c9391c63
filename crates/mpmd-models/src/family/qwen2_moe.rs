//! Qwen 1.5 and 2 with experts in some layers, and one expert that all tokens share.

use mpmd::Result;

use super::{Defaults, Family, PLAIN, base, qwen2, slide, sparse, window};
use crate::config::{ConfigKeys, ModelConfig};

pub(super) const FAMILY: Family = Family {
    name: "qwen2_moe",
    read,
    ..PLAIN
};

const DEFAULTS: Defaults = Defaults {
    hidden_size: 2048,
    intermediate_size: 5632,
    layers: 24,
    heads: 16,
    groups: Some(16),
    ..qwen2::DEFAULTS
};

fn read(keys: &ConfigKeys<'_>) -> Result<ModelConfig> {
    let mut config = base(keys, &DEFAULTS)?;
    config.qkv_bias = keys.flag("qkv_bias", true)?;
    let full: usize = keys.or("max_window_layers", "a number of layers", 28)?;
    // A window that is not used is 0.
    let window = match keys.flag("use_sliding_window", false)? {
        true => window(keys, Some(4096))?,
        false => keys.get::<usize>("sliding_window", "a size")?.and(None),
    };
    // Every second one of the lower layers, and not the upper ones, as in `qwen2`.
    let slides = |layer: usize| window.is_some() && layer.is_multiple_of(2) && layer < full;
    slide(keys, &mut config, window, slides)?;
    sparse(keys, &mut config, [60, 4, 1408])?;
    let shared = keys.size("shared_expert_intermediate_size", 5632)?;
    config
        .experts
        .iter_mut()
        .for_each(|experts| experts.shared = Some(shared));
    Ok(config)
}
