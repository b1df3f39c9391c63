//! Configs that are read, and configs that are refused.

use std::fs;

use super::*;
use crate::rope::{Rope, Scaling};

/// Reads a config of these settings, beside the model type.
fn read(settings: &str) -> Result<Config, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let comma = if settings.is_empty() { "" } else { "," };
    fs::write(&file, format!("{{\"model_type\": \"llama\"{comma} {settings}}}")).unwrap();
    super::read(&file).map(|(_, config)| config).map_err(|error| {
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
        (r#""num_hidden_layers": 10001"#, "num_hidden_layers: expected at most 10000, found 10001"),
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
