//! Executes operations on this process: device queues, transfers, and the only handler that the
//! transport calls (invariant *one-way-in*).
//!
//! An operation flows through these modules:
//!
//! 1. *Issue.* The program thread extends the rolling `hash`, enters the operation in
//!    `waits/in_flight` and reserves `memory` for the results. A dry run ends here: `dry_run` and
//!    `moves/dry_run` write the operation down.
//! 2. *Move.* `moves` sends and receives the pieces, and puts shards together from them.
//! 3. *Wait.* The resolver of a shard's `waits/async_buffer` fills it, and the operation ends. The
//!    program reads its `array` as a host array. Its thread waits in `waits/parker`.
//!
//! `job` starts the process's part and ends it. `recovery_store` has the state that outlives an
//! epoch.

pub(crate) mod array;
pub(crate) mod dry_run;
mod hash;
mod job;
mod memory;
mod moves;
pub(crate) mod process_paces;
pub(crate) mod recovery_store;
#[cfg(test)]
mod tests;
mod waits;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Condvar, Instant, Mutex, Spin, SpinPolicy, since};
use mpmd_device::accelerator::{Accelerator, Communicators};
use mpmd_memory::Pool;
use mpmd_proto::router::{Cargo, Router};
use mpmd_transport::{Payload, Transport};

pub(crate) use hash::{BLOCK, OriginMap, Rolling};
use job::life_cycle::Trouble;
use job::worker::{Crew, JobWorker};
pub(crate) use job::worker::{Job, Work};
use memory::LargeArrays;
pub(crate) use moves::assembly::BufferPart;
use moves::assembly::{Assembly, DeviceAssembly, HostAssembly};
use moves::chunks::ChunkQueue;
pub(crate) use moves::exchange::{
    CollectiveGroup, KernelExchange, MOST_COLLECTIVES, MOST_DEVICES, Pattern, Round, RoundFlow,
};
use moves::mailbox::{Key as PieceKey, Mailbox};
pub(crate) use moves::put::{PutPlan, PutSource, PutWhat};
pub(crate) use moves::reach::follow;
pub(crate) use moves::receive::Waiter;
pub(crate) use moves::send::Outgoing;
pub(crate) use moves::transfer::SourceLayout;
/// Types of the router: a span of replayed operations, and the hashes of host values.
pub(crate) use mpmd_proto::router::{OpSpan, ValueHashes};
pub(crate) use waits::async_buffer::{
    AsyncBuffer, AsyncBuffers, BufferUse, Outcome, Resolver, Resolvers,
};
pub(crate) use waits::in_flight::{InFlight, LeftBehind, OnLoan, OpCounts, OpGuard};
pub(crate) use waits::parker::Parker;
pub(crate) use waits::status::{ActivityStatus, Doing};
use waits::under_way::UnderWay;

use crate::exec::dry_run::DryRunBuilder;
use crate::trace::Trace;
use crate::trace::spans::{self, KernelSpan};
use mpmd_layout::topology::{DeviceId, Topology};
use mpmd_record::trace::{PieceStep, TraceEventKind};

