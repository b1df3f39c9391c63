//! The keys of a `config.json` for each family that GGUF files may hold.

use mpmd::Result;
use serde_json::{Map, Value};

use super::model_keys::ModelKeys;

/// Number of layers of those models of Gemma 2 and 3 that scale attention by the width of the model
/// and not of a head, which no key tells.
const LARGEST_GEMMAS: [(&str, u64); 2] = [("gemma2", 46), ("gemma3", 62)];

pub(super) fn llama(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.rms(config)?;
    model.rope(config)?;
    let window = model.window(config)?;
    let experts = model.keys.count("expert_count")?.unwrap_or(0);
    if experts > 0 {
        model.name(config, "mixtral", "MixtralForCausalLM");
        return model.experts(config, "num_local_experts");
    }
    // Files do not tell the two apart. Only this family may have a window, or other heads.
    if window.is_some() || !model.hidden.is_multiple_of(model.heads) {
        model.name(config, "mistral", "MistralForCausalLM");
        return Ok(());
    }
    config.remove("sliding_window");
    model.name(config, "llama", "LlamaForCausalLM");
    config.insert(
        "attention_bias".into(),
        model.has("blk.0.attn_q.bias").into(),
    );
    config.insert("mlp_bias".into(), model.has("blk.0.ffn_up.bias").into());
    Ok(())
}

pub(super) fn qwen2(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "qwen2", "Qwen2ForCausalLM");
    model.rms(config)?;
    model.rope(config)
}

pub(super) fn qwen3(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "qwen3", "Qwen3ForCausalLM");
    config.insert(
        "attention_bias".into(),
        model.has("blk.0.attn_q.bias").into(),
    );
    model.rms(config)?;
    model.rope(config)
}

pub(super) fn qwen2_moe(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "qwen2_moe", "Qwen2MoeForCausalLM");
    config.insert("qkv_bias".into(), model.has("blk.0.attn_q.bias").into());
    config.insert("norm_topk_prob".into(), false.into());
    model.experts(config, "num_experts")?;
    for (key, name) in [
        ("expert_feed_forward_length", "moe_intermediate_size"),
        (
            "expert_shared_feed_forward_length",
            "shared_expert_intermediate_size",
        ),
    ] {
        config.insert(name.into(), model.keys.required_count(key)?.into());
    }
    model.rms(config)?;
    model.rope(config)
}

pub(super) fn qwen3_moe(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "qwen3_moe", "Qwen3MoeForCausalLM");
    config.insert(
        "attention_bias".into(),
        model.has("blk.0.attn_q.bias").into(),
    );
    config.insert("norm_topk_prob".into(), true.into());
    model.experts(config, "num_experts")?;
    let width = model.keys.required_count("expert_feed_forward_length")?;
    config.insert("moe_intermediate_size".into(), width.into());
    model.rms(config)?;
    model.rope(config)
}

/// Writes the keys that Gemma 2 and Gemma 3 have in common. `default` is the soft limit on logits
/// of a file that has none.
fn gemma(
    model: &ModelKeys<'_>,
    config: &mut Map<String, Value>,
    architecture: &str,
    default: Option<f64>,
) -> Result<()> {
    let is_largest = LARGEST_GEMMAS.contains(&(architecture, model.layers));
    let scalar = match is_largest {
        true => model.hidden / model.heads,
        false => model.head_dim,
    };
    config.insert("query_pre_attn_scalar".into(), scalar.into());
    config.insert(
        "attention_bias".into(),
        model.has("blk.0.attn_q.bias").into(),
    );
    let cap = model.keys.number("final_logit_softcapping")?.or(default);
    let cap = cap.filter(|cap| *cap != 0.0);
    config.insert("final_logit_softcapping".into(), cap.into());
    model.rms(config)?;
    model.rope(config)?;
    model.window_layers(config)
}

pub(super) fn gemma2(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "gemma2", "Gemma2ForCausalLM");
    gemma(model, config, "gemma2", Some(30.0))?;
    let cap = model.keys.number("attn_logit_softcapping")?;
    config.insert("attn_logit_softcapping".into(), cap.unwrap_or(50.0).into());
    let window = model.keys.count("attention.sliding_window")?;
    config.insert("sliding_window".into(), window.unwrap_or(4096).into());
    Ok(())
}

