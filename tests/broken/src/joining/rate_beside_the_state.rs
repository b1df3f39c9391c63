//! A process lowers its learning rate in each step and does not commit it, so an added process
//! computes with another one.
//!
//! kind: a value beside the state that is committed
//! found by: issue
//! named: all
//! says: host values must be equal on all processes

use std::cell::Cell;

use mpmd::prelude::*;

use super::{join_later, pause};

thread_local! {
    /// The learning rate of a process. It is a thread of the simulation.
    static RATE: Cell<f32> = const { Cell::new(1.0) };
}

pub(crate) fn run(_: &mut Program) -> Result<()> {
    join_later(|p, commits| {
        let mesh = p.mesh(&[("part", -1)])?;
        let all = mesh.replicated();
        let subtract = elementwise(|x: f32, rate: f32| x - rate);
        let subtract = p.jit(subtract).on(&mesh).outputs(&all).build()?;
        let ones = MpmdArray::from_slice(&[12], &[1.0f32; 12])?;
        let mut x = p.device_put(&ones, &all)?;
        for step in commits.restore(p, &mut x)?..40 {
            RATE.set(RATE.get() * 0.9);
            let rate = MpmdArray::from_slice(&[12], &[RATE.get(); 12])?;
            let rate = p.device_put(&rate, &all)?;
            x = subtract.call(p, (x, rate))?;
            p.step_end()?;
            p.commit(step + 1, &x)?;
            x.block_until_ready()?;
            pause();
        }
        Ok(())
    })
}
