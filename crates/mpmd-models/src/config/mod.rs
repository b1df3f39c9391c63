//! The config of a model: the values that choose the parts of a decoder, and functions that read
//! keys of the `config.json` of a folder.

mod keys;
pub(crate) mod neutral;
mod rope;

use mpmd::candle::nn::Activation;

pub(crate) use keys::{ConfigKeys, HARMLESS, shown, word};
pub(crate) use rope::{RopeDefaults, rope, rope_of};

use crate::rope::Rope;

/// The words "expected" in error messages about an invalid `config.json`.
pub(crate) const EXPECTED: &str = "the config of a model";
/// Limit on the size of `config.json`, in bytes.
pub(crate) const LARGEST_FILE: u64 = 1 << 20;
/// The config key for the number of positions.
pub(crate) const POSITIONS: &str = "max_position_embeddings";

/// The sizes of a decoder, and the values that choose its parts. Sizes have the names that most
/// families give them in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family: `model_type` in `config.json`.
    pub family: &'static str,
    /// Number of tokens in the vocabulary: the rows of the embedding.
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
    /// Number of positions that the model was trained for, before a linear or dynamic RoPE scaling.
    pub max_position_embeddings: usize,
    /// True if the output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Factor by which the embedding's rows are multiplied.
    pub embedding_scale: f64,
    /// True if learned position embeddings are added to the token embeddings.
    pub learned_positions: bool,
    /// The kind of all norms of the decoder.
    pub norm: NormKind,
    /// Epsilon that a norm adds to the variance or mean square.
    pub norm_eps: f64,
    /// Names of a layer's four norms: before and after attention, before and after the MLP. `None`
    /// if the layer lacks the norm.
    pub norm_names: [Option<&'static str>; 4],
    /// True if the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the output projection of the attention has a bias.
    pub out_bias: bool,
    /// The norm of queries and keys. `None` if they are not normed.
    pub head_norm: Option<HeadNorm>,
    /// Soft limit on the scores of attention: a score `x` becomes `cap tanh(x / cap)`. `None`
    /// without a limit.
    pub score_cap: Option<f64>,
    /// True if the MLP is `down(activation(gate(x)) up(x))`, and not `down(activation(up(x)))`.
    pub is_gated: bool,
    /// Activation function of the MLP.
    pub activation: Activation,
    /// True if the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// The experts of layers that have experts instead of an MLP. `None` if no layer has experts.
    pub experts: Option<ExpertsConfig>,
    /// True if attention and MLP of a layer read the same input, as in GPT-NeoX. False if the MLP
    /// reads the attention's result.
    pub is_parallel: bool,
    /// Factor of the outputs of attention and MLP before they are added to the residual stream.
    pub residual_scale: f64,
    /// Divisor of the logits.
    pub logits_divisor: f64,
    /// Soft limit on the logits: a logit `x` becomes `cap tanh(x / cap)`. `None` without a limit.
    pub logits_cap: Option<f64>,
    /// The different rotary embeddings of the model. [`LayerConfig::rope`] is an index into them.
    pub ropes: Vec<Rope>,
    /// The values that differ between layers, one entry for each layer.
    pub layers: Vec<LayerConfig>,
    /// The first config key with a dropout probability that is not zero, and this probability. Such
    /// a model cannot be trained here.
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

/// The elements of queries or keys over which one norm is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadNorm {
    /// One head. All heads share one weight.
    Head,
    /// One head, in a layer norm without bias. Each head has its own weight.
    EachHead,
    /// All heads together.
    Width,
}

/// The experts of a layer: gated MLPs without biases. A router chooses some of them for each token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts of a layer.
    pub count: usize,
    /// Number of experts that compute each token: those with the largest router probabilities.
    pub per_token: usize,
    /// Width inside an expert's MLP.
    pub width: usize,
    /// Width inside the shared expert, an MLP that computes all tokens. `None` if there is no
    /// shared expert.
    pub shared: Option<usize>,
    /// True if the router probabilities of a token's experts are divided by their sum.
    pub normalizes: bool,
    /// Factor of the loss that balances the load of the experts in training. `None` without such a
    /// loss.
    pub balance: Option<f64>,
}

/// The values that may differ between the layers of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig {
    /// Size of the sliding window: the number of keys that a query sees, its own included. `None`
    /// if a query sees all earlier keys.
    pub window: Option<usize>,
    /// Index of the layer's rotary embedding in [`ModelConfig::ropes`]. `None` if the layer has no
    /// rotary embedding.
    pub rope: Option<usize>,
    /// Factor of the scores: the products of queries and keys.
    pub scale: f64,
    /// True if the layer has experts instead of an MLP.
    pub has_experts: bool,
}

impl ModelConfig {
    /// Returns the largest number of tokens in a sequence, after scalings of the rotary embeddings.
    pub fn positions(&self) -> usize {
        let own = self.max_position_embeddings;
        self.ropes
            .iter()
            .map(|rope| rope.positions(own))
            .max()
            .unwrap_or(own)
    }

    /// Returns the config without the settings that change no result of inference.
    pub(crate) fn of_inference(&self) -> Self {
        let experts = self.experts.map(|experts| ExpertsConfig {
            balance: None,
            ..experts
        });
        let positions = match self.learned_positions {
            true => self.max_position_embeddings,
            false => 0,
        };
        Self {
            max_position_embeddings: positions,
            dropout: None,
            experts,
            ..self.clone()
        }
    }
}
