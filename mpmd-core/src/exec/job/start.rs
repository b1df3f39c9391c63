//! Starts the runtime: opens the devices, and starts the threads of this process.
//!
//! The program thread issues operations. All other work is driven by data and runs on these
//! threads:
//!
//! - one thread for each device: kernels, strictly in the order of their operations;
//! - the *copy workers*: copies between buffers, packing and unpacking of pieces, unless they are
//!   small;
//! - the transport's threads: incoming messages, which go to the [router](mpmd_proto::router);
//! - the *ticker*: heartbeats, probes, hang reports;
//! - *callbacks*: user closures that wait for arrays.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{
    Condvar, CoreBudget, Mutex, Spin, SpinPolicy, host_cores, now, since, thread,
};
use mpmd_device::accelerator;
use mpmd_memory::Arena;
use mpmd_memory::Pool;
use mpmd_proto::router;
use mpmd_proto::router::{Failure, FailureKind, Router};
use mpmd_transport::Transport;

use crate::exec::dry_run::DryRunBuilder;
use crate::exec::job::worker::{self, Crew, JobWorker};
use crate::exec::moves::chunks::ChunkQueue;
use crate::exec::moves::driver;
use crate::exec::moves::mailbox::Mailbox;
use crate::exec::{
    ActivityStatus, InFlight, InProcess, LocalDevice, Parker, Runtime, RuntimeConfig,
};
use mpmd_layout::topology::{DeviceId, DeviceKind, Topology};

/// Interval of the ticker thread.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// Interval at which a process checks whether it was held up. The next constant is the shortest
/// stall that counts. On a busy machine threads wait for less than that.
const STALL_TICK: Duration = Duration::from_millis(2);
const LEAST_STALL: Duration = Duration::from_millis(5);

/// The time that a process may take to open its accelerators, in addition to the peer timeout. A
/// driver may take seconds for its first context or allocation, and the process sends no messages
/// until then.
const DEVICES_START_WITHIN: Duration = Duration::from_secs(120);

/// Maximum number of copy workers. A higher number would only compete for memory bandwidth.
const MOST_MOVERS: usize = 4;

