//! The CUDA library functions that this back end calls, as their headers declare them except for
//! the return type.
//!
//! In C, a status is an enumeration. A library newer than `cudarc`'s bindings may return values
//! that the bindings do not know, and as a Rust enumeration that would be undefined behaviour. So
//! the status is a number here, [`CallStatus`].
//!
//! A function is looked up at its first call, which panics if the library lacks it. Callers must
//! have checked beforehand that the library has it ([`CudaLibrary`](super::library::CudaLibrary)).

use std::ffi::{CStr, c_char, c_int, c_longlong, c_uchar, c_uint, c_ushort, c_void};
use std::fmt;

use cudarc::{cublas::sys as cublas, driver::sys as cuda, nvrtc::sys as nvrtc};

use super::library;

/// The status that a function of a CUDA library returns. In all these libraries 0 means success.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
#[repr(transparent)]
pub(super) struct CallStatus(pub(super) u32);

/// A driver status other than success.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) struct DriverError(u32);

impl CallStatus {
    /// Returns true if the call succeeded.
    pub(super) fn is_success(self) -> bool {
        self.0 == 0
    }

    /// Converts a driver status to a result.
    pub(super) fn result(self) -> Result<(), DriverError> {
        if self.is_success() {
            Ok(())
        } else {
            Err(DriverError(self.0))
        }
    }

    /// Returns true if this status is `known`.
    pub(super) fn is(self, known: cuda::CUresult) -> bool {
        self.0 == known as u32
    }
}

impl DriverError {
    /// Returns true if this is the error `known`.
    pub(super) fn is(self, known: cuda::CUresult) -> bool {
        self.0 == known as u32
    }

    /// Returns the driver's name for the error, such as `CUDA_ERROR_OUT_OF_MEMORY`, or its number
    /// if the driver has no name for it.
    pub(super) fn name(self) -> String {
        self.said_by(cuGetErrorName)
            .unwrap_or_else(|| format!("CUDA error {}", self.0))
    }

    /// Returns the driver's description of the error, or its number if the driver has none.
    pub(super) fn text(self) -> String {
        self.said_by(cuGetErrorString)
            .unwrap_or_else(|| format!("CUDA error {}", self.0))
    }

    fn said_by(self, ask: unsafe fn(u32, *mut *const c_char) -> CallStatus) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: the driver takes any number, and writes one pointer, for which there is room.
        let answer = unsafe { ask(self.0, &raw mut text) };
        // SAFETY: where it is not null it is the driver's own text, which is static and ends with a
        // zero.
        answer
            .is_success()
            .then(|| unsafe { static_text(text) })
            .flatten()
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.text())
    }
}

