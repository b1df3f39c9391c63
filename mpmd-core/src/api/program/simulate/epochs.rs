//! Simulated jobs over several epochs: processes that are lost are replaced.

use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{join_group, note, simulated};
use mpmd_rendezvous::{Identity, JobMember, LocalServer, SizeRange};

use super::super::builder::LayoutFn;
use super::super::candidate::{Candidate, EpochStart};
use super::super::membership::{MemberJob, Returning};
use super::super::transports::{self, OpenedTransport};
use super::faults::{JobOver, SimulatedParts};
use super::life::{EpochNetwork, NetworkPlace};
use super::{PlannedLoss, ProcessThread, Simulation, SimulationReport};
use crate::error::{Error, Result};
use crate::exec::Runtime;

/// First system id that simulated processes get. No real process has such a high id.
const FIRST_PID: u32 = 1 << 31;

/// A simulated process and its part in a job over several epochs.
pub(crate) struct SimulatedJob<'a> {
    simulation: &'a Simulation,
    parts: &'a SimulatedParts,
    server: Arc<LocalServer>,
    process: ProcessId,
    is_added: bool,
    runtime: Option<Arc<Runtime>>,
}

/// A process that starts later than the job, and waits for a place.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaterProcess {
    after: Duration,
    /// True if the process may make the job larger than at its start.
    is_added: bool,
}

/// The function that a simulated process runs over the epochs of its job. Returns true if the
/// process had a place at the end.
pub(crate) type EpochsOfProcess<'a> =
    Box<dyn FnOnce(&mut SimulatedJob<'_>) -> Result<bool> + Send + 'a>;

impl Simulation {
    /// Adds a process that starts at this time after the start of the job, and waits for the place
    /// of a lost process. For faults, it has the next free process number. Only for
    /// [`run_recovering`](Self::run_recovering).
    pub fn spare_after(mut self, after: Duration) -> Self {
        self.later_processes.push(LaterProcess {
            after,
            is_added: false,
        });
        self
    }

    /// Adds a process at this time after the start of the job, as `mpmd run --add` does. A job that
    /// [shrinks](Self::shrink) may then grow by one. For faults, the process has the next free
    /// number. Only for [`run_recovering`](Self::run_recovering).
    pub fn add_after(mut self, after: Duration) -> Self {
        self.later_processes.push(LaterProcess {
            after,
            is_added: true,
        });
        self
    }

    /// Lets the job [shrink](crate::OnLoss::Shrink) and grow, while its devices stay those of the
    /// start. Only for [`run_recovering`](Self::run_recovering).
    ///
    /// # Panics
    ///
    /// If the devices are of several kinds.
    pub fn shrink_devices_stay(self) -> Self {
        self.shrink_by(None)
    }

    /// Lets the job [shrink](crate::OnLoss::Shrink) and grow, to the numbers of processes that
    /// `layout` allows, as [`RecoveringBuilder::layout`](crate::RecoveringBuilder::layout) does.
    /// Only for [`run_recovering`](Self::run_recovering).
    ///
    /// # Panics
    ///
    /// If the devices are of several kinds.
    pub fn shrink<F>(self, layout: F) -> Self
    where
        F: Fn(usize) -> Result<usize, String> + Send + Sync + 'static,
    {
        self.shrink_by(Some(&layout))
    }

    fn shrink_by(mut self, layout: Option<&LayoutFn>) -> Self {
        let topology = self.builder.topology(self.processes, None);
        let set = topology.and_then(|topology| self.builder.set_sizes(&topology, layout));
        assert!(set.is_ok(), "{set:?}");
        self
    }

    /// Injects a fault: process `process` disappears without a message when it issues operation
    /// `op` in this epoch. Operations count from 0 in each epoch.
    pub fn lose_in(mut self, process: ProcessId, epoch: u64, op: u64) -> Self {
        self.lost.push(PlannedLoss { process, epoch, op });
        self
    }

    /// Number of processes, including spares and processes that start later.
    pub(crate) fn processes_and_spares(&self) -> usize {
        self.processes + self.later_processes.len()
    }

    /// Runs each process on its own thread, in simulated time.
    ///
    /// # Panics
    ///
    /// Without a [seed](Simulation::seed).
    pub(crate) fn run_epochs(
        &self,
        processes: Vec<EpochsOfProcess<'_>>,
    ) -> (Vec<Result<bool>>, SimulationReport) {
        let world = self
            .world
            .as_ref()
            .expect("a simulation with a report has a seed");
        let ((results, parts), report) = simulated(world.clone(), || {
            let network = EpochNetwork::new(self.delays.clone());
            let parts = SimulatedParts::new(network, processes.len());

            let timeout = self
                .builder
                .peer_timeout
                .unwrap_or(mpmd_launch::DEFAULT_PEER_TIMEOUT);
            let run = u128::from(world.seed) + 1;
            let server = LocalServer::start(self.processes, timeout, run);
            let server = Arc::new(server.expect("the system gives a thread"));
            let of_job = LaterProcess {
                after: Duration::ZERO,
                is_added: false,
            };
            let starts = std::iter::repeat_n(of_job, self.processes);
            let starts = starts.chain(self.later_processes.iter().copied());

            let over = JobOver::default();
            let threads = (0..).map(ProcessId).zip(starts).zip(processes);
            let threads = threads.map(|((process, start), run)| -> ProcessThread<'_, _> {
                let LaterProcess { after, is_added } = start;
                let mut job = SimulatedJob {
                    simulation: self,
                    parts: &parts,
                    server: server.clone(),
                    process,
                    is_added,
                    runtime: None,
                };
                let parts = &parts;
                let over = over.clone();
                Box::new(move || {
                    join_group(process.0);
                    let mut result = Ok(false);
                    over.unless_within(after, || {
                        result = job.run(run);
                        parts.lives[process.index()].ends();
                    });
                    result
                })
            });
            let threads = threads.collect();
            drop(server);

            let results = self.run_threads(threads, &parts, &over);
            assert_value_or_error(&results, &parts);
            (results, parts)
        });
        (results, SimulationReport::of(report, parts))
    }
}

