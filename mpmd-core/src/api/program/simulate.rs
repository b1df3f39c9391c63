//! Simulation of a job's processes inside one process, to test programs with message delays,
//! reordering and fault injection.

use std::sync::Arc;
use std::time::Duration;

use mpmd_ids::ProcessId;
use mpmd_ids::block::{WorldReport, simulated, thread};
use mpmd_transport::inproc::{Fabric, Faults};
use mpmd_transport::router::{Failure, FailureKind};

use super::{Builder, Program};
use crate::error::Result;

/// Runs a program as `processes` processes inside this one, over `devices` devices. `seed` chooses
/// the message delays, of up to 2 ms. Returns the result of each process, by process.
///
/// Each process is a thread with its own runtime. [`Program::finish`] is called for it. A panic of
/// the program continues in the caller.
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
    Simulation::new(processes, devices).delays(seed, Duration::from_millis(2)).run(program)
}

/// A simulated job with custom settings; [`simulate`] is the short form.
#[derive(Clone, Debug)]
#[must_use = "a simulation does nothing until it runs"]
pub struct Simulation {
    processes: usize,
    builder: Builder,
    faults: Faults,
    lost: Option<(ProcessId, u64)>,
    seed: Option<u64>,
}

/// The simulated time after which a seeded run counts as hung.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl Simulation {
    /// Creates a job of `processes` processes with `devices` devices in total. Messages arrive at
    /// once and in order.
    pub fn new(processes: usize, devices: usize) -> Self {
        let builder = Builder::default().devices(devices);
        Self { processes, builder, faults: Faults::default(), lost: None, seed: None }
    }

    /// Delays each message by a time from 0 to `longest`, chosen by `seed`. Messages then overtake
    /// each other.
    pub fn delays(mut self, seed: u64, longest: Duration) -> Self {
        self.faults.seed = seed;
        self.faults.delay = Some(Duration::ZERO..=longest);
        self
    }

    /// Enables zero-copy transfers between processes with the same group number, like processes of
    /// a host that share memory. A receiver then uses an array in the sender's memory. `groups` is
    /// indexed by process; processes beyond its end always copy. By default all processes copy.
    pub fn zero_copy(mut self, groups: &[usize]) -> Self {
        self.faults.hosts = groups.to_vec();
        self
    }

    /// Changes the settings of the programs. The number of devices stays that of the simulation.
    pub fn settings(mut self, settings: impl FnOnce(Builder) -> Builder) -> Self {
        let devices = self.builder.devices;
        self.builder = settings(self.builder);
        self.builder.devices = devices;
        self
    }

    /// Injects a fault: process `process` disappears without a message when it issues operation
    /// `op`.
    pub fn lose(mut self, process: ProcessId, op: u64) -> Self {
        self.lost = Some((process, op));
        self
    }

    /// Fixes the order of all events by a seed: the thread that runs after each lock, wait, wake-up
    /// and channel operation, the arrival of each message within 2 ms, and the end of each time
    /// limit. Time is simulated: an hour of waiting takes no time. The same seed gives the same run.
    ///
    /// The program may block on arrays, locks and channels of this library only: one thread of the
    /// job runs at a time. A run that hangs exits the process with code 101 and says why.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self.delays(seed, Duration::from_millis(2)) }
    }

    /// Runs the program on every process and blocks until all have ended. Returns the result of
    /// each, by process. A panic of the program continues in the caller.
    pub fn run<T: Send>(
        &self,
        program: impl Fn(&mut Program) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        if let Err(error) = self.builder.can_have_devices(self.processes) {
            // All get the error here: if one process failed alone, the others would not hear of it.
            return (0..self.processes).map(|_| Err(error.clone())).collect();
        }
        match self.seed {
            Some(seed) => self.run_seeded(seed, program).0,
            None => self.run_processes(program),
        }
    }

    /// Runs the program in a simulated world. Returns the results, and the report of the world.
    fn run_seeded<T: Send>(
        &self,
        seed: u64,
        program: impl Fn(&mut Program) -> Result<T> + Sync,
    ) -> (Vec<Result<T>>, WorldReport) {
        simulated(seed, LONGEST, || self.run_processes(program))
    }

    fn run_processes<T: Send>(
        &self,
        program: impl Fn(&mut Program) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        let fabric = Fabric::new(self.processes, self.faults.clone());
        let one = |process: ProcessId| -> Result<T> {
            let mut p = self.builder.clone().over(fabric.endpoint(process))?;
            if let Some((lost, op)) = self.lost
                && lost == process
            {
                p.vanish_at(op, fabric.clone());
            }
            let result = program(&mut p);
            p.conclude(result)
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..self.processes as u32)
                .map(|process| scope.spawn(move || one(ProcessId(process))))
                .collect();
            let joined = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            joined.collect()
        })
    }
}

impl Program {
    /// Injects a fault: kills this process when it issues operation `at`. From then on its
    /// operations fail.
    fn vanish_at(&mut self, at: u64, fabric: Fabric) {
        self.on_issue = Some(Box::new(move |op, runtime| {
            if op == at {
                let me = runtime.me;
                fabric.kill(me);
                let message = format!("process {me} was lost in simulation at operation {op}");
                runtime.fail_job(Arc::new(Failure::new(FailureKind::PeerLost, me, op, message)));
            }
        }));
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
            let (results, report) = Simulation::new(processes, 4).run_seeded(seed, ring);
            let results: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
            assert_eq!(results[0], Some(vec![1.0, 2.0, 3.0]));
            report
        };
        for processes in [1, 2, 4] {
            let reports = [run(processes, 7), run(processes, 7), run(processes, 8)];
            eprintln!("{reports:?}");
            assert_eq!(reports[0], reports[1]);
            assert_ne!(reports[0].history, reports[2].history);
        }
    }
}
