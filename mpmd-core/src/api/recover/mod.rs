//! Recovery: a job that loses a process goes on with another in its place, from state that the
//! other processes keep in memory.
//!
//! 1. `run` calls the program once in each *epoch* of the job. When an epoch ends because a process
//!    was lost, the others leave it, and meet under the next epoch with a spare in the free place.
//! 2. `commit` moves each region of the state to a *buddy* process: on another host if there is
//!    one. In `copies` the owner and the buddy copy it to memory that outlives the epoch.
//! 3. `exec/recovery_store` has the copies of this process, between the epochs too.
//! 4. `restore` runs in the new epoch. The processes exchange lists of their copies (`inventory`)
//!    and choose the newest commit that is whole. Then each region moves to the devices that need a
//!    part of it (`restore_arrays`).
//! 5. With a commit the processes also tell each other that others wait for a place, or that they
//!    ask to leave. Then all leave the epoch after a commit (`change`), and meet in one with more
//!    or fewer processes.

#[cfg(test)]
mod beginning;
mod change;
mod commit;
mod copies;
mod inventory;
mod report;
mod restore;
mod restore_arrays;
mod run;
mod simulate;
#[cfg(test)]
mod tests;

pub use commit::Committed;
pub(crate) use inventory::tell;
pub use report::Recovery;
pub use run::{Commits, OnLoss, RecoveringBuilder};
