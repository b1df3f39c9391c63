//! The sharding of an array whose shape is changed.

use std::ops::Range;

use mpmd_layout::sharding::{Sharding, Spec, SpecEntry};

/// Returns the sharding of an array after a change of its shape `from` to `to`. Dimensions are
/// compared in the smallest groups with equally many elements. Only the first dimension of a group
/// that has a size other than 1 may be divided, since its parts are contiguous.
pub(super) fn reshaped(
    from: &[usize],
    to: &[usize],
    sharding: &Sharding,
) -> Result<Sharding, String> {
    let (Some(mesh), Some(spec)) = (sharding.mesh(), sharding.spec()) else {
        return Ok(sharding.clone());
    };
    let none = SpecEntry::None;
    let entry = |dim: usize| spec.entries().get(dim).unwrap_or(&none);
    let mut entries = vec![SpecEntry::None; to.len()];
    for (olds, news) in groups(from, to) {
        // Axes of size 1 divide dimensions of size 1, too.
        let is_divided = |dim: &usize| !entry(*dim).axes().is_empty();
        let first = olds.clone().find(|dim| from[*dim] != 1 || is_divided(dim));
        if let Some(dim) = olds
            .clone()
            .find(|dim| is_divided(dim) && Some(*dim) != first)
        {
            let axes = entry(dim).axes().join(", ");
            return Err(format!(
                "dimension {dim} is divided over {axes}, and is not kept"
            ));
        }
        let Some(first) = first.filter(|dim| is_divided(dim)) else {
            continue;
        };
        let parts: usize = entry(first)
            .axes()
            .iter()
            .map(|axis| mesh.axis_size(axis).unwrap_or(1))
            .product();
        let mut longer = news.clone().filter(|dim| to[*dim] != 1);
        match longer.next().or(news.clone().next()) {
            Some(new) if to[new].is_multiple_of(parts) => entries[new] = entry(first).clone(),
            _ => {
                return Err(format!(
                    "dimension {first} has {parts} parts, which the new dimensions do not have"
                ));
            }
        }
    }
    while entries.last() == Some(&SpecEntry::None) {
        entries.pop();
    }
    let axes: Vec<&str> = sharding
        .unreduced_axes()
        .iter()
        .map(String::as_str)
        .collect();
    let sharding = mesh.sharding(Spec::new(entries));
    sharding.unreduced(&axes).map_err(|why| why.to_string())
}

/// Parts the dimensions of two shapes into the smallest groups with equally many elements, in
/// order.
fn groups(from: &[usize], to: &[usize]) -> Vec<(Range<usize>, Range<usize>)> {
    /// A number that divides no usual size, in place of 0.
    const EMPTY: u128 = 1_000_003;

    // An empty dimension goes with an empty one.
    let size = |size: usize| if size == 0 { EMPTY } else { size as u128 };
    let mut groups = Vec::new();
    let (mut old, mut new) = (0, 0);
    while old < from.len() || new < to.len() {
        let starts = (old, new);
        let (mut olds, mut news) = (1u128, 1u128);
        loop {
            match olds <= news && old < from.len() && (olds < news || old == starts.0) {
                true => {
                    olds = olds.saturating_mul(size(from[old]));
                    old += 1;
                }
                false if new < to.len() && (news < olds || new == starts.1) => {
                    news = news.saturating_mul(size(to[new]));
                    new += 1;
                }
                false => break,
            }
        }
        groups.push((starts.0..old, starts.1..new));
    }
    groups
}

#[cfg(test)]
mod tests {
    use mpmd_layout::spec;
    use mpmd_layout::topology::{DeviceId, Mesh};

    use super::*;

    #[test]
    fn groups_are_small_and_cover_all_dimensions() {
        for (from, to, expected) in [
            (&[8, 4][..], &[32][..], vec![(0..2, 0..1)]),
            (&[8, 4], &[8, 2, 2], vec![(0..1, 0..1), (1..2, 1..3)]),
            (&[8, 4], &[1, 8, 4], vec![(0..1, 0..2), (1..2, 2..3)]),
            (&[6, 4], &[4, 6], vec![(0..2, 0..2)]),
            (&[], &[1, 1], vec![(0..0, 0..1), (0..0, 1..2)]),
            (&[0, 4], &[2, 0], vec![(0..2, 0..2)]),
            (&[0, 4], &[0, 4], vec![(0..1, 0..1), (1..2, 1..2)]),
        ] {
            let found = groups(from, to);
            assert_eq!(found, expected, "{from:?} {to:?}");
        }
    }

    #[test]
    fn first_dimension_of_a_group_stays_divided() {
        let mesh = Mesh::new(&[("x", 2), ("y", 2)], (0..4).map(DeviceId).collect()).unwrap();
        let shard = |spec: Spec| mesh.sharding(spec);
        for (from, to, before, after) in [
            (&[8, 4][..], &[32][..], spec!["x"], Some(spec!["x"])),
            (&[8, 4], &[32], spec![None, "x"], None),
            (&[32], &[8, 4], spec![("x", "y")], Some(spec![("x", "y")])),
            (&[32], &[2, 16], spec![("x", "y")], None),
            (
                &[8, 4],
                &[8, 1, 4],
                spec!["x", "y"],
                Some(spec!["x", None, "y"]),
            ),
            (&[1, 8], &[8, 1], spec![None, "y"], Some(spec!["y"])),
            (&[8, 4, 2], &[8, 8], spec!["x", "y"], Some(spec!["x", "y"])),
        ] {
            let found = reshaped(from, to, &shard(before)).ok();
            assert_eq!(found, after.map(shard), "{from:?} {to:?}");
        }
        let sum = shard(spec!["x"]).unreduced(&["y"]).unwrap();
        assert_eq!(reshaped(&[8, 4], &[32], &sum), Ok(sum.clone()));
    }
}
