//! Programs that do not fit the processes with which their jobs go on.

pub(crate) mod leaver_returns_at_once;
pub(crate) mod rate_beside_the_state;
pub(crate) mod rows_of_the_start;
pub(crate) mod shape_by_processes;

use std::time::Duration;

use mpmd::testing::Simulation;
use mpmd::{Commits, Program, Result};

/// Runs a program in a job of four processes that another one joins, each with a device. Returns
/// the first error of a process.
fn join_later(program: impl Fn(&mut Program, &Commits) -> Result<()> + Sync) -> Result<()> {
    let job = Simulation::new(4, 4).seed(1).shrink(Ok);
    first_error(&job.add_after(Duration::from_millis(20)), program)
}

/// Runs a program in a job of three processes that can go on with fewer, each with a device.
/// Returns the first error of a process.
fn leave(program: impl Fn(&mut Program, &Commits) -> Result<()> + Sync) -> Result<()> {
    first_error(&Simulation::new(3, 3).seed(1).shrink(Ok), program)
}

fn first_error(
    job: &Simulation,
    program: impl Fn(&mut Program, &Commits) -> Result<()> + Sync,
) -> Result<()> {
    let (ends, _) = job.run_recovering(1, program);
    ends.into_iter().find_map(Result::err).map_or(Ok(()), Err)
}

/// Lets some time pass in the simulation.
fn pause() {
    mpmd_base::block::thread::sleep(Duration::from_millis(5));
}
