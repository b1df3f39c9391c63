//! Intermediate shardings: the devices of the source first replicate their shards, so that a few
//! devices can feed a smaller target.

use crate::sharding::{Sharding, Spec, SpecEntry};
use crate::topology::Mesh;

/// Suffix of the axis over which the intermediate is replicated. It follows the name of the cut
/// axis.
const REPLICA: &str = "_intermediate_replica";

/// Suffix of the axis over which the intermediate is still divided. It follows the name of the cut
/// axis.
const SPLIT: &str = "_intermediate_split";

/// A sharding to which an array moves first on its way from a source to a target. It uses the
/// source's devices.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Intermediate {
    /// The sharding, in the source's memory kind.
    pub sharding: Sharding,
    /// The axes of the sharding's mesh along which arrays are replicated, in mesh order. The
    /// devices at one index along such an axis together hold a whole copy of the array.
    pub replica_axes: Vec<String>,
}

/// The error that no intermediate sharding between two shardings exists. Direct resharding remains
/// possible.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{why}: from {src} to {dst}")]
#[non_exhaustive]
pub struct NoIntermediate {
    /// The first condition of [`find_intermediate_sharding`] that does not hold.
    pub why: WhyNoIntermediate,
    /// The sharding of the source.
    pub src: Sharding,
    /// The sharding of the target.
    pub dst: Sharding,
}

/// The reasons that two shardings have no intermediate sharding.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WhyNoIntermediate {
    /// In some dimension the parts of source and target have a common factor: parts can move
    /// directly to their destinations.
    #[error("no intermediate sharding is needed")]
    NotNeeded,
    /// The source or the target is not a sharding over a mesh by a spec, or holds partial sums.
    #[error("source and target must both be shardings of whole values over a mesh by a spec")]
    NotNamed,
    /// The specs have different lengths, and not exactly one of them is empty.
    #[error("the specs of source and target have different lengths")]
    RankMismatch,
    /// The largest number of parts of a source dimension is no multiple of the largest number of
    /// parts of a target dimension.
    #[error("the largest division of the source is no multiple of the largest of the target")]
    Undividable,
    /// The source is not divided into more parts than the target.
    #[error("the source is not divided into more parts than the target")]
    SourceNotLarger,
    /// The total number of parts of the source is no multiple of the target's total.
    #[error("the number of parts of the source is no multiple of that of the target")]
    TotalNotDivisible,
    /// No dimension that the source divides more than the target is divided over exactly one axis,
    /// or such an axis cannot be cut. A cut needs a size that is a multiple of the target's parts,
    /// a spec that fits the mesh, and axis names that are free.
    #[error("no axis of the source can be cut into replicas")]
    NoSplitCandidate,
}

impl WhyNoIntermediate {
    /// Returns the reason as one word in snake case, for machine-readable output.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotNeeded => "not_needed",
            Self::NotNamed => "not_named",
            Self::RankMismatch => "rank_mismatch",
            Self::Undividable => "undividable",
            Self::SourceNotLarger => "source_not_larger",
            Self::TotalNotDivisible => "total_not_divisible",
            Self::NoSplitCandidate => "no_split_candidate",
        }
    }
}

