//! The checkpoints that a run saves.

use mpmd_core::tree::Tree;
use mpmd_core::{Error, MpmdArray, Program, Result};

use super::Trainer;
use crate::checkpoint::{Checkpoints, Phase, Saving};

/// The saves of a run. At most one is under way.
pub(super) struct Saves {
    to: Option<Checkpoints>,
    every: Option<u64>,
    current: Option<Saving>,
}

impl Saves {
    /// Checks that checkpoints after `step` do not meet others.
    pub(super) fn new(
        p: &mut Program,
        to: Option<Checkpoints>,
        every: Option<u64>,
        step: u64,
    ) -> Result<Self> {
        match &to {
            Some(to) => to.refuse_later(p, step)?,
            None if every.is_some() => {
                let problem = "`Run::save_every` needs a folder: set it by `Run::checkpoints`";
                return Err(Error::kernel(problem));
            }
            None => {}
        }
        Ok(Self { to, every, current: None })
    }

    /// Begins a save if one is due after the step that was issued last. Blocks until the save
    /// before is complete.
    pub(super) fn after_step<In: Tree<Leaf = MpmdArray>>(
        &mut self,
        p: &mut Program,
        trainer: &mut Trainer<In>,
    ) -> Result<()> {
        if self.every.is_some_and(|every| trainer.steps().is_multiple_of(every)) {
            self.save(p, trainer)?;
        }
        Ok(())
    }

    /// Takes the phases of all processes from a report, which is the same on every process.
    pub(super) fn report(&mut self, p: &mut Program, phases: &[(u64, Phase)]) -> Result<()> {
        if let Some(saving) = &mut self.current
            && saving.report(p, phases)?
        {
            self.current = None;
        }
        Ok(())
    }

    /// Saves the last step, unless that is done, and blocks until all saves are complete.
    pub(super) fn end<In: Tree<Leaf = MpmdArray>>(
        &mut self,
        p: &mut Program,
        trainer: &mut Trainer<In>,
    ) -> Result<()> {
        if self.to.as_ref().is_some_and(|to| !trainer.is_saved(to)) {
            self.save(p, trainer)?;
        }
        self.current.take().map_or(Ok(()), |mut saving| saving.finish(p))
    }

    fn save<In: Tree<Leaf = MpmdArray>>(
        &mut self,
        p: &mut Program,
        trainer: &mut Trainer<In>,
    ) -> Result<()> {
        let Some(to) = &self.to else { return Ok(()) };
        if let Some(mut saving) = self.current.take() {
            saving.finish(p)?;
        }
        self.current = Some(trainer.begin_save(p, to)?);
        Ok(())
    }
}
