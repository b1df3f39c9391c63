//! The scaling of a rotary embedding in a GGUF file, as the object that a `config.json` has.

use std::f64::consts::PI;

use mpmd::Result;
use mpmd_gguf::GgufFile;
use serde_json::{Value, json};

use super::keys::{MetadataKeys, decimal, of_gguf};
use crate::error::unexpected;

/// The tensor with a divisor for the frequency of each pair.
pub(super) const FREQUENCIES: &str = "rope_freqs.weight";
/// The tensors with the divisors for short and for long sequences.
pub(super) const SHORT: &str = "rope_factors_short.weight";
pub(super) const LONG: &str = "rope_factors_long.weight";
/// The bounds of the scaling of Llama 3 in all models that are known, in turns.
const LOW: f64 = 1.0;
const HIGH: f64 = 4.0;
/// The original context of Llama 3, in tokens.
const ORIGINAL: u64 = 8192;
/// Largest relative difference of a divisor from the rule of Llama 3, as files have them in f32.
const TOLERANCE: f64 = 1e-5;

/// Returns the scaling of a rotary embedding over `turned` elements of a head. `None` without one.
///
/// # Errors
///
/// If the keys contradict each other, or ask for something else.
pub(super) fn scaling(
    keys: &MetadataKeys<'_>,
    base: f64,
    turned: u64,
    positions: u64,
) -> Result<Option<Value>> {
    const KIND: &str = "rope.scaling.type";
    const FACTOR: &str = "rope.scaling.factor";
    let file = keys.file();
    let kind = keys.text(KIND)?;
    let old = keys.number("rope.scale_linear")?;
    let factor = keys.number(FACTOR)?.or(old).filter(|factor| *factor != 0.0);
    let original = keys.count("rope.scaling.original_context_length")?;
    let pairs = (turned / 2) as usize;

    if let Some(short) = divisors(file, SHORT, pairs)? {
        let long = divisors(file, LONG, pairs)?;
        let long = long.ok_or_else(|| unexpected(file.path(), LONG, "a tensor", "none"))?;
        if !matches!(kind, None | Some("longrope")) {
            return Err(keys.unexpected(KIND, "\"longrope\"", format!("{kind:?}")));
        }
        let amplitude = keys.number("rope.scaling.attn_factor")?;
        let original = original.unwrap_or(positions);
        return Ok(Some(long_rope(short, long, original, positions, amplitude)));
    }

    keys.only_number("rope.scaling.attn_factor", 1.0)?;
    if let Some(divisors) = divisors(file, FREQUENCIES, pairs)? {
        if factor.is_some_and(|factor| factor != 1.0) {
            let expected = format!("no such key beside the tensor {FREQUENCIES}");
            return Err(keys.unexpected(FACTOR, expected, format!("{factor:?}")));
        }
        return Ok(Some(by_frequency(divisors, base, turned, positions)));
    }

    match kind {
        Some("none") => Ok(None),
        None | Some("linear") => Ok(factor
            .filter(|factor| *factor != 1.0)
            .map(|factor| json!({ "rope_type": "linear", "factor": factor }))),
        Some("yarn") => yarn(keys, factor, original.unwrap_or(positions)).map(Some),
        Some("longrope") => Err(unexpected(file.path(), SHORT, "a tensor", "none")),
        Some(other) => {
            let expected = "\"none\", \"linear\", \"yarn\" or \"longrope\"";
            Err(keys.unexpected(KIND, expected, format!("{other:?}")))
        }
    }
}

fn yarn(keys: &MetadataKeys<'_>, factor: Option<f64>, original: u64) -> Result<Value> {
    let mut scaling = json!({
        "rope_type": "yarn",
        "factor": factor.unwrap_or(1.0),
        "original_max_position_embeddings": original,
    });
    keys.only_number("rope.scaling.yarn_ext_factor", 1.0)?;
    keys.only_number("rope.scaling.yarn_log_multiplier", 0.0)?;
    for (key, name) in [
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
        ("rope.scaling.yarn_attn_factor", "attention_factor"),
    ] {
        if let Some(value) = keys.number(key)? {
            scaling[name] = value.into();
        }
    }
    Ok(scaling)
}

/// Returns a scaling with own divisors for each pair. `amplitude` is left out if it is the one that
/// follows from the two lengths.
fn long_rope(
    short: Vec<f64>,
    long: Vec<f64>,
    original: u64,
    positions: u64,
    amplitude: Option<f64>,
) -> Value {
    let mut scaling = json!({
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    });
    let growth = positions as f64 / original as f64;
    let usual = match growth > 1.0 {
        true => (1.0 + growth.ln() / (original as f64).ln()).sqrt(),
        false => 1.0,
    };
    let amplitude = amplitude.unwrap_or(1.0);
    if amplitude as f32 != usual as f32 {
        scaling["attention_factor"] = amplitude.into();
    }
    scaling
}

/// Returns the scaling that divides the frequency of each pair by these divisors: that of Llama 3
/// if they follow its rule, which no key tells, or else a list of them.
fn by_frequency(divisors: Vec<f64>, base: f64, turned: u64, positions: u64) -> Value {
    let factor = divisors.iter().copied().fold(1.0, f64::max);
    let original = original_context(&divisors, base, turned, factor);
    let rule = |pair: usize| {
        let turns = original as f64 / wave_length(base, turned, pair);
        let kept = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - kept) / factor + kept)
    };
    let follows =
        |(pair, divisor): (usize, &f64)| (divisor - rule(pair)).abs() <= TOLERANCE * rule(pair);
    if divisors.iter().enumerate().all(follows) {
        return json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": original,
        });
    }
    json!({
        "rope_type": "longrope",
        "short_factor": divisors.clone(),
        "long_factor": divisors,
        "original_max_position_embeddings": positions,
        "attention_factor": 1.0,
    })
}

/// Returns the length of the original context of a scaling of Llama 3: that of the first divisor
/// between 1 and `factor`, or the usual one.
fn original_context(divisors: &[f64], base: f64, turned: u64, factor: f64) -> u64 {
    let is_between = |divisor: &f64| *divisor > 1.0 && *divisor < factor;
    match divisors.iter().position(is_between) {
        None => ORIGINAL,
        Some(pair) => {
            let kept = (1.0 / divisors[pair] - 1.0 / factor) / (1.0 - 1.0 / factor);
            let turns = LOW + kept * (HIGH - LOW);
            (turns * wave_length(base, turned, pair)).round() as u64
        }
    }
}

/// Returns the number of tokens in which a pair turns once.
fn wave_length(base: f64, turned: u64, pair: usize) -> f64 {
    2.0 * PI * base.powf(2.0 * pair as f64 / turned as f64)
}

/// Reads a tensor with a divisor for each pair. `None` if the file lacks it.
fn divisors(file: &GgufFile, name: &str, pairs: usize) -> Result<Option<Vec<f64>>> {
    let Ok(tensor) = file.tensor(name) else {
        return Ok(None);
    };
    let expected = format!("{pairs} numbers of more than 0");
    if [tensor.rows(), tensor.columns()] != [1, pairs] {
        let found = format!("{} x {}", tensor.rows(), tensor.columns());
        return Err(unexpected(file.path(), name, expected, found));
    }
    let mut values = vec![0.0; pairs];
    file.read_rows(name, 0..1, 0..pairs, &mut values)
        .map_err(of_gguf)?;
    match values
        .iter()
        .find(|value| !(value.is_finite() && **value > 0.0))
    {
        Some(wrong) => Err(unexpected(file.path(), name, expected, wrong)),
        None => Ok(Some(values.into_iter().map(decimal).collect())),
    }
}
