//! Each process cuts its step into as many microbatches as it found best in its own measurement.
//!
//! kind: a schedule that depends on the machine
//! found by: run
//! named: all
//! says: differ

use mpmd::pipeline::Schedule;
use mpmd::prelude::*;

use super::is_fast;
use crate::operation::{stages, step};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    let microbatches = if is_fast(p) { 3 } else { 2 };
    let schedule = Schedule::one_f_one_b(2, microbatches)?;
    for _ in 0..schedule.microbatches() {
        step(p, &stages)?.block_until_ready()?;
    }
    p.step_end()
}
