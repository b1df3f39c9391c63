//! `mpmd plan`: runs the golden files through the program, and checks the errors of invalid cases.

use crate::common::{ask, refused, temporary, told};
use serde_json::{Value, json};

/// Returns the cases of a golden file with their expected results, of which there must be `count`.
fn golden(text: &str, count: usize) -> Vec<Value> {
    let golden: Value = serde_json::from_str(text).unwrap();
    let cases = golden["cases"].as_array().unwrap().clone();
    assert_eq!(cases.len(), count);
    cases
}

/// Returns the answers of `mpmd plan` to all cases, in their order, from one call.
fn told_all(command: &str, cases: &[Value]) -> Vec<Value> {
    let answers = told(command, &Value::Array(cases.to_vec()));
    let answers = answers.as_array().expect("a list for a list").clone();
    assert_eq!(answers.len(), cases.len());
    answers
}

#[test]
fn layouts_are_those_of_the_golden_file() {
    let cases = golden(
        include_str!("../../../mpmd-layout/tests/golden/named_sharding_layout.json"),
        240,
    );
    for (i, (case, answer)) in cases.iter().zip(told_all("layout", &cases)).enumerate() {
        let expected =
            json!({"regions": case["regions"], "fully_replicated": case["fully_replicated"]});
        assert_eq!(answer, expected, "case {i}");
    }
}

#[test]
fn intermediates_are_those_of_the_golden_file() {
    let cases = golden(
        include_str!("../../../mpmd-layout/tests/golden/intermediate_sharding.json"),
        240,
    );
    for (i, (case, answer)) in cases
        .iter()
        .zip(told_all("intermediate", &cases))
        .enumerate()
    {
        let mut expected = case.as_object().unwrap().clone();
        expected.retain(|field, _| field != "src" && field != "dst");
        assert_eq!(answer, Value::Object(expected), "case {i}");
    }
}

#[test]
fn chunks_are_those_of_the_golden_file() {
    let cases = golden(
        include_str!("../../../mpmd-layout/tests/golden/chunk_sharding.json"),
        120,
    );
    for (i, (case, answer)) in cases.iter().zip(told_all("chunk", &cases)).enumerate() {
        for field in ["offsets_by_rank", "sizes_by_rank", "ranks"] {
            assert_eq!(answer[field], case[field], "{field} of case {i}");
        }
        assert_eq!(answer.as_object().unwrap().len(), 3, "case {i}: {answer}");
    }
}

#[test]
fn specs_and_errors_are_those_of_the_golden_file() {
    let cases = golden(
        include_str!("../../../mpmd-layout/tests/golden/sharding_rules.json"),
        160,
    );
    let mut errors = 0;
    for (i, (case, answer)) in cases.iter().zip(told_all("rules", &cases)).enumerate() {
        assert_eq!(answer.get("specs"), case.get("specs"), "case {i}: {answer}");
        assert_eq!(answer.get("error"), case.get("error"), "case {i}: {answer}");
        if answer.get("error").is_some() {
            errors += 1;
            assert!(
                answer["message"].as_str().unwrap().starts_with("leaf `"),
                "case {i}: {answer}"
            );
        }
    }
    assert_eq!(errors, 25);
}

#[test]
fn notes_names_by_pattern_and_state_are_in_the_answer_of_rules() {
    let case = json!({
        "mesh": [["data", 8]],
        "params": {
            "params": {"a": {"shape": [15], "dtype": "f32"}, "b": {"shape": [16], "dtype": "f32"}},
            "opt": {"mean": {"b": {"shape": [16], "dtype": "bf16"}}},
        },
        "strategy": [["params/a", "shard_dim('data', 0)"], [".*", "logical_partitioning()"]],
        "rules": [["rows", ["data"]]],
        "names": [["params/.*", ["rows"]]],
        "state": [["opt/mean", "params"]],
    });
    let answer = told_all("rules", std::slice::from_ref(&case)).remove(0);
    let specs = json!({"params/a": ["data"], "params/b": ["data"], "opt/mean/b": ["data"]});
    assert_eq!(answer["specs"], specs);
    let note = "dimension 0 of 15 does not divide evenly by 8 (data)";
    assert_eq!(answer["notes"], json!({"params/a": [note]}));
}

