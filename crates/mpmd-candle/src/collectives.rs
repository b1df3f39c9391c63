//! Collectives of a stage as operations of candle, with gradients.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType, bail,
};
use mpmd_core::kernel::Signature;
use mpmd_layout::aval::f32s;
use mpmd_layout::topology::Mesh;
use serde::{Deserialize, Serialize};

use crate::cuda_layers;
use crate::exchange::{CollectiveStep, Exchange};
use crate::pass;

/// A collective found by a probe.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct FoundCollective {
    kind: FoundKind,
    axis: String,
    /// The number of elements that each device contributes.
    elements: usize,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
enum FoundKind {
    AllReduce,
    TreeSum,
    AllGather,
    ReduceScatter,
}

impl FoundCollective {
    /// Scales the number of elements from a probe with `there` input elements to `here` input
    /// elements.
    pub(crate) fn scaled(&self, here: u64, there: u64) -> Self {
        let grown = (self.elements as u64)
            .saturating_mul(here)
            .div_ceil(there.max(1));
        Self {
            elements: self.elements.max(grown as usize),
            ..self.clone()
        }
    }

    /// Returns true if the collective is an all-gather over `axis`.
    pub(crate) fn gathers(&self, axis: &str) -> bool {
        self.kind == FoundKind::AllGather && self.axis == axis
    }
}

/// Declares the probed collectives in a kernel signature.
pub(crate) fn declared(found: &[FoundCollective]) -> Signature<()> {
    found.iter().fold(
        Signature::new(()),
        |signature,
         FoundCollective {
             kind,
             axis,
             elements,
         }| {
            let aval = f32s([*elements]);
            match kind {
                FoundKind::AllReduce => signature.all_reduce(axis, aval),
                FoundKind::AllGather | FoundKind::TreeSum => signature.all_gather(axis, aval),
                FoundKind::ReduceScatter => signature.reduce_scatter(axis, aval),
            }
        },
    )
}

/// Records the collectives of a probe. It communicates nothing.
pub(crate) struct CollectiveRecorder<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) found: Vec<FoundCollective>,
}

impl CollectiveRecorder<'_> {
    fn note(&mut self, kind: FoundKind, axis: &str, elements: usize) {
        self.found.push(FoundCollective {
            kind,
            axis: axis.to_owned(),
            elements,
        });
    }
}

impl Exchange for CollectiveRecorder<'_> {
    fn size(&mut self, axis: &str) -> mpmd_core::Result<usize> {
        Ok(self.mesh.axis_size(axis)?)
    }

    /// Returns 0, since a probe runs on the first device.
    fn index(&mut self, _: &str) -> mpmd_core::Result<usize> {
        Ok(0)
    }

    fn all_reduce(&mut self, axis: &str, values: &mut [f32]) -> mpmd_core::Result<()> {
        self.note(FoundKind::AllReduce, axis, values.len());
        Ok(())
    }

    fn tree_sum(&mut self, axis: &str, values: &mut [f32]) -> mpmd_core::Result<()> {
        self.note(FoundKind::TreeSum, axis, values.len());
        Ok(())
    }

    fn all_gather(&mut self, axis: &str, part: &[f32], out: &mut [f32]) -> mpmd_core::Result<()> {
        self.note(FoundKind::AllGather, axis, part.len());
        out.fill(0.0);
        Ok(())
    }

    fn reduce_scatter(
        &mut self,
        axis: &str,
        values: &[f32],
        out: &mut [f32],
    ) -> mpmd_core::Result<()> {
        self.note(FoundKind::ReduceScatter, axis, values.len());
        out.fill(0.0);
        Ok(())
    }
}

/// Sums `x` over the devices along `axis`. The gradient passes unchanged.
pub(crate) fn all_reduce(x: &Tensor, axis: &str) -> Result<Tensor> {
    apply(x, axis, CollectiveStep::Sum)
}

/// Returns `x` unchanged. The backward pass sums the gradients over the devices along `axis`.
pub(crate) fn replicated(x: &Tensor, axis: &str) -> Result<Tensor> {
    apply(x, axis, CollectiveStep::Same)
}

/// Sums `x` over the devices along `axis` in the order of a binary tree. The gradient passes
/// unchanged.
pub(crate) fn tree_sum(x: &Tensor, axis: &str) -> Result<Tensor> {
    apply(x, axis, CollectiveStep::TreeSum)
}

/// Returns `x` unchanged. The backward pass sums the gradients in the order of [`tree_sum`].
pub(crate) fn tree_replicated(x: &Tensor, axis: &str) -> Result<Tensor> {
    apply(x, axis, CollectiveStep::SameOfTree)
}

/// Concatenates the devices' `x` in dimension `dim`. The backward pass is a reduce-scatter.
pub(crate) fn all_gather(x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
    // The collectives work on the first dimension.
    let x = first(x, dim)?;
    apply(&x, axis, CollectiveStep::Gather)?
        .transpose(0, dim)?
        .contiguous()
}

