//! [`Program`]: one process's view of the job. The user's program issues its operations through it.
//!
//! It numbers and hashes every operation, so that processes detect diverging programs. It bounds
//! how far the program runs ahead, and ends the job's connections. The runtime carries out the
//! operations.

mod assert_same;
mod broadcast_value;
mod builder;
mod candidate;
mod capture;
mod connect;
mod dry_run;
mod epochs;
mod facts;
mod issue;
mod job_size;
mod kept_plans;
mod locality;
mod membership;
mod metrics;
mod neighbours;
mod put_plan_cache;
mod recomputation;
mod simulate;
pub mod transports;
mod values;
mod vectors;
mod version;

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Mutex, thread};
use mpmd_memory::Pool;
use mpmd_proto::router::{Failure, FailureKind};

pub use builder::Builder;
pub(crate) use builder::{LayoutFn, devices_of_size};
pub(crate) use candidate::EpochStart;
pub(crate) use capture::{ArrayOrigin, Capture, CapturedInput, CapturedOp, StepDonation};
pub(crate) use connect::{EnvironmentJob, SideJob, SimulatedTransport, join_beside};
pub(crate) use epochs::{EpochEnd, JobChange};
use issue::IssueHook;
pub(crate) use issue::{Again, IssuedOp, NewOp, OpPart, Replayed};
use kept_plans::KeptPlans;
use membership::Membership;
pub(crate) use membership::Returning;
pub use metrics::{MemoryUse, ProgramMetrics};
pub use put_plan_cache::PlanCacheMetrics;
pub(crate) use put_plan_cache::{PlanCache, PutKey};
use recomputation::Recomputed;
pub(crate) use recomputation::{Comparison, Convicted, RecomputedCall, checkers};
pub(crate) use simulate::EpochsOfProcess;
pub use simulate::{Simulation, SimulationReport, simulate};
use values::LargeValueCalls;

use crate::error::{Error, Result};
use crate::exec::dry_run::DryRunBuilder;
use crate::exec::recovery_store::RecoveryStore;
use crate::exec::{Rolling, Runtime};
use crate::trace::spans::StepSpan;
use crate::warning::warn_user;
use mpmd_layout::topology::{DeviceId, Mesh, Topology};
use mpmd_record::trace::{Label, TraceEventKind};

/// One process's part of a job. Every process of the job runs the same program and issues the same
/// operations in the same order.
///
/// `Send` but not `Sync`, and issuing takes `&mut`, so the order of operations is unique. Of the
/// calls of a started program, only [`Program::broadcast_value`], [`Program::sync`],
/// [`Program::finish`] and issuing may block. Issuing blocks while the program is too far ahead or
/// memory is short.
///
/// [`Program::run`] joins, runs and finishes. After [`Program::from_env`], call [`Program::finish`]
/// at the end. A program that is dropped without it waits at most two seconds for its issued work.
/// It does not wait in a panic or after a failure. It prints the failure to standard error, and
/// reports it to the other processes and to `mpmd run`, which then does not exit with 0.
///
/// ```compile_fail,E0277
/// fn is_sync<T: Sync>() {}
/// is_sync::<mpmd_core::Program>();
/// ```
pub struct Program {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) put_plans: PlanCache,
    pub(crate) computed: KeptPlans,
    /// The step that is being captured, if any.
    pub(crate) capture: Option<Box<Capture>>,
    recomputed: Recomputed,
    label: Option<Label>,
    /// The source line that operations get instead of their caller's; `None` to use the caller's.
    at: Option<&'static Location<'static>>,
    count: u64,
    hash: Rolling,
    /// The rolling hash right after the last operation. Unlike `hash`, it does not include step
    /// ends that came later.
    hash_at_last: u128,
    large_value_calls: LargeValueCalls,
    steps: u64,
    /// The log's span of the current step.
    step_span: StepSpan,
    is_dry_run: bool,
    stopped_by: Option<i32>,
    ended: bool,
    /// A function called with the number of each operation when it is issued. Only a simulation
    /// sets it.
    on_issue: Option<IssueHook>,
    /// The copies of committed state; `None` unless the program recovers.
    pub(crate) kept: Option<Arc<Mutex<RecoveryStore>>>,
    /// True if the job may have more or fewer processes in a later epoch.
    pub(crate) may_change: bool,
    /// The agreed change of the job that ends this epoch, if there is one.
    pub(crate) change: Option<JobChange>,
    /// The connection to the rendezvous, which keeps this process in the job. Must be dropped last.
    membership: Option<Membership>,
    /// Marker that makes the program `!Sync`.
    one_issuer: PhantomData<Cell<()>>,
}

