//! The scores of a query, between the products of attention.

use std::ops::Range;

use super::softmax::Normalizer;
use crate::cpu::lanes;
use crate::cpu::widest::widest;

/// The scores of a query before their softmax, as a function of its products with the keys.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// The factor of the products of query and keys.
    pub scale: f32,
    /// A number for each key of the row, which is added to the scaled product.
    pub mask: Option<&'a [f32]>,
    /// The first key that the query sees.
    pub first: usize,
    /// The key after the last one that the query sees.
    pub end: usize,
}

impl Scores<'_> {
    /// Replaces a query's products with the keys, `row`, by the scaled and masked scores.
    #[inline(always)]
    fn finish(self, row: &mut [f32]) {
        match self.mask {
            Some(mask) => {
                for (x, term) in row.iter_mut().zip(mask) {
                    *x = *x * self.scale + *term;
                }
            }
            None => row.iter_mut().for_each(|x| *x *= self.scale),
        }
    }

    #[inline(always)]
    fn seen(self) -> Range<usize> {
        self.first..self.end
    }
}

widest!(
    /// Replaces a query's products with the keys, `row`, by the softmax of the scores of the keys
    /// that it sees, and by zero for other keys.
    ///
    /// # Panics
    ///
    /// If the query sees keys beyond the row.
    pub fn probabilities = probabilities_row(row: &mut [f32], scores: Scores<'_>) -> Normalizer
);

#[inline(always)]
fn probabilities_row(row: &mut [f32], scores: Scores<'_>) -> Normalizer {
    scores.finish(row);
    hide(row, &scores.seen());
    let seen = &mut row[scores.seen()];
    let largest = lanes::max(seen);
    seen.iter_mut().for_each(|x| *x = lanes::exp(*x - largest));
    let total = lanes::sum(seen);
    let share = 1.0 / total;
    seen.iter_mut().for_each(|x| *x *= share);
    Normalizer { largest, share }
}

widest!(
    /// Replaces a query's products with the keys, `row`, by probabilities. Replaces the
    /// probabilities' gradients `d_row` by gradients of the products. Both become zero for keys
    /// that the query does not see.
    ///
    /// `mean` is the mean of the probabilities' gradients, weighted by the probabilities: the dot
    /// product of the result and its gradient. It is computed here if it is `None`.
    ///
    /// # Panics
    ///
    /// If the query sees keys beyond the row.
    pub fn score_gradients = score_gradients_row(
        row: &mut [f32],
        d_row: &mut [f32],
        scores: Scores<'_>,
        normalizer: Normalizer,
        mean: Option<f32>,
    )
);

#[inline(always)]
fn score_gradients_row(
    row: &mut [f32],
    d_row: &mut [f32],
    scores: Scores<'_>,
    normalizer: Normalizer,
    mean: Option<f32>,
) {
    scores.finish(row);
    hide(row, &scores.seen());
    hide(d_row, &scores.seen());
    let d_seen = &mut d_row[scores.seen()];
    let seen = &mut row[scores.seen()];

    let mean = match mean {
        Some(mean) => mean,
        None => lanes::sum_of_both(seen, d_seen, |x, d| normalizer.probability(x) * d),
    };
    for (x, d) in seen.iter_mut().zip(d_seen) {
        *x = normalizer.probability(*x);
        *d = scores.scale * *x * (*d - mean);
    }
}

/// Sets the elements of a row to zero for the keys outside of `seen`.
#[inline(always)]
fn hide(row: &mut [f32], seen: &Range<usize>) {
    row[..seen.start].fill(0.0);
    row[seen.end..].fill(0.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::rows::tests::{LENGTHS, bits, row};

    #[test]
    fn widths_give_the_same_bits() {
        for len in LENGTHS {
            let mask = row(len, 3);
            for (mask, mean) in [(None, None), (Some(&*mask), Some(0.25))] {
                let scores = Scores {
                    scale: 0.3,
                    mask,
                    first: len / 5,
                    end: len - len / 7,
                };
                let (mut a, mut b) = (row(len, 1), row(len, 1));
                let normalizer = probabilities(&mut a, scores);
                probabilities_row(&mut b, scores);
                assert_eq!(bits(&a), bits(&b), "{len}");
                let hidden = a[..len / 5].iter().chain(&a[len - len / 7..]);
                assert_eq!(hidden.sum::<f32>(), 0.0, "{len}");

                let [mut a, mut b] = [(); 2].map(|()| (row(len, 1), row(len, 2)));
                score_gradients(&mut a.0, &mut a.1, scores, normalizer, mean);
                score_gradients_row(&mut b.0, &mut b.1, scores, normalizer, mean);
                assert_eq!(bits(&a.0), bits(&b.0), "{len}");
                assert_eq!(bits(&a.1), bits(&b.1), "{len}");
            }
        }
    }
}
