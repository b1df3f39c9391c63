//! The life of a process in its job.
//!
//! `start` opens the devices and starts the threads, which run the jobs of `worker`. `life_cycle`
//! handles lost peers, failures and the end of the job. `job_time` is the clock of the job.

pub(super) mod job_time;
pub(super) mod life_cycle;
pub(super) mod start;
pub(super) mod worker;
