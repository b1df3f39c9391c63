//! [`Processes`]: the settings of a test's job.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use super::RunningProcesses;
use crate::{Launch, LaunchError};

/// Settings of a job of real processes that a test starts.
///
/// ```no_run
/// use std::time::Duration;
///
/// use mpmd_launch::testing::Processes;
/// # use mpmd_launch::LaunchError;
///
/// # fn main() -> Result<(), LaunchError> {
/// // In a test: env!("CARGO_BIN_EXE_train"), for the binary `train` of the same package.
/// let program = "target/debug/train";
/// let mut job = Processes::new(4, program).deadline(Duration::from_secs(120)).start()?;
/// job.wait_for_output("step 10\n")?;
/// job.kill(2)?;
/// let ends = job.wait()?;
/// assert!(ends[0].stderr.contains("process 2 is gone"), "{ends:?}");
/// # Ok(())
/// # }
/// ```
///
/// The processes run in a folder of their own, which is also their `TMPDIR`, and write their output
/// to files there. They inherit the environment without the variables of launchers and without
/// settings (`MPMD_*`, `UCX_TLS`). Set the variables that the test needs with [`Processes::env`].
#[derive(Clone, Debug)]
#[must_use = "nothing starts before `start`"]
pub struct Processes {
    pub(super) launch: Launch,
    pub(super) deadline: Duration,
}

impl Processes {
    /// Creates a job that runs `program` in `processes` processes: `env!("CARGO_BIN_EXE_name")` for
    /// the binary `name` of the test's own package. A name without `/` is looked up in `PATH`.
    ///
    /// The deadline is 60 seconds and the peer timeout 30 seconds. So a hang ends with the report
    /// of the program, not with the deadline.
    pub fn new(processes: usize, program: impl Into<OsString>) -> Self {
        let mut program = program.into();
        // The processes work in another folder.
        if Path::new(&program).components().count() > 1
            && let Ok(absolute) = std::path::absolute(&program)
        {
            program = absolute.into();
        }
        let launch = Launch::new(processes, program).peer_timeout(Duration::from_secs(30));
        Self {
            launch,
            deadline: Duration::from_secs(60),
        }
    }

    /// Adds arguments for the program.
    pub fn args<T: Into<OsString>>(mut self, args: impl IntoIterator<Item = T>) -> Self {
        self.launch = self.launch.args(args);
        self
    }

    /// Sets an environment variable for the processes. Variables that describe the job, such as
    /// `MPMD_RANK`, cannot be set.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.launch = self.launch.env(name, value);
        self
    }

    /// Sets the peer timeout: the maximum time for which processes wait for each other.
    pub fn peer_timeout(mut self, peer_timeout: Duration) -> Self {
        self.launch = self.launch.peer_timeout(peer_timeout);
        self
    }

    /// Sets the time limit of the whole job, from its start to the end of its last process.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Starts all processes without waiting for them.
    ///
    /// The calling thread must live until the processes have ended, because the programs ask the
    /// system to kill them when it ends.
    ///
    /// # Errors
    ///
    /// If the number of processes is 0, or if the program, the folder or the rendezvous service
    /// cannot be started. Then no process remains.
    pub fn start(&self) -> Result<RunningProcesses, LaunchError> {
        let mut running = self.prepare()?;
        for process in 0..self.launch.processes {
            running.spawn(running.command(process))?;
        }
        Ok(running)
    }

    /// Starts the rendezvous service and the time limit, but no process yet. Start processes with
    /// [`RunningProcesses::spawn`], at any time and with different settings.
    ///
    /// # Errors
    ///
    /// The errors of [`Processes::start`].
    pub fn prepare(&self) -> Result<RunningProcesses, LaunchError> {
        RunningProcesses::new(self)
    }
}
