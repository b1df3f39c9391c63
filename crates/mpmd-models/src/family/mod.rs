//! The families of models: how a `config.json` chooses the parts of the decoder, and where the
//! files have its parameters.

mod gemma2;
mod gemma3;
mod gpt2;
mod gpt_neox;
mod granite;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod stablelm;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::Path;

use mpmd::Result;
use mpmd::candle::nn::Activation;
use mpmd::train::tensors::{read_json, read_regular};
use serde_json::{Map, Value};

use crate::config::{
    ConfigKeys, EXPECTED, ExpertsConfig, HARMLESS, LARGEST_FILE, LayerConfig, ModelConfig,
    NormKind, POSITIONS, RopeDefaults, rope, word,
};
use crate::error::unexpected;

/// Limit on the number of layers, since the names of their parameters are kept in memory.
const MOST_LAYERS: usize = 10_000;
/// Limit on the number of experts in all layers together.
const MOST_EXPERTS: usize = 100_000;
/// Norm names of a layer that has norms only before attention and before the MLP.
const BEFORE: [Option<&str>; 4] = [
    Some("input_layernorm"),
    None,
    Some("post_attention_layernorm"),
    None,
];

/// A family of models: those that one class of the library `transformers` computes.
#[derive(Debug)]
pub(crate) struct Family {
    /// The value of `model_type` in configs of this family.
    pub(crate) name: &'static str,
    /// Function that reads a config of this family.
    pub(crate) read: fn(&ConfigKeys<'_>) -> Result<ModelConfig>,
    /// Names that differ in this family, as (common name, name in this family): keys of configs,
    /// and dot-separated parts of parameter names.
    pub(crate) words: &'static [(&'static str, &'static str)],
    /// Function that returns the rows of a projection within a fused tensor. Its argument is the
    /// projection's part of the parameter's name. `None` if the projection has a tensor of its own.
    pub(crate) fused: fn(&ModelConfig, &str) -> Option<TensorRows>,
    /// True if files have the weights of projections as `[inputs, outputs]`, not `[outputs,
    /// inputs]`.
    pub(crate) is_transposed: bool,
    /// Name suffixes of tensors in the files that the model does not need.
    pub(crate) ignored: &'static [&'static str],
}

/// All families, in the order of the guide.
pub(crate) static FAMILIES: [Family; 15] = [
    llama::FAMILY,
    mistral::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    mixtral::FAMILY,
    qwen2_moe::FAMILY,
    qwen3_moe::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    phi3::FAMILY,
    olmo2::FAMILY,
    granite::FAMILY,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
    stablelm::FAMILY,
];

/// Reads the keys of a `config.json`.
///
/// # Errors
///
/// If the file cannot be read, or is no object of JSON.
pub(crate) fn read_keys(file: &Path) -> Result<Map<String, Value>> {
    let text =
        read_regular(file, LARGEST_FILE).map_err(|why| unexpected(file, "", EXPECTED, why))?;
    read_json(&text).map_err(|why| unexpected(file, "", EXPECTED, why))
}

/// Returns the model that the keys of a `config.json` describe. A missing setting has the default
/// that the library `transformers` gives it. `file` is the path for messages.
///
/// # Errors
///
/// If the keys describe no model of a known family, or an unknown one may change results. The
/// message names the file, the key, the expected and the found value.
pub(crate) fn model_of(
    file: &Path,
    keys: Map<String, Value>,
) -> Result<(&'static Family, ModelConfig)> {
    let keys = ConfigKeys::new(file, keys);
    let names: Vec<String> = FAMILIES
        .iter()
        .map(|family| format!("{:?}", family.name))
        .collect();
    let names = names.join(", ");
    let kind: String = keys.required("model_type", &names)?;
    let Some(family) = FAMILIES.iter().find(|family| family.name == kind) else {
        return Err(keys.unexpected("model_type", names, format!("{kind:?}")));
    };
    let keys = keys.words(family.words);
    let config = ModelConfig {
        family: family.name,
        ..(family.read)(&keys)?
    };
    keys.only("is_encoder_decoder", false)?;
    keys.only("add_cross_attention", false)?;
    keys.only("rope_interleaved", false)?;
    // Both are true in some folders, and change nothing here.
    for key in ["is_decoder", "tie_encoder_decoder"] {
        keys.flag(key, false)?;
    }
    keys.only("pruned_heads", Map::new())?;
    keys.finish(HARMLESS)?;
    Ok((family, config))
}

