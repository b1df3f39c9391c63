//! The state has a row for each process, so it is another one after a process has joined.
//!
//! kind: a state whose shape depends on the processes
//! found by: issue
//! named: all
//! says: and does not fit

use mpmd::prelude::*;

use super::{join_later, pause};

pub(crate) fn run(_: &mut Program) -> Result<()> {
    join_later(|p, commits| {
        let mesh = p.mesh(&[("part", -1)])?;
        let parts = mesh.sharding(spec!["part"]);
        let rows = p.processes();
        let mut x = p.device_put(
            &MpmdArray::from_slice(&[rows], &vec![1.0f32; rows])?,
            &parts,
        )?;
        let first = commits.restore(p, &mut x)?;
        for step in first..40 {
            p.step_end()?;
            p.commit(step + 1, &x)?;
            x.block_until_ready()?;
            pause();
        }
        Ok(())
    })
}
