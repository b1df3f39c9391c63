//! Each process first calls the kernel that was the faster one in its own measurement.
//!
//! kind: an order of operations that depends on the machine
//! found by: run
//! named: all
//! says: differ

use mpmd::prelude::*;

use super::is_fast;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mesh = p.mesh(&[("half", 2)])?;
    let all = mesh.replicated();
    let double = p.jit(elementwise(|x: f32| 2.0 * x)).on(&mesh);
    let double = double.outputs(&all).build()?;
    let square = p.jit(elementwise(|x: f32| x * x)).on(&mesh);
    let square = square.outputs(&all).build()?;
    let x = p.device_put(&MpmdArray::scalar(3.0f32), &all)?;
    let (a, b) = if is_fast(p) {
        let b = square.call(p, x.clone())?;
        (double.call(p, x)?, b)
    } else {
        (double.call(p, x.clone())?, square.call(p, x)?)
    };
    a.block_until_ready()?;
    b.block_until_ready()?;
    p.step_end()
}
