//! The inner dimension of a product is divided, so each device has a summand. The output is
//! declared as if each had the whole sum.
//!
//! kind: a sum over a divided dimension without a reduction
//! found by: issue
//! named: all
//! says: output 0 has 2 summands, one for each part of `k`

use mpmd::kernels::matmul;
use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (mesh, b) = rows(p)?;
    let a = p.device_put(&b, mesh.sharding(spec![None, "x"]))?;
    let product = p
        .jit(matmul())
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    product.call(p, (a, b))?.block_until_ready()?; // at fault
    Ok(())
}
