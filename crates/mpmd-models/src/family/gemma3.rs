//! The language models of Gemma 3: two rotary embeddings, for layers with and without a window.

use mpmd::Result;

use super::gemma2::{self, gemma};
use super::{Defaults, Family, LLAMA, PLAIN, slide, window};
use crate::config::{ConfigKeys, HeadNorm, ModelConfig, RopeDefaults, rope_of};

pub(super) const FAMILY: Family = Family {
    name: "gemma3_text",
    read,
    ..PLAIN
};

const POSITIONS: usize = 131_072;

fn read(keys: &ConfigKeys<'_>) -> Result<ModelConfig> {
    let rope = |theta| RopeDefaults {
        theta,
        positions: POSITIONS,
        ..LLAMA.rope
    };
    let full = rope(("rope_theta", 1e6));
    let local = rope(("rope_local_base_freq", 1e4));
    let nested = keys.object("rope_parameters")?;
    let of = |kind| {
        nested
            .as_ref()
            .map_or(Ok(None), |nested| nested.object(kind))
    };
    let full_keys = of("full_attention")?;
    let local_keys = of("sliding_attention")?;
    if let Some(nested) = &nested {
        nested.finish("")?;
    }
    // The old form scales the layers without a window alone.
    let full_keys = keys.object("rope_scaling")?.or(full_keys);
    let defaults = Defaults {
        vocab_size: 262_208,
        rope: full,
        is_rotary: false,
        ..gemma2::DEFAULTS
    };
    let mut config = gemma(keys, &defaults, None)?;
    config.head_norm = Some(HeadNorm::Head);
    // `transformers` ignores it.
    if let Some(cap) = keys.get::<f64>("attn_logit_softcapping", "null")? {
        return Err(keys.unexpected("attn_logit_softcapping", "null", cap));
    }
    let window = window(keys, Some(4096))?;
    let pattern = keys.size("sliding_window_pattern", 6)?;
    keys.size("_sliding_window_pattern", 6)?;
    let slides = slide(keys, &mut config, window, |layer| {
        !(layer + 1).is_multiple_of(pattern)
    })?;
    config.ropes = vec![
        rope_of(keys, full_keys.as_ref(), &defaults.rope, config.head_dim)?,
        rope_of(keys, local_keys.as_ref(), &local, config.head_dim)?,
    ];
    for (layer, slides) in config.layers.iter_mut().zip(slides) {
        layer.rope = Some(usize::from(slides));
    }
    Ok(config)
}
