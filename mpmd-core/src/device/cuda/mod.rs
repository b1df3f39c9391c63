//! The CUDA back end: devices that are graphics processors.
//!
//! With the feature `cuda`, the back end calls CUDA through `cudarc`, which loads CUDA's libraries
//! at their first use. Such a program also runs on a machine without CUDA, unless it asks for a
//! CUDA device. Without the feature, this module exports the same names and a `Gpu` that cannot be
//! constructed.
//!
//! A `Gpu` has three streams (`Stream`): one for kernels and one for each direction of copies. Any
//! thread may issue work to a stream. Issuing does not wait for the device; the work runs later, in
//! order. When work uses memory that another stream uses, the device orders it after that use
//! ([`Fences`](mpmd_transport::memory::Fences)). No host thread waits for this.
//!
//! Each stream has a waiter thread, which waits for the ends of issued work and calls the
//! completion callbacks. Only one other thread ever waits for device work: a device's own thread,
//! in a kernel with collectives (`StreamTurn::wait`).

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
mod stream;
#[cfg(feature = "cuda")]
mod stream_turn;
#[cfg(feature = "cuda")]
mod warm;

pub mod source;
pub(crate) mod spare;
pub mod work;

use mpmd_layout::region::Region;

#[cfg(not(feature = "cuda"))]
pub(crate) use absent::{
    Communicator, Communicators, Ending, Gpu, RawStream, StreamTurn, WarmUp, new_id,
    reach_each_other, sharing,
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
pub(crate) use nccl::library::{
    NAMES as NCCL_NAMES, SYMBOLS as NCCL_SYMBOLS, library as nccl_library,
    version as nccl_version_of,
};
#[cfg(feature = "cuda")]
pub(crate) use nccl::{Communicator, Communicators, new_id};
#[cfg(feature = "cuda")]
pub(crate) use stream::RawStream;
#[cfg(feature = "cuda")]
pub(crate) use stream_turn::{Ending, StreamTurn};
#[cfg(feature = "cuda")]
pub(crate) use warm::WarmUp;

/// The elements that a copy moves, and the regions of the source and target buffers. See
/// [`copy_region`](crate::device::copy::copy_region).
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for devices, and there are none"))]
pub(crate) struct Part<'a> {
    /// The region that the source buffer holds.
    pub(crate) from: &'a Region,
    /// The region that the target buffer holds.
    pub(crate) to: &'a Region,
    /// The elements to copy: a region within both.
    pub(crate) piece: &'a Region,
    pub(crate) item_bytes: usize,
}

/// A callback that receives the result of work on a stream. It runs on the stream's waiter thread
/// and must be short.
pub(crate) type Then = Box<dyn FnOnce(Result<(), CudaError>) + Send>;

/// The result and the times of work on a stream.
pub(crate) struct Ended {
    /// The first error from issuing the work or from running it.
    pub(crate) result: Result<(), CudaError>,
    /// The times of the work, if [`Gpu::keep_time`] was called.
    pub(crate) times: Option<Times>,
}

/// The times of work on a stream, in nanoseconds of the clock given to [`Gpu::keep_time`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The end of the preceding work on the stream.
    pub(crate) before: u64,
    pub(crate) begin: u64,
    pub(crate) end: u64,
}
