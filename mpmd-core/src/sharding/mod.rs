//! Shardings: where each region of an array lives.
//!
//! A [`Sharding`] says it for arrays of any shape; applied to one it becomes a [`Layout`], and
//! everything downstream sees layouts only.

mod layout;
mod named;
pub mod rules;
mod spec;

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

pub use layout::Layout;
pub use spec::{Spec, SpecEntry};

use crate::fingerprint::Fingerprint;
use crate::region::Region;
use crate::topology::mesh::DeviceList;
use crate::topology::{DeviceId, Mesh, Topology};
use crate::tree::Leaf;

/// Shapes a sharding remembers the layouts of. A program has few; one that makes up shapes without
/// end starts over.
const CACHED_LAYOUTS: usize = 1024;

/// The interner looks for dead entries only above this many.
const SWEEP_ABOVE: usize = 256;

/// Where each region of an array lives, for arrays of any shape it can divide.
///
/// Equal shardings of one process are one object, so cloning and comparing them costs a pointer.
#[derive(Clone)]
pub struct Sharding {
    inner: Arc<Inner>,
}

/// What a [`Sharding`] is.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum ShardingKind {
    /// Dimensions divided over the axes of a mesh.
    Named {
        /// The mesh.
        mesh: Mesh,
        /// Which dimension is divided over which axes.
        spec: Spec,
        /// Which memory of the devices.
        memory_kind: MemoryKind,
    },
    /// The whole array on one device.
    SingleDevice(DeviceId),
}

/// Which memory that belongs to a device.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Where its kernels compute.
    #[default]
    Device,
    /// The memory of its host.
    Host,
}

/// Why a sharding does not apply to a shape. Always the caller's fault, and the same on every process.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
    /// The spec names an axis that the mesh does not have.
    #[error("{spec}: dimension {dim} is divided over axis `{axis}`, but the mesh is {mesh}")]
    UnknownAxis {
        /// The dimension.
        dim: usize,
        /// The name.
        axis: String,
        /// The spec.
        spec: Spec,
        /// The mesh.
        mesh: Mesh,
    },
    /// The spec uses an axis more than once.
    #[error("{spec}: axis `{axis}` divides dimension {first} and again dimension {second}")]
    AxisUsedTwice {
        /// The axis.
        axis: String,
        /// The dimension that uses it first.
        first: usize,
        /// The dimension that uses it again; may be the same.
        second: usize,
        /// The spec.
        spec: Spec,
    },
    /// The spec has more entries than the array has dimensions.
    #[error("{spec} has {} entries, but shape {shape:?} has {} dimensions", spec.entries().len(), shape.len())]
    SpecTooLong {
        /// The spec.
        spec: Spec,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// A dimension cannot be divided evenly.
    #[error("{spec}: dimension {dim} of shape {shape:?} has size {}, which {axes} divides into {parts} parts", shape[*dim])]
    NotDivisible {
        /// The dimension.
        dim: usize,
        /// The axes that divide it, with their sizes.
        axes: String,
        /// The number of parts they make.
        parts: usize,
        /// The array's shape.
        shape: Vec<usize>,
        /// The spec.
        spec: Spec,
    },
    /// The job has no such device.
    #[error("there is no device {device} in a job of {devices} devices")]
    UnknownDevice {
        /// The device.
        device: DeviceId,
        /// How many devices there are.
        devices: usize,
    },
}

struct Inner {
    kind: ShardingKind,
    fingerprint: u64,
    layouts: Mutex<HashMap<Box<[usize]>, Arc<Layout>>>,
}

impl Sharding {
    /// Dimensions divided over the axes of `mesh` as `spec` says.
    ///
    /// Whether the two agree shows when the sharding is applied to a shape: [`layout`](Self::layout).
    pub fn named(mesh: Mesh, spec: Spec, memory_kind: MemoryKind) -> Self {
        Self::intern(ShardingKind::Named { mesh, spec, memory_kind })
    }

    /// The whole array on one device.
    pub fn single_device(device: DeviceId) -> Self {
        Self::intern(ShardingKind::SingleDevice(device))
    }

    /// What it is.
    pub fn kind(&self) -> &ShardingKind {
        &self.inner.kind
    }

    /// A number that is the same for equal shardings, on every process and in every run.
    pub fn fingerprint(&self) -> u64 {
        self.inner.fingerprint
    }

    /// The devices in device-assignment order: a mesh's row-major order.
    pub fn devices(&self) -> &[DeviceId] {
        match &self.inner.kind {
            ShardingKind::Named { mesh, .. } => mesh.devices(),
            ShardingKind::SingleDevice(device) => std::slice::from_ref(device),
        }
    }

    /// The mesh, where it has one.
    pub fn mesh(&self) -> Option<&Mesh> {
        match &self.inner.kind {
            ShardingKind::Named { mesh, .. } => Some(mesh),
            ShardingKind::SingleDevice(_) => None,
        }
    }

    /// The spec, where it has one.
    pub fn spec(&self) -> Option<&Spec> {
        match &self.inner.kind {
            ShardingKind::Named { spec, .. } => Some(spec),
            ShardingKind::SingleDevice(_) => None,
        }
    }

    /// Which memory of its devices.
    pub fn memory_kind(&self) -> MemoryKind {
        match &self.inner.kind {
            ShardingKind::Named { memory_kind, .. } => *memory_kind,
            ShardingKind::SingleDevice(_) => MemoryKind::Device,
        }
    }