/// Copies a C string of a library. Returns `None` for null.
///
/// # Safety
///
/// `text` must be null or point to a zero-terminated string that does not change during the call.
pub(super) unsafe fn static_text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees that the text is valid.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// Declares functions of a [`CudaLibrary`](super::library::CudaLibrary), and a list of their names.
macro_rules! functions {
    (
        $library:expr, $symbols:ident:
        $(fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*
    ) => {
        /// Names of the functions of this library that the CUDA back end calls.
        #[allow(dead_code, reason = "those that are asked for one by one are not read")]
        pub(super) const $symbols: &[&str] = &[$(stringify!($name)),*];

        $(
            /// Calls the library's function of this name.
            ///
            /// # Safety
            ///
            /// The requirements are those of the library's documentation.
            #[expect(non_snake_case, reason = "CUDA's own names")]
            #[allow(clippy::too_many_arguments, reason = "CUDA's own")]
            pub(super) unsafe fn $name($($argument: $type),*) -> $result {
                type Function = unsafe extern "C" fn($($type),*) -> $result;
                static FOUND: std::sync::OnceLock<Function> = std::sync::OnceLock::new();
                let found = FOUND.get_or_init(|| {
                    // SAFETY: the type is that of the function's declaration, with its answer as
                    // the number that it is in C.
                    let found = unsafe { $library.function::<Function>(stringify!($name)) };
                    found.unwrap_or_else(|| {
                        panic!("the {} here has no {}", $library.name, stringify!($name))
                    })
                });
                // SAFETY: the caller keeps to the library's documentation.
                unsafe { found($($argument),*) }
            }
        )*
    };
}

pub(super) use functions;

functions! { library::DRIVER, DRIVER:
    fn cuInit(flags: c_uint) -> CallStatus;
    fn cuDriverGetVersion(version: *mut c_int) -> CallStatus;
    fn cuGetErrorName(error: u32, name: *mut *const c_char) -> CallStatus;
    fn cuGetErrorString(error: u32, text: *mut *const c_char) -> CallStatus;
    fn cuDeviceGetCount(count: *mut c_int) -> CallStatus;
    fn cuDeviceGet(device: *mut cuda::CUdevice, ordinal: c_int) -> CallStatus;
    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: cuda::CUdevice) -> CallStatus;
    fn cuDeviceGetUuid_v2(uuid: *mut cuda::CUuuid, device: cuda::CUdevice) -> CallStatus;
    fn cuDeviceGetAttribute(
        value: *mut c_int, which: cuda::CUdevice_attribute, device: cuda::CUdevice
    ) -> CallStatus;
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: cuda::CUdevice) -> CallStatus;
    fn cuDeviceCanAccessPeer(
        can: *mut c_int, from: cuda::CUdevice, to: cuda::CUdevice
    ) -> CallStatus;
    fn cuDevicePrimaryCtxRetain(
        context: *mut cuda::CUcontext, device: cuda::CUdevice
    ) -> CallStatus;
    fn cuDevicePrimaryCtxRelease_v2(device: cuda::CUdevice) -> CallStatus;
    fn cuCtxEnablePeerAccess(to: cuda::CUcontext, flags: c_uint) -> CallStatus;
    fn cuCtxGetCurrent(context: *mut cuda::CUcontext) -> CallStatus;
    fn cuCtxSetCurrent(context: cuda::CUcontext) -> CallStatus;
    fn cuCtxSynchronize() -> CallStatus;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CallStatus;
    fn cuMemAllocAsync(
        address: *mut cuda::CUdeviceptr, bytes: usize, stream: cuda::CUstream
    ) -> CallStatus;
    fn cuDeviceGetDefaultMemPool(
        pool: *mut cuda::CUmemoryPool, device: cuda::CUdevice
    ) -> CallStatus;
    fn cuMemPoolGetAttribute(
        pool: cuda::CUmemoryPool, which: cuda::CUmemPool_attribute_enum, value: *mut c_void
    ) -> CallStatus;
    fn cuMemPoolTrimTo(pool: cuda::CUmemoryPool, least: usize) -> CallStatus;
    fn cuMemAlloc_v2(address: *mut cuda::CUdeviceptr, bytes: usize) -> CallStatus;
    fn cuMemFree_v2(address: cuda::CUdeviceptr) -> CallStatus;
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) -> CallStatus;
    fn cuMemHostUnregister(address: *mut c_void) -> CallStatus;
    fn cuMemcpyAsync(
        to: cuda::CUdeviceptr, from: cuda::CUdeviceptr, bytes: usize, stream: cuda::CUstream
    ) -> CallStatus;
    fn cuMemcpyDtoDAsync_v2(
        to: cuda::CUdeviceptr, from: cuda::CUdeviceptr, bytes: usize, stream: cuda::CUstream
    ) -> CallStatus;
    fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void, from: cuda::CUdeviceptr, bytes: usize, stream: cuda::CUstream
    ) -> CallStatus;
    fn cuMemcpyHtoDAsync_v2(
        to: cuda::CUdeviceptr, from: *const c_void, bytes: usize, stream: cuda::CUstream
    ) -> CallStatus;
    fn cuMemcpy2DAsync_v2(copy: *const cuda::CUDA_MEMCPY2D, stream: cuda::CUstream) -> CallStatus;
    fn cuMemcpy3DAsync_v2(copy: *const cuda::CUDA_MEMCPY3D, stream: cuda::CUstream) -> CallStatus;
    fn cuMemsetD8Async(
        to: cuda::CUdeviceptr, value: c_uchar, count: usize, stream: cuda::CUstream
    ) -> CallStatus;
    fn cuMemsetD16Async(
        to: cuda::CUdeviceptr, value: c_ushort, count: usize, stream: cuda::CUstream
    ) -> CallStatus;
    fn cuMemsetD32Async(
        to: cuda::CUdeviceptr, value: c_uint, count: usize, stream: cuda::CUstream
    ) -> CallStatus;
    fn cuPointerGetAttribute(
        value: *mut c_void, which: cuda::CUpointer_attribute, address: cuda::CUdeviceptr
    ) -> CallStatus;
    fn cuStreamCreate(stream: *mut cuda::CUstream, flags: c_uint) -> CallStatus;
    fn cuStreamDestroy_v2(stream: cuda::CUstream) -> CallStatus;
    fn cuStreamSynchronize(stream: cuda::CUstream) -> CallStatus;
    fn cuStreamWaitEvent(stream: cuda::CUstream, event: cuda::CUevent, flags: c_uint) -> CallStatus;
    fn cuEventCreate(event: *mut cuda::CUevent, flags: c_uint) -> CallStatus;
    fn cuEventRecord(event: cuda::CUevent, stream: cuda::CUstream) -> CallStatus;
    fn cuEventSynchronize(event: cuda::CUevent) -> CallStatus;
    fn cuEventElapsedTime(millis: *mut f32, start: cuda::CUevent, end: cuda::CUevent) -> CallStatus;
    fn cuEventDestroy_v2(event: cuda::CUevent) -> CallStatus;
    fn cuIpcGetMemHandle(
        handle: *mut cuda::CUipcMemHandle, address: cuda::CUdeviceptr
    ) -> CallStatus;
    fn cuIpcOpenMemHandle_v2(
        address: *mut cuda::CUdeviceptr, handle: cuda::CUipcMemHandle, flags: c_uint
    ) -> CallStatus;
    fn cuIpcCloseMemHandle(address: cuda::CUdeviceptr) -> CallStatus;
    fn cuModuleLoadDataEx(
        module: *mut cuda::CUmodule, image: *const c_void, count: c_uint,
        options: *mut cuda::CUjit_option, values: *mut *mut c_void
    ) -> CallStatus;
    fn cuModuleGetFunction(
        function: *mut cuda::CUfunction, module: cuda::CUmodule, name: *const c_char
    ) -> CallStatus;
    fn cuFuncGetAttribute(
        value: *mut c_int, which: cuda::CUfunction_attribute, function: cuda::CUfunction
    ) -> CallStatus;
    fn cuFuncSetAttribute(
        function: cuda::CUfunction, which: cuda::CUfunction_attribute, value: c_int
    ) -> CallStatus;
    fn cuLaunchKernel(
        function: cuda::CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: cuda::CUstream,
        arguments: *mut *mut c_void, extra: *mut *mut c_void
    ) -> CallStatus;
}

