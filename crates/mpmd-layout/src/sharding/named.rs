//! The layout of a named sharding: dimensions divided over the axes of a mesh.

use super::{Layout, ShardingError, Spec, SpecEntry};
use crate::region::Region;
use crate::topology::Mesh;

/// Returns the layout of an array of `shape` whose dimensions `spec` divides over `mesh`. Fails if
/// the three do not fit together.
pub(super) fn layout(mesh: &Mesh, spec: &Spec, shape: &[usize]) -> Result<Layout, ShardingError> {
    let dims = divide(mesh, spec, shape)?;
    let fully_replicated = dims.iter().all(|dim| dim.parts == 1);

    let region = |place: usize| {
        let coordinates = mesh.coordinates(place);
        dims.iter()
            .map(|dim| dim.part(mesh, &coordinates))
            .collect::<Region>()
    };

    let regions = (0..mesh.devices().len()).map(region).collect();
    Ok(Layout::new(
        shape,
        mesh.devices().to_vec(),
        regions,
        fully_replicated,
    ))
}

/// Returns the unreduced axes in the order of the mesh. Fails if an axis is unknown, is given
/// twice, or divides a dimension.
pub(super) fn unreduced(
    mesh: &Mesh,
    spec: &Spec,
    axes: &[&str],
) -> Result<Vec<String>, ShardingError> {
    let mut chosen = vec![false; mesh.axis_names().len()];
    for axis in axes {
        let Some(index) = mesh.axis_index(axis) else {
            return Err(ShardingError::UnreducedUnknownAxis {
                axis: (*axis).to_owned(),
                mesh: mesh.clone(),
            });
        };

        if std::mem::replace(&mut chosen[index], true) {
            return Err(ShardingError::UnreducedTwice {
                axis: (*axis).to_owned(),
            });
        }

        let divides = |entry: &SpecEntry| entry.axes().iter().any(|used| used == axis);
        if let Some(dim) = spec.entries().iter().position(divides) {
            let axis = (*axis).to_owned();
            let spec = spec.clone();
            return Err(ShardingError::UnreducedDivides { axis, dim, spec });
        }
    }

    let names = mesh.axis_names().iter().zip(chosen);
    Ok(names
        .filter(|(_, chosen)| *chosen)
        .map(|(name, _)| name.clone())
        .collect())
}

/// Returns the index of each device's partial sum, in the mesh's row-major order of devices. The
/// index combines the device's coordinates along the unreduced axes, major to minor in the order
/// given.
pub(super) fn terms(mesh: &Mesh, unreduced: &[String]) -> Vec<usize> {
    let axes: Vec<usize> = unreduced
        .iter()
        .filter_map(|axis| mesh.axis_index(axis))
        .collect();
    let term = |place: usize| {
        let coordinates = mesh.coordinates(place);
        axes.iter().fold(0, |term, axis| {
            term * mesh.shape()[*axis] + coordinates[*axis]
        })
    };
    (0..mesh.devices().len()).map(term).collect()
}

/// The division of one dimension over mesh axes.
struct DividedDim {
    /// Indices of the dividing mesh axes, major to minor.
    axes: Vec<usize>,
    parts: usize,
    /// Number of indices in each part.
    size: usize,
}

impl DividedDim {
    /// Returns (start, end) of the part of the dimension held by the device at these mesh
    /// coordinates. The end is exclusive.
    fn part(&self, mesh: &Mesh, coordinates: &[usize]) -> (usize, usize) {
        let part = self.axes.iter().fold(0, |part, axis| {
            part * mesh.shape()[*axis] + coordinates[*axis]
        });
        (part * self.size, (part + 1) * self.size)
    }
}