/// Returns the intermediate sharding between `src` and `dst`, by the rule of pathways-utils 0.1.13.
///
/// Let `s` and `d` be the numbers of parts of each dimension in source and target. The conditions,
/// in this order:
///
/// - Both shardings are over meshes, without unreduced axes.
/// - The specs have equal lengths. If exactly one of them is empty, it counts as undivided in every
///   dimension of the other.
/// - `max(s)` is a multiple of `max(d)`.
/// - `prod(s)` is larger than `prod(d)` and a multiple of it.
/// - No pair `s[i]`, `d[i]` has a common factor.
///
/// Then each axis that alone divides a dimension with `s[i] > d[i]` is cut in two. The axis
/// `<axis>_intermediate_replica` of size `s[i] / d[i]` comes first in the mesh. The axis
/// `<axis>_intermediate_split` of size `d[i]` takes the old place. The devices keep their row-major
/// order, so the step to the intermediate moves data: it does not only relabel devices.
///
/// Every device then holds the cut dimensions whole. For an array of known shape,
/// [`cheapest_intermediate`](super::cheapest_intermediate) also considers replicas that stay
/// divided.
///
/// The conditions leave `d[i] = 1` for every axis that can be cut. If `d[i]` is larger,
/// pathways-utils fails by accident; here the reason is [`WhyNoIntermediate::NoSplitCandidate`].
/// The reason is the same if a spec names an axis twice, or an axis that its mesh lacks.
///
/// # Errors
///
/// If there is no such sharding. The error's reason is the first condition that does not hold.
pub fn find_intermediate_sharding(
    src: &Sharding,
    dst: &Sharding,
) -> Result<Intermediate, NoIntermediate> {
    let none = |why| NoIntermediate {
        why,
        src: src.clone(),
        dst: dst.clone(),
    };
    find_cuts(src, dst, 0)
        .and_then(|cuts| cuts.whole())
        .map_err(none)
}

impl Intermediate {
    /// Returns the mesh of the first replica: the devices at index 0 of every replica axis. Returns
    /// `None` if the sharding's mesh lacks one of the axes.
    pub fn replica_mesh(&self) -> Option<Mesh> {
        let mesh = self.sharding.mesh()?.clone();
        self.replica_axes
            .iter()
            .try_fold(mesh, |mesh, axis| mesh.slice(axis, 0..1).ok())
    }
}

/// The axes of a source that an intermediate sharding cuts, and the numbers of parts of source and
/// target.
pub(super) struct AxisCuts<'a> {
    src: &'a Sharding,
    mesh: &'a Mesh,
    /// The source's spec: one entry for each dimension.
    entries: Vec<SpecEntry>,
    cuts: Vec<AxisCut>,
    /// Total number of parts of the source.
    parts: usize,
    /// Total number of parts of the target.
    dst_parts: usize,
}

impl AxisCuts<'_> {
    /// Returns the intermediate sharding whose replicas are not divided over the cut axes.
    pub(super) fn whole(&self) -> Result<Intermediate, WhyNoIntermediate> {
        let found = cut_axes(self.src, self.mesh, &self.entries, &self.cuts);
        found.ok_or(WhyNoIntermediate::NoSplitCandidate)
    }

    /// Returns the intermediate sharding with as many parts in each replica as the target has, as
    /// far as the sizes of the cut axes allow. Returns `None` if it equals the result of
    /// [`whole`](Self::whole) or cuts no axis.
    pub(super) fn split(&self) -> Option<Intermediate> {
        let cut: usize = self.cuts.iter().map(|cut| cut.parts).product();
        let kept = self.parts.checked_div(cut)?;
        let mut wanted = self.dst_parts / gcd(self.dst_parts, kept);

        let mut cuts = self.cuts.clone();
        for cut in &mut cuts {
            cut.split = gcd(cut.parts, wanted);
            wanted /= cut.split;
        }

        if cuts.iter().all(|cut| cut.split == 1) {
            return None;
        }
        cuts.retain(|cut| cut.split < cut.parts);
        cut_axes(self.src, self.mesh, &self.entries, &cuts)
    }
}

