//! A second training saves to the folder of the first, and does not restore its checkpoint.
//!
//! kind: a training that continues without its checkpoint
//! found by: run
//! named: all
//! says: there is a checkpoint of step 3, and this training continues after step 0

use mpmd::Program;
use mpmd::prelude::*;
use mpmd::train::{Checkpoints, Run};

use super::{Folder, Same, trainer};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let folder = Folder::new(p)?;
    let checkpoints = Checkpoints::new(folder.path());
    for _ in 0..2 {
        let mut trainer = trainer(p, 0.01)?;
        let run = Run::steps(3)
            .checkpoints(checkpoints.clone())
            .progress(false);
        trainer.run(p, run, &Same::default())?;
    }
    Ok(())
}
