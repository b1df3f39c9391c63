//! A process whose machine is taken away asks to leave and returns, before the others know.
//!
//! kind: a process that leaves by itself
//! found by: issue
//! named: all
//! says: process 2 has issued only

use mpmd::ProcessId;
use mpmd::prelude::*;

use super::{leave, pause};

pub(crate) fn run(_: &mut Program) -> Result<()> {
    leave(|p, commits| {
        let mesh = p.mesh(&[("part", -1)])?;
        let all = mesh.replicated();
        let ones = MpmdArray::from_slice(&[12], &[1.0f32; 12])?;
        let mut x = p.device_put(&ones, &all)?;
        for step in commits.restore(p, &mut x)?..40 {
            p.step_end()?;
            p.commit(step + 1, &x)?;
            x.block_until_ready()?;
            pause();
            let is_taken_away = p.process() == ProcessId(2) && step == 20;
            if is_taken_away {
                commits.ask_to_leave();
                return Ok(());
            }
        }
        Ok(())
    })
}
