//! Values on their way between a device and the host in the middle of a call.

use mpmd_transport::OwnedBuffer;
use mpmd_transport::memory::DevicePlace;

use super::args::Memory;
use super::{Cuda, Part, behind, out_of_memory};
use crate::error::Result;

impl Cuda<'_> {
    /// Issues the copy of values to the host. They are there when the line has been waited for;
    /// where that fails, the buffer is to be [held](Self::hold).
    pub(crate) fn fetch(&self, values: &Part<'_>) -> Result<OwnedBuffer> {
        let mut staged = self.room(values)?;
        if let Memory::Host(all) = values.memory() {
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

    /// Memory of the host's for as many values.
    pub(crate) fn room(&self, values: &Part<'_>) -> Result<OwnedBuffer> {
        let elements = values.elements().ok_or_else(|| behind(values))?;
        self.memory.stage(elements * values.dtype().size()).map_err(out_of_memory)
    }

    /// Issues the copy of values from the host to their place.
    pub(crate) fn put(&self, staged: OwnedBuffer, values: &Part<'_>) -> Result<()> {
        let place = self.place(values)?;
        let copied = self.stream.upload(&staged, place.address);
        self.hold(staged);
        Ok(copied?)
    }

    /// Keeps memory of the host's until the call's work is over.
    pub(crate) fn hold(&self, staged: OwnedBuffer) {
        self.memory.hold(staged);
    }

    /// How many values there are.
    pub(crate) fn count(&self, values: &Part<'_>) -> Result<usize> {
        values.elements().ok_or_else(|| behind(values))
    }

    /// Where values are on the device; those of the host's are copied there first.
    pub(crate) fn place_of(&self, values: &Part<'_>) -> Result<DevicePlace> {
        self.place(values)
    }

    /// Whether values may be written.
    pub(crate) fn check_room(&self, values: &Part<'_>) -> Result<()> {
        self.check_writable(values, "what a collective gives")
    }
}
