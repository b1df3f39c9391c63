//! The last layers of the model: turns rows into logits and a loss.

use crate::math::{Real, matmul, matmul_nt, matmul_tn};

use super::loss::{cross_entropy, cross_entropy_gradient};
use super::norm::{NormOutputs, norm_backward_input, norm_backward_weight, norm_forward};
use super::{BYTES, BlockShape};

super::leaves! {
    /// Parameters of the head: a last layer norm, and a layer without bias.
    pub struct HeadParameters {
        /// Scale after the layer norm: `[width]`.
        norm_gain,
        /// Shift after the layer norm: `[width]`.
        norm_bias,
        /// Weights from rows to logits: `[width, BYTES]`.
        weight,
    }
}

super::leaves! {
    /// Arrays that the head's forward pass writes for the backward pass.
    pub struct HeadResiduals {
        /// The rows at mean 0 and variance 1: `[batch, time, width]`.
        norm_hat,
        /// One over each row's standard deviation: `[batch, time]`.
        norm_inv_std,
        /// The norm's output: `[batch, time, width]`.
        norm_out,
        /// The softmax of the logits: `[batch, time, BYTES]`.
        probabilities,
    }
}

super::leaves! {
    /// The head's weight residuals: gradients that the input gradient writes for the weight
    /// gradient.
    pub struct HeadGradients {
        /// Gradient of the norm's output: `[batch, time, width]`.
        d_norm,
        /// Gradient of the logits: `[batch, time, BYTES]`.
        d_logits,
    }
}

/// Writes the logits `[rows, BYTES]` of `x` `[rows, width]` to `residuals.probabilities`, and the
/// layer norm's arrays to the other residuals.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn logits<T: Real>(
    shape: BlockShape,
    p: &HeadParameters<&[T]>,
    residuals: &mut HeadResiduals<&mut [T]>,
    x: &[T],
) {
    let HeadResiduals { norm_hat: hat, norm_inv_std: inv_std, norm_out: out, probabilities } =
        residuals;
    norm_forward(NormOutputs { hat, inv_std, out }, x, p.norm_gain, p.norm_bias);
    matmul(probabilities, out, p.weight, shape.rows(), shape.width, BYTES, false);
}

/// Fills `residuals`. Returns the sum over the rows of the cross-entropy of `targets` `[rows]`, in
/// nats, and the number of rows.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn forward<T: Real>(
    shape: BlockShape,
    p: &HeadParameters<&[T]>,
    residuals: &mut HeadResiduals<&mut [T]>,
    x: &[T],
    targets: &[u8],
) -> (f64, usize) {
    logits(shape, p, residuals, x);
    cross_entropy(residuals.probabilities, targets)
}

/// Computes the gradient `dx` of the head's input, and the weight residuals `gradients`. The loss
/// is the loss sum times `factor`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn backward_input<T: Real>(
    shape: BlockShape,
    p: &HeadParameters<&[T]>,
    residuals: &HeadResiduals<&[T]>,
    gradients: &mut HeadGradients<&mut [T]>,
    dx: &mut [T],
    targets: &[u8],
    factor: f64,
) {
    let HeadGradients { d_norm, d_logits } = gradients;
    cross_entropy_gradient(d_logits, residuals.probabilities, targets, factor);
    matmul_nt(d_norm, d_logits, p.weight, shape.rows(), BYTES, shape.width, false);
    dx.fill(T::ZERO);
    norm_backward_input(dx, d_norm, residuals.norm_hat, residuals.norm_inv_std, p.norm_gain);
}

/// *Adds* the gradients of the head's parameters to `d`. The residuals are `norm_hat` and
/// `norm_out`, in this order.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn backward_weight<T: Real>(
    shape: BlockShape,
    (norm_hat, norm_out): (&[T], &[T]),
    gradients: &HeadGradients<&[T]>,
    d: &mut HeadParameters<&mut [T]>,
) {
    matmul_tn(d.weight, norm_out, gradients.d_logits, shape.width, shape.rows(), BYTES, true);
    norm_backward_weight(d.norm_gain, d.norm_bias, gradients.d_norm, norm_hat);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::testing::{assert_gradient, random};

    #[test]
    fn gradients_equal_finite_differences() {
        const FACTOR: f64 = 0.3;
        let shape = BlockShape { batch: 2, time: 2, width: 3, heads_total: 1, heads: 1, hidden: 1 };
        let targets = [1, 2, 255, 2];
        let mut seed = 0;
        let leaves = shape.head_parameters().each(|leaf| {
            seed += 1;
            random(leaf.elements(), seed)
        });
        let mut at = (leaves, random(12, 9));
        let forward = |(p, x): &(HeadParameters<Vec<f64>>, Vec<f64>)| {
            let mut r = shape.head_residuals().each(|leaf| vec![f64::NAN; leaf.elements()]);
            let p = p.each(|leaf| leaf.as_slice());
            let (sum, rows) =
                forward(shape, &p, &mut r.each_mut(|leaf| leaf.as_mut_slice()), x, &targets);
            assert_eq!(rows, 4);
            (FACTOR * sum, r)
        };
        let (_, r) = forward(&at);
        let mut g = shape.head_gradients().each(|leaf| vec![f64::NAN; leaf.elements()]);
        let mut dx = vec![f64::NAN; 12];
        let p = at.0.each(|leaf| leaf.as_slice());
        let (g_mut, r) = (&mut g.each_mut(|l| l.as_mut_slice()), r.each(|l| l.as_slice()));
        backward_input(shape, &p, &r, g_mut, &mut dx, &targets, FACTOR);
        let mut d = at.0.each(|leaf| vec![0.0; leaf.len()]);
        let g = g.each(|l| l.as_slice());
        backward_weight(shape, (r.norm_hat, r.norm_out), &g, &mut d.each_mut(|l| l.as_mut_slice()));
        let value = |at: &(HeadParameters<Vec<f64>>, Vec<f64>)| forward(at).0;
        assert_gradient("x", &dx, &mut at, |at| &mut at.1, value);
        assert_gradient("gain", &d.norm_gain, &mut at, |at| &mut at.0.norm_gain, value);
        assert_gradient("bias", &d.norm_bias, &mut at, |at| &mut at.0.norm_bias, value);
        assert_gradient("weight", &d.weight, &mut at, |at| &mut at.0.weight, value);
    }
}
