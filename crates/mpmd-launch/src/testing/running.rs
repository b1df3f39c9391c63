//! [`RunningProcesses`]: a job that a test has started.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use mpmd_base::deadline::after;
use mpmd_rendezvous::{RendezvousServer, Token};
use rustix::process::Signal;

use super::{END_WITHIN, POLL_INTERVAL, ProcessEnd, Processes, Sandbox, Watched};
use crate::{Launch, LaunchError};

/// The running processes of a test's job, and their rendezvous service. [`Processes::start`]
/// creates it.
///
/// Dropping it kills the processes and all processes that they have started, and deletes their
/// folder. That takes milliseconds, or a few seconds if the system cannot end a process.
///
/// Processes are numbered in the order of their start.
pub struct RunningProcesses {
    processes: Vec<Watched>,
    launch: Launch,
    token: Token,
    server: RendezvousServer,
    limit: Duration,
    deadline: Instant,
    // Declared last: the processes write there.
    pub(super) sandbox: Sandbox,
}

impl RunningProcesses {
    pub(super) fn new(settings: &Processes) -> Result<Self, LaunchError> {
        let launch = settings.launch.clone();
        let limit = settings.deadline;
        let sandbox = Sandbox::new()?;
        let (server, token) = launch.serve()?;
        let deadline = after(Instant::now(), limit);
        Ok(Self {
            processes: Vec::new(),
            launch,
            token,
            server,
            limit,
            deadline,
            sandbox,
        })
    }

    /// Returns the command that starts process `process` of the job, with its arguments and
    /// environment. The test may change it before it calls [`RunningProcesses::spawn`].
    pub fn command(&self, process: usize) -> Command {
        let mut command = self.launch.command(process, &self.server, &self.token);
        self.sandbox.enclose(&mut command);
        command
    }

    /// Starts one more process and returns its number. Processes are numbered from 0 in the order
    /// of starts.
    ///
    /// # Errors
    ///
    /// If the process cannot be started.
    pub fn spawn(&mut self, command: Command) -> Result<usize, LaunchError> {
        let number = self.processes.len();
        self.processes
            .push(self.sandbox.start(command, &format!("process {number}"))?);
        Ok(number)
    }

    /// Returns the job's folder, in which the processes work.
    pub fn folder(&self) -> &Path {
        self.sandbox.path()
    }

