//! Only the process that has measured a pass tells its cost to all.
//!
//! kind: an operation that one process leaves out
//! found by: run
//! named: all
//! says: broadcast_value

use std::time::Instant;

use mpmd::ProcessId;
use mpmd::prelude::*;

use super::is_fast;
use crate::operation::{stages, step};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    let start = Instant::now();
    step(p, &stages)?.block_until_ready()?;
    if is_fast(p) {
        let cost = start.elapsed().as_secs_f64();
        p.broadcast_value(ProcessId(1), 0.0, || Ok(cost))?; // at fault
    }
    step(p, &stages)?.block_until_ready()?;
    p.step_end()
}
