//! The parts of a mesh axis.

use std::ops::Range;

use mpmd_layout::topology::{Mesh, MeshError};

/// The parts into which [`Program::split_by_mesh_axis`](crate::Program::split_by_mesh_axis) cuts an
/// axis.
///
/// A number of parts, or the indices at which parts begin, convert to this type.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Sections {
    /// One part for each index of the axis.
    Each,
    /// A number of parts of equal size.
    Equal(usize),
    /// Parts that begin at index 0 and at each of these strictly ascending indices.
    At(Vec<usize>),
}

/// The reason why an axis of a mesh cannot be cut into [`Sections`].
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum SectionsError {
    /// The mesh has no such axis.
    #[error(transparent)]
    Axis(#[from] MeshError),
    /// The size of the axis is not a multiple of the number of parts, or the number is 0.
    #[error(
        "axis `{axis}` of {mesh} has {size} indices, which cannot be cut in {parts} equal parts"
    )]
    Unequal {
        axis: String,
        mesh: Mesh,
        size: usize,
        parts: usize,
    },
    /// The start indices of the parts do not ascend strictly within the axis.
    #[error(
        "axis `{axis}` of {mesh} cannot be cut at {starts:?}: the places ascend strictly, above 0 \
         and below {size}"
    )]
    Starts {
        axis: String,
        mesh: Mesh,
        size: usize,
        starts: Vec<usize>,
    },
}

impl From<usize> for Sections {
    fn from(parts: usize) -> Self {
        Self::Equal(parts)
    }
}

impl From<Vec<usize>> for Sections {
    fn from(starts: Vec<usize>) -> Self {
        Self::At(starts)
    }
}

impl From<&[usize]> for Sections {
    fn from(starts: &[usize]) -> Self {
        Self::At(starts.to_vec())
    }
}

impl<const N: usize> From<[usize; N]> for Sections {
    fn from(starts: [usize; N]) -> Self {
        Self::At(starts.to_vec())
    }
}

impl Sections {
    /// Returns the index range of each part of an axis of `mesh`. Fails if the axis cannot be cut
    /// in this way.
    pub(super) fn ranges(
        &self,
        mesh: &Mesh,
        axis: &str,
    ) -> std::result::Result<Vec<Range<usize>>, SectionsError> {
        let size = mesh.axis_size(axis)?;
        let starts: Vec<usize> = match self {
            Self::Each => (0..size).collect(),
            Self::Equal(parts) if *parts == 0 || !size.is_multiple_of(*parts) => {
                return Err(SectionsError::Unequal {
                    axis: axis.to_owned(),
                    mesh: mesh.clone(),
                    size,
                    parts: *parts,
                });
            }
            Self::Equal(parts) => (0..*parts).map(|part| part * (size / parts)).collect(),
            Self::At(places) => {
                let starts: Vec<usize> = std::iter::once(0).chain(places.iter().copied()).collect();
                if !starts.is_sorted_by(|a, b| a < b) || starts.iter().any(|start| *start >= size) {
                    return Err(SectionsError::Starts {
                        axis: axis.to_owned(),
                        mesh: mesh.clone(),
                        size,
                        starts: places.clone(),
                    });
                }
                starts
            }
        };

        let ends = starts.iter().skip(1).copied().chain([size]);
        Ok(starts
            .iter()
            .copied()
            .zip(ends)
            .map(|(start, end)| start..end)
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_layout::topology::DeviceId;

    #[test]
    fn sections_give_ranges_or_an_error() {
        let mesh = Mesh::new(&[("x", 4), ("y", 2)], (0..8).map(DeviceId).collect()).unwrap();
        let ranges = |sections: Sections| sections.ranges(&mesh, "x");
        assert_eq!(ranges(Sections::Each).unwrap(), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(ranges(2.into()).unwrap(), [0..2, 2..4]);
        assert_eq!(ranges([1].into()).unwrap(), [0..1, 1..4]);
        assert_eq!(ranges(vec![1, 3].into()).unwrap(), [0..1, 1..3, 3..4]);
        assert_eq!(
            ranges(Sections::At(Vec::new())).unwrap(),
            std::slice::from_ref(&(0..4))
        );
        for wrong in [3, 0, 5, 8] {
            let error = ranges(wrong.into()).unwrap_err().to_string();
            let axis = "axis `x` of {x:4, y:2} devices [0, 1, 2, 3, 4, 5, 6, 7] has 4 indices";
            assert!(error.contains(axis), "{error}");
        }
        for wrong in [&[0][..], &[4], &[2, 2], &[3, 1], &[1, 9]] {
            let error = ranges(wrong.into()).unwrap_err().to_string();
            assert!(
                error.contains(&format!("cannot be cut at {wrong:?}")),
                "{error}"
            );
        }
        assert!(
            Sections::Each
                .ranges(&mesh, "z")
                .unwrap_err()
                .to_string()
                .contains("there is no axis `z`")
        );
    }
}
