//! The config of a model: the values that choose the parts of a decoder, and functions that read
//! keys of the `config.json` of a folder.

mod keys;
mod rope;

use mpmd::candle::nn::Activation;

pub(crate) use keys::{ConfigKeys, HARMLESS, word};
pub(crate) use rope::{RopeDefaults, rope, rope_of};

use crate::rope::Rope;

/// The description of a config, for messages.
pub(crate) const EXPECTED: &str = "the config of a model";
/// Limit on the size of the file, in bytes.
pub(crate) const LARGEST_FILE: u64 = 1 << 20;
/// The key of the number of positions.
pub(crate) const POSITIONS: &str = "max_position_embeddings";

/// The sizes of a decoder, and the values that choose its parts. Sizes have the names that most
/// families give them in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
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
    /// The kind of its norms.
    pub norm: NormKind,
    /// Number that is added to the variance or the mean square in a norm.
    pub norm_eps: f64,
    /// Names of a layer's norms: before and after the attention, before and after the MLP.
    pub norm_names: [Option<&'static str>; 4],
    /// True if the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the projection of the attention's result has a bias.
    pub out_bias: bool,
    /// The extent of the norms of queries and keys. `None` if there are none.
    pub head_norm: Option<HeadNorm>,
    /// Largest score of attention. A score `x` becomes `cap tanh(x / cap)`.
    pub score_cap: Option<f64>,
    /// True if the MLP is `down(activation(gate(x)) up(x))`, and not `down(activation(up(x)))`.
    pub is_gated: bool,
    /// Activation function of the MLP.
    pub activation: Activation,
    /// True if the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// The experts of layers that have them in place of an MLP.
    pub experts: Option<ExpertsConfig>,
    /// True if attention and MLP of a layer have the same input.
    pub is_parallel: bool,
    /// Factor of the results of attention and MLP, before they are added to their inputs.
    pub residual_scale: f64,
    /// Divisor of the logits.
    pub logits_divisor: f64,
    /// Largest logit. A logit `x` becomes `cap tanh(x / cap)`.
    pub logits_cap: Option<f64>,
    /// The rotary embeddings of the layers.
    pub ropes: Vec<Rope>,
    /// The values of each layer.
    pub layers: Vec<LayerConfig>,
    /// The first key by which training would drop values, and the share. Training needs none.
    pub dropout: Option<(&'static str, f64)>,
}

/// The kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// Scales to mean square 1, then by the weight.
    Rms,
    /// Scales to mean square 1, then by one plus the weight.
    RmsPlusOne,
    /// Scales to mean 0 and variance 1, then by the weight, and adds the bias.
    Layer,
}

/// The elements of queries or keys that a norm takes together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadNorm {
    /// The elements of one head. All heads have the same weight.
    Head,
    /// The elements of one head, in layer norms without bias. Each head has its own weight.
    EachHead,
    /// The elements of all heads.
    Width,
}

/// Gated MLPs without biases, of which each token takes some.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts of a layer.
    pub count: usize,
    /// Number of experts that a token takes: those with the largest probabilities.
    pub per_token: usize,
    /// Width inside an expert.
    pub width: usize,
    /// Width inside an MLP that all tokens take beside their experts. `None` if there is none.
    pub shared: Option<usize>,
    /// True if the probabilities of a token's experts are divided by their sum.
    pub normalizes: bool,
    /// Factor of the loss that balances the experts in a training. `None` if there is none.
    pub balance: Option<f64>,
}

/// The values of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig {
    /// Number of keys that a query sees, its own included. `None` if it sees all before it.
    pub window: Option<usize>,
    /// Index of its rotary embedding in [`ModelConfig::ropes`].
    pub rope: Option<usize>,
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// True if it has experts.
    pub has_experts: bool,
}

impl ModelConfig {
    /// Returns the most tokens of a sequence.
    pub fn positions(&self) -> usize {
        let own = self.max_position_embeddings;
        self.ropes
            .iter()
            .map(|rope| rope.positions(own))
            .max()
            .unwrap_or(own)
    }
}
