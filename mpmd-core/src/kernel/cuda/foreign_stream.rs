//! Other libraries that compute on the same CUDA device: their streams and their memory.

use std::fmt;

pub use mpmd_device::cuda::DeviceRoom;
pub use mpmd_device::cuda::ForeignHandle;
use mpmd_device::cuda::RawStream;
use mpmd_memory::DevicePlace;

use super::args::PartMemory;
use super::{Cuda, CudaPart};
use crate::error::Result;
use mpmd_layout::aval::DType;

/// A stream of another library on the device of a [`Cuda`].
pub struct ForeignStream(RawStream);

impl<'a> Cuda<'a> {
    /// Returns the driver's number of the device.
    pub fn ordinal(&self) -> u32 {
        self.gpu.ordinal()
    }

    /// Returns another library's stream on this device.
    pub fn foreign(&self, handle: ForeignHandle) -> ForeignStream {
        ForeignStream(self.gpu.foreign(handle))
    }

    /// Makes later work on `stream` run after all work issued to the device's own stream so far.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn before(&self, stream: &ForeignStream) -> Result<()> {
        Ok(self.gpu.compute().before(&stream.0)?)
    }

    /// Makes later work on the device's own stream run after all work issued to `stream` so far. A
    /// kernel that issues work to `stream` must call this before it returns.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn after(&self, stream: &ForeignStream) -> Result<()> {
        Ok(self.gpu.compute().after(&stream.0)?)
    }

    /// Returns the device's allocators, for a library that allocates from the driver's own pool.
    pub fn device_room(&self) -> DeviceRoom {
        self.gpu.room(self.memory.device_pool())
    }

    /// Returns an interface that issues work to `stream`. Its [`gemm`](Cuda::gemm) returns an
    /// error: cuBLAS issues only to the device's own stream. Collectives, which are calls of the
    /// context, also use only that stream. Host values are copied to the device once for each
    /// stream that uses them. Scratch that was used on one stream must not be dropped before the
    /// other stream is used.
    pub fn on<'b>(&self, stream: &'b ForeignStream) -> Cuda<'b>
    where
        'a: 'b,
    {
        Cuda {
            stream: &stream.0,
            ..*self
        }
    }
}

impl CudaPart<'_> {
    /// Returns values in another library's memory on the device of `cuda`. The memory must stay
    /// valid until all work that uses it has ended; this is not checked.
    pub fn foreign(
        cuda: &Cuda<'_>,
        address: u64,
        dtype: DType,
        elements: usize,
        is_writable: bool,
    ) -> Self {
        let bytes = elements * dtype.size();
        let place = DevicePlace {
            device: cuda.ordinal(),
            address,
            bytes,
        };
        Self::new(PartMemory::Device(place), dtype, elements, is_writable)
    }
}

impl fmt::Debug for ForeignStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ForeignStream")
    }
}
