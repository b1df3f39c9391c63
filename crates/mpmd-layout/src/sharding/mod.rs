//! Shardings assign regions of an array to devices.
//!
//! A [`Sharding`] applies to arrays of any shape. Applied to one shape it becomes a [`Layout`]. All
//! later steps see layouts only.

mod chunk;
mod dimension_rule;
mod enumerated;
mod error;
mod intern;
mod kind;
mod layout;
mod named;
pub mod rules;
mod spec;

use std::collections::HashSet;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

pub use chunk::{ChunkRanks, chunk_by_rank};
pub use dimension_rule::{
    BoundRule, ComputedShardings, DeviceParts, DimensionLinks, DimensionMisfit, DimensionRule,
    DimensionRuleError, Linearity, OperandDimension, RuleArray, RulePlace, ShardingConflict,
};
pub use error::ShardingError;
pub use kind::MemoryKind;
use kind::ShardingKind;
pub use layout::Layout;
pub use spec::{Spec, SpecEntry};

use crate::region::Region;
use crate::topology::{DeviceId, Mesh, Topology};
use crate::tree::Leaf;
use intern::{InternedSharding, intern};

/// Maximum number of layouts that a sharding caches, one for each shape. A further shape clears the
/// cache.
const CACHED_LAYOUTS: usize = 1024;

/// An assignment of an array's regions to devices. Applies to arrays of every shape that it can
/// divide.
///
/// Equal shardings of one process are one object, so cloning and comparing are pointer operations.
#[derive(Clone)]
pub struct Sharding {
    inner: Arc<InternedSharding>,
}

impl Mesh {
    /// Returns the sharding of arrays over this mesh as `spec` says, in device memory.
    ///
    /// Does not check that mesh and spec fit together: [`Sharding::layout`] does.
    pub fn sharding(&self, spec: Spec) -> Sharding {
        Sharding::named(self.clone(), spec, MemoryKind::Device)
    }

    /// Returns the sharding that puts the whole array on every device of the mesh, in device
    /// memory.
    pub fn replicated(&self) -> Sharding {
        self.sharding(Spec::default())
    }
}

impl From<&Self> for Sharding {
    fn from(sharding: &Self) -> Self {
        sharding.clone()
    }
}

impl Sharding {
    /// Creates the sharding that divides dimensions over the axes of `mesh` as `spec` says.
    /// `memory_kind` is the memory that holds the shards.
    ///
    /// Does not check that mesh and spec fit together: [`layout`](Self::layout) does.
    pub fn named(mesh: Mesh, spec: Spec, memory_kind: MemoryKind) -> Self {
        Self::of_kind(ShardingKind::Named {
            mesh,
            spec,
            unreduced: Vec::new(),
            memory_kind,
        })
    }

    /// Creates the sharding that puts the whole array on one device, in the device's own memory.
    pub fn single_device(device: DeviceId) -> Self {
        Self::of_kind(ShardingKind::SingleDevice {
            device,
            memory_kind: MemoryKind::Device,
        })
    }

    /// Creates the sharding that divides dimension `dim` into one chunk for each placement. Device
    /// `placements[i]` holds chunk `i` in its own memory. A negative `dim` counts from the end.
    ///
    /// With `n` indices and `k` placements each chunk has `ceil(n / k)` indices. The trailing
    /// chunks may be shorter or empty. [`layout`](Self::layout) checks that the array has the
    /// dimension.
    ///
    /// # Errors
    ///
    /// If there are no placements, or a device is listed twice.
    pub fn chunk(dim: isize, placements: Vec<DeviceId>) -> Result<Self, ShardingError> {
        chunk::check(dim, &placements)?;
        let memory_kind = MemoryKind::Device;
        Ok(Self::of_kind(ShardingKind::Chunk {
            dim,
            placements,
            memory_kind,
        }))
    }

    /// Creates the sharding with these (device, region) shards, in the devices' own memory. The
    /// regions must be disjoint and together fill an array. Empty regions are allowed.
    /// [`layout`](Self::layout) checks that they fill an array of its shape.
    ///
    /// # Errors
    ///
    /// If there are no shards, they have different numbers of dimensions, a device is listed twice,
    /// or two shards overlap. The error names the shards.
    pub fn enumerated(shards: Vec<(DeviceId, Region)>) -> Result<Self, ShardingError> {
        enumerated::check(&shards)?;
        let memory_kind = MemoryKind::Device;
        Ok(Self::of_kind(ShardingKind::Enumerated {
            shards,
            memory_kind,
        }))
    }

