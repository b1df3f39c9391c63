//! The records that a program leaves of itself, in files and in answers to observers, and views of
//! them.
//!
//! - [`activity`]: the current activity of a running process.
//! - [`dry_run`]: the operations that a dry run lists, as a flow that can be proved, and the
//!   memory and traffic that they will need.
//! - [`trace`]: the recorded events of a run, merged over its processes, as timelines and
//!   costs.
//!
//! The core writes all of them. Everything here is a function of them; only
//! [`trace::ProcessTrace`] reads files.

#![forbid(unsafe_code)]

pub mod activity;
pub mod dry_run;
pub mod trace;