#[test]
fn case_gives_an_answer_and_list_gives_a_list() {
    let case = json!({"shape": [5, 2], "dim": 0, "placements": [0, 1]});
    let answer = json!({
        "offsets_by_rank": [[0, 0], [3, 0]],
        "sizes_by_rank": [[3, 2], [2, 2]],
        "ranks": [0, 1],
    });
    assert_eq!(told("chunk", &case), answer);
    assert_eq!(told("chunk", &json!([case])), json!([answer]));
    assert_eq!(
        told("chunk", &json!([case, case, case])),
        json!([answer, answer, answer])
    );
    assert_eq!(told("chunk", &json!([])), json!([]));
    let one_is_wrong = told(
        "chunk",
        &json!([case, {"shape": [5], "dim": 1, "placements": [0]}]),
    );
    assert_eq!(
        (&one_is_wrong[0], &one_is_wrong[1]["error"]),
        (&answer, &json!("dim_out_of_range"))
    );
}

#[test]
fn cases_come_from_a_file_as_well() {
    let file = temporary("case.json");
    std::fs::write(&file, r#"{"shape": [1], "dim": 0, "placements": [0]}"#).unwrap();
    let expected = r#"{"offsets_by_rank":[[0]],"sizes_by_rank":[[1]],"ranks":[0]}"#;
    let from_file = ask(&["chunk", file.to_str().unwrap()], "");
    assert_eq!(
        (from_file.stdout.trim_end(), from_file.status),
        (expected, Some(0))
    );
    let dash = ask(
        &["chunk", "-"],
        r#"{"shape": [1], "dim": 0, "placements": [0]}"#,
    );
    assert_eq!((dash.stdout.trim_end(), dash.status), (expected, Some(0)));
    let missing = ask(&["chunk", "there/is/no/such/file"], "");
    assert_eq!(missing.status, Some(2));
    assert!(
        missing.stderr.contains("cannot read there/is/no/such/file"),
        "{}",
        missing.stderr
    );
}

#[test]
fn answer_orders_devices_by_number() {
    let case = r#"{
        "shape": [4],
        "sharding": {
            "spec": ["x"],
            "mesh": {"device_ids": [10, 9], "shape": [2], "axis_names": ["x"]}
        }
    }"#;
    let answer = ask(&["layout"], case).stdout;
    assert_eq!(
        answer,
        "{\"regions\":{\"9\":[[2,4]],\"10\":[[0,2]]},\"fully_replicated\":false}\n"
    );
}

