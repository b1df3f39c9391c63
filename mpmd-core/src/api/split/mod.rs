//! Cutting arrays along an axis of their mesh or into microbatches, and joining them again. Shards
//! get new handles; nothing is moved between devices.

mod from_shards;
mod microbatches;
mod relabel;
mod sections;

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use crate::api::program::Program;
use crate::api::put::refuse_twice;
use crate::error::{IssueProblem, Result, leaf};
use crate::exec::Rolling;
use crate::exec::array::{MpmdArray, Repr};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::{DeviceId, Mesh, MeshError};
use mpmd_layout::tree::{Tree, TreeError};
pub(crate) use relabel::{Relabel, Relabelled};
pub use sections::Sections;

/// Memory options of [`Program::split_by_mesh_axis`] and [`Program::concatenate_by_mesh_axis`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct SplitOptions {
    /// True to donate the sources. All clones of a donated array become unusable, and only the
    /// results keep the memory alive. Off by default: sharing is safe, since arrays never change.
    pub donate: bool,
}

impl SplitOptions {
    /// Sets [`SplitOptions::donate`].
    #[must_use]
    pub fn donate(mut self, donate: bool) -> Self {
        self.donate = donate;
        self
    }
}

impl Program {
    /// Cuts every array of a tree along an axis of its mesh. Returns one tree for each part of the
    /// axis.
    ///
    /// All arrays must be sharded by a spec over the same mesh. Each part lives on the devices with
    /// its indices of the axis. The part's mesh keeps the axis, shortened to the part. An array
    /// that is sharded over the axis becomes smaller in that dimension. Any other array becomes
    /// replicas with the whole shape, one in each part.
    ///
    /// Spec and memory kind stay the same. Nothing is moved: every shard is in exactly one part,
    /// unchanged. If a dimension is sharded over several axes, a part of a minor axis has *strided*
    /// blocks of the whole array, not a contiguous run.
    ///
    /// A tree without leaves has no mesh. It is returned as the only part.
    ///
    /// # Errors
    ///
    /// If an array is uncommitted, donated, unreduced over the axis, or donated twice by this call.
    /// If an array is not sharded by a spec, or is over another mesh than the first. If the mesh
    /// has no such axis, or the axis cannot be cut as requested: the number of parts is 0 or does
    /// not divide it, or the indices do not ascend strictly within it. The error is the same on
    /// every process, and nothing is donated.
    #[track_caller]
    pub fn split_by_mesh_axis<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        axis: &str,
        sections: impl Into<Sections>,
        options: SplitOptions,
    ) -> Result<Vec<T::With<MpmdArray>>> {
        let at = Location::caller();
        let wrong = |problem: IssueProblem| problem.at(at, "split_by_mesh_axis");
        let leaves = x.leaves_with_paths();
        if leaves.is_empty() {
            return Ok(vec![x.map_ref(&mut MpmdArray::clone)]);
        }

        let mesh = self.common_mesh(&leaves).map_err(wrong)?;
        let sections = sections.into().ranges(&mesh, axis);
        let ranges = sections.map_err(|why| wrong(IssueProblem::Split(why.to_string())))?;
        if options.donate {
            refuse_twice(&leaves).map_err(wrong)?;
            self.check_given_up(&leaves).map_err(wrong)?;
        }

        let mut made = Vec::with_capacity(ranges.len() * leaves.len());
        for range in &ranges {
            for (i, (path, array)) in leaves.iter().enumerate() {
                made.push(part_of(path, array, axis, range.clone(), i).map_err(wrong)?);
            }
        }

        let what = SplitWhat {
            leaves: leaves.len(),
            axis: axis.to_owned(),
            mesh,
            parts: ranges.len(),
        };
        let starts = ranges.iter().map(|range| range.start as u64);
        let words = [
            0x5911,
            Rolling::default().mix_bytes(axis.as_bytes()).word(),
            ranges.len() as u64,
        ];
        let words = words.into_iter().chain(starts).collect();

        let sources: Vec<&MpmdArray> = leaves.into_iter().map(|(_, array)| array).collect();
        let what = Arc::new(what);
        let donate = options.donate;
        let relabel = Relabel {
            made,
            what,
            donate,
            awaits_sends: false,
        };

        let mut made = self.relabel(&sources, relabel, words, at).into_iter();
        let mut tree =
            || x.map_ref(&mut |_| made.next().expect("one array for each leaf of each part"));
        Ok(ranges.iter().map(|_| tree()).collect())
    }

    /// Joins trees along an axis of their meshes. It is the inverse of
    /// [`Program::split_by_mesh_axis`].
    ///
    /// The leaves at the same path become one array on the devices of all leaves, in the order of
    /// the trees along the axis. They must have the same spec and memory kind. Their meshes must
    /// have the same axes, and the same sizes except for this axis. Arrays that are sharded over
    /// the axis are concatenated in that dimension. Other arrays become replicas of each other; the
    /// caller must ensure that their values are equal. Nothing is moved.
    ///
    /// If the trees have no leaves, the first tree is returned.
    ///
    /// # Errors
    ///
    /// If there is no tree, or the trees have different structures. If an array is uncommitted,
    /// donated, unreduced over the axis, or donated twice by this call. If an array is not sharded
    /// by a spec, or is over another mesh than the rest of its tree. If the meshes differ in axes
    /// or in other sizes, or share a device. If arrays at the same path differ in spec, unreduced
    /// axes, memory kind or dtype, or in shape other than by the axis. The error is the same on
    /// every process, and nothing is donated.
    #[track_caller]
    pub fn concatenate_by_mesh_axis<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        trees: &[T],
        axis: &str,
        options: SplitOptions,
    ) -> Result<T::With<MpmdArray>> {
        let at = Location::caller();
        let wrong = |problem: IssueProblem| problem.at(at, "concatenate_by_mesh_axis");
        let Some(first) = trees.first() else {
            return Err(wrong(IssueProblem::Split(
                "there is no tree to concatenate".to_owned(),
            )));
        };

        let structure = first.structure();
        for (i, tree) in trees.iter().enumerate() {
            let found = tree.structure();
            if found != structure {
                let expected = structure.to_string();
                let found = found.to_string();
                return Err(wrong(IssueProblem::Tree(TreeError::Structure {
                    path: i.to_string(),
                    expected,
                    found,
                })));
            }
        }

        // The path of a leaf is the index of its tree, then its path in the tree.
        let below = |i: usize, path: String| {
            if path.is_empty() {
                i.to_string()
            } else {
                format!("{i}/{path}")
            }
        };
        let by_tree: Vec<Vec<(String, &MpmdArray)>> = trees
            .iter()
            .enumerate()
            .map(|(i, tree)| {
                tree.leaves_with_paths()
                    .into_iter()
                    .map(|(path, a)| (below(i, path), a))
                    .collect()
            })
            .collect();
        if by_tree[0].is_empty() {
            return Ok(first.map_ref(&mut MpmdArray::clone));
        }

        let meshes: Vec<Mesh> = by_tree
            .iter()
            .map(|leaves| self.common_mesh(leaves))
            .collect::<std::result::Result<_, _>>()
            .map_err(wrong)?;
        let mesh =
            joined(&meshes, axis).map_err(|why| wrong(IssueProblem::Split(why.to_string())))?;

        // Grouped by leaf; each group is in the order of the trees.
        let leaves: Vec<(String, &MpmdArray)> = (0..by_tree[0].len())
            .flat_map(|i| by_tree.iter().map(move |leaves| leaves[i].clone()))
            .collect();
        if options.donate {
            refuse_twice(&leaves).map_err(wrong)?;
            self.check_given_up(&leaves).map_err(wrong)?;
        }

        let mut made = Vec::with_capacity(by_tree[0].len());
        for (i, parts) in leaves.chunks(trees.len()).enumerate() {
            made.push(whole_of(parts, axis, &mesh, i * trees.len()).map_err(wrong)?);
        }

        let what = JoinWhat {
            leaves: made.len(),
            axis: axis.to_owned(),
            trees: trees.len(),
            mesh,
        };
        let words = vec![
            0xc09c,
            Rolling::default().mix_bytes(axis.as_bytes()).word(),
            trees.len() as u64,
        ];

        let sources: Vec<&MpmdArray> = leaves.iter().map(|(_, array)| *array).collect();
        let what = Arc::new(what);
        let donate = options.donate;
        let relabel = Relabel {
            made,
            what,
            donate,
            awaits_sends: false,
        };

        let mut made = self.relabel(&sources, relabel, words, at).into_iter();
        Ok(first.map_ref(&mut |_| made.next().expect("one array for each leaf")))
    }

    /// Returns the mesh over which all these arrays are sharded by specs, or an error if they do
    /// not share one.
    fn common_mesh(
        &self,
        leaves: &[(String, &MpmdArray)],
    ) -> std::result::Result<Mesh, IssueProblem> {
        let mut common: Option<(&str, &Mesh)> = None;
        for (path, array) in leaves {
            array.check_usable(path)?;
            let split = |why: String| IssueProblem::Split(format!("{}{why}", leaf(path)));
            let Repr::Placed(placed) = &array.repr else {
                return Err(split(format!(
                    "{} is uncommitted: device_put it first",
                    array.aval()
                )));
            };
            if !Arc::ptr_eq(&placed.made.runtime, &self.runtime) {
                return Err(IssueProblem::Foreign { path: path.clone() });
            }

            let (Some(mesh), Some(_)) = (placed.made.sharding.mesh(), placed.made.sharding.spec())
            else {
                return Err(split(format!(
                    "{} is not over the axes of a mesh",
                    placed.made.sharding
                )));
            };

            let (first, expected) = *common.get_or_insert((path, mesh));
            if mesh != expected {
                return Err(split(format!(
                    "is over mesh {mesh}, but {first:?} is over {expected}"
                )));
            }
        }

        common
            .map(|(_, mesh)| mesh.clone())
            .ok_or_else(|| IssueProblem::Split("there is no array".to_owned()))
    }
}

