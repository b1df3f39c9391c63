//! Only the newest checkpoint is kept, and then that of the best evaluation is restored.
//!
//! kind: a checkpoint that is removed before it is needed
//! found by: run
//! named: all
//! says: there is no checkpoint of step 1

use mpmd::Program;
use mpmd::prelude::*;
use mpmd::train::{Checkpoints, Run};

use super::{Folder, Same, trainer};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let folder = Folder::new(p)?;
    // `keep_best` is missing.
    let checkpoints = Checkpoints::new(folder.path()).keep(1);
    let run = Run::steps(9)
        .evaluate_every(1)
        .patience(2)
        .checkpoints(checkpoints.clone())
        .save_every(1)
        .progress(false);
    // The loss stays the same, so the first evaluation is the best.
    let mut trainer = trainer(p, 0.0)?;
    trainer.run(p, run, &Same::default())?;
    if let Some(best) = trainer.best() {
        trainer.restore(p, &checkpoints.at(best.step))?;
    }
    Ok(())
}
