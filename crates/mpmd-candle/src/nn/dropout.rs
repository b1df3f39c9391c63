//! Dropout. The mask is computed again in the backward pass.

use candle_core::{CpuStorage, CustomOp1, Device, Layout, ModuleT, Result, Shape, Tensor, bail};
use mpmd_layout::random::{Key, bits};

use super::values::{are_fast, for_rows, result, slice, tensor_like, values};
use crate::cuda_layers;
use crate::pass::random_key;

/// The number of elements that share one block of 64 random bits.
const SHARED: usize = 4;

/// The number of values that 16 random bits of an element can have.
const DRAWS: f64 = 65536.0;

/// A layer that sets a random share of the elements to zero and scales the others.
#[derive(Clone, Debug)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// Creates a layer that drops each element with the probability `drop_p`, in `[0, 1)`.
    pub fn new(drop_p: f32) -> Self {
        Self { drop_p }
    }

    /// Returns [`dropout`] of `xs` if `train` is true, else `xs`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`dropout`].
    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        if train {
            dropout(xs, self.drop_p)
        } else {
            Ok(xs.clone())
        }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(xs, train)
    }
}

/// Sets each element to zero with the probability `p`, and multiplies the others by `1 / (1 - p)`.
/// `p` is `drop_p`, rounded to a multiple of 2^-16 below 1.
///
/// The mask depends only on the key of the stage's microbatch, the number of keys drawn before in
/// the pass, and the index of the element.
///
/// # Errors
///
/// If `drop_p` is not in `[0, 1)`. If it is not zero and the call is outside of a stage, or the
/// microbatch has no key.
pub fn dropout(xs: &Tensor, drop_p: f32) -> Result<Tensor> {
    if !(0.0..1.0).contains(&drop_p) {
        bail!("dropout: the probability is {drop_p}: expected a number in [0, 1)");
    }
    if drop_p == 0.0 {
        return Ok(xs.clone());
    }

    let limit = ((f64::from(drop_p) * DRAWS).round() as u64).min(DRAWS as u64 - 1);
    let key = random_key()?;
    if let Some(y) = cuda_layers::dropout(xs, key, drop_p) {
        return y;
    }

    let drop = DropoutOp { key, limit };
    if are_fast(&[xs]) {
        return xs.contiguous()?.apply_op1(drop);
    }

    let mask = Tensor::from_vec(
        drop.apply(&vec![1.0; xs.elem_count()]),
        xs.shape(),
        &Device::Cpu,
    )?;
    xs * mask.to_dtype(xs.dtype())?.to_device(xs.device())?
}

/// The operation of one call of [`dropout`].
struct DropoutOp {
    key: Key,
    /// Elements are kept if their 16 random bits are at least this number.
    limit: u64,
}

impl DropoutOp {
    /// Returns `x` with some elements dropped and the others scaled.
    fn apply(&self, x: &[f32]) -> Vec<f32> {
        let scale = (DRAWS / (DRAWS - self.limit as f64)) as f32;
        let mut out = vec![0.0; x.len()];
        for_rows(&mut out, SHARED, |first, out| {
            let chunks = out
                .chunks_mut(SHARED)
                .zip(x[first * SHARED..].chunks(SHARED));

            for (at, (out, x)) in chunks.enumerate() {
                let mut random = bits(self.key, (first + at) as u64);
                for (out, x) in out.iter_mut().zip(x) {
                    *out = if random & 0xffff < self.limit {
                        0.0
                    } else {
                        *x * scale
                    };
                    random >>= 16;
                }
            }
        });
        out
    }
}

impl CustomOp1 for DropoutOp {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        result(self.apply(&slice(x, layout)?), layout.shape(), x)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        let d_x = self.apply(&values(&gradient)?);
        tensor_like(d_x, x).map(Some)
    }
}
