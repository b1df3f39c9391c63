//! Indices are counted from 1, and 1 is written with a point.
//!
//! kind: a number that the other operand's dtype does not have
//! found by: issue
//! named: all
//! says: beside an operand of i32: cast that

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (_, x) = rows(p)?;
    let indices = p.compute(&x, |x| x.argmax(1) + 1.0)?; // at fault
    indices.block_until_ready()?;
    Ok(())
}
