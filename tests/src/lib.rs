//! Helpers for tests that run programs as real processes.
//!
//! - [`programs`] has the programs: each is one function, so that a test can run it as processes
//!   over tcp, or as threads of its own process, and compare what they print.
//! - [`Job`] starts the processes of a job, each with the program `named`, and sees to it that none
//!   is left whatever becomes of the test.
//! - [`Carrier`] is what their messages go by; [`over_each_carrier!`] makes a test of each.
//! - [`Watched`] does the same for a program of another package, such as `mpmd run`.
//! - [`Site`] does it for other people's launchers, and [`Slurm`] is one of them with all its
//!   daemons.
//!
//! Every wait has a deadline. When one passes, what all processes have printed is part of the
//! message.

mod carriers;
mod job;
mod left;
pub mod programs;
mod random;
mod site;
mod slurm;
mod watched;

pub use carriers::Carrier;
pub use job::{Job, JobOptions, Struck, bare_command};
pub use random::Random;
pub use site::{Site, system_program};
pub use slurm::Slurm;
pub use watched::{Ended, Watched, alive, package_program, processes_of};
