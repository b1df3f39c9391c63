//! The program's side of a dry run.

use super::Program;
use crate::error::Result;
use mpmd_record::dry_run::{DryRun, DryRunEnd};

impl Program {
    /// Returns the operations of all processes that were issued so far. `None` unless this program
    /// runs as [a dry run](super::Builder::dry_run).
    pub fn dry_run(&self) -> Option<DryRun> {
        Some(self.runtime.dry_run.as_ref()?.so_far(DryRunEnd::Open))
    }

    /// Ends a step. If the process was started to write its dry run and the dry run is
    /// complete, writes it and exits with code 0.
    pub(super) fn end_dry_step(&self) -> Result<()> {
        let Some(dry_run) = &self.runtime.dry_run else {
            return Ok(());
        };
        let Some(end) = dry_run.step_end() else {
            return Ok(());
        };
        if dry_run.deliver(end)? {
            // Continuing has no use: later steps are known, and output from results that do not
            // exist would be wrong.
            std::process::exit(0);
        }
        Ok(())
    }

    /// Ends a dry run after the program has finished. Writes it to a file if the process was
    /// started to do so.
    pub(super) fn finish_dry_run(&self) -> Result<()> {
        match &self.runtime.dry_run {
            Some(dry_run) => dry_run.deliver(DryRunEnd::Finished).map(drop),
            None => Ok(()),
        }
    }
}