fn divide(mesh: &Mesh, spec: &Spec, shape: &[usize]) -> Result<Vec<DividedDim>, ShardingError> {
    let mut used_by = vec![None; mesh.shape().len()];
    let mut by_entry = Vec::with_capacity(spec.entries().len());
    for (dim, entry) in spec.entries().iter().enumerate() {
        let mut axes = Vec::with_capacity(entry.axes().len());
        for axis in entry.axes() {
            let Some(index) = mesh.axis_index(axis) else {
                let axis = axis.clone();
                let spec = spec.clone();
                let mesh = mesh.clone();
                return Err(ShardingError::UnknownAxis {
                    dim,
                    axis,
                    spec,
                    mesh,
                });
            };

            if let Some(first) = used_by[index].replace(dim) {
                let axis = axis.clone();
                let spec = spec.clone();
                return Err(ShardingError::AxisUsedTwice {
                    axis,
                    first,
                    second: dim,
                    spec,
                });
            }

            axes.push(index);
        }
        by_entry.push(axes);
    }

    if by_entry.len() > shape.len() {
        return Err(ShardingError::SpecTooLong {
            spec: spec.clone(),
            shape: shape.to_vec(),
        });
    }

    by_entry.resize(shape.len(), Vec::new());
    let entries = by_entry.into_iter().enumerate();
    entries
        .map(|(dim, axes)| {
            // Cannot overflow: the axes are distinct, and the mesh lists all its devices.
            let parts: usize = axes.iter().map(|axis| mesh.shape()[*axis]).product();
            if !shape[dim].is_multiple_of(parts) {
                let axes = axes_text(mesh, &axes);
                let shape = shape.to_vec();
                let spec = spec.clone();
                return Err(ShardingError::NotDivisible {
                    dim,
                    axes,
                    parts,
                    shape,
                    spec,
                });
            }
            Ok(DividedDim {
                size: shape[dim] / parts,
                axes,
                parts,
            })
        })
        .collect()
}

fn axes_text(mesh: &Mesh, axes: &[usize]) -> String {
    let axis = |axis: &usize| format!("{}:{}", mesh.axis_names()[*axis], mesh.shape()[*axis]);
    format!(
        "{{{}}}",
        axes.iter().map(axis).collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;
    use crate::topology::DeviceId;

    fn mesh() -> Mesh {
        Mesh::new(&[("a", 2), ("b", 3)], (0..6).map(DeviceId).collect()).unwrap()
    }

    fn error(spec: Spec, shape: &[usize]) -> ShardingError {
        layout(&mesh(), &spec, shape).unwrap_err()
    }

    #[test]
    fn tuples_of_axes_are_major_to_minor() {
        let starts = |spec: Spec| {
            let layout = layout(&mesh(), &spec, &[12]).unwrap();
            layout
                .regions()
                .iter()
                .map(|region| region.range(0).start)
                .collect::<Vec<_>>()
        };
        assert_eq!(starts(spec![("a", "b")]), [0, 2, 4, 6, 8, 10]);
        assert_eq!(starts(spec![("b", "a")]), [0, 4, 8, 2, 6, 10]);
        assert_eq!(starts(spec!["b"]), [0, 4, 8, 0, 4, 8]);
    }

    #[test]
    fn dividing_by_axes_of_size_one_is_still_replicated() {
        let mesh = Mesh::new(&[("x", 1), ("y", 2)], vec![DeviceId(0), DeviceId(1)]).unwrap();
        assert!(layout(&mesh, &spec!["x"], &[4]).unwrap().fully_replicated());
        assert!(
            !layout(&mesh, &spec!["y"], &[0]).unwrap().fully_replicated(),
            "divided, if into nothing"
        );
        assert!(layout(&mesh, &spec![], &[]).unwrap().fully_replicated());
    }

    #[test]
    fn errors_name_dimension_axis_expected_and_found() {
        assert_eq!(
            error(spec![None, "model"], &[4, 4]).to_string(),
            "P(None, model): dimension 1 is divided over axis `model`, but the mesh is \
             {a:2, b:3} devices [0, 1, 2, 3, 4, 5]"
        );
        assert_eq!(
            error(spec!["a", ("b", "a")], &[4, 6]).to_string(),
            "P(a, (b, a)): axis `a` divides dimension 0 and again dimension 1"
        );
        assert!(matches!(
            error(spec![("b", "b")], &[9]),
            ShardingError::AxisUsedTwice {
                first: 0,
                second: 0,
                ..
            }
        ));
        assert_eq!(
            error(spec!["a", None], &[4]).to_string(),
            "P(a, None) has 2 entries, but shape [4] has 1 dimensions"
        );
        assert_eq!(
            error(spec![None, ("a", "b")], &[4, 8]).to_string(),
            "P(None, (a, b)): dimension 1 of shape [4, 8] has size 8, which {a:2, b:3} cannot \
             divide into 6 equal parts: pad it to 12, or leave it whole"
        );
        assert_eq!(
            error(spec!["a"], &[usize::MAX]).to_string(),
            format!(
                "P(a): dimension 0 of shape [{0}] has size {0}, which {{a:2}} cannot divide into 2 \
                 equal parts: leave it whole",
                usize::MAX
            ),
            "no size fits behind it"
        );
        assert!(
            layout(&mesh(), &spec!["b"], &[0, 5]).is_ok(),
            "nothing divides evenly"
        );
    }
}