/// A family whose files have the decoder's own parameter names and shapes.
const PLAIN: Family = Family {
    name: "",
    read: |keys| base(keys, &LLAMA),
    words: &[],
    fused: |_, _| None,
    is_transposed: false,
    ignored: &["rotary_emb.inv_freq"],
};

/// The source of a parameter in a model's files: rows of one tensor, or of several tensors that are
/// stacked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ParameterSource {
    /// The name of the tensor in the files. For stacked tensors, `*` stands for the index.
    pub(crate) name: String,
    /// Number of stacked tensors, one for each expert. `None` if the parameter comes from one
    /// tensor.
    pub(crate) stacked: Option<usize>,
    pub(crate) rows: TensorRows,
    /// True if the tensor is `[inputs, outputs]`: rows of the parameter are columns of the tensor.
    pub(crate) is_transposed: bool,
}

impl ParameterSource {
    /// Returns the names of the tensors in the files, in the order of stacking.
    pub(crate) fn names(&self) -> Vec<String> {
        match self.stacked {
            None => vec![self.name.clone()],
            Some(count) => (0..count)
                .map(|index| self.name.replace('*', &index.to_string()))
                .collect(),
        }
    }
}

/// Rows of a tensor that form a parameter: blocks of equal length at equal distances.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TensorRows {
    /// First row of the first block.
    first: usize,
    /// Number of rows in a block.
    len: usize,
    /// Number of rows from the start of one block to the start of the next.
    stride: usize,
    blocks: usize,
}

impl TensorRows {
    /// Returns a single block of `len` rows from row `first` on.
    pub(crate) fn block(first: usize, len: usize) -> Self {
        Self {
            first,
            len,
            stride: len,
            blocks: 1,
        }
    }

    /// Returns (first row in the parameter, rows of the tensor) of each block.
    pub(crate) fn places(self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let start = move |block| self.first + block * self.stride;
        (0..self.blocks).map(move |block| (block * self.len, start(block)..start(block) + self.len))
    }

    /// Returns the end of the last block, as a row index of the tensor.
    pub(crate) fn end(self) -> usize {
        self.places().last().map_or(0, |(_, rows)| rows.end)
    }
}

