//! Errors of starting a job.

use std::io::{self, ErrorKind};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_rendezvous::{RendezvousError, TokenError};

use crate::process_end::ProcessEnd;

/// An error while a job starts, or while this process joins its job.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Some of a launcher's environment variables are missing. The environment is at fault.
    #[error(
        "this looks like a process of a job started by {source_name}, but {missing} is not set; \
         {found}"
    )]
    HalfSet {
        /// The launcher to which the variables belong.
        source_name: &'static str,
        /// Name of the missing variable.
        missing: String,
        /// Every variable that was read, with its value.
        found: String,
    },
    /// An environment variable has an invalid value. The environment is at fault.
    #[error("{variable}={value} makes no sense: it must be {expected}")]
    Variable {
        /// The name of the variable.
        variable: String,
        /// The value of the variable.
        value: String,
        /// A description of valid values.
        expected: String,
    },
    /// The name of an environment variable is close to one that the framework reads. The
    /// environment is at fault.
    #[error("{0}")]
    UnknownVariable(String),
    /// The processes of a job request different transports. The environment is at fault. Every
    /// process of the job gets the same error.
    #[error(
        "the processes of this job do not agree on a transport: {said}; {variable} must be the \
         same for all"
    )]
    Transports {
        /// The transport that each process requests, as text.
        said: String,
        /// The variable that sets the transport.
        variable: &'static str,
    },
    /// A process lacks the transport or devices that were requested. Its environment is at fault.
    /// Every other process of the job gets the same error.
    #[error("process {process} on host {host} has {lack}")]
    Lacking {
        /// The process that lacks the transport or the devices.
        process: ProcessId,
        /// The name of the host of `process`.
        host: String,
        /// The missing item and the reason, for example `no transport: …`.
        lack: String,
    },
    /// Two processes cannot share memory, but the transport requires it. Their environment is at
    /// fault. Every process of the job gets the same error.
    #[error(
        "processes {one} and {other} cannot share memory: {why}; without {variable}=shm they use \
         the transport that works"
    )]
    Apart {
        /// One of the two processes.
        one: ProcessId,
        /// The other process.
        other: ProcessId,
        /// The reason that the two processes cannot share memory.
        why: String,
        /// The variable that set the transport.
        variable: &'static str,
    },
    /// The job's token is invalid, or could not be created. The environment is at fault.
    #[error("{variable}: {error}")]
    Token {
        /// The variable with the token.
        variable: &'static str,
        /// The reason that the token cannot be used.
        error: TokenError,
    },
    /// A file with a user's secret or keys cannot be used. The environment is at fault.
    #[error("{variable}={path}: {why}")]
    TokenFile {
        /// The variable that names the file.
        variable: &'static str,
        /// The path of the file.
        path: String,
        /// The reason that the file cannot be used.
        why: String,
    },
    /// The launcher ended before this process began. The environment is at fault.
    #[error("the launcher of this process (pid {launcher}) is gone")]
    Orphaned {
        /// Pid of the launcher that ended.
        launcher: String,
    },
    /// A job needs at least one process. The caller is at fault.
    #[error("a job has at least one process, {processes} were asked for")]
    Processes {
        /// The requested number of processes.
        processes: usize,
    },
    /// The program to start does not exist. The caller is at fault.
    #[error("there is no program {program}")]
    NotFound {
        /// The name of the program.
        program: String,
    },
    /// A test waited for an event of its processes until the deadline. The processes were killed.
    #[error(
        "the deadline of {after:?} passed during the wait for {awaited}, and the processes were \
         killed; look for the cause in their output, or set a longer deadline{}", shown(.ends)
    )]
    Deadline {
        /// The awaited event, for example `the end of process 1`.
        awaited: String,
        /// Time from the start to the deadline.
        after: Duration,
        /// Exit status and output of each of the test's processes, by number.
        ends: Vec<ProcessEnd>,
    },
    /// A process of a test has ended without printing an awaited text.
    #[error(
        "{} ended without printing {text:?}; look for the cause in its output\n{end}", .end.name
    )]
    NotPrinted {
        /// The text that the test waited for.
        text: String,
        /// Exit status and output of the process.
        end: ProcessEnd,
    },
    /// The processes of a test have ended, but other processes that they started are still alive.
    #[error(
        "the processes have ended but have left processes with the pids {pids:?} behind; the \
         program must end what it starts{}", shown(.ends)
    )]
    LeftBehind {
        /// The pids of the processes that are still alive.
        pids: Vec<u32>,
        /// Exit status and output of each of the test's processes, by number.
        ends: Vec<ProcessEnd>,
    },
    /// A test names a process that it has not started. The caller is at fault.
    #[error("there is no process {process}: {processes} were started, numbered from 0")]
    NoSuchProcess {
        /// The number of the missing process.
        process: usize,
        /// Number of processes that the test has started.
        processes: usize,
    },
    /// This host cannot connect to itself. The environment is at fault.
    #[error(
        "this host does not reach itself at 127.0.0.1: {why}. The processes of a job meet there \
         over TCP, whatever their transport: look at the loopback interface (`ip link set lo up`) \
         and the firewall"
    )]
    NoLoopback {
        /// The system's error message.
        why: String,
    },
    /// The rendezvous service could not be started.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// A system call of this machine failed. The environment is at fault.
    #[error("{doing} failed: {why}")]
    Environment {
        /// Description of the action that failed.
        doing: String,
        /// The system's error message.
        why: String,
    },
}

impl LaunchError {
    #[doc(hidden)]
    pub fn environment(doing: impl Into<String>, why: impl ToString) -> Self {
        Self::Environment {
            doing: doing.into(),
            why: why.to_string(),
        }
    }

    /// Returns the error for a program that could not be started.
    pub(crate) fn not_started(program: &str, error: &io::Error) -> Self {
        match error.kind() {
            ErrorKind::NotFound => Self::NotFound {
                program: program.to_owned(),
            },
            _ => Self::environment(format!("starting {program}"), error),
        }
    }
}

/// Returns the reports of all processes as text, each starting on a new line.
fn shown(ends: &[ProcessEnd]) -> String {
    ends.iter().map(|end| format!("\n{end}")).collect()
}