// `*_ASKED`: functions that not every version has. Callers check for them first.
functions! { library::DRIVER, DRIVER_ASKED:
    fn cuModuleGetFunctionCount(count: *mut c_uint, module: cuda::CUmodule) -> CallStatus;
    fn cuModuleEnumerateFunctions(
        functions: *mut cuda::CUfunction, count: c_uint, module: cuda::CUmodule
    ) -> CallStatus;
    fn cuFuncLoad(function: cuda::CUfunction) -> CallStatus;
    fn cuFuncGetParamInfo(
        function: cuda::CUfunction, index: usize, offset: *mut usize, bytes: *mut usize
    ) -> CallStatus;
    // For benchmarks alone: the framework shows no events to other processes.
    fn cuIpcGetEventHandle(handle: *mut cuda::CUipcEventHandle, event: cuda::CUevent) -> CallStatus;
    fn cuIpcOpenEventHandle(
        event: *mut cuda::CUevent, handle: cuda::CUipcEventHandle
    ) -> CallStatus;
}

functions! { library::NVRTC, NVRTC:
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> CallStatus;
    fn nvrtcGetErrorString(answer: CallStatus) -> *const c_char;
    fn nvrtcCreateProgram(
        program: *mut nvrtc::nvrtcProgram, source: *const c_char, name: *const c_char,
        headers: c_int, texts: *const *const c_char, names: *const *const c_char
    ) -> CallStatus;
    fn nvrtcDestroyProgram(program: *mut nvrtc::nvrtcProgram) -> CallStatus;
    fn nvrtcCompileProgram(
        program: nvrtc::nvrtcProgram, count: c_int, options: *const *const c_char
    ) -> CallStatus;
    fn nvrtcGetCUBINSize(program: nvrtc::nvrtcProgram, bytes: *mut usize) -> CallStatus;
    fn nvrtcGetCUBIN(program: nvrtc::nvrtcProgram, binary: *mut c_char) -> CallStatus;
    fn nvrtcGetPTXSize(program: nvrtc::nvrtcProgram, bytes: *mut usize) -> CallStatus;
    fn nvrtcGetPTX(program: nvrtc::nvrtcProgram, text: *mut c_char) -> CallStatus;
    fn nvrtcGetProgramLogSize(program: nvrtc::nvrtcProgram, bytes: *mut usize) -> CallStatus;
    fn nvrtcGetProgramLog(program: nvrtc::nvrtcProgram, text: *mut c_char) -> CallStatus;
}

