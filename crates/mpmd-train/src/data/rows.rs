//! Arrays of rows, filled by their owners.

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd_core::aval::{Element, ShapedArray};
use mpmd_core::{MpmdArray, Program, Result};
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;

/// Issues the creation of an array `[rows, columns]`. `fill` writes a range of columns of one row.
pub(super) fn array_of_rows<T: Element>(
    p: &mut Program,
    sharding: &Sharding,
    shape: [usize; 2],
    fill: impl Fn(usize, Range<usize>, &mut [T]) -> Result<()> + Send + Sync + 'static,
) -> Result<MpmdArray> {
    let aval = ShapedArray::new(&shape, T::DTYPE);
    p.array_from_fn(aval, sharding, move |region, mut values| {
        let columns = region.range(1);
        let rows = values
            .as_mut_slice::<T>()?
            .chunks_exact_mut(columns.len().max(1));
        let mut rows = region.range(0).zip(rows);
        rows.try_for_each(|(row, values)| fill(row, columns.clone(), values))
    })
}

/// Maps 64 random bits to a number in `0..end`, with negligible bias.
pub(super) fn below(random: u64, end: usize) -> usize {
    // The high half of the product.
    ((u128::from(random) * end as u128) >> 64) as usize
}

/// Returns the sharding `spec` over the first stage's mesh and over the last stage's mesh.
///
/// # Panics
///
/// If there is no mesh.
pub(super) fn ends(meshes: &[Mesh], spec: &Spec) -> (Sharding, Sharding) {
    let last = &meshes[meshes.len() - 1];
    (
        meshes[0].sharding(spec.clone()),
        last.sharding(spec.clone()),
    )
}

/// The side inputs of a stage, by name.
pub(super) type Named = BTreeMap<String, MpmdArray>;
