//! Starting the processes of a job, and finding this process's rank in it.
//!
//! - [`JobEnv`] reads the variables of a launcher: ours, torchrun, Slurm, Open MPI, PMIx, PMI,
//!   Kubernetes. There is no scheduler here: on clusters the existing launchers start processes.
//! - [`Launch`] starts all processes of a job on this machine, and leaves none behind. `mpmd run`
//!   is a thin layer over it. Programs that start themselves use it directly:
//!
//! ```no_run
//! use mpmd_launch::{JobEnv, Launch};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     if JobEnv::from_env()?.is_none() {
//!         let outcome = Launch::this_program_again(4)?.run()?;
//!         if let Some(failure) = &outcome.first_failure {
//!             eprintln!("{failure}");
//!         }
//!         std::process::exit(outcome.code());
//!     }
//!     // One of the four processes.
//!     Ok(())
//! }
//! ```

#![forbid(unsafe_code)]

mod env;
mod error;
mod guard;
mod job_failure;
mod job_stop;
mod last_words;
mod log;
mod loopback;
mod memory_kills;
mod output;
mod process_end;
mod replacement;
mod signals;
mod spawn;
mod supervise;
pub mod testing;

pub use env::{DryRunEnv, JobEnv, cuda_collectives, device_kinds, read_private, read_secret, spin};
#[doc(hidden)]
pub use env::{
    TRANSPORTS, UnknownVariable, check_transport, kinds_by_process, peer_timeout, process_counts,
    unknown_variables_here,
};
pub use error::LaunchError;
pub use job_failure::{ExitKind, JobFailure};
pub use log::log_to_stderr;
#[doc(hidden)]
pub use log::{NO_READER, end_with_stdout};
#[doc(hidden)]
pub use loopback::reach_loopback;
pub use mpmd_base::variables;
pub use output::printable;
#[doc(hidden)]
pub use signals::{stop_name, stop_signals};
#[doc(hidden)]
pub use spawn::{DEFAULT_PEER_TIMEOUT, EXEC};
pub use spawn::{Launch, OutputMode, adopt, guard};
pub use supervise::JobOutcome;
