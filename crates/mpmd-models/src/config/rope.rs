//! The settings of rotary embeddings, in their old and their new form.

use mpmd::Result;

use super::POSITIONS;
use super::keys::ConfigKeys;
use crate::rope::{Rope, Scaling};

/// The names of the kinds of RoPE scaling, for messages.
const KINDS: &str = r#""default", "linear", "llama3", "yarn", "longrope" or "dynamic""#;
const ORIGINAL: &str = "original_max_position_embeddings";
/// Keys that only some kinds of RoPE scaling read, separated by blanks. The other kinds ignore
/// them.
const OTHERS: &str = "attention_factor beta_fast beta_slow factor finetuned high_freq_factor \
    long_factor low_freq_factor mscale mscale_all_dim original_max_position_embeddings \
    short_factor truncate type";

/// Defaults for the settings of a rotary embedding that a config lacks.
pub(crate) struct RopeDefaults {
    /// Key of the base `theta` at the top of the config, and its default.
    pub(crate) theta: (&'static str, f64),
    /// Key of the share of a head's elements that rotate, and its default. `None` if the whole head
    /// rotates in this family.
    pub(crate) share: Option<(&'static str, f64)>,
    /// Default of the key `max_position_embeddings`.
    pub(crate) positions: usize,
}

/// Reads the rotary embedding from `rope_scaling` or `rope_parameters`, with settings such as
/// `rope_theta` also at the top of the config.
pub(crate) fn rope(keys: &ConfigKeys<'_>, or: &RopeDefaults, head_dim: usize) -> Result<Rope> {
    let new = keys.object("rope_parameters")?;
    let scaling = keys.object("rope_scaling")?.or(new);
    rope_of(keys, scaling.as_ref(), or, head_dim)
}

/// Reads a rotary embedding from an object of the config. Settings that the object lacks are read
/// from the top of the config, or have the defaults `or`.
pub(crate) fn rope_of(
    keys: &ConfigKeys<'_>,
    object: Option<&ConfigKeys<'_>>,
    or: &RopeDefaults,
    head_dim: usize,
) -> Result<Rope> {
    const SHARE: &str = "partial_rotary_factor";
    let (key, theta) = or.theta;
    let theta = keys.positive(key)?.unwrap_or(theta);
    let (key, share) = or.share.unwrap_or((SHARE, 1.0));
    let mut share = keys.number(key, share)?;
    let top = keys.unless_null(ORIGINAL, None, |keys, key| keys.size(key, 1))?;
    let plain = |share| {
        let dim = (head_dim as f64 * share) as usize;
        Rope {
            theta,
            dim,
            scaling: Scaling::Default,
        }
    };
    let Some(object) = object else {
        return check(keys, or, share, head_dim).map(|()| plain(share));
    };
    let theta = object.positive("rope_theta")?.unwrap_or(theta);
    share = object.number(SHARE, share)?;
    check(keys, or, share, head_dim)?;
    let name = if object.get::<String>("rope_type", KINDS)?.is_some() {
        "rope_type"
    } else {
        "type"
    };
    let kind = object.or(name, KINDS, "default".to_owned())?;
    let number = |key| {
        object
            .positive(key)?
            .ok_or_else(|| object.unexpected(key, "a number", "none"))
    };
    // As in `transformers`, the number at the top goes first.
    let original = || match top {
        Some(top) => Ok(top),
        None => object.size(ORIGINAL, keys.size(POSITIONS, or.positions)?),
    };
    let scaling = match kind.as_str() {
        "default" => Scaling::Default,
        "linear" => Scaling::Linear {
            factor: number("factor")?,
        },
        "llama3" => Scaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: original()?,
        },
        "dynamic" => {
            let original = keys.size(POSITIONS, or.positions)?;
            Scaling::Dynamic {
                factor: number("factor")?,
                original,
            }
        }
        "yarn" => yarn(object, number("factor")?, original()?)?,
        "longrope" | "su" => longrope(keys, object, original()?, or, plain(share).pairs())?,
        _ => return Err(object.unexpected(name, KINDS, format!("{kind:?}"))),
    };
    object.finish(OTHERS)?;
    Ok(Rope {
        theta,
        scaling,
        ..plain(share)
    })
}

fn check(keys: &ConfigKeys<'_>, or: &RopeDefaults, share: f64, head_dim: usize) -> Result<()> {
    if share == 1.0 && !head_dim.is_multiple_of(2) {
        return Err(keys.unexpected("head_dim", "an even number", head_dim));
    }
    match or.share {
        None if share != 1.0 => Err(keys.unexpected("partial_rotary_factor", 1, share)),
        Some((key, _)) if !(0.0..=1.0).contains(&share) => {
            Err(keys.unexpected(key, "a number from 0 to 1", share))
        }
        _ => Ok(()),
    }
}

fn yarn(object: &ConfigKeys<'_>, factor: f64, original: usize) -> Result<Scaling> {
    let grown = |share: f64| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * share * factor.ln() + 1.0
        }
    };
    // Zero is no setting.
    let set = |key| match object.get(key, "a number")? {
        Some(0.0) => Ok(None),
        _ => object.positive(key),
    };
    let given = object.positive("attention_factor")?;
    let amplitude = match (given, set("mscale")?, set("mscale_all_dim")?) {
        (Some(amplitude), ..) => amplitude,
        (None, Some(mscale), Some(all)) => grown(mscale) / grown(all),
        _ => grown(1.0),
    };
    Ok(Scaling::Yarn {
        factor,
        original,
        amplitude,
        fast: set("beta_fast")?.unwrap_or(32.0),
        slow: set("beta_slow")?.unwrap_or(1.0),
        truncate: object.flag("truncate", true)?,
    })
}

fn longrope(
    keys: &ConfigKeys<'_>,
    object: &ConfigKeys<'_>,
    original: usize,
    or: &RopeDefaults,
    pairs: usize,
) -> Result<Scaling> {
    let factors = |key| {
        let expected = format!("a list of {pairs} numbers");
        let factors: Vec<f64> = object.required(key, &expected)?;
        if factors.len() != pairs {
            return Err(object.unexpected(key, expected, format!("{} numbers", factors.len())));
        }
        match factors.iter().find(|factor| **factor <= 0.0) {
            Some(wrong) => Err(object.unexpected(key, "a list of numbers of more than 0", wrong)),
            None => Ok(factors),
        }
    };

    let factor = match object.positive("factor")? {
        Some(factor) => factor,
        None => keys.size(POSITIONS, or.positions)? as f64 / original as f64,
    };
    let amplitude = match object.positive("attention_factor")? {
        Some(amplitude) => amplitude,
        None if factor <= 1.0 => 1.0,
        None if original == 1 => return Err(object.unexpected(ORIGINAL, "2 or more", original)),
        None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(Scaling::LongRope {
        short: factors("short_factor")?,
        long: factors("long_factor")?,
        original,
        amplitude,
    })
}
