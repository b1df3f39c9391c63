//! Process 0 computes an evaluation by itself, to show it.
//!
//! kind: work that only one process issues
//! found by: check
//! named: 0
//! says: the programs diverged

use mpmd::prelude::*;

use super::{stages, step};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    for _ in 0..4 {
        step(p, &stages)?.block_until_ready()?;
        if p.process().index() == 0 {
            let _shown = step(p, &stages)?;
        }
        p.step_end()?;
    }
    Ok(())
}
