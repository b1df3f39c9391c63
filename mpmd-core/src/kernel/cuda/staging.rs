//! Copies of values between a device and the host in the middle of a kernel's call, for
//! collectives.

use mpmd_memory::DevicePlace;
use mpmd_memory::OwnedBuffer;

use super::args::PartMemory;
use super::{Cuda, CudaPart, behind, out_of_memory};
use crate::error::Result;

impl Cuda<'_> {
    /// Allocates a host buffer and issues the copy of device values into it. The values are valid
    /// after a wait for the stream. If that wait fails, the caller must [hold](Self::hold) the
    /// buffer. Host values are copied at once.
    pub(crate) fn fetch(&self, values: &CudaPart<'_>) -> Result<OwnedBuffer> {
        let mut staged = self.room(values)?;
        if let PartMemory::Host(all) = values.memory() {
            let from = values.skipped() * values.dtype().size();
            let bytes = staged.len();
            staged.copy_from_slice(&all[from..from + bytes]);
            return Ok(staged);
        }

        let place = self.place(values)?;
        if let Err(error) = self.stream.download(place, &mut staged) {
            self.hold(staged);
            return Err(error.into());
        }
        Ok(staged)
    }

    /// Allocates pinned host memory as large as these values, with arbitrary content.
    pub(crate) fn room(&self, values: &CudaPart<'_>) -> Result<OwnedBuffer> {
        let elements = values.elements().ok_or_else(|| behind(values))?;
        self.memory
            .stage(elements * values.dtype().size())
            .map_err(out_of_memory)
    }

    /// Issues a copy of the host buffer `staged` to the device memory of these values.
    pub(crate) fn put(&self, staged: OwnedBuffer, values: &CudaPart<'_>) -> Result<()> {
        let place = self.place(values)?;
        let copied = self.stream.upload(&staged, place.address);
        self.hold(staged);
        Ok(copied?)
    }

    /// Keeps host memory alive until the call's work has ended.
    pub(crate) fn hold(&self, staged: OwnedBuffer) {
        self.memory.hold(staged);
    }

    /// Returns the number of values. Fails if the part begins beyond the end.
    pub(crate) fn count(&self, values: &CudaPart<'_>) -> Result<usize> {
        values.elements().ok_or_else(|| behind(values))
    }

    /// Returns the device address of these values. Host values are first copied to the device.
    pub(crate) fn place_of(&self, values: &CudaPart<'_>) -> Result<DevicePlace> {
        self.place(values)
    }

    /// Returns an error if the values are read-only.
    pub(crate) fn check_room(&self, values: &CudaPart<'_>) -> Result<()> {
        self.check_writable(values, "the result of a collective")
    }
}
