//! The config of a Llama-type model: `config.json` of a folder, in its old and its new form.

use std::path::Path;

use mpmd::Result;
use mpmd::train::tensors::read_regular;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::rope::{Rope, Scaling};
use crate::unexpected;

/// The description of a config, for messages.
pub(crate) const EXPECTED: &str = "the config of a Llama-type model";
/// Limit on the size of the file, in bytes.
pub(crate) const LARGEST_FILE: u64 = 1 << 20;
/// Limit on each size in a config, so that products of sizes do not overflow.
const LARGEST: usize = (1 << 31) - 1;
/// The key of the number of positions.
pub(crate) const POSITIONS: &str = "max_position_embeddings";
/// The number of positions of a config without the key.
const DEFAULT_POSITIONS: usize = 2048;
/// Limit on the number of layers, whose names are kept in memory.
const MOST_LAYERS: usize = 10_000;

/// The sizes and settings of a Llama-type model. The fields have the names of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Number of tokens that the embedding has rows for.
    pub vocab_size: usize,
    /// Width of the embedding and of each layer's output.
    pub hidden_size: usize,
    /// Width inside the MLP of a layer.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of heads of queries.
    pub num_attention_heads: usize,
    /// Number of heads of keys and values. Each serves a group of query heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Number of positions that the model was made for, before a linear scaling.
    pub max_position_embeddings: usize,
    /// Number that is added to the mean square in a norm.
    pub rms_norm_eps: f64,
    /// True if the output uses the weight of the embedding.
    pub tie_word_embeddings: bool,
    /// True if the projections of the attention have biases.
    pub attention_bias: bool,
    /// True if the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Share of the attention's probabilities that training would drop. It must be zero to train.
    pub attention_dropout: f64,
    /// The rotary embedding of positions.
    pub rope: Rope,
}

impl Config {
    /// Reads a `config.json`. A missing setting has the default of the library `transformers`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or describes no Llama-type model. The message names the file,
    /// the key, the expected and the found value.
    pub fn read(file: &Path) -> Result<Self> {
        let text =
            read_regular(file, LARGEST_FILE).map_err(|why| unexpected(file, "", EXPECTED, why))?;
        let map: Map<String, Value> =
            serde_json::from_slice(&text).map_err(|why| unexpected(file, "", EXPECTED, why))?;
        let keys = Keys { file, prefix: "", map: &map };
        let kind: String = keys.required("model_type", "\"llama\"")?;
        if kind != "llama" {
            return Err(unexpected(file, "model_type", "\"llama\"", format!("{kind:?}")));
        }
        let activation = keys.or("hidden_act", "\"silu\"", "silu".to_owned())?;
        if activation != "silu" {
            return Err(unexpected(file, "hidden_act", "\"silu\"", format!("{activation:?}")));
        }
        let hidden_size = keys.size("hidden_size", 4096)?;
        let heads = keys.size("num_attention_heads", 32)?;
        let groups = keys.size("num_key_value_heads", heads)?;
        let default = (hidden_size / heads).max(1);
        let config = Self {
            vocab_size: keys.size("vocab_size", 32_000)?,
            hidden_size,
            intermediate_size: keys.size("intermediate_size", 11_008)?,
            num_hidden_layers: keys.size("num_hidden_layers", 32)?,
            num_attention_heads: heads,
            num_key_value_heads: groups,
            head_dim: keys.size("head_dim", default)?,
            max_position_embeddings: keys.size(POSITIONS, DEFAULT_POSITIONS)?,
            rms_norm_eps: keys.or("rms_norm_eps", "a number", 1e-6)?,
            tie_word_embeddings: keys.or("tie_word_embeddings", "true or false", false)?,
            attention_bias: keys.or("attention_bias", "true or false", false)?,
            mlp_bias: keys.or("mlp_bias", "true or false", false)?,
            attention_dropout: keys.or("attention_dropout", "a number", 0.0)?,
            rope: rope(&keys)?,
        };
        let fits = |key, is_right, expected: String, found: usize| match is_right {
            true => Ok(()),
            false => Err(unexpected(file, key, expected, found)),
        };
        let multiple = format!("a multiple of num_attention_heads, {heads}");
        fits("hidden_size", hidden_size.is_multiple_of(heads), multiple, hidden_size)?;
        let divisor = format!("a divisor of num_attention_heads, {heads}");
        fits("num_key_value_heads", heads.is_multiple_of(groups), divisor, groups)?;
        let (layers, few) = (config.num_hidden_layers, format!("at most {MOST_LAYERS}"));
        fits("num_hidden_layers", layers <= MOST_LAYERS, few, layers)?;
        let even = config.head_dim.is_multiple_of(2);
        fits("head_dim", even, "an even number".to_owned(), config.head_dim)?;
        Ok(config)
    }

