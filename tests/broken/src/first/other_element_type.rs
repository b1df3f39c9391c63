//! The kernel takes f32, and the array has i32.
//!
//! kind: a kernel that is called with another type of elements
//! found by: issue
//! named: all
//! says: does not fit the closure, which has f32 elements

use mpmd::prelude::*;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mesh = p.mesh(&[("half", 2)])?;
    let double = kernel(like_input, |x: View<f32>, mut y: ViewMut<f32>| {
        (0..y.len()).for_each(|i| y[i] = 2.0 * x[i]);
    });
    let double = p.jit(double).on(&mesh).outputs(mesh.replicated()).build()?;
    let x = MpmdArray::from_slice(&[4], &[1i32, 2, 3, 4])?;
    let x = p.device_put(&x, mesh.replicated())?;
    let y = double.call(p, x)?; // at fault
    y.block_until_ready()?;
    Ok(())
}
