//! NCCL's functions and types, as its header declares them except for the statuses, which are
//! numbers here ([`calls`](super::super::calls)). Converts statuses, dtypes and reductions.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::super::calls::functions;
use super::super::error::CudaError;
use super::super::library::NCCL;
use super::super::no_cuda::NoCuda;
use crate::collective::Reduce;
use mpmd_layout::aval::DType;

/// The status of a successful call.
pub(super) const SUCCESS: u32 = 0;
/// The status of a call that continues in the background. The communicator reports the final
/// status.
pub(super) const IN_PROGRESS: u32 = 7;

/// A handle of an NCCL communicator, an opaque pointer.
pub(super) type RawCommunicator = *mut c_void;

/// A CUDA stream, as NCCL's header declares it.
type RawStream = *mut c_void;

/// The id that all ranks of a group pass to create their communicators.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId {
    pub(super) internal: [c_char; 128],
}

/// The configuration of a communicator in NCCL 2.14. Newer libraries use defaults for fields that
/// were added later.
#[repr(C)]
pub(super) struct NcclConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// A field of later NCCL versions. In version 2.14 it is padding.
    cga_cluster_size: c_int,
}

impl NcclConfig {
    /// Returns a configuration for non-blocking calls, with NCCL's defaults for the rest.
    pub(super) fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_400,
            blocking: 0,
            // NCCL's mark of an undefined value.
            cga_cluster_size: c_int::MIN,
        }
    }
}

functions! { NCCL, SYMBOLS:
    fn ncclGetVersion(version: *mut c_int) -> u32;
    fn ncclGetUniqueId(id: *mut UniqueId) -> u32;
    fn ncclCommInitRankConfig(
        communicator: *mut RawCommunicator, ranks: c_int, id: UniqueId, rank: c_int,
        config: *mut NcclConfig
    ) -> u32;
    fn ncclCommGetAsyncError(communicator: RawCommunicator, state: *mut u32) -> u32;
    fn ncclCommFinalize(communicator: RawCommunicator) -> u32;
    fn ncclCommDestroy(communicator: RawCommunicator) -> u32;
    fn ncclCommAbort(communicator: RawCommunicator) -> u32;
    fn ncclAllReduce(
        from: *const c_void, to: *mut c_void, count: usize, dtype: u32, reduce: u32,
        communicator: RawCommunicator, stream: RawStream
    ) -> u32;
    fn ncclReduceScatter(
        from: *const c_void, to: *mut c_void, count: usize, dtype: u32, reduce: u32,
        communicator: RawCommunicator, stream: RawStream
    ) -> u32;
    fn ncclAllGather(
        from: *const c_void, to: *mut c_void, count: usize, dtype: u32,
        communicator: RawCommunicator, stream: RawStream
    ) -> u32;
    fn ncclSend(
        from: *const c_void, count: usize, dtype: u32, peer: c_int, communicator: RawCommunicator,
        stream: RawStream
    ) -> u32;
    fn ncclRecv(
        to: *mut c_void, count: usize, dtype: u32, peer: c_int, communicator: RawCommunicator,
        stream: RawStream
    ) -> u32;
    fn ncclGroupStart() -> u32;
    fn ncclGroupEnd() -> u32;
    fn ncclGetErrorString(answer: u32) -> *const c_char;
    fn ncclGetLastError(communicator: RawCommunicator) -> *const c_char;
}

/// Returns NCCL's version as a number: 22203 is 2.22.3. Loads NCCL if it is not loaded yet.
///
/// # Errors
///
/// If NCCL is missing or lacks some functions.
pub(crate) fn version() -> Result<i32, NoCuda> {
    NCCL.check(SYMBOLS)?;
    let mut number = 0;
    // SAFETY: it writes one number, for which there is room.
    match unsafe { ncclGetVersion(&raw mut number) } {
        SUCCESS => Ok(number),
        answer => Err(NCCL.refused("ncclGetVersion", answer)),
    }
}

/// Loads NCCL at the first call, and checks that it has all needed functions.
///
/// # Errors
///
/// If NCCL is missing or lacks some functions.
pub(super) fn ready() -> Result<(), CudaError> {
    NCCL.check(SYMBOLS)
        .map_err(|error| CudaError::new("making NCCL ready", "", error.to_string()))
}

/// Returns an error if `answer` is an error status of NCCL. The error names the operation `doing`.
/// The status [`IN_PROGRESS`] is no error.
///
/// # Safety
///
/// The communicator must be alive, or null.
pub(super) unsafe fn check(
    doing: &str,
    answer: u32,
    communicator: RawCommunicator,
) -> Result<(), CudaError> {
    if matches!(answer, SUCCESS | IN_PROGRESS) {
        return Ok(());
    }
    let text = |text: *const c_char| {
        // SAFETY: NCCL's texts end with a zero, and stay until its next call on this thread at
        // least.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
        text.map(|text| text.to_string_lossy().trim().to_owned())
            .unwrap_or_default()
    };

    // SAFETY: a number of NCCL's own, and a communicator that is alive or null, both of which
    // it takes.
    let (text, last) = unsafe {
        (
            text(ncclGetErrorString(answer)),
            text(ncclGetLastError(communicator)),
        )
    };

    let last = if last.is_empty() {
        text
    } else {
        format!("{text}: {last}")
    };
    Err(CudaError::new(doing, name(answer), last))
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

/// Returns NCCL's number for a dtype; `None` if NCCL lacks the dtype.
pub(super) fn data_type(dtype: DType) -> Option<u32> {
    match dtype {
        DType::I8 => Some(0),
        DType::U8 => Some(1),
        DType::I32 => Some(2),
        DType::U32 => Some(3),
        DType::I64 => Some(4),
        DType::U64 => Some(5),
        DType::F16 => Some(6),
        DType::F32 => Some(7),
        DType::F64 => Some(8),
        DType::Bf16 => Some(9),
        DType::Bool | DType::I16 | DType::U16 | DType::C64 | DType::C128 | DType::Object => None,
    }
}

/// Returns NCCL's number for a reduction.
pub(super) fn operation(reduce: Reduce) -> u32 {
    match reduce {
        Reduce::Sum => 0,
        Reduce::Max => 2,
        Reduce::Min => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_types_and_operations_have_nccls_numbers() {
        use DType::*;
        assert!(
            [Bool, I16, U16, C64, C128]
                .into_iter()
                .all(|dtype| data_type(dtype).is_none())
        );
        assert_eq!([F32, Bf16].map(data_type), [Some(7), Some(9)]);
        assert_eq!(
            [Reduce::Sum, Reduce::Max, Reduce::Min].map(operation),
            [0, 2, 3]
        );
    }

    #[test]
    fn configuration_is_non_blocking_in_the_2_14_layout() {
        let NcclConfig {
            size,
            magic,
            version,
            blocking,
            ..
        } = NcclConfig::non_blocking();
        assert_eq!(
            (size, magic, version, blocking),
            (24, 0xcafe_beef, 21_400, 0)
        );
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
