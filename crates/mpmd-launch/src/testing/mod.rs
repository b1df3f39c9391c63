//! Tests that run programs as real processes, with deadlines and captured output.
//!
//! - [`Processes`] starts the processes of a job as [`RunningProcesses`], which a test can kill,
//!   stop, resume and wait for. A [`ProcessEnd`] has the exit status and the output of one.
//! - [`Sandbox`] is the folder of a test. It kills the processes that belong to it.
//! - [`Watched`] is one process of any program.
//!
//! A `Sandbox`, a `Watched` and `RunningProcesses` kill their processes when they are dropped, also
//! when the test panics.

mod processes;
mod running;
mod sandbox;
mod watched;

use std::time::Duration;

pub use crate::process_end::ProcessEnd;
pub use processes::Processes;
pub use running::RunningProcesses;
pub use sandbox::{Sandbox, bare_command};
pub use watched::Watched;

/// Time between two checks of a process's state.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Time limit for killed processes to end, and for child processes to end after their parents.
const END_WITHIN: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
