//! The old weights are read after they were given to the step that replaces them.
//!
//! kind: the use of a donated array
//! found by: issue
//! named: all
//! says: was donated

use mpmd::prelude::*;

use super::ones;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mesh = p.mesh(&[("half", 2)])?;
    let halve = kernel(like_input, |w: View<f32>, mut new: ViewMut<f32>| {
        (0..new.len()).for_each(|i| new[i] = w[i] / 2.0);
    });
    let halve = p
        .jit(halve)
        .on(&mesh)
        .outputs(mesh.replicated())
        .donate("")
        .build()?;
    let w = p.device_put(&ones(4)?, mesh.replicated())?;
    let new = halve.call(p, w.clone())?;
    let difference = halve.call(p, w)?; // at fault
    p.step_end()?;
    new.block_until_ready()?;
    difference.block_until_ready()?;
    Ok(())
}
