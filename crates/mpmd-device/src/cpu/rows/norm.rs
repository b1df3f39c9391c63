//! The norms of rows: LayerNorm and RMSNorm.

use crate::cpu::lanes;
use crate::cpu::widest::widest;

/// A norm of rows: each row gets mean square 1, then each column is scaled by a weight.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// True if the row's mean is subtracted first, as LayerNorm does.
    pub remove_mean: bool,
    /// A small number that is added to the mean square.
    pub eps: f32,
}

/// The numbers that shift and scale a row: `(x - mean) * scale`.
#[derive(Clone, Copy, Debug)]
pub struct RowStatistics {
    /// The mean of the row, or zero if it is not subtracted.
    pub mean: f32,
    /// One divided by the root of the mean square.
    pub scale: f32,
}

widest!(
    /// Returns the statistics of a row.
    pub fn statistics = statistics_of(norm: Norm, row: &[f32]) -> RowStatistics
);

#[inline(always)]
fn statistics_of(norm: Norm, row: &[f32]) -> RowStatistics {
    let share = 1.0 / row.len() as f32;
    let mean = if norm.remove_mean {
        lanes::sum(row) * share
    } else {
        0.0
    };
    let variance = lanes::sum_of(row, |x| (x - mean) * (x - mean)) * share;
    RowStatistics {
        mean,
        scale: 1.0 / (variance + norm.eps).sqrt(),
    }
}

widest!(
    /// Writes the norm of the row `x` to `out`. All slices have the same length.
    pub fn forward = forward_row(
        norm: Norm,
        x: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        out: &mut [f32],
    )
);

#[inline(always)]
fn forward_row(norm: Norm, x: &[f32], weight: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
    let RowStatistics { mean, scale } = statistics_of(norm, x);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = (*x - mean) * scale * *weight;
    }
    if let Some(bias) = bias {
        for (out, bias) in out.iter_mut().zip(bias) {
            *out += *bias;
        }
    }
}

widest!(
    /// Writes the gradient of the row `x` to `d_x`, from the gradient `d` of its norm. All slices
    /// have the same length.
    pub fn input_gradient = input_gradient_row(
        norm: Norm,
        statistics: RowStatistics,
        x: &[f32],
        weight: &[f32],
        d: &[f32],
        d_x: &mut [f32],
    )
);

#[inline(always)]
fn input_gradient_row(
    norm: Norm,
    statistics: RowStatistics,
    x: &[f32],
    weight: &[f32],
    d: &[f32],
    d_x: &mut [f32],
) {
    let RowStatistics { mean, scale } = statistics;
    let share = 1.0 / x.len() as f32;
    for ((d_x, d), weight) in d_x.iter_mut().zip(d).zip(weight) {
        *d_x = *d * *weight;
    }

    // Mean and variance depend on all elements of the row. These terms subtract their part of the
    // gradient.
    let sum = lanes::sum(d_x);
    let along = lanes::sum_of_both(d_x, x, |d, x| d * (x - mean)) * scale * scale * share;
    let shift = if norm.remove_mean { sum * share } else { 0.0 };

    for (d_x, x) in d_x.iter_mut().zip(x) {
        *d_x = scale * (*d_x - shift - (*x - mean) * along);
    }
}

widest!(
    /// Adds a row's part to the gradient of the weight, `sums`, from the gradient `d` of the norm.
    /// The slices are the same columns of each.
    pub fn add_weight_gradient = add_weight_gradient_row(
        statistics: RowStatistics,
        x: &[f32],
        d: &[f32],
        sums: &mut [f32],
    )
);

#[inline(always)]
fn add_weight_gradient_row(statistics: RowStatistics, x: &[f32], d: &[f32], sums: &mut [f32]) {
    let RowStatistics { mean, scale } = statistics;
    for (sum, (x, d)) in sums.iter_mut().zip(x.iter().zip(d)) {
        *sum += *d * ((*x - mean) * scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::rows::tests::{LENGTHS, bits, row};

    #[test]
    fn widths_give_the_same_bits() {
        for len in LENGTHS {
            let (x, weight, d) = (row(len, 1), row(len, 2), row(len, 3));
            for (remove_mean, bias) in [(false, None), (true, Some(&*d))] {
                let norm = Norm {
                    remove_mean,
                    eps: 1e-5,
                };
                let found = statistics(norm, &x);
                let plain = statistics_of(norm, &x);
                let of = |of: RowStatistics| bits(&[of.mean, of.scale]);
                assert_eq!(of(found), of(plain), "{len}");

                let (mut a, mut b) = (row(len, 0), row(len, 0));
                forward(norm, &x, &weight, bias, &mut a);
                forward_row(norm, &x, &weight, bias, &mut b);
                assert_eq!(bits(&a), bits(&b), "{len}");
                input_gradient(norm, found, &x, &weight, &d, &mut a);
                input_gradient_row(norm, found, &x, &weight, &d, &mut b);
                assert_eq!(bits(&a), bits(&b), "{len}");
                add_weight_gradient(found, &x, &d, &mut a);
                add_weight_gradient_row(found, &x, &d, &mut b);
                assert_eq!(bits(&a), bits(&b), "{len}");
            }
        }
    }
}
