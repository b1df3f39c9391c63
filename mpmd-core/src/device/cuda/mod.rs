//! The CUDA back end: devices that are graphics processors.
//!
//! Built with the feature `cuda`, through `cudarc`, which loads CUDA's libraries when they are
//! first used: a program built with it runs where there is no CUDA, as long as it asks for no such
//! device. Without the feature everything here has the same names and a `Gpu` that cannot be.
//!
//! A `Gpu` has *lines*: queues of its own work, one for kernels and one for each direction of
//! copies. Work is issued to a line by any thread, at once, and runs later, in order. What uses
//! memory that another line uses is told to come after it
//! ([`Fences`](mpmd_transport::memory::Fences)); nobody waits for that but the device. Each line
//! has a thread that waits for the ends of what was issued, and tells who wants to know; no other
//! thread of the program ever does, but a device's own in a kernel with collectives (`Turn::wait`).

#[cfg(not(feature = "cuda"))]
mod absent;
mod asked;
#[cfg(feature = "cuda")]
mod blas;
#[cfg(feature = "cuda")]
mod cache;
#[cfg(feature = "cuda")]
mod calls;
#[cfg(feature = "cuda")]
mod clock;
#[cfg(feature = "cuda")]
mod compile;
#[cfg(feature = "cuda")]
mod copy;
pub(crate) mod driver;
mod error;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod ipc;
pub(crate) mod kernels;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod line;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod module;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(feature = "cuda")]
mod orphan;
#[cfg(feature = "cuda")]
pub mod plain;
#[cfg(feature = "cuda")]
mod turn;
#[cfg(feature = "cuda")]
mod warm;

pub mod source;
pub(crate) mod spare;
pub mod work;

use mpmd_layout::region::Region;

#[cfg(not(feature = "cuda"))]
pub(crate) use absent::{
    Communicator, Communicators, Ending, Gpu, Stream, Turn, WarmUp, new_id, reach_each_other,
    sharing,
};
pub(crate) use asked::{CommunicatorId, Joint, NotJoined, Operand, Product, RawArg};
pub use driver::{
    Attributes, Driver, Gpu as GpuInfo, NoCuda, OLDEST, Uuid, Version, cublas, found, nccl, nvrtc,
};
pub use error::CudaError;
#[cfg(feature = "cuda")]
pub(crate) use gpu::{Gpu, reach_each_other};
#[cfg(feature = "cuda")]
pub(crate) use ipc::sharing;
#[cfg(feature = "cuda")]
pub(crate) use line::Stream;
#[cfg(feature = "cuda")]
pub(crate) use nccl::library::{
    NAMES as NCCL_NAMES, SYMBOLS as NCCL_SYMBOLS, library as nccl_library,
    version as nccl_version_of,
};
#[cfg(feature = "cuda")]
pub(crate) use nccl::{Communicator, Communicators, new_id};
#[cfg(feature = "cuda")]
pub(crate) use turn::{Ending, Turn};
#[cfg(feature = "cuda")]
pub(crate) use warm::WarmUp;

/// Which elements a copy moves, between which regions: as for
/// [`copy_region`](crate::device::copy::copy_region).
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for devices, and there are none"))]
pub(crate) struct Part<'a> {
    /// What the bytes that are read are of.
    pub(crate) from: &'a Region,
    /// What the bytes that are written are of.
    pub(crate) to: &'a Region,
    /// The elements, within both.
    pub(crate) piece: &'a Region,
    pub(crate) item_bytes: usize,
}

/// Called with how work of a line ended, on the line's thread: it must be short.
pub(crate) type Then = Box<dyn FnOnce(Result<(), CudaError>) + Send>;

/// How work of a line ended.
pub(crate) struct Ended {
    /// What went wrong while it was issued or when it ran.
    pub(crate) result: Result<(), CudaError>,
    /// When it ran, where [somebody wants to know](Gpu::keep_time).
    pub(crate) times: Option<Times>,
}

/// When work of a line ran, by the clock that it was given: in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// When the work before it on the line ended.
    pub(crate) before: u64,
    pub(crate) begin: u64,
    pub(crate) end: u64,
}
