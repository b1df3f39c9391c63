//! Each process adds the numbers of a batch in as many parts as it has cores, so the sums differ in
//! their last bits.
//!
//! kind: an order of sums that depends on the machine
//! found by: run
//! named: all
//! says: the values differ

use mpmd::prelude::*;

use super::is_fast;
use crate::operation::{stages, step};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    let x = step(p, &stages)?;
    let batch: Vec<f32> = (1..=1000).map(|i| 1.0 / i as f32).collect();
    let cores = if is_fast(p) { 4 } else { 1 };
    let parts = batch.chunks(batch.len() / cores);
    let sum: f32 = parts.map(|part| part.iter().sum::<f32>()).sum();
    let sum = p.device_put(&MpmdArray::scalar(sum), stages[1].replicated())?; // at fault
    sum.block_until_ready()?;
    x.block_until_ready()?;
    p.step_end()
}
