//! Named shardings have the layouts that JAX gives them, to the index.

use std::collections::BTreeMap;

use mpmd_core::region::Region;
use mpmd_core::sharding::{MemoryKind, Sharding, Spec, SpecEntry};
use mpmd_core::topology::{DeviceId, Mesh};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    sharding: CaseSharding,
    shape: Vec<usize>,
    #[serde(flatten)]
    expected: Expected,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Expected {
    Layout { regions: BTreeMap<String, Region>, fully_replicated: bool },
    Error { error: String },
}

#[derive(Deserialize)]
struct CaseSharding {
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
    fn sharding(self) -> Sharding {
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

#[test]
fn every_case_agrees() {
    let golden: Golden = serde_json::from_str(include_str!("golden/named_sharding_layout.json")).unwrap();
    assert_eq!(golden.cases.len(), 240);
    for Case { sharding, shape, expected } in golden.cases {
        let sharding = sharding.sharding();
        let found = sharding.layout(&shape);
        match expected {
            Expected::Layout { regions, fully_replicated } => {
                let layout = found.unwrap_or_else(|error| panic!("{sharding}, {shape:?}: {error}"));
                let found: BTreeMap<String, Region> =
                    layout.iter().map(|(device, region)| (device.to_string(), region.clone())).collect();
                assert_eq!(found, regions, "{sharding}, {shape:?}");
                assert_eq!(layout.fully_replicated(), fully_replicated, "{sharding}, {shape:?}");
            }
            Expected::Error { error } => assert!(found.is_err(), "{sharding}, {shape:?}: {error}"),
        }
    }
}