impl Runtime {
    /// Opens the devices of process `me`, and starts its threads and the transport.
    ///
    /// # Errors
    ///
    /// If a thread cannot be started, an accelerator cannot be opened, or sharing of accelerator
    /// memory cannot be set up.
    pub(crate) fn start(
        me: ProcessId,
        topology: Topology,
        config: RuntimeConfig,
        transport: Option<Arc<dyn Transport>>,
        dry_run: Option<DryRunBuilder>,
    ) -> std::io::Result<Arc<Self>> {
        // Before the first buffer is allocated: zero-copy transfers need memory from the
        // transport's arena.
        let arena = transport
            .as_ref()
            .and_then(|transport| transport.arena())
            .unwrap_or_else(Arena::private);
        let room = core_budget(me, &topology, host_cores());
        let spin = if room == CoreBudget::All {
            Spin::Auto
        } else {
            Spin::Never
        };

        let devices = open_devices(me, &topology, &config, &arena, spin)?;
        share_devices(me, &topology, &config, &devices, transport.as_deref())?;
        let zero_copy = |peer: usize| {
            transport
                .as_ref()
                .is_some_and(|transport| transport.zero_copy(ProcessId(peer as u32)))
        };
        let zero_copy: Vec<bool> = (0..topology.processes()).map(zero_copy).collect();
        let router = create_router(me, &topology, &config, &zero_copy);

        let runtime = Arc::new(Self {
            me,
            times_kernels: AtomicBool::new(false),
            kernel_nanos: AtomicU64::new(0),
            bytes_sent: counters(&topology),
            messages_sent: counters(&topology),
            status: ActivityStatus::new(device_names(&topology, &devices)),
            parker: Parker::new(transport.clone(), config.spin, room),
            wait_spin: SpinPolicy::new(worker::PACE, spin),
            topology_fingerprint: topology.fingerprint(),
            topology,
            host_memory: Pool::in_arena(format!("host memory of process {me}"), None, &arena),
            staging: Pool::in_arena(format!("staging of process {me}"), None, &arena),
            devices,
            in_flight: Arc::new(InFlight::traced(config.trace.clone())),
            trace: config.trace.clone(),
            start: now(),
            router: Mutex::new(router),
            transport,
            zero_copy,
            copy_workers: Crew::start("mpmd-copy", copy_workers())?,
            chunks: ChunkQueue::default(),
            callbacks: JobWorker::start("mpmd-callbacks".to_owned(), Spin::Never)?,
            mailbox: Mailbox::default(),
            communicators: accelerator::Communicators::default(),
            holders: Mutex::default(),
            under_way: Mutex::default(),
            capture_from: AtomicU64::new(u64::MAX),
            watched_donations: AtomicU64::new(0),
            dry_run,
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

    /// At the first call, starts a thread that checks the NCCL communicators for errors until this
    /// process leaves the job. Later calls do nothing. An NCCL error fails the job.
    pub(crate) fn watch_communicators(self: &Arc<Self>) {
        if !self.communicators.are_to_be_watched() {
            return;
        }
        let weak: Weak<Self> = Arc::downgrade(self);
        let stopped = self.stopped.clone();
        let watch = move || {
            while !stopped.load(Ordering::Relaxed) {
                thread::sleep(TICK);
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

        if let Err(error) = thread::Builder::new()
            .name("mpmd-nccl".to_owned())
            .spawn(watch)
        {
            tracing::warn!(%error, "cannot start the thread that watches NCCL communicators");
        }
    }

    /// Starts a thread that adds up the time in which this process cannot run, such as when it is
    /// stopped or its machine is suspended. The thread ends when the process leaves the job.
    pub(crate) fn watch_stalls(self: &Arc<Self>) {
        let weak: Weak<Self> = Arc::downgrade(self);
        let stopped = self.stopped.clone();
        let watch = move || {
            while !stopped.load(Ordering::Relaxed) {
                let before = now();
                thread::sleep(STALL_TICK);
                let Some(runtime) = weak.upgrade() else { break };
                let late = since(before).saturating_sub(STALL_TICK);
                if late >= LEAST_STALL {
                    runtime
                        .kernel_nanos
                        .fetch_add(late.as_nanos() as u64, Ordering::Relaxed);
                }
            }
        };

        if let Err(error) = thread::Builder::new()
            .name("mpmd-stalls".to_owned())
            .spawn(watch)
        {
            tracing::warn!(%error, "cannot start the thread that notices stalls");
        }
    }

    fn start_ticker(self: &Arc<Self>) -> std::io::Result<()> {
        let weak: Weak<Self> = Arc::downgrade(self);
        let stopped = self.stopped.clone();
        thread::Builder::new()
            .name("mpmd-ticker".to_owned())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    thread::sleep(TICK);
                    let Some(runtime) = weak.upgrade() else { break };
                    runtime.status.tick();
                    runtime.count_steps();
                    runtime.with_router(|router| router.tick(runtime.now()));
                }
            })?;
        Ok(())
    }
}

/// Creates the router. Processes with accelerators get more time to start.
fn create_router(
    me: ProcessId,
    topology: &Topology,
    config: &RuntimeConfig,
    zero_copy: &[bool],
) -> Router<InProcess> {
    let mut router = Router::new(router::RouterConfig {
        process: me,
        processes: topology.processes(),
        epoch: config.epoch,
        peer_timeout: config.peer_timeout,
        heartbeat: config.heartbeat,
        zero_copy: zero_copy.to_vec(),
    });
    for process in (0..topology.processes() as u32).map(ProcessId) {
        if topology.has_accelerator(process) {
            router.allow_start(process, DEVICES_START_WITHIN);
        }
    }
    router
}

/// Returns the names of devices in hang reports.
fn device_names(topology: &Topology, devices: &[LocalDevice]) -> impl Iterator<Item = String> {
    devices.iter().map(|device| {
        let kind = topology
            .kind_of(device.id)
            .filter(|kind| kind.is_accelerator());
        let kind = kind.map_or_else(String::new, |kind| format!(" ({kind})"));
        format!("device {}{kind}", device.id)
    })
}

/// Opens the devices of process `me`, and starts their threads.
fn open_devices(
    me: ProcessId,
    topology: &Topology,
    config: &RuntimeConfig,
    arena: &Arena,
    spin: Spin,
) -> std::io::Result<Vec<LocalDevice>> {
    let mut ordinals = config.ordinals.iter().copied();
    let mut open = |id: &DeviceId| {
        let kind = topology
            .device(*id)
            .map_or(DeviceKind::Cpu, |device| device.kind);
        let accelerator = accelerator::open(kind, &mut ordinals).map_err(std::io::Error::other)?;
        if let Some(accelerator) = &accelerator {
            arena.on_map(accelerator.pin());
            if config.trace.is_on() {
                let trace = config.trace.clone();
                accelerator
                    .keep_time(Box::new(move || trace.now()))
                    .map_err(std::io::Error::other)?;
            }
        }

        let name = format!("device {id} of process {me}");
        let pool = match &accelerator {
            None => Pool::in_arena(name, config.device_memory, arena),
            Some(accelerator) => Pool::in_arena(
                name,
                config.device_memory,
                &arena.device_beside(accelerator.allocator()),
            ),
        };
        let queue = JobWorker::start(format!("mpmd-{id}"), spin)?;
        Ok(LocalDevice {
            id: *id,
            pool,
            accelerator,
            seen_end: AtomicU64::new(0),
            queue,
        })
    };
    let devices = topology
        .devices_of(me)
        .iter()
        .map(&mut open)
        .collect::<std::io::Result<Vec<LocalDevice>>>()?;

    let accelerators: Vec<_> = devices
        .iter()
        .filter_map(|local| local.accelerator.clone())
        .collect();
    accelerator::reach_each_other(&accelerators);
    Ok(devices)
}

/// Sets up sharing of accelerator memory with the other processes that have accelerators. Does
/// nothing if this process or all others have none.
fn share_devices(
    me: ProcessId,
    topology: &Topology,
    config: &RuntimeConfig,
    devices: &[LocalDevice],
    transport: Option<&dyn Transport>,
) -> std::io::Result<()> {
    let accelerators: Vec<_> = devices
        .iter()
        .filter_map(|device| device.accelerator.clone())
        .collect();
    let has = |process: usize| {
        let process = ProcessId(process as u32);
        let mut kinds = topology
            .devices_of(process)
            .iter()
            .filter_map(|id| topology.device(*id));
        process != me && kinds.any(|device| device.kind.is_accelerator())
    };
    let with: Vec<bool> = (0..topology.processes()).map(has).collect();
    let (Some(transport), true) = (transport, with.contains(&true)) else {
        return Ok(());
    };

    let Some(sharing) = accelerator::sharing(accelerators) else {
        return Ok(());
    };
    let patience = config.peer_timeout.saturating_add(DEVICES_START_WITHIN);
    transport
        .share_devices(sharing, &with, patience)
        .map_err(std::io::Error::other)
}

fn copy_workers() -> usize {
    thread::available_parallelism().min(MOST_MOVERS)
}

/// Returns one counter per process, all 0.
fn counters(topology: &Topology) -> Vec<AtomicU64> {
    (0..topology.processes())
        .map(|_| AtomicU64::new(0))
        .collect()
}

/// Returns the number of threads of process `me` that may poll at the same time, on a host with
/// `cores` cores. Assumes that each process has one busy program thread and one busy thread per
/// device.
fn core_budget(me: ProcessId, topology: &Topology, cores: usize) -> CoreBudget {
    let host = topology.host_of(me);
    let here = (0..topology.processes()).map(|process| ProcessId(process as u32));
    let here = here.filter(|process| topology.host_of(*process) == host);
    let threads = here.map(|process| 1 + topology.devices_of(process).len());
    let (processes, threads) = threads.fold((0, 0), |(all, sum), threads| (all + 1, sum + threads));
    CoreBudget::of(processes, threads, cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_budget_depends_on_cores_of_the_host() {
        let topology = Topology::even(2, 1);
        let me = ProcessId(0);
        let budgets =
            |topology: &Topology| [1, 2, 3, 4].map(|cores| core_budget(me, topology, cores));
        assert_eq!(
            budgets(&topology),
            [
                CoreBudget::None,
                CoreBudget::One,
                CoreBudget::One,
                CoreBudget::All
            ],
            "two programs, two devices"
        );
        let apart = topology.on_hosts(&["a", "b"]).unwrap();
        assert_eq!(
            budgets(&apart),
            [
                CoreBudget::One,
                CoreBudget::All,
                CoreBudget::All,
                CoreBudget::All
            ]
        );
    }
}
