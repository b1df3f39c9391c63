//! Loads NCCL's functions once, and converts its status codes, dtypes and reductions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclUniqueId};
use libloading::Library;

use super::super::error::CudaError;
use crate::collective::Reduce;
use mpmd_layout::aval::DType;

/// The status of a successful call.
pub(super) const SUCCESS: u32 = 0;
/// The status of a call that continues in the background. The communicator reports its result.
pub(super) const IN_PROGRESS: u32 = 7;

/// Declares functions of NCCL: a list of their names and a struct of function pointers.
///
/// It replaces `cudarc`'s functions, which panic if one is missing. They also read a status as an
/// enumeration of their own NCCL version, but a newer library may return other values.
macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        /// Names of the functions that NCCL's library must have.
        pub(crate) const SYMBOLS: &[&str] = &["ncclGetVersion", $(stringify!($name)),*];

        /// Pointers to NCCL's functions of these names.
        #[expect(non_snake_case, reason = "NCCL's own names")]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument: $type),*) -> $answer,)*
        }

        fn load() -> Result<Functions, CudaError> {
            let missing = |why: String| CudaError::new(DOING, "", why);
            super::super::driver::nccl().map_err(|error| missing(error.to_string()))?;
            let cannot_load = || missing("the library cannot be loaded".to_owned());
            let library = library().ok_or_else(cannot_load)?;
            // SAFETY: their types are those of `cudarc`'s bindings, but for the answers, which are
            // numbers.
            unsafe {
                Ok(Functions {
                    $($name: *library
                        .get(stringify!($name).as_bytes())
                        .map_err(|error| missing(error.to_string()))?,)*
                })
            }
        }
    };
}

functions! {
    fn ncclGetUniqueId(id: *mut ncclUniqueId) -> u32;
    fn ncclCommInitRankConfig(
        communicator: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int,
        config: *mut ncclConfig_t
    ) -> u32;
    fn ncclCommGetAsyncError(communicator: ncclComm_t, state: *mut u32) -> u32;
    fn ncclCommFinalize(communicator: ncclComm_t) -> u32;
    fn ncclCommDestroy(communicator: ncclComm_t) -> u32;
    fn ncclCommAbort(communicator: ncclComm_t) -> u32;
    fn ncclAllReduce(
        from: *const c_void, to: *mut c_void, count: usize, dtype: u32, reduce: u32,
        communicator: ncclComm_t, stream: cudaStream_t
    ) -> u32;
    fn ncclReduceScatter(
        from: *const c_void, to: *mut c_void, count: usize, dtype: u32, reduce: u32,
        communicator: ncclComm_t, stream: cudaStream_t
    ) -> u32;
    fn ncclAllGather(
        from: *const c_void, to: *mut c_void, count: usize, dtype: u32, communicator: ncclComm_t,
        stream: cudaStream_t
    ) -> u32;
    fn ncclBroadcast(
        from: *const c_void, to: *mut c_void, count: usize, dtype: u32, root: c_int,
        communicator: ncclComm_t, stream: cudaStream_t
    ) -> u32;
    fn ncclSend(
        from: *const c_void, count: usize, dtype: u32, peer: c_int, communicator: ncclComm_t,
        stream: cudaStream_t
    ) -> u32;
    fn ncclRecv(
        to: *mut c_void, count: usize, dtype: u32, peer: c_int, communicator: ncclComm_t,
        stream: cudaStream_t
    ) -> u32;
    fn ncclGroupStart() -> u32;
    fn ncclGroupEnd() -> u32;
    fn ncclGetErrorString(answer: u32) -> *const c_char;
    fn ncclGetLastError(communicator: ncclComm_t) -> *const c_char;
}

/// File names of NCCL's library, tried in this order. `cudarc` knows only the second, which comes
/// with NCCL's headers.
pub(crate) const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Returns NCCL's library, loaded at the first call. `None` if there is none.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    // SAFETY: loading a library runs its initialisers. Only NCCL has these names, and its
    // initialisers are made to run in any program. A user able to put another file of such a name
    // into the loader's path controls the process anyway.
    let load = || NAMES.into_iter().find_map(|name| unsafe { Library::new(name) }.ok());
    LIBRARY.get_or_init(load).as_ref()
}