/// Describes the part of an array that has the indices `range` of an axis of its mesh. `source` is
/// the array's index among the operation's sources.
fn part_of(
    path: &str,
    array: &MpmdArray,
    axis: &str,
    range: Range<usize>,
    source: usize,
) -> std::result::Result<Relabelled, IssueProblem> {
    let split = |why: String| IssueProblem::Split(format!("{}{why}", leaf(path)));
    let sharding = array
        .sharding()
        .ok_or_else(|| split("is uncommitted".to_owned()))?;
    let (mesh, size) = sharding
        .mesh()
        .ok_or_else(|| split(format!("{sharding} is not over the axes of a mesh")))
        .and_then(|mesh| {
            Ok((
                mesh,
                mesh.axis_size(axis)
                    .map_err(|error| split(error.to_string()))?,
            ))
        })?;

    refuse_unreduced(path, sharding, axis)?;
    let mut shape = array.shape().to_vec();
    if let Some(dim) = divided_dim(sharding, axis) {
        // Divisible: the axis divides the dimension.
        shape[dim] = shape[dim] / size * range.len();
    }

    let part = mesh
        .slice(axis, range)
        .map_err(|error| split(error.to_string()))?;
    let aval =
        ShapedArray::try_new(&shape, array.dtype()).map_err(|error| split(error.to_string()))?;
    Relabelled::over(path, aval, sharding, part, source..source + 1)
}

