//! The collectives that operations of a model call: those of the device, or of a probe.

use candle_core::Shape;
use mpmd_core::Error;
use mpmd_core::Result;
#[cfg(feature = "cuda")]
use mpmd_core::cuda::CudaPart;
use mpmd_core::kernel::Context;

/// Collectives that layers call in a pass: those of the device, or recorded ones in a probe.
pub(crate) trait Exchange {
    /// Returns the number of devices along a mesh axis.
    fn size(&mut self, axis: &str) -> Result<usize>;
    /// Returns the index of this device along a mesh axis.
    fn index(&mut self, axis: &str) -> Result<usize>;
    /// Replaces `values` by their sum over the devices along the axis.
    fn all_reduce(&mut self, axis: &str, values: &mut [f32]) -> Result<()>;
    /// Replaces `values` by their sum over the devices along the axis, added in the order of a
    /// binary tree.
    fn tree_sum(&mut self, axis: &str, values: &mut [f32]) -> Result<()> {
        let mut all = vec![0.0; values.len() * self.size(axis)?];
        self.all_gather(axis, values, &mut all)?;
        add_by_tree(&mut all, values.len());
        values.copy_from_slice(&all[..values.len()]);
        Ok(())
    }
    /// Fills `out` with `part` of each device along the axis, in the order of the devices.
    fn all_gather(&mut self, axis: &str, part: &[f32], out: &mut [f32]) -> Result<()>;
    /// Sums `values` over the devices along the axis. Fills `out` with this device's part of the
    /// sum.
    fn reduce_scatter(&mut self, axis: &str, values: &[f32], out: &mut [f32]) -> Result<()>;
    /// Issues a collective on values in the memory of the kernel's CUDA device, without a wait for
    /// it. An all-reduce replaces the values of `to` by their sum.
    #[cfg(feature = "cuda")]
    fn on_cuda(
        &mut self,
        axis: &str,
        way: CudaCollective,
        from: CudaPart<'_>,
        to: CudaPart<'_>,
    ) -> Result<()> {
        let _ = (axis, way, from, to);
        Err(Error::kernel("collectives on CUDA devices are for kernels"))
    }
}

/// The kind of a collective on values in the memory of CUDA devices.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum CudaCollective {
    AllReduce,
    AllGather,
    ReduceScatter,
}

/// The forward computation of a collective operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CollectiveStep {
    Sum,
    Same,
    /// Sums values over the devices in the order of a binary tree.
    TreeSum,
    /// Returns the values unchanged. Its gradient is a [`TreeSum`](Self::TreeSum).
    SameOfTree,
    Gather,
    Scatter,
    /// Concatenates the devices' parts for a computation that is the same on all devices.
    Join,
    /// Returns this device's part of values that are the same on all devices.
    Part,
}

impl CollectiveStep {
    /// Returns the shape of the result for `size` devices.
    ///
    /// # Errors
    ///
    /// If the step divides the first dimension, and that is no multiple of `size`.
    pub(crate) fn shape(self, dims: &[usize], axis: &str, size: usize) -> Result<Shape> {
        let mut dims = dims.to_vec();
        match self {
            Self::Same | Self::SameOfTree | Self::Sum | Self::TreeSum => {}
            Self::Gather | Self::Join => dims[0] *= size,
            Self::Scatter | Self::Part if dims[0].is_multiple_of(size) => dims[0] /= size,
            Self::Scatter | Self::Part => {
                return Err(Error::kernel(format!(
                    "{size} devices along axis {axis:?} do not divide a dimension of {}",
                    dims[0]
                )));
            }
        }
        Ok(Shape::from(dims))
    }

    pub(crate) fn gradient(self) -> Self {
        match self {
            Self::Sum => Self::Same,
            Self::Same => Self::Sum,
            Self::TreeSum => Self::SameOfTree,
            Self::SameOfTree => Self::TreeSum,
            Self::Gather => Self::Scatter,
            Self::Scatter => Self::Gather,
            Self::Join => Self::Part,
            Self::Part => Self::Join,
        }
    }
}

/// Sums rows of `len` elements into the first row: adds the sums of both halves, recursively.
fn add_by_tree(rows: &mut [f32], len: usize) {
    let count = rows.len().checked_div(len).unwrap_or(0);
    if count > 1 {
        let (low, high) = rows.split_at_mut(count / 2 * len);
        add_by_tree(low, len);
        add_by_tree(high, len);
        low[..len]
            .iter_mut()
            .zip(high)
            .for_each(|(sum, term)| *sum += *term);
    }
}

impl Exchange for Context<'_> {
    fn size(&mut self, axis: &str) -> Result<usize> {
        self.axis_size(axis)
    }

    fn index(&mut self, axis: &str) -> Result<usize> {
        self.axis_index(axis)
    }

    fn all_reduce(&mut self, axis: &str, values: &mut [f32]) -> Result<()> {
        Context::all_reduce(self, axis, values)
    }

    fn all_gather(&mut self, axis: &str, part: &[f32], out: &mut [f32]) -> Result<()> {
        Context::all_gather(self, axis, part, out)
    }

    fn reduce_scatter(&mut self, axis: &str, values: &[f32], out: &mut [f32]) -> Result<()> {
        Context::reduce_scatter(self, axis, values, out)
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(
        &mut self,
        axis: &str,
        way: CudaCollective,
        from: CudaPart<'_>,
        to: CudaPart<'_>,
    ) -> Result<()> {
        match way {
            CudaCollective::AllReduce => self.all_reduce_on_cuda(axis, to),
            CudaCollective::AllGather => self.all_gather_on_cuda(axis, from, to),
            CudaCollective::ReduceScatter => self.reduce_scatter_on_cuda(axis, from, to),
        }
    }
}
