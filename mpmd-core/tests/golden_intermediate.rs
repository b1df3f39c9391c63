//! Intermediate shardings are those of pathways-utils, case by case.

use mpmd_core::reshard::find_intermediate_sharding;
use mpmd_core::sharding::{MemoryKind, Sharding, Spec, SpecEntry};
use mpmd_core::topology::{DeviceId, Mesh};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    src: CaseSharding,
    dst: CaseSharding,
    #[serde(flatten)]
    expected: Expected,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Expected {
    Found { intermediate: CaseSharding, replica_axes: Vec<String> },
    None { error: String, reason: Option<String> },
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
    let golden: Golden = serde_json::from_str(include_str!("golden/intermediate_sharding.json")).unwrap();
    assert_eq!(golden.cases.len(), 240);
    let mut found_some = 0;
    for (i, Case { src, dst, expected }) in golden.cases.into_iter().enumerate() {
        let (src, dst) = (src.sharding(), dst.sharding());
        let found = find_intermediate_sharding(&src, &dst);
        match expected {
            Expected::Found { intermediate, replica_axes } => {
                let found = found.unwrap_or_else(|none| panic!("case {i}, {src} to {dst}: {none}"));
                assert_eq!(found.sharding, intermediate.sharding(), "case {i}, {src} to {dst}");
                assert_eq!(found.replica_axes, replica_axes, "case {i}, {src} to {dst}");
                found_some += 1;
            }
            Expected::None { error, reason } => {
                let expected =
                    if error == "none" { reason.expect("every refusal has a reason") } else { error };
                let none = found.expect_err(&format!("case {i}, {src} to {dst}: {expected}"));
                assert_eq!(none.reason(), expected, "case {i}, {src} to {dst}");
            }
        }
    }
    assert_eq!(found_some, 80);
}
