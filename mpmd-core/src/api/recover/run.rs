//! Epochs: the program runs again after the loss of a process.

use std::fmt;
use std::sync::Arc;

use mpmd_base::block::Mutex;

use super::Recovery;
use crate::api::program::{Builder, EpochEnd, Job, Program, Returning, Start};
use crate::error::{Error, Result};
use crate::exec::kept::Kept;

/// Settings of a program that survives lost processes: see [`Builder::spares`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it runs a program"]
pub struct RecoveringBuilder {
    builder: Builder,
    spares: usize,
    every: u64,
}

/// The commits of a job, as far as this process has them in its memory.
///
/// [`Program::commit`] adds one. After the loss of a process, [`Commits::restore`] continues from
/// the newest that is whole.
#[derive(Clone, Debug)]
pub struct Commits {
    pub(super) kept: Arc<Mutex<Kept>>,
    pub(super) recovery: Arc<Mutex<Option<Recovery>>>,
}

impl Builder {
    /// Makes the program survive lost processes: [`RecoveringBuilder::run`] calls it again when a
    /// process is lost, with another process in the free place.
    ///
    /// `spares` of the processes that the launcher starts wait for such a place. It counts under
    /// launchers that know no spares, such as Slurm and `mpirun`. `mpmd run --spares` says it for
    /// the program.
    pub fn spares(self, spares: usize) -> RecoveringBuilder {
        RecoveringBuilder { builder: self, spares, every: 1 }
    }
}

impl RecoveringBuilder {
    /// Commits only steps that are multiples of `steps`: other calls of [`Program::commit`] do
    /// nothing. 1 by default; 0 counts as 1.
    pub fn every(mut self, steps: u64) -> Self {
        self.every = steps.max(1);
        self
    }

    /// Joins the job that this process was started for, runs `program` and finishes, as
    /// [`Builder::run`] does. Returns the value of `program`, or `None` on a spare that was not
    /// needed.
    ///
    /// If a process is lost, the others leave the job's epoch, and meet again under the next one
    /// with a spare or a new process in the free place. Then `program` is called again. It issues
    /// everything anew, and starts from [`Commits::restore`]. Arrays and other handles of the
    /// earlier epoch must not be used. A job of one process runs `program` once.
    ///
    /// # Errors
    ///
    /// Those of [`Builder::run`], except for the loss of another process. If no process takes the
    /// free place within the peer timeout.
    #[track_caller]
    pub fn run<T, E>(
        self,
        program: impl Fn(&mut Program, &Commits) -> Result<T, E>,
    ) -> Result<Option<T>, E>
    where
        E: From<Error> + fmt::Display,
    {
        let mut job = Job::of_environment(self.builder, self.spares)?;
        run_epochs(self.every, |returning| job.join(returning), program)
    }
}

/// Runs the program in each epoch of a job. `join` joins the next one, in which this process is
/// returning unless it is its first.
#[track_caller]
pub(crate) fn run_epochs<T, E>(
    every: u64,
    mut join: impl FnMut(Option<Returning>) -> Result<Start>,
    program: impl Fn(&mut Program, &Commits) -> Result<T, E>,
) -> Result<Option<T>, E>
where
    E: From<Error> + fmt::Display,
{
    let commits =
        Commits { kept: Arc::new(Mutex::new(Kept::new(every))), recovery: Arc::default() };
    let mut returns = None;
    loop {
        let (failure, returning) = match join(returns.take())? {
            Start::NoPlace => return Ok(None),
            Start::Lost { failure, returning } => (failure, returning),
            Start::Program(mut p) => {
                let run = format!("{:032x}", p.run_id());
                tracing::info!(run, epoch = p.epoch(), "an epoch of the job begins");
                p.keep_commits(&commits.kept);
                let result = program(&mut p, &commits);
                match p.end_epoch(result) {
                    EpochEnd::Over(result) => return result.map(Some),
                    EpochEnd::Lost { failure, returning } => (failure, returning),
                }
            }
        };
        tracing::info!(%failure, "an epoch of the job has ended");
        commits.kept.lock().end_epoch(failure);
        returns = Some(returning);
    }
}