impl Family {
    /// Returns this family's name for a config key.
    pub(crate) fn key(&self, key: &'static str) -> &'static str {
        word(self.words, key)
    }

    /// Returns the source of the parameter `name` of this shape in the files.
    pub(crate) fn source(
        &self,
        config: &ModelConfig,
        name: &str,
        shape: &[usize],
    ) -> ParameterSource {
        // A matrix for each expert.
        let (stacked, shape) = match shape {
            [count, shape @ ..] if shape.len() == 2 => (Some(*count), shape),
            shape => (None, shape),
        };
        let mut words: Vec<&str> = name.split('.').map(|part| word(self.words, part)).collect();
        if let Some(experts) = words.iter().position(|part| *part == "experts") {
            words.insert(experts + 1, "*");
        }
        let rows = shape.first().copied().unwrap_or(1);
        let projection = name.split('.').find(|part| part.ends_with("_proj"));
        let fused = projection.and_then(|part| (self.fused)(config, part));
        ParameterSource {
            name: words.join("."),
            stacked,
            rows: fused.unwrap_or(TensorRows::block(0, rows)),
            is_transposed: self.is_transposed && projection.is_some() && name.ends_with(".weight"),
        }
    }
}

/// Defaults of a family's config settings, as in the library `transformers`.
struct Defaults {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    layers: usize,
    heads: usize,
    /// Number of heads of keys and values. `None` if there are as many as query heads.
    groups: Option<usize>,
    /// Width of a head. `None` for the hidden size divided by the number of heads.
    head_dim: Option<usize>,
    norm_eps: f64,
    is_tied: bool,
    /// Config key of the activation function, and its default.
    activation: (&'static str, &'static str),
    rope: RopeDefaults,
    is_rotary: bool,
    /// True if the hidden size must be a multiple of the number of heads, as `transformers`
    /// requires.
    divides: bool,
}

const LLAMA: Defaults = Defaults {
    vocab_size: 32_000,
    hidden_size: 4096,
    intermediate_size: 11_008,
    layers: 32,
    heads: 32,
    groups: None,
    head_dim: None,
    norm_eps: 1e-6,
    is_tied: false,
    activation: ("hidden_act", "silu"),
    rope: RopeDefaults {
        theta: ("rope_theta", 10_000.0),
        share: None,
        positions: 2048,
    },
    is_rotary: true,
    divides: true,
};

/// Reads the settings that most families share. The result has RMS norms before attention and MLP,
/// a gated MLP, and no biases.
fn base(keys: &ConfigKeys<'_>, or: &Defaults) -> Result<ModelConfig> {
    let heads = keys.size("num_attention_heads", or.heads)?;
    let groups = keys.unless_null("num_key_value_heads", or.groups, |keys, key| {
        keys.size(key, 1)
    })?;
    let groups = groups.unwrap_or(heads);
    let hidden_size = keys.size("hidden_size", or.hidden_size)?;
    if or.divides && !hidden_size.is_multiple_of(heads) {
        let expected = format!(
            "a multiple of {}, {heads}",
            keys.word("num_attention_heads")
        );
        return Err(keys.unexpected("hidden_size", expected, hidden_size));
    }

    let layers = keys.size("num_hidden_layers", or.layers)?;
    let head_dim = keys.size(
        "head_dim",
        or.head_dim.unwrap_or((hidden_size / heads).max(1)),
    )?;
    let rope = or
        .is_rotary
        .then(|| rope(keys, &or.rope, head_dim))
        .transpose()?;

    if layers > MOST_LAYERS {
        let expected = format!("at most {MOST_LAYERS}");
        return Err(keys.unexpected("num_hidden_layers", expected, layers));
    }
    if !heads.is_multiple_of(groups) {
        let expected = format!("a divisor of num_attention_heads, {heads}");
        return Err(keys.unexpected("num_key_value_heads", expected, groups));
    }

    let layer = LayerConfig {
        window: None,
        rope: rope.as_ref().map(|_| 0),
        scale: (head_dim as f64).sqrt().recip(),
        has_experts: false,
    };
    Ok(ModelConfig {
        family: "",
        vocab_size: keys.size("vocab_size", or.vocab_size)?,
        hidden_size,
        intermediate_size: keys.size("intermediate_size", or.intermediate_size)?,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: groups,
        head_dim,
        max_position_embeddings: keys.size(POSITIONS, or.rope.positions)?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", or.is_tied)?,
        embedding_scale: 1.0,
        learned_positions: false,
        norm: NormKind::Rms,
        norm_eps: keys.number("rms_norm_eps", or.norm_eps)?,
        norm_names: BEFORE,
        qkv_bias: false,
        out_bias: false,
        head_norm: None,
        score_cap: None,
        is_gated: true,
        activation: activation(keys, or.activation.0, or.activation.1)?,
        mlp_bias: false,
        experts: None,
        is_parallel: false,
        residual_scale: 1.0,
        logits_divisor: 1.0,
        logits_cap: None,
        ropes: rope.into_iter().collect(),
        layers: vec![layer; layers],
        dropout: dropout(keys, &[("attention_dropout", 0.0)])?,
    })
}

fn activation(keys: &ConfigKeys<'_>, key: &str, default: &str) -> Result<Activation> {
    let names = r#""silu", "gelu", "gelu_new" or "gelu_pytorch_tanh""#;
    let name = keys.or(key, names, default.to_owned())?;
    match name.as_str() {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluPytorchTanh),
        _ => Err(keys.unexpected(key, names, format!("{name:?}"))),
    }
}

