//! One process reads a new version of the weights, and all compute by it.
//!
//! kind: half of one model and half of another
//! found by: check
//! named: 0
//! says: the programs diverged

use mpmd::{ProcessId, Program, Result};
use mpmd_models::InferencePass;

use super::{folder, inference, prompt};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut inference = inference(p)?;
    if p.process() == ProcessId(0) {
        inference.read_weights(p, &folder(), 7)?;
    }
    let pass = InferencePass {
        version: 7,
        chunks: vec![prompt(0, &[5, 17, 3])],
    };
    let choices = inference.pass(p, &pass, None)?;
    inference.read(&choices)?;
    p.sync()?;
    Ok(())
}
