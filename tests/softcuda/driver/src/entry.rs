//! The definition of functions that C programs call: the macro [`exported!`], and types for
//! arguments that come from C.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::counters;
use crate::error::{Code, Result, row};
use crate::faults;

/// Defines a function under its C name. Its body is safe code that returns a [`Result`]. `$code`
/// converts the driver's error code into a code of NVRTC, cuBLAS or NCCL. Each call is counted. A
/// panic in the body becomes `CUDA_ERROR_UNKNOWN`.
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

/// Defines a function of the driver, which returns the body's code unchanged; see [`exported!`].
macro_rules! api {
    ($($function:tt)*) => { $crate::entry::exported!(::std::convert::identity; $($function)*); };
}
pub(crate) use api;

/// Defines a function of NVRTC. Bodies return NVRTC codes; two driver codes with other numbers in
/// NVRTC are converted. See [`exported!`].
macro_rules! nvrtc {
    ($($function:tt)*) => {
        $crate::entry::exported!($crate::entry::code_of_nvrtc; $($function)*);
    };
}
pub(crate) use nvrtc;

/// Defines a function of cuBLAS. Bodies return cuBLAS codes. Only the driver's code for a panic is
/// converted; other driver codes reach the caller unchanged.
macro_rules! blas {
    ($($function:tt)*) => {
        $crate::entry::exported!($crate::entry::code_of_cublas; $($function)*);
    };
}
pub(crate) use blas;

/// Defines a function of NCCL. Bodies return NCCL codes; an error of the driver becomes
/// `ncclUnhandledCudaError`.
macro_rules! nccl {
    ($($function:tt)*) => { $crate::entry::exported!($crate::entry::code_of_nccl; $($function)*); };
}
pub(crate) use nccl;

/// Converts a driver code into an NVRTC code. Only 1 (invalid value) and 999 (unknown) change;
/// NVRTC codes pass through.
pub(crate) fn code_of_nvrtc(code: u32) -> u32 {
    match code {
        1 => 3,    // NVRTC_ERROR_INVALID_INPUT
        999 => 11, // NVRTC_ERROR_INTERNAL_ERROR
        other => other,
    }
}

/// Converts a driver code into a cuBLAS code. Only 999 (unknown) changes; cuBLAS codes pass
/// through.
pub(crate) fn code_of_cublas(code: u32) -> u32 {
    match code {
        999 => 14, // CUBLAS_STATUS_INTERNAL_ERROR
        other => other,
    }
}

/// Converts a driver code into an NCCL code: 999 becomes `ncclInternalError`, any other code from 8
/// on `ncclUnhandledCudaError`. Lower codes pass through.
pub(crate) fn code_of_nccl(code: u32) -> u32 {
    match code {
        999 => 3, // ncclInternalError
        code @ 0..8 => code,
        _ => 1, // ncclUnhandledCudaError
    }
}

/// Runs the body of an exported function and returns its code; 0 is success. Counts the call. Skips
/// the body if a test has requested that this call fails. Catches panics.
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> Result) -> u32 {
    counters::called(name);
    match catch_unwind(AssertUnwindSafe(|| {
        faults::meet_call(name).and_then(|()| body())
    })) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// A pointer through which C receives a value.
///
/// Only callers of exported functions create values of this type, and these functions are unsafe to
/// call. The callers promise that the pointer is null or may be written.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes a value through the pointer.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE` for a null pointer.
    pub(crate) fn set(&self, value: T) -> Result {
        self.required()?;
        self.set_if_wanted(value);
        Ok(())
    }

    /// Writes a value through the pointer, unless the pointer is null.
    pub(crate) fn set_if_wanted(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the caller of the exported function promised that a pointer that is not null
            // may be written. C does not promise an aligned or initialized place, so the value is
            // written without reading or dropping.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Writes values one after another, as an array whose length is not checked. Fails with
    /// `CUDA_ERROR_INVALID_VALUE` for a null pointer.
    pub(crate) fn set_all(&self, values: impl IntoIterator<Item = T>) -> Result {
        self.required()?;
        for (at, value) in values.into_iter().enumerate() {
            // SAFETY: the caller promised room for as many as the function is documented to write.
            unsafe { self.0.add(at).write_unaligned(value) };
        }
        Ok(())
    }

    /// Creates a pointer from an address, for calls in which another argument determines the type.
    pub(crate) fn untyped(address: u64) -> Self {
        Out(address as *mut T)
    }

    /// Fails with `CUDA_ERROR_INVALID_VALUE` for a null pointer. Callers check this before an
    /// effect that they would have to undo.
    pub(crate) fn required(&self) -> Result {
        if self.0.is_null() {
            Err(Code::INVALID_VALUE)
        } else {
            Ok(())
        }
    }
}

/// A pointer to one value or an array that C passes. As for [`Out`], only callers of exported
/// functions create values of this type.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// Returns element `index` of the array at the pointer. The array's length is unknown and not
    /// checked.
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

    /// Returns the value at the pointer. Fails with `CUDA_ERROR_INVALID_VALUE` for a null pointer.
    pub(crate) fn get(&self) -> Result<T> {
        self.at(0)
    }

    /// Copies `count` bytes from the pointer on. Fails with `CUDA_ERROR_INVALID_VALUE` for a null
    /// pointer.
    pub(crate) fn bytes(&self, count: usize) -> Result<Vec<u8>> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller promised that many bytes behind the pointer.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), count) }.to_vec())
    }

    /// Creates a pointer from an address, for calls in which another argument determines the type.
    pub(crate) fn untyped(address: u64) -> In<T> {
        In(address as *const T)
    }

    /// Returns the address as a number.
    pub(crate) fn address(&self) -> usize {
        self.0 as usize
    }
}

/// A zero-terminated string that C passes.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// Creates a text from a pointer, such as an element of an array of texts.
    pub(crate) fn untyped(pointer: *const c_char) -> Text {
        Text(pointer)
    }

    /// Returns a copy of the text. Bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE` for a null pointer.
    pub(crate) fn get(&self) -> Result<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller promised a zero-terminated string that does not change during the
        // call.
        Ok(unsafe { CStr::from_ptr(self.0) }
            .to_string_lossy()
            .into_owned())
    }
}

api! {
    /// Returns the name of a `CUresult` code, such as `CUDA_ERROR_INVALID_VALUE`. The name is never
    /// freed. Fails for a code that this driver does not know.
    fn cuGetErrorName(error: u32, text: Out<*const c_char>) {
        text.set(row(error)?.1.as_ptr())
    }
}

api! {
    /// Returns the English text of a `CUresult` code, which is never freed. Fails for a code that
    /// this driver does not know.
    fn cuGetErrorString(error: u32, text: Out<*const c_char>) {
        text.set(row(error)?.2.as_ptr())
    }
}