functions! { library::NVRTC, NVRTC_ASKED:
    fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> CallStatus;
    fn nvrtcGetSupportedArchs(all: *mut c_int) -> CallStatus;
}

functions! { library::CUBLAS, CUBLAS:
    fn cublasGetStatusName(answer: CallStatus) -> *const c_char;
    fn cublasGetStatusString(answer: CallStatus) -> *const c_char;
    fn cublasCreate_v2(handle: *mut cublas::cublasHandle_t) -> CallStatus;
    fn cublasDestroy_v2(handle: cublas::cublasHandle_t) -> CallStatus;
    fn cublasSetStream_v2(
        handle: cublas::cublasHandle_t, stream: cublas::cudaStream_t
    ) -> CallStatus;
    fn cublasSetWorkspace_v2(
        handle: cublas::cublasHandle_t, memory: *mut c_void, bytes: usize
    ) -> CallStatus;
    fn cublasSetMathMode(handle: cublas::cublasHandle_t, mode: cublas::cublasMath_t) -> CallStatus;
    fn cublasGemmEx(
        handle: cublas::cublasHandle_t, a_op: cublas::cublasOperation_t,
        b_op: cublas::cublasOperation_t, m: c_int, n: c_int, k: c_int, alpha: *const c_void,
        a: *const c_void, a_type: cublas::cudaDataType, a_leading: c_int, b: *const c_void,
        b_type: cublas::cudaDataType, b_leading: c_int, beta: *const c_void, c: *mut c_void,
        c_type: cublas::cudaDataType, c_leading: c_int, compute: cublas::cublasComputeType_t,
        algorithm: cublas::cublasGemmAlgo_t
    ) -> CallStatus;
    fn cublasGemmStridedBatchedEx(
        handle: cublas::cublasHandle_t, a_op: cublas::cublasOperation_t,
        b_op: cublas::cublasOperation_t, m: c_int, n: c_int, k: c_int, alpha: *const c_void,
        a: *const c_void, a_type: cublas::cudaDataType, a_leading: c_int, a_stride: c_longlong,
        b: *const c_void, b_type: cublas::cudaDataType, b_leading: c_int, b_stride: c_longlong,
        beta: *const c_void, c: *mut c_void, c_type: cublas::cudaDataType, c_leading: c_int,
        c_stride: c_longlong, count: c_int, compute: cublas::cublasComputeType_t,
        algorithm: cublas::cublasGemmAlgo_t
    ) -> CallStatus;
}

functions! { library::CUBLAS, CUBLAS_ASKED:
    fn cublasGetProperty(which: cublas::libraryPropertyType, value: *mut c_int) -> CallStatus;
}
