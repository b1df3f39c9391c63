//! Copies and fillings of whole places, on a line's own device.

use cudarc::driver::{result, sys};
use mpmd_transport::memory::DevicePlace;

use super::error::CudaError;
use super::gpu::cuda;
use super::line::Stream;

impl Stream {
    /// Sets memory to the first byte of `pattern`.
    pub(crate) fn fill(&self, to: DevicePlace, pattern: [u8; 4], _: usize) -> Result<(), CudaError> {
        if to.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the place is memory of the device's that this call may write; the stream is alive and its context bound.
        unsafe { sys::cuMemsetD8Async(to.address, pattern[0], to.bytes, self.raw) }
            .result()
            .map_err(|error| cuda("filling memory of a CUDA device", error))
    }

    /// Copies as many bytes as `to` has.
    pub(crate) fn copy(&self, from: DevicePlace, to: DevicePlace) -> Result<(), CudaError> {
        if to.bytes == 0 {
            return Ok(());
        }
        // SAFETY: both are memory of the device's that this call may read and write; the stream is alive and its context bound.
        unsafe { result::memcpy_dtod_async(to.address, from.address, to.bytes, self.raw) }
            .map_err(|error| cuda("copying in a CUDA device", error))
    }

    /// Copies the host's bytes to the device. The caller keeps them until the work is over.
    pub(crate) fn upload(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller keeps `from` until the copy is over and owns the memory at `to`; the stream is alive and bound.
        unsafe { result::memcpy_htod_async(to, from, self.raw) }
            .map_err(|error| cuda("copying values to a CUDA device", error))
    }
}
