//! Mistakes in functions that `compute` traces.

pub(crate) mod exponential_of_a_partial_sum;
pub(crate) mod gradient_by_indices;
pub(crate) mod gradient_of_rows;
pub(crate) mod largest_of_a_divided_dimension;
pub(crate) mod number_of_another_dtype;
pub(crate) mod rows_times_columns_of_one_axis;
pub(crate) mod values_of_two_meshes;

use mpmd::prelude::*;
use mpmd::topology::Mesh;

/// Returns a mesh of both devices, and a square of ones whose rows are divided over it.
fn rows(p: &mut Program) -> Result<(Mesh, MpmdArray)> {
    let mesh = p.mesh(&[("x", 2)])?;
    let ones = MpmdArray::from_slice(&[4, 4], &[1.0f32; 16])?;
    let rows = p.device_put(&ones, mesh.sharding(spec!["x"]))?;
    Ok((mesh, rows))
}
