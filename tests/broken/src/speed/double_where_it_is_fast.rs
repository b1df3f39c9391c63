//! A process computes in double precision, because its machine has time for it.
//!
//! kind: an element type that depends on the machine
//! found by: run
//! named: all
//! says: f64

use mpmd::prelude::*;

use super::is_fast;
use crate::operation::stages;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    let x = if is_fast(p) {
        MpmdArray::scalar(1.0f64)
    } else {
        MpmdArray::scalar(1.0f32)
    };
    let x = p.device_put(&x, stages[0].replicated())?; // at fault
    let x = p.device_put(&x, stages[1].replicated())?;
    x.block_until_ready()?;
    p.step_end()
}
