//! Two sequences write their keys into one block, so each would see those of the other.
//!
//! kind: one bad member that gets values of another
//! found by: issue
//! named: all
//! says: fill block 0 twice

use mpmd::{Program, Result};
use mpmd_models::PassChunk;

use super::{inference, pass, prompt};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut inference = inference(p)?;
    let other = PassChunk {
        blocks: vec![0],
        ..prompt(1, &[9, 9])
    };
    let choices = inference.pass(p, &pass(vec![prompt(0, &[5, 17, 3]), other]), None)?;
    inference.read(&choices)?;
    Ok(())
}
