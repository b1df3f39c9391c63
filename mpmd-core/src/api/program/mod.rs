//! [`Program`]: one process's view of the job, through which it issues operations.

mod agree;
mod builder;
mod compare;
mod connect;
mod costs;
mod holdings;
mod metrics;
mod neighbours;
mod record;
mod simulate;
pub mod transports;
mod values;
mod version;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mpmd_ids::ProcessId;
use mpmd_transport::Pool;
use mpmd_transport::deadline::after;
use mpmd_transport::router::{Failure, FailureKind, OpRecord, Span};

pub use builder::Builder;
pub(crate) use connect::Membership;
pub use holdings::{Holdings, MemoryUse};
pub use metrics::{Metrics, PlanCacheMetrics};
pub(crate) use metrics::{PlanCache, PutKey};
use simulate::Vanishing;
pub use simulate::{Simulation, simulate};

use crate::api::replay::Recording;
use crate::error::{Error, Result};
use crate::exec::recorder::Recorder;
use crate::exec::{Doing, Rolling, Runtime};
use crate::trace::{Label, What};
use mpmd_layout::topology::{DeviceId, Mesh, Topology};

/// One process's part of a job: every process of the job runs the same program and issues the same
/// operations in the same order.
///
/// `Send` but not `Sync`, and issuing takes `&mut`: there is one order. Nothing here blocks but
/// [`Program::agree`], [`Program::finish`], and the bounds on running ahead.
///
/// [`Program::run`] joins, runs and finishes. After [`Program::from_env`] call [`Program::finish`]
/// at the end. A program that is dropped without it waits at most two seconds for its issued work
/// (not at all in a panic, or where something has failed). It says on standard error what failed,
/// and tells the other processes and `mpmd run`, which then does not exit with 0.
///
/// ```compile_fail,E0277
/// fn is_sync<T: Sync>() {}
/// is_sync::<mpmd_core::Program>();
/// ```
pub struct Program {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) put_plans: PlanCache,
    /// The step that is being recorded, if any.
    pub(crate) recording: Option<Box<Recording>>,
    label: Option<Label>,
    /// Where the operations that are issued come from, where that is not their caller.
    at: Option<&'static Location<'static>>,
    count: u64,
    hash: Rolling,
    /// The rolling hash at the last operation, without what was mixed in since.
    hash_at_last: u128,
    steps: u64,
    planning: bool,
    ended: bool,
    vanishing: Option<Vanishing>,
    /// What keeps this process in the job: dropped last.
    membership: Option<Membership>,
    /// Makes the program `!Sync`.
    one_issuer: PhantomData<Cell<()>>,
}

impl Program {
    /// Joins the job that this process was started for, runs `program` and finishes: a whole
    /// `main`. Returns the value that `program` returns.
    ///
    /// As [`Builder::run`], with default settings.
    ///
    /// # Errors
    ///
    /// As [`Builder::run`].
    #[track_caller]
    pub fn run<T, E>(program: impl Fn(&mut Self) -> Result<T, E>) -> Result<T, E>
    where
        E: From<Error> + fmt::Display,
    {
        Self::builder().run(program)
    }

    /// Joins the job that this process was started for, or starts one of its own.
    ///
    /// The program must be [finished](Self::finish), which [`Program::run`] does by itself.
    ///
    /// Reads what `mpmd run`, torchrun, Slurm, Open MPI or a Kubernetes indexed job set. Where none
    /// did, the job has this process alone.
    ///
    /// # Errors
    ///
    /// Where the job cannot be formed; the error names what was looked at, and who is missing.
    pub fn from_env() -> Result<Self> {
        Self::builder().from_env()
    }

