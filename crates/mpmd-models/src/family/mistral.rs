//! Mistral: Llama with a sliding window in all layers.

use super::{Defaults, Family, LLAMA, PLAIN, base, window};
use crate::config::RopeDefaults;

pub(super) const FAMILY: Family = Family {
    name: "mistral",
    read: |keys| {
        let mut config = base(keys, &DEFAULTS)?;
        let window = window(keys, Some(4096))?;
        config
            .layers
            .iter_mut()
            .for_each(|layer| layer.window = window);
        Ok(config)
    },
    ..PLAIN
};

pub(super) const DEFAULTS: Defaults = Defaults {
    intermediate_size: 14_336,
    groups: Some(8),
    rope: RopeDefaults {
        positions: 4096 * 32,
        ..LLAMA.rope
    },
    divides: false,
    ..LLAMA
};
