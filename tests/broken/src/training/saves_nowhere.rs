//! A training saves every step, and has no folder of checkpoints.
//!
//! kind: an option that lacks another
//! found by: issue
//! named: all
//! says: `Run::save_every` needs a folder

use mpmd::Program;
use mpmd::prelude::*;
use mpmd::train::Run;

use super::{Same, trainer};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut trainer = trainer(p, 0.01)?;
    let run = Run::steps(3).save_every(1).progress(false);
    trainer.run(p, run, &Same::default()).map(drop)
}
