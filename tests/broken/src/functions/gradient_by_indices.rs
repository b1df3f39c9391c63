//! The rows of a table are chosen by indices, and the gradient is asked for by both.
//!
//! kind: the gradient by whole numbers
//! found by: issue
//! named: all
//! says: gradients: value 1 is i32[2], and only floats have them

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (mesh, table) = rows(p)?;
    let table = p.device_put(&table, mesh.sharding(spec![None, "x"]))?;
    let indices = MpmdArray::from_slice(&[2], &[0i32, 3])?;
    let gradients = p.compute((&table, &indices), |(table, indices)| {
        let loss = table.take(0, indices).square().sum(..);
        loss.gradients((table, indices)) // at fault
    })?;
    gradients.0.block_until_ready()?;
    Ok(())
}
