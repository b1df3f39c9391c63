//! Losses. The cross-entropy has a kernel that takes logits.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Tensor, bail};
pub use candle_nn::loss::{binary_cross_entropy_with_logit, huber, mse, nll};

use super::embedding::indices;
use super::lanes;
use super::softmax::log_softmax;
use super::values::{are_fast, for_costly_rows, for_rows, result, slice, tensor_like, values};
use crate::pass::keeps;

/// Computes the mean cross-entropy of `target` `[rows]`, indices of classes, under the logits `inp`
/// `[rows, classes]`, in nats. The result is a scalar of the logits' type.
///
/// # Errors
///
/// If the shapes do not fit each other, or a target is not a class.
pub fn cross_entropy(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    if inp.rank() != 2 {
        bail!("cross_entropy: the logits are {:?}: expected [rows, classes]", inp.dims());
    }
    let (sum, rows) = total(inp, target, None)?;
    sum / rows
}

/// Computes the sum of `weight * cross-entropy` over all rows, and the sum of the weights. Both are
/// f32 scalars. Their quotient, over all microbatches, is the mean.
///
/// The logits are `[..., classes]`. `targets` and `weights` are `[...]`. Without weights each row
/// has weight 1. A row of weight 0, such as padding, may have any target. Only the logits have a
/// gradient.
///
/// # Errors
///
/// If the shapes do not fit each other, or a target is not a class.
pub fn cross_entropy_sum(
    logits: &Tensor,
    targets: &Tensor,
    weights: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let (sum, weight) = total(logits, targets, weights)?;
    Ok((sum.to_dtype(DType::F32)?, Tensor::new(weight as f32, logits.device())?))
}

/// Returns the sum of the weighted losses, of the logits' type, and the sum of the weights.
fn total(logits: &Tensor, targets: &Tensor, weights: Option<&Tensor>) -> Result<(Tensor, f64)> {
    let Some((&classes, rows)) = logits.dims().split_last() else {
        bail!("cross_entropy: the logits have no dimension: expected [..., classes]");
    };
    if targets.dims() != rows || weights.is_some_and(|weights| weights.dims() != rows) {
        bail!(
            "cross_entropy of logits {:?}, targets {:?} and weights {:?}: expected {rows:?} for \
             targets and weights",
            logits.dims(),
            targets.dims(),
            weights.map(Tensor::dims)
        );
    }
    let mut targets = indices(targets)?;
    let weights = match weights {
        None => vec![1.0; targets.len()],
        Some(weights) => weights.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?,
    };
    for (row, (target, weight)) in targets.iter_mut().zip(&weights).enumerate() {
        if *weight == 0.0 {
            *target = 0;
        } else if *target as usize >= classes {
            bail!(
                "cross_entropy: the target {target} of row {row} is not one of {classes} classes"
            );
        }
    }
    let sum = weights.iter().map(|weight| f64::from(*weight)).sum();
    if are_fast(&[logits]) {
        if logits.track_op() {
            keeps((targets.len() * 3 * size_of::<f32>()) as u64);
        }
        let operation = CrossEntropy { targets, weights, log_sums: OnceLock::new() };
        return Ok((logits.contiguous()?.apply_op1(operation)?, sum));
    }
    let rows = targets.len();
    let on_device = |tensor: Tensor| tensor.to_device(logits.device());
    let targets = on_device(Tensor::from_vec(targets, (rows, 1), &Device::Cpu)?)?;
    let weights = on_device(Tensor::from_vec(weights, (rows, 1), &Device::Cpu)?)?;
    let logs = log_softmax(&logits.reshape((rows, classes))?, D::Minus1)?.gather(&targets, 1)?;
    Ok(((logs * weights.to_dtype(logits.dtype())?)?.sum_all()?.neg()?, sum))
}

/// The operation that sums the weighted losses.
struct CrossEntropy {
    /// The class of each row.
    targets: Vec<u32>,
    /// The weight of each row.
    weights: Vec<f32>,
    /// The logarithm of the sum of exponentials of each row, for the backward pass.
    log_sums: OnceLock<Vec<f32>>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (logits, classes) = (slice(logits, layout)?, layout.dim(D::Minus1)?);
        let mut log_sums = vec![0.0; self.targets.len()];
        for_costly_rows(&mut log_sums, 1, classes, |first, log_sums| {
            for (at, log_sum) in log_sums.iter_mut().enumerate() {
                if self.weights[first + at] != 0.0 {
                    let row = &logits[(first + at) * classes..][..classes];
                    let largest = lanes::max(row);
                    *log_sum = largest + lanes::sum_of(row, |x| lanes::exp(x - largest)).ln();
                }
            }
        });
        let rows = self.targets.iter().zip(&self.weights).zip(&log_sums).enumerate();
        let terms = rows.filter(|(_, ((_, weight), _))| **weight != 0.0);
        let sum: f64 = terms
            .map(|(row, ((target, weight), log_sum))| {
                let logit = logits[row * classes + *target as usize];
                f64::from(*weight) * (f64::from(*log_sum) - f64::from(logit))
            })
            .sum();
        self.log_sums.get_or_init(|| log_sums);
        result(vec![sum as f32], ())
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let Some(log_sums) = self.log_sums.get() else {
            bail!("the backward pass of a cross-entropy before its forward pass");
        };
        let (factor, classes) = (gradient.to_scalar::<f32>()?, logits.dim(D::Minus1)?);
        let mut d_logits = vec![0.0; logits.elem_count()];
        {
            let logits = values(logits)?;
            let logits: &[f32] = &logits;
            for_rows(&mut d_logits, classes, |first, d_logits| {
                for (at, d_row) in d_logits.chunks_exact_mut(classes).enumerate() {
                    let row = first + at;
                    let (log_sum, weight) = (log_sums[row], self.weights[row]);
                    if weight == 0.0 {
                        continue;
                    }
                    let factor = factor * weight;
                    for (d, x) in d_row.iter_mut().zip(&logits[row * classes..]) {
                        *d = factor * lanes::exp(*x - log_sum);
                    }
                    d_row[self.targets[row] as usize] -= factor;
                }
            });
        }
        tensor_like(d_logits, logits).map(Some)
    }
}
