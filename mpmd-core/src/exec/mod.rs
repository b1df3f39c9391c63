//! Executes operations on this process: device queues, transfers, and the only handler that the
//! transport calls (invariant *one-way-in*).
//!
//! The program thread issues operations. All other work is driven by data and runs on these
//! threads:
//!
//! - one thread for each device: kernels, strictly in the order of their operations;
//! - the *copy workers*: copies between buffers, packing and unpacking of pieces;
//! - the transport's threads: incoming messages, which go to the [router](mpmd_transport::router);
//! - the *ticker*: heartbeats, probes, hang reports;
//! - *callbacks*: user closures that wait for arrays.

pub(crate) mod array;
mod assembly;
mod async_buffer;
mod chunks;
#[cfg(test)]
mod driven;
mod driver;
mod exchange;
mod hash;
pub(crate) mod host_array;
mod in_flight;
#[cfg(test)]
mod lying;
mod mailbox;
mod memory;
mod parker;
mod planned;
mod put;
mod reach;
mod receive;
pub(crate) mod recorder;
mod spin;
mod status;
mod under_way;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mpmd_ids::ProcessId;
use mpmd_ids::block::Spin as SpinSetting;
use mpmd_transport::memory::Arena;
use mpmd_transport::router::{Cargo, Failure, FailureKind, Router};
use mpmd_transport::{Payload, Pool, SharedBuffer, Transport, router};
use parking_lot::{Condvar, Mutex};

use assembly::{Assembly, DeviceAssembly, HostAssembly};
pub(crate) use async_buffer::{AsyncBuffer, AsyncBuffers, BufferUse, Outcome, Resolver, Resolvers};
use chunks::Chunks;
pub(crate) use exchange::{Exchange, Flow, Group, MOST_COLLECTIVES, MOST_DEVICES, Pattern, Round};
pub(crate) use hash::Rolling;
pub(crate) use in_flight::{InFlight, OnLoan, OpGuard};
use mailbox::Mailbox;
use memory::Holders;
/// The router's view of a replayed step.
pub(crate) use mpmd_transport::router::{Span, Values};
pub(crate) use parker::Parker;
pub(crate) use put::{PutPlan, Source};
pub(crate) use reach::follow;
pub(crate) use receive::Receive;
use spin::{CoreBudget, Spin};
pub(crate) use status::{Doing, Status};
use under_way::UnderWay;
use worker::{Crew, Worker};
pub(crate) use worker::{Job, Work};

use crate::device::cuda::{self, Gpu};
use crate::exec::recorder::Recorder;
use crate::trace::{PieceStep, Trace, What};
use mpmd_layout::topology::{DeviceId, DeviceKind, Topology};

/// Interval of the ticker thread.
const TICK: Duration = Duration::from_millis(50);

/// Upper limit of copy workers. More would compete for memory bandwidth.
const MOST_MOVERS: usize = 4;

/// Settings of a [`Runtime`].
#[derive(Clone, Debug)]
pub(crate) struct RuntimeConfig {
    pub(crate) epoch: u64,
    pub(crate) peer_timeout: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) run_ahead_ops: usize,
    pub(crate) run_ahead_bytes: u64,
    /// Time for which a waiting thread polls the transport before it sleeps.
    pub(crate) spin: SpinSetting,
    pub(crate) device_memory: Option<u64>,
    /// True if host values of every size are compared between processes, not only small ones.
    pub(crate) check_uncommitted: bool,
    /// CUDA device ordinals of this process's devices of kind `cuda`, in order.
    pub(crate) cuda: Vec<u32>,
    pub(crate) trace: Trace,
}

/// A device that this process owns.
pub(crate) struct LocalDevice {
    pub(crate) id: DeviceId,
    pub(crate) pool: Pool,
    /// The GPU of a CUDA device, `None` for a CPU device. The device's thread issues work to it and
    /// never waits for that work.
    pub(crate) gpu: Option<Arc<Gpu>>,
    queue: Worker,
}

