//! Configs that are read, and configs that are refused.

use std::fs;

use super::*;
use crate::rope::{Rope, Scaling};

/// Reads a Llama config with these settings.
fn read(settings: &str) -> Result<ModelConfig, String> {
    let comma = if settings.is_empty() { "" } else { "," };
    read_text(&format!("{{\"model_type\": \"llama\"{comma} {settings}}}"))
}

fn read_text(config: &str) -> Result<ModelConfig, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    fs::write(&file, config).unwrap();
    read_keys(&file)
        .and_then(|keys| model_of(&file, keys))
        .map(|(_, config)| config)
        .map_err(|error| {
            let prefix = format!("{}: ", file.display());
            error
                .to_string()
                .strip_prefix(&prefix)
                .expect("the file is named")
                .to_owned()
        })
}

#[test]
fn missing_settings_have_the_defaults_of_transformers() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/folders/defaults.json");
    let configs: Vec<Value> = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(configs.len(), FAMILIES.len());
    for written in configs {
        let name = written["model_type"].as_str().unwrap();
        let bare = read_text(&format!("{{\"model_type\": \"{name}\"}}")).unwrap();
        assert_eq!(read_text(&written.to_string()).unwrap(), bare);
        assert_eq!(bare.family, name);
    }
}

#[test]
fn configs_of_hubs_are_read() {
    let read = |config: &str| read_text(config).unwrap();
    let gpt2 = read(
        r#"{"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "n_ctx": 512,
            "n_positions": 512, "summary_type": "cls_index", "summary_use_proj": true,
            "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}}"#,
    );
    assert_eq!(
        (gpt2.positions(), gpt2.dropout),
        (512, Some(("attn_pdrop", 0.1)))
    );
    let phi = read(
        r#"{"model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "attention_bias": false, "embd_pdrop": 0.0, "full_attn_mod": 1, "head_dim": null,
            "hidden_size": 48, "interpolate_factor": 1, "lm_head_bias": false, "mlp_bias": false,
            "num_attention_heads": 3, "max_position_embeddings": 4096, "sliding_window": 262144,
            "original_max_position_embeddings": 64, "partial_rotary_factor": 0.25,
            "rope_scaling": {"type": "su", "long_factor": [1, 2], "short_factor": [1, 1]}}"#,
    );
    let Scaling::LongRope {
        original: 64,
        amplitude,
        ..
    } = phi.ropes[0].scaling
    else {
        panic!("{phi:?}");
    };
    assert!(
        (amplitude - 2f64.sqrt()).abs() < 1e-12,
        "by the ratio of the positions, 64"
    );
    let gemma = read(
        r#"{"model_type": "gemma3_text", "attn_logit_softcapping": null, "rope_scaling": null,
            "cache_implementation": "hybrid", "num_hidden_layers": 12, "sliding_window": 512,
            "rope_local_base_freq": 100, "rope_theta": 3000, "sliding_window_pattern": 4}"#,
    );
    for (index, layer) in gemma.layers.iter().enumerate() {
        let slides = index % 4 != 3;
        assert_eq!(layer.window, slides.then_some(512));
        assert_eq!(
            gemma.ropes[layer.rope.unwrap()].theta,
            if slides { 100.0 } else { 3000.0 }
        );
    }
    let qwen = read(
        r#"{"model_type": "qwen2", "use_mrope": false, "use_sliding_window": false,
            "max_window_layers": 0, "sliding_window": 131072, "rope_scaling":
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}"#,
    );
    assert_eq!(
        (qwen.positions(), qwen.layers[31].window),
        (4 * 32_768, None)
    );
    let sparse = read(
        r#"{"model_type": "qwen2_moe", "decoder_sparse_step": 2, "hidden_act": "silu",
            "max_window_layers": 3, "mlp_only_layers": [3], "moe_intermediate_size": 1408,
            "norm_topk_prob": false, "num_experts": 60, "num_experts_per_tok": 4,
            "num_hidden_layers": 6, "output_router_logits": true, "router_aux_loss_coef": 0.02,
            "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
            "use_sliding_window": false}"#,
    );
    let experts = sparse.experts.unwrap();
    assert_eq!((experts.shared, experts.normalizes), (Some(5632), false));
    assert_eq!(experts.balance, Some(0.02));
    let with: Vec<bool> = sparse
        .layers
        .iter()
        .map(|layer| layer.has_experts)
        .collect();
    assert_eq!(with, [false, true, false, false, false, true]);
    assert!(sparse.qkv_bias && sparse.layers.iter().all(|layer| layer.window.is_none()));
    let pythia = read(
        r#"{"model_type": "gpt_neox", "hidden_act": "gelu", "rotary_emb_base": 500,
            "rotary_pct": 0.5, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}"#,
    );
    assert_eq!((pythia.ropes[0].theta, pythia.ropes[0].dim), (500.0, 48));
    let stable = read(
        r#"{"model_type": "stablelm", "hidden_dropout": 0.1, "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5, "qk_layernorm": true, "rope_theta": 500}"#,
    );
    assert_eq!((stable.ropes[0].theta, stable.ropes[0].dim), (500.0, 40));
    assert_eq!(stable.dropout, Some(("hidden_dropout", 0.1)));
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
    assert_eq!(
        old,
        Rope {
            theta: 5e5,
            dim: 128,
            scaling
        }
    );
    for names in [
        r#""type": "linear""#,
        r#""rope_type": null, "type": "linear""#,
    ] {
        for object in ["rope_scaling", "rope_parameters"] {
            let settings = format!(r#""{object}": {{{names}, "factor": 2}}"#);
            let linear = read(&settings).unwrap().ropes[0].clone();
            assert_eq!(
                linear.scaling,
                Scaling::Linear { factor: 2.0 },
                "{settings}"
            );
        }
    }
    let none = read(r#""rope_scaling": {"rope_type": null, "type": null}"#)
        .unwrap()
        .ropes[0]
        .clone();
    assert_eq!(none.scaling, Scaling::Default);
}

#[test]
fn other_models_are_refused_by_key() {
    let kinds = r#""default", "linear", "llama3", "yarn", "longrope" or "dynamic""#;
    let known = r#""llama", "mistral", "qwen2""#;
    let unknown = "expected no such key: it may change results, and nothing here handles it";
    let bert = read_text(r#"{"model_type": "bert"}"#).unwrap_err();
    let expected = format!("model_type: expected {known}");
    assert!(bert.starts_with(&expected), "{bert}, not {expected}");

    for (settings, expected) in [
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
        (
            r#""sliding_window": 8"#,
            &format!("sliding_window: {unknown}, found 8"),
        ),
        (
            r#""partial_rotary_factor": 0.5"#,
            "partial_rotary_factor: expected 1, found 0.5",
        ),
        (
            r#""pruned_heads": {"0": [1]}"#,
            "pruned_heads: expected {}, found {\"0\":",
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
        (
            r#""head_dim": 3"#,
            "head_dim: expected an even number, found 3",
        ),
        (
            r#""hidden_size": 33"#,
            "hidden_size: expected a multiple of num_attention_heads, 32, found 33",
        ),
    ] {
        let said = read(settings).unwrap_err();
        assert!(said.starts_with(expected), "{said}, not {expected}");
    }
}

#[test]
fn settings_that_a_family_lacks_are_refused() {
    for (config, expected) in [
        (
            r#""gpt2", "n_embd": 30, "n_head": 4"#,
            "n_embd: expected a multiple of n_head, 4, found 30",
        ),
        (
            r#""gpt2", "n_layer": 10001"#,
            "n_layer: expected at most 10000, found 10001",
        ),
        (
            r#""gpt2", "add_cross_attention": true"#,
            "add_cross_attention: expected false, found true",
        ),
        (
            r#""gpt2", "num_key_value_heads": 4"#,
            "num_key_value_heads: expected 12, found 4",
        ),
        (
            r#""gemma2", "use_bidirectional_attention": true"#,
            "use_bidirectional_attention: expected",
        ),
        (
            r#""gemma3_text", "attn_logit_softcapping": 50"#,
            "attn_logit_softcapping: expected null, found 50",
        ),
        (
            r#""gemma3_text", "rope_parameters": {"rope_theta": 5}"#,
            "rope_parameters.rope_theta: expected no such key",
        ),
        (
            r#""qwen3", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]"#,
            "sliding_window: expected a size, for the layers that layer_types has sliding, found \
             none",
        ),
        (
            r#""qwen2", "num_hidden_layers": 2, "layer_types": ["full_attention"]"#,
            "layer_types: expected 2 times \"full_attention\" or \"sliding_attention\", one for \
             each layer, found 1 of them",
        ),
        (
            r#""phi3", "rope_scaling":
               {"type": "longrope", "short_factor": [1], "long_factor": [1]}"#,
            "rope_scaling.short_factor: expected a list of 48 numbers, found 1 numbers",
        ),
        (
            r#""gpt_neox", "rotary_pct": 1.5"#,
            "rotary_pct: expected a number from 0 to 1, found 1.5",
        ),
        (
            r#""mixtral", "num_local_experts": 2000000000"#,
            "num_local_experts: expected at most 3125 in 32 layers, found 2000000000",
        ),
        (
            r#""qwen3_moe", "num_experts": 4"#,
            "num_experts_per_tok: expected at most 4, the number of experts, found 8",
        ),
        (
            r#""stablelm", "head_dim": 64"#,
            "head_dim: expected 80, found 64",
        ),
        (
            r#""mistral", "layer_types": ["full_attention"]"#,
            "layer_types: expected no such key",
        ),
    ] {
        let said = read_text(&format!("{{\"model_type\": {config}}}")).unwrap_err();
        assert!(said.starts_with(expected), "{said}, not {expected}");
    }
}

#[test]
fn numbers_that_results_are_divided_by_are_not_zero() {
    let longrope = |factors: &str| {
        format!(
            r#""phi3", "original_max_position_embeddings": 64, "hidden_size": 48,
               "num_attention_heads": 12, "rope_scaling": {{"type": "longrope", {factors}}}"#
        )
    };
    let scaling = |settings: &str| format!(r#""llama", "rope_scaling": {{{settings}}}"#);
    let llama3 = |low: f64, high: f64| {
        let turns = format!(r#""low_freq_factor": {low:?}, "high_freq_factor": {high:?}"#);
        scaling(&format!(r#""type": "llama3", "factor": 8, {turns}"#))
    };
    let more = "expected a number of more than 0, found";
    for (config, key) in [
        (r#""llama", "rope_theta": 0"#.to_owned(), "rope_theta"),
        (
            scaling(r#""type": "linear", "factor": 0"#),
            "rope_scaling.factor",
        ),
        (
            scaling(r#""type": "linear", "factor": -2"#),
            "rope_scaling.factor",
        ),
        (
            scaling(r#""type": "dynamic", "factor": 0.0"#),
            "rope_scaling.factor",
        ),
        (
            scaling(r#""type": "yarn", "factor": 0"#),
            "rope_scaling.factor",
        ),
        (
            scaling(r#""type": "yarn", "factor": 2, "attention_factor": 0"#),
            "rope_scaling.attention_factor",
        ),
        (
            scaling(r#""type": "yarn", "factor": 2, "beta_fast": -1"#),
            "rope_scaling.beta_fast",
        ),
        (llama3(0.0, 4.0), "rope_scaling.low_freq_factor"),
        (llama3(1.0, 0.0), "rope_scaling.high_freq_factor"),
        (
            longrope(r#""factor": 0, "short_factor": [1, 1], "long_factor": [1, 1]"#),
            "rope_scaling.factor",
        ),
        (
            r#""llama", "rope_parameters": {"rope_theta": 0}"#.to_owned(),
            "rope_parameters.rope_theta",
        ),
        (
            r#""gemma2", "attn_logit_softcapping": 0"#.to_owned(),
            "attn_logit_softcapping",
        ),
        (
            r#""gemma2", "final_logit_softcapping": -3"#.to_owned(),
            "final_logit_softcapping",
        ),
        (
            r#""gemma2", "query_pre_attn_scalar": 0"#.to_owned(),
            "query_pre_attn_scalar",
        ),
        (
            r#""granite", "logits_scaling": 0"#.to_owned(),
            "logits_scaling",
        ),
    ] {
        let said = read_text(&format!("{{\"model_type\": {config}}}")).unwrap_err();
        assert!(
            said.starts_with(&format!("{key}: {more}")),
            "{said}, not {key}"
        );
    }
    for (config, expected) in [
        (
            longrope(r#""short_factor": [1, 0], "long_factor": [1, 1]"#),
            "rope_scaling.short_factor: expected a list of numbers of more than 0, found 0",
        ),
        (
            longrope(r#""short_factor": [1, 2], "long_factor": [-1, 1]"#),
            "rope_scaling.long_factor: expected a list of numbers of more than 0, found -1",
        ),
        (
            r#""llama", "original_max_position_embeddings": 0"#.to_owned(),
            "original_max_position_embeddings: expected a number from 1 to",
        ),
    ] {
        let said = read_text(&format!("{{\"model_type\": {config}}}")).unwrap_err();
        assert!(said.starts_with(expected), "{said}, not {expected}");
    }
    // As in `transformers`, zero is no setting.
    let config = scaling(r#""type": "yarn", "factor": 2, "mscale": 0, "beta_fast": 0"#);
    read_text(&format!("{{\"model_type\": {config}}}")).unwrap();
}

/// Keys of public configs besides the sizes, as (family, keys): at least one config of a hub has
/// each of them with this value.
const PUBLIC: [(&str, &str); 15] = [
    (
        "llama",
        r#""attention_bias": false, "attention_dropout": 0.0, "is_llama_config": true,
           "mlp_bias": false, "pretraining_tp": 2, "rope_interleaved": false, "rope_scaling": null,
           "rope_theta": 1000000, "tie_word_embeddings": false, "use_cache": true,
           "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}"#,
    ),
    (
        "mistral",
        r#""attention_dropout": 0.0, "head_dim": 128, "rope_theta": 1000000.0,
           "sliding_window": null, "torch_dtype": "bfloat16", "use_cache": true"#,
    ),
    (
        "qwen2",
        r#""attention_dropout": 0.0, "max_window_layers": 70, "rope_theta": 1000000.0,
           "sliding_window": 131072, "use_mrope": false, "use_sliding_window": false"#,
    ),
    (
        "qwen3",
        r#""attention_bias": false, "attention_dropout": 0.0, "max_window_layers": 28,
           "rope_theta": 1000000, "sliding_window": null, "use_sliding_window": false"#,
    ),
    (
        "mixtral",
        r#""attention_dropout": 0.0, "num_experts_per_tok": 2, "num_local_experts": 8,
           "output_router_logits": false, "router_aux_loss_coef": 0.02,
           "router_jitter_noise": 0.0, "sliding_window": null"#,
    ),
    (
        "qwen2_moe",
        r#""decoder_sparse_step": 1, "max_window_layers": 21, "moe_intermediate_size": 1408,
           "norm_topk_prob": false, "num_experts": 60, "num_experts_per_tok": 4,
           "output_router_logits": false, "router_aux_loss_coef": 0.001,
           "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
           "use_sliding_window": false"#,
    ),
    (
        "qwen3_moe",
        r#""attention_bias": false, "decoder_sparse_step": 1, "max_window_layers": 94,
           "mlp_only_layers": [], "moe_intermediate_size": 1536, "norm_topk_prob": true,
           "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": false,
           "sliding_window": null, "use_sliding_window": false"#,
    ),
    (
        "gemma2",
        r#""attention_bias": false, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
           "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
           "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 144,
           "sliding_window": 4096, "sliding_window_size": 4096, "_attn_implementation": "eager""#,
    ),
    (
        "gemma3_text",
        r#""attn_logit_softcapping": null, "cache_implementation": "hybrid",
           "final_logit_softcapping": null, "query_pre_attn_scalar": 256,
           "rope_local_base_freq": 10000, "rope_scaling": null, "sliding_window": 512,
           "sliding_window_pattern": 6"#,
    ),
    (
        "phi3",
        r#""attention_bias": false, "embd_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1,
           "lm_head_bias": false, "mlp_bias": false, "original_max_position_embeddings": 4096,
           "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rope_scaling": null,
           "sliding_window": 262144"#,
    ),
    (
        "olmo2",
        r#""attention_bias": false, "hidden_act": "silu", "rope_scaling": null,
           "rope_theta": 500000, "tie_word_embeddings": false"#,
    ),
    (
        "granite",
        r#""attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
           "mlp_bias": false, "residual_multiplier": 0.22, "rope_theta": 5000000.0"#,
    ),
    (
        "gpt2",
        r#""n_ctx": 1024, "n_inner": null, "n_special": 0, "predict_special_tokens": true,
           "reorder_and_upcast_attn": true, "return_dict": false, "summary_activation": null,
           "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
           "summary_type": "cls_index", "summary_use_proj": true, "use_cache": false"#,
    ),
    (
        "gpt_neox",
        r#""attention_dropout": 0.0, "classifier_dropout": 0.1, "hidden_dropout": 0.0,
           "layer_norm_eps": 1e-05, "rotary_emb_base": 10000, "rotary_pct": 1.0,
           "tie_word_embeddings": false, "use_parallel_residual": false"#,
    ),
    (
        "stablelm",
        r#""layer_norm_eps": 1e-05, "partial_rotary_factor": 0.25, "qk_layernorm": false,
           "rope_theta": 10000, "use_parallel_residual": false, "use_qkv_bias": true"#,
    ),
];

#[test]
fn keys_of_public_configs_are_read() {
    for (family, keys) in PUBLIC {
        let read = read_text(&format!("{{\"model_type\": \"{family}\", {keys}}}"));
        assert_eq!(read.unwrap().family, family);
    }
    let twice = r#"{"model_type": "gemma2", "sliding_window": 4096, "sliding_window_size": 8}"#;
    let said = read_text(twice).unwrap_err();
    assert_eq!(said, "sliding_window_size: expected 4096, found 8");
}

#[test]
fn unknown_keys_that_ask_for_nothing_pass() {
    for keys in [
        r#""bias": false"#,
        r#""moe_layers": []"#,
        r#""no_rope_layers": null"#,
        r#""num_experts": 0"#,
        r#""quantization_config": {}"#,
        r#""router_jitter_noise": -0.0"#,
        r#""use_sliding_window": false"#,
        r#""rope_scaling": {"type": "linear", "factor": 2, "pace": 0, "steps": []}"#,
    ] {
        read(keys).unwrap();
    }
    for (keys, key) in [
        (r#""bias": true"#, "bias"),
        (r#""is_causal": false"#, "is_causal"),
        (r#""moe_layers": [0]"#, "moe_layers"),
        (r#""norm_first": false"#, "norm_first"),
        (r#""rank": 1"#, "rank"),
        (r#""scale_attn_weights": false"#, "scale_attn_weights"),
        (r#""skip_norms": 0"#, "skip_norms"),
        (r#""use_qk_norm": false"#, "use_qk_norm"),
        (r#""use_sliding_window": true"#, "use_sliding_window"),
        (r#""word": """#, "word"),
    ] {
        let said = read(keys).unwrap_err();
        assert!(
            said.starts_with(&format!("{key}: expected no such key")),
            "{said}"
        );
    }
}
