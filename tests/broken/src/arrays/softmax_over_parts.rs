//! A softmax needs its dimension whole, but each device has a part of it.
//!
//! kind: a divided dimension that a kernel needs whole
//! found by: issue
//! named: all
//! says: dimension 0 of input 0 is divided: device 0 has 0..2 of 4, and needs it whole

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (mesh, x) = rows(p)?;
    let softmax = kernel(like_input, |x: View<f32>, mut y: ViewMut<f32>| {
        let columns = x.shape()[1];
        for column in 0..columns {
            let sum: f32 = x
                .iter()
                .skip(column)
                .step_by(columns)
                .map(|x| x.exp())
                .sum();
            let both = y.iter_mut().zip(x.iter());
            both.skip(column)
                .step_by(columns)
                .for_each(|(y, x)| *y = x.exp() / sum);
        }
    });
    let softmax = softmax.rule("!i j -> !i j");
    let softmax = p
        .jit(softmax)
        .on(&mesh)
        .outputs(mesh.sharding(spec!["x"]))
        .build()?;
    softmax.call(p, x)?.block_until_ready()?; // at fault
    Ok(())
}
