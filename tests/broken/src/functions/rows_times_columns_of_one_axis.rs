//! Both the rows of one factor and the columns of the other are divided over the only axis, so the
//! product would be divided twice over it.
//!
//! kind: an axis that divides two dimensions
//! found by: issue
//! named: all
//! says: both dimension 0 of input 0 and dimension 1 of input 1 are divided over `x`

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (mesh, x) = rows(p)?;
    let columns = p.device_put(&x, mesh.sharding(spec![None, "x"]))?;
    let product = p.compute((&x, &columns), |(x, y)| x.matmul(y))?; // at fault
    product.block_until_ready()?;
    Ok(())
}
