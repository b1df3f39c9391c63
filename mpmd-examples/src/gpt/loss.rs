//! Cross-entropy of the next byte, in nats.

use crate::math::Real;

use super::{BYTES, lanes};

/// Turns logits into probabilities in place, both `[rows, BYTES]`. Returns the sum over the rows of
/// the cross-entropy of `targets` `[rows]`, in nats, and the number of rows.
///
/// The sum is in doubles, in the order of the rows.
///
/// # Panics
///
/// Panics if the two do not fit each other.
pub fn cross_entropy<T: Real>(probabilities: &mut [T], targets: &[u8]) -> (f64, usize) {
    assert_rows(probabilities.len(), targets);
    let mut sum = 0.0;
    for (row, target) in probabilities.chunks_exact_mut(BYTES).zip(targets) {
        let largest = lanes::max(row);
        let logit = row[usize::from(*target)] - largest;
        for logit in &mut *row {
            *logit = (*logit - largest).exp_in_loop();
        }
        let total = lanes::sum(row);
        sum += (total.ln() - logit).to_f64();
        let share = T::ONE / total;
        for probability in row {
            *probability *= share;
        }
    }
    (sum, targets.len())
}

/// Writes the gradient of the [`cross_entropy`] sum with respect to the logits, times `factor`, to
/// `d_logits`. `probabilities` are those of [`cross_entropy`]. `factor` is, for instance, one over
/// the number of rows of the whole batch.
///
/// # Panics
///
/// Panics if the slices do not fit each other.
pub fn cross_entropy_gradient<T: Real>(
    d_logits: &mut [T],
    probabilities: &[T],
    targets: &[u8],
    factor: f64,
) {
    assert_rows(probabilities.len(), targets);
    assert_eq!(d_logits.len(), probabilities.len(), "gradients of logits");
    let factor = T::of(factor);
    let rows = d_logits.chunks_exact_mut(BYTES).zip(probabilities.chunks_exact(BYTES));
    for ((d_row, row), target) in rows.zip(targets) {
        for (d_logit, probability) in d_row.iter_mut().zip(row) {
            *d_logit = factor * *probability;
        }
        d_row[usize::from(*target)] -= factor;
    }
}

fn assert_rows(elements: usize, targets: &[u8]) {
    assert_eq!(elements, targets.len() * BYTES, "elements of {} rows of {BYTES}", targets.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::testing::{assert_gradient, random};

    #[test]
    fn loss_of_equal_logits_is_ln_256() {
        let mut logits = vec![3.0f32; 2 * BYTES];
        let (sum, rows) = cross_entropy(&mut logits, &[0, 255]);
        assert!((sum - 2.0 * 256.0f64.ln()).abs() < 1e-5, "{sum}");
        assert_eq!(rows, 2);
        assert!(logits.iter().all(|p| (p - 1.0 / 256.0).abs() < 1e-8));
    }

    #[test]
    fn extreme_logits_give_finite_losses() {
        let mut logits = vec![-1e4f32; 2 * BYTES];
        logits[7] = 1e4;
        logits[BYTES + 7] = 1e4;
        let (sum, _) = cross_entropy(&mut logits, &[7, 8]);
        assert_eq!(sum, 2e4);
        assert_eq!((logits[7], logits[8]), (1.0, 0.0));
    }

    #[test]
    fn nan_logit_gives_nan_loss() {
        let mut logits = vec![0.0f32; BYTES];
        logits[100] = f32::NAN;
        assert!(cross_entropy(&mut logits, &[3]).0.is_nan());
    }

    #[test]
    fn gradient_equals_finite_differences() {
        let targets = [5, 200, 5];
        let mut logits = [random(3 * BYTES, 1)];
        let mut probabilities = logits[0].clone();
        cross_entropy(&mut probabilities, &targets);
        let mut gradient = vec![f64::NAN; 3 * BYTES];
        cross_entropy_gradient(&mut gradient, &probabilities, &targets, 0.25);
        assert_gradient(
            "logits",
            &gradient,
            &mut logits,
            |l| &mut l[0],
            |l| 0.25 * cross_entropy(&mut l[0].clone(), &targets).0,
        );
    }
}