    /// Returns the time by which the job must have ended.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns the pids of all processes, by number.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(Watched::pid).collect()
    }

    /// Kills a process with SIGKILL. Does nothing if the process has ended.
    ///
    /// # Errors
    ///
    /// If there is no such process, or the system refuses.
    pub fn kill(&mut self, process: usize) -> Result<(), LaunchError> {
        self.process(process)?.signal(Signal::KILL)
    }

    /// Stops a process with SIGSTOP. It keeps its memory and connections, and does nothing until
    /// [`RunningProcesses::resume`]. Has no effect if the process has ended.
    ///
    /// # Errors
    ///
    /// If there is no such process, or the system refuses.
    pub fn stop(&mut self, process: usize) -> Result<(), LaunchError> {
        self.process(process)?.signal(Signal::STOP)
    }

    /// Resumes a stopped process with SIGCONT. Does nothing if the process has ended.
    ///
    /// # Errors
    ///
    /// If there is no such process, or the system refuses.
    pub fn resume(&mut self, process: usize) -> Result<(), LaunchError> {
        self.process(process)?.signal(Signal::CONT)
    }

    /// Returns true if a process has ended.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn has_ended(&mut self, process: usize) -> Result<bool, LaunchError> {
        Ok(self.process(process)?.has_ended())
    }

    /// Returns the standard output of a process so far.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn output(&mut self, process: usize) -> Result<String, LaunchError> {
        Ok(self.process(process)?.output())
    }

    /// Returns the standard error of a process so far.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn error_output(&mut self, process: usize) -> Result<String, LaunchError> {
        Ok(self.process(process)?.error_output())
    }

    /// Waits until every process has printed `text` to its standard output. Blocks.
    ///
    /// # Errors
    ///
    /// The errors of [`RunningProcesses::wait_for_output_of`].
    pub fn wait_for_output(&mut self, text: &str) -> Result<(), LaunchError> {
        (0..self.processes.len()).try_for_each(|process| self.wait_for_output_of(process, text))
    }

    /// Waits until a process has printed `text` to its standard output. Blocks.
    ///
    /// # Errors
    ///
    /// [`LaunchError::NotPrinted`] if the process ends without printing `text`.
    /// [`LaunchError::Deadline`] when the deadline has passed; then all processes are killed.
    /// Another error if there is no such process.
    pub fn wait_for_output_of(&mut self, process: usize, text: &str) -> Result<(), LaunchError> {
        while !self.process(process)?.has_printed(text)? {
            self.pause(|_| format!("process {process} to print {text:?}"))?;
        }
        Ok(())
    }

    /// Waits for the end of one process, with any exit status. Blocks.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Deadline`] when the deadline has passed; then all processes are killed.
    /// Another error if there is no such process.
    pub fn wait_for(&mut self, process: usize) -> Result<ProcessEnd, LaunchError> {
        while !self.process(process)?.has_ended() {
            self.pause(|_| format!("the end of process {process}"))?;
        }
        Ok(self.processes[process].end())
    }

    /// Waits for the ends of all processes, with any exit status, and returns them by number.
    /// Blocks.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Deadline`] when the deadline has passed; then all processes are killed.
    /// [`LaunchError::LeftBehind`] if processes that they started are still alive.
    pub fn wait(&mut self) -> Result<Vec<ProcessEnd>, LaunchError> {
        while !self.have_ended() {
            self.pause(|job| {
                let running = job.processes.iter_mut().filter_map(|process| {
                    (!process.has_ended()).then(|| process.name().to_owned())
                });
                format!("the end of {}", running.collect::<Vec<_>>().join(", "))
            })?;
        }

        // The children of the processes may end with them, which takes a moment.
        let until = Instant::now() + END_WITHIN;
        loop {
            let pids = self.sandbox.processes();
            if pids.is_empty() {
                return Ok(self.ends());
            }
            if Instant::now() >= until {
                return Err(LaunchError::LeftBehind {
                    pids,
                    ends: self.ends(),
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the states and the output of all processes so far, for the message of a failed test.
    pub fn report(&self) -> String {
        self.processes
            .iter()
            .map(Watched::report)
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn process(&mut self, process: usize) -> Result<&mut Watched, LaunchError> {
        let processes = self.processes.len();
        self.processes
            .get_mut(process)
            .ok_or(LaunchError::NoSuchProcess { process, processes })
    }

    fn have_ended(&mut self) -> bool {
        // Checks every process: the end of a process is the time at which it was first noticed.
        let ended = self
            .processes
            .iter_mut()
            .map(|process| usize::from(process.has_ended()));
        ended.sum::<usize>() == self.processes.len()
    }

    fn ends(&self) -> Vec<ProcessEnd> {
        self.processes.iter().map(Watched::end).collect()
    }

    /// Sleeps until the next check. If the deadline has passed, kills all processes and fails.
    /// `awaited` describes the awaited event for the error.
    fn pause(&mut self, awaited: impl FnOnce(&mut Self) -> String) -> Result<(), LaunchError> {
        if Instant::now() < self.deadline {
            std::thread::sleep(POLL_INTERVAL);
            return Ok(());
        }

        let awaited = awaited(self);
        self.processes.iter().for_each(Watched::kill_group);
        self.processes.iter_mut().for_each(Watched::kill);
        self.sandbox.kill();
        Err(LaunchError::Deadline {
            awaited,
            after: self.limit,
            ends: self.ends(),
        })
    }
}

impl Drop for RunningProcesses {
    fn drop(&mut self) {
        // All at once; then each is reaped as it is dropped, and the sandbox kills the others.
        self.processes.iter().for_each(Watched::kill_group);
    }
}
