//! Each device sums whole columns of a replicated array, but the output is declared as partial
//! sums: their sum would count everything twice.
//!
//! kind: partial sums that are none
//! found by: issue
//! named: all
//! says: output 0 has 1 summands

use mpmd::prelude::*;

use super::rows;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let (mesh, x) = rows(p)?;
    let whole = p.device_put(&x, mesh.replicated())?;
    let infer = |x: &ShapedArray| f32s([x.shape()[1]]);
    let sum = kernel(infer, |x: View<f32>, mut y: ViewMut<f32>| {
        y.fill(0.0);
        for row in x.chunks(y.len()) {
            y.iter_mut().zip(row).for_each(|(y, x)| *y += x);
        }
    });
    let sums = mesh.replicated().unreduced(&["x"])?;
    let sum = p
        .jit(sum.rule("i j -> j"))
        .on(&mesh)
        .outputs(sums)
        .build()?;
    sum.call(p, whole)?.block_until_ready()?; // at fault
    Ok(())
}
