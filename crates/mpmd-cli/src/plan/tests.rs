//! Fuzz test of `mpmd plan`: cases with wrong sizes, numbers and names. Each is answered or
//! refused, with little time and memory.

use mpmd_fuzz::{Rng, integer};
use serde_json::{Map, Value, json};

use super::*;

/// Number of elements of a list, or fields of an object, at which a random change adds no more.
const MOST: usize = 8;

fn named(axes: Value, shape: Value, devices: Value, spec: Value) -> Value {
    json!({"mesh": {"axis_names": axes, "shape": shape, "device_ids": devices}, "spec": spec})
}

/// Returns (command, valid cases) for each planner.
fn cases() -> [(&'static str, Vec<Value>); 5] {
    let square = named(
        json!(["a", "b"]),
        json!([2, 2]),
        json!([0, 1, 2, 3]),
        json!(["a", null, ["b"]]),
    );
    let mut sums = named(
        json!(["a", "b"]),
        json!([2, 1]),
        json!([4, 5]),
        json!([null, "b"]),
    );
    sums["unreduced"] = json!(["a"]);
    let chunk = json!({"chunk": {"dim": -1, "placements": [2, 0, 1]}});
    let shards = json!({"shards": [
        {"device": 3, "region": [[0, 4], [0, 6], [0, 2]]},
        {"device": 9, "region": [[4, 8], [0, 6], [0, 2]]},
    ]});
    let device = json!({"device": 7, "memory_kind": "pinned_host"});
    let all = [&square, &sums, &chunk, &shards, &device];
    let shape = json!([8, 6, 2]);
    let layout = |sharding: &&Value| json!({"sharding": sharding, "shape": shape});
    let reshard = |src: &Value, dst: &Value| {
        json!({
            "shape": shape, "dtype": "float32", "src": src, "dst": dst,
            "process_of": {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2, "5": 2, "7": 3, "9": 4},
            "host_of": {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2},
        })
    };
    let mut alone = reshard(&square, &device);
    alone
        .as_object_mut()
        .unwrap()
        .retain(|name, _| !name.ends_with("_of"));
    let whole = named(
        json!(["a", "b"]),
        json!([2, 2]),
        json!([0, 1, 2, 3]),
        json!([null, null]),
    );
    let params = json!({
        "w": {"shape": [4096, 512], "dtype": "bfloat16", "names": ["embed", null]},
        "b": [{"shape": [7], "dtype": "int32"}, {"shape": [], "dtype": "bool"}],
    });
    let strategy = json!([
        ["w", "fsdp(axis='a', min_size_to_shard_mb=0)"],
        [".*", "shard_dim('b', 0, True)"]
    ]);
    let rules = json!({
        "mesh": [["a", 4], ["b", 1]],
        "params": params,
        "strategy": strategy,
        "rules": [["embed", ["a"]]],
        "names": [["b/[0-9]", ["embed"]]],
        "state": [["mean", ""]],
    });
    [
        ("layout", all.iter().map(layout).collect()),
        (
            "intermediate",
            vec![
                json!({"src": square, "dst": whole}),
                json!({"src": whole, "dst": square}),
                reshard(&square, &whole),
            ],
        ),
        (
            "chunk",
            vec![
                json!({"shape": [13, 21], "dim": 1, "placements": [2, 3, 1, 0]}),
                json!({"shape": [9], "dim": 0, "placements": [1, 0], "world": 2}),
                json!({
                    "shape": [9], "dim": 0, "placements": ["rank:1/cuda:0", "a/cpu"],
                    "names": {"a": 0},
                }),
            ],
        ),
        ("rules", vec![rules]),
        (
            "reshard",
            vec![
                reshard(&square, &chunk),
                reshard(&shards, &square),
                reshard(&sums, &device),
                alone,
            ],
        ),
    ]
}

/// Makes a random change in `value`: of a number, a text, an element or a field.
fn change(rng: &mut Rng, value: &mut Value) {
    match value {
        Value::Array(elements) if !elements.is_empty() && rng.u8(..8) > 0 => {
            let at = rng.usize(..elements.len());
            match rng.u8(..8) {
                0 if elements.len() < MOST => elements.insert(at, elements[at].clone()),
                1 => drop(elements.remove(at)),
                2 => elements.rotate_left(at),
                _ => change(rng, &mut elements[at]),
            }
        }
        Value::Object(fields) if !fields.is_empty() && rng.u8(..16) > 0 => {
            change_field(rng, fields)
        }
        Value::String(text) if rng.u8(..4) > 0 => {
            let mut bytes = text.clone().into_bytes();
            mpmd_fuzz::mutate(rng, &mut bytes);
            *text = String::from_utf8_lossy(&bytes).into_owned();
        }
        _ => *value = replacement(rng),
    }
}

fn change_field(rng: &mut Rng, fields: &mut Map<String, Value>) {
    let names: Vec<String> = fields.keys().cloned().collect();
    let name = &names[rng.usize(..names.len())];
    match rng.u8(..16) {
        0 => drop(fields.remove(name)),
        1 if fields.len() < MOST => {
            let (value, name) = (fields[name].clone(), integer(rng).to_string());
            fields.insert(name, value);
        }
        _ => change(rng, &mut fields[name]),
    }
}

fn replacement(rng: &mut Rng) -> Value {
    match rng.u8(..16) {
        0 => Value::Null,
        1 => json!([]),
        2 => json!({}),
        3 => json!(["a", "b", "", "float64", "uint8"][rng.usize(..5)]),
        4 => json!(-(integer(rng) as i64 >> 1)),
        5 => json!(rng.f64() * 10.0),
        6..10 => json!(integer(rng)),
        _ => json!(rng.u64(..12)),
    }
}

/// Answers a case as `mpmd plan` does. Panics if an answer is no JSON.
fn answer<C>(
    case: &Value,
    fields: &[&str],
    read: impl Fn(&Field<'_>) -> Result<C, Malformed>,
    answer: impl Fn(C) -> Result<String, CaseRefusal>,
) {
    match answers(case, fields, read, answer) {
        Ok(answers) => {
            for json in answers {
                assert!(serde_json::from_str::<Value>(&json).is_ok(), "{json}");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[test]
fn fuzz_plan_cases() {
    let cases = cases();
    mpmd_fuzz::cases("plan-cases", |rng| {
        let (command, samples) = &cases[rng.usize(..cases.len())];
        let mut case = samples[rng.usize(..samples.len())].clone();
        for _ in 0..rng.u8(..6) {
            change(rng, &mut case);
        }
        match *command {
            "layout" => answer(
                &case,
                &layout::LayoutCase::FIELDS,
                layout::LayoutCase::read,
                layout::LayoutCase::answer,
            ),
            "intermediate" => answer(
                &case,
                &intermediate::IntermediateCase::FIELDS,
                intermediate::IntermediateCase::read,
                intermediate::IntermediateCase::answer,
            ),
            "chunk" => answer(
                &case,
                &chunk::ChunkCase::FIELDS,
                chunk::ChunkCase::read,
                chunk::ChunkCase::answer,
            ),
            "rules" => answer(
                &case,
                &rules::RulesCase::FIELDS,
                rules::RulesCase::read,
                rules::RulesCase::answer,
            ),
            _ => answer(
                &case,
                &reshard::ReshardCase::FIELDS,
                reshard::ReshardCase::read,
                reshard::ReshardCase::answer,
            ),
        }
    });
}
