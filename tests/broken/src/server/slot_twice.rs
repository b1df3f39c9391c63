//! A pass has two chunks for one sequence, so its next token would be chosen twice.
//!
//! kind: one bad member that gets values of another
//! found by: issue
//! named: all
//! says: two chunks for place 0

use mpmd::{Program, Result};
use mpmd_models::PassChunk;

use super::{inference, pass, prompt};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut inference = inference(p)?;
    let other = PassChunk {
        blocks: vec![1],
        ..prompt(0, &[9, 9])
    };
    let choices = inference.pass(p, &pass(vec![prompt(0, &[5, 17, 3]), other]), None)?;
    inference.read(&choices)?;
    Ok(())
}