/// One process's part of a job: everything except the program thread's operation numbering.
pub(crate) struct Runtime {
    pub(crate) me: ProcessId,
    pub(crate) topology: Topology,
    /// Fingerprint of the topology, on which plans depend.
    pub(crate) topology_fingerprint: u64,
    pub(crate) config: RuntimeConfig,
    pub(crate) devices: Vec<LocalDevice>,
    /// Pool for shards in host memory.
    pub(crate) host_memory: Pool,
    /// Pool for pieces in transit, control payloads and host values.
    pub(crate) staging: Pool,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) status: Status,
    /// Records the events of operations, if tracing is on.
    pub(crate) trace: Trace,
    pub(crate) parker: Parker,
    /// Spin policy of the program thread when it waits for arrays and cannot drive the transport.
    pub(crate) wait_spin: Spin,
    start: Instant,
    router: Mutex<Router<InProcess>>,
    transport: Option<Arc<dyn Transport>>,
    /// By process: true if pieces to and from it are transferred zero-copy.
    hands_over: Vec<bool>,
    copy_workers: Crew,
    chunks: Chunks,
    callbacks: Worker,
    pub(crate) mailbox: Mailbox,
    /// NCCL communicators of this process's CUDA devices.
    pub(crate) communicators: cuda::Communicators,
    holders: Mutex<Holders>,
    under_way: Mutex<UnderWay>,
    /// The last operation before the step that is being recorded, `u64::MAX` if no step is being
    /// recorded.
    pub(crate) recorded_from: AtomicU64,
    /// Set only in a dry run.
    pub(crate) recorder: Option<Recorder>,
    /// Payload bytes of pieces given to the transport, by process.
    pub(crate) bytes_sent: Vec<AtomicU64>,
    trouble: Mutex<Trouble>,
    /// Notified when a peer leaves or something fails.
    changed: Condvar,
    /// True once this process has left the job. The ticker and the NCCL watcher then end.
    stopped: Arc<AtomicBool>,
}

/// The first failures that this process has seen.
#[derive(Default)]
struct Trouble {
    /// The first failure of an operation here, or of the job.
    first: Option<Arc<Failure>>,
    /// The first peer that was lost before it had left the job.
    lost: Option<Arc<Failure>>,
}

/// The payload types of this runtime's router.
pub(crate) struct InProcess;

impl Cargo for InProcess {
    type Outgoing = Outgoing;
    type Incoming = Payload;
    type Waiter = Waiter;
}

/// A piece to send, and the guard that keeps its operation in flight.
pub(crate) struct Outgoing {
    pub(crate) buffer: SharedBuffer,
    /// Bytes of the piece. In a zero-copy transfer `buffer` may be the whole shard that contains
    /// it.
    pub(crate) bytes: u64,
    pub(crate) guard: OpGuard,
}

/// The receiver of a piece.
pub(crate) enum Waiter {
    /// Shards of this process that contain the piece, and processes to which it is forwarded.
    Piece(Box<Receive>),
    /// The bytes themselves, which resolve `resolver`.
    Bytes { resolver: Resolver, from: ProcessId, op: u64, piece: u64 },
    /// No receiver. The piece is still taken, so that its sender does not wait.
    Nobody(#[expect(dead_code, reason = "held for its drop")] OpGuard),
}

impl Runtime {
    /// Starts the threads of this process's part of a job.
    ///
    /// # Errors
    ///
    /// If a thread cannot be started, a CUDA device cannot be opened, or sharing of CUDA memory
    /// cannot be set up.
    pub(crate) fn start(
        me: ProcessId,
        topology: Topology,
        config: RuntimeConfig,
        transport: Option<Arc<dyn Transport>>,
        recorder: Option<Recorder>,
    ) -> std::io::Result<Arc<Self>> {
        // Before the first buffer is allocated: zero-copy transfers need memory from the
        // transport's arena.
        let arena = transport
            .as_ref()
            .and_then(|transport| transport.arena())
            .unwrap_or_else(Arena::private);
        let room = CoreBudget::of(me, &topology, cores());
        let spins = room == CoreBudget::All;
        let devices = open_devices(me, &topology, &config, &arena, spins)?;
        share_devices(me, &topology, &config, &devices, transport.as_deref())?;
        let hands_over = |peer: usize| {
            transport.as_ref().is_some_and(|transport| transport.hands_over(ProcessId(peer as u32)))
        };
        let hands_over: Vec<bool> = (0..topology.processes()).map(hands_over).collect();
        let router = Router::new(router::Config {
            process: me,
            processes: topology.processes(),
            epoch: config.epoch,
            peer_timeout: config.peer_timeout,
            heartbeat: config.heartbeat,
            hands_over: hands_over.clone(),
            is_stand_in: transport.as_ref().is_some_and(|transport| transport.is_stand_in()),
        });
        let runtime = Arc::new(Self {
            me,
            bytes_sent: (0..topology.processes()).map(|_| AtomicU64::new(0)).collect(),
            status: Status::new(devices.iter().map(|device| {
                let kind = if device.gpu.is_some() { " (cuda)" } else { "" };
                format!("device {}{kind}", device.id)
            })),
            parker: Parker::new(transport.clone(), config.spin, room),
            wait_spin: Spin::new(spins),
            topology_fingerprint: topology.fingerprint(),
            topology,
            host_memory: Pool::in_arena(format!("host memory of process {me}"), None, &arena),
            staging: Pool::in_arena(format!("staging of process {me}"), None, &arena),
            devices,
            in_flight: Arc::new(InFlight::traced(config.trace.clone())),
            trace: config.trace.clone(),
            start: Instant::now(),
            router: Mutex::new(router),
            transport,
            hands_over,
            copy_workers: Crew::start("mpmd-copy", copy_workers())?,
            chunks: Chunks::default(),
            callbacks: Worker::start("mpmd-callbacks".to_owned(), Spin::new(false))?,
            mailbox: Mailbox::default(),
            communicators: cuda::Communicators::default(),
            holders: Mutex::default(),
            under_way: Mutex::default(),
            recorded_from: AtomicU64::new(u64::MAX),
            recorder,
            trouble: Mutex::default(),
            changed: Condvar::new(),
            stopped: Arc::default(),
            config,
        });
        runtime.say_ways();
        if let Some(transport) = &runtime.transport {
            transport.start(Arc::new(driver::TransportHandler(Arc::downgrade(&runtime))));
            runtime.start_ticker()?;
        }
        Ok(runtime)
    }

