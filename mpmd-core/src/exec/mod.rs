//! What carries operations out on this process: device queues, transfers, and the one door to the
//! transport (invariant *one-way-in*).
//!
//! The program thread issues; everything else happens on the threads below, driven by data:
//!
//! - one thread for each device: kernels, strictly in the order of their operations;
//! - the *movers*: copies between buffers, packing and unpacking of pieces;
//! - the transport's threads: messages in, handed to the [router](mpmd_transport::router);
//! - the *ticker*: heartbeats, probes, hang reports;
//! - *callbacks*: closures of the user's that wait for arrays.

pub mod array;
mod assembly;
mod chunks;
#[cfg(test)]
mod driven;
mod driver;
mod exchange;
mod hash;
pub mod host_array;
mod in_flight;
#[cfg(test)]
mod lying;
mod mailbox;
mod memory;
mod passage;
mod planned;
mod put;
mod reach;
pub(crate) mod recorder;
mod slot;
mod spin;
mod status;
mod under_way;
mod waits;
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
use chunks::Chunks;
pub(crate) use exchange::{Exchange, Flow, Group, MOST_COLLECTIVES, MOST_DEVICES, Pattern, Round};
pub(crate) use hash::Rolling;
pub(crate) use in_flight::{InFlight, OnLoan, OpGuard};
use mailbox::Mailbox;
use memory::Holders;
/// What a replayed step is to the router.
pub(crate) use mpmd_transport::router::{Span, Values};
pub(crate) use passage::Passage;
pub(crate) use put::{PutPlan, Source};
pub(crate) use reach::follow;
pub(crate) use slot::{Outcome, Promise, Promises, Slot, SlotUse, Slots};
use spin::{Room, Spin};
pub(crate) use status::{Doing, Status};
use under_way::UnderWay;
pub(crate) use waits::Waits;
use worker::{Crew, Worker};
pub(crate) use worker::{Job, Work};

use crate::device::cuda::{self, Gpu};
use crate::exec::recorder::Recorder;
use crate::trace::{PieceStep, Trace, What};
use mpmd_layout::topology::{DeviceId, DeviceKind, Topology};

/// How often the ticker looks at the clock.
const TICK: Duration = Duration::from_millis(50);

/// More movers than this compete for the memory's bandwidth rather than add to it.
const MOST_MOVERS: usize = 4;

/// Settings of a [`Runtime`].
#[derive(Clone, Debug)]
pub(crate) struct RuntimeConfig {
    pub(crate) epoch: u64,
    pub(crate) patience: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) run_ahead_ops: usize,
    pub(crate) run_ahead_bytes: u64,
    /// How long who waits at the transport's door looks before it sleeps.
    pub(crate) spin: SpinSetting,
    pub(crate) device_memory: Option<u64>,
    /// Whether host values of any size are compared between processes, not only small ones.
    pub(crate) check_uncommitted: bool,
    /// Of this process's devices of kind `cuda`, in order: the driver's numbers for their graphics
    /// processors.
    pub(crate) cuda: Vec<u32>,
    pub(crate) trace: Trace,
}

/// A device that this process owns.
pub(crate) struct LocalDevice {
    pub(crate) id: DeviceId,
    pub(crate) pool: Pool,
    /// Where it is a CUDA device. Its thread issues work, and never waits for it.
    pub(crate) gpu: Option<Arc<Gpu>>,
    queue: Worker,
}

/// One process's part of a job. Everything but the program thread's own numbering.
pub(crate) struct Runtime {
    pub(crate) me: ProcessId,
    pub(crate) topology: Topology,
    /// Of the topology, on which plans depend.
    pub(crate) topology_fingerprint: u64,
    pub(crate) config: RuntimeConfig,
    pub(crate) devices: Vec<LocalDevice>,
    /// For shards in the host's memory.
    pub(crate) host_memory: Pool,
    /// For pieces on their way, control payloads and host values.
    pub(crate) staging: Pool,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) status: Status,
    /// What becomes of operations, for who wants to know.
    pub(crate) trace: Trace,
    pub(crate) waits: Waits,
    /// Of the program's thread, where it waits for arrays and cannot drive the transport.
    pub(crate) wait_spin: Spin,
    start: Instant,
    router: Mutex<Router<InProcess>>,
    transport: Option<Arc<dyn Transport>>,
    /// By process, whether pieces go to it, and come from it, as memory that stays where it is.
    hands_over: Vec<bool>,
    movers: Crew,
    chunks: Chunks,
    callbacks: Worker,
    pub(crate) mailbox: Mailbox,
    /// Of this process's CUDA devices, where they work together by NCCL.
    pub(crate) communicators: cuda::Communicators,
    holders: Mutex<Holders>,
    under_way: Mutex<UnderWay>,
    /// The last operation before the step that is being recorded; `u64::MAX` where none is.
    pub(crate) recorded_from: AtomicU64,
    /// Where this process only plans.
    pub(crate) recorder: Option<Recorder>,
    /// Payload bytes of pieces given to the transport, by process.
    pub(crate) bytes_sent: Vec<AtomicU64>,
    trouble: Mutex<Trouble>,
    /// Notified when a peer leaves or something fails.
    changed: Condvar,
    /// Hung up when the runtime is dropped or shut down.
    stopped: Arc<AtomicBool>,
}

