//! Memory that a call's work uses beside its arrays.

use std::sync::Arc;

use mpmd_transport::OwnedBuffer;
use mpmd_transport::memory::{DevicePlace, Fence, OutOfMemory, Pool};
use parking_lot::Mutex;

use super::Part;
use crate::device::cuda::spare::{Spare, place, take};
use mpmd_layout::aval::DType;

/// Memory of the device for values that live no longer than a call. What it holds at first means
/// nothing.
///
/// Dropping it lets later work of the same call have the memory; it need not be kept for work that
/// was issued.
#[derive(Debug)]
pub struct Scratch<'a> {
    /// Always there until it is dropped.
    buffer: Option<OwnedBuffer>,
    place: DevicePlace,
    dtype: DType,
    elements: usize,
    memory: &'a CallMemory,
}

impl<'a> Scratch<'a> {
    /// The values from element `elements` on. Whoever has a part of scratch may write it.
    pub fn at(&self, elements: usize) -> Part<'_> {
        Part::scratch(self.place, self.dtype, self.elements).at(elements)
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// What they are.
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

/// The memory of one call on a CUDA device. Made before its work is issued, [ended](Self::end) with
/// the fence behind it.
#[derive(Debug)]
pub(crate) struct CallMemory {
    /// Of the device.
    device: Pool,
    /// Of the host, with pages that stay in their place.
    host: Pool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Blocks of the device's that no [`Scratch`] holds.
    free: Vec<OwnedBuffer>,
    /// Memory of the host's that work reads until it is over.
    held: Vec<OwnedBuffer>,
    /// Host values that were copied to the device, by address and length, and the copies.
    copies: Vec<((usize, usize), OwnedBuffer)>,
    /// Bytes of the device's that the call has had at a time.
    bytes: usize,
}

impl CallMemory {
    /// For a call on the device with this pool; `host` is where copies to it start.
    pub(crate) fn new(device: &Pool, host: &Pool) -> Self {
        Self { device: device.clone(), host: host.clone(), state: Mutex::default() }
    }

    /// All work of the call was issued, and is over at `fence`. `spare` are the blocks of the
    /// device that the call's work was issued to, which is one line.
    pub(crate) fn end(self, spare: &Spare, fence: &Arc<dyn Fence>) {
        let State { mut free, mut held, copies, bytes } = self.state.into_inner();
        free.extend(copies.into_iter().map(|(_, copy)| copy));
        held.iter_mut().for_each(|buffer| buffer.add_fence(fence.clone()));
        if !free.is_empty() {
            spare.keep(free, bytes, fence);
        }
    }

    pub(super) fn scratch(
        &self,
        spare: &Spare,
        dtype: DType,
        elements: usize,
    ) -> Result<Scratch<'_>, OutOfMemory> {
        // So that every scratch has an address.
        let buffer = self.block(spare, (elements.saturating_mul(dtype.size())).max(1))?;
        let place = place(&buffer);
        Ok(Scratch { buffer: Some(buffer), place, dtype, elements, memory: self })
    }

    /// Where the copy of these host values is, and whether this is the first that asks: then the
    /// caller copies them, from the buffer.
    pub(super) fn copy_of(
        &self,
        spare: &Spare,
        bytes: &[u8],
    ) -> Result<(DevicePlace, Option<OwnedBuffer>), OutOfMemory> {
        let (key, len) = ((bytes.as_ptr().addr(), bytes.len()), bytes.len());
        let part = |copy: &OwnedBuffer| DevicePlace { bytes: len, ..place(copy) };
        if let Some((_, copy)) = self.state.lock().copies.iter().find(|(known, _)| *known == key) {
            return Ok((part(copy), None));
        }
        let mut staged = self.stage(len)?;
        staged.copy_from_slice(bytes);
        let copy = self.block(spare, len.max(1))?;
        let place = part(&copy);
        // Kept until the call ends: it may be asked for again.
        self.state.lock().copies.push((key, copy));
        Ok((place, Some(staged)))
    }

    /// Memory of the host's for values on their way to the device; to be [held](Self::hold).
    pub(super) fn stage(&self, bytes: usize) -> Result<OwnedBuffer, OutOfMemory> {
        self.host.allocate(bytes)
    }

    /// Where the device's memory comes from.
    pub(super) fn device_pool(&self) -> &Pool {
        &self.device
    }

    /// Keeps memory until the work is over.
    pub(super) fn hold(&self, buffer: OwnedBuffer) {
        self.state.lock().held.push(buffer);
    }

    /// A block of the device's that nothing but work of its compute line uses, if anything does.
    fn block(&self, spare: &Spare, bytes: usize) -> Result<OwnedBuffer, OutOfMemory> {
        // Whole classes, so that blocks fit again.
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
