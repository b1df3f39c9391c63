//! candle's allocations on a device that is out of memory.
//!
//! candle calls the driver's `cuMemAllocAsync` by name, and programs link its calls to the function
//! of this name here. It calls the driver. If that has no memory, both allocators give back their
//! unused memory, and it tries once more: so a pass of candle need not fail, or be repeated,
//! because mpmd has freed arrays and kept their memory.

use std::cell::RefCell;
use std::ffi::c_void;

use mpmd_core::cuda::{Cuda, DeviceRoom};

use crate::shortage;

thread_local! {
    /// The allocators of the device on which this thread's pass runs.
    static ROOM: RefCell<Option<DeviceRoom>> = const { RefCell::new(None) };
}

/// While it lives, this thread's candle allocations may free unused memory of the device's
/// allocators.
pub(super) struct RoomGuard(Option<DeviceRoom>);

impl RoomGuard {
    pub(super) fn new(compute: &Cuda<'_>) -> Self {
        Self(ROOM.replace(Some(compute.device_room())))
    }
}

impl Drop for RoomGuard {
    fn drop(&mut self) {
        ROOM.set(self.0.take());
    }
}

/// Allocates memory in the order of a stream. Replaces the driver's function of this name.
///
/// # Safety
///
/// The requirements of the driver's function apply.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: *mut c_void) -> u32 {
    /// The driver's error code `CUDA_ERROR_OUT_OF_MEMORY`.
    const OUT_OF_MEMORY: u32 = 2;
    let room = ROOM.with_borrow(Option::clone);
    // SAFETY: the caller keeps to the driver's documentation. A pass has made the context of its
    // device current.
    let answer = unsafe { DeviceRoom::allocate_in_order(room.as_ref(), address, bytes, stream) };
    if answer == OUT_OF_MEMORY
        && let Some(room) = &room
    {
        shortage::note(room.to_string());
    }
    answer
}