/// Returns the axes to cut by the conditions of [`find_intermediate_sharding`]. If one does not
/// hold, returns the first such condition. Specs with fewer than `ndim` entries count as undivided
/// in the remaining dimensions.
pub(super) fn find_cuts<'a>(
    src: &'a Sharding,
    dst: &Sharding,
    ndim: usize,
) -> Result<AxisCuts<'a>, WhyNoIntermediate> {
    let (Some(mesh), Some(src_spec)) = (src.mesh(), src.spec()) else {
        return Err(WhyNoIntermediate::NotNamed);
    };
    let (Some(dst_mesh), Some(dst_spec)) = (dst.mesh(), dst.spec()) else {
        return Err(WhyNoIntermediate::NotNamed);
    };
    if [src, dst]
        .iter()
        .any(|sharding| !sharding.unreduced_axes().is_empty())
    {
        return Err(WhyNoIntermediate::NotNamed);
    }

    // An empty spec keeps all dimensions whole, so it can be as long as the other.
    let mut entries = src_spec.entries().to_vec();
    let mut dst_entries = dst_spec.entries().to_vec();
    let length = if entries.is_empty() != dst_entries.is_empty() {
        entries.len().max(dst_entries.len()).max(ndim)
    } else {
        ndim
    };
    for entries in [&mut entries, &mut dst_entries] {
        entries.resize(entries.len().max(length), SpecEntry::None);
    }
    if entries.len() != dst_entries.len() {
        return Err(WhyNoIntermediate::RankMismatch);
    }

    let parts = parts_by_dim(mesh, &entries).ok_or(WhyNoIntermediate::NoSplitCandidate)?;
    let dst_parts =
        parts_by_dim(dst_mesh, &dst_entries).ok_or(WhyNoIntermediate::NoSplitCandidate)?;
    let largest = |parts: &[usize]| parts.iter().copied().max().unwrap_or(1);
    if !largest(&parts).is_multiple_of(largest(&dst_parts)) {
        return Err(WhyNoIntermediate::Undividable);
    }
    // Neither product exceeds the number of devices of its mesh.
    let total = parts.iter().product::<usize>();
    let dst_total = dst_parts.iter().product::<usize>();
    if total <= dst_total {
        return Err(WhyNoIntermediate::SourceNotLarger);
    }
    if !total.is_multiple_of(dst_total) {
        return Err(WhyNoIntermediate::TotalNotDivisible);
    }

    let pairs = || parts.iter().copied().zip(dst_parts.iter().copied());
    if pairs().any(|(src, dst)| gcd(src, dst) != 1) {
        return Err(WhyNoIntermediate::NotNeeded);
    }
    let cuts: Vec<AxisCut> = entries
        .iter()
        .zip(pairs())
        .filter_map(|(entry, (src, dst))| match entry {
            SpecEntry::Axis(axis) if src > dst => Some(AxisCut {
                axis: axis.clone(),
                parts: src,
                split: dst,
            }),
            _ => None,
        })
        .collect();

    Ok(AxisCuts {
        src,
        mesh,
        entries,
        cuts,
        parts: total,
        dst_parts: dst_total,
    })
}

/// A request to cut an axis into a replica axis and a split axis.
#[derive(Clone)]
struct AxisCut {
    axis: String,
    /// Size of the axis that is cut.
    parts: usize,
    /// The size of the split axis.
    split: usize,
}

/// Returns the sharding that results from cutting each axis of `cuts` into a replica axis and a
/// split axis. Returns `None` if no axis is cut or a cut is impossible.
fn cut_axes(
    src: &Sharding,
    mesh: &Mesh,
    entries: &[SpecEntry],
    cuts: &[AxisCut],
) -> Option<Intermediate> {
    let cut = |axis: &String| cuts.iter().find(|cut| cut.axis == *axis);
    let mut replicas = Vec::new();
    let mut kept = Vec::new();
    for (axis, size) in mesh.axis_names().iter().zip(mesh.shape()) {
        match cut(axis) {
            Some(AxisCut { parts, split, .. }) => {
                if *split == 0 || !parts.is_multiple_of(*split) {
                    return None;
                }
                replicas.push((format!("{axis}{REPLICA}"), parts / split));
                kept.push((format!("{axis}{SPLIT}"), *split));
            }
            None => kept.push((axis.clone(), *size)),
        }
    }

    if replicas.is_empty() {
        return None;
    }
    let replica_axes = replicas.iter().map(|(axis, _)| axis.clone()).collect();
    let axes: Vec<(&str, usize)> = replicas
        .iter()
        .chain(&kept)
        .map(|(axis, size)| (axis.as_str(), *size))
        .collect();

    // The cut axes come before the kept ones, and entries name the part that stays divided.
    let mesh = Mesh::new(&axes, mesh.devices().to_vec()).ok()?;
    let entry = |entry: &SpecEntry| match entry {
        SpecEntry::Axis(axis) if cut(axis).is_some() => SpecEntry::Axis(format!("{axis}{SPLIT}")),
        other => other.clone(),
    };
    let spec = Spec::new(entries.iter().map(entry).collect());
    Some(Intermediate {
        sharding: Sharding::named(mesh, spec, src.memory_kind()),
        replica_axes,
    })
}

