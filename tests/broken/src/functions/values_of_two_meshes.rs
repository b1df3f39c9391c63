//! Each device has a mesh of its own, and arrays of both are added.
//!
//! kind: operands on different meshes
//! found by: issue
//! named: all
//! says: add: input 1 is

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (mesh, x) = rows(p)?;
    let [first, second] = [0, 1].map(|index| mesh.split("x").map(|all| all[index].clone()));
    let x = p.device_put(&x, first.map_err(Error::other)?.replicated())?;
    let y = p.device_put(&x, second.map_err(Error::other)?.replicated())?;
    let sum = p.compute((&x, &y), |(x, y)| x + y)?; // at fault
    sum.block_until_ready()?;
    Ok(())
}
