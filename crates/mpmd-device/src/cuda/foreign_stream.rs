//! Streams that another library made on a device, and their order with the device's own streams.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::calls;
use super::context::cuda;
use super::error::CudaError;
use super::gpu::Gpu;
use super::stream::{RawStream, Stream, WAIT_DEFAULT};

/// The handle of a stream that another library has created.
pub struct ForeignHandle(sys::CUstream);

impl ForeignHandle {
    /// Wraps the handle of a stream.
    ///
    /// # Safety
    ///
    /// `handle` is a `CUstream` or `cudaStream_t` of the primary context of the device with which
    /// it is used. The stream outlives every value that is made from this one.
    pub unsafe fn new(handle: *mut c_void) -> Self {
        Self(handle.cast())
    }
}

impl Gpu {
    /// Wraps another library's stream, so that work of this device can be issued to it.
    pub fn foreign(&self, ForeignHandle(raw): ForeignHandle) -> RawStream {
        RawStream {
            context: self.context().clone(),
            raw,
            is_own: false,
        }
    }
}

impl Stream {
    /// Makes later work of `foreign` wait, on the device, for all work issued to this stream so
    /// far. The device's context must be current.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn before(&self, foreign: &RawStream) -> Result<(), CudaError> {
        self.order(&self.stream, foreign)
    }

    /// Makes later work of this stream wait, on the device, for all work issued to `foreign` so
    /// far. If the driver provides no event, blocks until that work has ended. The device's context
    /// must be current.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn after(&self, foreign: &RawStream) -> Result<(), CudaError> {
        self.order(foreign, &self.stream)
    }

    fn order(&self, first: &RawStream, second: &RawStream) -> Result<(), CudaError> {
        let Ok(event) = self.ends.record(first) else {
            return first.synchronize();
        };

        // SAFETY: event and stream are alive; the call notes the work that the event stands for.
        let waits = unsafe { calls::cuStreamWaitEvent(second.raw, event.handle(), WAIT_DEFAULT) };
        if let Some(event) = self.ends.spare(event) {
            event.destroy();
        }
        let waits = waits.result();
        waits.map_err(|error| cuda("waiting for other work on a device", error))
    }
}
