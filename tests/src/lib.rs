//! Helpers for tests that run programs as real processes.
//!
//! - [`programs`] has the programs. Each is one function: a test can run it as processes over tcp,
//!   or as threads of its own process, and compare the output.
//! - [`Job`] starts the processes of a job, each with the program `named`. It ensures that none is
//!   left, however the test ends.
//! - [`Carrier`] selects their transport; [`over_each_carrier!`] makes a test for each.
//! - [`Watched`] does the same for a program of another package, such as `mpmd run`.
//! - [`Sandbox`] does it for launchers of other projects, and [`Slurm`] is one of them with all its
//!   daemons.
//!
//! Every wait has a deadline. When one passes, the message contains the output of all processes.

mod carriers;
mod job;
mod left;
pub mod programs;
mod random;
mod sandbox;
mod slurm;
mod watched;

pub use carriers::Carrier;
pub use job::{FaultOutcome, Job, JobOptions, bare_command};
pub use random::Random;
pub use sandbox::{Sandbox, system_program};
pub use slurm::Slurm;
pub use watched::{Ended, Watched, alive, package_program, processes_of};
