//! Losses. The cross-entropy has a kernel that takes logits.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Tensor, bail};

use super::embedding::indices;
use super::softmax::log_softmax;
use super::values::{are_fast, for_costly_rows, for_rows, single, slice, tensor_like, values};
use crate::cuda_layers;
use crate::pass::keeps;
use mpmd_device::cpu::rows;
use mpmd_device::cpu::rows::softmax::Normalizer;

/// Computes the mean cross-entropy of `target` `[rows]`, indices of classes, under the logits `inp`
/// `[rows, classes]`, in nats. The result is a scalar of the logits' type.
///
/// # Errors
///
/// If the shapes do not fit each other, or a target is not a class.
pub fn cross_entropy(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    if inp.rank() != 2 {
        bail!(
            "cross_entropy: the logits are {:?}: expected [rows, classes]",
            inp.dims()
        );
    }
    let (sum, rows) = match on_cuda(inp, target, None)? {
        Some((sum, _)) => (sum, target.elem_count() as f64),
        None => total(inp, target, None)?,
    };
    (sum / rows)?.to_dtype(inp.dtype())
}

/// Computes the mean of `-inp[row, target]`, where `inp` `[rows, classes]` are logarithms of
/// probabilities and `target` `[rows]` are indices of classes.
///
/// # Errors
///
/// If the shapes do not fit each other, or a target is not a class.
pub fn nll(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    candle_nn::loss::nll(&single(inp)?, target)?.to_dtype(inp.dtype())
}

/// Computes the mean of the squares of `inp - target`, which have one shape.
///
/// # Errors
///
/// If the shapes do not fit each other.
pub fn mse(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    candle_nn::loss::mse(&single(inp)?, &single(target)?)?.to_dtype(inp.dtype())
}

/// Computes the mean of the Huber loss of the differences `d` of `inp` and `target`, which have one
/// shape: `d^2 / 2`, and `delta (|d| - delta / 2)` if `|d|` is above `delta`.
///
/// # Errors
///
/// If the shapes do not fit each other.
pub fn huber(inp: &Tensor, target: &Tensor, delta: f64) -> Result<Tensor> {
    candle_nn::loss::huber(&single(inp)?, &single(target)?, delta)?.to_dtype(inp.dtype())
}

/// Computes the mean binary cross-entropy, in nats, of the probabilities `target` under the
/// probabilities `1 / (1 + e^-inp)`. Both tensors have one shape.
///
/// # Errors
///
/// If the shapes do not fit each other.
pub fn binary_cross_entropy_with_logit(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    let x = single(inp)?;
    let target = single(target)?;
    // The loss is `ln(1 + e^x) - x target`, in a form without overflow.
    let log = (x.abs()?.neg()?.exp()? + 1.0)?.log()?;
    ((x.relu()? - (x * target)?)? + log)?
        .mean_all()?
        .to_dtype(inp.dtype())
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
    if let Some(done) = on_cuda(logits, targets, weights)? {
        return Ok(done);
    }
    let (sum, weight) = total(logits, targets, weights)?;
    Ok((
        sum.to_dtype(DType::F32)?,
        Tensor::new(weight as f32, logits.device())?,
    ))
}

/// Computes [`cross_entropy_sum`] on a CUDA device. Returns `None` if mpmd's kernels cannot.
fn on_cuda(
    logits: &Tensor,
    targets: &Tensor,
    weights: Option<&Tensor>,
) -> Result<Option<(Tensor, Tensor)>> {
    check(logits, targets, weights)?;
    cuda_layers::cross_entropy(logits, targets, weights).transpose()
}

/// Returns the number of classes. Fails if the shapes do not fit each other.
fn check(logits: &Tensor, targets: &Tensor, weights: Option<&Tensor>) -> Result<usize> {
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
    Ok(classes)
}

