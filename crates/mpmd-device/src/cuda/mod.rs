//! The CUDA back end: devices that are graphics processors.
//!
//! The back end loads CUDA's libraries at their first use (`library.rs`). A program also runs on a
//! machine without CUDA, unless it asks for a CUDA device.
//!
//! A `Gpu` has three streams (`Stream`): one for kernels and one for each direction of copies. Any
//! thread may issue work to a stream. Issuing does not wait for the device; the work runs later, in
//! order. When work uses memory that another stream uses, the device orders it after that use
//! ([`Fences`](mpmd_memory::Fences)). No host thread waits for this.
//!
//! Each stream has a waiter thread, which waits for the ends of issued work and calls the
//! completion callbacks. Only one other thread ever waits for device work: a device's own thread,
//! in a kernel with collectives (`StreamTurn::wait`).
//!
//! # Streams, fences, issued buffers
//!
//! A device does its work later, in its own order. Three things carry this:
//!
//! - *Streams* (`stream.rs`): a CUDA stream and its waiter thread. Work is issued behind given
//!   fences and behind all earlier work of the stream; the issuer gets a new fence. The waiter
//!   thread sleeps until the event behind the work has come, and reports the result.
//! - *Fences* (`mpmd-transport/src/memory/fence.rs`): memory carries the last issued work that uses
//!   it. New work runs behind these fences, on the device. Dropped memory returns to its pool when
//!   its fences are over, without blocking. A new owner of memory that is still read writes behind
//!   the readers. Memory that only the host uses has no fences.
//! - *Issued buffers* (`exec/waits/async_buffer/`): a shard's buffer is there as soon as the work
//!   that fills it was issued. Issuers of device work take it then. All others (CPU kernels,
//!   transports, readers) see it end when the work has ended. So the program's thread issues a
//!   whole step without waiting, and an error of the device becomes the failure of the operation
//!   that caused it.
//!
//! Blocks come from pools like the host's, carved from segments that `cuMemAlloc` gave
//! (`memory.rs`, `mpmd-transport/src/memory/device.rs`): the same order of reservations, limits and
//! counters. There is no memory from CUDA's stream-ordered allocator, since other processes cannot
//! open it, and no default stream. Segments of host memory are pinned as they are mapped
//! (`Arena::on_map`), so copies from a pool's memory need no staging. Other host memory goes in
//! chunks through pinned staging (`exec/moves/chunks.rs`).
//!
//! # The path of a call and of a move
//!
//! In `mpmd-core`, `api/jit/on_cuda.rs` takes the inputs as they are issued and runs the kernel,
//! which launches and multiplies through `Context::cuda` (`kernel/cuda/`). Sources are prepared
//! when the kernel is bound to its mesh (`api/jit/warm.rs`, `prepare.rs`). Copies by region are in
//! `copy.rs`, the assembly of shards in `exec/moves/assembly/device.rs`. A piece for a process that
//! does not take device memory is copied to pinned memory as a whole and sent from there.
//! `exec/moves/reach.rs` alone decides how two processes exchange device memory.
//!
//! # Failures
//!
//! A device never waits for the device of another process, which may die first: CUDA does not say
//! that such a wait ends. A process lends memory once its own work on it has ended. With
//! `CudaCollectives::Nccl` an error after the first NCCL call fails the whole job
//! (`Runtime::fail_job`), because the other devices wait for this one and cannot learn of it. A job
//! that fails or loses a process gives up all communicators.

mod blas;
mod calls;
mod compile;
mod context;
mod copy;
mod descriptions;
mod device_room;
pub mod direct;
pub(crate) mod driver;
mod error;
mod first_uses;
mod foreign_stream;
mod gpu;
mod ipc;
mod ipc_tables;
pub mod kernels;
mod launch;
mod library;
mod memory;
mod module;
mod nccl;
mod no_cuda;
mod prepare;
mod stream;
mod stream_clock;
mod stream_turn;

pub mod source;
pub mod spare_blocks;
pub mod work;

use mpmd_layout::region::Region;

pub use descriptions::{CommunicatorId, CublasProduct, Joint, NotJoined, Operand, RawArg};
pub use device_room::DeviceRoom;
pub use driver::{Attributes, Driver, GpuInfo, Uuid, cublas, found, nccl, nvrtc};
pub use error::CudaError;
pub use first_uses::{FirstUseError, FirstUses, first_uses};
pub use foreign_stream::ForeignHandle;
pub use gpu::{Gpu, reach_each_other};
pub use ipc::sharing;
pub use nccl::{Communicator, Communicators, nccl_has, new_id};
pub use no_cuda::{CudaVersion, NoCuda, OLDEST};
pub use stream::{RawStream, Stream};
pub use stream_turn::{StreamTurn, WorkEnding};

/// A region to copy, with the regions of the source and target buffers. See
/// [`copy_region`](crate::copy::copy_region).
#[derive(Clone, Copy)]
pub struct RegionCopy<'a> {
    /// The region that the source buffer holds.
    pub from: &'a Region,
    /// The region that the target buffer holds.
    pub to: &'a Region,
    /// The region to copy, which is within both buffers' regions.
    pub piece: &'a Region,
    /// Number of bytes per element.
    pub item_bytes: usize,
}

/// A callback that receives the result of work on a stream. It runs on the stream's waiter thread
/// and must be fast.
pub type Then = Box<dyn FnOnce(Result<(), CudaError>) + Send>;

/// The result and the times of work on a stream.
pub struct WorkOutcome {
    /// The first error of issuing or running the work.
    pub result: Result<(), CudaError>,
    /// The times of the work, if [`Gpu::keep_time`] was called and the work succeeded.
    pub times: Option<WorkTimes>,
}

/// The times of work on a stream, in nanoseconds of the clock given to [`Gpu::keep_time`].
#[derive(Clone, Copy, Debug)]
pub struct WorkTimes {
    /// The time at which the preceding work on the stream ended.
    pub before: u64,
    /// The time at which the work began.
    pub begin: u64,
    /// The time at which the work ended.
    pub end: u64,
}
