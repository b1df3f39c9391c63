//! Each row has a loss of its own, and they are not added up. A gradient is that of one number.
//!
//! kind: the gradient of several losses
//! found by: issue
//! named: all
//! says: gradients: expected one float, found f32[4]: sum it up with `.sum(..)`

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (_, x) = rows(p)?;
    p.compute(&x, |x| {
        let losses = x.square().sum(1);
        losses.gradients(x) // at fault
    })?
    .block_until_ready()?;
    Ok(())
}