    /// Settings other than the defaults.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn new(
        runtime: Arc<Runtime>,
        planning: bool,
        membership: Option<Membership>,
        plans: usize,
    ) -> Self {
        Self {
            runtime,
            put_plans: PlanCache::new(plans),
            recording: None,
            label: None,
            at: None,
            count: 0,
            hash: Rolling::default(),
            hash_at_last: 0,
            steps: 0,
            planning,
            ended: false,
            vanishing: None,
            membership,
            one_issuer: PhantomData,
        }
    }

    /// This process. Where it [only records](Self::is_planning): the process of the job whose part
    /// the program is to take, or one beyond those of the job.
    pub fn process(&self) -> ProcessId {
        self.runtime.recorder.as_ref().map_or(self.runtime.me, Recorder::process)
    }

    /// Number of processes in the job.
    pub fn processes(&self) -> usize {
        self.runtime.topology.processes()
    }

    /// The transport between the processes, as users name it; `none` for a process alone.
    pub fn transport(&self) -> &'static str {
        self.runtime.transport_name()
    }

    /// The devices of the job and who owns them.
    pub fn topology(&self) -> &Topology {
        &self.runtime.topology
    }

    /// Whether this process only records what the others would do: it owns nothing, and runs
    /// neither kernels nor closures. Guards output and files: the number of [the
    /// process](Self::process) does not, since `mpmd check` runs the program under each number of
    /// the job.
    pub fn is_planning(&self) -> bool {
        self.planning
    }

    /// What operations that are issued from now on are for, in a pipeline; `None` for nothing
    /// special. [`Pipeline`](crate::pipeline::Pipeline) says it of its own. Returns what was said
    /// before.
    pub fn set_label(&mut self, label: Option<Label>) -> Option<Label> {
        std::mem::replace(&mut self.label, label)
    }

    /// What the operation that is being issued is for.
    pub(crate) fn label(&self) -> Option<Label> {
        self.label
    }

    /// Has operations come from this line, whoever calls; `None` for their callers'. Returns what
    /// it was before.
    pub(crate) fn set_caller(
        &mut self,
        at: Option<&'static Location<'static>>,
    ) -> Option<&'static Location<'static>> {
        std::mem::replace(&mut self.at, at)
    }

    /// The line that an operation comes from, which `caller` issues.
    pub(crate) fn caller(&self, caller: &'static Location<'static>) -> &'static Location<'static> {
        self.at.unwrap_or(caller)
    }

    /// Operations issued so far.
    pub fn operations(&self) -> u64 {
        self.count
    }

    /// A mesh over all devices of the job, in order, with these axes.
    ///
    /// # Errors
    ///
    /// Where the product of the sizes is not the number of devices.
    pub fn mesh(&self, axes: &[(&str, usize)]) -> Result<Mesh> {
        self.mesh_of(axes, self.runtime.topology.device_ids())
    }

    /// A mesh over chosen devices, row-major.
    ///
    /// # Errors
    ///
    /// Where the devices do not fill the axes, repeat, or are not of this job.
    pub fn mesh_of(&self, axes: &[(&str, usize)], devices: &[DeviceId]) -> Result<Mesh> {
        let mesh = Mesh::new(axes, devices.to_vec())?;
        mesh.replicated().check_devices(&self.runtime.topology)?;
        Ok(mesh)
    }

    /// Has the devices of this process map blocks of these bytes beside those in use, as far as
    /// there is memory.
    pub(crate) fn map_blocks(&self, blocks: &BTreeMap<DeviceId, Vec<u64>>) {
        for device in &self.runtime.devices {
            let sizes = blocks.get(&device.id).into_iter().flatten();
            // Held until all are there; then they are the pool's.
            let mapped: Vec<_> =
                sizes.map_while(|bytes| device.pool.allocate(*bytes as usize).ok()).collect();
            drop(mapped);
        }
        self.forget_memory_peak();
    }

    /// Has [`MemoryUse::recent_peak`] start anew, from what is in use now.
    pub fn forget_memory_peak(&self) {
        let pools = self.runtime.devices.iter().map(|device| &device.pool);
        pools.chain([&self.runtime.staging]).for_each(Pool::forget_peak);
    }

    /// Ends a step: for plans and traces, and a point at which the processes compare what they
    /// issued.
    ///
    /// Does not wait for anything. A process that was started to write its plan
    /// ([`variables::PLAN`](mpmd_launch::variables::PLAN)) ends here with exit code 0 once the
    /// plan is whole: the last two steps are equal, or as many were recorded as were asked for.
    ///
    /// # Errors
    ///
    /// Where the plan cannot be written. Where the job is known to have failed: an operation of
    /// this process did, a process is gone, or the programs diverged. Unlike errors of other calls
    /// this one depends on what has happened so far, and processes may see it in different steps.
    /// Also within a step that is recorded.
    #[track_caller]
    pub fn step_end(&mut self) -> Result<()> {
        self.refuse_recording(Location::caller(), "step_end")?;
        self.steps += 1;
        let step = self.steps;
        // So that steps which look alike cannot hide an operation that is missing from one of them.
        self.hash = self.hash.mix(0x57e9).mix(step);
        self.runtime.with_router(|router| router.step_end(step));
        self.record_step()?;
        self.runtime.trace.note(|| What::StepEnd { step, op: self.count });
        self.runtime.trouble().map_or(Ok(()), |failure| Err(Error::failed(failure)))
    }

    /// Waits until this process's operations have ended, closures given to
    /// [`MpmdArray::then`](crate::MpmdArray::then) included, and every other process has finished
    /// too.
    ///
    /// # Errors
    ///
    /// The first failure of an operation of this process, of the job, or of a peer.
    #[track_caller]
    pub fn finish(mut self) -> Result<()> {
        let at = Location::caller();
        self.ended = true;
        if self.planning {
            // In no job: nothing to wait for, and nobody to take leave of.
            return self.record_end();
        }
        let waiting = self.runtime.trace.wait("finish", at);
        self.runtime.wait_idle();
        self.runtime.wait_for_callbacks();
        drop(waiting);
        let result = match self.runtime.trouble() {
            Some(failure) => Err(failure),
            None => {
                self.runtime.with_router(|router| router.goodbye(None, self.runtime.now()));
                self.runtime.wait_for_peers()
            }
        };
        let failure = result.as_ref().err();
        let report = failure.map(|failure| self.runtime.report_of(failure, true));
        self.runtime.leave(failure.map(|failure| &**failure));
        self.end_trace();
        if let Some(membership) = self.membership.take() {
            membership.leave(report);
        }
        result.map_err(Error::failed)
    }

    /// Finishes a program that ran to a good end. Leaves one that returned an error, without
    /// waiting for its work.
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

    /// Leaves a job whose program is not finished; `how` is said where nothing else has failed.
    /// Returns the failure that everybody is told.
    fn abandon(&mut self, how: &str) -> Arc<Failure> {
        self.ended = true;
        let me = self.runtime.me;
        // An earlier failure goes to the others unchanged: they want to read its root.
        let failure = self.runtime.trouble().unwrap_or_else(|| {
            Arc::new(Failure::new(FailureKind::Left, me, self.count, format!("process {me} {how}")))
        });
        tracing::warn!(%failure, "a program ends without `finish`");
        let report = self.runtime.report_of(&failure, false);
        self.runtime.leave(Some(&failure));
        // Without another look at the clocks: nothing here may wait for anybody.
        self.runtime.trace.close();
        if let Some(membership) = self.membership.take() {
            membership.leave(Some(report));
        }
        failure
    }

    /// Takes the next number for an operation.
    ///
    /// `words` are everything about it that must be equal on all processes.
    pub(crate) fn issue(
        &mut self,
        words: impl IntoIterator<Item = u64>,
        what: Arc<dyn fmt::Display + Send + Sync>,
        at: &'static Location<'static>,
    ) -> u64 {
        self.issue_with_values(words, None, what, at)
    }

    /// Takes the next number for an operation on host values. `values` is their
    /// [hash](Self::hash_values), which must be equal on all processes like `words`.
    pub(crate) fn issue_with_values(
        &mut self,
        words: impl IntoIterator<Item = u64>,
        values: Option<u64>,
        what: Arc<dyn fmt::Display + Send + Sync>,
        at: &'static Location<'static>,
    ) -> u64 {
        self.count += 1;
        let (hash, values) = words.into_iter().fold(self.hash, Rolling::mix).mix_values(values);
        self.hash = hash;
        self.hash_at_last = hash.value();
        if let Some(vanishing) = &self.vanishing {
            vanishing.strike(self.count, &self.runtime);
        }
        self.runtime.record(OpRecord {
            op: self.count,
            hash: self.hash_at_last,
            what,
            values,
            note: self.label.map(Label::note),
            at,
        });
        self.count
    }

    /// Compares clocks once more, so that what drift there was is known, and ends the trace.
    fn end_trace(&self) {
        if let Some(membership) = &self.membership {
            membership.compare_clocks(&self.runtime.trace);
        }
        self.runtime.trace.close();
    }

    /// Takes the numbers up to `op`, which are those of a step that is replayed.
    pub(crate) fn advance(&mut self, op: u64, span: &Arc<dyn Span>) {
        if op == self.count {
            return;
        }
        if let Some(vanishing) = &self.vanishing {
            (self.count + 1..=op).for_each(|op| vanishing.strike(op, &self.runtime));
        }
        self.count = op;
        self.hash_at_last = span.hash_at(op);
        self.runtime.record_span(op, span);
    }

    /// Returns the rolling hash at the operation that was issued last, as peers see it.
    pub(crate) fn hash_at_last(&self) -> u128 {
        self.hash_at_last
    }

    /// The rolling hash of what was issued so far.
    pub(crate) fn rolling(&self) -> Rolling {
        self.hash
    }

    /// The rolling hash at the end of a step that was replayed.
    pub(crate) fn set_rolling(&mut self, hash: Rolling) {
        self.hash = hash;
    }

    /// Waits until the program may run further ahead of what has been carried out.
    ///
    /// Only ever for operations issued before: those need nothing of what comes after.
    pub(crate) fn admit(&self, at: &'static Location<'static>) {
        let runtime = &self.runtime;
        let (ops, bytes) = (runtime.config.run_ahead_ops, runtime.config.run_ahead_bytes);
        let (most_ops, most_bytes) = runtime.in_flight.at_most();
        if most_ops < ops && most_bytes < bytes {
            return;
        }
        let counts = runtime.in_flight.counts();
        if counts.ops < ops && counts.bytes < bytes {
            return;
        }
        let _doing = runtime.status.enter(Doing::Waiting("running ahead", at));
        let _waiting = runtime.trace.wait("running ahead", at);
        loop {
            let deadline = after(Instant::now(), runtime.config.patience);
            let enough = runtime.in_flight.wait_until(deadline, |counts| {
                counts.ops == 0 || (counts.ops < ops && counts.bytes < bytes)
            });
            if enough {
                return;
            }
            runtime.report_hang(&format!(
                "process {}: {at} waits for {} operations issued before it; {}",
                runtime.me,
                runtime.in_flight.counts().ops,
                runtime.doing_and_why()
            ));
        }
    }
}

/// The longest wait for issued work when a program is dropped without [`Program::finish`].
const WORK_OF_UNFINISHED: Duration = Duration::from_secs(2);

/// Shows the user a line. In one write: other processes of the job may be writing to the same
/// place.
fn say(line: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("mpmd: {line}\n").as_bytes());
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if std::thread::panicking() {
            // The panic has said why.
            self.abandon("panicked before its program finished");
            return;
        }
        // Of a plan nothing is carried out, and nobody waits for a process alone that has issued
        // nothing.
        let is_missed = !self.planning && (self.count > 0 || self.processes() > 1);
        if is_missed {
            self.runtime.wait_briefly(WORK_OF_UNFINISHED);
        }
        let failure = self.abandon(
            "ended before its program finished: its `Program` was dropped without `finish`",
        );
        if is_missed {
            say(&match failure.kind {
                FailureKind::Left if failure.process == self.process() => failure.to_string(),
                _ => format!("process {} did not finish its program: {failure}", self.process()),
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
