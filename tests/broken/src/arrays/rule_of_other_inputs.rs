//! A kernel of two inputs has the rule of one.
//!
//! kind: a rule that does not fit its kernel
//! found by: issue
//! named: all
//! says: the rule `i j -> i j` is not for 2 inputs and 1 outputs

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (mesh, x) = rows(p)?;
    let add = elementwise(|x: f32, y: f32| x + y).rule("i j -> i j");
    let add = p
        .jit(add)
        .on(&mesh)
        .outputs(mesh.sharding(spec!["x"]))
        .build()?;
    add.call(p, (x.clone(), x))?.block_until_ready()?; // at fault
    Ok(())
}
