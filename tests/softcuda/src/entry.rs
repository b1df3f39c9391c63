//! How a function that C programs call is written: the macro [`exported!`], and types for what C
//! hands over.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::counters;
use crate::error::{Code, Result};
use crate::faults;

/// Defines a function under its C name, which answers with what `$code` makes of the driver's code.
/// The body is safe code that gives a [`Result`]; the call is counted under its name, and a panic
/// in the body becomes `CUDA_ERROR_UNKNOWN`.
macro_rules! exported {
    ($code:path; $(#[$doc:meta])* fn $name:ident($($arg:ident : $ty:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        #[allow(non_snake_case, clippy::too_many_arguments)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            $code($crate::entry::call(stringify!($name), move || $body))
        }
    };
}
pub(crate) use exported;

/// A function of the driver; see [`exported!`].
macro_rules! api {
    ($($function:tt)*) => { $crate::entry::exported!(::std::convert::identity; $($function)*); };
}
pub(crate) use api;

/// A function of NVRTC: what is wrong with an argument has another number there.
macro_rules! nvrtc {
    ($($function:tt)*) => { $crate::entry::exported!($crate::entry::code_of_nvrtc; $($function)*); };
}
pub(crate) use nvrtc;

/// A function of cuBLAS. Their bodies give cuBLAS's codes, but for a null pointer, and for errors
/// of the driver that they do not turn into one.
macro_rules! blas {
    ($($function:tt)*) => { $crate::entry::exported!($crate::entry::code_of_cublas; $($function)*); };
}
pub(crate) use blas;

/// A function of NCCL. Their bodies give NCCL's codes; an error of the driver is
/// `ncclUnhandledCudaError`.
macro_rules! nccl {
    ($($function:tt)*) => { $crate::entry::exported!($crate::entry::code_of_nccl; $($function)*); };
}
pub(crate) use nccl;

/// See [`nvrtc!`].
pub(crate) fn code_of_nvrtc(code: u32) -> u32 {
    match code {
        1 => 3,    // NVRTC_ERROR_INVALID_INPUT
        999 => 11, // NVRTC_ERROR_INTERNAL_ERROR
        other => other,
    }
}

/// See [`blas!`].
pub(crate) fn code_of_cublas(code: u32) -> u32 {
    match code {
        999 => 14, // CUBLAS_STATUS_INTERNAL_ERROR
        other => other,
    }
}

/// See [`nccl!`].
pub(crate) fn code_of_nccl(code: u32) -> u32 {
    match code {
        999 => 3, // ncclInternalError
        code @ 0..8 => code,
        _ => 1, // ncclUnhandledCudaError
    }
}

/// Runs the body of a function; see [`exported!`].
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> Result) -> u32 {
    counters::called(name);
    match catch_unwind(AssertUnwindSafe(|| faults::meet_call(name).and_then(|()| body()))) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// A pointer through which C wants a value back.
///
/// Values of it come only from callers of exported functions, which are unsafe to call: that the
/// pointer is null or may be written is what they promise.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the value.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE` for a null pointer.
    pub(crate) fn set(&self, value: T) -> Result {
        self.required()?;
        self.set_if_wanted(value);
        Ok(())
    }

    /// Writes the value where the caller gave a place for it.
    pub(crate) fn set_if_wanted(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the caller of the exported function promised that a pointer that is not null
            // may be written; it may be unaligned or uninitialised for all we know of C, so it is
            // written without reading or dropping.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Writes values one after another, as an array.
    pub(crate) fn set_all(&self, values: impl IntoIterator<Item = T>) -> Result {
        self.required()?;
        for (at, value) in values.into_iter().enumerate() {
            // SAFETY: the caller promised room for as many as the function is documented to write.
            unsafe { self.0.add(at).write_unaligned(value) };
        }
        Ok(())
    }

    /// A pointer whose type another argument of the call decides.
    pub(crate) fn untyped(address: u64) -> Self {
        Out(address as *mut T)
    }

    /// Asks that there is a pointer, before anything is done that would have to be undone.
    pub(crate) fn required(&self) -> Result {
        if self.0.is_null() { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }
}

/// A pointer to values that C hands over; like [`Out`], only callers of exported functions make
/// one.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// The value at an index.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE` for a null pointer.
    pub(crate) fn at(&self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller promised an array that is as long as the function is documented to
        // read.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// The value.
    pub(crate) fn get(&self) -> Result<T> {
        self.at(0)
    }

    /// The first `count` bytes behind the pointer.
    pub(crate) fn bytes(&self, count: usize) -> Result<Vec<u8>> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller promised that many bytes behind the pointer.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), count) }.to_vec())
    }

    /// A pointer whose type another argument of the call decides.
    pub(crate) fn untyped(address: u64) -> In<T> {
        In(address as *const T)
    }

    /// The address, as a number.
    pub(crate) fn address(&self) -> usize {
        self.0 as usize
    }
}

/// A text that C hands over, ended by a zero.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// A text out of an array of them.
    pub(crate) fn untyped(pointer: *const c_char) -> Text {
        Text(pointer)
    }

    /// The text; bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE` for a null pointer.
    pub(crate) fn get(&self) -> Result<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller promised a text that a zero ends, and does not change it during the
        // call.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
