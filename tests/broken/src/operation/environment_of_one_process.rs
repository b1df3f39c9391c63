//! The learning rate comes from a variable that only one process has.
//!
//! kind: a setting that differs between processes
//! found by: run
//! named: all
//! says: the values differ

use mpmd::prelude::*;

use super::{stages, step};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    let x = step(p, &stages)?;
    // As if process 1 had been started with other variables. A dry run is no process of them.
    let is_other = !p.is_dry_run() && p.process().index() == 1;
    let rate = MpmdArray::scalar(if is_other { 0.5f32 } else { 0.25 });
    let rate = p.device_put(&rate, stages[1].replicated())?; // at fault
    rate.block_until_ready()?;
    x.block_until_ready()?;
    p.step_end()
}