#[test]
fn malformed_input_error_names_case_and_field() {
    let chunk = r#"{"shape": [4], "dim": 0, "placements": [0]}"#;
    let mesh = r#""mesh": {"axis_names": ["x"], "shape": [1], "device_ids": [0]}"#;
    let layout = |sharding: &str| format!(r#"{{"shape": [4], "sharding": {sharding}}}"#);
    let table = [
        ("chunk", String::new(), "standard input is no JSON: EOF"),
        (
            "chunk",
            r#"{"shape": [4]"#.into(),
            "standard input is no JSON: EOF",
        ),
        (
            "chunk",
            format!("{chunk} {chunk}"),
            "is no JSON: trailing characters",
        ),
        (
            "chunk",
            "7".into(),
            "case 0: the case: expected an object, found 7",
        ),
        (
            "chunk",
            r#"{"shape": [4], "dim": 0}"#.into(),
            "case 0: the case: has no field `placements`",
        ),
        (
            "chunk",
            format!(r#"[{chunk}, {chunk}, {{"shape": [4, -1], "dim": 0, "placements": [0]}}]"#),
            "case 2: `shape[1]`: expected a whole number from 0, found -1",
        ),
        (
            "chunk",
            chunk.replace("\"dim\": 0", "\"dim\": \"rows\""),
            "case 0: `dim`: expected a whole number",
        ),
        (
            "layout",
            layout("{}"),
            "case 0: `sharding`: a sharding has one of the fields mesh, chunk, shards",
        ),
        (
            "layout",
            layout(&format!(r#"{{{mesh}, "device": 0, "spec": []}}"#)),
            "one of the fields",
        ),
        (
            "layout",
            layout(&format!("{{{mesh}}}")),
            "case 0: `sharding`: has no field `spec`",
        ),
        (
            "layout",
            layout(&format!(r#"{{{mesh}, "spec": [3]}}"#)),
            "`sharding.spec[0]`: expected null, an axis",
        ),
        (
            "layout",
            layout(&format!(r#"{{{mesh}, "spec": [["x", 1]]}}"#)),
            "`sharding.spec[0][1]`: expected a text",
        ),
        (
            "layout",
            layout(r#"{"device": 4294967296}"#),
            "`sharding.device`: expected a number from 0 to",
        ),
        (
            "layout",
            layout(r#"{"shards": [{"device": 1, "region": [[0]]}]}"#),
            "`sharding.shards[0].region[0]`",
        ),
        (
            "intermediate",
            r#"{"src": {"device": 0}}"#.into(),
            "case 0: the case: has no field `dst`",
        ),
        (
            "rules",
            r#"{"mesh": [["x", 2]], "strategy": [], "params": {"a": [{"shape": [2]}]}}"#.into(),
            r#"case 0: `params["a"][0]["shape"][0]`: expected a leaf {shape, dtype}"#,
        ),
        (
            "rules",
            r#"{"mesh": {"x": 2}, "strategy": [], "params": {}}"#.into(),
            "case 0: `mesh`: expected a list, found an object of 1 fields",
        ),
        (
            "reshard",
            r#"{"shape": [], "dtype": "f32", "src": {"device": 0}, "dst": {"device": 1},
                "process_of": {"a": 0}}"#
                .into(),
            r#"case 0: `process_of`: has a key "a", which is no number"#,
        ),
        (
            "reshard",
            r#"{"shape": [], "dtype": 4, "src": {"device": 0}, "dst": {"device": 1}}"#.into(),
            "case 0: `dtype`: expected a text, found 4",
        ),
    ];
    for (command, input, expected) in table {
        let answer = ask(&[command], &input);
        assert_eq!(
            (answer.status, answer.stdout.as_str()),
            (Some(2), ""),
            "{command} of {input}"
        );
        assert!(
            answer.stderr.contains(expected),
            "{command} of {input}: {}",
            answer.stderr
        );
    }
}

#[test]
fn bad_meshes_and_specs_give_errors() {
    let named = |names: Value, shape: Value, ids: Value, spec: Value| {
        let mesh = json!({"axis_names": names, "shape": shape, "device_ids": ids});
        json!({"sharding": {"mesh": mesh, "spec": spec}, "shape": [6, 4]})
    };
    let two = |spec: Value| named(json!(["x", "y"]), json!([2, 2]), json!([0, 1, 2, 3]), spec);
    let table = [
        (
            two(json!(["z"])),
            "unknown_axis",
            "axis `z`, but the mesh is {x:2, y:2}",
        ),
        (
            two(json!(["x", "x"])),
            "duplicate_axis",
            "axis `x` divides dimension 0 and again dimension 1",
        ),
        (
            two(json!([["x", "y"]])),
            "not_divisible",
            "dimension 0 of shape [6, 4] has size 6",
        ),
        (
            two(json!([null, null, null])),
            "spec_too_long",
            "3 entries, but shape [6, 4] has 2 dimensions",
        ),
        (
            named(json!(["x", "x"]), json!([1, 2]), json!([0, 1]), json!([])),
            "duplicate_axis",
            "axis `x` is named twice in {x:1, x:2}",
        ),
        (
            named(json!(["x"]), json!([2]), json!([5, 5]), json!([])),
            "duplicate_device",
            "device 5",
        ),
        (
            named(json!(["x"]), json!([3]), json!([0]), json!([])),
            "device_count",
            "takes 3 devices, found 1",
        ),
        (
            named(json!(["x"]), json!([0]), json!([]), json!([])),
            "empty_axis",
            "axis `x` of size 0",
        ),
        (
            named(json!(["x"]), json!([1, 1]), json!([0]), json!([])),
            "axis_count",
            "1 axes has 2 sizes",
        ),
    ];
    for (case, error, message) in &table {
        refused("layout", case, error, &[message]);
    }
    // The same fault in a command without a shape.
    let src = &table[0].0["sharding"];
    let case = json!({"src": src, "dst": {"device": 7}});
    refused(
        "intermediate",
        &case,
        "unknown_axis",
        &["src: ", "axis `z`"],
    );
}

#[test]
fn bad_shards_and_chunks_give_errors() {
    let shards = |regions: Value| {
        let shard = |(device, region): (usize, &Value)| json!({"device": device, "region": region});
        let shards: Vec<Value> = regions
            .as_array()
            .unwrap()
            .iter()
            .enumerate()
            .map(shard)
            .collect();
        json!({"shape": [4, 4], "dtype": "f32", "src": {"device": 9}, "dst": {"shards": shards}})
    };
    let left = json!([[0, 4], [0, 2]]);
    let table = [
        (
            json!([left, [[0, 4], [1, 4]]]),
            "overlap",
            "device 1 has [0..4, 1..4]: both have [0..4, 1..2]",
        ),
        (json!([left]), "gap", "no device has [0..4, 2..4]"),
        (
            json!([left, [[0, 4], [2, 5]]]),
            "past_end",
            "device 1 has [0..4, 2..5]",
        ),
        (
            json!([left, [[0, 4], [4, 2]]]),
            "region",
            "device 1 has [0..4, 4..2]",
        ),
        (json!([[[0, 4]]]), "shape", "shape [4, 4] has 2 dimensions"),
        (json!([left, [[0, 4]]]), "shape", "2 and 1 dimensions"),
        (json!([]), "no_shards", "no shards"),
    ];
    for (regions, error, message) in table {
        refused("reshard", &shards(regions), error, &["dst: ", message]);
    }
    let chunk =
        |placements: Value| json!({"shape": [4], "dim": 0, "placements": placements, "world": 2});
    refused(
        "chunk",
        &chunk(json!([0, 0])),
        "duplicate_rank",
        &["both placed on rank 0"],
    );
    refused(
        "chunk",
        &chunk(json!([0])),
        "missing_rank",
        &["rank 1 of 2"],
    );
    refused("chunk", &chunk(json!([0, 2])), "unknown_rank", &["rank 2"]);
    refused(
        "chunk",
        &chunk(json!([])),
        "no_placements",
        &["dimension 0"],
    );
    let case = json!({"shape": [4], "dtype": "f32", "dst": {"device": 0},
        "src": {"chunk": {"dim": 1, "placements": [0, 1]}}});
    refused(
        "reshard",
        &case,
        "dim_out_of_range",
        &["src: ", "dimension 1"],
    );
}

#[test]
fn bad_jobs_and_arrays_give_errors() {
    let case = |changes: Value| {
        let mut case =
            json!({"shape": [4], "dtype": "f32", "src": {"device": 7}, "dst": {"device": 8}});
        let changes = changes.as_object().unwrap().clone();
        case.as_object_mut().unwrap().extend(changes);
        case
    };
    let table = [
        (
            json!({"process_of": {"7": 0}}),
            "unknown_device",
            "dst: process_of has no device 8",
        ),
        (
            json!({"process_of": {}}),
            "unknown_device",
            "src: process_of has no device 7",
        ),
        (
            json!({"process_of": {"7": 1, "8": 2}, "host_of": {"1": 0}}),
            "unknown_process",
            "host_of has no process 2",
        ),
        (json!({"dtype": "float"}), "unknown_dtype", "`float`"),
        (
            json!({"shape": [1_u64 << 62, 4]}),
            "too_large",
            "more bytes than can be addressed",
        ),
    ];
    for (changes, error, message) in table {
        refused("reshard", &case(changes), error, &[message]);
    }
    let mesh = json!({"axis_names": ["x"], "shape": [2], "device_ids": [0, 1]});
    let src = json!({"mesh": mesh, "spec": ["x"], "unreduced": ["x"]});
    refused(
        "reshard",
        &case(json!({ "src": src })),
        "unreduced_divides",
        &["src: ", "axis `x`"],
    );
}

#[test]
fn unknown_fields_of_a_case_are_refused() {
    let mesh = json!({"axis_names": ["x"], "shape": [2], "device_ids": [0, 1]});
    let rows = json!({"mesh": mesh, "spec": ["x"]});
    let with = |value: &Value, field: &str| {
        let mut value = value.clone();
        value[field] = json!(true);
        value
    };
    let reshard = json!({"shape": [4], "dtype": "f32", "src": rows, "dst": {"device": 3}});
    let of = |field: &str, value: Value| {
        let mut case = reshard.clone();
        case[field] = value;
        case
    };
    let shard = json!({"device": 3, "region": [[0, 4]], "size": 4});
    let leaf = json!({"shape": [1], "dtype": "f32", "box": true});
    let mut boxed = json!({"mesh": [["x", 2]], "strategy": [[".*", "replicate"]]});
    boxed["params"] = json!({ "w": leaf });
    let table = [
        (
            "reshard",
            with(&reshard, "donate"),
            "the case: has the unknown field `donate`",
        ),
        (
            "reshard",
            of("src", with(&rows, "donate")),
            "`src`: has the unknown field `donate`",
        ),
        (
            "reshard",
            of("dst", json!({"device": 3, "spec": []})),
            "`dst`: has the unknown field",
        ),
        (
            "reshard",
            of(
                "src",
                json!({"mesh": with(&mesh, "axis_types"), "spec": ["x"]}),
            ),
            "`src.mesh`: has the unknown field `axis_types`; known are axis_names, shape, ",
        ),
        (
            "reshard",
            of(
                "dst",
                json!({"chunk": {"dim": 0, "placements": [3], "world": 1}}),
            ),
            "`dst.chunk`: has the unknown field `world`",
        ),
        (
            "reshard",
            of("dst", json!({"shards": [shard]})),
            "`dst.shards[0]`: has the unknown field",
        ),
        (
            "layout",
            json!({"sharding": rows, "shape": [4], "dtype": "f32"}),
            "field `dtype`",
        ),
        (
            "intermediate",
            json!({"src": rows, "dst": rows, "cache": true}),
            "field `cache`",
        ),
        (
            "intermediate",
            json!({"src": rows, "dst": rows, "dtype": "f32"}),
            "no field `shape`",
        ),
        (
            "intermediate",
            json!({"src": rows, "dst": rows, "host_of": [0]}),
            "no field `shape`",
        ),
        (
            "chunk",
            json!({"shape": [4], "dim": 0, "placements": [0], "ranks": [0], "x": 1}),
            "field `x`",
        ),
        ("rules", with(&boxed, "rule"), "field `rule`"),
        (
            "rules",
            boxed,
            "`params[\"w\"]`: has the unknown field `box`",
        ),
    ];
    for (command, case, message) in table {
        let told = ask(&[command], &case.to_string());
        assert_eq!(told.status, Some(2), "{command} {case}: {}", told.stderr);
        assert!(
            told.stderr.contains(message),
            "{command} {case}: {}",
            told.stderr
        );
    }
}

#[test]
fn memory_kinds_are_read_and_answered() {
    let mesh = |size: usize, first: usize| {
        let devices: Vec<usize> = (first..first + size).collect();
        json!({"axis_names": ["x"], "shape": [size], "device_ids": devices})
    };
    let dst = json!({"mesh": mesh(4, 8), "spec": [null, "x"]});
    for (kind, expected) in [
        (json!("pinned_host"), json!("host")),
        (json!("host"), json!("host")),
        (json!("device"), Value::Null),
        (Value::Null, Value::Null),
    ] {
        let src = json!({"mesh": mesh(8, 0), "spec": ["x", null], "memory_kind": kind});
        let answer = told("intermediate", &json!({"src": src, "dst": dst}));
        assert_eq!(answer["intermediate"]["memory_kind"], expected, "{answer}");
    }
    let case = json!({"shape": [4], "sharding": {"device": 1, "memory_kind": "disk"}});
    let told = ask(&["layout"], &case.to_string());
    assert_eq!(told.status, Some(2));
    assert!(
        told.stderr
            .contains("`sharding.memory_kind`: expected device, host"),
        "{}",
        told.stderr
    );
}

#[test]
fn replicas_stay_divided_where_the_array_is_known() {
    let ids = |first: usize, count: usize| (first..first + count).collect::<Vec<usize>>();
    let side = |fsdp: usize, tp: usize, first: usize| {
        let (axes, ids) = (json!(["fsdp", "tp"]), ids(first, fsdp * tp));
        let mesh = json!({"axis_names": axes, "shape": [fsdp, tp], "device_ids": ids});
        json!({"mesh": mesh, "spec": ["fsdp", "tp"]})
    };
    let mut case = json!({"src": side(8, 1, 0), "dst": side(1, 4, 8)});
    let whole = told("intermediate", &case);
    assert_eq!(whole["intermediate"]["mesh"]["shape"], json!([8, 1, 1]));
    (case["shape"], case["dtype"]) = (json!([64, 64]), json!("bf16"));
    let split = told("intermediate", &case);
    assert_eq!(
        split["intermediate"]["mesh"]["shape"],
        json!([2, 4, 1]),
        "{split}"
    );
    assert_eq!(split["replica_axes"], json!(["fsdp_intermediate_replica"]));
    case["shape"] = json!([63, 64]);
    refused("intermediate", &case, "not_divisible", &["src: ", "63"]);
}

#[test]
fn placements_may_be_written_as_in_torch() {
    let placements = json!(["rank:1/cuda:0", "worker2/cuda:1", "rank:0", 3]);
    let mut case = json!({"shape": [8], "dim": 0, "placements": placements});
    case["names"] = json!({"worker2": 2});
    let numbers = json!({"shape": [8], "dim": 0, "placements": [1, 2, 0, 3]});
    assert_eq!(told("chunk", &case), told("chunk", &numbers));
    let chunk = json!({"dim": 0, "placements": placements, "names": {"worker2": 2}});
    let layout = json!({"sharding": {"chunk": chunk}, "shape": [8]});
    assert_eq!(told("layout", &layout)["regions"]["2"], json!([[2, 4]]));
    for (placement, message) in [
        (
            json!("cuda:0"),
            "`placements[0]`: \"cuda:0\" names no process: write rank:R/cuda:0",
        ),
        (
            json!("worker3/cpu"),
            "is on `worker3`, which has no number: add it to `names`",
        ),
        (json!("rank:a/cpu"), "is no placement"),
        (json!(-1), "`placements[0]`: expected a whole number from 0"),
    ] {
        case["placements"][0] = placement;
        let told = ask(&["chunk"], &case.to_string());
        assert_eq!(told.status, Some(2), "{}", told.stdout);
        assert!(told.stderr.contains(message), "{}", told.stderr);
    }
}

#[test]
fn bad_strategies_give_errors() {
    let leaf = json!({"shape": [8, 8], "dtype": "f32"});
    let case = |mesh: Value, strategy: Value, params: Value| {
        json!({
            "mesh": mesh,
            "strategy": strategy,
            "params": params,
        })
    };
    let data = || json!([["data", 2]]);
    let one = |tactic: &str| case(data(), json!([["w", tactic]]), json!({ "w": leaf }));
    let table = [
        (
            one("shard_dim('data', 0"),
            "SyntaxError",
            r#"rule 0, pattern "w": tactic "shard_dim('data', 0", column"#,
        ),
        (one("fsdp"), "TypeError", "`fsdp` needs the name of an axis"),
        (one("nope('data')"), "KeyError", "there is no op `nope`"),
        (one("shard_dim('data', 5)"), "ValueError", "leaf `w`"),
        (one("fsdp('x', 0)"), "KeyError", "leaf `w`"),
        (
            case(
                data(),
                json!([["w", "replicate"], ["(w", "replicate"]]),
                json!({ "w": leaf }),
            ),
            "ValueError",
            r#"rule 1: pattern "(w""#,
        ),
        (
            case(data(), json!([["/w", "replicate"]]), json!({ "w": leaf })),
            "AssertionError",
            "starts with `/`",
        ),
        (
            case(data(), json!([]), json!({ "w": leaf })),
            "ValueError",
            "has no rule",
        ),
        (
            case(data(), json!([[".*", "replicate"]]), json!({})),
            "ValueError",
            "no leaf",
        ),
        (
            case(
                data(),
                json!([[".*", "replicate"]]),
                json!({"a/b": leaf, "a": {"b": leaf}}),
            ),
            "duplicate_leaf",
            "`a/b`",
        ),
        (
            case(
                data(),
                json!([[".*", "replicate"]]),
                json!({"w": {"shape": [1], "dtype": "f31"}}),
            ),
            "unknown_dtype",
            "leaf `w`: ",
        ),
        (
            case(json!([["a", 1], ["a", 2]]), json!([]), json!({})),
            "duplicate_axis",
            "mesh: axis `a`",
        ),
        (
            case(json!([["a", 1_u64 << 40]]), json!([]), json!({})),
            "too_large",
            "mesh: 1099511627776 devices",
        ),
    ];
    for (case, error, message) in table {
        refused("rules", &case, error, &[message]);
    }
}

#[test]
fn params_are_nested_lists_and_objects_with_logical_names() {
    let leaf = json!({"shape": [8, 8], "dtype": "f32"});
    let named = json!({"shape": [8, 8], "dtype": "f32", "names": ["embed", null]});
    let case = json!({
        "mesh": [["a", 2], ["b", 2]],
        "params": {"blocks": [{"w": leaf}, {"w": leaf, "shape": named}], "head": leaf},
        "strategy": [["blocks/1/shape", "logical_partitioning()"], ["blocks/.*", "shard_dim('a', \
         1)"]],
        "rules": [["mlp", "a"], ["embed", ["a", "b"]]],
    });
    let expected = json!({"notes": {}, "specs": {
        "blocks/0/w": [null, "a"],
        "blocks/1/shape": [["a", "b"], null],
        "blocks/1/w": [null, "a"],
        "head": [null, null],
    }});
    assert_eq!(told("rules", &case), expected);
    let root = json!({"mesh": [["a", 2]], "params": leaf, "strategy": [["", "shard_dim('a', 0)"]]});
    assert_eq!(
        told("rules", &root),
        json!({"notes": {}, "specs": {"": ["a", null]}})
    );
}
