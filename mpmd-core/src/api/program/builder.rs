//! Settings of a program, and the ways to start one.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::Spin;
use mpmd_base::{ProcessId, counted};
use mpmd_device::cuda;
use mpmd_rendezvous::Fact;
use mpmd_transport::Transport;

use super::facts::ProgramFacts;
use super::job_size::JobSize;
use super::membership::Membership;
use super::version::JobChecks;
use super::{Program, connect};
use crate::error::{Error, Result};
use crate::exec::dry_run::{DryRunBuilder, Order};
use crate::exec::{Runtime, RuntimeConfig};
use crate::trace::Trace;
use mpmd_launch::{DEFAULT_PEER_TIMEOUT, variables};
use mpmd_layout::topology::{CudaCollectives, DeviceId, DeviceKind, GpuId, LinkSpeeds, Topology};
use mpmd_record::trace::TraceHeader;

/// Factor of the first epoch's number of processes, up to which the layout function is called.
const MOST_TIMES: usize = 4;

/// Minimum, in a small job, of the largest number of processes for which the layout function is
/// called.
const LEAST_ASKED: usize = 256;

/// A layout function: returns the number of devices that a program uses with a number of processes.
/// An error is the reason why the program cannot run with that number.
pub(crate) type LayoutFn = dyn Fn(usize) -> Result<usize, String> + Send + Sync;

/// The reason why a program cannot run with a number of processes.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LayoutRefusal {
    /// The layout function returned this reason.
    #[error("{0}")]
    Layout(String),
    /// The layout has fewer devices than processes. Each process needs a device for its part of the
    /// state.
    #[error(
        "its layout has {} for {}, and each process needs one",
        counted(*devices, "device"),
        counted(*processes, "process")
    )]
    FewDevices { devices: usize, processes: usize },
}

/// Returns the number of devices that the layout function gives for `size` processes. Fails if it
/// refuses the number or leaves a process without a device.
pub(crate) fn devices_of_size(layout: &LayoutFn, size: usize) -> Result<usize, LayoutRefusal> {
    let devices = layout(size).map_err(LayoutRefusal::Layout)?;
    match devices < size {
        true => Err(LayoutRefusal::FewDevices {
            devices,
            processes: size,
        }),
        false => Ok(devices),
    }
}

/// Settings of a [`Program`]. The defaults suit most programs.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it starts a program"]
pub struct Builder {
    pub(super) devices: Option<usize>,
    devices_by_process: Option<Vec<usize>>,
    /// The number of the job's epoch, from 1.
    pub(super) epoch: u64,
    pub(super) peer_timeout: Option<Duration>,
    pub(super) spin: Option<Spin>,
    heartbeat: Duration,
    run_ahead_ops: usize,
    run_ahead_bytes: u64,
    device_memory: Option<u64>,
    plan_cache: usize,
    pub(super) kinds: Option<Vec<DeviceKind>>,
    pub(super) collectives: Option<CudaCollectives>,
    pub(super) hosts: Option<Vec<String>>,
    pub(super) links: Option<LinkSpeeds>,
    pub(super) check_uncommitted: Option<bool>,
    pub(super) check_replicas: Option<bool>,
    pub(super) check_replay: Option<u64>,
    pub(super) trace: Option<PathBuf>,
    pub(super) sync: Option<bool>,
    pub(super) facts: Option<ProgramFacts>,
    /// The numbers of processes and devices that later epochs of the job may have, ascending. Empty
    /// if every epoch has as many processes as the first.
    pub(crate) sizes: Arc<[JobSize]>,
    /// The numbers of processes that the layout function refuses, each with its reason.
    pub(super) refused_sizes: Arc<BTreeMap<u32, String>>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            devices: None,
            epoch: 1,
            peer_timeout: None,
            spin: None,
            heartbeat: Duration::from_millis(500),
            run_ahead_ops: 1024,
            run_ahead_bytes: 4 << 30,
            devices_by_process: None,
            device_memory: None,
            plan_cache: 4096,
            kinds: None,
            collectives: None,
            hosts: None,
            links: None,
            check_uncommitted: None,
            check_replicas: None,
            check_replay: None,
            trace: None,
            sync: None,
            facts: None,
            sizes: Arc::default(),
            refused_sizes: Arc::default(),
        }
    }
}

