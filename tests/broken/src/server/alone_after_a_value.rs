//! The process that reads the choices makes the caches anew, since it alone has them.
//!
//! kind: a process that leaves the others by a value that it alone has
//! found by: run
//! named: 0
//! says: the programs diverged

use mpmd::{Program, Result};

use super::{inference, next, pass, prompt};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut inference = inference(p)?;
    let choices = inference.pass(p, &pass(vec![prompt(0, &[5, 17, 3])]), None)?;
    if inference.read(&choices)?.is_some() {
        inference.renew(p)?; // at fault
    }
    let choices = inference.pass(p, &pass(vec![next(0, 3)]), Some(&choices))?;
    inference.read(&choices)?;
    p.step_end()?;
    Ok(())
}
