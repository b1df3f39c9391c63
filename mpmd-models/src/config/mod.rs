//! The config of a model, read from the `config.json` of a folder: the values that choose the parts
//! of a decoder.

mod keys;
mod rope;

use std::path::Path;

use mpmd::Result;
use mpmd::candle::nn::Activation;
use mpmd::train::tensors::read_regular;
use serde_json::{Map, Value};

pub(crate) use keys::{Keys, word};
pub(crate) use rope::{RopeDefaults, rope, rope_of};

use crate::decoder::rope::Rope;
use crate::family::{self, FAMILIES};
use crate::unexpected;

/// The description of a config, for messages.
pub(crate) const EXPECTED: &str = "the config of a model";
/// Limit on the size of the file, in bytes.
pub(crate) const LARGEST_FILE: u64 = 1 << 20;
/// The key of the number of positions.
pub(crate) const POSITIONS: &str = "max_position_embeddings";

/// The sizes of a decoder, and the values that choose its parts. Sizes have the names that most
/// families give them in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family: `model_type` in `config.json`.
    pub family: &'static str,
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
    /// True if the output uses the weight of the embedding.
    pub tie_word_embeddings: bool,
    /// Factor of the embedding.
    pub embedding_scale: f64,
    /// True if a table of positions is added to the embedding.
    pub learned_positions: bool,
    /// How inputs are normed.
    pub norm: Norm,
    /// Number that is added to the variance or the mean square in a norm.
    pub norm_eps: f64,
    /// Names of a layer's norms: before and after the attention, before and after the MLP.
    pub norm_names: [Option<&'static str>; 4],
    /// True if the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the projection of the attention's result has a bias.
    pub out_bias: bool,
    /// What norms of queries and keys take together. `None` if there are none.
    pub head_norm: Option<HeadNorm>,
    /// Largest score of attention. A score `x` becomes `cap tanh(x / cap)`.
    pub score_cap: Option<f64>,
    /// True if the MLP is `down(activation(gate(x)) up(x))`, and not `down(activation(up(x)))`.
    pub is_gated: bool,
    /// Activation function of the MLP.
    pub activation: Activation,
    /// True if the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// True if attention and MLP of a layer have the same input.
    pub is_parallel: bool,
    /// Factor of what attention and MLP add to their input.
    pub residual_scale: f64,
    /// Divisor of the logits.
    pub logits_divisor: f64,
    /// Largest logit. A logit `x` becomes `cap tanh(x / cap)`.
    pub logits_cap: Option<f64>,
    /// The rotary embeddings of the layers.
    pub ropes: Vec<Rope>,
    /// The values of each layer's attention.
    pub layers: Vec<LayerConfig>,
    /// The first key by which training would drop values, and the share. Training needs none.
    pub dropout: Option<(&'static str, f64)>,
}

/// The kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// Scales to mean square 1, then by the weight.
    Rms,
    /// Scales to mean square 1, then by one plus the weight.
    RmsPlusOne,
    /// Scales to mean 0 and variance 1, then by the weight, and adds the bias.
    Layer,
}

/// What a norm of queries or keys takes together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadNorm {
    /// The elements of one head.
    Head,
    /// The elements of all heads.
    Width,
}

/// The values of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig {
    /// Number of keys that a query sees, its own included. `None` if it sees all before it.
    pub window: Option<usize>,
    /// Index of its rotary embedding in [`Config::ropes`].
    pub rope: Option<usize>,
    /// Factor of the products of queries and keys.
    pub scale: f64,
}

