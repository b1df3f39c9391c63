//! Compares the specs and errors of sharding rules with those of big_vision's `infer_sharding`.

use std::collections::BTreeMap;

use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::rules::{Registry, RulesError, Strategy, infer};
use mpmd_layout::sharding::{Spec, SpecEntry};
use mpmd_layout::topology::{DeviceId, Mesh};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    mesh: Vec<(String, usize)>,
    params: BTreeMap<String, Params>,
    strategy: Vec<(String, String)>,
    #[serde(flatten)]
    expected: Expected,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Params {
    Leaf { shape: Vec<usize>, dtype: DType },
    Dict(BTreeMap<String, Params>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Expected {
    Specs {
        specs: BTreeMap<String, Vec<CaseEntry>>,
    },
    Error {
        error: String,
        message: String,
    },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum CaseEntry {
    None(()),
    Axis(String),
    Axes(Vec<String>),
}

impl Params {
    fn leaves(self, name: String, leaves: &mut Vec<(String, ShapedArray)>) {
        match self {
            Self::Leaf { shape, dtype } => leaves.push((name, ShapedArray::new(&shape, dtype))),
            Self::Dict(branches) => {
                branches
                    .into_iter()
                    .for_each(|(key, branch)| branch.leaves(format!("{name}/{key}"), leaves));
            }
        }
    }
}

fn spec(entries: Vec<CaseEntry>) -> Spec {
    let entry = |entry| match entry {
        CaseEntry::None(()) => SpecEntry::None,
        CaseEntry::Axis(axis) => SpecEntry::Axis(axis),
        CaseEntry::Axes(axes) => SpecEntry::Axes(axes),
    };
    Spec::new(entries.into_iter().map(entry).collect())
}

/// Formats a spec like the original's messages about leaves: `(None, 'x')`.
fn tuple(spec: &Spec) -> String {
    let entry = |entry: &SpecEntry| match entry {
        SpecEntry::None => "None".to_owned(),
        entry => format!("'{}'", entry.axes().join("', '")),
    };
    let entries: Vec<String> = spec.entries().iter().map(entry).collect();
    if entries.len() == 1 {
        format!("({},)", entries[0])
    } else {
        format!("({})", entries.join(", "))
    }
}

/// True if the original's message names the same leaf and spec as this error.
fn same_place(ours: &RulesError, message: &str) -> bool {
    match ours {
        RulesError::Op(failed) => {
            let spec = tuple(&failed.spec);
            message.ends_with(&format!("name={} cur_spec={spec}", failed.leaf))
                || message.contains(&format!("parameter {} has spec {spec}", failed.leaf))
        }
        RulesError::AxisUsedTwice { spec, axis, .. } => {
            message.contains(&format!("P{}", tuple(spec))) && message.contains(axis)
        }
        _ => false,
    }
}

#[test]
fn rules_match_big_vision() {
    let golden: Golden = serde_json::from_str(include_str!("sharding_rules.json")).unwrap();
    assert_eq!(golden.cases.len(), 160);
    let mut errors = 0;
    for (
        number,
        Case {
            mesh,
            params,
            strategy,
            expected,
        },
    ) in golden.cases.into_iter().enumerate()
    {
        let axes: Vec<(&str, usize)> = mesh
            .iter()
            .map(|(axis, size)| (axis.as_str(), *size))
            .collect();
        let count = axes.iter().map(|(_, size)| *size as u32).product();
        let mesh = Mesh::new(&axes, (0..count).map(DeviceId).collect()).unwrap();
        let mut leaves = Vec::new();
        params
            .into_iter()
            .for_each(|(key, branch)| branch.leaves(key, &mut leaves));
        let parsed = Strategy::parse(&strategy, &Registry::default()).unwrap();
        let found = infer(&leaves, &parsed, &mesh);
        match expected {
            Expected::Specs { specs } => {
                let found = found.unwrap_or_else(|error| panic!("case {number}: {error}"));
                let found: BTreeMap<String, Spec> = found
                    .leaves()
                    .iter()
                    .map(|leaf| (leaf.name.clone(), leaf.spec.clone()))
                    .collect();
                let specs: BTreeMap<String, Spec> = specs
                    .into_iter()
                    .map(|(name, entries)| (name, spec(entries)))
                    .collect();
                assert_eq!(found, specs, "case {number}: {strategy:?} on {leaves:?}");
            }
            Expected::Error { error, message } => {
                let found = found
                    .err()
                    .unwrap_or_else(|| panic!("case {number} has no error: {message}"));
                assert_eq!(
                    found.kind().name(),
                    error,
                    "case {number}: {found}; {message}"
                );
                assert!(
                    same_place(&found, &message),
                    "case {number}: {found}; {message}"
                );
                errors += 1;
            }
        }
    }
    assert_eq!(errors, 25);
}