/// Describes the array that joins `parts` along an axis. `source` is the index of the first part
/// among the operation's sources. Fails if the parts do not fit together.
fn whole_of(
    parts: &[(String, &MpmdArray)],
    axis: &str,
    mesh: &Mesh,
    source: usize,
) -> std::result::Result<Relabelled, IssueProblem> {
    let (first_path, first) = &parts[0];
    let split = |path: &str, why: String| IssueProblem::Split(format!("{}{why}", leaf(path)));
    let sharding = first
        .sharding()
        .ok_or_else(|| split(first_path, "is uncommitted".to_owned()))?;
    refuse_unreduced(first_path, sharding, axis)?;

    let dim = divided_dim(sharding, axis);
    let per_index = |array: &MpmdArray| {
        let mut shape = array.shape().to_vec();
        if let (Some(dim), Some(size)) = (
            dim,
            array
                .sharding()
                .and_then(|s| s.mesh()?.axis_size(axis).ok()),
        ) {
            shape[dim] /= size;
        }
        shape
    };

    for (path, part) in &parts[1..] {
        let found = part
            .sharding()
            .ok_or_else(|| split(path, "is uncommitted".to_owned()))?;
        let form = |sharding: &Sharding| {
            (
                sharding.spec().cloned(),
                sharding.unreduced_axes().to_vec(),
                sharding.memory_kind(),
            )
        };
        if form(found) != form(sharding) {
            return Err(split(
                path,
                format!("is sharded {found}, but {first_path:?} is sharded {sharding}"),
            ));
        }

        if part.dtype() != first.dtype() || per_index(part) != per_index(first) {
            let why = format!(
                "{} over {} cannot follow {} over {} along axis `{axis}`",
                part.aval(),
                found.mesh().map(Mesh::to_string).unwrap_or_default(),
                first.aval(),
                sharding.mesh().map(Mesh::to_string).unwrap_or_default(),
            );
            return Err(split(path, why));
        }
    }

    let mut shape = first.shape().to_vec();
    if let Some(dim) = dim {
        shape[dim] = parts.iter().map(|(_, part)| part.shape()[dim]).sum();
    }
    let aval = ShapedArray::try_new(&shape, first.dtype());
    let aval = aval.map_err(|error| split(first_path, error.to_string()))?;
    Relabelled::over(
        first_path,
        aval,
        sharding,
        mesh.clone(),
        source..source + parts.len(),
    )
}