pub(super) fn gemma3(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "gemma3_text", "Gemma3ForCausalLM");
    gemma(model, config, "gemma3", None)?;
    let local = model.keys.number("rope.freq_base_swa")?;
    config.insert(
        "rope_local_base_freq".into(),
        local.unwrap_or(10_000.0).into(),
    );
    if model.window(config)?.is_none() {
        // No layer has a window.
        config.remove("layer_types");
        config.insert("sliding_window_pattern".into(), 1.into());
    }
    Ok(())
}

pub(super) fn phi3(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "phi3", "Phi3ForCausalLM");
    model.rms(config)?;
    model.window(config)?;
    model.partial_rope(config, "rope_theta", "partial_rotary_factor")?;
    let original = model.keys.count("rope.scaling.original_context_length")?;
    config.insert("original_max_position_embeddings".into(), original.into());
    Ok(())
}

pub(super) fn olmo2(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "olmo2", "Olmo2ForCausalLM");
    // OLMo 3 has the same architecture in files, but a window in most layers.
    model.keys.only_number("attention.sliding_window", 0.0)?;
    config.insert(
        "attention_bias".into(),
        model.has("blk.0.attn_q.bias").into(),
    );
    model.rms(config)?;
    model.rope(config)
}

pub(super) fn granite(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "granite", "GraniteForCausalLM");
    // If it is false, nothing rotates.
    model.keys.only_flag("rope.scaling.finetuned", true)?;
    for (key, name) in [
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ] {
        if let Some(factor) = model.keys.number(key)? {
            config.insert(name.into(), factor.into());
        }
    }
    // Without the key, programs scale by the width of a head, as in most families.
    let scale = (model.head_dim as f64).sqrt().recip();
    config.entry("attention_multiplier").or_insert(scale.into());
    config.insert(
        "attention_bias".into(),
        model.has("blk.0.attn_q.bias").into(),
    );
    config.insert("mlp_bias".into(), model.has("blk.0.ffn_up.bias").into());
    model.rms(config)?;
    model.rope(config)
}

pub(super) fn gpt2(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "gpt2", "GPT2LMHeadModel");
    for (from, to) in [
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("intermediate_size", "n_inner"),
        ("max_position_embeddings", "n_positions"),
    ] {
        if let Some(value) = config.remove(from) {
            config.insert(to.to_owned(), value);
        }
    }
    // Files say nothing about it, and it counts in training alone.
    for key in ["attn_pdrop", "resid_pdrop", "embd_pdrop"] {
        config.insert(key.to_owned(), 0.0.into());
    }
    model.layer_norm(config, "layer_norm_epsilon")
}

pub(super) fn gpt_neox(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "gpt_neox", "GPTNeoXForCausalLM");
    let is_parallel = model.keys.flag("use_parallel_residual")?.unwrap_or(true);
    config.insert("use_parallel_residual".into(), is_parallel.into());
    config.insert(
        "attention_bias".into(),
        model.has("blk.0.attn_qkv.bias").into(),
    );
    model.layer_norm(config, "layer_norm_eps")?;
    model.partial_rope(config, "rotary_emb_base", "rotary_pct")
}

pub(super) fn stablelm(model: &ModelKeys<'_>, config: &mut Map<String, Value>) -> Result<()> {
    model.name(config, "stablelm", "StableLmForCausalLM");
    // The key of the file is wrong in older ones, where the tensors tell.
    let is_parallel = !model.has("blk.0.ffn_norm.weight");
    config.insert("use_parallel_residual".into(), is_parallel.into());
    config.insert("use_qkv_bias".into(), model.has("blk.0.attn_q.bias").into());
    config.insert(
        "qk_layernorm".into(),
        model.has("blk.0.attn_q_norm.weight").into(),
    );
    model.layer_norm(config, "layer_norm_eps")?;
    model.partial_rope(config, "rope_theta", "partial_rotary_factor")
}
