//! An array of rows is added to a replicated one.
//!
//! kind: inputs that are divided in different ways
//! found by: issue
//! named: all
//! says: dimension 0 of input 0 and dimension 0 of input 1 are divided in different ways

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (mesh, x) = rows(p)?;
    let whole = p.device_put(&x, mesh.replicated())?;
    let add = elementwise(|x: f32, y: f32| x + y);
    let add = p
        .jit(add)
        .on(&mesh)
        .outputs(mesh.sharding(spec!["x"]))
        .build()?;
    add.call(p, (x, whole))?.block_until_ready()?; // at fault
    Ok(())
}