impl Builder {
    /// Sets the number of devices of the whole job, spread evenly over its processes in order. The
    /// default is one device for each process, or the number of `mpmd run --devices-per-process`. A
    /// number that differs from the launcher's is an error.
    pub fn devices(mut self, devices: usize) -> Self {
        self.devices = Some(devices);
        self
    }

    /// Sets the number of devices of each process, in order, instead of [`Builder::devices`]. A
    /// process may have none. Devices are numbered from 0 on, starting with the devices of process
    /// 0.
    ///
    /// ```
    /// use mpmd_core::Program;
    ///
    /// let p = Program::builder().devices_by_process(&[3]).alone()?;
    /// assert_eq!(p.mesh(&[("x", -1)])?.shape(), [3]);
    /// # p.finish()?;
    /// # Ok::<(), mpmd_core::Error>(())
    /// ```
    pub fn devices_by_process(mut self, devices: &[usize]) -> Self {
        self.devices_by_process = Some(devices.to_vec());
        self
    }

    /// Sets the kinds of the devices. `kinds` has one kind for the devices of all processes, or one
    /// for the devices of each process, in order. The default is the value of `MPMD_DEVICE` or
    /// `mpmd run --device`, if the program joins a job or runs [from its
    /// environment](Self::from_env). Otherwise it is [`DeviceKind::Cpu`].
    ///
    /// A process finds the GPUs of its devices itself, see [`Topology::ordinals`]. It needs a CUDA
    /// driver only if it owns CUDA devices.
    pub fn device_kinds(mut self, kinds: &[DeviceKind]) -> Self {
        self.kinds = Some(kinds.to_vec());
        self
    }

    /// Sets the path of collectives inside kernels on CUDA devices: through host memory, or by
    /// NCCL. The default is the value of `MPMD_CUDA_COLLECTIVES`, if the program joins a job or
    /// runs [from its environment](Self::from_env). Otherwise it is [`CudaCollectives::Host`].
    ///
    /// With [`CudaCollectives::Nccl`], a process with CUDA devices does not start without NCCL.
    pub fn cuda_collectives(mut self, way: CudaCollectives) -> Self {
        self.collectives = Some(way);
        self
    }

    /// Sets the peer timeout. After this time an operation is reported as hanging, the job stops
    /// waiting for a missing process, and a silent peer counts as lost. The default is the
    /// launcher's value (`mpmd run --peer-timeout`), else `MPMD_PEER_TIMEOUT`, else 60 seconds.
    /// Zero is an error of the call that joins the job.
    pub fn peer_timeout(mut self, peer_timeout: Duration) -> Self {
        self.peer_timeout = Some(peer_timeout);
        self
    }

    /// Sets the time for which a thread polls for messages before it sleeps, if the transport can
    /// poll. If waiting threads drive the transport, the time applies to them. The default is the
    /// value of `MPMD_SPIN`, else [`Spin::Auto`].
    pub fn spin(mut self, spin: Spin) -> Self {
        self.spin = Some(spin);
        self
    }

    /// Sets how far the program may run ahead: a number of operations with work on this process
    /// that have not ended, and the bytes of their results. A payload that this process has sent
    /// counts as one more operation, with its bytes, until the receiver has issued the operation
    /// that takes it. At either bound, issuing an operation blocks. The defaults are 1024
    /// operations and 4 GiB. More than 4096 operations count as 4096, and 0 as 1.
    pub fn run_ahead(mut self, ops: usize, bytes: u64) -> Self {
        // Handles that only alias another handle's memory complete one another recursively. The
        // stack limits the length of such a chain.
        self.run_ahead_ops = ops.clamp(1, 4096);
        self.run_ahead_bytes = bytes;
        self
    }

    /// Sets the limit on the memory of arrays on each device, in bytes. An operation that needs
    /// more waits for earlier operations to free memory, and fails if that is not enough. Host
    /// values that were put on a device count on this device, even if it shares their memory. The
    /// default is no limit.
    pub fn device_memory(mut self, bytes: u64) -> Self {
        self.device_memory = Some(bytes);
        self
    }

