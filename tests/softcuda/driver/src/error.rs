//! The CUDA error codes that this driver returns, with CUDA's names and texts.

use std::ffi::CStr;

/// A `CUresult` code, or a code of NVRTC, cuBLAS or NCCL. Never zero: success is `Ok`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

/// One row of the error table: code, name, text.
pub(crate) type Row = (u32, &'static CStr, &'static CStr);

macro_rules! codes {
    ($($name:ident = $value:literal, $cuda:literal, $text:literal;)*) => {
        impl Code {
            $(
                #[allow(dead_code, reason = "some come only from kernels, as numbers")]
                pub(crate) const $name: Code = Code($value);
            )*
        }
        const TABLE: &[Row] = &[(0, c"CUDA_SUCCESS", c"no error"), $(($value, $cuda, $text)),*];
    };
}

codes! {
    INVALID_VALUE = 1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    OUT_OF_MEMORY = 2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    NOT_INITIALIZED = 3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error";
    NO_DEVICE = 100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
    INVALID_IMAGE = 200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid";
    INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context";
    MAP_FAILED = 205, c"CUDA_ERROR_MAP_FAILED", c"mapping of buffer object failed";
    ALREADY_MAPPED = 208, c"CUDA_ERROR_ALREADY_MAPPED", c"resource already mapped";
    UNSUPPORTED_LIMIT = 215, c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"limit is not supported on this \
        architecture";
    PEER_ACCESS_UNSUPPORTED = 217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        c"peer access is not supported between these two devices";
    INVALID_PTX = 218, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed";
    FILE_NOT_FOUND = 301, c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found";
    OPERATING_SYSTEM = 304, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not \
        supported on this OS";
    INVALID_HANDLE = 400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle";
    NOT_FOUND = 500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found";
    NOT_READY = 600, c"CUDA_ERROR_NOT_READY", c"device not ready";
    ILLEGAL_ADDRESS = 700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was \
        encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources \
        requested for launch";
    LAUNCH_TIMEOUT = 702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated";
    PEER_ACCESS_ALREADY_ENABLED = 704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access \
        is already enabled";
    CONTEXT_IS_DESTROYED = 709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed";
    ASSERT = 710, c"CUDA_ERROR_ASSERT", c"device-side assert triggered";
    HOST_MEMORY_ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region";
    LAUNCH_FAILED = 719, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure";
    NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported";
    UNKNOWN = 999, c"CUDA_ERROR_UNKNOWN", c"unknown error";
}

/// The result of a call inside the driver; an error is the code for the C program.
pub(crate) type Result<T = ()> = std::result::Result<T, Code>;

/// Returns the table row of a `CUresult` code; fails with `INVALID_VALUE` for a code that is not in
/// the table.
pub(crate) fn row(code: u32) -> Result<&'static Row> {
    TABLE
        .iter()
        .find(|row| row.0 == code)
        .ok_or(Code::INVALID_VALUE)
}

impl Code {
    /// Returns CUDA's English text for the code; empty if the code is not in the table.
    pub(crate) fn text(self) -> String {
        row(self.0)
            .map(|row| row.2.to_string_lossy().into_owned())
            .unwrap_or_default()
    }
}
