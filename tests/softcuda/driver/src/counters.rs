//! Counts of calls by name and of bytes by kind of copy. Tests read them to check the work that was
//! issued.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

static CALLS: LazyLock<Mutex<HashMap<&'static str, u64>>> = LazyLock::new(Mutex::default);
static BYTES: [AtomicU64; 6] = [const { AtomicU64::new(0) }; 6];

/// The direction of a copy, by the kinds of memory that it reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// From pinned host memory to a device.
    PinnedToDevice,
    /// From pageable host memory to a device.
    PageableToDevice,
    /// From a device to pinned host memory.
    DeviceToPinned,
    /// From a device to pageable host memory.
    DeviceToPageable,
    /// Within a device, or between two devices.
    DeviceToDevice,
    /// From host memory to host memory.
    HostToHost,
}

impl Moved {
    const NAMES: [&'static str; 6] = [
        "pinned_to_device",
        "pageable_to_device",
        "device_to_pinned",
        "device_to_pageable",
        "device_to_device",
        "host_to_host",
    ];
}

/// Adds one to the count of calls of the exported function `name`.
pub(crate) fn called(name: &'static str) {
    *CALLS.lock().entry(name).or_default() += 1;
}

/// Adds the bytes of an issued copy to the count of its kind.
pub(crate) fn moved(kind: Moved, bytes: usize) {
    BYTES[kind as usize].fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Returns the number of calls of an exported function since the start or the last reset, by its C
/// name. A name that was never called gives 0.
///
/// # Safety
///
/// `name` is a zero-terminated string.
#[unsafe(no_mangle)]
unsafe extern "C" fn softcuda_calls(name: *const c_char) -> u64 {
    // SAFETY: see above.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default();
    CALLS.lock().get(name).copied().unwrap_or(0)
}

/// Returns the bytes of the copies of a kind that were issued since the start or the last reset;
/// for the kinds see `Driver::bytes`. An unknown kind gives `u64::MAX`, so that a test with a
/// misspelt kind fails.
///
/// # Safety
///
/// `kind` is a zero-terminated string.
#[unsafe(no_mangle)]
unsafe extern "C" fn softcuda_bytes(kind: *const c_char) -> u64 {
    // SAFETY: see above.
    let kind = unsafe { CStr::from_ptr(kind) }.to_str().unwrap_or_default();
    let at = Moved::NAMES.iter().position(|name| *name == kind);
    at.map_or(u64::MAX, |at| BYTES[at].load(Ordering::Relaxed))
}

/// Sets the counts of calls and bytes to zero; the count of races stays.
#[unsafe(no_mangle)]
extern "C" fn softcuda_reset_counters() {
    CALLS.lock().clear();
    for bytes in &BYTES {
        bytes.store(0, Ordering::Relaxed);
    }
}
