//! Rotary position embeddings: rotate pairs of elements by angles that depend on the position.

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor, bail};
pub use candle_nn::rotary_emb::{rope_i_slow, rope_slow};

use crate::cuda_layers;
use mpmd_device::cpu::rows::rotation::rotate;

use super::values::{are_fast, for_rows, result, single, slice, tensor_like, values};

/// Rotates the pairs `(i, i + dim / 2)` of the rows of `xs` `[batch, heads, time, dim]`.
///
/// `cos` and `sin` are `[positions, dim / 2]` or `[batch, positions, dim / 2]`, with at least as
/// many positions as `time`.
///
/// # Errors
///
/// If the shapes do not fit each other. The message names them.
pub fn rope(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope_thd(&xs.transpose(1, 2)?, cos, sin)?
        .transpose(1, 2)?
        .contiguous()
}

/// Rotates the pairs `(2i, 2i + 1)` of the rows of `xs` `[batch, heads, time, dim]`. `cos` and
/// `sin` have the shapes that [`rope`] takes.
///
/// # Errors
///
/// If the shapes do not fit each other. The message names them.
pub fn rope_i(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (batch, heads, time, dim) = xs.dims4()?;
    let half = dim / 2;
    let apart = xs
        .reshape((batch, heads, time, half, 2))?
        .transpose(3, 4)?
        .reshape(xs.shape())?;
    let rotated = rope(&apart, cos, sin)?;
    rotated
        .reshape((batch, heads, time, 2, half))?
        .transpose(3, 4)?
        .reshape(xs.shape())
}

/// Rotates the pairs `(i, i + dim / 2)` of the rows of `xs` `[batch, time, heads, dim]`. `cos` and
/// `sin` have the shapes that [`rope`] takes.
///
/// # Errors
///
/// If the shapes do not fit each other. The message names them.
pub fn rope_thd(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (batch, time, heads, dim) = xs.dims4()?;
    let fits = |angles: &Tensor| match *angles.dims() {
        [positions, half] => positions >= time && 2 * half == dim,
        [sequences, positions, half] => sequences == batch && positions >= time && 2 * half == dim,
        _ => false,
    };
    if !fits(cos) || !fits(sin) {
        bail!(
            "rotary embedding of {:?} with cos {:?} and sin {:?}: expected {:?} or {:?} with at \
             least that many positions",
            xs.dims(),
            cos.dims(),
            sin.dims(),
            [time, dim / 2],
            [batch, time, dim / 2]
        );
    }

    // Each sequence's angles, without positions beyond the time.
    let angles = |angles: &Tensor| match angles.rank() {
        2 => angles.narrow(0, 0, time)?.unsqueeze(0),
        _ => angles.narrow(1, 0, time),
    };
    let cos = angles(cos)?;
    let sin = angles(sin)?;

    if let Some(y) = cuda_layers::rotary(xs, &cos, &sin) {
        return y;
    }
    if !are_fast(&[xs, &cos, &sin]) || cos.track_op() || sin.track_op() {
        return compose(xs, &cos, &sin);
    }

    let cos = cos.contiguous()?;
    let sin = sin.contiguous()?;
    xs.contiguous()?.apply_op1(PairRotation {
        cos,
        sin,
        time,
        heads,
    })
}

/// Computes the rotation with operations of candle. `cos` and `sin` are `[batch or 1, time, dim /
/// 2]`.
fn compose(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let dtype = xs.dtype();
    let xs = single(xs)?;
    let cos = single(cos)?.unsqueeze(2)?;
    let sin = single(sin)?.unsqueeze(2)?;
    let half = xs.dim(D::Minus1)? / 2;
    let a = xs.narrow(3, 0, half)?;
    let b = xs.narrow(3, half, half)?;

    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    Tensor::cat(&[first, second], 3)?.to_dtype(dtype)
}

/// The operation of a rotation.
struct PairRotation {
    /// The cosines of the angles: `[batch or 1, time, dim / 2]`. `sin` has the same shape.
    cos: Tensor,
    sin: Tensor,
    time: usize,
    heads: usize,
}

impl PairRotation {
    /// Rotates the rows of `x`, by the negative angles if `is_back` is true.
    fn apply(&self, x: &[f32], is_back: bool) -> Result<Vec<f32>> {
        let cos = values(&self.cos)?;
        let sin = values(&self.sin)?;
        let cos: &[f32] = &cos;
        let sin: &[f32] = &sin;
        let half = self.cos.dim(D::Minus1)?;
        let sequences = self.cos.dim(0)?;
        let direction = if is_back { -1.0 } else { 1.0 };

        let mut out = vec![0.0; x.len()];
        if half == 0 {
            return Ok(out);
        }

        for_rows(&mut out, 2 * half, |first, out| {
            let rows = x[first * 2 * half..].chunks_exact(2 * half);
            for (at, (out, x)) in out.chunks_exact_mut(2 * half).zip(rows).enumerate() {
                let row = first + at;
                let sequence = row / (self.time * self.heads) % sequences;
                let time = row / self.heads % self.time;
                let place = (sequence * self.time + time) * half;
                let [cos, sin] = [cos, sin].map(|all| &all[place..][..half]);
                rotate(x, cos, sin, direction, out);
            }
        });
        Ok(out)
    }
}

impl CustomOp1 for PairRotation {
    fn name(&self) -> &'static str {
        "rotary embedding"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        result(self.apply(&slice(x, layout)?, false)?, layout.shape(), x)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        let d_x = self.apply(&values(&gradient)?, true)?;
        tensor_like(d_x, x).map(Some)
    }
}