/// Returns the number of parts of each dimension. Returns `None` if the mesh lacks an axis, or if
/// the entries use an axis twice.
fn parts_by_dim(mesh: &Mesh, entries: &[SpecEntry]) -> Option<Vec<usize>> {
    let axes: Vec<&String> = entries.iter().flat_map(SpecEntry::axes).collect();
    if axes
        .iter()
        .enumerate()
        .any(|(i, axis)| axes[..i].contains(axis))
    {
        return None;
    }

    let size = |axis: &String| mesh.axis_index(axis).map(|index| mesh.shape()[index]);
    entries
        .iter()
        .map(|entry| entry.axes().iter().map(size).product())
        .collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::MemoryKind;
    use crate::spec;
    use crate::topology::DeviceId;

    fn on(axes: &[(&str, usize)], first: u32, spec: Spec) -> Sharding {
        let count: u32 = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, (first..first + count).map(DeviceId).collect())
            .unwrap()
            .sharding(spec)
    }

    /// Finds the intermediate of two shardings on devices 0.. and 100.. and returns mesh, spec and
    /// replica axes as one text. The error is the reason that there is none.
    fn found(
        src: (&[(&str, usize)], Spec),
        dst: (&[(&str, usize)], Spec),
    ) -> Result<String, &'static str> {
        let (src, dst) = (on(src.0, 0, src.1), on(dst.0, 100, dst.1));
        let found = find_intermediate_sharding(&src, &dst).map_err(|none| none.why.reason())?;
        let (mesh, spec) = (
            found.sharding.mesh().unwrap(),
            found.sharding.spec().unwrap(),
        );
        assert_eq!(
            mesh.devices(),
            src.devices(),
            "the devices keep their order"
        );
        let mesh = mesh.to_string();
        let axes = mesh.split(" devices").next().unwrap_or_default();
        let text = format!("{axes} {spec} [{}]", found.replica_axes.join(", "));
        Ok(text
            .replace("_intermediate_replica", "R")
            .replace("_intermediate_split", "S"))
    }

    #[test]
    fn vectors_with_an_intermediate() {
        let table = [
            (
                found(
                    (&[("fsdp", 8), ("tp", 1)], spec!["fsdp", "tp"]),
                    (&[("fsdp", 1), ("tp", 4)], spec!["fsdp", "tp"]),
                ),
                "{fsdpR:8, fsdpS:1, tp:1} P(fsdpS, tp) [fsdpR]",
            ),
            (
                found(
                    (&[("x", 8)], spec!["x", None]),
                    (&[("y", 4)], spec![None, "y"]),
                ),
                "{xR:8, xS:1} P(xS, None) [xR]",
            ),
            (
                found((&[("x", 8)], spec!["x", None]), (&[("y", 4)], spec![])),
                "{xR:8, xS:1} P(xS, None) [xR]",
            ),
            (
                found(
                    (&[("a", 2), ("b", 4)], spec!["a", "b"]),
                    (&[("y", 1)], spec![None, None]),
                ),
                "{aR:2, bR:4, aS:1, bS:1} P(aS, bS) [aR, bR]",
            ),
            (
                found(
                    (&[("a", 2), ("b", 4)], spec![None, "b"]),
                    (&[("y", 2)], spec!["y", None]),
                ),
                "{bR:4, a:2, bS:1} P(None, bS) [bR]",
            ),
            (
                found(
                    (&[("b", 4), ("a", 2)], spec!["b", None]),
                    (&[("y", 2)], spec![None, "y"]),
                ),
                "{bR:4, bS:1, a:2} P(bS, None) [bR]",
            ),
            (
                found(
                    (&[("a", 2), ("b", 2), ("c", 2)], spec!["a", "b", None]),
                    (&[("z", 2)], spec![None, None, "z"]),
                ),
                "{aR:2, bR:2, aS:1, bS:1, c:2} P(aS, bS, None) [aR, bR]",
            ),
            (
                found(
                    (&[("a", 2), ("b", 2), ("c", 2)], spec!["a", ("b", "c")]),
                    (&[("z", 2)], spec![None, None]),
                ),
                "{aR:2, aS:1, b:2, c:2} P(aS, (b, c)) [aR]",
            ),
            (
                found(
                    (&[("b", 2), ("c", 2), ("a", 2)], spec!["a", ("b", "c")]),
                    (&[("z", 2)], spec![None, None]),
                ),
                "{aR:2, b:2, c:2, aS:1} P(aS, (b, c)) [aR]",
            ),
            (
                found(
                    (&[("a", 2), ("b", 6)], spec!["a", "b"]),
                    (&[("z", 3)], spec!["z", None]),
                ),
                "{bR:6, a:2, bS:1} P(a, bS) [bR]",
            ),
        ];
        for (found, expected) in table {
            assert_eq!(found.as_deref(), Ok(expected));
        }
    }

    #[test]
    fn vectors_without_an_intermediate() {
        let table = [
            (
                found((&[("x", 8)], spec!["x"]), (&[("x", 4)], spec!["x"])),
                "not_needed",
            ),
            (
                found(
                    (&[("x", 8)], spec!["x", None]),
                    (&[("y", 8)], spec![None, "y"]),
                ),
                "source_not_larger",
            ),
            (
                found((&[("x", 8)], spec!["x"]), (&[("y", 3)], spec!["y"])),
                "undividable",
            ),
            (
                found((&[("x", 4)], spec![]), (&[("y", 4)], spec!["y"])),
                "undividable",
            ),
            (
                found((&[("x", 4)], spec![]), (&[("y", 4)], spec![])),
                "source_not_larger",
            ),
            (
                found((&[("x", 8)], spec!["x"]), (&[("y", 4)], spec!["y", None])),
                "rank_mismatch",
            ),
            (
                found(
                    (&[("a", 2), ("b", 4)], spec![("a", "b"), None]),
                    (&[("y", 4)], spec![None, "y"]),
                ),
                "no_split_candidate",
            ),
            (
                found(
                    (&[("a", 2), ("b", 4)], spec!["a", "b"]),
                    (&[("y", 2)], spec!["y", None]),
                ),
                "not_needed",
            ),
            (
                found(
                    (&[("a", 2), ("b", 2), ("c", 2)], spec!["a", "b", "c"]),
                    (&[("z", 2)], spec![None, None, "z"]),
                ),
                "not_needed",
            ),
            (
                found(
                    (&[("a", 4), ("b", 3)], spec!["a", "b"]),
                    (&[("z", 3)], spec!["z", None]),
                ),
                "undividable",
            ),
            (
                found(
                    (&[("a", 6)], spec!["a", None]),
                    (&[("z", 2), ("w", 2)], spec!["z", "w"]),
                ),
                "total_not_divisible",
            ),
        ];
        for (found, expected) in table {
            assert_eq!(found, Err(expected));
        }
    }

    #[test]
    fn no_intermediate_where_original_fails_by_accident() {
        // 12 devices do not fill (1, 4, 2, 1), nor 24 (1, 6, 3, 1).
        let none_of = |src: (&[(&str, usize)], Spec), dst: (&[(&str, usize)], Spec)| {
            found(src, dst).unwrap_err()
        };
        assert_eq!(
            none_of(
                (&[("a", 3), ("b", 4)], spec!["a", "b"]),
                (&[("y", 2)], spec!["y", None])
            ),
            "no_split_candidate"
        );
        assert_eq!(
            none_of(
                (&[("a", 4), ("b", 6)], spec!["a", "b", None]),
                (&[("z", 3), ("w", 2)], spec!["z", None, "w"])
            ),
            "no_split_candidate"
        );
        // Specs that do not fit their mesh, and axis names that are taken.
        assert_eq!(
            none_of((&[("x", 8)], spec!["q"]), (&[("y", 4)], spec![None])),
            "no_split_candidate"
        );
        assert_eq!(
            none_of(
                (&[("x", 8)], spec!["x", "x"]),
                (&[("y", 4)], spec![None, None])
            ),
            "no_split_candidate"
        );
        let taken = [("x", 4), ("x_intermediate_split", 2)];
        assert_eq!(
            none_of((&taken, spec!["x"]), (&[("y", 1)], spec![None])),
            "no_split_candidate"
        );
    }

    #[test]
    fn only_named_shardings_have_one_in_source_memory_kind() {
        let (rows, single) = (
            on(&[("x", 8)], 0, spec!["x"]),
            Sharding::single_device(DeviceId(9)),
        );
        let sums = on(&[("x", 8), ("y", 2)], 0, spec!["x"])
            .unreduced(&["y"])
            .unwrap();
        let target = on(&[("y", 2)], 100, spec![]);
        for (src, dst) in [(&rows, &single), (&single, &rows), (&sums, &target)] {
            let none = find_intermediate_sharding(src, dst).unwrap_err();
            assert_eq!(none.why, WhyNoIntermediate::NotNamed);
            let text = none.to_string();
            assert!(text.ends_with(&format!(": from {src} to {dst}")), "{text}");
        }
        let mesh = rows.mesh().unwrap().clone();
        let host = Sharding::named(mesh, spec!["x"], MemoryKind::Host);
        let found = find_intermediate_sharding(&host, &target).unwrap();
        assert_eq!(found.sharding.memory_kind(), MemoryKind::Host);
        let back = Sharding::named(target.mesh().unwrap().clone(), spec![], MemoryKind::Host);
        let found = find_intermediate_sharding(&rows, &back).unwrap();
        assert_eq!(found.sharding.memory_kind(), MemoryKind::Device);
    }

    #[test]
    fn step_to_intermediate_moves_data() {
        let region = |sharding: &Sharding, shape: &[usize], device: u32| {
            sharding
                .layout(shape)
                .unwrap()
                .region_of(DeviceId(device))
                .unwrap()
                .to_string()
        };
        let src = on(&[("b", 2), ("c", 2), ("a", 2)], 0, spec!["a", ("b", "c")]);
        let dst = on(&[("z", 2)], 100, spec![None, None]);
        let between = find_intermediate_sharding(&src, &dst).unwrap().sharding;
        assert_eq!(region(&src, &[2, 8], 1), "[1..2, 0..2]");
        assert_eq!(region(&between, &[2, 8], 1), "[0..2, 2..4]");
        for device in 0..8u32 {
            let columns = format!("[0..2, {}..{}]", device % 4 * 2, device % 4 * 2 + 2);
            assert_eq!(region(&between, &[2, 8], device), columns);
        }

        let src = on(&[("a", 2), ("b", 6)], 0, spec!["a", "b"]);
        let dst = on(&[("z", 3)], 100, spec!["z", None]);
        let between = find_intermediate_sharding(&src, &dst).unwrap().sharding;
        for device in 0..12u32 {
            let (row, column) = (device / 6 * 3, device % 6);
            let held = format!("[{row}..{}, {column}..{}]", row + 3, column + 1);
            assert_eq!(region(&src, &[6, 6], device), held);
            let row = device % 2 * 3;
            assert_eq!(
                region(&between, &[6, 6], device),
                format!("[{row}..{}, 0..6]", row + 3)
            );
        }
    }
}
