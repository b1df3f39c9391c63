//! What stands in for CUDA devices in programs built without the feature: there are none.

use std::sync::Arc;

use mpmd_transport::memory::{DeviceAllocator, Fence, Fences, Pin};

use super::{CudaError, Then};

/// A CUDA device. There is none in this build.
pub(crate) enum Gpu {}

/// A queue of a device's work. There is none in this build.
pub(crate) enum Line {}

/// A line while work is issued to it. There is none in this build.
pub(crate) enum Stream {}

impl Gpu {
    pub(crate) fn open(_: u32, _: u32) -> Result<Arc<Self>, CudaError> {
        Err(CudaError::new("opening a CUDA device", "", "this program was built without the feature `cuda`"))
    }

    pub(crate) fn allocator(self: &Arc<Self>) -> Arc<dyn DeviceAllocator> {
        match **self {}
    }

    pub(crate) fn pin(self: &Arc<Self>) -> Pin {
        match **self {}
    }

    pub(crate) fn compute(&self) -> &Line {
        match *self {}
    }

    pub(crate) fn inward(&self) -> &Line {
        match *self {}
    }

    pub(crate) fn outward(&self) -> &Line {
        match *self {}
    }
}

impl Line {
    pub(crate) fn submit(
        &self,
        _: &[&Fences],
        _: impl FnOnce(&Stream) -> Result<(), CudaError>,
        _: Then,
    ) -> Arc<dyn Fence> {
        match *self {}
    }
}
