//! Mistakes with divided arrays: dimensions that belong together and are divided in different ways.

pub(crate) mod product_of_parts_as_a_whole;
pub(crate) mod rows_added_to_a_whole;
pub(crate) mod rule_of_other_inputs;
pub(crate) mod softmax_over_parts;
pub(crate) mod sum_of_whole_rows;

use mpmd::prelude::*;
use mpmd::topology::Mesh;

/// Returns a mesh of both devices, and a square of ones whose rows are divided over it.
fn rows(p: &mut Program) -> Result<(Mesh, MpmdArray)> {
    let mesh = p.mesh(&[("x", 2)])?;
    let ones = MpmdArray::from_slice(&[4, 4], &[1.0f32; 16])?;
    let rows = p.device_put(&ones, mesh.sharding(spec!["x"]))?;
    Ok((mesh, rows))
}
