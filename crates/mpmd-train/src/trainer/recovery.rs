//! Recovery of a training from the loss of processes: the contents of a commit, and the start of an
//! epoch from one.

use std::collections::VecDeque;

use mpmd_core::tree::Tree;
use mpmd_core::{Commits, Committed, Error, MpmdArray, Program, Result};

use super::Trainer;
use super::report::{ReportArrays, StepHandle};
use crate::best::{BEST_WORDS, BestEvaluation};
use crate::checkpoint::Checkpoints;

/// Number of last steps whose figures a commit contains. When a commit is issued, the reports of
/// earlier steps have been read: see `PENDING` in `run.rs`.
pub(super) const RECENT: usize = 3;

/// The figures of a recent step. `step` is 0 if there was no step yet.
#[derive(Clone, Debug)]
pub(super) struct Recent {
    pub(super) step: u64,
    pub(super) rate: f64,
    values: MpmdArray,
}

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Restores the training in a job that [recovers](mpmd_core::RecoveringBuilder): from the
    /// newest commit, else from the newest checkpoint in `files`. Returns the step, or 0 if there
    /// is neither. Every process must call it in every epoch, before the first step. Blocks until
    /// the state is restored.
    ///
    /// [`Trainer::run`] then repeats the reports of up to three steps before it. So a file with a
    /// line for each step has no gap, whenever a process dies.
    ///
    /// The pipeline may have other stages than at the commit, as in a job that
    /// [shrinks](mpmd_core::OnLoss::Shrink), if its parameters have the same paths.
    ///
    /// # Errors
    ///
    /// [`Error::CommitsLost`] if commits are lost and there is no checkpoint. Returns the errors of
    /// [`Commits::restore`] and [`Trainer::restore`].
    pub fn resume(
        &mut self,
        p: &mut Program,
        commits: &Commits,
        files: Option<&Checkpoints>,
    ) -> Result<u64> {
        self.recent = (0..RECENT)
            .map(|_| {
                Ok(Recent {
                    step: 0,
                    rate: 0.0,
                    values: self.reporter.no_figures(p)?,
                })
            })
            .collect::<Result<_>>()?;

        self.commits = Some(commits.clone());
        let restored = commits.restore(p, self);
        self.recovery = commits.last_recovery();
        let committed = match restored {
            Err(error @ Error::CommitsLost { .. }) if files.is_some() => Err(error),
            committed => match committed? {
                0 => Ok(0),
                step => return Ok(step),
            },
        };

        match files
            .map(|files| self.restore(p, files))
            .transpose()?
            .flatten()
        {
            Some(step) => Ok(step),
            None => committed,
        }
    }

    /// Stores the figures of a step for later commits. Does nothing unless the training may resume.
    pub(super) fn keep_recent(&mut self, step: &StepHandle) {
        if self.recent.pop_front().is_some() {
            self.recent.push_back(Recent {
                step: step.step,
                rate: step.rate,
                values: step.figures.values().clone(),
            });
        }
    }
}

impl<In: Tree<Leaf = MpmdArray>> Committed for Trainer<In> {
    /// Returns the parameters and the optimiser's state in the order of a checkpoint, then the
    /// figures of the last steps.
    fn arrays(&self) -> Vec<MpmdArray> {
        let state = self
            .contents(false)
            .arrays
            .into_iter()
            .map(|(_, array)| array);
        state
            .chain(self.recent.iter().map(|recent| recent.values.clone()))
            .collect()
    }

    fn names(&self) -> Vec<String> {
        let state = self
            .contents(false)
            .arrays
            .into_iter()
            .map(|(name, _)| name);
        let figures = (0..self.recent.len()).map(|at| format!("figures of recent step {at}"));
        state.chain(figures).collect()
    }

    /// Encodes the step, the seed, the best evaluation, and the number and learning rate of each of
    /// the last steps, then the metric names.
    fn values(&self) -> Vec<u8> {
        let recent = self
            .recent
            .iter()
            .flat_map(|recent| [recent.step, recent.rate.to_bits()]);
        let best = BestEvaluation::words(self.best);
        let words = [self.steps(), self.seed]
            .into_iter()
            .chain(best)
            .chain(recent);
        words
            .flat_map(u64::to_le_bytes)
            .chain(self.metrics.join("\n").into_bytes())
            .collect()
    }

    fn restore(&mut self, mut arrays: Vec<MpmdArray>, values: &[u8]) -> Result<()> {
        let count = self.recent.len();
        let (words, names) = values
            .split_at_checked(8 * (2 + BEST_WORDS + 2 * count))
            .ok_or_else(|| other(values))?;
        let (words, _) = words.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let names = str::from_utf8(names).map_err(|_| other(values))?;

        let Some(([step, seed], words)) = words.split_first_chunk() else {
            return Err(other(values));
        };
        let Some((best, recent)) = words.split_first_chunk() else {
            return Err(other(values));
        };
        if recent.len() != 2 * count || arrays.len() < count {
            return Err(other(values));
        }

        let figures = arrays.split_off(arrays.len() - count);
        self.set_arrays(arrays, false)?;
        self.optimizer.set_updates(*step);
        self.seed = *seed;
        self.best = BestEvaluation::of_words(*best);
        self.metrics = names.lines().map(str::to_owned).collect();

        let recent = recent
            .chunks_exact(2)
            .zip(figures)
            .map(|(words, values)| Recent {
                step: words[0],
                rate: f64::from_bits(words[1]),
                values,
            });
        self.recent = recent.collect::<VecDeque<_>>();
        self.is_resumed = true;
        Ok(())
    }
}

impl Recent {
    /// Returns the arrays of the step's report, without the statuses of processes.
    pub(super) fn figures(&self) -> ReportArrays {
        ReportArrays::of_recent(self.values.clone())
    }
}

/// Creates the error for a commit whose values have another form.
fn other(values: &[u8]) -> Error {
    let problem = format!(
        "a commit of a trainer of another kind, with {} bytes",
        values.len()
    );
    Error::kernel(problem)
}