/// Panics if a job has ended with neither a value nor an error. Then no process has a value, no
/// surviving process has an error, and one has left after all others were lost.
fn assert_value_or_error(results: &[Result<bool>], parts: &SimulatedParts) {
    let ends = || {
        results
            .iter()
            .zip(parts.lives.iter().map(|life| life.times()))
    };
    let has_said = ends().any(|(result, times)| match result {
        Ok(has_place) => *has_place,
        Err(_) => times.killed.is_none(),
    });
    if has_said {
        return;
    }

    let last_killed = ends().filter_map(|(_, times)| times.killed).max();
    let left = ends().filter(|(result, _)| result.is_ok());
    let last_left = left.filter_map(|(_, times)| times.ended).max();
    assert!(
        last_left.is_none_or(|left| last_killed.is_some_and(|killed| killed >= left)),
        "the job has ended without a value and without an error: {results:?}"
    );
}

impl SimulatedJob<'_> {
    fn run(&mut self, run: EpochsOfProcess<'_>) -> Result<bool> {
        let has_place = run(self)?;
        self.runtime
            .take()
            .iter()
            .for_each(|runtime| self.parts.ended(runtime));
        Ok(has_place)
    }

    /// True if later epochs may have another number of processes.
    pub(crate) fn may_change(&self) -> bool {
        !self.simulation.builder.sizes.is_empty()
    }

    /// Joins the next epoch of the job. `returning` is this process's state from the epoch before;
    /// `None` in its first. Blocks like a real process.
    ///
    /// # Errors
    ///
    /// If this process was killed. Also the errors that a real process gets.
    pub(crate) fn join(&mut self, returning: Option<Returning>) -> Result<EpochStart> {
        let process = returning
            .as_ref()
            .map_or(self.process, |returning| returning.process);

        let mut builder = self.simulation.builder.clone();
        let new = Identity {
            key: self.process.0.into(),
            run: None,
        };
        let identity = returning
            .as_ref()
            .map_or(new, |returning| returning.identity);
        let leaves = returning.as_ref().is_some_and(|returning| returning.leaves);
        builder.epoch = returning
            .as_ref()
            .map_or(1, |returning| returning.epoch + 1);
        let left_over = returning.and_then(|returning| returning.left_over);

        let life = self.parts.lives[self.process.index()].clone();
        let (rendezvous, link) = self
            .server
            .connect(process)
            .map_err(|error| Error::Environment(format!("cannot start a thread: {error}")))?;
        life.meets(&self.server, link)?;

        let topology = builder.topology(self.simulation.processes, None)?;
        let network = self.parts.network.clone();
        let peer_timeout = builder
            .peer_timeout
            .unwrap_or(mpmd_launch::DEFAULT_PEER_TIMEOUT);
        let opened = {
            let life = life.clone();
            let group = self.process.0;
            Ok(OpenedTransport::Simulated(Box::new(move |joined| {
                join_group(group);
                let place = NetworkPlace {
                    network,
                    epoch: joined.epoch,
                    processes: joined.members.len(),
                    process: joined.process,
                };
                let transport = life.takes(&place)?;
                place.connect(peer_timeout)?;
                Ok(transport)
            })))
        };

        let member = JobMember {
            host: "simulated".to_owned(),
            pid: FIRST_PID + self.process.0,
            sizes: SizeRange::of(builder.sizes.iter().map(|size| size.processes)),
            is_added: self.is_added,
            devices: (topology.devices().len() / self.simulation.processes) as u32,
            addresses: transports::told("", &opened),
            leaves,
            ..JobMember::default()
        };
        let candidate = Candidate {
            job: MemberJob::Program,
            rendezvous,
            server: None,
            waits: true,
            process,
            identity,
            member,
            opened,
            token: [0; 32],
            left_over,
        };

        note(format_args!(
            "process {} of the simulation joins",
            self.process
        ));
        let mut start = candidate.join(builder, topology)?;
        note(format_args!(
            "process {} of the simulation: {start:?}",
            self.process
        ));

        if let EpochStart::Program(p) = &mut start {
            life.runs(&p.runtime);
            self.parts.add(p);
            self.runtime = Some(p.runtime.clone());
            self.simulation.plan_loss(p, self.process, &life);
        }
        Ok(start)
    }
}
