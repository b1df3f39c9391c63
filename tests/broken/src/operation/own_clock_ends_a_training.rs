//! Each process ends its training by its own clock.
//!
//! kind: a process that decides by its own clock
//! found by: run
//! named: 0
//! says: process 0 has issued only

use std::time::{Duration, Instant};

use mpmd::prelude::*;

use super::{stages, step};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    let start = Instant::now();
    // The clocks differ by more than a step.
    let time = Duration::from_millis(if p.process().index() == 0 { 50 } else { 500 });
    while start.elapsed() < time {
        step(p, &stages)?.block_until_ready()?;
        p.step_end()?;
    }
    Ok(())
}
