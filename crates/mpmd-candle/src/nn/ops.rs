//! Functions of `candle_nn::ops`, all with gradients.

use candle_core::{Result, Tensor};
pub use candle_nn::ops::*;

use super::attention::{Scoring, SightByPosition, attend};
use super::layer_norm::RowNorm;

pub use super::activation::{gelu, gelu_erf, mish, silu, swiglu};
pub use super::dropout::{Dropout, dropout};
pub use super::softmax::{log_softmax, softmax, softmax_last_dim};

/// Scales each row of `xs` `[..., width]` to mean square 1, and each column by `alpha` `[width]`.
/// `eps` is added to the mean square.
///
/// # Errors
///
/// If the shapes do not fit each other.
pub fn rms_norm(xs: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    RowNorm {
        remove_mean: false,
        eps: f64::from(eps),
    }
    .apply(xs, alpha, None)
}

/// Scales each row of `xs` `[..., width]` to mean 0 and variance 1. Then scales each column by
/// `alpha` `[width]` and shifts it by `beta` `[width]`. `eps` is added to the variance.
///
/// # Errors
///
/// If the shapes do not fit each other.
pub fn layer_norm(xs: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    RowNorm {
        remove_mean: true,
        eps: f64::from(eps),
    }
    .apply(xs, alpha, Some(beta))
}

/// Computes attention; see [`attention`](super::attention()) for the shapes. A causal mask and
/// `mask` may both be given.
///
/// As in candle, a `softcapping` of 1 means no cap. With another value, a score becomes
/// `softcapping * tanh(score / softcapping)`, and on the CPU the memory grows with the square of
/// the sequence's length. For a cap of 1 see [`capped_attention`](super::capped_attention()).
///
/// # Errors
///
/// If the shapes do not fit each other. The message names them.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    let sight = if do_causal {
        SightByPosition::Causal
    } else {
        SightByPosition::All
    };
    let cap = (softcapping != 1.0).then(|| f64::from(softcapping));

    let scoring = Scoring {
        mask: mask.cloned(),
        sight,
        scale: f64::from(scale),
        cap,
    };
    attend(q, k, v, scoring)
}