impl Config {
    /// Reads a `config.json`. A missing setting has the default of the library `transformers`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, describes no model of a known family, or has a key that may
    /// change results and that nothing handles. The message names the file, the key, the expected
    /// and the found value.
    pub fn read(file: &Path) -> Result<Self> {
        let text =
            read_regular(file, LARGEST_FILE).map_err(|why| unexpected(file, "", EXPECTED, why))?;
        let map: Map<String, Value> =
            serde_json::from_slice(&text).map_err(|why| unexpected(file, "", EXPECTED, why))?;
        let mut keys = Keys::new(file, map);
        let names: Vec<String> =
            FAMILIES.iter().map(|family| format!("{:?}", family.name)).collect();
        let names = names.join(", ");
        let kind: String = keys.required("model_type", &names)?;
        let Some(family) = family::named(&kind) else {
            return Err(keys.unexpected("model_type", names, format!("{kind:?}")));
        };
        keys.words = family.words;
        let config = Self { family: family.name, ..(family.read)(&keys)? };
        keys.only("is_encoder_decoder", false)?;
        keys.only("add_cross_attention", false)?;
        // Both are true in some folders, and change nothing here.
        for key in ["is_decoder", "tie_encoder_decoder"] {
            keys.flag(key, false)?;
        }
        keys.only("pruned_heads", Map::new())?;
        keys.finish(keys::HARMLESS)?;
        Ok(config)
    }

    /// Returns the family's word for a key.
    pub(crate) fn key<'a>(&self, key: &'a str) -> &'a str {
        family::named(self.family).map_or(key, |family| word(family.words, key))
    }

    /// Returns the most tokens of a sequence.
    pub(crate) fn positions(&self) -> usize {
        let own = self.max_position_embeddings;
        self.ropes.iter().map(|rope| rope.positions(own)).max().unwrap_or(own)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::decoder::rope::Scaling;

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
        assert_eq!(config.ropes, [Rope { theta: 10_000.0, dim: 128, scaling: Scaling::Default }]);
        assert!(!config.tie_word_embeddings && !config.qkv_bias && !config.mlp_bias);
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
        let old = read(&old).unwrap().ropes[0].clone();
        assert_eq!(read(&new).unwrap().ropes[0], old);
        let (low_freq_factor, high_freq_factor) = (1.0, 4.0);
        let original_max_position_embeddings = 99;
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        };
        assert_eq!(old, Rope { theta: 5e5, dim: 128, scaling });
        for names in [r#""type": "linear""#, r#""rope_type": null, "type": "linear""#] {
            for object in ["rope_scaling", "rope_parameters"] {
                let settings = format!(r#""{object}": {{{names}, "factor": 2}}"#);
                let linear = read(&settings).unwrap().ropes[0].clone();
                assert_eq!(linear.scaling, Scaling::Linear { factor: 2.0 }, "{settings}");
            }
        }
        let none =
            read(r#""rope_scaling": {"rope_type": null, "type": null}"#).unwrap().ropes[0].clone();
        assert_eq!(none.scaling, Scaling::Default);
    }

    #[test]
    fn other_models_are_refused_by_key() {
        let kinds = r#""default", "linear", "llama3", "yarn", "longrope" or "dynamic""#;
        let known = r#""llama", "mistral", "qwen2""#;
        let unknown = "expected no such key: it may change results, and nothing here handles it";
        for (settings, expected) in [
            (r#""model_type": "bert""#, &*format!("model_type: expected {known}")),
            (r#""hidden_act": "relu""#, "hidden_act: expected \"silu\""),
            (
                r#""rope_scaling": {"type": "wool"}"#,
                &format!("rope_scaling.type: expected {kinds}, found \"wool\""),
            ),
            (
                r#""rope_scaling": {"type": "yarn"}"#,
                "rope_scaling.factor: expected a number, found none",
            ),
            (
                r#""rope_scaling": {"type": "linear", "factor": 2, "pace": 1}"#,
                &format!("rope_scaling.pace: {unknown}, found 1"),
            ),
            (
                r#""quantization_config": {"bits": 4}"#,
                &format!("quantization_config: {unknown}, found {{\"bits\":4}}"),
            ),
            (r#""sliding_window": 8"#, &format!("sliding_window: {unknown}, found 8")),
            (r#""partial_rotary_factor": 0.5"#, "partial_rotary_factor: expected 1, found 0.5"),
            (r#""pruned_heads": {"0": [1]}"#, "pruned_heads: expected {}, found {\"0\":"),
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
            let said = read(settings).unwrap_err();
            assert!(said.starts_with(expected), "{said}, not {expected}");
        }
    }
}
