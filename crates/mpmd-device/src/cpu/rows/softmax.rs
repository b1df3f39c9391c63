//! Softmax and its logarithm, and the cross-entropy of a row of logits.

use crate::cpu::lanes;
use crate::cpu::widest::widest;

/// The numbers that turn a score `x` into the probability `share * e^(x - largest)`.
///
/// They are separate, since a sum of `largest` and the logarithm of `share` may lose the latter.
#[derive(Clone, Copy, Debug, Default)]
pub struct Normalizer {
    /// The largest score of the row.
    pub largest: f32,
    /// One divided by the sum of `e^(x - largest)`.
    pub share: f32,
}

impl Normalizer {
    /// Returns the probability of a score.
    #[inline(always)]
    pub fn probability(self, x: f32) -> f32 {
        self.share * lanes::exp(x - self.largest)
    }
}

widest!(
    /// Writes the softmax of the scores `x` to `out`, or its logarithm if `is_log` is set. Both
    /// slices have the same length.
    pub fn softmax = softmax_row(x: &[f32], is_log: bool, out: &mut [f32])
);

#[inline(always)]
fn softmax_row(x: &[f32], is_log: bool, out: &mut [f32]) {
    let largest = lanes::max(x);
    for (out, x) in out.iter_mut().zip(x) {
        *out = lanes::exp(*x - largest);
    }

    let total = lanes::sum(out);
    if is_log {
        let log = total.ln();
        for (out, x) in out.iter_mut().zip(x) {
            *out = *x - largest - log;
        }
    } else {
        let share = 1.0 / total;
        out.iter_mut().for_each(|out| *out *= share);
    }
}

widest!(
    /// Writes the gradient of the scores to `d_x`, from the result `y` of [`softmax`] and its
    /// gradient `d`. All slices have the same length.
    pub fn softmax_gradient =
        softmax_gradient_row(y: &[f32], d: &[f32], is_log: bool, d_x: &mut [f32])
);

#[inline(always)]
fn softmax_gradient_row(y: &[f32], d: &[f32], is_log: bool, d_x: &mut [f32]) {
    let terms = y.iter().zip(d);
    if is_log {
        let sum = lanes::sum(d);
        for (d_x, (y, d)) in d_x.iter_mut().zip(terms) {
            *d_x = *d - lanes::exp(*y) * sum;
        }
    } else {
        let mean = lanes::dot(y, d);
        for (d_x, (y, d)) in d_x.iter_mut().zip(terms) {
            *d_x = *y * (*d - mean);
        }
    }
}

widest!(
    /// Returns the normalizer of a row of logits.
    pub fn normalizer = normalizer_of(row: &[f32]) -> Normalizer
);

#[inline(always)]
fn normalizer_of(row: &[f32]) -> Normalizer {
    let largest = lanes::max(row);
    let total = lanes::sum_of(row, |x| lanes::exp(x - largest));
    Normalizer {
        largest,
        share: 1.0 / total,
    }
}

widest!(
    /// Writes `factor` times the probability of each logit of `row` to `out`. Both slices have the
    /// same length.
    pub fn probabilities =
        probabilities_row(row: &[f32], normalizer: Normalizer, factor: f32, out: &mut [f32])
);

#[inline(always)]
fn probabilities_row(row: &[f32], normalizer: Normalizer, factor: f32, out: &mut [f32]) {
    let Normalizer { largest, share } = normalizer;
    for (out, x) in out.iter_mut().zip(row) {
        *out = factor * share * lanes::exp(*x - largest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::rows::tests::{LENGTHS, bits, row};

    #[test]
    fn widths_give_the_same_bits() {
        for len in LENGTHS {
            let (x, d) = (row(len, 1), row(len, 2));
            let normalizer = normalizer(&x);
            let plain = normalizer_of(&x);
            let of = |of: Normalizer| bits(&[of.largest, of.share]);
            assert_eq!(of(normalizer), of(plain), "{len}");

            let (mut a, mut b) = (row(len, 0), row(len, 0));
            probabilities(&x, normalizer, 0.5, &mut a);
            probabilities_row(&x, normalizer, 0.5, &mut b);
            assert_eq!(bits(&a), bits(&b), "{len}");
            for is_log in [false, true] {
                softmax(&x, is_log, &mut a);
                softmax_row(&x, is_log, &mut b);
                assert_eq!(bits(&a), bits(&b), "{len}");
                let y = a.clone();
                softmax_gradient(&y, &d, is_log, &mut a);
                softmax_gradient_row(&y, &d, is_log, &mut b);
                assert_eq!(bits(&a), bits(&b), "{len}");
            }
        }
    }
}