/// Returns NCCL's version as its number: 22203 is 2.22.3.
pub(crate) fn version(library: &Library) -> Result<i32, CudaError> {
    let refused = |why: String| CudaError::new("asking NCCL for its version", "", why);
    let mut number = 0;
    // SAFETY: the type is that of NCCL's header; it writes one number, for which there is room.
    let answer = unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut c_int) -> u32>(b"ncclGetVersion");
        ask.map_err(|error| refused(error.to_string()))?(&raw mut number)
    };
    if answer == SUCCESS { Ok(number) } else { Err(refused(name(answer))) }
}

/// The operation that errors name if NCCL cannot be loaded.
const DOING: &str = "making NCCL ready";

/// Returns NCCL's functions, loaded at the first call.
///
/// # Errors
///
/// If NCCL is missing or lacks some of them.
pub(super) fn functions() -> Result<&'static Functions, CudaError> {
    static FUNCTIONS: OnceLock<Result<Functions, CudaError>> = OnceLock::new();
    FUNCTIONS.get_or_init(load).as_ref().map_err(CudaError::clone)
}

impl Functions {
    /// Returns an error if `answer` is an error status of NCCL; `doing` names the operation in it.
    /// A call that continues in the background is no error.
    ///
    /// # Safety
    ///
    /// The communicator must be alive, or null.
    pub(super) unsafe fn check(
        &self,
        doing: &str,
        answer: u32,
        communicator: ncclComm_t,
    ) -> Result<(), CudaError> {
        if matches!(answer, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        let text = |text: *const c_char| {
            // SAFETY: NCCL's texts end with a zero, and stay until its next call on this thread at
            // least.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
            text.map(|text| text.to_string_lossy().trim().to_owned()).unwrap_or_default()
        };
        // SAFETY: a number of NCCL's own, and a communicator that is alive or null, both of which
        // it takes.
        let (text, last) = unsafe {
            (text((self.ncclGetErrorString)(answer)), text((self.ncclGetLastError)(communicator)))
        };
        let last = if last.is_empty() { text } else { format!("{text}: {last}") };
        Err(CudaError::new(doing, name(answer), last))
    }
}

/// Returns the name of a status, as in NCCL's header.
fn name(answer: u32) -> String {
    const NAMES: [&str; 9] = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ];
    NAMES
        .get(answer as usize)
        .map_or_else(|| format!("NCCL error {answer}"), |name| (*name).to_owned())
}

/// Returns NCCL's number for a dtype. `None` if NCCL does not have it.
pub(super) fn data_type(dtype: DType) -> Option<u32> {
    use cudarc::nccl::sys::ncclDataType_t as Type;
    let found = match dtype {
        DType::I8 => Type::ncclInt8,
        DType::U8 => Type::ncclUint8,
        DType::I32 => Type::ncclInt32,
        DType::U32 => Type::ncclUint32,
        DType::I64 => Type::ncclInt64,
        DType::U64 => Type::ncclUint64,
        DType::F16 => Type::ncclFloat16,
        DType::F32 => Type::ncclFloat32,
        DType::F64 => Type::ncclFloat64,
        DType::Bf16 => Type::ncclBfloat16,
        DType::Bool | DType::I16 | DType::U16 | DType::C64 | DType::C128 | DType::Object => {
            return None;
        }
    };
    Some(found as u32)
}

/// Returns NCCL's number for a reduction.
pub(super) fn operation(reduce: Reduce) -> u32 {
    use cudarc::nccl::sys::ncclRedOp_t as Operation;
    let operation = match reduce {
        Reduce::Sum => Operation::ncclSum,
        Reduce::Max => Operation::ncclMax,
        Reduce::Min => Operation::ncclMin,
    };
    operation as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_type_numbers_exist_exactly_for_nccl_dtypes() {
        use DType::*;
        for dtype in [Bool, I8, I16, I32, I64, U8, U16, U32, U64, Bf16, F16, F32, F64, C64, C128] {
            assert_eq!(data_type(dtype).is_some(), crate::cuda::nccl_has(dtype), "{dtype}");
        }
        assert_eq!([F32, Bf16].map(data_type), [Some(7), Some(9)]);
        assert_eq!([Reduce::Sum, Reduce::Max, Reduce::Min].map(operation), [0, 2, 3]);
    }

    #[test]
    fn unknown_statuses_are_named_by_number() {
        assert_eq!(
            (name(5), name(42)),
            ("ncclInvalidUsage".to_owned(), "NCCL error 42".to_owned())
        );
        assert!(SYMBOLS.contains(&"ncclCommAbort") && SYMBOLS.contains(&"ncclGetVersion"));
    }
}
