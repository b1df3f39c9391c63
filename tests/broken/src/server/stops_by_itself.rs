//! The process that reads the choices ends, and the other waits for its next pass.
//!
//! kind: a process that skips operations
//! found by: run
//! named: 0
//! says: has issued only

use mpmd::{Program, Result};

use super::{inference, next, pass, prompt};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut inference = inference(p)?;
    let mut choices = inference.pass(p, &pass(vec![prompt(0, &[5, 17, 3])]), None)?;
    for position in 3..6 {
        if inference.read(&choices)?.is_some() {
            break;
        }
        choices = inference.pass(p, &pass(vec![next(0, position)]), Some(&choices))?;
    }
    p.step_end()?;
    Ok(())
}
