//! The sum over divided rows is a partial sum on each device. An exponential of summands is not
//! that of the sum.
//!
//! kind: a function of a partial sum that is not linear
//! found by: issue
//! named: all
//! says: exp: input 0 consists of summands over `x`: reduce it first

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (_, x) = rows(p)?;
    p.compute(&x, |x| {
        let sums = x.sum(0);
        sums.exp() // at fault
    })?
    .block_until_ready()?;
    Ok(())
}
