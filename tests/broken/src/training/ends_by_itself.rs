//! Process 0 ends the training by a figure that the other process does not have, as its own clock
//! would be.
//!
//! kind: a decision that is not the same on every process
//! found by: run
//! named: all
//! says: the programs diverged

use mpmd::prelude::*;
use mpmd::train::{ReportAnswer, Run};
use mpmd::{ProcessId, Program};

use super::{Same, trainer};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut trainer = trainer(p, 0.01)?;
    let is_first = p.process() == ProcessId(0);
    let run = Run::steps(20).progress(false).on_step(move |report| {
        if is_first && report.step == 5 {
            ReportAnswer::Stop
        } else {
            ReportAnswer::Continue
        }
    });
    trainer.run(p, run, &Same::default()).map(drop)
}