    /// Sets the number of `device_put` plans that are kept for reuse: 4096 by default, 0 for none.
    /// Each combination of shape, dtype, source sharding and target sharding has its own plan.
    pub fn plan_cache(mut self, entries: usize) -> Self {
        self.plan_cache = entries;
        self
    }

    /// Sets the host of each process, as a name or a number. The planner prefers links within a
    /// host, even if the real link is slower. By default each process finds its own host (the
    /// system's name, or `MPMD_HOST`). In a [`Simulation`](crate::Simulation) the default is one
    /// host for all.
    pub fn hosts<T: ToString>(mut self, hosts: &[T]) -> Self {
        self.hosts = Some(hosts.iter().map(ToString::to_string).collect());
        self
    }

    /// Sets the costs of links between devices, which the planner uses. Must be the same on all
    /// processes. The defaults are rough figures of a common machine.
    pub fn links(mut self, links: LinkSpeeds) -> Self {
        self.links = Some(links);
        self
    }

    /// Compares the replicas of each output of each kernel, and fails the job if two differ. Each
    /// output with replicas costs two operations. Must be the same on all processes. Off by
    /// default; `MPMD_CHECK=replicas` turns it on for a job.
    pub fn check_replicas(mut self, check: bool) -> Self {
        self.check_replicas = Some(check);
        self
    }

    /// Recomputes one kernel call in `every` on another process and compares the bits; 0 for none.
    /// Off by default; `MPMD_CHECK=replay:N` turns it on for a job. Must be the same on all
    /// processes.
    ///
    /// This finds processors that compute wrong bits. Process 0 prints a warning for the first
    /// difference between two processes. It names a process that has differed from two others, with
    /// its host. In a job of two processes it names both. Results are read at the end of the next
    /// step, and when the program finishes.
    ///
    /// Only calls on a single device are recomputed, with whole arrays in device memory and host
    /// values as inputs. Calls that donate inputs, have objects or collectives, or use partial sums
    /// are not checked. Nothing is checked in dry runs, in a job of one process, or if a process
    /// has no device. Calls on a kind of device that only one process has are not checked.
    ///
    /// Each replay of a [captured](crate::Program::capture) step recomputes the calls that were
    /// recomputed at its capture. A pipeline captures its steps anew after 16 replays.
    ///
    /// The same inputs must give the same bits on every process. So kernels must not have state of
    /// their own or atomic additions in arbitrary order, and all processors must be of one model. A
    /// recomputed call takes memory for its inputs and outputs on the other process's device, and
    /// six operations.
    pub fn check_replay(mut self, every: u64) -> Self {
        self.check_replay = Some(every);
        self
    }

    /// Makes each kernel call, move, replay and new array of this process's program wait until its
    /// operations have ended, and return their failure. This is slow, but each error then has the
    /// line of its call. Off by default. `MPMD_SYNC=1` turns it on in a program that does not set
    /// it.
    pub fn sync(mut self, yes: bool) -> Self {
        self.sync = Some(yes);
        self
    }

    /// Sets how the processes compare host values. With `true`, all values are compared whole at
    /// every call. With `false`, most calls compare values of more than 4 KiB only by samples: see
    /// [`MpmdArray::from_host`](crate::MpmdArray::from_host). Every process must use the same
    /// setting. On by default in debug builds, and if the program joins a job with
    /// `MPMD_CHECK=uncommitted`.
    pub fn check_uncommitted(mut self, check: bool) -> Self {
        self.check_uncommitted = Some(check);
        self
    }

    /// Returns true if large host values are compared whole at every call. The default is true in
    /// debug builds.
    pub(super) fn checks_uncommitted(&self) -> bool {
        self.check_uncommitted.unwrap_or(cfg!(debug_assertions))
    }

    pub(super) fn checks(&self) -> JobChecks {
        let replicas = self.check_replicas.unwrap_or(false);
        let replay = self.check_replay.unwrap_or(0);
        JobChecks {
            uncommitted: self.checks_uncommitted(),
            replicas,
            replay,
        }
    }

