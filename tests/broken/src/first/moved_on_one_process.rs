//! Only process 0 moves the array, as if the others had nothing to do with it.
//!
//! kind: an operation that not every process issues
//! found by: check
//! named: all
//! says: first differ

use mpmd::prelude::*;

use super::ones;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mesh = p.mesh(&[("half", 2)])?;
    let x = ones(4)?;
    if p.process().index() == 0 {
        let half = p.device_put(&x, mesh.sharding(spec!["half"]))?; // at fault
        half.block_until_ready()?;
    }
    let y = p.device_put(&x, mesh.replicated())?;
    p.step_end()?;
    y.block_until_ready()?;
    Ok(())
}