/// Returns an error if the array has partial sums over the axis, since a part of them is not a
/// value.
fn refuse_unreduced(
    path: &str,
    sharding: &Sharding,
    axis: &str,
) -> std::result::Result<(), IssueProblem> {
    if !sharding.unreduced_axes().iter().any(|name| name == axis) {
        return Ok(());
    }
    let why = format!(
        "{}holds partial sums over axis `{axis}`: {sharding}",
        leaf(path)
    );
    Err(IssueProblem::Split(why))
}

/// Returns the dimension of the array that is sharded over `axis`, or `None` if there is none.
fn divided_dim(sharding: &Sharding, axis: &str) -> Option<usize> {
    let entries = sharding.spec()?.entries();
    entries
        .iter()
        .position(|entry| entry.axes().iter().any(|name| name == axis))
}

/// The reason why meshes cannot be joined along an axis.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
enum JoinError {
    /// The first mesh has no such axis.
    #[error("there is no axis `{axis}` in {mesh}")]
    NoAxis { axis: String, mesh: Mesh },
    /// A mesh differs from the first one in its axis names or in the size of another axis.
    #[error("mesh {part} cannot follow {first} along axis `{axis}`")]
    OtherAxes {
        part: Mesh,
        first: Mesh,
        axis: String,
    },
    /// The joined devices do not form a mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

/// Joins meshes along an axis, in order. Fails if their other axes differ, or if they share a
/// device.
fn joined(parts: &[Mesh], axis: &str) -> std::result::Result<Mesh, JoinError> {
    let first = &parts[0];
    let index = first.axis_index(axis).ok_or_else(|| JoinError::NoAxis {
        axis: axis.to_owned(),
        mesh: first.clone(),
    })?;

    let without = |mesh: &Mesh| {
        let mut shape = mesh.shape().to_vec();
        shape.remove(index);
        shape
    };
    for part in &parts[1..] {
        if part.axis_names() != first.axis_names() || without(part) != without(first) {
            return Err(JoinError::OtherAxes {
                part: part.clone(),
                first: first.clone(),
                axis: axis.to_owned(),
            });
        }
    }

    let before = &first.shape()[..index];
    let after = &first.shape()[index + 1..];
    let outer: usize = before.iter().product();
    let inner: usize = after.iter().product();
    let mut devices: Vec<DeviceId> = Vec::new();
    for o in 0..outer {
        for part in parts {
            let run = part.shape()[index] * inner;
            devices.extend(&part.devices()[o * run..(o + 1) * run]);
        }
    }

    let mut axes: Vec<(&str, usize)> = first
        .axis_names()
        .iter()
        .map(String::as_str)
        .zip(first.shape().iter().copied())
        .collect();
    axes[index].1 = parts.iter().map(|part| part.shape()[index]).sum();
    Ok(Mesh::new(&axes, devices)?)
}

struct SplitWhat {
    leaves: usize,
    axis: String,
    mesh: Mesh,
    parts: usize,
}

impl fmt::Display for SplitWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            leaves,
            axis,
            mesh,
            parts,
        } = self;
        write!(
            f,
            "split of {leaves} arrays over {mesh} in {parts} parts along axis {axis}"
        )
    }
}

struct JoinWhat {
    leaves: usize,
    axis: String,
    trees: usize,
    mesh: Mesh,
}

impl fmt::Display for JoinWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            leaves,
            axis,
            trees,
            mesh,
        } = self;
        write!(
            f,
            "concatenation of {trees} times {leaves} arrays to {mesh} along axis {axis}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(axes: &[(&str, usize)]) -> Mesh {
        let count: u32 = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, (0..count).map(DeviceId).collect()).unwrap()
    }

    #[test]
    fn joined_undoes_slice() {
        let whole = mesh(&[("a", 2), ("b", 3), ("c", 2)]);
        for axis in ["a", "b", "c"] {
            let size = whole.axis_size(axis).unwrap();
            let parts: Vec<Mesh> = [0..1, 1..size]
                .into_iter()
                .map(|range| whole.slice(axis, range).unwrap())
                .collect();
            assert_eq!(joined(&parts, axis), Ok(whole.clone()));
            assert!(
                joined(&[parts[0].clone(), parts[0].clone()], axis)
                    .unwrap_err()
                    .to_string()
                    .contains("listed twice")
            );
        }
        let other = mesh(&[("a", 1), ("b", 2), ("c", 2)]);
        assert!(
            joined(&[whole.clone(), other], "a")
                .unwrap_err()
                .to_string()
                .contains("cannot follow")
        );
        let why = joined(&[whole], "z").unwrap_err().to_string();
        assert!(why.contains("no axis `z`"), "{why}");
    }
}