    /// Returns the sharding of an array of `shape` in which each region is on one device only. That
    /// is the first of [`devices`](Self::devices) that holds the region in this sharding.
    ///
    /// # Errors
    ///
    /// The errors of [`Sharding::layout`].
    pub fn first_holders(&self, shape: &[usize]) -> Result<Self, ShardingError> {
        let layout = self.layout(shape)?;
        let mut seen = HashSet::new();
        let shards = layout
            .iter()
            .filter(|(_, region)| seen.insert((*region).clone()));
        Self::enumerated(
            shards
                .map(|(device, region)| (device, region.clone()))
                .collect(),
        )
    }

    /// Returns the sharding with the same regions, held in the memory `memory_kind`.
    #[must_use]
    pub fn with_memory_kind(&self, memory_kind: MemoryKind) -> Self {
        Self::of_kind(self.inner.kind.with_memory_kind(memory_kind))
    }

    /// Returns the sharding with the same regions, whose shards are partial sums. The values of the
    /// array are the sums over these axes of the mesh. The axes replace any earlier
    /// [`unreduced_axes`](Self::unreduced_axes); their order does not matter. A `device_put` to a
    /// sharding without unreduced axes adds the sums up.
    ///
    /// # Errors
    ///
    /// If an axis is given for a sharding without a mesh, or the mesh lacks the axis. Also if the
    /// spec divides a dimension over the axis, or the axis is given twice.
    pub fn unreduced(&self, axes: &[&str]) -> Result<Self, ShardingError> {
        match &self.inner.kind {
            ShardingKind::Named {
                mesh,
                spec,
                memory_kind,
                ..
            } => {
                let unreduced = named::unreduced(mesh, spec, axes)?;
                let mesh = mesh.clone();
                let spec = spec.clone();
                let memory_kind = *memory_kind;

                Ok(Self::of_kind(ShardingKind::Named {
                    mesh,
                    spec,
                    unreduced,
                    memory_kind,
                }))
            }
            kind => match axes.first() {
                None => Ok(self.clone()),
                Some(axis) => Err(ShardingError::UnreducedWithoutMesh {
                    axis: (*axis).to_owned(),
                    sharding: kind.to_string(),
                }),
            },
        }
    }

    /// Returns the sharding with the same regions and no unreduced axes. It describes the array
    /// after its partial sums are added up.
    #[must_use]
    pub fn reduced(&self) -> Self {
        match &self.inner.kind {
            ShardingKind::Named {
                mesh,
                spec,
                unreduced,
                memory_kind,
            } if !unreduced.is_empty() => Self::named(mesh.clone(), spec.clone(), *memory_kind),
            _ => self.clone(),
        }
    }

    /// Returns a number that is the same for equal shardings, on every process and in every run.
    pub fn fingerprint(&self) -> u64 {
        self.inner.fingerprint
    }

    /// Returns the devices in device-assignment order: a mesh's row-major order, the order of the
    /// chunks, or the order of the list.
    pub fn devices(&self) -> &[DeviceId] {
        match &self.inner.kind {
            ShardingKind::Named { mesh, .. } => mesh.devices(),
            ShardingKind::Chunk { placements, .. } => placements,
            ShardingKind::Enumerated { .. } => &self.inner.listed,
            ShardingKind::SingleDevice { device, .. } => std::slice::from_ref(device),
        }
    }

    /// Returns the mesh of a named sharding, or `None` for the other kinds.
    pub fn mesh(&self) -> Option<&Mesh> {
        match &self.inner.kind {
            ShardingKind::Named { mesh, .. } => Some(mesh),
            _ => None,
        }
    }

    /// Returns the spec of a named sharding, or `None` for the other kinds.
    pub fn spec(&self) -> Option<&Spec> {
        match &self.inner.kind {
            ShardingKind::Named { spec, .. } => Some(spec),
            _ => None,
        }
    }

    /// Returns the axes over which the shards are partial sums, in the order of the mesh. Empty if
    /// the shards hold the array's values. Axes of size 1 are included, so that a program's
    /// correctness does not depend on the size of its mesh.
    pub fn unreduced_axes(&self) -> &[String] {
        match &self.inner.kind {
            ShardingKind::Named { unreduced, .. } => unreduced,
            _ => &[],
        }
    }

    /// Returns the memory that holds the shards: each device's own, or its host's.
    pub fn memory_kind(&self) -> MemoryKind {
        self.inner.kind.memory_kind()
    }

