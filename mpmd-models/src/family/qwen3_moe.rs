//! Qwen 3 with experts in some layers.

use mpmd::Result;

use super::{Defaults, Family, PLAIN, base, experts, qwen2, window};
use crate::config::{Config, Experts, HeadNorm, Keys};

pub(super) const FAMILY: Family = Family { name: "qwen3_moe", read, ..PLAIN };

const DEFAULTS: Defaults = Defaults {
    hidden_size: 2048,
    intermediate_size: 6144,
    layers: 24,
    groups: Some(4),
    ..qwen2::DEFAULTS
};

fn read(keys: &Keys<'_>) -> Result<Config> {
    let mut config = base(keys, &DEFAULTS)?;
    config.qkv_bias = keys.flag("attention_bias", false)?;
    config.out_bias = config.qkv_bias;
    config.head_norm = Some(HeadNorm::Head);
    let is_used = keys.flag("use_sliding_window", false)?;
    let window = window(keys, Some(4096))?.filter(|_| is_used);
    // `transformers` has the window in all layers.
    keys.get::<usize>("max_window_layers", "a number of layers")?;
    let count = keys.size("num_experts", 128)?;
    config.experts = Some(Experts {
        width: keys.size("moe_intermediate_size", 768)?,
        normalizes: keys.flag("norm_topk_prob", false)?,
        ..experts(keys, config.num_hidden_layers, count, 8)?
    });
    let step = keys.size("decoder_sparse_step", 1)?;
    let plain: Vec<usize> = keys.or("mlp_only_layers", "a list of layers", Vec::new())?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.window = window;
        layer.has_experts = !plain.contains(&index) && (index + 1).is_multiple_of(step);
    }
    Ok(config)
}
