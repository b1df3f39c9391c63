//! A CUDA driver in software, for tests: not a GPU, and no timing of it means anything.
//!
//! A program finds it as it would find CUDA: `libcuda.so`, `libnvrtc.so`, `libcublas.so` and
//! `libnccl.so` in `LD_LIBRARY_PATH`, all of them links to this one library. Device memory is
//! memory of the process that the host cannot touch; streams are threads; kernels are C++, compiled
//! for the CPU as they are. So results are true, and what CUDA forbids is found:
//!
//! * Work is asynchronous where CUDA's is, and only there. What goes wrong in a stream comes back
//!   later, from every call on the context (the first error stays, as on a GPU); wrong arguments
//!   come back at once.
//! * A host access to device memory faults. A kernel's access beyond an allocation, or through a
//!   pointer that is none, ends the kernel with `CUDA_ERROR_ILLEGAL_ADDRESS`, as does a copy or a
//!   product of matrices. Fresh memory is full of `0xCD`.
//! * Handles of memory and events go between processes. Memory in a stream's order
//!   (`cuMemAllocAsync`) is refused. What its owner frees while others have it open is `0xDD`
//!   there. Where CUDA's documentation leaves open what happens when the exporter dies: what is
//!   open stays open, what is not cannot be opened (`CUDA_ERROR_INVALID_HANDLE`), and a wait for
//!   its event ends.
//! * Ranks of NCCL are threads of one process or of several of a machine. They wait in their
//!   streams for each other, also for one that has died, until their communicators are aborted; two
//!   on one device are refused.
//! * Two streams that use the same bytes with nothing that orders them are found: see
//!   [`Driver::races`]. Copies, fills and products are looked at by themselves. A kernel is where
//!   its program tells what it uses before the launch, by the function `softcuda_note_use(stream,
//!   address, bytes, write)` of `libcuda.so`, where there is one.
//!
//! # In a test
//!
//! ```no_run
//! # fn test() {
//! if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
//!     return;
//! }
//! // Here the driver is found, and has two devices; once it was used, it can be asked.
//! let copied = softcuda::bytes("device_to_device");
//! # }
//! ```
//!
//! Tests that start programs call [`install`] and [`environment`] instead. The library is built
//! with a package that has this one among its (dev-)dependencies; a program started by hand needs
//! `cargo build -p softcuda`.
//!
//! # Settings, by environment
//!
//! | variable | meaning | without it |
//! | --- | --- | --- |
//! | `SOFTCUDA_DEVICES` | devices there are; with 0 there is a driver but no device | 1 |
//! | `SOFTCUDA_MEMORY` | bytes of each device, counted in each process by itself | 4 GiB |
//! | `SOFTCUDA_PACE` | `eager`; `lazy` or `lazy:<ms>`: a stream does nothing until somebody waits for it or asks, or a second (or as long as said) has gone by, so that a wait that is missing shows; `seed:<n>`: random short pauses | `eager` |
//! | `SOFTCUDA_FAIL` | `<what>:<nth>`, several with commas: the n-th of alloc, alloc_host, copy, launch, event, stream, compile fails, the copy or launch as it is done; or of calls of a function, by its C name, `cuIpcOpenMemHandle_v2:1`, which fails at once, `cuInit=4242:1` with this code | nothing fails |
//! | `SOFTCUDA_RACES` | `count`, or `abort` to end the process at a race | `count` |
//! | `SOFTCUDA_CXX` | the C++ compiler for kernels | `c++` |
//! | `SOFTCUDA_CACHE` | a folder for compiled kernels; [`environment`] names one beside the driver | every process compiles its kernels |
//!
//! # What is weaker than a GPU's driver, or stricter
//!
//! * Only what this driver's own NVRTC compiled can be loaded; PTX by hand is refused. Kernels may
//!   include `cuda_fp16.h` and `cuda_bf16.h`, of which the conversions are there. Global variables
//!   of modules have no address, and shared memory that is declared with a size counts for nothing
//!   in the limits of a launch.
//! * `cuMemFree` does not wait for work that uses the memory: such work then fails.
//! * A kernel that reads pageable host memory gets away with it if the address is not an argument
//!   by itself.
//! * NCCL has its collectives, sends and receives, but no more than 16 ranks, and no communicators
//!   made from others.
//! * The legacy default stream is there, that of each thread is not; nor are graphs, arrays,
//!   managed memory, virtual memory management and memory pools beyond the default one.
//! * A block's threads run one after another until one waits for others: code that spins on another
//!   thread of the block never ends.

mod alloc;
mod blas;
mod channel;
mod collect;
mod compile;
mod control;
mod copy;
mod counters;
mod device;
mod entry;
mod error;
mod event;
mod faults;
mod gemm;
mod handles;
mod harness;
mod host;
mod ipc;
mod launch;
mod mapped;
mod memory;
mod module;
mod nccl;
mod nvrtc;
mod races;
mod settings;
mod shared_event;
mod source;
mod stream;

pub use control::{Driver, bytes, calls, driver};
pub use harness::{environment, install, library, real, run_again};