    /// Makes each process record its operations in a file `process-<n>.trace` in this folder, for
    /// `mpmd trace`. The default is the folder in `MPMD_TRACE`, if the program joins a job or runs
    /// [from its environment](Self::from_env). Without a folder nothing is recorded. Files of an
    /// earlier program are overwritten. In a job that [recovers](crate::RecoveringBuilder), epochs
    /// after the first use subfolders such as `epoch-2`.
    pub fn trace(mut self, folder: impl Into<PathBuf>) -> Self {
        self.trace = Some(folder.into());
        self
    }

    /// Sets the function that returns facts about this process, such as program options and hashes
    /// of files. Facts must be equal on all processes of the job. By default there are none.
    ///
    /// The function is called before this process joins its job, and again when a waiting process
    /// gets a place. If processes differ, the job does not start: all get an error with the facts
    /// and both values. A process that joins later and differs takes no place, and the others go
    /// on.
    ///
    /// ```
    /// use mpmd_core::{Fact, Program, Result};
    ///
    /// let seed = 7;
    /// let builder = Program::builder().facts(move || vec![Fact::new("seed", seed.to_string())]);
    /// builder.run(|p| -> Result<()> {
    ///     assert_eq!(p.processes(), 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mpmd_core::Error>(())
    /// ```
    pub fn facts(mut self, find: impl Fn() -> Vec<Fact> + Send + Sync + 'static) -> Self {
        self.facts = Some(ProgramFacts::new(find));
        self
    }

    /// Joins the job that this process was started for, with these settings. Without such a job,
    /// starts a job of this process alone. Blocks until all processes are connected. See
    /// [`Program::from_env`].
    ///
    /// # Errors
    ///
    /// The errors of [`Program::from_env`].
    pub fn from_env(self) -> Result<Program> {
        connect::from_env(self)
    }

    /// Joins the job that this process was started for, runs `program` and finishes. Returns the
    /// value of `program`. See [`Program::run`].
    ///
    /// Returns an error of `program` at once, without waiting for its issued work, and reports the
    /// error to the other processes and the launcher. If the compiler cannot infer the error type,
    /// annotate it: `|p| -> Result<()> { … }`.
    ///
    /// # Errors
    ///
    /// The errors of `program`, of [`Program::from_env`] and of [`Program::finish`].
    #[track_caller]
    pub fn run<T, E>(self, program: impl Fn(&mut Program) -> Result<T, E>) -> Result<T, E>
    where
        E: From<Error> + fmt::Display,
    {
        let mut p = self.from_env()?;

        let result = program(&mut p);
        p.conclude(result)
    }

    /// Starts a job that consists of this process only. Ignores the environment.
    ///
    /// # Errors
    ///
    /// If the system gives no threads, or there is no CUDA for devices of kind `cuda`.
    pub fn alone(self) -> Result<Program> {
        let topology = self.topology(1, None)?;
        self.start(ProcessId(0), topology, None, None)
    }

    /// Starts a dry run of a job of `processes`. This process owns no devices, connects to no peer,
    /// and never waits: every array is fully remote. The program lists the operations of all
    /// processes, returned by [`Program::dry_run`].
    ///
    /// # Errors
    ///
    /// If the devices cannot be spread evenly.
    pub fn dry_run(self, processes: usize) -> Result<Program> {
        let topology = self.topology(processes, None)?;
        self.start_dry_run(beyond(&topology), topology, None)
    }

    /// Starts a dry run of a job with these devices, in which [`Program::process`] returns
    /// `process`. With `order`, the step end that completes the dry run writes it to a file and
    /// exits this process.
    pub(super) fn start_dry_run(
        self,
        process: ProcessId,
        topology: Topology,
        order: Option<Order>,
    ) -> Result<Program> {
        let dry_run = DryRunBuilder::new(process, &topology, order);

        // The runtime's own number is beyond the job, so that it owns no devices.
        let nobody = beyond(&topology);
        let runtime = Runtime::start(
            nobody,
            topology,
            self.config(Trace::default(), Vec::new()),
            None,
            Some(dry_run),
        )
        .map_err(no_threads)?;

        Ok(Program::new(runtime, true, None, self.plan_cache))
    }

