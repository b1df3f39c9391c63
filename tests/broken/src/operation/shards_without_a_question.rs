//! Every process reads the shards of the last stage's loss, to print it.
//!
//! kind: values of other processes
//! found by: issue
//! named: all
//! says: cannot read the shards of

use mpmd::prelude::*;

use super::{stages, step};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let stages = stages(p)?;
    let loss = step(p, &stages)?;
    let shards = loss.addressable_shards()?; // at fault
    println!("{} shards", shards.len());
    p.step_end()
}
