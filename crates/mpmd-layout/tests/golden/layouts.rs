//! Compares the layouts of named shardings with those of JAX, index by index.

use std::collections::BTreeMap;

use crate::cases::CaseSharding;
use mpmd_layout::region::Region;
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
    Layout {
        regions: BTreeMap<String, Region>,
        fully_replicated: bool,
    },
    Error {
        error: String,
    },
}

#[test]
fn layouts_match_jax() {
    let golden: Golden = serde_json::from_str(include_str!("named_sharding_layout.json")).unwrap();
    assert_eq!(golden.cases.len(), 240);
    for Case {
        sharding,
        shape,
        expected,
    } in golden.cases
    {
        let sharding = sharding.sharding();
        let found = sharding.layout(&shape);
        match expected {
            Expected::Layout {
                regions,
                fully_replicated,
            } => {
                let layout = found.unwrap_or_else(|error| panic!("{sharding}, {shape:?}: {error}"));
                let found: BTreeMap<String, Region> = layout
                    .iter()
                    .map(|(device, region)| (device.to_string(), region.clone()))
                    .collect();
                assert_eq!(found, regions, "{sharding}, {shape:?}");
                assert_eq!(
                    layout.fully_replicated(),
                    fully_replicated,
                    "{sharding}, {shape:?}"
                );
            }
            Expected::Error { error } => assert!(found.is_err(), "{sharding}, {shape:?}: {error}"),
        }
    }
}