    /// Starts a process of a job over an existing transport, for callers that connect processes
    /// without a rendezvous. The transport must not have been started.
    ///
    /// # Errors
    ///
    /// If the devices cannot be spread evenly, the system gives no threads, or there is no CUDA for
    /// devices of kind `cuda` of this process.
    pub(crate) fn over(self, transport: Arc<dyn Transport>) -> Result<Program> {
        let topology = self.topology(transport.processes(), None)?;
        self.start(transport.process(), topology, Some(transport), None)
    }

    pub(super) fn start(
        self,
        me: ProcessId,
        topology: Topology,
        transport: Option<Arc<dyn Transport>>,
        membership: Option<Membership>,
    ) -> Result<Program> {
        let plans = self.plan_cache;
        match self.start_runtime(me, topology, transport, membership.as_ref()) {
            Ok(runtime) => Ok(Program::new(runtime, false, membership, plans)),
            Err(error) => {
                if let Some(membership) = membership {
                    membership.give_up(me, &error);
                }
                Err(error)
            }
        }
    }

    fn start_runtime(
        self,
        me: ProcessId,
        topology: Topology,
        transport: Option<Arc<dyn Transport>>,
        membership: Option<&Membership>,
    ) -> Result<Arc<Runtime>> {
        has_cuda(me, &topology)?;

        let topology = with_gpus(topology);
        let cuda = match topology.has_kind(me, DeviceKind::Cuda) {
            true => topology.ordinals(me, cuda::found()?.gpus.len() as u32),
            false => Vec::new(),
        };

        let about = about(me, &topology, transport.as_deref());
        let trace = self.begin_trace(about)?;
        if let Some(membership) = membership {
            membership.compare_clocks(&trace);
        }

        let runtime = Runtime::start(me, topology, self.config(trace, cuda), transport, None)
            .map_err(no_threads)?;
        if let Some(membership) = membership {
            membership.watch(&runtime);
        }

        let processes = runtime.topology.processes();
        let transport = runtime.transport_name();
        let cuda = &runtime.config.ordinals;
        tracing::debug!(
            process = me.0,
            processes,
            transport,
            ?cuda,
            "a program starts"
        );

        Ok(runtime)
    }

    /// Returns the devices of a job of `processes`, with the kinds, hosts and links of this
    /// builder. `per_process` is the launcher's number of devices on each process, if it sets one.
    /// Fails if the numbers disagree or cannot be spread evenly.
    pub(crate) fn topology(
        &self,
        processes: usize,
        per_process: Option<usize>,
    ) -> Result<Topology> {
        if let Some(counts) = &self.devices_by_process {
            self.check_counts(counts, processes, per_process)?;
            return self.topology_of(counts);
        }

        let launched = per_process.map(|each| processes.saturating_mul(each));
        if let (Some(devices), Some(each), Some(launched)) = (self.devices, per_process, launched)
            && devices != launched
        {
            return Err(Error::Environment(format!(
                "the program says {}, but --devices-per-process (or {}) says {each} for each of \
                 {}, which makes {launched}: say the same, or one of them alone",
                counted(devices, "device"),
                variables::DEVICES_PER_PROCESS,
                counted(processes, "process")
            )));
        }

        let devices = self.devices.or(launched).unwrap_or(processes);
        if devices == 0 && processes > 0 {
            return Err(Error::Environment(
                "the job has no devices: give `Builder::devices` at least 1".to_owned(),
            ));
        }
        if processes == 0 || devices == 0 || !devices.is_multiple_of(processes) {
            let possible = mpmd_launch::process_counts(devices);
            return Err(Error::Environment(format!(
                "{} cannot be spread evenly over {}: start {possible} processes, or change the \
                 number of devices (`Builder::devices`, or the stages of a model: --stages)",
                counted(devices, "device"),
                counted(processes, "process")
            )));
        }
        self.topology_of(&vec![devices / processes; processes])
    }