    /// Returns the layout of an array of `shape`. The sharding caches layouts by shape.
    ///
    /// # Errors
    ///
    /// - Named: an axis is not in the mesh or is used twice, the spec is longer than the shape, or
    ///   a dimension does not divide evenly.
    /// - Chunks: the array lacks the divided dimension.
    /// - Enumerated: the shards do not fill an array of `shape`.
    pub fn layout(&self, shape: &[usize]) -> Result<Arc<Layout>, ShardingError> {
        if let Some(layout) = self.inner.layouts.lock().get(shape) {
            return Ok(layout.clone());
        }

        let layout = Arc::new(match &self.inner.kind {
            ShardingKind::Named {
                mesh,
                spec,
                unreduced,
                ..
            } => named::layout(mesh, spec, shape)?.with_terms(named::terms(mesh, unreduced)),
            ShardingKind::Chunk {
                dim, placements, ..
            } => chunk::layout(*dim, placements, shape)?,
            ShardingKind::Enumerated { shards, .. } => enumerated::layout(shards, shape)?,
            ShardingKind::SingleDevice { device, .. } => {
                Layout::new(shape, vec![*device], vec![Region::full(shape)], true)
            }
        });

        let mut layouts = self.inner.layouts.lock();
        if layouts.len() >= CACHED_LAYOUTS {
            layouts.clear();
        }
        Ok(layouts.entry(shape.into()).or_insert(layout).clone())
    }

    /// Checks that the job has all devices of the sharding.
    ///
    /// # Errors
    ///
    /// [`ShardingError::UnknownDevice`] with the first device that the job does not have.
    pub fn check_devices(&self, topology: &Topology) -> Result<(), ShardingError> {
        match self
            .devices()
            .iter()
            .find(|device| topology.device(**device).is_none())
        {
            None => Ok(()),
            Some(device) => Err(ShardingError::UnknownDevice {
                device: *device,
                devices: topology.devices().len(),
            }),
        }
    }

    fn of_kind(kind: ShardingKind) -> Self {
        Self {
            inner: intern(kind),
        }
    }
}

impl PartialEq for Sharding {
    fn eq(&self, other: &Self) -> bool {
        // Interned, so different values are different objects.
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Sharding {}

impl Hash for Sharding {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.inner.fingerprint);
    }
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.inner.kind, f)
    }
}

impl fmt::Debug for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sharding({self})")
    }
}

impl Leaf for Sharding {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;