impl Program {
    /// Joins the job that this process was started for, runs `program` and finishes. This can be
    /// the whole `main`. Returns the value of `program`.
    ///
    /// Does the same as [`Builder::run`], with default settings.
    ///
    /// # Errors
    ///
    /// The errors of [`Builder::run`].
    #[track_caller]
    pub fn run<T, E>(program: impl Fn(&mut Self) -> Result<T, E>) -> Result<T, E>
    where
        E: From<Error> + fmt::Display,
    {
        Self::builder().run(program)
    }

    /// Joins the job that this process was started for, or starts a job of its own. Blocks until
    /// all processes of the job are connected.
    ///
    /// The program must be [finished](Self::finish); [`Program::run`] does this itself.
    ///
    /// Reads the environment variables of `mpmd run`, torchrun, Slurm, Open MPI or a Kubernetes
    /// indexed job. If none of them are set, the job consists of this process.
    ///
    /// # Errors
    ///
    /// If the job cannot be formed. The error names the variables that were read and the missing
    /// processes.
    pub fn from_env() -> Result<Self> {
        Self::builder().from_env()
    }

    /// Writes the `tracing` events of this process to standard error. The filter in `RUST_LOG`
    /// selects events; by default warnings, errors, and a server's requests. Does nothing if a
    /// `tracing` subscriber is installed already.
    pub fn log_to_stderr() {
        mpmd_launch::log_to_stderr();
    }

