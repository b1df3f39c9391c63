//! Each process decides on the pass by itself, and they do not agree.
//!
//! kind: a value that differs between processes
//! found by: check
//! named: 1
//! says: the programs diverged

use mpmd::{ProcessId, Program, Result};

use super::{inference, pass, prompt};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut inference = inference(p)?;
    let own = if p.process() == ProcessId(1) { 6 } else { 5 };
    let choices = inference.pass(p, &pass(vec![prompt(0, &[own, 17, 3])]), None)?; // at fault
    inference.read(&choices)?;
    p.step_end()?;
    Ok(())
}