    /// Where each region of an array of `shape` lives. Remembered by shape.
    ///
    /// # Errors
    ///
    /// Fails where the spec names an axis that the mesh does not have or names one twice, has more
    /// entries than `shape` has dimensions, or does not divide a dimension evenly.
    pub fn layout(&self, shape: &[usize]) -> Result<Arc<Layout>, ShardingError> {
        if let Some(layout) = self.inner.layouts.lock().get(shape) {
            return Ok(layout.clone());
        }
        let layout = Arc::new(match &self.inner.kind {
            ShardingKind::Named { mesh, spec, .. } => named::layout(mesh, spec, shape)?,
            ShardingKind::SingleDevice(device) => {
                Layout::new(shape, vec![*device], vec![Region::full(shape)], true)
            }
        });
        let mut layouts = self.inner.layouts.lock();
        if layouts.len() >= CACHED_LAYOUTS {
            layouts.clear();
        }
        Ok(layouts.entry(shape.into()).or_insert(layout).clone())
    }

    /// Checks that the job has all its devices.
    ///
    /// # Errors
    ///
    /// Fails with the first that it does not have.
    pub fn check_devices(&self, topology: &Topology) -> Result<(), ShardingError> {
        match self.devices().iter().find(|device| topology.device(**device).is_none()) {
            None => Ok(()),
            Some(device) => {
                Err(ShardingError::UnknownDevice { device: *device, devices: topology.devices().len() })
            }
        }
    }

    fn intern(kind: ShardingKind) -> Self {
        let fingerprint = kind.fingerprint();
        let mut interner = INTERNER.lock();
        let bucket = interner.by_fingerprint.entry(fingerprint).or_default();
        // Upgraded first and compared after: dropping a last holder in here is harmless.
        let found = bucket.iter().filter_map(Weak::upgrade).find(|inner| inner.kind == kind);
        if let Some(inner) = found {
            return Self { inner };
        }
        let inner = Arc::new(Inner { kind, fingerprint, layouts: Mutex::default() });
        bucket.retain(|weak| weak.strong_count() > 0);
        bucket.push(Arc::downgrade(&inner));
        interner.sweep();
        Self { inner }
    }
}

impl PartialEq for Sharding {
    fn eq(&self, other: &Self) -> bool {
        // Interned, so that other values are other objects.
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
        match &self.inner.kind {
            ShardingKind::Named { mesh, spec, memory_kind } => {
                write!(f, "{spec} on {mesh} devices {}", DeviceList(mesh.devices()))?;
                if *memory_kind == MemoryKind::Host { f.write_str(" in host memory") } else { Ok(()) }
            }
            ShardingKind::SingleDevice(device) => write!(f, "device {device}"),
        }
    }
}

impl fmt::Debug for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sharding({self})")
    }
}

impl Leaf for Sharding {}

impl ShardingKind {
    fn fingerprint(&self) -> u64 {
        let mut fingerprint = Fingerprint::new("sharding");
        match self {
            Self::Named { mesh, spec, memory_kind } => {
                fingerprint.text("named");
                fingerprint.word(mesh.fingerprint());
                spec.add_to(&mut fingerprint);
                fingerprint.word(*memory_kind as u64);
            }
            Self::SingleDevice(device) => {
                fingerprint.text("single device");
                fingerprint.word(u64::from(device.0));
            }
        }
        fingerprint.finish()
    }
}

/// All shardings that somebody holds. It decides nothing: it only makes equal values one object.
static INTERNER: LazyLock<Mutex<Interner>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Interner {
    by_fingerprint: HashMap<u64, Vec<Weak<Inner>>>,
    /// The next sweep comes when there are more entries than this.
    sweep_above: usize,
}

impl Interner {
    /// Forgets what nobody holds any more, often enough that it stays proportional to what is held.
    fn sweep(&mut self) {
        if self.by_fingerprint.len() <= self.sweep_above.max(SWEEP_ABOVE) {
            return;
        }
        self.by_fingerprint.retain(|_, bucket| bucket.iter().any(|weak| weak.strong_count() > 0));
        self.sweep_above = 2 * self.by_fingerprint.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;

    fn mesh(axes: &[(&str, usize)]) -> Mesh {
        let count = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, (0..count).map(DeviceId).collect()).unwrap()
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
            Sharding::single_device(DeviceId(0)),
        ];
        for other in others {
            assert!(a != other && a.fingerprint() != other.fingerprint(), "{other}");
        }
    }

    #[test]
    fn the_interner_forgets_what_nobody_holds() {
        let device = |i: u32| Sharding::single_device(DeviceId(1_000_000 + i));
        let kept = device(0);
        (1..5000).for_each(|i| drop(device(i)));
        assert!(INTERNER.lock().by_fingerprint.len() < 2500);
        assert_eq!(device(0), kept);
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
        assert_eq!(sharding.to_string(), "P(data) on {data:4} devices [0, 1, 2, 3]");
        assert_eq!(Sharding::single_device(DeviceId(3)).to_string(), "device 3");
        let host = Sharding::named(mesh, spec![], MemoryKind::Host);
        assert_eq!(host.to_string(), "P() on {data:4} devices [0, 1, 2, 3] in host memory");
    }

    #[test]
    fn devices_are_looked_up_in_the_job() {
        let sharding = mesh(&[("x", 4)]).replicated();
        assert_eq!(sharding.check_devices(&Topology::even(2, 2)), Ok(()));
        assert_eq!(
            sharding.check_devices(&Topology::even(3, 1)),
            Err(ShardingError::UnknownDevice { device: DeviceId(3), devices: 3 })
        );
    }
}