/// Returns the first dropout key with a value that is not zero, and the value. `shares` has pairs
/// (key, default).
fn dropout(
    keys: &ConfigKeys<'_>,
    shares: &[(&'static str, f64)],
) -> Result<Option<(&'static str, f64)>> {
    let mut first = None;
    for (key, default) in shares {
        let share = keys.number(key, *default)?;
        first = first.or(Some((*key, share)).filter(|_| share != 0.0));
    }
    Ok(first)
}

/// Checks heads for a family without other head widths and without grouped heads of keys.
fn check_heads(keys: &ConfigKeys<'_>, config: &ModelConfig) -> Result<()> {
    keys.only("head_dim", config.hidden_size / config.num_attention_heads)?;
    keys.only("num_key_value_heads", config.num_attention_heads)
}

/// Reads the settings of experts. `count` is the default number of experts, and `per_token` the
/// default number that compute each token.
fn experts(
    keys: &ConfigKeys<'_>,
    layers: usize,
    count: usize,
    per_token: usize,
) -> Result<ExpertsConfig> {
    const KEY: &str = "num_local_experts";
    let count = keys.size(KEY, count)?;
    let most = MOST_EXPERTS / layers;
    if count > most {
        return Err(keys.unexpected(KEY, format!("at most {most} in {layers} layers"), count));
    }

    let per_token = keys.size("num_experts_per_tok", per_token)?;
    if per_token > count {
        let expected = format!("at most {count}, the number of experts");
        return Err(keys.unexpected("num_experts_per_tok", expected, per_token));
    }

    let factor = keys.number("router_aux_loss_coef", 0.001)?;
    let balance = keys.flag("output_router_logits", false)?.then_some(factor);
    Ok(ExpertsConfig {
        count,
        per_token,
        width: 0,
        shared: None,
        normalizes: true,
        balance,
    })
}

/// Reads the experts of Qwen's families, and the layers that have them. The array has the defaults
/// for the number of experts, the experts per token, and the width of an expert.
fn sparse(
    keys: &ConfigKeys<'_>,
    config: &mut ModelConfig,
    [count, per_token, width]: [usize; 3],
) -> Result<()> {
    let count = keys.size("num_experts", count)?;
    config.experts = Some(ExpertsConfig {
        width: keys.size("moe_intermediate_size", width)?,
        normalizes: keys.flag("norm_topk_prob", false)?,
        ..experts(keys, config.num_hidden_layers, count, per_token)?
    });
    let step = keys.size("decoder_sparse_step", 1)?;
    let plain: Vec<usize> = keys.or("mlp_only_layers", "a list of layers", Vec::new())?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.has_experts = !plain.contains(&index) && (index + 1).is_multiple_of(step);
    }
    Ok(())
}

/// Reads the size of the sliding window. `None` if the key is null.
fn window(keys: &ConfigKeys<'_>, default: Option<usize>) -> Result<Option<usize>> {
    keys.unless_null("sliding_window", default, |keys, key| keys.size(key, 1))
}

/// Sets the window of layers that `layer_types` marks as sliding. Without the key, `slides` chooses
/// the layers by index. Returns for each layer if it was chosen.
fn slide(
    keys: &ConfigKeys<'_>,
    config: &mut ModelConfig,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    const KEY: &str = "layer_types";
    let layers = config.num_hidden_layers;
    let expected =
        format!("{layers} times \"full_attention\" or \"sliding_attention\", one for each layer");

    let types: Option<Vec<String>> = keys.get(KEY, &expected)?;
    let choice: Vec<bool> = match types {
        None => (0..layers).map(slides).collect(),
        Some(types) => {
            let known =
                |kind: &&String| !["full_attention", "sliding_attention"].contains(&kind.as_str());
            if let Some(other) = types.iter().find(known) {
                return Err(keys.unexpected(KEY, expected, format!("{other:?}")));
            }
            if types.len() != layers {
                return Err(keys.unexpected(KEY, expected, format!("{} of them", types.len())));
            }
            types
                .iter()
                .map(|kind| kind == "sliding_attention")
                .collect()
        }
    };

    if window.is_none() && choice.contains(&true) {
        let expected = "a size, for the layers that layer_types has sliding";
        return Err(keys.unexpected("sliding_window", expected, "none"));
    }
    for (layer, slides) in config.layers.iter_mut().zip(&choice) {
        layer.window = window.filter(|_| *slides);
    }
    Ok(choice)
}
