//! What a program asks of the driver that its own process has loaded, if it is this one.

use std::ffi::{CStr, CString, c_char};

/// How often a function of the driver was called in this process, by its C name; `None` without this driver.
pub fn calls(name: &str) -> Option<u64> {
    ask(c"softcuda_calls", name)
}

/// How many bytes copies of a kind were issued for in this process, such as `device_to_device`; `None` without this driver.
pub fn bytes(kind: &str) -> Option<u64> {
    ask(c"softcuda_bytes", kind)
}

fn ask(function: &CStr, what: &str) -> Option<u64> {
    let what = CString::new(what).ok()?;
    // SAFETY: looks whether the library is there, and runs none of its code; the handle is never closed.
    let library = unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the handle is that of a library which stays loaded; the name is a text that a zero ends.
    let found = unsafe { libc::dlsym(library, function.as_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: both functions of these names, which no other driver has, are of this type.
    let found: unsafe extern "C" fn(*const c_char) -> u64 = unsafe { std::mem::transmute(found) };
    // SAFETY: `what` is a text that a zero ends.
    Some(unsafe { found(what.as_ptr()) })
}
