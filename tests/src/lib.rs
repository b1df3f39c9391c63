//! Helpers for tests that run programs as real processes.
//!
//! - [`programs`] has the programs. Each is one function: a test can run it as processes over tcp,
//!   or as threads of its own process, and compare the output.
//! - [`Job`] starts the processes of a job by `mpmd::testing`, each with the program `named`, and
//!   also checks that no shared memory is left.
//! - [`Carrier`] selects their transport; [`over_each_carrier!`] makes a test for each.
//! - [`Sandbox`] and [`Watched`] are for single programs, such as `mpmd run` or the launchers of
//!   other projects. [`Slurm`] is one of these with all its daemons.
//!
//! Every wait has a deadline. When one passes, the message contains the output of all processes.

mod carriers;
mod installed;
mod job;
mod left;
pub mod programs;
mod random;
mod slurm;

pub use carriers::Carrier;
pub use installed::{package_program, system_program};
pub use job::{FaultOutcome, Job};
pub use mpmd_launch::testing::{ProcessEnd, Processes, Sandbox, Watched, bare_command};
pub use random::rng_of_this_run;
pub use slurm::{Slurm, launcher_command};