    /// Returns the time since this runtime started. It is the router's clock.
    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns the transport's name, or `none` without a transport.
    pub(crate) fn transport_name(&self) -> &'static str {
        self.transport.as_ref().map_or("none", |transport| transport.name())
    }

    /// True if pieces to and from `peer` are transferred zero-copy.
    pub(crate) fn hands_over(&self, peer: ProcessId) -> bool {
        self.hands_over[peer.index()]
    }

    /// Returns the local index of a device, or `None` if another process owns it.
    pub(crate) fn local_index(&self, device: DeviceId) -> Option<usize> {
        self.devices.iter().position(|local| local.id == device)
    }

    /// True if operation `op` belongs to a step that is being recorded.
    pub(crate) fn is_recording(&self, op: u64) -> bool {
        op > self.recorded_from.load(Ordering::Relaxed)
    }

    /// Records that a device of this process began its part of operation `op` at time `at`. `since`
    /// is the time at which the device turned to the operation. `input` is the operation that made
    /// the input it waited for last. Times are in nanoseconds since the trace began.
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
        self.trace.note_at(at, || {
            let (device, input) = (device as u32, input.unwrap_or(0));
            What::Started { op, device, since, input, memory: memory() }
        });
    }

    /// Records that a device of this process has ended its part of operation `op`.
    #[inline]
    pub(crate) fn trace_end(&self, device: usize, op: u64) {
        self.trace.note(|| {
            let memory = self.devices[device].pool.stats().live;
            What::Ended { op, device: device as u32, memory }
        });
    }

    /// Records start and end of an operation that a device ran asynchronously, from `begin` to
    /// `end`. From `since` on the device had no earlier work left.
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
            What::Ended { op, device: device as u32, memory }
        });
    }

    /// Records a step in the transfer of a piece.
    #[inline]
    fn trace_piece(&self, step: PieceStep, (op, piece): (u64, u64), peer: ProcessId, bytes: u64) {
        self.trace.note(|| What::Piece { step, op, piece, peer: peer.0, bytes, ticket: 0 });
    }

    /// Queues a kernel call on a device of this process.
    pub(crate) fn run_on(&self, local_index: usize, job: Job) {
        self.devices[local_index].queue.push(job);
    }

    /// Queues a copy on the copy workers.
    pub(crate) fn move_data(&self, job: Job) {
        self.copy_workers.push(job);
    }

    /// Queues a user closure.
    pub(crate) fn call_back(&self, job: Job) {
        self.callbacks.push(job);
    }

    /// Starts the thread that watches the NCCL communicators, if one is needed. An NCCL error fails
    /// the job.
    pub(crate) fn watch_communicators(self: &Arc<Self>) {
        if !self.communicators.are_to_be_watched() {
            return;
        }
        let (weak, stopped): (Weak<Self>, _) = (Arc::downgrade(self), self.stopped.clone());
        let watch = move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::sleep(TICK);
                let Some(runtime) = weak.upgrade() else { break };
                if let Some(error) = runtime.communicators.look() {
                    let message = format!(
                        "NCCL failed between the devices of process {}: {error}",
                        runtime.me
                    );
                    let failure = Failure::new(FailureKind::Transport, runtime.me, 0, message);
                    return runtime.fail_job(Arc::new(failure));
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("mpmd-nccl".to_owned()).spawn(watch) {
            tracing::warn!(%error, "cannot start the thread that watches NCCL communicators");
        }
    }

    fn start_ticker(self: &Arc<Self>) -> std::io::Result<()> {
        let weak: Weak<Self> = Arc::downgrade(self);
        let stopped = self.stopped.clone();
        std::thread::Builder::new().name("mpmd-ticker".to_owned()).spawn(move || {
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                std::thread::sleep(TICK);
                let Some(runtime) = weak.upgrade() else { break };
                runtime.status.tick();
                runtime.with_router(|router| router.tick(runtime.now()));
            }
        })?;
        Ok(())
    }
}

