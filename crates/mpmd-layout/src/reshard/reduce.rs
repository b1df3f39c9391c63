//! Chooses when to add partial sums in two steps (reduce-scatter, then gather) because one step
//! would move more bytes.

use crate::sharding::{Layout, Sharding, Spec, SpecEntry};

/// Minimum size in bytes of an array whose partial sums may be added in two steps. Smaller arrays
/// take one step, which is one round of messages.
const TWO_STEPS_BYTES: usize = 256 << 10;

/// Returns the sharding after the first step of a two-step addition of partial sums:
/// reduce-scatter, then gather. In this sharding each device adds up one part of the array. `shape`
/// is the array's shape and `item_bytes` its bytes per element.
///
/// With `n` partial sums of `b` bytes and `k` copies of the sum wanted, one step moves `n k b`
/// bytes. Two steps move `(n - 1) b + k b`. The returned sharding divides a dimension that the
/// source does not divide. If no such dimension divides evenly, it divides another dimension
/// further.
///
/// Returns `None` if two steps gain nothing: `from` has no mesh or no partial sums, or its layout
/// equals `to`. Also if the array is below 256 KiB, fewer than two copies of the sum are wanted, or
/// no dimension can be divided evenly.
#[doc(hidden)]
pub fn scattered(
    from: &Sharding,
    shape: &[usize],
    to: &Layout,
    item_bytes: usize,
) -> Option<Sharding> {
    let elements: usize = shape.iter().product();
    let wanted: usize = match to.terms() {
        1 => to.regions().iter().map(|region| region.elements()).sum(),
        // All terms are put into one of the destination's partial sums.
        terms => {
            to.regions()
                .iter()
                .map(|region| region.elements())
                .sum::<usize>()
                / terms
        }
    };
    if elements.saturating_mul(item_bytes) < TWO_STEPS_BYTES || wanted < 2 * elements {
        return None;
    }

    let mesh = from.mesh()?;
    let spec = from.spec()?;
    let axes = from.unreduced_axes();
    if axes.is_empty() || from.layout(shape).is_ok_and(|held| *held == *to) {
        return None;
    }

    let mut entries = spec.entries().to_vec();
    entries.resize_with(shape.len(), || SpecEntry::from(None));
    let divided = |dim: usize| {
        let mut entries = entries.clone();
        let all: Vec<String> = entries[dim].axes().iter().chain(axes).cloned().collect();
        entries[dim] = all.into();
        let sharding = Sharding::named(mesh.clone(), Spec::new(entries), from.memory_kind());
        sharding.layout(shape).is_ok().then_some(sharding)
    };

    let free = |dim: &usize| entries[*dim].axes().is_empty();
    let dims = (0..shape.len())
        .filter(free)
        .chain((0..shape.len()).filter(|dim| !free(dim)));
    dims.into_iter().find_map(divided)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;
    use crate::topology::{DeviceId, Mesh};

    fn mesh() -> Mesh {
        Mesh::new(&[("a", 2), ("b", 4)], (0..8).map(DeviceId).collect()).unwrap()
    }

    fn specs(from: Spec, axes: &[&str], shape: [usize; 2], to: &Sharding) -> Option<Spec> {
        let from = mesh().sharding(from).unreduced(axes).unwrap();
        let found = scattered(&from, &shape, &to.layout(&shape).unwrap(), 4)?;
        assert!(found.unreduced_axes().is_empty() && found.mesh() == Some(&mesh()));
        found.spec().cloned()
    }

    #[test]
    fn undivided_dimensions_are_divided_first() {
        let all = mesh().replicated();
        assert_eq!(
            specs(spec![], &["b"], [512, 512], &all),
            Some(spec!["b", None])
        );
        assert_eq!(
            specs(spec!["a"], &["b"], [512, 512], &all),
            Some(spec!["a", "b"])
        );
        assert_eq!(
            specs(spec![], &["a", "b"], [512, 512], &all),
            Some(spec![("a", "b"), None])
        );
        // 514 is no multiple of 4.
        assert_eq!(
            specs(spec![], &["b"], [514, 512], &all),
            Some(spec![None, "b"])
        );
        assert_eq!(
            specs(spec!["a"], &["b"], [512, 514], &all),
            Some(spec![("a", "b"), None])
        );
        assert_eq!(specs(spec![], &["b"], [514, 514], &all), None);
    }

    #[test]
    fn small_arrays_and_parts_wanted_once_take_one_step() {
        let all = mesh().replicated();
        assert_eq!(specs(spec![], &["b"], [64, 64], &all), None);
        assert_eq!(
            specs(
                spec![],
                &["b"],
                [512, 512],
                &mesh().sharding(spec!["a", "b"])
            ),
            None
        );
        assert_eq!(
            specs(
                spec![],
                &["b"],
                [512, 512],
                &Sharding::single_device(DeviceId(1))
            ),
            None
        );
        assert!(specs(spec![], &["b"], [512, 512], &mesh().sharding(spec!["a"])).is_some());
        // Two partial sums, each once.
        let once = mesh().sharding(spec!["b"]).unreduced(&["a"]).unwrap();
        assert_eq!(specs(spec![], &["b"], [512, 512], &once), None);
        // Two copies of every partial sum, which stay in place.
        let same = mesh().replicated().unreduced(&["b"]).unwrap();
        assert_eq!(specs(spec![], &["b"], [512, 512], &same), None);
        assert!(
            specs(
                spec![],
                &["b"],
                [512, 512],
                &mesh().replicated().unreduced(&["a"]).unwrap()
            )
            .is_some()
        );
    }
}
