//! The collectives that operations of a model call: those of the device, or of a probe.

use mpmd_core::Result;
use mpmd_core::kernel::Context;

/// The collectives of the device on which a pass runs.
pub(crate) trait Exchange {
    /// Returns the number of devices along an axis.
    fn size(&mut self, axis: &str) -> Result<usize>;
    /// Returns the place of the device along an axis.
    fn index(&mut self, axis: &str) -> Result<usize>;
    /// Replaces `values` by the sum over the axis.
    fn all_reduce(&mut self, axis: &str, values: &mut [f32]) -> Result<()>;
    /// Fills `out` with the parts of all devices, in order.
    fn all_gather(&mut self, axis: &str, part: &[f32], out: &mut [f32]) -> Result<()>;
    /// Fills `out` with this device's part of the sum.
    fn reduce_scatter(&mut self, axis: &str, values: &[f32], out: &mut [f32]) -> Result<()>;
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
}
