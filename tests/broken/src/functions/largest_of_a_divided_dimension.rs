//! The largest element of each column is asked for, and each device has only some rows.
//!
//! kind: a divided dimension that a reduction needs whole
//! found by: issue
//! named: all
//! says: max: dimension 0 of input 0 is divided over `x`, and each device needs it whole

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (_, x) = rows(p)?;
    let largest = p.compute(&x, |x| x.max(0))?; // at fault
    largest.block_until_ready()?;
    Ok(())
}