    /// Returns a [`Builder`], with which a program sets options before it starts.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn new(
        runtime: Arc<Runtime>,
        is_dry_run: bool,
        membership: Option<Membership>,
        plans: usize,
    ) -> Self {
        Self {
            runtime,
            put_plans: PlanCache::new(plans),
            computed: KeptPlans::default(),
            capture: None,
            recomputed: Recomputed::default(),
            label: None,
            at: None,
            count: 0,
            hash: Rolling::default(),
            hash_at_last: 0,
            large_value_calls: LargeValueCalls::default(),
            steps: 0,
            step_span: StepSpan::default(),
            is_dry_run,
            stopped_by: None,
            ended: false,
            on_issue: None,
            kept: None,
            may_change: false,
            change: None,
            membership,
            one_issuer: PhantomData,
        }
    }

    /// Returns the number of this process. In a [dry run](Self::is_dry_run) this is the number of
    /// the process that the dry run stands for, or a number beyond the job's.
    pub fn process(&self) -> ProcessId {
        self.runtime
            .dry_run
            .as_ref()
            .map_or(self.runtime.me, DryRunBuilder::process)
    }

    /// Returns the number of processes in the job.
    pub fn processes(&self) -> usize {
        self.runtime.topology.processes()
    }

    /// Returns the name of the transport between the processes; `none` for a job of one process.
    pub fn transport(&self) -> &'static str {
        self.runtime.transport_name()
    }

    /// Returns the devices of the job and their owners.
    pub fn topology(&self) -> &Topology {
        &self.runtime.topology
    }

    /// True in a dry run, which only lists the operations of all processes. A dry run owns no
    /// devices, and runs neither kernels nor closures. Use this method to guard output and files.
    /// The number of the [process](Self::process) is not enough, since `mpmd check` runs the
    /// program under each number of the job.
    pub fn is_dry_run(&self) -> bool {
        self.is_dry_run
    }

    /// Returns the number of the signal that has stopped the program's work early, such as 2 after
    /// Ctrl-C. `None` if the work was not stopped: see [`set_stopped_by`](Self::set_stopped_by).
    pub fn stopped_by(&self) -> Option<i32> {
        self.stopped_by
    }

    /// Notes that the program has heeded a signal with this number, and does not complete its work.
    /// A trainer does this itself. A program that `mpmd::job` has started then ends with exit code
    /// 128 plus `signal`, unless it fails. Has no other effect. All processes must note the same.
    pub fn set_stopped_by(&mut self, signal: i32) {
        self.stopped_by = Some(signal);
    }

    /// Sets the label of the operations that are issued from now on: their role in a pipeline.
    /// `None` removes the label. [`Pipeline`](crate::pipeline::Pipeline) labels its own operations.
    /// Returns the previous label.
    pub fn set_label(&mut self, label: Option<Label>) -> Option<Label> {
        std::mem::replace(&mut self.label, label)
    }

    /// Returns the label of operations that are issued now, if one is set.
    pub(crate) fn label(&self) -> Option<Label> {
        self.label
    }

    /// Sets the source line that operations get from now on. With `None`, each operation gets the
    /// line of its caller. Returns the previous value.
    pub(crate) fn set_caller(
        &mut self,
        at: Option<&'static Location<'static>>,
    ) -> Option<&'static Location<'static>> {
        std::mem::replace(&mut self.at, at)
    }

    /// Returns the source line for an operation: the line set by [`set_caller`](Self::set_caller),
    /// else `caller`.
    pub(crate) fn caller(&self, caller: &'static Location<'static>) -> &'static Location<'static> {
        self.at.unwrap_or(caller)
    }

    /// Returns the number of operations that this process's program has issued so far.
    pub fn operations(&self) -> u64 {
        self.count
    }

    /// Returns this process's own network address at the rendezvous of its job. `None` without a
    /// rendezvous.
    pub(crate) fn rendezvous_address(&self) -> Option<SocketAddr> {
        self.membership
            .as_ref()
            .map(|membership| membership.rendezvous.local_address())
    }

    /// Creates a mesh with these axes over all devices of the job, in row-major order. One size may
    /// be -1, which stands for the number of remaining devices.
    ///
    /// # Errors
    ///
    /// If the product of the sizes is not the number of devices.
    pub fn mesh<S: Copy + TryInto<isize>>(&self, axes: &[(&str, S)]) -> Result<Mesh> {
        self.mesh_of(axes, self.runtime.topology.device_ids())
    }

    /// Creates a mesh with these axes over `devices`, in row-major order. One size may be -1, which
    /// stands for the number of remaining devices.
    ///
    /// # Errors
    ///
    /// If the devices do not fill the axes, repeat, or are not of this job.
    pub fn mesh_of<S: Copy + TryInto<isize>>(
        &self,
        axes: &[(&str, S)],
        devices: &[DeviceId],
    ) -> Result<Mesh> {
        let mesh = Mesh::new(axes, devices.to_vec())?;
        mesh.replicated().check_devices(&self.runtime.topology)?;
        Ok(mesh)
    }

    /// Resets [`MemoryUse::recent_peak`] and [`MemoryUse::staging_recent_peak`] to the memory in
    /// use now.
    pub fn forget_memory_peak(&self) {
        let pools = self.runtime.devices.iter().map(|device| &device.pool);
        pools
            .chain([&self.runtime.staging])
            .for_each(Pool::forget_peak);
    }

    /// Ends a step, for dry runs and traces. At this point the processes compare the operations
    /// that they issued.
    ///
    /// Does not block by default. With [`Builder::check_replay`] it reads the comparisons of the
    /// step before, and blocks until they have arrived.
    ///
    /// A process that was started to write its dry run
    /// ([`variables::DRY_RUN`](mpmd_launch::variables::DRY_RUN)) exits here with code 0 when the
    /// dry run is complete. It is complete when the requested number of steps is over. If no number
    /// is requested, it is complete when the last two steps are equal, or 16 are over.
    ///
    /// # Errors
    ///
    /// If the dry run cannot be written. If this call is within a captured step. If the job is
    /// known to have failed: an operation of this process failed, a process is gone, or the
    /// programs diverged. Unlike errors of other calls this one depends on timing, so processes may
    /// see it in different steps.
    #[track_caller]
    pub fn step_end(&mut self) -> Result<()> {
        self.refuse_in_capture(Location::caller(), "step_end")?;
        self.steps += 1;
        let step = self.steps;
        self.step_span.end();

        // Makes each step distinct. Otherwise equal steps could hide an operation that one of them
        // lacks.
        self.hash = self.hash.mix(0x57e9).mix(step);

        self.runtime.step_ends(step, self.count);
        self.runtime.with_router(|router| router.step_end(step));
        self.end_dry_step()?;
        self.read_comparisons(false);

        self.runtime.trace.note(|| TraceEventKind::StepEnd {
            step,
            op: self.count,
        });
        self.runtime
            .trouble()
            .map_or(Ok(()), |failure| Err(Error::failed(failure)))
    }

    /// Runs `f`, and records its time as a range with this name: in the [trace](Builder::trace) on
    /// the program's row, and as a span `annotation` in the log. Returns the result of `f`. Ranges
    /// may be nested.
    ///
    /// The range covers only the time in which `f` issues operations, which may end later. Call
    /// [`Program::sync`] at the end of `f` to include their execution. A range is also recorded if
    /// `f` returns early or panics. Without a trace and a log, recording takes no measurable time.
    #[track_caller]
    pub fn annotate<T>(&mut self, name: &str, f: impl FnOnce(&mut Self) -> T) -> T {
        let _range = self.runtime.trace.annotate(name, Location::caller());
        f(self)
    }

    /// Blocks until this process's operations have ended and every other process has finished too.
    /// Closures given to [`MpmdArray::then`](crate::MpmdArray::then) count as operations.
    ///
    /// # Errors
    ///
    /// The first failure of an operation of this process, of the job, or of a peer.
    #[track_caller]
    pub fn finish(mut self) -> Result<()> {
        let at = Location::caller();
        self.ended = true;
        if self.is_dry_run {
            // A dry run is in no job: there are no operations to wait for and no peers to notify.
            return self.finish_dry_run();
        }

        let result = self.wait_for_end(at);
        self.leave_at_end(result)
    }

    /// Leaves the job after its end. `result` has the failure that ended it, if there was one.
    fn leave_at_end(mut self, result: Result<(), Arc<Failure>>) -> Result<()> {
        self.ended = true;
        let failure = result.as_ref().err();
        let report = failure.map(|failure| self.runtime.report_of(failure, true));
        self.runtime.leave(failure.map(|failure| &**failure));

        self.end_trace();
        match (self.membership.take(), report) {
            (Some(membership), None) => membership.end(),
            (Some(membership), report) => membership.leave(report),
            (None, _) => {}
        }

        result.map_err(Error::failed)
    }

    /// Blocks until this process's operations have ended and every other process has finished too.
    fn wait_for_end(&mut self, at: &'static Location<'static>) -> Result<(), Arc<Failure>> {
        let waiting = self.runtime.trace.wait("finish", at);
        self.runtime.wait_idle();
        self.runtime.wait_for_callbacks();
        drop(waiting);

        // Comparisons that are pending are results, too.
        self.read_comparisons(true);
        if let Some(failure) = self.runtime.trouble() {
            return Err(failure);
        }

        self.runtime
            .with_router(|router| router.goodbye(None, self.runtime.now()));
        self.runtime.wait_for_peers()
    }

    /// Ends the program and returns `result`. If `result` is a value, first
    /// [finishes](Self::finish) the program, which blocks and may fail. If it is an error, leaves
    /// the job without waiting for issued work and reports the error to the peers.
    #[track_caller]
    pub(crate) fn conclude<T, E>(mut self, result: Result<T, E>) -> Result<T, E>
    where
        E: From<Error> + fmt::Display,
    {
        match result {
            Ok(value) => {
                self.finish()?;
                Ok(value)
            }
            Err(error) => {
                self.abandon(&format!("ended before its program finished: {error:#}"));
                Err(error)
            }
        }
    }

    /// Leaves a job before its program has finished. Reports an earlier failure to the peers if
    /// there is one, else `how`. Returns the reported failure.
    fn abandon(&mut self, how: &str) -> Arc<Failure> {
        self.ended = true;
        let me = self.runtime.me;
        // The peers get an earlier failure unchanged, so that they see the root cause.
        let failure = self.runtime.cause().unwrap_or_else(|| {
            Arc::new(Failure::new(
                FailureKind::Left,
                me,
                self.count,
                format!("process {me} {how}"),
            ))
        });

        tracing::debug!(%failure, "a program ends without `finish`");
        let report = self.runtime.report_of(&failure, false);
        self.runtime.leave(Some(&failure));

        // Does not compare clocks: nothing here may wait for a peer.
        self.runtime.trace.close();
        if let Some(membership) = self.membership.take() {
            membership.leave(Some(report));
        }

        failure
    }

    /// Compares this process's clock with the rendezvous service's a last time, which gives the
    /// clock drift, and ends the trace.
    fn end_trace(&self) {
        if let Some(membership) = &self.membership {
            membership.compare_clocks(&self.runtime.trace);
        }
        self.runtime.trace.close();
    }
}

/// The longest wait for issued work when a program is dropped without [`Program::finish`].
const WORK_OF_UNFINISHED: Duration = Duration::from_secs(2);

impl Drop for Program {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if thread::panicking() {
            // The panic has already printed its reason.
            self.abandon("panicked before its program finished");
            return;
        }

        // A dry run has no work to wait for. A process alone that has issued nothing has none
        // either.
        let is_missed = !self.is_dry_run && (self.count > 0 || self.processes() > 1);
        if is_missed {
            self.runtime.wait_briefly(WORK_OF_UNFINISHED);
        }

        let failure = self.abandon(
            "ended before its program finished: its `Program` was dropped without `finish`",
        );
        if is_missed {
            warn_user(&match failure.kind {
                FailureKind::Left if failure.process == self.process() => failure.to_string(),
                _ => format!(
                    "process {} did not finish its program: {failure}",
                    self.process()
                ),
            });
        }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Program(process {} of {}, {} operations issued)",
            self.process(),
            self.processes(),
            self.count
        )
    }
}
