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
use mpmd::train::tensors::read_regular;
use serde_json::{Map, Value};

use crate::config::{
    ConfigKeys, EXPECTED, ExpertsConfig, HARMLESS, LARGEST_FILE, LayerConfig, ModelConfig,
    NormKind, POSITIONS, RopeDefaults, rope, word,
};
use crate::error::unexpected;

/// Limit on the number of layers, whose names are kept in memory.
const MOST_LAYERS: usize = 10_000;
/// Limit on the number of experts of all layers.
const MOST_EXPERTS: usize = 100_000;
/// Names of the norms of a layer that norms only inputs.
const BEFORE: [Option<&str>; 4] = [
    Some("input_layernorm"),
    None,
    Some("post_attention_layernorm"),
    None,
];

/// A family of models, which one class of the library `transformers` computes.
#[derive(Debug)]
pub(crate) struct Family {
    /// `model_type` in its configs.
    pub(crate) name: &'static str,
    /// Reads a config.
    pub(crate) read: fn(&ConfigKeys<'_>) -> Result<ModelConfig>,
    /// Its own words for keys of a config, and for parts of parameters' names between dots.
    pub(crate) words: &'static [(&'static str, &'static str)],
    /// Returns the rows that a projection, by its part of the name, has in a tensor of several.
    pub(crate) fused: fn(&ModelConfig, &str) -> Option<TensorRows>,
    /// True if files have the weights of projections as `[inputs, outputs]`.
    pub(crate) is_transposed: bool,
    /// Ends of the names of tables in files that nothing needs.
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

/// Reads a `config.json`. A missing setting has the default of the library `transformers`.
///
/// # Errors
///
/// If the file cannot be read, describes no model of a known family, or has a key that may change
/// results and that nothing handles. The message names the file, the key, the expected and the
/// found value.
pub(crate) fn read(file: &Path) -> Result<(&'static Family, ModelConfig)> {
    let text =
        read_regular(file, LARGEST_FILE).map_err(|why| unexpected(file, "", EXPECTED, why))?;
    let map: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|why| unexpected(file, "", EXPECTED, why))?;
    let keys = ConfigKeys::new(file, map);
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

/// A family whose files have the decoder's own names and forms.
const PLAIN: Family = Family {
    name: "",
    read: |keys| base(keys, &LLAMA),
    words: &[],
    fused: |_, _| None,
    is_transposed: false,
    ignored: &["rotary_emb.inv_freq"],
};

/// The place of a parameter in the files: rows of a tensor, or of several that it is a stack of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ParameterSource {
    /// The name of the tensor. `*` stands for the index of one of several.
    pub(crate) name: String,
    /// Number of tensors, if the parameter is a stack of them: a tensor for each expert.
    pub(crate) stacked: Option<usize>,
    pub(crate) rows: TensorRows,
    /// True if the tensor is `[inputs, outputs]`, so that the rows are its columns.
    pub(crate) is_transposed: bool,
}

impl ParameterSource {
    /// Returns the names of the tensors.
    pub(crate) fn names(&self) -> Vec<String> {
        match self.stacked {
            None => vec![self.name.clone()],
            Some(count) => (0..count)
                .map(|index| self.name.replace('*', &index.to_string()))
                .collect(),
        }
    }
}

/// Blocks of rows of a tensor, which are the rows of a parameter one after another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TensorRows {
    /// First row of the first block.
    first: usize,
    /// Number of rows in a block.
    len: usize,
    /// Number of rows from the start of a block to that of the next.
    stride: usize,
    blocks: usize,
}

impl TensorRows {
    /// Returns one block.
    pub(crate) fn block(first: usize, len: usize) -> Self {
        Self {
            first,
            len,
            stride: len,
            blocks: 1,
        }
    }

    /// Returns (first row of the parameter, rows of the tensor) of each block.
    pub(crate) fn places(self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let start = move |block| self.first + block * self.stride;
        (0..self.blocks).map(move |block| (block * self.len, start(block)..start(block) + self.len))
    }

    /// Returns the number of rows of a tensor that ends with these.
    pub(crate) fn end(self) -> usize {
        self.places().last().map_or(0, |(_, rows)| rows.end)
    }
}

impl Family {
    /// Returns its own word for a key.
    pub(crate) fn key(&self, key: &'static str) -> &'static str {
        word(self.words, key)
    }

    /// Returns the place of a parameter of this shape.
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

/// The settings of a family's config without their keys, as `transformers` has them.
struct Defaults {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    layers: usize,
    heads: usize,
    /// Number of heads of keys and values. `None` if each query head has its own.
    groups: Option<usize>,
    /// Width of a head. `None` if the heads divide the width.
    head_dim: Option<usize>,
    norm_eps: f64,
    is_tied: bool,
    /// Key and default of the activation function.
    activation: (&'static str, &'static str),
    rope: RopeDefaults,
    is_rotary: bool,
    /// True if `transformers` refuses heads that do not divide the width.
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

/// Reads the settings that most families have, of a decoder with RMS norms before attention and
/// MLP, a gated MLP, and no biases.
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

/// Returns the first of these keys that is not zero. Each has a default.
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

/// Refuses heads of other widths, and groups of heads, where a family has none.
fn check_heads(keys: &ConfigKeys<'_>, config: &ModelConfig) -> Result<()> {
    keys.only("head_dim", config.hidden_size / config.num_attention_heads)?;
    keys.only("num_key_value_heads", config.num_attention_heads)
}

/// Reads the settings of experts. `count` is the default of their number, and `per_token` of the
/// number that a token takes.
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

/// Reads which layers have experts, and how many: those of Qwen. The defaults are the number of
/// experts, that which a token takes, and the width of each.
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

/// Reads the size of a sliding window.
fn window(keys: &ConfigKeys<'_>, default: Option<usize>) -> Result<Option<usize>> {
    keys.unless_null("sliding_window", default, |keys, key| keys.size(key, 1))
}

/// Gives the layers of `layer_types` that slide this window. Without the key, `slides` chooses them
/// by index. Returns the choice.
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
