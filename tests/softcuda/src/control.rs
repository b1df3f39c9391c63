//! A test's interface to the driver that its process has loaded: counters, races, and failures on
//! demand.

use std::ffi::{CStr, CString, c_char};
use std::mem::transmute;

/// The softcuda library that this process has loaded as `libcuda.so.1`.
///
/// The copy of this crate that is linked into a test has its own state. So the methods call
/// functions that the loaded library exports.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    calls: unsafe extern "C" fn(*const c_char) -> u64,
    bytes: unsafe extern "C" fn(*const c_char) -> u64,
    reset: unsafe extern "C" fn(),
    races: unsafe extern "C" fn() -> u64,
    fail: unsafe extern "C" fn(*const c_char, u64) -> i32,
}

/// Returns the loaded driver. `None` if the process has loaded no CUDA driver yet, or another
/// driver.
pub fn driver() -> Option<Driver> {
    // SAFETY: looks whether the library is there, and runs none of its code; the handle is never
    // closed.
    let library = unsafe {
        let flags = libc::RTLD_NOLOAD | libc::RTLD_LAZY | libc::RTLD_LOCAL;
        libc::dlopen(c"libcuda.so.1".as_ptr(), flags)
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

/// Returns the number of calls of a function of the loaded driver, as [`Driver::calls`] does.
/// `None` if the process has loaded no CUDA driver yet, or another driver.
///
/// # Panics
///
/// If `function` contains a zero byte.
pub fn calls(function: &str) -> Option<u64> {
    driver().map(|driver| driver.calls(function))
}

/// Returns the bytes of the copies of a kind that the loaded driver has issued, as
/// [`Driver::bytes`] does. `None` if the process has loaded no CUDA driver yet, or another driver.
///
/// # Panics
///
/// If `kind` is unknown.
pub fn bytes(kind: &str) -> Option<u64> {
    driver().map(|driver| driver.bytes(kind))
}

impl Driver {
    /// Returns the number of calls of a function since the start or the last
    /// [`reset`](Self::reset). `function` is its C name, such as `cuMemAlloc_v2`.
    ///
    /// # Panics
    ///
    /// If `function` contains a zero byte.
    pub fn calls(&self, function: &str) -> u64 {
        let function = CString::new(function).expect("a name without zeros");
        // SAFETY: a text.
        unsafe { (self.calls)(function.as_ptr()) }
    }

    /// Returns the bytes of the copies issued since the start or the last [`reset`](Self::reset).
    /// `kind` is one of `pinned_to_device`, `pageable_to_device`, `device_to_pinned`,
    /// `device_to_pageable`, `device_to_device`, `host_to_host`.
    ///
    /// # Panics
    ///
    /// If `kind` is none of these names.
    pub fn bytes(&self, kind: &str) -> u64 {
        let text = CString::new(kind).expect("a name without zeros");
        // SAFETY: a text.
        let bytes = unsafe { (self.bytes)(text.as_ptr()) };
        assert!(bytes != u64::MAX, "no kind of copy is called {kind:?}");
        bytes
    }

    /// Sets the counts of calls and bytes to zero; the count of races stays.
    pub fn reset(&self) {
        // SAFETY: no conditions.
        unsafe { (self.reset)() }
    }

    /// Returns the number of races found since the process started; [`reset`](Self::reset) does not
    /// change it.
    pub fn races(&self) -> u64 {
        // SAFETY: no conditions.
        unsafe { (self.races)() }
    }

    /// Makes the n-th call of a kind from now on fail, once; `nth` 1 is the next call. The names of
    /// kinds are those of `SOFTCUDA_FAIL` in the crate's documentation.
    ///
    /// # Panics
    ///
    /// If the kind is unknown or `nth` is 0.
    pub fn fail(&self, kind: &str, nth: u64) {
        let text = CString::new(kind).expect("a name without zeros");
        // SAFETY: a text.
        let understood = unsafe { (self.fail)(text.as_ptr(), nth) };
        assert_eq!(
            understood, 0,
            "unknown kind of call, or nth is 0: {kind}:{nth}"
        );
    }
}