fn open_devices(
    me: ProcessId,
    topology: &Topology,
    config: &RuntimeConfig,
    arena: &Arena,
    spins: bool,
) -> std::io::Result<Vec<LocalDevice>> {
    let mut ordinals = config.cuda.iter();
    let open = |id: &DeviceId| {
        let gpu = match topology.device(*id).map(|device| device.kind) {
            Some(DeviceKind::Cuda) => {
                let ordinal = ordinals.next().ok_or_else(|| {
                    std::io::Error::other(format!(
                        "no CUDA device ordinal is configured for device {id}"
                    ))
                })?;
                Some(Gpu::open(*ordinal).map_err(std::io::Error::other)?)
            }
            Some(DeviceKind::Cpu) | None => None,
        };
        if let Some(gpu) = &gpu {
            arena.on_map(gpu.pin());
            if config.trace.is_on() {
                let trace = config.trace.clone();
                gpu.keep_time(Box::new(move || trace.now())).map_err(std::io::Error::other)?;
            }
        }
        let name = format!("device {id} of process {me}");
        let pool = match &gpu {
            None => Pool::in_arena(name, config.device_memory, arena),
            Some(gpu) => {
                Pool::in_arena(name, config.device_memory, &arena.device_beside(gpu.allocator()))
            }
        };
        Ok(LocalDevice {
            id: *id,
            pool,
            gpu,
            queue: Worker::start(format!("mpmd-{id}"), Spin::new(spins))?,
        })
    };
    let devices =
        topology.devices_of(me).iter().map(open).collect::<std::io::Result<Vec<LocalDevice>>>()?;
    let gpus: Vec<_> = devices.iter().filter_map(|local| local.gpu.clone()).collect();
    cuda::reach_each_other(&gpus);
    Ok(devices)
}

/// Sets up sharing of CUDA memory with the other processes that have CUDA devices. Does nothing if
/// this process or all others have none.
fn share_devices(
    me: ProcessId,
    topology: &Topology,
    config: &RuntimeConfig,
    devices: &[LocalDevice],
    transport: Option<&dyn Transport>,
) -> std::io::Result<()> {
    let gpus: Vec<_> = devices.iter().filter_map(|device| device.gpu.clone()).collect();
    let has = |process: usize| {
        let process = ProcessId(process as u32);
        let mut kinds = topology.devices_of(process).iter().filter_map(|id| topology.device(*id));
        process != me && kinds.any(|device| device.kind == DeviceKind::Cuda)
    };
    let with: Vec<bool> = (0..topology.processes()).map(has).collect();
    let (Some(transport), true) = (transport, with.contains(&true)) else { return Ok(()) };
    let Some(sharing) = cuda::sharing(gpus) else { return Ok(()) };
    transport.share_devices(sharing, &with, config.peer_timeout).map_err(std::io::Error::other)
}

fn copy_workers() -> usize {
    cores().min(MOST_MOVERS)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}