/// What has gone wrong so far.
#[derive(Default)]
struct Trouble {
    /// The first failure of an operation here, or of the job.
    first: Option<Arc<Failure>>,
    /// The first peer that went away before its time.
    lost: Option<Arc<Failure>>,
}

/// What this runtime sends through its router.
pub(crate) struct InProcess;

impl Cargo for InProcess {
    type Outgoing = Outgoing;
    type Incoming = Payload;
    type Waiter = Waiter;
}

/// A piece on its way out, and the operation it keeps in flight.
pub(crate) struct Outgoing {
    pub(crate) buffer: SharedBuffer,
    /// Bytes of the piece. What is handed over may be a whole shard that it is a part of.
    pub(crate) bytes: u64,
    pub(crate) guard: OpGuard,
}

/// What waits for a piece.
pub(crate) enum Waiter {
    /// Shards that are put together from pieces, and processes that get the piece from this one.
    Piece(Box<Passage>),
    /// Somebody who wants the bytes.
    Bytes { promise: Promise, from: ProcessId, op: u64, piece: u64 },
    /// Nobody any more: it must be taken all the same, for its sender's sake.
    Nobody(#[expect(dead_code, reason = "held for its drop")] OpGuard),
}

impl Runtime {
    /// Starts the threads of this process's part of a job.
    ///
    /// # Errors
    ///
    /// Where the system gives no more threads.
    pub(crate) fn start(
        me: ProcessId,
        topology: Topology,
        config: RuntimeConfig,
        transport: Option<Arc<dyn Transport>>,
        recorder: Option<Recorder>,
    ) -> std::io::Result<Arc<Self>> {
        // Before the first buffer is made: what a transport can hand over lies in memory of its own
        // kind.
        let arena = transport
            .as_ref()
            .and_then(|transport| transport.arena())
            .unwrap_or_else(Arena::private);
        let room = Room::of(me, &topology, cores());
        let spins = room == Room::All;
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
            patience: config.patience,
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
            waits: Waits::new(transport.clone(), config.spin, room),
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
            movers: Crew::start("mpmd-mover", movers())?,
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
            transport.start(Arc::new(driver::Door(Arc::downgrade(&runtime))));
            runtime.start_ticker()?;
        }
        Ok(runtime)
    }

    /// Time since this runtime started; the router's clock.
    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// The transport's name, `none` where there is none.
    pub(crate) fn transport_name(&self) -> &'static str {
        self.transport.as_ref().map_or("none", |transport| transport.name())
    }

    /// Whether pieces go to `peer`, and come from it, as memory that stays where it is.
    pub(crate) fn hands_over(&self, peer: ProcessId) -> bool {
        self.hands_over[peer.index()]
    }

    /// The local index of a device, where this process owns it.
    pub(crate) fn local_index(&self, device: DeviceId) -> Option<usize> {
        self.devices.iter().position(|local| local.id == device)
    }

    /// Whether operation `op` is one of a step that is being recorded.
    pub(crate) fn is_recording(&self, op: u64) -> bool {
        op > self.recorded_from.load(Ordering::Relaxed)
    }

    /// Notes that a device of this process began with its part of an operation, at `at`: it turned
    /// to it at `since`, and waited last for what operation `input` made.
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

    /// Notes that a device of this process has ended its part of an operation.
    #[inline]
    pub(crate) fn trace_end(&self, device: usize, op: u64) {
        self.trace.note(|| {
            let memory = self.devices[device].pool.stats().live;
            What::Ended { op, device: device as u32, memory }
        });
    }

    /// Notes both for an operation on a device that has ended it in its own time, from `begin` to
    /// `end`: since `since` it had nothing before it.
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

    /// Notes what became of a piece.
    #[inline]
    fn trace_piece(&self, step: PieceStep, (op, piece): (u64, u64), peer: ProcessId, bytes: u64) {
        self.trace.note(|| What::Piece { step, op, piece, peer: peer.0, bytes, ticket: 0 });
    }

    /// Queues a kernel on a device of this process.
    pub(crate) fn run_on(&self, local_index: usize, job: Job) {
        self.devices[local_index].queue.push(job);
    }

    /// Queues a copy.
    pub(crate) fn move_data(&self, job: Job) {
        self.movers.push(job);
    }

    /// Queues a closure of the user's.
    pub(crate) fn call_back(&self, job: Job) {
        self.callbacks.push(job);
    }

    /// Sees to it that somebody looks after communicators for as long as there are some: what goes
    /// wrong between devices that work together fails the job.
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
                    let message =
                        format!("devices of process {} work together in vain: {error}", runtime.me);
                    let failure = Failure::new(FailureKind::Transport, runtime.me, 0, message);
                    return runtime.fail_job(Arc::new(failure));
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("mpmd-nccl".to_owned()).spawn(watch) {
            tracing::warn!(%error, "starting the thread that looks after communicators of NCCL's");
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
                        "nobody says which of the machine's CUDA devices device {id} is"
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

/// Finds out with whom this process's devices share memory, where it has some and others do too.
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
    transport.share_devices(sharing, &with, config.patience).map_err(std::io::Error::other)
}

fn movers() -> usize {
    cores().min(MOST_MOVERS)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}
