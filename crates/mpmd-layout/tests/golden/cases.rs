//! Named shardings in the format of the golden files.

use mpmd_layout::sharding::{MemoryKind, Sharding, Spec, SpecEntry};
use mpmd_layout::topology::{DeviceId, Mesh};
use serde::Deserialize;

/// A named sharding as read from a golden file: a mesh and a spec.
#[derive(Deserialize)]
pub(crate) struct CaseSharding {
    mesh: CaseMesh,
    spec: Vec<CaseEntry>,
}

#[derive(Deserialize)]
struct CaseMesh {
    axis_names: Vec<String>,
    shape: Vec<usize>,
    device_ids: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum CaseEntry {
    None(()),
    Axis(String),
    Axes(Vec<String>),
}

impl CaseSharding {
    /// Converts to a sharding in device memory. Panics if the mesh is malformed.
    pub(crate) fn sharding(self) -> Sharding {
        let names = self.mesh.axis_names.iter().map(String::as_str);
        let axes: Vec<(&str, usize)> = names.zip(self.mesh.shape).collect();
        let devices = self.mesh.device_ids.into_iter().map(DeviceId).collect();
        let entry = |entry| match entry {
            CaseEntry::None(()) => SpecEntry::None,
            CaseEntry::Axis(axis) => SpecEntry::Axis(axis),
            CaseEntry::Axes(axes) => SpecEntry::Axes(axes),
        };
        let spec = Spec::new(self.spec.into_iter().map(entry).collect());
        Sharding::named(Mesh::new(&axes, devices).unwrap(), spec, MemoryKind::Device)
    }
}
