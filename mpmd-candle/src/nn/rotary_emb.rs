//! Rotary position embeddings: rotate pairs of elements by angles that depend on the position.

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor, bail};
pub use candle_nn::rotary_emb::{rope_i_slow, rope_slow};

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
    rotate(xs, cos, sin, Form { is_interleaved: false, is_time_first: false })
}

/// Rotates the pairs `(2i, 2i + 1)` of the rows of `xs` `[batch, heads, time, dim]`. The other
/// shapes are those of [`rope`].
///
/// # Errors
///
/// If the shapes do not fit each other. The message names them.
pub fn rope_i(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate(xs, cos, sin, Form { is_interleaved: true, is_time_first: false })
}

/// Rotates the pairs `(i, i + dim / 2)` of the rows of `xs` `[batch, time, heads, dim]`. The other
/// shapes are those of [`rope`].
///
/// # Errors
///
/// If the shapes do not fit each other. The message names them.
pub fn rope_thd(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate(xs, cos, sin, Form { is_interleaved: false, is_time_first: true })
}

/// The layout of the pairs.
#[derive(Clone, Copy)]
struct Form {
    /// The two elements of a pair are neighbours.
    is_interleaved: bool,
    /// The dimension of time precedes that of heads.
    is_time_first: bool,
}

fn rotate(xs: &Tensor, cos: &Tensor, sin: &Tensor, form: Form) -> Result<Tensor> {
    let (batch, a, b, dim) = xs.dims4()?;
    let (time, heads) = if form.is_time_first { (a, b) } else { (b, a) };
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
    let (cos, sin) = (angles(cos)?, angles(sin)?);
    if !are_fast(&[xs, &cos, &sin]) || cos.track_op() || sin.track_op() {
        return compose(xs, &cos, &sin, form);
    }
    let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
    xs.contiguous()?.apply_op1(Rotation { cos, sin, form, time, heads })
}

/// Computes the rotation with operations of candle. `cos` and `sin` are `[batch or 1, time, dim /
/// 2]`.
fn compose(xs: &Tensor, cos: &Tensor, sin: &Tensor, form: Form) -> Result<Tensor> {
    let heads = if form.is_time_first { 2 } else { 1 };
    let dtype = xs.dtype();
    let (xs, cos, sin) =
        (single(xs)?, single(cos)?.unsqueeze(heads)?, single(sin)?.unsqueeze(heads)?);
    let half = xs.dim(D::Minus1)? / 2;
    let (a, b) = if form.is_interleaved {
        let (batch, heads, time, _) = xs.dims4()?;
        let pairs = xs.reshape((batch, heads, time, half, 2))?;
        (pairs.narrow(4, 0, 1)?.squeeze(4)?, pairs.narrow(4, 1, 1)?.squeeze(4)?)
    } else {
        (xs.narrow(3, 0, half)?, xs.narrow(3, half, half)?)
    };
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    let rotated = if form.is_interleaved {
        Tensor::stack(&[first, second], 4)?.reshape(xs.shape())
    } else {
        Tensor::cat(&[first, second], 3)
    };
    rotated?.to_dtype(dtype)
}

/// The operation of a rotation.
struct Rotation {
    /// `[batch or 1, time, dim / 2]`, as `sin`.
    cos: Tensor,
    sin: Tensor,
    form: Form,
    time: usize,
    heads: usize,
}

impl Rotation {
    /// Rotates the rows of `x`, in the other direction if `is_back` is set.
    fn apply(&self, x: &[f32], is_back: bool) -> Result<Vec<f32>> {
        let (cos, sin) = (values(&self.cos)?, values(&self.sin)?);
        let (cos, sin): (&[f32], &[f32]) = (&cos, &sin);
        let half = self.cos.dim(D::Minus1)?;
        let (sequences, direction) = (self.cos.dim(0)?, if is_back { -1.0 } else { 1.0 });
        let mut out = vec![0.0; x.len()];
        if half == 0 {
            return Ok(out);
        }
        for_rows(&mut out, 2 * half, |first, out| {
            let rows = x[first * 2 * half..].chunks_exact(2 * half);
            for (at, (out, x)) in out.chunks_exact_mut(2 * half).zip(rows).enumerate() {
                let row = first + at;
                let sequence = row / (self.time * self.heads) % sequences;
                let time = match self.form.is_time_first {
                    true => row / self.heads % self.time,
                    false => row % self.time,
                };
                let place = (sequence * self.time + time) * half;
                let angles = cos[place..][..half].iter().zip(&sin[place..][..half]);
                if self.form.is_interleaved {
                    let pairs = out.chunks_exact_mut(2).zip(x.chunks_exact(2));
                    for ((out, x), (cos, sin)) in pairs.zip(angles) {
                        let sin = direction * sin;
                        (out[0], out[1]) = (x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos);
                    }
                } else {
                    let ((out_a, out_b), (a, b)) = (out.split_at_mut(half), x.split_at(half));
                    let pairs = out_a.iter_mut().zip(out_b).zip(a.iter().zip(b));
                    for (((out_a, out_b), (a, b)), (cos, sin)) in pairs.zip(angles) {
                        let sin = direction * sin;
                        (*out_a, *out_b) = (a * cos - b * sin, a * sin + b * cos);
                    }
                }
            }
        });
        Ok(out)
    }
}

impl CustomOp1 for Rotation {
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
