//! A CUDA driver in software, for tests. It is not a GPU, and its timing means nothing.
//!
//! A program finds it as it would find CUDA: as `libcuda.so.1`, `libnvrtc.so.13`,
//! `libcublas.so.13` and `libnccl.so.2` in `LD_LIBRARY_PATH`. All four are links to this one
//! library. Device memory is memory of the process that the host cannot access. Streams are
//! threads. Kernels are C++ sources, compiled unchanged for the CPU. So results are real, and wrong
//! uses of CUDA are detected:
//!
//! * Work is asynchronous exactly where CUDA's is. An error in a stream is returned later, by every
//!   call on the context; the first error stays, as on a GPU. Wrong arguments are refused at once.
//! * A host access to device memory faults. A kernel's access outside allocations ends the kernel
//!   with `CUDA_ERROR_ILLEGAL_ADDRESS`. So does such an access of a copy or a matrix product. New
//!   memory is filled with `0xCD`.
//! * Handles of memory and events can be sent to other processes. Stream-ordered memory
//!   (`cuMemAllocAsync`) cannot be exported. If the owner frees memory that others have open, they
//!   read `0xDD` there. CUDA's documentation does not define the death of the exporter. Here, open
//!   memory stays open, and a wait for its event ends (see `SOFTCUDA_ORPHANS`). Opening its handles
//!   fails (`CUDA_ERROR_INVALID_HANDLE`).
//! * Ranks of NCCL are threads of one process or of several processes of a machine. They wait for
//!   each other in their streams until their communicators are aborted, even for a rank that has
//!   died. Two ranks on one device are refused.
//! * Two streams that use the same bytes without an order between them are reported: see
//!   [`Driver::races`]. Copies, fills and matrix products are always checked. A kernel is checked
//!   only if the program declares its accesses before the launch. It does so with the function
//!   `softcuda_note_use(stream, address, bytes, write)` of this `libcuda.so.1`, which other drivers
//!   lack.
//!
//! # In a test
//!
//! ```no_run
//! # fn test() {
//! if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
//!     return;
//! }
//! // Here the driver is found and has two devices. Its counters can be read after its first use.
//! let copied = softcuda::bytes("device_to_device");
//! # }
//! ```
//!
//! Tests that start programs call [`registered!`], [`install`] and [`environment`] instead. Cargo
//! builds the library together with any package that has this one among its (dev-)dependencies. A
//! program started by hand needs `cargo build -p softcuda-driver`.
//!
//! # Settings, by environment
//!
//! - `SOFTCUDA_DEVICES`: number of devices, 1 by default. With 0 there is a driver but no device.
//! - `SOFTCUDA_MEMORY`: bytes of each device, 4 GiB by default. Each process counts its own use.
//! - `SOFTCUDA_SHARED`: most bytes of shared memory that a block can ask for, 227 KiB by default,
//!   as with H100; A10, L4 and RTX have 99 KiB.
//! - `SOFTCUDA_PACE`: `eager` (the default): a stream works as soon as it can. `lazy` or
//!   `lazy:<ms>`: a stream works only when a thread waits for it or queries it, or after a second
//!   (or `<ms>`); missing waits then show. `seed:<n>`: random short pauses.
//! - `SOFTCUDA_FAIL`: `<kind>:<nth>`, several separated by commas: the n-th call of a kind fails.
//!   The kinds are alloc, alloc_host, copy, launch, event, stream, compile. A copy or launch fails
//!   when it runs. The kind may be the C name of a function, which fails at once:
//!   `cuIpcOpenMemHandle_v2:1`; with an error code: `cuInit=4242:1`. By default nothing fails.
//! - `SOFTCUDA_BLOCK`: bytes of the blocks from which smaller allocations are taken, 0 (none) by
//!   default. As with a GPU's driver, which has 2 MiB, a process that opens such memory maps the
//!   whole block, and cannot open other memory of it (`CUDA_ERROR_ALREADY_MAPPED`).
//! - `SOFTCUDA_EVENTS`, `SOFTCUDA_IPC_EVENTS`: most events that exist at once in a process, and
//!   most interprocess events. More are refused. No limits by default; real drivers refuse the
//!   latter after some 20,000.
//! - `SOFTCUDA_PIN`: `allow` (the default), or `refuse`: host memory cannot be registered.
//! - `SOFTCUDA_ORPHANS`: `end` (the default), or `hang`: a wait for an event of a process that has
//!   died never ends, as CUDA does not say that it does.
//! - `SOFTCUDA_FIRST`: milliseconds that the first context, allocation, compilation and matrix
//!   product of a process each take in addition; 0 by default.
//! - `SOFTCUDA_RACES`: `count` (the default), or `abort` to end the process at a race.
//! - `SOFTCUDA_CXX`: the C++ compiler for kernels, `c++` by default.
//! - `SOFTCUDA_CACHE`: a folder for compiled kernels; [`environment`] names one beside the driver.
//!   By default every process compiles its kernels.
//!
//! # Differences from a GPU's driver
//!
//! * Only modules compiled by this driver's own NVRTC can be loaded; handwritten PTX is refused.
//!   Kernels may include `cuda_fp16.h` and `cuda_bf16.h`, of which only the conversions are
//!   present. Global variables of modules have no address. Shared memory that is declared with a
//!   size does not count in the limits of a launch.
//! * `cuMemFree` does not wait for work that uses the memory: such work then fails.
//! * A kernel that reads pageable host memory is not detected if the address is not an argument by
//!   itself.
//! * NCCL has its collectives, sends and receives, but at most 16 ranks. Communicators cannot be
//!   made from others.
//! * The legacy default stream exists; the default stream of each thread does not. Graphs, arrays,
//!   managed memory, virtual memory management, and memory pools other than the default one are
//!   absent.
//! * A block's threads run one after another until one waits for others: code that spins on another
//!   thread of the block never ends.

#![allow(unsafe_code)]

mod control;
mod harness;

pub use control::{Driver, bytes, calls, driver};
pub use harness::{environment, install, library, name_of, real, register, run_again, run_anew};
