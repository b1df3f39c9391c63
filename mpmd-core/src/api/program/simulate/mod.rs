//! Simulation of a job's processes inside one process, to test programs with message delays,
//! reordering and fault injection.

mod epochs;
mod faults;
mod life;
mod meeting;

use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{WorldReport, WorldSettings, join_group, simulated, thread};
use mpmd_transport::inproc::FabricFaults;

pub(crate) use self::epochs::EpochsOfProcess;
use self::epochs::LaterProcess;
use self::faults::{JobOver, SimulatedFault, SimulatedParts, TimedFault};
use self::life::{EpochNetwork, NetworkPlace, ProcessLife};
use super::{Builder, Program};
use crate::error::Result;

/// Runs a program as `processes` processes inside this one, over `devices` devices, in simulated
/// time. Returns the result of each process, indexed by process.
///
/// Each process is a thread with its own runtime. [`Program::finish`] is called after the program
/// has returned. `seed` decides the order of all events, see [`Simulation::seed`]: the same seed
/// gives the same run. A panic of the program continues in the caller.
///
/// ```
/// use mpmd_core::prelude::*;
///
/// let results = mpmd_core::simulate(2, 2, 7, |p| {
///     let mesh = p.mesh(&[("stage", 2)])?;
///     let stages = mesh.split("stage")?;
///     let x = MpmdArray::from_slice(&[3], &[1.0f32, 2.0, 3.0])?;
///     let x = p.device_put(&x, stages[0].replicated())?;
///     let x = p.device_put(&x, stages[1].replicated())?;
///     Ok(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?)
/// });
/// assert_eq!(results[0].as_ref().unwrap(), &None, "process 0 has no part of it any more");
/// assert_eq!(results[1].as_ref().unwrap(), &Some(vec![1.0, 2.0, 3.0]));
/// ```
pub fn simulate<T: Send>(
    processes: usize,
    devices: usize,
    seed: u64,
    program: impl Fn(&mut Program) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    Simulation::new(processes, devices).seed(seed).run(program)
}

/// A simulated job with custom settings; [`simulate`] is the short form.
#[derive(Clone, Debug)]
#[must_use = "a simulation does nothing until it runs"]
pub struct Simulation {
    processes: usize,
    builder: Builder,
    delays: FabricFaults,
    lost: Vec<PlannedLoss>,
    /// The spares and added processes that start after the job.
    later_processes: Vec<LaterProcess>,
    timed_faults: Vec<TimedFault>,
    world: Option<WorldSettings>,
}

/// A planned loss of a process: the operation and epoch at which it disappears.
#[derive(Clone, Copy, Debug)]
struct PlannedLoss {
    process: ProcessId,
    epoch: u64,
    op: u64,
}

/// The report of a [seeded](Simulation::seed) simulation.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct SimulationReport {
    /// Simulated time of the run.
    pub time: Duration,
    /// Number of switches from one thread to another.
    pub switches: u64,
    /// A hash of all events and their times, equal for equal runs.
    pub history: u64,
    /// A line for each event, if [`Simulation::log`] was called.
    pub log: String,
    /// Descriptions, one line each, of things that the job should not have left behind: memory in
    /// use, messages under way, a runtime. Things that the program's results hold are not listed.
    pub left: Vec<String>,
}

impl SimulationReport {
    /// Creates the report of a job. All threads of the job must have ended, so that none is about
    /// to drop something.
    fn of(report: WorldReport, parts: SimulatedParts) -> Self {
        let WorldReport {
            time,
            switches,
            history,
            log,
        } = report;
        Self {
            time,
            switches,
            history,
            log,
            left: parts.left(),
        }
    }
}

/// The program of one process as a closure, which stores the program's value itself.
type ProgramOfProcess<'a> = Box<dyn FnOnce(&mut Program) -> Result<()> + Send + 'a>;

/// The function that the thread of a process runs.
type ProcessThread<'a, T> = Box<dyn FnOnce() -> T + Send + 'a>;