    /// Returns the most tokens of a sequence. The positions of a config count before a linear
    /// scaling, and after the others.
    pub(crate) fn positions(&self) -> usize {
        match self.rope.scaling {
            Scaling::Linear { factor } => {
                (self.max_position_embeddings as f64 * factor.max(1.0)) as usize
            }
            Scaling::Default | Scaling::Llama3 { .. } => self.max_position_embeddings,
        }
    }
}

/// Reads the settings of the rotary embedding: `rope_parameters`, or in the old form `rope_theta`
/// and `rope_scaling`.
fn rope(keys: &Keys<'_>) -> Result<Rope> {
    const OBJECT: &str = "an object or null";
    let theta = keys.or("rope_theta", "a number", 10_000.0)?;
    let old: Option<Map<String, Value>> = keys.get("rope_scaling", OBJECT)?;
    let new: Option<Map<String, Value>> = keys.get("rope_parameters", OBJECT)?;
    let (prefix, map) = match (old.filter(|old| !old.is_empty()), new) {
        (Some(old), _) => ("rope_scaling.", old),
        (None, new) => ("rope_parameters.", new.unwrap_or_default()),
    };
    let scaling = Keys { file: keys.file, prefix, map: &map };
    let theta = scaling.or("rope_theta", "a number", theta)?;
    // A null is no setting, here as for all keys.
    let is_named = map.get("rope_type").is_some_and(|kind| !kind.is_null());
    let name = if is_named { "rope_type" } else { "type" };
    let kinds = "\"default\", \"linear\" or \"llama3\"";
    let kind = scaling.or(name, kinds, "default".to_owned())?;
    let rotated = keys.or("partial_rotary_factor", "1", 1.0)?;
    let rotated = scaling.or("partial_rotary_factor", "1", rotated)?;
    if rotated != 1.0 {
        return Err(unexpected(keys.file, "partial_rotary_factor", 1, rotated));
    }
    let number = |key| scaling.required(key, "a number");
    let scaling = match kind.as_str() {
        "default" => Scaling::Default,
        "linear" => Scaling::Linear { factor: number("factor")? },
        "llama3" => {
            let key = "original_max_position_embeddings";
            let positions = keys.size(POSITIONS, DEFAULT_POSITIONS)?;
            Scaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: scaling.size(key, positions)?,
            }
        }
        _ => {
            let found = format!("{kind:?}");
            return Err(unexpected(keys.file, &format!("{prefix}{name}"), kinds, found));
        }
    };
    Ok(Rope { theta, scaling })
}