/// One process's part of a job. Only the numbering of operations is elsewhere, on the program
/// thread.
pub(crate) struct Runtime {
    pub(crate) me: ProcessId,
    pub(crate) topology: Topology,
    /// Hash of the topology. Plans depend on it.
    pub(crate) topology_fingerprint: u64,
    pub(crate) config: RuntimeConfig,
    pub(crate) devices: Vec<LocalDevice>,
    /// Pool for shards in host memory.
    pub(crate) host_memory: Pool,
    /// Pool for pieces in transit, control payloads and host values.
    pub(crate) staging: Pool,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) status: ActivityStatus,
    /// Records the events of operations while tracing is on.
    pub(crate) trace: Trace,
    pub(crate) parker: Parker,
    /// Spin policy of the program thread when it waits for arrays and cannot drive the transport.
    pub(crate) wait_spin: SpinPolicy,
    start: Instant,
    pub(crate) router: Mutex<Router<InProcess>>,
    transport: Option<Arc<dyn Transport>>,
    /// By process: true if pieces to and from it are transferred zero-copy.
    zero_copy: Vec<bool>,
    copy_workers: Crew,
    chunks: ChunkQueue,
    callbacks: JobWorker,
    pub(crate) mailbox: Mailbox,
    /// NCCL communicators of this process's accelerators.
    pub(crate) communicators: Communicators,
    holders: Mutex<LargeArrays>,
    under_way: Mutex<UnderWay>,
    /// The number of the last operation before the step that is being captured. `u64::MAX` without
    /// a capture.
    pub(crate) capture_from: AtomicU64,
    /// Number of donations of [watched](array::Placed::watch) arrays.
    pub(crate) watched_donations: AtomicU64,
    /// The dry run that this program records. `None` in a real run.
    pub(crate) dry_run: Option<DryRunBuilder>,
    /// True if kernels are timed, to find slow processes.
    pub(crate) times_kernels: AtomicBool,
    /// Nanoseconds in which kernels ran on this process's CPU devices, counted while
    /// `times_kernels` is true. Includes nanoseconds in which the process was
    /// [held up](Self::watch_stalls).
    pub(crate) kernel_nanos: AtomicU64,
    /// Payload bytes that were handed to the transport, indexed by destination process.
    pub(crate) bytes_sent: Vec<AtomicU64>,
    /// Number of messages with pieces that were handed to the transport, indexed by destination
    /// process.
    pub(crate) messages_sent: Vec<AtomicU64>,
    trouble: Mutex<Trouble>,
    /// Notified when a peer leaves or a failure occurs.
    changed: Condvar,
    /// True once this process has left the job. The ticker and the NCCL watcher then end.
    stopped: Arc<AtomicBool>,
}

/// Settings of a [`Runtime`].
#[derive(Clone, Debug)]
pub(crate) struct RuntimeConfig {
    pub(crate) epoch: u64,
    pub(crate) peer_timeout: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) run_ahead_ops: usize,
    pub(crate) run_ahead_bytes: u64,
    /// Time for which a waiting thread polls the transport before it sleeps.
    pub(crate) spin: Spin,
    pub(crate) device_memory: Option<u64>,
    /// True if host values of every size are compared between processes, not only small ones.
    pub(crate) check_uncommitted: bool,
    /// True if the replicas of kernels' outputs are compared.
    pub(crate) check_replicas: bool,
    /// The interval, in kernel calls, at which a call is recomputed on another process. 0 for
    /// never.
    pub(crate) check_replay: u64,
    /// True if each call of the program blocks until its operations have ended.
    pub(crate) sync: bool,
    /// The CUDA driver's numbers of this process's accelerators, in order.
    pub(crate) ordinals: Vec<u32>,
    pub(crate) trace: Trace,
}

/// A device that this process owns.
pub(crate) struct LocalDevice {
    pub(crate) id: DeviceId,
    pub(crate) pool: Pool,
    /// The accelerator, `None` for a CPU device. The device's thread issues work to it and
    /// never waits for that work.
    pub(crate) accelerator: Option<Arc<Accelerator>>,
    /// The trace time at which the host last saw the accelerator's work end.
    seen_end: AtomicU64,
    queue: JobWorker,
}

impl Runtime {
    /// Returns the time since this runtime started, which is the router's clock.
    pub(crate) fn now(&self) -> Duration {
        since(self.start)
    }