/// The simulated time after which a seeded run is considered to hang.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl Simulation {
    /// Creates a job of `processes` processes with `devices` devices in total. Messages arrive at
    /// once and in order.
    pub fn new(processes: usize, devices: usize) -> Self {
        let builder = Builder::default().devices(devices);
        Self {
            processes,
            builder,
            delays: FabricFaults::default(),
            lost: Vec::new(),
            later_processes: Vec::new(),
            timed_faults: Vec::new(),
            world: None,
        }
    }

    /// Delays each message by a time from 0 to `longest`, chosen by `seed`. Messages may then
    /// overtake each other.
    pub fn delays(mut self, seed: u64, longest: Duration) -> Self {
        self.delays.seed = seed;
        self.delays.delay = Some(Duration::ZERO..=longest);
        self
    }

    /// Enables zero-copy transfers between processes with the same group number, like processes of
    /// a host that share memory. A receiver then uses the array in the sender's memory. `groups` is
    /// indexed by process. Processes without an entry always copy. By default all processes copy.
    pub fn zero_copy(mut self, groups: &[usize]) -> Self {
        self.delays.hosts = groups.to_vec();
        self
    }

    /// Changes the settings of the program. Its number of devices stays that of the simulation.
    pub fn settings(mut self, settings: impl FnOnce(Builder) -> Builder) -> Self {
        let devices = self.builder.devices;
        self.builder = settings(self.builder);
        self.builder.devices = devices;
        self
    }

    /// Injects a fault: process `process` disappears without a message when it issues operation
    /// `op`.
    pub fn lose(self, process: ProcessId, op: u64) -> Self {
        self.lose_in(process, 1, op)
    }

    /// Injects a fault: process `process` disappears without a message at this time after the start
    /// of the job, at any point of its work.
    pub fn lose_after(self, process: ProcessId, after: Duration) -> Self {
        self.add_fault(after, SimulatedFault::Lose(process))
    }

    /// Injects a fault: process `process` stops for `time`, beginning `after` the start of the job,
    /// and then continues. Does nothing without a [seed](Simulation::seed).
    pub fn stop_after(self, process: ProcessId, after: Duration, time: Duration) -> Self {
        self.add_fault(after, SimulatedFault::Stop(process, time))
    }

    /// Injects a fault: messages from one process to another are held back for `time`, beginning at
    /// a time after the start of the job. Then they arrive.
    pub fn hold_after(
        self,
        from: ProcessId,
        to: ProcessId,
        after: Duration,
        time: Duration,
    ) -> Self {
        self.add_fault(after, SimulatedFault::Hold(from, to, time))
    }

    fn add_fault(mut self, after: Duration, fault: SimulatedFault) -> Self {
        self.timed_faults.push(TimedFault { after, fault });
        self
    }

    /// Fixes the order of all events by a seed. The seed chooses the thread that runs after each
    /// lock, wait, wake-up and channel operation. It also chooses the arrival of each message
    /// within 2 ms, and the end of each time limit. Time is simulated: an hour of waiting takes no
    /// time. The same seed gives the same run.
    ///
    /// The program may block only on arrays, locks and channels of this library, because only one
    /// thread of the job runs at a time. A run that hangs exits the process with code 101 and
    /// prints the reason.
    pub fn seed(mut self, seed: u64) -> Self {
        self.world = Some(WorldSettings {
            seed,
            longest: LONGEST,
            log: false,
        });
        self.delays(seed, Duration::from_millis(2))
    }

    /// Adds a log of all events to the report of a [seeded](Simulation::seed) run.
    pub fn log(mut self) -> Self {
        if let Some(world) = &mut self.world {
            world.log = true;
        }
        self
    }

    /// Runs the program on every process and blocks until all have ended. Returns the result of
    /// each process, indexed by process. A panic of the program continues in the caller.
    pub fn run<T: Send>(
        &self,
        program: impl Fn(&mut Program) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        let run = |programs: Vec<ProgramOfProcess<'_>>| match &self.world {
            Some(world) => (self.run_in(world, programs).0, ()),
            None => (self.run_processes(programs).0, ()),
        };
        self.values(&program, run).0
    }

    /// Runs the program as [`run`](Self::run) does, and also returns a report.
    ///
    /// # Panics
    ///
    /// Without a [seed](Simulation::seed).
    pub fn run_reported<T: Send>(
        &self,
        program: impl Fn(&mut Program) -> Result<T> + Sync,
    ) -> (Vec<Result<T>>, SimulationReport) {
        let world = self
            .world
            .as_ref()
            .expect("a simulation with a report has a seed");
        self.values(&program, |programs| self.run_in(world, programs))
    }

    /// Calls `run` with the program of each process. Returns the values of the programs, and the
    /// other results of `run`. Only this function is compiled for each program.
    fn values<T: Send, R>(
        &self,
        program: &(impl Fn(&mut Program) -> Result<T> + Sync),
        run: impl FnOnce(Vec<ProgramOfProcess<'_>>) -> (Vec<Result<()>>, R),
    ) -> (Vec<Result<T>>, R) {
        let mut values: Vec<Option<T>> = (0..self.processes).map(|_| None).collect();
        let of_process = |value| -> ProgramOfProcess<'_> {
            let value: &mut Option<T> = value;
            Box::new(move |p| {
                *value = Some(program(p)?);
                Ok(())
            })
        };

        let (results, rest) = run(values.iter_mut().map(of_process).collect());
        let value = |(result, value): (Result<()>, Option<T>)| {
            result.map(|()| value.expect("a program that ends well has a value"))
        };
        (results.into_iter().zip(values).map(value).collect(), rest)
    }

    fn run_in(
        &self,
        world: &WorldSettings,
        programs: Vec<ProgramOfProcess<'_>>,
    ) -> (Vec<Result<()>>, SimulationReport) {
        let ((results, parts), report) = simulated(world.clone(), || self.run_processes(programs));
        (results, SimulationReport::of(report, parts))
    }

    fn run_processes(
        &self,
        programs: Vec<ProgramOfProcess<'_>>,
    ) -> (Vec<Result<()>>, SimulatedParts) {
        let network = EpochNetwork::new(self.delays.clone());
        let parts = SimulatedParts::new(network.clone(), self.processes);
        if let Err(error) = self.builder.can_have_devices(self.processes) {
            // All get the error here: if one process failed alone, the others would not hear of it.
            return (
                (0..self.processes).map(|_| Err(error.clone())).collect(),
                parts,
            );
        }

        let run_one = |process: ProcessId, program: ProgramOfProcess<'_>| -> Result<()> {
            join_group(process.0);
            let life = &parts.lives[process.index()];
            let place = NetworkPlace {
                network: network.clone(),
                epoch: 1,
                processes: self.processes,
                process,
            };
            let mut p = self.builder.clone().over(life.takes(&place)?)?;
            life.runs(&p.runtime);
            parts.add(&p);
            self.plan_loss(&mut p, process, life);

            let runtime = p.runtime.clone();
            let result = program(&mut p);
            p.conclude(result)?;
            parts.ended(&runtime);
            Ok(())
        };
        let threads = (0..).map(ProcessId).zip(programs);
        let run_one = &run_one;
        let threads = threads.map(|(process, program)| -> ProcessThread<'_, Result<()>> {
            Box::new(move || run_one(process, program))
        });
        let results = self.run_threads(threads.collect(), &parts, &JobOver::default());
        (results, parts)
    }

    /// Runs the threads of the processes, and injects the timed faults. Returns the values of the
    /// threads.
    fn run_threads<T: Send>(
        &self,
        threads: Vec<ProcessThread<'_, T>>,
        parts: &SimulatedParts,
        over: &JobOver,
    ) -> Vec<T> {
        thread::scope(|scope| {
            let faults = self.timed_faults.iter().map(|timed| {
                let over = over.clone();
                scope.spawn(move || over.unless_within(timed.after, || timed.fault.inject(parts)))
            });
            let faults: Vec<_> = faults.collect();
            let threads: Vec<_> = threads
                .into_iter()
                .map(|thread| scope.spawn(thread))
                .collect();

            let ends: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            over.say();
            let injected = faults.into_iter().map(|fault| fault.join().map(|()| None));

            // A panic of a process or of a fault goes on here.
            let ends = ends.into_iter().map(|end| end.map(Some)).chain(injected);
            let ends = ends.map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            ends.flatten().collect()
        })
    }

    /// Makes a process die at an operation of `p`'s epoch, if a loss is planned for it.
    fn plan_loss(&self, p: &mut Program, process: ProcessId, life: &Arc<ProcessLife>) {
        let epoch = p.epoch();
        let planned = self
            .lost
            .iter()
            .find(|loss| loss.process == process && loss.epoch == epoch);
        if let Some(&PlannedLoss { op: at, .. }) = planned {
            let life = life.clone();
            p.on_issue = Some(Box::new(move |op, _| {
                if op == at {
                    life.kill();
                }
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MpmdArray;

    /// Moves an array around a ring of all processes, twice.
    fn ring(p: &mut Program) -> Result<Option<Vec<f32>>> {
        let devices = p.mesh(&[("x", 4)])?.split("x")?;
        let mut x = p.device_put(
            &MpmdArray::from_slice(&[3], &[1.0f32, 2.0, 3.0])?,
            devices[0].replicated(),
        )?;
        for step in 1..=8 {
            x = p.device_put(&x, devices[step % 4].replicated())?;
        }
        Ok(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?)
    }

    #[test]
    fn seed_fixes_the_whole_run() {
        let run = |processes, seed| {
            let (results, report) = Simulation::new(processes, 4)
                .seed(seed)
                .log()
                .run_reported(ring);
            let results: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
            assert_eq!(results[0], Some(vec![1.0, 2.0, 3.0]));
            assert_eq!(report.left, [""; 0]);
            let changes = report.log.lines().filter(|line| line.ends_with("goes on"));
            assert_eq!(changes.count() as u64, report.switches);
            report
        };
        for processes in [1, 2, 4] {
            let reports = [run(processes, 7), run(processes, 7), run(processes, 8)];
            assert_eq!(reports[0], reports[1]);
            assert_ne!(reports[0].history, reports[2].history);
        }
    }
}