    /// Checks the device counts of [`Builder::devices_by_process`]: there is one for each process,
    /// and neither [`Builder::devices`] nor the launcher contradicts them.
    fn check_counts(
        &self,
        counts: &[usize],
        processes: usize,
        per_process: Option<usize>,
    ) -> Result<()> {
        let add = |all: u32, count: &usize| all.checked_add((*count).try_into().ok()?);
        let all = counts.iter().try_fold(0, add).unwrap_or(0);
        let contradicted = self.devices.is_some_and(|devices| devices != all as usize)
            || per_process.is_some_and(|each| counts.iter().any(|count| *count != each));
        if counts.len() == processes && all != 0 && !contradicted {
            return Ok(());
        }

        let devices = self
            .devices
            .map(|all| format!(", `Builder::devices` says {all}"));
        let launched = per_process.map(|each| format!(", --devices-per-process says {each}"));
        Err(Error::Environment(format!(
            "`Builder::devices_by_process` says {counts:?}, and the job has {processes} \
             processes{}{}: give a number for each process, in total at least 1, and no \
             other number of devices",
            devices.unwrap_or_default(),
            launched.unwrap_or_default()
        )))
    }

    /// Returns the devices of the builder's epoch, which has `processes` processes. `topology` has
    /// the devices of the first epoch.
    pub(super) fn resized(&mut self, topology: Topology, processes: usize) -> Result<Topology> {
        if self.epoch == 1 || self.sizes.is_empty() {
            return Ok(topology);
        }

        // Processes may have other numbers than in the first epoch. The members tell their hosts.
        self.hosts = None;
        self.kinds.iter_mut().for_each(|kinds| kinds.truncate(1));

        let size = self
            .sizes
            .iter()
            .find(|size| size.processes as usize == processes);
        let all = topology.devices().len();
        // A replacement may have the place of a lost process under any layout.
        let devices = size.map_or(all, |size| size.devices as usize);
        let is_unchanged = processes == topology.processes() && devices == all;
        let counts = match is_unchanged {
            true => topology.counts(),
            false => Topology::spread(devices, processes).counts(),
        };
        self.topology_of(&counts)
    }

    /// Sets the numbers of processes that later epochs may have: those for which `layout` returns
    /// at least one device for each process. The epoch then has that number of devices. Without
    /// `layout`, it has the devices of `topology`, the first epoch's.
    ///
    /// # Errors
    ///
    /// If the devices are of several kinds.
    pub(crate) fn set_sizes(
        &mut self,
        topology: &Topology,
        layout: Option<&LayoutFn>,
    ) -> Result<()> {
        let mut pairs = topology.devices().windows(2);
        if !pairs.all(|pair| pair[0].kind == pair[1].kind) {
            return Err(Error::Environment(
                "a job that shrinks (`OnLoss::Shrink`) needs devices of one kind".to_owned(),
            ));
        }

        let all = topology.devices().len();
        let asked = topology
            .processes()
            .saturating_mul(MOST_TIMES)
            .max(LEAST_ASKED);
        let largest = layout.map_or(all, |_| asked);
        let mut refused = BTreeMap::new();
        let sizes = (1..=largest).filter_map(|size| {
            let devices = layout
                .map_or(Ok(all), |layout| devices_of_size(layout, size))
                .map_err(|why| refused.insert(size as u32, why.to_string()))
                .ok()?;
            Some(JobSize {
                processes: size as u32,
                devices: u32::try_from(devices).ok()?,
            })
        });
        self.sizes = sizes.collect();
        self.refused_sizes = Arc::new(refused);
        Ok(())
    }

    /// Returns the devices of a job in which process `i` has `counts[i]` devices, with the kinds,
    /// hosts and links of this builder.
    fn topology_of(&self, counts: &[usize]) -> Result<Topology> {
        let mut topology = Topology::with_devices(counts);
        if let Some(kinds) = &self.kinds {
            topology = topology.of_kinds(kinds)?;
        }
        if let Some(hosts) = &self.hosts {
            topology = topology.on_hosts(hosts)?;
        }

        topology = topology.with_cuda_collectives(self.collectives.unwrap_or_default());
        Ok(self
            .links
            .map_or(topology.clone(), |links| topology.with_links(links)))
    }

