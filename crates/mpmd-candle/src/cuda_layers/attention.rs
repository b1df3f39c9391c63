//! Attention without a matrix of scores in memory.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, Shape, Tensor, bail};
use mpmd_core::Result as CoreResult;
use mpmd_core::cuda::CudaPart;
use mpmd_core::cuda::layers::{self, CudaAttention, Heads};

use super::op::{CudaLayer, LayerArgument, LayerOp, fit, issue};
use crate::cuda::tensor;
use crate::cuda::{OnCuda, are_on_cuda};

/// The largest head dimension that the kernels support.
const MOST: usize = 256;

/// The keys that each query sees.
pub(crate) enum CudaSight {
    All,
    Causal,
    /// The keys from a first one up to the query's own position. The tensor has the index of each
    /// query's first key: u32 `[batch or 1, queries]`. A first key behind the query's position
    /// gives NaN.
    From(Tensor),
    /// Numbers that are added to the scores: f32 with dense rows, `[batch, heads, queries, keys]`.
    Additive(Tensor),
}

/// Computes attention of `q` `[batch, heads, queries, dim]` to `k` and `v` `[batch, groups, keys,
/// dim]`. With a cap, a score `x` becomes `cap tanh(x / cap)`. Returns `None` if mpmd's kernels
/// cannot.
pub(crate) fn attention(
    [q, k, v]: [&Tensor; 3],
    sight: CudaSight,
    scale: f64,
    cap: Option<f64>,
) -> Option<Result<Tensor>> {
    let q_dims = q.dims();
    let v_dims = v.dims();
    let is_known = match &sight {
        CudaSight::Additive(mask) => are_on_cuda(&[mask]) && mask.dtype() == DType::F32,
        CudaSight::From(first) => are_on_cuda(&[first]) && first.dtype() == DType::U32,
        CudaSight::All | CudaSight::Causal => true,
    };
    if !is_known || !fit(&[q, k, v]) || q_dims[3] != v_dims[3] || q_dims[3] > MOST {
        return None;
    }

    let [batch, heads, queries, dim] = [0, 1, 2, 3].map(|at| q_dims[at]);
    let groups = v_dims[1];
    let keys = v_dims[2];

    let sizes = AttentionShape {
        batch,
        heads,
        groups,
        queries,
        keys,
        dim,
    };
    let scale = scale as f32;
    let cap = cap.map(|cap| cap as f32);

    let attention = DeviceAttention {
        sizes,
        scale,
        cap,
        sight,
        kept: OnceLock::new(),
    };

    let compute = || {
        q.contiguous()?.apply_op3(
            &k.contiguous()?,
            &v.contiguous()?,
            LayerOp(SplitAttention(attention)),
        )
    };
    Some(compute())
}

/// Computes self-attention. `qkv` `[batch, time, heads * 3 * dim]` has query, key and value of each
/// head side by side. Returns `[batch, time, heads * dim]`, or `None` if mpmd's kernels cannot.
pub(crate) fn self_attention(
    qkv: &Tensor,
    heads: usize,
    is_causal: bool,
    scale: f64,
) -> Option<Result<Tensor>> {
    let (batch, time, columns) = qkv.dims3().ok()?;
    let dim = columns / (3 * heads);
    if !fit(&[qkv]) || dim > MOST {
        return None;
    }

    let groups = heads;
    let queries = time;
    let keys = time;
    let sizes = AttentionShape {
        batch,
        heads,
        groups,
        queries,
        keys,
        dim,
    };

    let sight = if is_causal {
        CudaSight::Causal
    } else {
        CudaSight::All
    };
    let scale = scale as f32;
    let kept = OnceLock::new();

    let attention = DeviceAttention {
        sizes,
        scale,
        cap: None,
        sight,
        kept,
    };

    let compute = || {
        qkv.contiguous()?
            .apply_op1(LayerOp(JoinedAttention(attention)))
    };
    Some(compute())
}

#[derive(Clone, Copy)]
struct AttentionShape {
    batch: usize,
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    dim: usize,
}

struct DeviceAttention {
    sizes: AttentionShape,
    scale: f32,
    cap: Option<f32>,
    sight: CudaSight,
    /// Two numbers for each query, which the forward pass saves for the backward pass.
    kept: OnceLock<Tensor>,
}

