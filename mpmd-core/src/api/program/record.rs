//! Recording of a dry run: the program's side.

use std::panic::Location;

use super::Program;
use crate::dry_run::{End, Form, Plan};
use crate::error::Result;
use crate::exec::array::MpmdArray;
use crate::exec::recorder::KnownForm;

impl Program {
    /// What this process has recorded so far: the operations of all processes. `None` where it is
    /// one that does them; only [a spectator](super::Builder::spectator) records.
    pub fn plan(&self) -> Option<Plan> {
        Some(self.runtime.recorder.as_ref()?.plan(End::Open))
    }

    /// A step has ended. Where the process was started to write its plan, and it is whole, this is
    /// its end.
    pub(super) fn record_step(&self) -> Result<()> {
        let Some(recorder) = &self.runtime.recorder else { return Ok(()) };
        let Some(end) = recorder.step_end() else { return Ok(()) };
        if recorder.deliver(end)? {
            // What the program would do next is known, and what it would say of results that it
            // does not have would be wrong.
            std::process::exit(0);
        }
        Ok(())
    }

    /// The program has finished.
    pub(super) fn record_end(&self) -> Result<()> {
        match &self.runtime.recorder {
            Some(recorder) => recorder.deliver(End::Finished).map(drop),
            None => Ok(()),
        }
    }

    /// Writes an operation down, where this process only plans.
    pub(crate) fn record_operation<'a>(
        &self,
        at: &'static Location<'static>,
        takes: impl IntoIterator<Item = (&'a MpmdArray, bool)>,
        known: Option<&KnownForm>,
        form: impl FnOnce() -> Form,
    ) {
        if let Some(recorder) = &self.runtime.recorder {
            recorder.operation((self.label, at, self.hash.word()), takes, known, form);
        }
    }
}
