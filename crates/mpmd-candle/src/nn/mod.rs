//! The layers of `candle_nn` under the same names, with gradients.
//!
//! Layers of this module defer the gradients of f32 weights: schedules without bubbles need that.
//! They compute f32, bf16 and f16 tensors on the CPU with kernels that are made for training. Other
//! types and devices have compositions of candle's operations. Sums of bf16 and f16 are computed in
//! f32, and rounded once. Results have the same bits with any number of threads
//! (`RAYON_NUM_THREADS`).
//!
//! Everything else is that of `candle_nn`:
//!
//! | | gradient | defers the weights' gradients |
//! |---|---|---|
//! | `Linear`, `Grouped`, `Embedding`, `LayerNorm`, `RmsNorm` | yes | yes |
//! | `Activation`, `Dropout`, attention, softmax, rotary embeddings, losses | yes | no weights |
//! | `Conv1d`, `Conv2d` | yes | no |
//! | `GroupNorm`, `PReLU`, `LSTM`, `GRU` | by candle | no |
//! | `ConvTranspose2d` | by candle, without groups | no |
//! | `ConvTranspose1d` | none: an error | |
//! | `BatchNorm` | by candle; a forward pass writes the running statistics | no |
//! | `PackedLinear`, `PagedCache` | none: for inference | |
//! | `moe`, `kv_cache`, quantized layers, `attention::flash_attn` | none: for inference | |
//!
//! A layer that does not defer computes the gradients of its weights with that of its input. That
//! is correct under every schedule, but a schedule without bubbles gains nothing from it. Other
//! layers of the stage still defer.
//!
//! candle adds up gradients of bf16 and f16 weights in their own type: give its layers f32 copies
//! of them.

pub use candle_nn::*;

pub mod activation;
pub mod attention;
pub mod conv;
mod dropout;
pub mod embedding;
mod grouped_linear;
pub mod layer_norm;
pub mod linear;
pub mod loss;
pub mod ops;
mod packed_linear;
mod paged_cache;
pub mod rotary_emb;
mod softmax;
#[cfg(test)]
mod tests;
mod values;

pub use activation::Activation;
pub use attention::{Mask, attention, capped_attention, self_attention};
pub use conv::{Conv1d, Conv2d, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias};
pub use dropout::Dropout;
pub use embedding::{Embedding, embedding};
pub use grouped_linear::{Grouped, grouped};
pub use layer_norm::{
    LayerNorm, LayerNormConfig, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm,
};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use packed_linear::PackedLinear;
pub use paged_cache::{BLOCK, PagedCache, PagedRows, PagedScores};
