//! Five rows are divided over two devices.
//!
//! kind: a shape that a sharding cannot divide
//! found by: issue
//! named: all
//! says: cannot divide into 2 equal parts

use mpmd::prelude::*;

use super::ones;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mesh = p.mesh(&[("half", 2)])?;
    let x = p.device_put(&ones(5)?, mesh.sharding(spec!["half"]))?; // at fault
    x.block_until_ready()?;
    Ok(())
}