    /// Returns an error if this machine lacks CUDA or NCCL for the devices of all `processes`
    /// processes. Assumes that all of them run on this machine.
    pub(super) fn can_have_devices(&self, processes: usize) -> Result<()> {
        let needs_cuda = self
            .kinds
            .as_ref()
            .is_some_and(|kinds| kinds.contains(&DeviceKind::Cuda))
            && processes > 0;
        if !needs_cuda {
            return Ok(());
        }
        cuda::found()?;
        has_nccl(self.collectives.unwrap_or_default())
    }

    /// Starts the trace of this process if the builder has a folder for it, and returns it.
    fn begin_trace(&self, about: TraceHeader) -> Result<Trace> {
        let trace = Trace::default();
        let Some(folder) = &self.trace else {
            return Ok(trace);
        };

        let folder = match self.epoch {
            1 => folder.clone(),
            epoch => folder.join(format!("epoch-{epoch}")),
        };

        let process = about.process;
        trace.begin(&folder, about).map_err(|error| {
            let file = folder.display();
            Error::Environment(format!(
                "the trace of process {process} cannot be written in {file}: {error}"
            ))
        })?;
        Ok(trace)
    }

    fn config(&self, trace: Trace, ordinals: Vec<u32>) -> RuntimeConfig {
        let peer_timeout = self.peer_timeout.unwrap_or(DEFAULT_PEER_TIMEOUT);
        RuntimeConfig {
            epoch: self.epoch,
            peer_timeout,
            // A live peer must not count as lost between two heartbeats.
            heartbeat: self.heartbeat.min(peer_timeout / 4),
            run_ahead_ops: self.run_ahead_ops,
            run_ahead_bytes: self.run_ahead_bytes,
            spin: self.spin.unwrap_or_default(),
            device_memory: self.device_memory,
            check_uncommitted: self.checks_uncommitted(),
            check_replicas: self.check_replicas.unwrap_or(false),
            check_replay: self.check_replay.unwrap_or(0),
            sync: self.sync.unwrap_or(false),
            ordinals,
            trace,
        }
    }
}

/// Returns the header of process `me`'s trace.
fn about(me: ProcessId, topology: &Topology, transport: Option<&dyn Transport>) -> TraceHeader {
    let program = std::env::current_exe().unwrap_or_default();
    let kind = |device: &DeviceId| {
        topology
            .kind_of(*device)
            .map_or_else(String::new, |kind| kind.to_string())
    };

    TraceHeader {
        process: me.0,
        processes: topology.processes() as u32,
        devices: topology
            .devices_of(me)
            .iter()
            .map(|device| device.0)
            .collect(),
        kinds: topology.devices_of(me).iter().map(kind).collect(),
        transport: transport
            .map_or("none", |transport| transport.name())
            .to_owned(),
        pid: std::process::id(),
        program: program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        ..TraceHeader::default()
    }
}

/// Returns the lowest process number that is not in the job.
fn beyond(topology: &Topology) -> ProcessId {
    ProcessId(u32::try_from(topology.processes()).unwrap_or(u32::MAX))
}

/// Fails if this process has CUDA devices but no CUDA driver, or needs NCCL and lacks it.
pub(super) fn has_cuda(me: ProcessId, topology: &Topology) -> Result<()> {
    if !topology.has_kind(me, DeviceKind::Cuda) {
        return Ok(());
    }
    cuda::found()?;
    has_nccl(topology.cuda_collectives())
}

fn has_nccl(way: CudaCollectives) -> Result<()> {
    match way {
        CudaCollectives::Host => Ok(()),
        CudaCollectives::Nccl => Ok(cuda::nccl().map(drop)?),
    }
}

/// Returns the ids of the GPUs of `process`, in the order of its CUDA devices. Looks only at GPUs
/// that this process sees. Empty without a CUDA driver.
pub(super) fn gpus_of(process: ProcessId, topology: &Topology) -> Vec<GpuId> {
    let Ok(driver) = cuda::found() else {
        return Vec::new();
    };
    let ordinals = topology.ordinals(process, driver.gpus.len() as u32);
    ordinals
        .into_iter()
        .filter_map(|ordinal| driver.gpus.get(ordinal as usize))
        .map(|gpu| gpu.uuid.0)
        .collect()
}