/// Returns the sum of the weighted losses and the sum of the weights. The sum of the losses is f64
/// for f64 logits, else f32.
fn total(logits: &Tensor, targets: &Tensor, weights: Option<&Tensor>) -> Result<(Tensor, f64)> {
    let classes = check(logits, targets, weights)?;
    let mut targets = indices(targets)?;
    let weights = match weights {
        None => vec![1.0; targets.len()],
        Some(weights) => weights
            .flatten_all()?
            .to_dtype(DType::F32)?
            .to_vec1::<f32>()?,
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
            let row = 2 * size_of::<f32>() + size_of::<Normalizer>();
            keeps((targets.len() * row) as u64);
        }
        let operation = CrossEntropyOp {
            targets,
            weights,
            normalizers: OnceLock::new(),
        };
        return Ok((logits.contiguous()?.apply_op1(operation)?, sum));
    }

    let rows = targets.len();
    let on_device = |tensor: Tensor| tensor.to_device(logits.device());
    let targets = on_device(Tensor::from_vec(targets, (rows, 1), &Device::Cpu)?)?;
    let has_empty = weights.contains(&0.0);
    let weights = on_device(Tensor::from_vec(weights, (rows, 1), &Device::Cpu)?)?;
    let mut logits = single(logits)?.reshape((rows, classes))?;

    if has_empty {
        // A row of weight 0 may have infinite logits: their products with 0 are NaN.
        let counts = weights.ne(0f32)?.broadcast_as((rows, classes))?;
        logits = counts.where_cond(&logits, &logits.zeros_like()?)?;
    }

    let logs = log_softmax(&logits, D::Minus1)?.gather(&targets, 1)?;
    Ok((
        (logs * weights.to_dtype(logits.dtype())?)?
            .sum_all()?
            .neg()?,
        sum,
    ))
}

/// The operation that sums the weighted losses, in f32.
struct CrossEntropyOp {
    /// The class of each row.
    targets: Vec<u32>,
    /// The weight of each row.
    weights: Vec<f32>,
    /// One normalizer per row, saved for the backward pass.
    normalizers: OnceLock<Vec<Normalizer>>,
}

impl CustomOp1 for CrossEntropyOp {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = slice(logits, layout)?;
        let classes = layout.dim(D::Minus1)?;
        let logits: &[f32] = &logits;

        let mut normalizers = vec![Normalizer::default(); self.targets.len()];
        for_costly_rows(&mut normalizers, 1, classes, |first, normalizers| {
            for (at, normalizer) in normalizers.iter_mut().enumerate() {
                if self.weights[first + at] != 0.0 {
                    let row = &logits[(first + at) * classes..][..classes];
                    *normalizer = rows::softmax::normalizer(row);
                }
            }
        });

        let rows = self
            .targets
            .iter()
            .zip(&self.weights)
            .zip(&normalizers)
            .enumerate();
        let terms = rows.filter(|(_, ((_, weight), _))| **weight != 0.0);
        let sum: f64 = terms
            .map(|(row, ((target, weight), normalizer))| {
                let logit = logits[row * classes + *target as usize];
                let below = f64::from(normalizer.largest) - f64::from(logit);
                f64::from(*weight) * (below - f64::from(normalizer.share).ln())
            })
            .sum();

        self.normalizers.get_or_init(|| normalizers);
        Ok((CpuStorage::F32(vec![sum as f32]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let Some(normalizers) = self.normalizers.get() else {
            bail!("the backward pass of a cross-entropy before its forward pass");
        };
        let factor = gradient.to_scalar::<f32>()?;
        let classes = logits.dim(D::Minus1)?;

        let mut d_logits = vec![0.0; logits.elem_count()];
        {
            let logits = values(logits)?;
            let logits: &[f32] = &logits;
            for_rows(&mut d_logits, classes, |first, d_logits| {
                for (at, d_row) in d_logits.chunks_exact_mut(classes).enumerate() {
                    let row = first + at;
                    let weight = self.weights[row];
                    if weight == 0.0 {
                        continue;
                    }
                    let factor = factor * weight;
                    let logits = &logits[row * classes..][..classes];
                    rows::softmax::probabilities(logits, normalizers[row], factor, d_row);
                    d_row[self.targets[row] as usize] -= factor;
                }
            });
        }

        tensor_like(d_logits, logits).map(Some)
    }
}
