//! Saving and restoring a trainer, and the saves of a run.

use mpmd_core::tree::Tree;
use mpmd_core::{Error, MpmdArray, Program, Result};

use super::Trainer;
use crate::checkpoint::{Checkpoints, LoadedCheckpoint, SaveProgress, Saving, load};

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Saves a checkpoint and blocks until it is complete. Every process must call it.
    ///
    /// Takes host memory for a copy of the process's regions. Writes nothing in a dry run. To save
    /// while the training continues, use [`Run::checkpoints`](super::Run::checkpoints).
    ///
    /// # Errors
    ///
    /// If there is a checkpoint of this step already, or another job saves to this folder; then
    /// nothing is written. If an array's operation failed, or a file cannot be written. Every
    /// process gets the same error.
    pub fn save(&mut self, p: &mut Program, to: &Checkpoints) -> Result<()> {
        self.begin_save(p, to)?.finish(p)
    }

    /// Starts to save a checkpoint: see [`Saving::begin`].
    fn begin_save(&mut self, p: &mut Program, to: &Checkpoints) -> Result<Saving> {
        let saving = Saving::begin(
            p,
            to,
            self.contents(to.is_trained_only()),
            &self.status.save,
        )?;
        self.saved = Some((to.folder().to_owned(), self.steps()));
        Ok(saving)
    }

    /// Returns true if the model after the last step is in this folder already: its save has begun,
    /// or it was restored from the folder.
    fn is_saved(&self, to: &Checkpoints) -> bool {
        self.saved
            .as_ref()
            .is_some_and(|(folder, step)| folder == to.folder() && *step == self.steps())
    }

    /// Restores the newest complete checkpoint of the folder, or the one that [`Checkpoints::at`]
    /// requests, and returns its step. Returns `None` and changes nothing if there is no
    /// checkpoint. Every process must call it.
    ///
    /// Restores the parameters, the optimiser's state, the step, the best evaluation, and the seed,
    /// which replaces a seed set by [`Trainer::seed`]. The processes, stages and shardings may
    /// differ from those at the save. The schedule, the learning rate and the data are those of
    /// this program.
    ///
    /// Each region is read once, by the owner of the first device that holds it, and sent to the
    /// other devices. All read bytes are compared with their hashes. Old and new arrays are in
    /// memory at the same time. A dry run returns `None` and reads nothing.
    ///
    /// # Errors
    ///
    /// If there is no checkpoint of the requested step. If a file is damaged, or the arrays differ
    /// from those of this trainer in name, shape or dtype. Every process gets the same error, and
    /// nothing is changed. A damaged checkpoint is not skipped: the error names an older one, if
    /// there is one.
    pub fn restore(&mut self, p: &mut Program, from: &Checkpoints) -> Result<Option<u64>> {
        let trained_only = from.is_trained_only();
        let Some(loaded) = load(p, from, &self.contents(trained_only))? else {
            return Ok(None);
        };
        let LoadedCheckpoint {
            step,
            seed,
            best,
            arrays,
        } = loaded;
        self.set_arrays(arrays, trained_only)?;
        self.optimizer.set_updates(step);
        self.seed = seed;
        self.best = best;
        self.saved = Some((from.folder().to_owned(), step));
        Ok(Some(step))
    }
}

/// The saves of a run. At most one is in progress.
pub(super) struct Saves {
    to: Option<Checkpoints>,
    every: Option<u64>,
    current: Option<Saving>,
}

impl Saves {
    /// Prepares the folder for the saves of a run: see [`Checkpoints::claim`].
    pub(super) fn new<In: Tree<Leaf = MpmdArray>>(
        p: &mut Program,
        to: Option<Checkpoints>,
        every: Option<u64>,
        trainer: &Trainer<In>,
    ) -> Result<Self> {
        if let Some(to) = &to {
            to.claim(p, &trainer.contents(to.is_trained_only()))?;
        } else if every.is_some() {
            let problem = "`Run::save_every` needs a folder: set it by `Run::checkpoints`";
            return Err(Error::kernel(problem));
        }
        Ok(Self {
            to,
            every,
            current: None,
        })
    }

    /// Returns true if a save is due after `step`.
    pub(super) fn is_due(&self, step: u64) -> bool {
        self.every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// Passes the progress of all processes, from a report, to the save in progress: see
    /// [`Saving::report`].
    pub(super) fn report(&mut self, p: &mut Program, saves: &[SaveProgress]) -> Result<()> {
        if let Some(saving) = &mut self.current
            && saving.report(p, saves)?
        {
            self.current = None;
        }
        Ok(())
    }

    /// Starts to save the model after the last step, unless it is saved already. Blocks until the
    /// previous save is complete.
    pub(super) fn begin<In: Tree<Leaf = MpmdArray>>(
        &mut self,
        p: &mut Program,
        trainer: &mut Trainer<In>,
    ) -> Result<()> {
        let Some(to) = self.to.clone() else {
            return Ok(());
        };
        if trainer.is_saved(&to) {
            return Ok(());
        }
        self.finish(p)?;
        self.current = Some(trainer.begin_save(p, &to)?);
        Ok(())
    }

    /// Blocks until the save in progress is complete.
    pub(super) fn finish(&mut self, p: &mut Program) -> Result<()> {
        self.current
            .take()
            .map_or(Ok(()), |mut saving| saving.finish(p))
    }

    /// Ends the saves after a figure that is not finite. `good` is the last step whose figures are
    /// finite. If the save in progress is of an earlier step, completes it, since its parameters
    /// have computed a finite loss. Otherwise drops it.
    pub(super) fn end<In: Tree<Leaf = MpmdArray>>(
        &mut self,
        p: &mut Program,
        trainer: &mut Trainer<In>,
        good: u64,
    ) {
        if self
            .current
            .as_ref()
            .is_some_and(|saving| saving.step < good)
        {
            // The error of the figure is more to the point.
            let _ = self.finish(p);
        } else if self.current.take().is_some() {
            trainer.saved = None;
        }
    }
}