impl DeviceAttention {
    /// Calls `f` with this attention in the form that mpmd's kernels take.
    fn with<R>(
        &self,
        on: &OnCuda<'_>,
        f: impl FnOnce(CudaAttention<'static>) -> CoreResult<R>,
    ) -> CoreResult<R> {
        let AttentionShape {
            batch,
            heads,
            groups,
            queries,
            keys,
            dim,
        } = self.sizes;
        let Self { scale, cap, .. } = *self;
        let work = |mask| CudaAttention {
            batch,
            heads,
            groups,
            queries,
            keys,
            dim,
            scale,
            cap,
            mask,
        };

        match &self.sight {
            CudaSight::All => f(work(layers::CudaMask::None)),
            CudaSight::Causal => f(work(layers::CudaMask::Causal)),
            CudaSight::From(first) => {
                let stride = if first.dims()[0] == 1 { 0 } else { queries };
                on.with([first], |[first]| {
                    f(work(layers::CudaMask::CausalFrom(first, stride)))
                })
            }
            CudaSight::Additive(mask) => {
                let strides = [0, 1, 2].map(|dim| mask.stride()[dim]);
                on.with_rest(mask, |mask| {
                    f(work(layers::CudaMask::Additive(mask, strides)))
                })
            }
        }
    }

    /// Issues the forward pass with a result of shape `shape`. `heads` returns the vectors of
    /// queries, keys, values and result.
    fn run(
        &self,
        shape: &Shape,
        dtype: DType,
        heads: impl FnOnce(&OnCuda<'_>, CudaPart<'static>) -> CoreResult<[Heads<'static>; 4]>,
    ) -> Result<CudaStorage> {
        let AttentionShape {
            batch,
            heads: count,
            queries,
            ..
        } = self.sizes;

        let kept = Shape::from((batch * count * queries, 2));
        let mut normalizers = None;
        let y = issue(|on| {
            on.made(shape, dtype, |out| {
                let [q, k, v, out] = heads(on, out)?;
                let forward =
                    |into| self.with(on, |work| work.forward(&on.kernels(), [q, k, v], out, into));
                normalizers = Some(on.made(&kept, DType::F32, forward)?);
                Ok(())
            })
        })?;

        if let Some(normalizers) = normalizers {
            self.kept.get_or_init(|| tensor(normalizers, &kept));
        }
        Ok(y)
    }

    fn kept(&self) -> Result<&Tensor> {
        match self.kept.get() {
            Some(kept) => Ok(kept),
            None => bail!("the backward pass of an attention before its forward pass"),
        }
    }
}

/// Attention with queries, keys and values in three tensors.
struct SplitAttention(DeviceAttention);

impl SplitAttention {
    /// Describes the vectors of `count` tokens and `heads` heads in a tensor `[batch, heads,
    /// tokens, dim]`.
    fn heads(&self, part: CudaPart<'static>, heads: usize, count: usize) -> Heads<'static> {
        let dim = self.0.sizes.dim;
        Heads::new(part, [heads * count * dim, dim, count * dim])
    }

    fn of_queries(&self, part: CudaPart<'static>) -> Heads<'static> {
        self.heads(part, self.0.sizes.heads, self.0.sizes.queries)
    }

    fn of_keys(&self, part: CudaPart<'static>) -> Heads<'static> {
        self.heads(part, self.0.sizes.groups, self.0.sizes.keys)
    }
}

impl CudaLayer<3> for SplitAttention {
    const NAME: &'static str = "attention";

    fn forward(&self, [q, k, v]: [LayerArgument<'_>; 3]) -> Result<(CudaStorage, Shape)> {
        let shape = q.layout.shape().clone();
        let y = self.0.run(&shape, q.storage.dtype(), |on, out| {
            let q = self.of_queries(q.part(on)?);
            let out = self.of_queries(out);
            Ok([q, self.of_keys(k.part(on)?), self.of_keys(v.part(on)?), out])
        })?;
        Ok((y, shape))
    }

    fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let kept = self.0.kept()?;
        let mut d_k = None;
        let mut d_v = None;

        let d_q = issue(|on| {
            on.tensor_like(q, |d_q| {
                d_k = Some(on.tensor_like(k, |d_k| {
                    d_v = Some(on.tensor_like(v, |d_v| {
                        on.with([q, k, v, y, gradient, kept], |[q, k, v, y, d_y, kept]| {
                            let x = [self.of_queries(q), self.of_keys(k), self.of_keys(v)];
                            let d_x = [self.of_queries(d_q), self.of_keys(d_k), self.of_keys(d_v)];
                            let y = [y, d_y].map(|part| self.of_queries(part));
                            self.0
                                .with(on, |work| work.backward(&on.kernels(), x, y, kept, d_x))
                        })
                    })?);
                    Ok(())
                })?);
                Ok(())
            })
        })?;

        Ok([Some(d_q), d_k, d_v])
    }
}

/// Attention with queries, keys and values in one tensor.
struct JoinedAttention(DeviceAttention);

impl JoinedAttention {
    /// Describes the vectors of queries, keys and values in `part`.
    fn parts(&self, part: CudaPart<'static>) -> [Heads<'static>; 3] {
        let AttentionShape {
            heads,
            queries,
            dim,
            ..
        } = self.0.sizes;
        let columns = heads * 3 * dim;
        [0, 1, 2].map(|at| Heads::in_rows(part.at(at * dim), queries, columns, 3 * dim))
    }

    fn result(&self, part: CudaPart<'static>) -> Heads<'static> {
        let AttentionShape {
            heads,
            queries,
            dim,
            ..
        } = self.0.sizes;
        Heads::in_rows(part, queries, heads * dim, dim)
    }
}

impl CudaLayer<1> for JoinedAttention {
    const NAME: &'static str = "self-attention";

    fn forward(&self, [qkv]: [LayerArgument<'_>; 1]) -> Result<(CudaStorage, Shape)> {
        let AttentionShape {
            batch,
            heads,
            queries,
            dim,
            ..
        } = self.0.sizes;
        let shape = Shape::from((batch, queries, heads * dim));
        let y = self.0.run(&shape, qkv.storage.dtype(), |on, out| {
            let [q, k, v] = self.parts(qkv.part(on)?);
            Ok([q, k, v, self.result(out)])
        })?;
        Ok((y, shape))
    }

    fn backward(
        &self,
        [qkv]: [&Tensor; 1],
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        let kept = self.0.kept()?;
        let d_qkv = issue(|on| {
            on.tensor_like(qkv, |d_qkv| {
                on.with([qkv, y, gradient, kept], |[qkv, y, d_y, kept]| {
                    let y = [y, d_y].map(|part| self.result(part));
                    let x = self.parts(qkv);
                    let d_x = self.parts(d_qkv);
                    self.0
                        .with(on, |work| work.backward(&on.kernels(), x, y, kept, d_x))
                })
            })
        })?;
        Ok([Some(d_qkv)])
    }
}