    /// Returns the transport's name, or `none` without a transport.
    pub(crate) fn transport_name(&self) -> &'static str {
        self.transport
            .as_ref()
            .map_or("none", |transport| transport.name())
    }

    /// Returns true if pieces between this process and `peer` are transferred zero-copy.
    pub(crate) fn zero_copy(&self, peer: ProcessId) -> bool {
        self.zero_copy[peer.index()]
    }

    /// Returns the local index of a device, or `None` if another process owns it.
    pub(crate) fn local_index(&self, device: DeviceId) -> Option<usize> {
        self.devices.iter().position(|local| local.id == device)
    }

    /// Returns true if operation `op` belongs to a step that is being captured.
    pub(crate) fn is_in_capture(&self, op: u64) -> bool {
        op > self.capture_from.load(Ordering::Relaxed)
    }

    /// Records that a device of this process began its part of operation `op` at time `at`. `since`
    /// is the time at which the device took up the operation, to wait for its inputs. `input` is
    /// the operation that made the input that was ready last. Times are trace times.
    #[inline]
    pub(crate) fn trace_start(
        &self,
        device: usize,
        op: u64,
        at: u64,
        since: u64,
        input: Option<u64>,
    ) {
        let memory = || self.devices[device].pool.stats().live;
        self.trace.note_at(at, || TraceEventKind::Started {
            op,
            device: device as u32,
            since,
            input: input.unwrap_or(0),
            memory: memory(),
        });
    }

    /// Records that the device with this local index has ended its part of operation `op` now.
    #[inline]
    pub(crate) fn trace_end(&self, device: usize, op: u64) {
        self.trace.note(|| {
            let memory = self.devices[device].pool.stats().live;
            TraceEventKind::Ended {
                op,
                device: device as u32,
                memory,
            }
        });
    }

    /// Records start and end of an operation that a device ran asynchronously, as trace times
    /// `since`, `begin` and `end`. From `since` on the device had no earlier work left.
    pub(crate) fn trace_ran(
        &self,
        device: usize,
        op: u64,
        [since, begin, end]: [u64; 3],
        input: Option<u64>,
    ) {
        self.trace_start(device, op, begin, since.min(begin), input);
        self.trace.note_at(end, || {
            let memory = self.devices[device].pool.stats().live;
            TraceEventKind::Ended {
                op,
                device: device as u32,
                memory,
            }
        });
    }

    /// Records an operation that a device without a clock ran asynchronously. It was issued at
    /// `issued` and has ended now. Its begin is the end of the device's earlier work, or `issued`
    /// if that is later.
    pub(crate) fn trace_seen(&self, device: usize, op: u64, issued: u64, input: Option<u64>) {
        if self.trace.is_on() {
            let end = self.trace.now();
            let before = self.devices[device].seen_end.swap(end, Ordering::Relaxed);
            let begin = issued.max(before).min(end);
            self.trace_ran(device, op, [begin, begin, end], input);
        }
    }

    /// Records a step in the transfer of a piece for the trace.
    #[inline]
    fn trace_piece(&self, step: PieceStep, key: PieceKey, peer: ProcessId, bytes: u64) {
        let (op, piece) = key;
        self.trace.note(|| TraceEventKind::Piece {
            step,
            op,
            piece,
            peer: peer.0,
            bytes,
            ticket: 0,
        });
        self.log_piece(step, key, peer, bytes);
    }

    /// Logs a step in the transfer of a piece, if the program's log records spans.
    #[inline]
    fn log_piece(&self, step: PieceStep, key: PieceKey, peer: ProcessId, bytes: u64) {
        let (op, piece) = key;
        if spans::are_on()
            && let Some(operation) = self.in_flight.span(op)
        {
            spans::piece(&operation, step, peer, piece, bytes);
        }
    }

    /// Enters the span of a kernel of operation `op` on a device, if the program's log records
    /// spans. `said` is the thread's action: "ran" or "issued".
    #[inline]
    pub(crate) fn enter_kernel(
        &self,
        op: u64,
        device: DeviceId,
        said: &'static str,
    ) -> Option<KernelSpan> {
        let operation = spans::are_on().then(|| self.in_flight.span(op))??;
        Some(KernelSpan::enter(&operation, &device, said))
    }

    /// Logs, if the program's log records spans, that a device has run a kernel of operation `op`.
    /// `took` is the kernel's time in nanoseconds, if known.
    pub(crate) fn log_ran(&self, op: u64, device: DeviceId, took: Option<u64>) {
        if spans::are_on()
            && let Some(operation) = self.in_flight.span(op)
        {
            spans::ran(
                &operation,
                &device,
                took.map(|nanoseconds| nanoseconds / 1_000),
            );
        }
    }

    /// Queues a job on the thread of the device with this local index. Does not block.
    pub(crate) fn run_on(&self, local_index: usize, job: Job) {
        self.devices[local_index].queue.push(job);
    }

    /// Queues a job on the copy workers. Does not block.
    pub(crate) fn move_data(&self, job: Job) {
        self.copy_workers.push(job);
    }

    /// Queues a job on the thread for user closures. Does not block.
    pub(crate) fn call_back(&self, job: Job) {
        self.callbacks.push(job);
    }
}

/// The payload types of a [`Runtime`]'s router.
pub(crate) struct InProcess;

impl Cargo for InProcess {
    type Outgoing = Outgoing;
    type Incoming = Payload;
    type Waiter = Waiter;
}
