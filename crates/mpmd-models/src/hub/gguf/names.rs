//! The places in a GGUF file of the tensors that a folder of a hub has: names, rows and offsets.

use crate::config::ModelConfig;
use crate::hub::gguf::config::Architecture;
use crate::hub::gguf::tensor::RowOrder;

/// Modules beside the layers, as (last part of the name in folders, name in files).
const MODEL: &[(&str, &str)] = &[
    ("embed_tokens", "token_embd"),
    ("embed_in", "token_embd"),
    ("wte", "token_embd"),
    ("wpe", "position_embd"),
    ("norm", "output_norm"),
    ("final_layer_norm", "output_norm"),
    ("ln_f", "output_norm"),
    ("lm_head", "output"),
    ("embed_out", "output"),
];
/// Modules of a layer, as (name in folders, name in files). `*` stands for an index.
const LAYER: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("ln_1", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("ln_2", "ffn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("attn.c_attn", "attn_qkv"),
    ("attention.query_key_value", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("attn.c_proj", "attn_output"),
    ("attention.dense", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_layernorm.norms.*", "attn_q_norm"),
    ("self_attn.k_layernorm.norms.*", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.c_proj", "ffn_down"),
    ("mlp.dense_4h_to_h", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.experts.*.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.*.up_proj", "ffn_up_exps"),
    ("mlp.experts.*.down_proj", "ffn_down_exps"),
    ("block_sparse_moe.experts.*.w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.*.w3", "ffn_up_exps"),
    ("block_sparse_moe.experts.*.w2", "ffn_down_exps"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
];
/// The module of folders that is a norm before the MLP in most families, and a norm after attention
/// in those that have norms there.
const AFTER_ATTENTION: &str = "post_attention_layernorm";

/// The place of a folder's tensor in a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorPlace {
    /// The name of the tensor in the file.
    pub(super) name: String,
    /// Index of the folder's tensor in that of the file, which may hold several of the same shape,
    /// one after the other.
    pub(super) index: usize,
    /// Number of tensors that the file's tensor holds.
    pub(super) of: usize,
    /// The order of the rows in the file.
    pub(super) order: RowOrder,
    /// Number that is added to the values of the file.
    pub(super) shift: f32,
}

/// Returns the place of the tensor that folders name `name`. `None` if files have no such tensor.
pub(super) fn place_of(
    architecture: &Architecture,
    config: &ModelConfig,
    name: &str,
) -> Option<TensorPlace> {
    let (module, end) = name.rsplit_once('.')?;
    let parts: Vec<&str> = module.split('.').collect();
    let layer = parts.iter().position(|part| ["layers", "h"].contains(part));

    let Some(layer) = layer else {
        let last = parts.last()?;
        let found = find(MODEL, last)?;
        return Some(TensorPlace {
            name: format!("{found}.{end}"),
            index: 0,
            of: 1,
            order: RowOrder::Same,
            shift: shift_of(architecture, name),
        });
    };
    let number: usize = parts.get(layer + 1)?.parse().ok()?;
    let mut own: Vec<&str> = parts[layer + 2..].to_vec();
    let mut index = None;
    for part in &mut own {
        if let Ok(found) = part.parse::<usize>() {
            index = Some(found);
            *part = "*";
        }
    }
    let own = own.join(".");
    let found = match own == AFTER_ATTENTION && config.norm_names[1] == Some(AFTER_ATTENTION) {
        true => "post_attention_norm",
        false => find(LAYER, &own)?,
    };
    let of = match (index, found) {
        (None, _) => 1,
        (Some(_), "attn_q_norm") => config.num_attention_heads,
        (Some(_), "attn_k_norm") => config.num_key_value_heads,
        (Some(_), _) => config.experts.map_or(1, |experts| experts.count),
    };
    Some(TensorPlace {
        name: format!("blk.{number}.{found}.{end}"),
        index: index.unwrap_or(0),
        of,
        order: order_of(architecture, config, found),
        shift: shift_of(architecture, name),
    })
}

/// Returns the name in files of a module.
fn find(modules: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    let found = modules.iter().find(|(own, _)| *own == name);
    found.map(|(_, file)| *file)
}

/// Returns the order of the rows of a layer's module, given by its name in files.
fn order_of(architecture: &Architecture, config: &ModelConfig, module: &str) -> RowOrder {
    let dim = config.head_dim;
    match module {
        "attn_q" | "attn_k" if architecture.is_interleaved => RowOrder::Interleaved { dim },
        // Folders have the queries, keys and values of each head in turn.
        "attn_qkv" if architecture.name == "gptneox" => RowOrder::ByKind {
            heads: config.num_attention_heads,
            dim,
        },
        _ => RowOrder::Same,
    }
}

/// Returns the number that is added to the values of the file, to get those of a folder's tensor.
fn shift_of(architecture: &Architecture, name: &str) -> f32 {
    match architecture.is_shifted && name.ends_with("norm.weight") {
        true => -1.0,
        false => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::gguf::config::ARCHITECTURES;

    #[test]
    fn each_module_of_a_file_is_named_once_for_a_name_of_folders() {
        for modules in [MODEL, LAYER] {
            for (at, (name, _)) in modules.iter().enumerate() {
                let again = modules[at + 1..].iter().any(|(other, _)| other == name);
                assert!(!again, "{name}");
            }
        }
    }

    #[test]
    fn norms_of_gemma_alone_are_shifted() {
        for architecture in &ARCHITECTURES {
            let is_gemma = architecture.name.starts_with("gemma");
            let shift = |name| shift_of(architecture, name);
            let expected = if is_gemma { -1.0 } else { 0.0 };
            assert_eq!(shift("model.norm.weight"), expected);
            assert_eq!(shift("model.layers.0.self_attn.q_norm.weight"), expected);
            assert_eq!(shift("model.embed_tokens.weight"), 0.0);
        }
    }
}
