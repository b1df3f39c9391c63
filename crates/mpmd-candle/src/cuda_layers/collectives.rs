//! Collectives of values on CUDA devices. They run on our compute stream, in order with candle's.

use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};
use mpmd_core::Result as CoreResult;
use mpmd_core::cuda::CudaPart;
use mpmd_core::cuda::layers::add;
use mpmd_layout::aval::DType as ArrayType;

use crate::cuda::OnCuda;
use crate::exchange::{CollectiveStep, CudaCollective, Exchange};
use crate::pass;

/// Runs a collective over the first dimension of contiguous values.
pub(crate) fn collective(
    axis: &str,
    step: CollectiveStep,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let run = |on: &OnCuda<'_>, exchange: &mut dyn Exchange| {
        let size = exchange.size(axis)?;
        let shape = step.shape(layout.dims(), axis, size)?;
        let values = on.part(storage, layout, false)?;
        let count = shape.elem_count();
        let out = on.made(&shape, DType::F32, |out| {
            let mut issue = |way, to| on.between(|| exchange.on_cuda(axis, way, values, to));
            match step {
                CollectiveStep::Same | CollectiveStep::SameOfTree => on.kernels().copy(values, out),
                CollectiveStep::Sum => {
                    on.kernels().copy(values, out)?;
                    issue(CudaCollective::AllReduce, out)
                }
                CollectiveStep::TreeSum => {
                    let all = on.kernels().scratch(ArrayType::F32, size * count)?;
                    issue(CudaCollective::AllGather, all.at(0))?;
                    let low = all.at(0);
                    let high = all.at(size / 2 * count);
                    add_by_tree(on, low, size / 2, count)?;
                    add_by_tree(on, high, size - size / 2, count)?;
                    add(&on.kernels(), count, low, high, out)
                }
                CollectiveStep::Gather | CollectiveStep::Join => {
                    issue(CudaCollective::AllGather, out)
                }
                CollectiveStep::Scatter => issue(CudaCollective::ReduceScatter, out),
                CollectiveStep::Part => {
                    let at = exchange.index(axis)? * count;
                    let own = Layout::contiguous_with_offset(count, layout.start_offset() + at);
                    on.kernels().copy(on.part(storage, &own, false)?, out)
                }
            }
        })?;
        Ok::<_, mpmd_core::Error>((out, shape))
    };

    match pass::with_cuda_exchange(run) {
        Some(done) => done.map_err(candle_core::Error::wrap),
        None => bail!("a collective over axis {axis:?} outside of a stage"),
    }
}

/// Sums `count` rows of `len` elements into the first row: adds the sums of both halves,
/// recursively.
fn add_by_tree(on: &OnCuda<'_>, rows: CudaPart<'_>, count: usize, len: usize) -> CoreResult<()> {
    if count < 2 {
        return Ok(());
    }
    let middle = rows.at(count / 2 * len);
    add_by_tree(on, rows, count / 2, len)?;
    add_by_tree(on, middle, count - count / 2, len)?;
    add(&on.kernels(), len, rows, middle, rows)
}