/// The keys of an object in a config.
struct Keys<'a> {
    file: &'a Path,
    /// Path of the object, for messages: empty, or with a dot at its end.
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl Keys<'_> {
    /// Returns the value of a key. `None` if it is absent or null.
    fn get<T: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<Option<T>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value.clone())
                .map(Some)
                .map_err(|_| self.unexpected(key, expected, value)),
        }
    }

    fn or<T: DeserializeOwned>(&self, key: &str, expected: &str, default: T) -> Result<T> {
        Ok(self.get(key, expected)?.unwrap_or(default))
    }

    fn required<T: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<T> {
        self.get(key, expected)?.ok_or_else(|| self.unexpected(key, expected, "none"))
    }

    fn size(&self, key: &str, default: usize) -> Result<usize> {
        let expected = format!("a number from 1 to {LARGEST}");
        let size = self.or(key, &expected, default)?;
        match (1..=LARGEST).contains(&size) {
            true => Ok(size),
            false => Err(self.unexpected(key, &expected, size)),
        }
    }

    fn unexpected(&self, key: &str, expected: &str, found: impl std::fmt::Display) -> mpmd::Error {
        unexpected(self.file, &format!("{}{key}", self.prefix), expected, found)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Reads a config of these settings, beside the model type.
    fn read(settings: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        let comma = if settings.is_empty() { "" } else { "," };
        fs::write(&file, format!("{{\"model_type\": \"llama\"{comma} {settings}}}")).unwrap();
        Config::read(&file).map_err(|error| {
            let prefix = format!("{}: ", file.display());
            error.to_string().strip_prefix(&prefix).expect("the file is named").to_owned()
        })
    }

    #[test]
    fn missing_settings_have_the_defaults_of_transformers() {
        let config = read("").unwrap();
        assert_eq!((config.vocab_size, config.hidden_size), (32_000, 4096));
        assert_eq!((config.num_key_value_heads, config.head_dim), (32, 128));
        assert_eq!(config.rope, Rope { theta: 10_000.0, scaling: Scaling::Default });
        assert!(!config.tie_word_embeddings && !config.attention_bias && !config.mlp_bias);
    }

    #[test]
    fn old_and_new_forms_of_rope_are_equal() {
        let rest = r#""factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0"#;
        let old = format!(
            r#""rope_theta": 5e5, "max_position_embeddings": 99,
               "rope_scaling": {{"rope_type": "llama3", {rest}}}"#
        );
        let new = format!(
            r#""rope_scaling": null, "rope_parameters": {{"rope_type": "llama3", {rest},
               "rope_theta": 500000, "original_max_position_embeddings": 99}}"#
        );
        let old = read(&old).unwrap().rope;
        assert_eq!(read(&new).unwrap().rope, old);
        let (low_freq_factor, high_freq_factor) = (1.0, 4.0);
        let original_max_position_embeddings = 99;
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        };
        assert_eq!(old, Rope { theta: 5e5, scaling });
        for names in [r#""type": "linear""#, r#""rope_type": null, "type": "linear""#] {
            for object in ["rope_scaling", "rope_parameters"] {
                let settings = format!(r#""{object}": {{{names}, "factor": 2}}"#);
                let linear = read(&settings).unwrap().rope;
                assert_eq!(linear.scaling, Scaling::Linear { factor: 2.0 }, "{settings}");
            }
        }
        let none = read(r#""rope_scaling": {"rope_type": null, "type": null}"#).unwrap().rope;
        assert_eq!(none.scaling, Scaling::Default);
    }

    #[test]
    fn other_models_are_refused_by_key() {
        let kinds = r#""default", "linear" or "llama3""#;
        for (settings, expected) in [
            (r#""model_type": "gemma""#, r#"model_type: expected "llama", found "gemma""#),
            (r#""hidden_act": "gelu""#, r#"hidden_act: expected "silu", found "gelu""#),
            (
                r#""rope_scaling": {"type": "yarn"}"#,
                &format!("rope_scaling.type: expected {kinds}, found \"yarn\""),
            ),
            (
                r#""rope_parameters": {"rope_type": "linear"}"#,
                "rope_parameters.factor: expected a number, found none",
            ),
            (
                r#""hidden_size": "wide""#,
                "hidden_size: expected a number from 1 to 2147483647, found \"wide\"",
            ),
            (
                r#""num_hidden_layers": 0"#,
                "num_hidden_layers: expected a number from 1 to 2147483647, found 0",
            ),
            (
                r#""num_key_value_heads": 5"#,
                "num_key_value_heads: expected a divisor of num_attention_heads, 32, found 5",
            ),
            (
                r#""num_hidden_layers": 10001"#,
                "num_hidden_layers: expected at most 10000, found 10001",
            ),
            (r#""head_dim": 3"#, "head_dim: expected an even number, found 3"),
            (
                r#""hidden_size": 33"#,
                "hidden_size: expected a multiple of num_attention_heads, 32, found 33",
            ),
        ] {
            assert_eq!(read(settings).unwrap_err(), expected);
        }
    }
}
