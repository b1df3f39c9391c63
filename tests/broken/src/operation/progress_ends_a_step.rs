//! Only the process that prints the progress ends its steps.
//!
//! kind: a call that belongs to all processes, made by the one that prints
//! found by: check
//! named: 0
//! says: the programs diverged

use mpmd::prelude::*;

use super::{stages, step};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    for number in 0..4 {
        step(p, &stages)?.block_until_ready()?;
        if p.process().index() == 0 {
            eprintln!("step {number}");
            p.step_end()?;
        }
    }
    Ok(())
}
