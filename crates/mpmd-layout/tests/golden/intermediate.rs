//! Compares intermediate shardings with those of pathways-utils, case by case.

use crate::cases::CaseSharding;
use mpmd_layout::reshard::find_intermediate_sharding;
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
    Found {
        intermediate: CaseSharding,
        replica_axes: Vec<String>,
    },
    None {
        error: String,
        reason: Option<String>,
    },
}

#[test]
fn intermediate_shardings_match_pathways_utils() {
    let golden: Golden = serde_json::from_str(include_str!("intermediate_sharding.json")).unwrap();
    assert_eq!(golden.cases.len(), 240);
    let mut found_some = 0;
    for (i, Case { src, dst, expected }) in golden.cases.into_iter().enumerate() {
        let (src, dst) = (src.sharding(), dst.sharding());
        let found = find_intermediate_sharding(&src, &dst);
        match expected {
            Expected::Found {
                intermediate,
                replica_axes,
            } => {
                let found = found.unwrap_or_else(|none| panic!("case {i}, {src} to {dst}: {none}"));
                assert_eq!(
                    found.sharding,
                    intermediate.sharding(),
                    "case {i}, {src} to {dst}"
                );
                assert_eq!(found.replica_axes, replica_axes, "case {i}, {src} to {dst}");
                found_some += 1;
            }
            Expected::None { error, reason } => {
                let expected = if error == "none" {
                    reason.expect("every refusal has a reason")
                } else {
                    error
                };
                let none = found.expect_err(&format!("case {i}, {src} to {dst}: {expected}"));
                assert_eq!(none.why.reason(), expected, "case {i}, {src} to {dst}");
            }
        }
    }
    assert_eq!(found_some, 80);
}
