//! Programs that do not fit the processes with which their jobs go on.

pub(crate) mod rows_of_the_start;
pub(crate) mod shape_by_processes;

use std::time::Duration;

use mpmd::testing::Simulation;
use mpmd::{Commits, Program, Result};

/// Runs a program in a job of four processes that another one joins, each with a device. Returns
/// the first error of a process.
fn join_later(program: impl Fn(&mut Program, &Commits) -> Result<()> + Sync) -> Result<()> {
    let job = Simulation::new(4, 4).seed(1).shrink(Ok);
    let job = job.add_after(Duration::from_millis(20));
    let (ends, _) = job.run_recovering(1, program);
    ends.into_iter().find_map(Result::err).map_or(Ok(()), Err)
}

/// Lets some time pass in the simulation.
fn pause() {
    mpmd_base::block::thread::sleep(Duration::from_millis(5));
}