    fn mesh(axes: &[(&str, usize)]) -> Mesh {
        let count = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, (0..count).map(DeviceId).collect()).unwrap()
    }

    fn listed(shards: &[(u32, std::ops::Range<usize>)]) -> Sharding {
        let shard = |(device, range): &(u32, std::ops::Range<usize>)| {
            (DeviceId(*device), Region::new(vec![range.clone()]))
        };
        Sharding::enumerated(shards.iter().map(shard).collect()).unwrap()
    }

    #[test]
    fn equal_shardings_are_one_object() {
        let a = mesh(&[("x", 2)]).sharding(spec!["x"]);
        let b = mesh(&[("x", 2)]).sharding(spec![("x",)]);
        assert!(a == b && Arc::ptr_eq(&a.inner, &b.inner) && a.fingerprint() == b.fingerprint());
        let others = [
            mesh(&[("x", 2)]).replicated(),
            mesh(&[("x", 2)]).sharding(spec![None, "x"]),
            mesh(&[("y", 2)]).sharding(spec!["y"]),
            Sharding::named(mesh(&[("x", 2)]), spec!["x"], MemoryKind::Host),
            mesh(&[("x", 2)]).replicated().unreduced(&["x"]).unwrap(),
            Sharding::single_device(DeviceId(0)),
            Sharding::single_device(DeviceId(0)).with_memory_kind(MemoryKind::Host),
            Sharding::chunk(0, vec![DeviceId(0), DeviceId(1)]).unwrap(),
            listed(&[(0, 0..2), (1, 2..4)]),
        ];
        for other in others {
            assert!(
                a != other && a.fingerprint() != other.fingerprint(),
                "{other}"
            );
        }
    }

    #[test]
    fn layouts_are_remembered() {
        let sharding = mesh(&[("x", 2)]).sharding(spec!["x"]);
        let first = sharding.layout(&[4, 3]).unwrap();
        assert!(Arc::ptr_eq(&first, &sharding.layout(&[4, 3]).unwrap()));
        (0..2 * CACHED_LAYOUTS).for_each(|i| drop(sharding.layout(&[2 * i])));
        assert!(sharding.inner.layouts.lock().len() <= CACHED_LAYOUTS);
        assert_eq!(first, sharding.layout(&[4, 3]).unwrap());
    }

    #[test]
    fn a_single_device_holds_everything() {
        let layout = Sharding::single_device(DeviceId(3)).layout(&[]).unwrap();
        assert_eq!(layout.region_of(DeviceId(3)), Some(&Region::full(&[])));
        assert!(layout.fully_replicated());
    }

    #[test]
    fn display_says_spec_mesh_and_devices() {
        let mesh = mesh(&[("data", 4)]);
        let sharding = mesh.sharding(spec!["data"]);
        assert_eq!(
            sharding.to_string(),
            "P(data) on {data:4} devices [0, 1, 2, 3]"
        );
        assert_eq!(Sharding::single_device(DeviceId(3)).to_string(), "device 3");
        let host = Sharding::named(mesh.clone(), spec![], MemoryKind::Host);
        assert_eq!(
            host.to_string(),
            "P() on {data:4} devices [0, 1, 2, 3] in host memory"
        );
        assert_eq!(
            mesh.replicated().unreduced(&["data"]).unwrap().to_string(),
            "P() unreduced over {data} on {data:4} devices [0, 1, 2, 3]"
        );
        let chunks = Sharding::chunk(-1, vec![DeviceId(2), DeviceId(0)]).unwrap();
        assert_eq!(
            chunks.to_string(),
            "chunks of dimension -1 on devices [2, 0]"
        );
        let two = listed(&[(2, 0..3), (0, 3..4)]).with_memory_kind(MemoryKind::Host);
        assert_eq!(
            two.to_string(),
            "shards {2: [0..3], 0: [3..4]} in host memory"
        );
        let many = listed(
            &(0..20)
                .map(|i| (i, i as usize..i as usize + 1))
                .collect::<Vec<_>>(),
        );
        assert!(
            many.to_string().ends_with("7: [7..8], and 12 more}"),
            "{many}"
        );
    }

    #[test]
    fn every_kind_is_in_either_memory() {
        let kinds = [
            mesh(&[("x", 2)]).sharding(spec!["x"]),
            mesh(&[("x", 2)]).replicated().unreduced(&["x"]).unwrap(),
            Sharding::chunk(0, vec![DeviceId(1), DeviceId(0)]).unwrap(),
            listed(&[(1, 0..4), (0, 4..4)]),
            Sharding::single_device(DeviceId(3)),
        ];
        for kind in kinds {
            let host = kind.with_memory_kind(MemoryKind::Host);
            assert_eq!(
                (kind.memory_kind(), host.memory_kind()),
                (MemoryKind::Device, MemoryKind::Host)
            );
            assert!(
                host != kind && host.fingerprint() != kind.fingerprint(),
                "{kind}"
            );
            assert_eq!(host.layout(&[4]), kind.layout(&[4]));
            assert_eq!(host.with_memory_kind(MemoryKind::Device), kind);
            assert_eq!(
                (host.devices(), host.unreduced_axes()),
                (kind.devices(), kind.unreduced_axes())
            );
            assert_eq!(host.reduced().memory_kind(), MemoryKind::Host);
        }
    }

    #[test]
    fn unreduced_axes_are_in_mesh_order() {
        let rows = mesh(&[("a", 2), ("b", 2), ("c", 1)]).sharding(spec!["a"]);
        let sums = rows.unreduced(&["c", "b"]).unwrap();
        assert_eq!(sums.unreduced_axes(), ["b", "c"]);
        assert_eq!(sums, rows.unreduced(&["b", "c"]).unwrap());
        assert_ne!(sums, rows.unreduced(&["b"]).unwrap());
        assert_eq!(sums.unreduced(&["b"]), rows.unreduced(&["b"]));
        assert_eq!(
            (sums.reduced(), sums.unreduced(&[]).unwrap()),
            (rows.clone(), rows.clone())
        );
        assert_eq!(rows.unreduced_axes(), [""; 0]);
        let error = |axes: &[&str]| rows.unreduced(axes).unwrap_err().to_string();
        let found = error(&["z"]);
        assert_eq!(
            found,
            "axis `z` cannot be unreduced: the mesh is {a:2, b:2, c:1} devices [0, 1, 2, 3]"
        );
        assert_eq!(error(&["b", "b"]), "axis `b` is unreduced twice");
        assert_eq!(
            error(&["a"]),
            "axis `a` cannot be unreduced: P(a) divides dimension 0 over it"
        );
        let single = Sharding::single_device(DeviceId(3));
        assert_eq!(
            single.unreduced(&["x"]).unwrap_err().to_string(),
            "axis `x` cannot be unreduced: device 3 has no mesh"
        );
        assert_eq!(
            (single.unreduced(&[]), single.reduced()),
            (Ok(single.clone()), single)
        );
    }

    #[test]
    fn devices_are_looked_up_in_the_job() {
        let sharding = mesh(&[("x", 4)]).replicated();
        assert_eq!(sharding.check_devices(&Topology::even(2, 2)), Ok(()));
        assert_eq!(
            sharding.check_devices(&Topology::even(3, 1)),
            Err(ShardingError::UnknownDevice {
                device: DeviceId(3),
                devices: 3
            })
        );
    }
}
