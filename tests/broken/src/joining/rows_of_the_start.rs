//! The layout gives an added process a device, and the rows do not divide over five.
//!
//! kind: a layout that has no place for an added process
//! found by: issue
//! named: all
//! says: cannot divide into 5 equal parts

use mpmd::prelude::*;

use super::{join_later, pause};

pub(crate) fn run(_: &mut Program) -> Result<()> {
    join_later(|p, commits| {
        let mesh = p.mesh(&[("part", -1)])?;
        let parts = mesh.sharding(spec!["part"]);
        let ones = MpmdArray::from_slice(&[12], &[1.0f32; 12])?;
        let mut x = p.device_put(&ones, &parts)?;
        for step in commits.restore(p, &mut x)?..40 {
            p.step_end()?;
            p.commit(step + 1, &x)?;
            x.block_until_ready()?;
            pause();
        }
        Ok(())
    })
}
