//! What can go wrong when a job is started.

use mpmd_ids::ProcessId;
use mpmd_transport::rendezvous::{RendezvousError, TokenError};

/// Why a job, or this process's part in it, could not be started.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A launcher's variables are there only in part. The environment's fault.
    #[error(
        "this looks like a process of a job started by {source_name}, but {missing} is not set; \
         {found}"
    )]
    HalfSet {
        /// The launcher whose variables were found.
        source_name: &'static str,
        /// What would be needed.
        missing: String,
        /// Every variable that was looked at, and what it was.
        found: String,
    },
    /// A variable has a value that makes no sense. The environment's fault.
    #[error("{variable}={value} makes no sense: it must be {expected}")]
    Variable {
        /// The variable.
        variable: String,
        /// Its value.
        value: String,
        /// What would be one.
        expected: String,
    },
    /// The file with the costs of links cannot be read or makes no sense. The environment's fault;
    /// every process of the job gets the same.
    #[error("{path}, which {variable} of process 0 names, has no costs of links: {why}")]
    Links {
        /// The variable.
        variable: &'static str,
        /// The file.
        path: String,
        /// The reason.
        why: String,
    },
    /// The processes ask for different transports. The environment's fault; every process of the
    /// job gets the same.
    #[error(
        "the processes of this job do not agree on a transport: {said}; {variable} must be the \
         same for all"
    )]
    Transports {
        /// Who says what.
        said: String,
        /// The variable by which they say it.
        variable: &'static str,
    },
    /// A process does not have what it was asked for: a transport, or devices of some kind. Its
    /// environment's fault; every other process of the job gets the same.
    #[error("process {process} on host {host} has {lack}")]
    Lacking {
        /// The process.
        process: ProcessId,
        /// Its host.
        host: String,
        /// What it has not, and why: `no transport: …`.
        lack: String,
    },
    /// Two processes cannot share memory, as they were asked to. Their environment's fault; every
    /// process of the job gets the same.
    #[error(
        "processes {one} and {other} cannot share memory: {why}; without {variable}=shm they use \
         what they can"
    )]
    Apart {
        /// One of them.
        one: ProcessId,
        /// The other.
        other: ProcessId,
        /// What is between them.
        why: String,
        /// The variable by which they were asked to.
        variable: &'static str,
    },
    /// The job's token is none, or could not be made. The environment's fault.
    #[error("{variable}: {error}")]
    Token {
        /// Where it was read from.
        variable: &'static str,
        /// What is wrong with it.
        error: TokenError,
    },
    /// The file with the user's secret cannot be used. The environment's fault.
    #[error("{variable}={path}: {why}")]
    TokenFile {
        /// The variable that names it.
        variable: &'static str,
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The launcher has died before this process had begun. The environment's fault.
    #[error("the launcher of this process (pid {launcher}) is gone")]
    Orphaned {
        /// The launcher's pid.
        launcher: String,
    },
    /// A job needs a process. The caller's fault.
    #[error("a job has at least one process, {processes} were asked for")]
    Processes {
        /// How many were asked for.
        processes: usize,
    },
    /// There is no such program. The caller's fault.
    #[error("there is no program {program}")]
    NotFound {
        /// What was to be started.
        program: String,
    },
    /// The rendezvous service could not be started.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// This machine could not do its part. The environment's fault.
    #[error("{doing} failed: {why}")]
    Environment {
        /// What was being done.
        doing: String,
        /// The system's word on it.
        why: String,
    },
}

impl LaunchError {
    #[doc(hidden)]
    pub fn environment(doing: impl Into<String>, why: impl ToString) -> Self {
        Self::Environment { doing: doing.into(), why: why.to_string() }
    }
}
