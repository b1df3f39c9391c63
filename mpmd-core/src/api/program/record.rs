//! Recording of a dry run: the program's side.

use super::Program;
use crate::error::Result;
use mpmd_record::dry_run::{End, Plan};

impl Program {
    /// Returns the operations of all processes that were recorded so far. `None` unless this
    /// process is [a dry run](super::Builder::dry_run).
    pub fn plan(&self) -> Option<Plan> {
        Some(self.runtime.recorder.as_ref()?.plan(End::Open))
    }

    /// Records the end of a step. If the process was started to write its plan and the plan is
    /// complete, writes it and exits with code 0.
    pub(super) fn record_step(&self) -> Result<()> {
        let Some(recorder) = &self.runtime.recorder else { return Ok(()) };
        let Some(end) = recorder.step_end() else { return Ok(()) };
        if recorder.deliver(end)? {
            // Continuing has no use: later steps are known, and output from results that do not
            // exist would be wrong.
            std::process::exit(0);
        }
        Ok(())
    }

    /// Ends a dry run after the program has finished: writes the plan if the process was started to
    /// write it.
    pub(super) fn record_end(&self) -> Result<()> {
        match &self.runtime.recorder {
            Some(recorder) => recorder.deliver(End::Finished).map(drop),
            None => Ok(()),
        }
    }
}
