//! The collectives that operations of a model call: those of the device, or of a probe.

use candle_core::Shape;
use mpmd_core::Error;
use mpmd_core::Result;
#[cfg(feature = "cuda")]
use mpmd_core::cuda::CudaPart;
use mpmd_core::kernel::Context;

/// The collectives of the device on which a pass runs.
pub(crate) trait Exchange {
    /// Returns the number of devices along an axis.
    fn size(&mut self, axis: &str) -> Result<usize>;
    /// Returns the place of the device along an axis.
    fn index(&mut self, axis: &str) -> Result<usize>;
    /// Replaces `values` by the sum over the axis.
    fn all_reduce(&mut self, axis: &str, values: &mut [f32]) -> Result<()>;
    /// Replaces `values` by the sum over the axis, added in the order of a binary tree over the
    /// devices.
    fn tree_sum(&mut self, axis: &str, values: &mut [f32]) -> Result<()> {
        let mut all = vec![0.0; values.len() * self.size(axis)?];
        self.all_gather(axis, values, &mut all)?;
        add_by_tree(&mut all, values.len());
        values.copy_from_slice(&all[..values.len()]);
        Ok(())
    }
    /// Fills `out` with the parts of all devices, in order.
    fn all_gather(&mut self, axis: &str, part: &[f32], out: &mut [f32]) -> Result<()>;
    /// Fills `out` with this device's part of the sum.
    fn reduce_scatter(&mut self, axis: &str, values: &[f32], out: &mut [f32]) -> Result<()>;
    /// Does the same as these with values on the CUDA device of a kernel, by work that is only
    /// issued. The sum over the axis replaces the values of `to`.
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

/// A collective of values on CUDA devices.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum CudaCollective {
    AllReduce,
    AllGather,
    ReduceScatter,
}

/// The forward pass of a collective.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CollectiveStep {
    Sum,
    Same,
    /// Adds up in the order of a binary tree over the devices.
    TreeSum,
    /// Leaves the value as it is. Its gradient is a [`TreeSum`](Self::TreeSum).
    SameOfTree,
    Gather,
    Scatter,
    /// Concatenates for a computation that is the same on all devices.
    Join,
    /// Takes the device's own part.
    Part,
}

impl CollectiveStep {
    /// Returns the shape of the result for `size` devices.
    ///
    /// # Errors
    ///
    /// If the devices do not divide the first dimension.
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

/// Adds up rows of `len` elements into the first one: adds the sums of both halves of the rows.
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
