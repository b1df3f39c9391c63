//! Device and host memory that a call uses in addition to its arrays.

use std::sync::Arc;

use mpmd_base::block::Mutex;
use mpmd_device::cuda::RawStream;
use mpmd_device::cuda::spare_blocks::{SpareBlocks, place, take};
use mpmd_memory::OwnedBuffer;
use mpmd_memory::{DevicePlace, Fence, OutOfMemory, Pool};

use super::CudaPart;
use mpmd_layout::aval::DType;

/// Device memory for values that live no longer than a call. The initial values are arbitrary.
///
/// Dropping it lets later work of the same call reuse the memory. Work that was issued may still
/// use the memory after the drop.
#[derive(Debug)]
pub struct Scratch<'a> {
    /// The memory. `Some` until the drop.
    buffer: Option<OwnedBuffer>,
    place: DevicePlace,
    dtype: DType,
    elements: usize,
    memory: &'a CallMemory,
}

impl<'a> Scratch<'a> {
    /// Returns the values from element `elements` on. They are always writable.
    pub fn at(&self, elements: usize) -> CudaPart<'_> {
        CudaPart::scratch(self.place, self.dtype, self.elements).at(elements)
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Returns the dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.memory.state.lock().free.push(buffer);
        }
    }
}

/// The scratch memory of one call on a CUDA device. It is created before the call's work is issued
/// and [ended](Self::end) with a fence behind that work.
#[derive(Debug)]
pub(crate) struct CallMemory {
    /// The pool of the device's memory.
    device: Pool,
    /// A pool of pinned host memory.
    host: Pool,
    state: Mutex<CallMemoryState>,
}

#[derive(Debug, Default)]
struct CallMemoryState {
    /// Device blocks that no [`Scratch`] uses at present.
    free: Vec<OwnedBuffer>,
    /// Host memory to keep alive until the call's work has ended.
    held: Vec<OwnedBuffer>,
    /// Device copies of host values.
    copies: Vec<KeptCopy>,
    /// Device bytes that the call has allocated or taken from the spare blocks.
    bytes: usize,
}

/// Identifies a device copy: the host values and the stream that copies them. Other streams do not
/// wait for the copy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct CopyKey {
    address: usize,
    bytes: usize,
    stream: usize,
}

/// A device copy of host values, which is kept until the call ends.
#[derive(Debug)]
struct KeptCopy {
    key: CopyKey,
    buffer: OwnedBuffer,
}

/// The device copy of host values, for a caller of [`CallMemory::copy_of`].
pub(super) struct DeviceCopy {
    pub(super) place: DevicePlace,
    /// The host buffer from which the caller must issue the copy to the stream. `None` if the copy
    /// was issued before.
    pub(super) staged: Option<OwnedBuffer>,
}

impl CallMemory {
    /// Creates the memory of a call. `device` is the device's pool; `host` is a pool of pinned
    /// memory.
    pub(crate) fn new(device: &Pool, host: &Pool) -> Self {
        Self {
            device: device.clone(),
            host: host.clone(),
            state: Mutex::default(),
        }
    }

    /// Ends the call, whose work was all issued and ends at `fence`. Moves device blocks to
    /// `spare`, which belongs to the stream that the work was issued to. Frees held host memory
    /// after `fence`.
    pub(crate) fn end(self, spare: &SpareBlocks, fence: &Arc<dyn Fence>) {
        let CallMemoryState {
            mut free,
            mut held,
            copies,
            bytes,
        } = self.state.into_inner();

        free.extend(copies.into_iter().map(|copy| copy.buffer));
        held.iter_mut()
            .for_each(|buffer| buffer.add_fence(fence.clone()));

        if !free.is_empty() {
            spare.keep(free, bytes, fence);
        }
    }

    pub(super) fn scratch(
        &self,
        spare: &SpareBlocks,
        dtype: DType,
        elements: usize,
    ) -> Result<Scratch<'_>, OutOfMemory> {
        // At least one byte, so that every scratch has an address.
        let buffer = self.block(spare, (elements.saturating_mul(dtype.size())).max(1))?;
        let place = place(&buffer);
        Ok(Scratch {
            buffer: Some(buffer),
            place,
            dtype,
            elements,
            memory: self,
        })
    }

    /// Returns the device copy of these host values. The first caller for these values and this
    /// stream must issue the copy.
    pub(super) fn copy_of(
        &self,
        spare: &SpareBlocks,
        stream: &RawStream,
        bytes: &[u8],
    ) -> Result<DeviceCopy, OutOfMemory> {
        let len = bytes.len();
        let stream = stream.handle().addr();
        let key = CopyKey {
            address: bytes.as_ptr().addr(),
            bytes: len,
            stream,
        };

        let part = |copy: &OwnedBuffer| DevicePlace {
            bytes: len,
            ..place(copy)
        };

        if let Some(known) = self
            .state
            .lock()
            .copies
            .iter()
            .find(|known| known.key == key)
        {
            return Ok(DeviceCopy {
                place: part(&known.buffer),
                staged: None,
            });
        }

        let mut staged = self.stage(len)?;
        staged.copy_from_slice(bytes);
        let copy = self.block(spare, len.max(1))?;
        let place = part(&copy);
        // Kept until the call ends, because the same values may be used again.
        self.state
            .lock()
            .copies
            .push(KeptCopy { key, buffer: copy });
        Ok(DeviceCopy {
            place,
            staged: Some(staged),
        })
    }

    /// Allocates pinned host memory for values on their way to the device. [Hold](Self::hold) it
    /// afterwards.
    pub(super) fn stage(&self, bytes: usize) -> Result<OwnedBuffer, OutOfMemory> {
        self.host.allocate(bytes)
    }

    /// Returns the pool of the device's memory.
    pub(super) fn device_pool(&self) -> &Pool {
        &self.device
    }

    /// Keeps host memory alive until the call's work has ended.
    pub(super) fn hold(&self, buffer: OwnedBuffer) {
        self.state.lock().held.push(buffer);
    }

    /// Returns a device block of at least `bytes` bytes that is unused, or used only by earlier
    /// work of the compute stream. If the pool is full, first returns all spare blocks to it.
    fn block(&self, spare: &SpareBlocks, bytes: usize) -> Result<OwnedBuffer, OutOfMemory> {
        // Rounded to the pool's size classes, so that blocks are reused.
        let bytes = usize::try_from(Pool::rounded(bytes)).unwrap_or(usize::MAX);

        let mut state = self.state.lock();
        let known = take(&mut state.free, bytes);
        if let Some(buffer) = known {
            return Ok(buffer);
        }
        state.bytes += bytes;
        drop(state);

        if let Some(buffer) = spare.take(bytes) {
            return Ok(buffer);
        }

        self.device.allocate(bytes).or_else(|_| {
            spare.clear();
            self.device.allocate(bytes)
        })
    }
}
