//! What a test asks of the driver that its process has loaded: counts, races, and failures on
//! demand.

use std::ffi::{CStr, CString, c_char};
use std::mem::transmute;

/// The driver that this process has loaded.
///
/// It is not the code of this library that is linked into a test, which has a state of its own, but
/// the one that was loaded by CUDA's name; so it is asked through the functions that it exports.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    calls: unsafe extern "C" fn(*const c_char) -> u64,
    bytes: unsafe extern "C" fn(*const c_char) -> u64,
    reset: unsafe extern "C" fn(),
    races: unsafe extern "C" fn() -> u64,
    fail: unsafe extern "C" fn(*const c_char, u64) -> i32,
}

/// The driver, or none as long as the process has loaded no CUDA driver, or where it is another
/// one.
pub fn driver() -> Option<Driver> {
    // SAFETY: looks whether the library is there, and runs none of its code; the handle is never
    // closed.
    let library = unsafe {
        libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY | libc::RTLD_LOCAL)
    };
    if library.is_null() {
        return None;
    }
    let symbol = |name: &CStr| {
        // SAFETY: the library is open, and the name a text.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    };
    // SAFETY: functions of these names are this crate's own, and have these types.
    unsafe {
        Some(Driver {
            calls: transmute::<*mut _, unsafe extern "C" fn(*const c_char) -> u64>(symbol(
                c"softcuda_calls",
            )?),
            bytes: transmute::<*mut _, unsafe extern "C" fn(*const c_char) -> u64>(symbol(
                c"softcuda_bytes",
            )?),
            reset: transmute::<*mut _, unsafe extern "C" fn()>(symbol(c"softcuda_reset_counters")?),
            races: transmute::<*mut _, unsafe extern "C" fn() -> u64>(symbol(c"softcuda_races")?),
            fail: transmute::<*mut _, unsafe extern "C" fn(*const c_char, u64) -> i32>(symbol(
                c"softcuda_fail",
            )?),
        })
    }
}

/// [`Driver::calls`] of the driver that is loaded; none where it is another one.
///
/// # Panics
///
/// See there.
pub fn calls(function: &str) -> Option<u64> {
    driver().map(|driver| driver.calls(function))
}

/// [`Driver::bytes`] of the driver that is loaded; none where it is another one.
///
/// # Panics
///
/// See there.
pub fn bytes(kind: &str) -> Option<u64> {
    driver().map(|driver| driver.bytes(kind))
}

impl Driver {
    /// How often a function was called since the start or the last reset, by its C name, as
    /// `cuMemAlloc_v2`.
    ///
    /// # Panics
    ///
    /// For a name with a zero in it.
    pub fn calls(&self, function: &str) -> u64 {
        let function = CString::new(function).expect("a name without zeros");
        // SAFETY: a text.
        unsafe { (self.calls)(function.as_ptr()) }
    }

    /// Bytes of copies that were issued since the start or the last reset, by kind:
    /// `pinned_to_device`, `pageable_to_device`, `device_to_pinned`, `device_to_pageable`,
    /// `device_to_device`, `host_to_host`.
    ///
    /// # Panics
    ///
    /// For a kind that is none.
    pub fn bytes(&self, kind: &str) -> u64 {
        let text = CString::new(kind).expect("a name without zeros");
        // SAFETY: a text.
        let bytes = unsafe { (self.bytes)(text.as_ptr()) };
        assert!(bytes != u64::MAX, "no kind of copy is called {kind:?}");
        bytes
    }

    /// Sets the counts of calls and bytes to zero.
    pub fn reset(&self) {
        // SAFETY: no conditions.
        unsafe { (self.reset)() }
    }

    /// How many races were found so far.
    pub fn races(&self) -> u64 {
        // SAFETY: no conditions.
        unsafe { (self.races)() }
    }

    /// Makes the n-th call of a kind from now fail, the next one with 1; kinds as in
    /// `SOFTCUDA_FAIL`.
    ///
    /// # Panics
    ///
    /// For a kind that is none, or an n of 0.
    pub fn fail(&self, what: &str, nth: u64) {
        let text = CString::new(what).expect("a name without zeros");
        // SAFETY: a text.
        let understood = unsafe { (self.fail)(text.as_ptr(), nth) };
        assert_eq!(understood, 0, "{what}:{nth} cannot be made to fail");
    }
}
