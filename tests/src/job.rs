//! The processes of one job, started by the test itself.

use std::ops::{Deref, DerefMut};
use std::process::Command;
use std::time::{Duration, Instant};

use mpmd_launch::testing::{ProcessEnd, Processes, RunningProcesses};
use rustix::process::Signal;

use crate::left::SharedMemory;

/// Time after which new shared memory certainly belongs to the tested job, not to another job.
const REMOVED_WITHIN: Duration = Duration::from_secs(10);

/// A running job that must not leave shared memory behind. Its methods panic where those of
/// [`RunningProcesses`] fail.
pub struct Job {
    running: RunningProcesses,
    shared_memory: SharedMemory,
}

/// The result of a job in which one process was killed or stopped by [`Job::inject_fault`].
pub struct FaultOutcome {
    /// The results of the other processes, by process number.
    pub ended: Vec<ProcessEnd>,
    /// Time from the signal to the end of the last of the other processes.
    pub took: Duration,
    /// The output of all processes.
    pub report: String,
}

impl Job {
    /// Starts the rendezvous service and the time limit of a job, without any process.
    ///
    /// # Panics
    ///
    /// If no port or no folder is available.
    pub fn prepare(processes: Processes) -> Self {
        let shared_memory = SharedMemory::now();
        Self {
            running: processes.prepare().unwrap(),
            shared_memory,
        }
    }

    /// Starts all processes of a job, each with these arguments.
    ///
    /// # Panics
    ///
    /// If no port or no folder is available, or a process cannot be started.
    pub fn start(processes: Processes, args: &[&str]) -> Self {
        let shared_memory = SharedMemory::now();
        Self {
            running: processes.args(args).start().unwrap(),
            shared_memory,
        }
    }

    /// Starts a further process with this command, and returns its number.
    ///
    /// # Panics
    ///
    /// If the process cannot be started.
    pub fn spawn(&mut self, command: Command) -> usize {
        self.running.spawn(command).unwrap()
    }

    /// Waits until all processes have ended, with any exit codes.
    ///
    /// # Panics
    ///
    /// If a process exceeds the job's time limit, or if processes or shared memory of the job are
    /// left.
    pub fn wait(&mut self) -> Vec<ProcessEnd> {
        let ends = self.running.wait().unwrap();
        let pids = self.pids();
        // Named shared memory may belong to another job, which removes it again.
        let until = Instant::now() + REMOVED_WITHIN;
        loop {
            let left = self.shared_memory.left(&pids);
            if left.is_empty() {
                return ends;
            }
            assert!(
                Instant::now() < until,
                "shared memory {left:?} is left:\n{}",
                self.report()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until all processes have ended successfully, and returns the output of each.
    ///
    /// # Panics
    ///
    /// If a process failed or exceeds the job's time limit, or if processes or shared memory of the
    /// job are left.
    pub fn wait_well(&mut self) -> Vec<String> {
        let ended = self.wait();
        assert!(
            ended.iter().all(|end| end.code() == 0),
            "a process failed:\n{}",
            self.report()
        );
        ended.into_iter().map(|end| end.stdout).collect()
    }

    /// Kills all processes and waits for their ends.
    ///
    /// # Panics
    ///
    /// Those of [`Job::wait`].
    pub fn end(&mut self) -> Vec<ProcessEnd> {
        (0..self.pids().len()).for_each(|process| self.kill(process).unwrap());
        self.wait()
    }

    /// Sends process `victim` a signal that kills or stops it, and waits until all others have
    /// ended. Then kills the victim if it is only stopped.
    ///
    /// # Panics
    ///
    /// If a process exceeds the job's time limit, or if processes or shared memory of the job are
    /// left.
    pub fn inject_fault(&mut self, victim: usize, signal: Signal) -> FaultOutcome {
        let begin = Instant::now();
        match signal {
            Signal::STOP => self.stop(victim).unwrap(),
            _ => self.kill(victim).unwrap(),
        }
        let others = (0..self.pids().len()).filter(|process| *process != victim);
        let ended: Vec<ProcessEnd> = others
            .map(|process| self.wait_for(process).unwrap())
            .collect();
        let last = ended.iter().map(|end| end.ended_at).max().unwrap_or(begin);
        // A stopped process does not end by itself. Also checks that nothing is left.
        self.end();
        FaultOutcome {
            ended,
            took: last - begin,
            report: self.report(),
        }
    }
}

impl Deref for Job {
    type Target = RunningProcesses;

    fn deref(&self) -> &RunningProcesses {
        &self.running
    }
}

impl DerefMut for Job {
    fn deref_mut(&mut self) -> &mut RunningProcesses {
        &mut self.running
    }
}