/// Concatenates the devices' `x` in dimension `dim`. In the backward pass each device takes its own
/// part of the gradient.
pub(crate) fn gathered(x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
    let x = first(x, dim)?;
    apply(&x, axis, CollectiveStep::Join)?
        .transpose(0, dim)?
        .contiguous()
}

/// Sums `x` and gives each device its part of dimension `dim`. The backward pass is an all-gather.
pub(crate) fn reduce_scatter(x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
    let x = first(x, dim)?;
    apply(&x, axis, CollectiveStep::Scatter)?
        .transpose(0, dim)?
        .contiguous()
}

/// Returns the number of devices along an axis of the stage's mesh.
///
/// # Errors
///
/// If called outside of a stage, or if the mesh has no such axis.
pub(crate) fn size(axis: &str) -> Result<usize> {
    of_exchange(axis, |exchange| exchange.size(axis))
}

/// Returns the index of this device along an axis of the stage's mesh.
///
/// # Errors
///
/// Returns the errors of [`size`].
pub(crate) fn index(axis: &str) -> Result<usize> {
    of_exchange(axis, |exchange| exchange.index(axis))
}

fn of_exchange<R>(
    axis: &str,
    f: impl FnOnce(&mut dyn Exchange) -> mpmd_core::Result<R>,
) -> Result<R> {
    match pass::with_exchange(f) {
        Some(found) => found.map_err(candle_core::Error::wrap),
        None => bail!("a collective over axis {axis:?} outside of a stage"),
    }
}

fn first(x: &Tensor, dim: usize) -> Result<Tensor> {
    if dim >= x.rank() {
        bail!(
            "there is no dimension {dim} in a tensor of shape {:?}",
            x.dims()
        );
    }
    x.transpose(0, dim)
}

fn apply(x: &Tensor, axis: &str, step: CollectiveStep) -> Result<Tensor> {
    let is_same =
        matches!(step, CollectiveStep::Same | CollectiveStep::SameOfTree) && !x.track_op();
    if size(axis)? == 1 || is_same {
        return Ok(x.clone());
    }

    if x.dtype() != DType::F32 {
        bail!(
            "collectives are for tensors of f32, not of {}: cast it before",
            x.dtype().as_str()
        );
    }

    x.contiguous()?.apply_op1(CollectiveOp {
        axis: axis.to_owned(),
        step,
    })
}

struct CollectiveOp {
    axis: String,
    step: CollectiveStep,
}

impl CollectiveOp {
    /// Runs the collective over the first dimension of `values`, which have the shape `dims`.
    fn run(
        &self,
        exchange: &mut dyn Exchange,
        values: &[f32],
        dims: &[usize],
    ) -> mpmd_core::Result<(Vec<f32>, Shape)> {
        let axis = &self.axis;
        let size = exchange.size(axis)?;
        let shape = self.step.shape(dims, axis, size)?;
        let mut out = match self.step {
            CollectiveStep::Same
            | CollectiveStep::SameOfTree
            | CollectiveStep::Sum
            | CollectiveStep::TreeSum => values.to_vec(),
            CollectiveStep::Gather
            | CollectiveStep::Join
            | CollectiveStep::Scatter
            | CollectiveStep::Part => {
                vec![0.0; shape.elem_count()]
            }
        };

        match self.step {
            CollectiveStep::Same | CollectiveStep::SameOfTree => {}
            CollectiveStep::Sum => exchange.all_reduce(axis, &mut out)?,
            CollectiveStep::TreeSum => exchange.tree_sum(axis, &mut out)?,
            CollectiveStep::Gather | CollectiveStep::Join => {
                exchange.all_gather(axis, values, &mut out)?
            }
            CollectiveStep::Scatter => exchange.reduce_scatter(axis, values, &mut out)?,
            CollectiveStep::Part => {
                let len = out.len();
                out.copy_from_slice(&values[exchange.index(axis)? * len..][..len]);
            }
        }

        Ok((out, shape))
    }
}

impl CustomOp1 for CollectiveOp {
    fn name(&self) -> &'static str {
        match self.step {
            CollectiveStep::Sum => "all_reduce",
            CollectiveStep::Same => "replicated",
            CollectiveStep::TreeSum => "tree_sum",
            CollectiveStep::SameOfTree => "tree_replicated",
            CollectiveStep::Gather => "all_gather",
            CollectiveStep::Scatter => "reduce_scatter",
            CollectiveStep::Join => "gathered",
            CollectiveStep::Part => "part",
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let values = f32::cpu_storage_as_slice(storage)?;
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("{} of a tensor that is not contiguous", self.name());
        };
        let values = &values[start..end];
        let dims = layout.dims();

        match pass::with_exchange(|exchange| self.run(exchange, values, dims)) {
            Some(done) => {
                let (values, shape) = done.map_err(candle_core::Error::wrap)?;
                Ok((CpuStorage::F32(values), shape))
            }
            None => bail!("{} outside of a stage", self.name()),
        }
    }

    fn cuda_fwd(&self, values: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda_layers::collective(&self.axis, self.step, values, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        apply(gradient, &self.axis, self.step.gradient()).map(Some)
    }
}