/// Adds the GPU ids of processes that have not reported theirs, because NCCL needs all ids. Assumes
/// that these processes see the same GPUs as this one.
fn with_gpus(topology: Topology) -> Topology {
    if topology.cuda_collectives() == CudaCollectives::Host {
        return topology;
    }

    let processes = (0..topology.processes() as u32).map(ProcessId);
    processes.fold(topology, |topology, process| {
        match topology.knows_gpus_of(process) {
            true => topology,
            false => topology.with_gpus_of(process, &gpus_of(process, &topology)),
        }
    })
}

fn no_threads(error: std::io::Error) -> Error {
    Error::Environment(format!(
        "the threads of the runtime could not be started: {error}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_alone_or_dry_run_has_no_transport() {
        assert_eq!(Builder::default().alone().unwrap().transport(), "none");
        assert_eq!(Builder::default().dry_run(3).unwrap().transport(), "none");
    }

    #[test]
    fn device_kinds_apply_by_process() {
        use DeviceKind::{Cpu, Cuda};
        let builder = Builder::default().devices(4).device_kinds(&[Cuda, Cpu]);
        let kinds: Vec<_> = builder
            .topology(2, None)
            .unwrap()
            .devices()
            .iter()
            .map(|device| device.kind)
            .collect();
        assert_eq!(kinds, [Cuda, Cuda, Cpu, Cpu]);
        let said = builder
            .devices(3)
            .topology(3, None)
            .unwrap_err()
            .to_string();
        assert!(
            said.starts_with("2 kinds of devices are given for 3 processes"),
            "{said}"
        );
    }

    #[test]
    fn device_counts_of_program_and_launcher_must_match() {
        let devices =
            |builder: Builder, each| builder.topology(2, each).map(|job| job.devices().len());
        let four = || Builder::default().devices(4);
        for (builder, each, expected) in [
            (four(), None, 4),
            (four(), Some(2), 4),
            (Builder::default(), Some(3), 6),
            (Builder::default(), None, 2),
        ] {
            assert_eq!(devices(builder, each).unwrap(), expected);
        }
        for (each, sum) in [(1, 2), (3, 6), (usize::MAX, usize::MAX)] {
            let said = devices(four(), Some(each)).unwrap_err().to_string();
            let both = [
                "the program says 4 devices",
                &format!("says {each} for each of 2 processes"),
                &format!("{sum}:"),
            ];
            assert!(both.iter().all(|part| said.contains(part)), "{said}");
        }
    }

    #[test]
    fn job_without_devices_is_refused_with_the_remedy() {
        let said = Builder::default()
            .devices(0)
            .topology(2, None)
            .unwrap_err()
            .to_string();
        assert!(
            said.ends_with("has no devices: give `Builder::devices` at least 1"),
            "{said}"
        );
    }

    #[test]
    fn cuda_devices_need_a_driver_only_on_their_owner() {
        let program = || Builder::default().device_kinds(&[DeviceKind::Cuda]);
        let dry_run = program().dry_run(2).unwrap();
        assert!(
            dry_run
                .topology()
                .devices()
                .iter()
                .all(|device| device.kind == DeviceKind::Cuda)
        );
        match (program().alone(), cuda::found()) {
            (Ok(program), Ok(_)) => assert_eq!(program.runtime.config.ordinals, [0]),
            (Err(Error::Cuda(error)), Err(why)) => assert_eq!(error, why),
            (program, _) => panic!("{:?}", program.err()),
        }
    }

    #[test]
    fn heartbeat_is_at_most_a_quarter_of_the_timeout() {
        for millis in [40, 400, 60_000] {
            let config = Builder::default()
                .peer_timeout(Duration::from_millis(millis))
                .config(Trace::default(), Vec::new());
            assert!(4 * config.heartbeat <= config.peer_timeout, "{config:?}");
        }
    }
}
