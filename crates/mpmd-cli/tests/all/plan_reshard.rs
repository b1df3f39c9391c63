//! `mpmd plan reshard`: executes its plans element by element, and checks its sums.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::told;
use serde_json::{Value, json};

/// For each device, the elements that it holds, by row-major index. The value is the step after
/// which the device holds the element, 0 at the start.
type Had = BTreeMap<u64, BTreeMap<usize, u64>>;

/// Returns the elements of a region `[[start, end], …]` of an array of `shape`, by row-major index.
fn elements(shape: &[usize], region: &Value) -> Vec<usize> {
    let mut elements = vec![0];
    for (size, range) in shape.iter().zip(region.as_array().unwrap()) {
        let [start, end] = [0, 1].map(|i| range[i].as_u64().unwrap() as usize);
        assert!(start <= end && end <= *size, "{region} in {shape:?}");
        elements = elements
            .iter()
            .flat_map(|at| (start..end).map(move |i| at * size + i))
            .collect();
    }
    elements
}

fn shape_of(case: &Value) -> Vec<usize> {
    serde_json::from_value(case["shape"].clone()).unwrap()
}

/// Returns the elements that each device holds in a layout, all with step 0.
fn held(case: &Value, layout: &Value) -> Had {
    let regions = layout["regions"]
        .as_object()
        .unwrap_or_else(|| panic!("{case}: {layout}"));
    let of = |(device, region): (&String, &Value)| {
        let elements = elements(&shape_of(case), region)
            .into_iter()
            .map(|element| (element, 0));
        (device.parse().unwrap(), elements.collect())
    };
    regions.iter().map(of).collect()
}

/// Returns (process, host of that process) of a device, 0 where the case does not say.
fn place(case: &Value, device: u64) -> (u64, u64) {
    let process = case["process_of"]
        .get(device.to_string())
        .and_then(Value::as_u64)
        .unwrap_or(0);
    let host = case["host_of"]
        .get(process.to_string())
        .and_then(Value::as_u64)
        .unwrap_or(0);
    (process, host)
}

/// Executes the pieces of an answer one after the other. Checks that each target device gets its
/// elements exactly once, that no link carries unneeded bytes, and the answer's sums. `item` is the
/// bytes per element.
fn check(case: &Value, src: &Value, dst: &Value, answer: &Value, item: u64) {
    let shape = shape_of(case);
    let (source, wanted) = (held(case, src), held(case, dst));
    let (mut arrived, mut bytes, mut sent) = (Had::new(), [0u64; 4], BTreeMap::<u64, u64>::new());
    let mut steps = 0;
    let pieces = answer["pieces"]
        .as_array()
        .unwrap_or_else(|| panic!("{case}: {answer}"));
    for piece in pieces {
        let [from, to] = ["src", "dst"].map(|side| piece[side].as_u64().unwrap());
        let elements = elements(&shape, &piece["region"]);
        assert!(!elements.is_empty(), "{case}: {piece}");
        let size = elements.len() as u64 * item;
        let mut step = 0;
        for element in &elements {
            let first = source.get(&from).and_then(|had| had.get(element));
            let later = arrived.get(&from).and_then(|had| had.get(element));
            let had = first
                .or(later)
                .unwrap_or_else(|| panic!("{case}: {from} has not all of {piece}"));
            step = step.max(had + 1);
        }
        for element in elements {
            assert!(
                wanted[&to].contains_key(&element),
                "{case}: {to} does not want {piece}"
            );
            let again = arrived.entry(to).or_default().insert(element, step);
            assert!(
                again.is_none(),
                "{case}: {to} gets an element of {piece} again"
            );
        }
        steps = steps.max(step);
        let ((from_process, from_host), (to_process, to_host)) =
            (place(case, from), place(case, to));
        let class = match (from == to, from_process == to_process, from_host == to_host) {
            (true, ..) => 0,
            (_, true, _) => 1,
            (.., true) => 2,
            _ => 3,
        };
        bytes[class] += size;
        if from != to {
            *sent.entry(from).or_default() += size;
        }
    }
    for (device, wanted) in &wanted {
        let got = arrived.get(device).map_or(0, BTreeMap::len);
        assert_eq!(got, wanted.len(), "{case}: device {device} lacks something");
    }
    let by_class = ["same_device", "same_process", "same_host", "network"];
    let said = by_class.map(|class| answer["bytes_by_link_class"][class].as_u64().unwrap());
    assert_eq!(said, bytes, "{case}");
    assert_eq!(
        answer["max_bytes_sent_by_a_device"],
        json!(sent.values().max().unwrap_or(&0)),
        "{case}"
    );
    assert_eq!(answer["steps"], json!(steps), "{case}");
    assert_eq!(answer.as_object().unwrap().len(), 4, "{case}");

    // No plan moves less: missing elements of a host, or of a process, must arrive there once.
    let missing = |group: &dyn Fn(u64) -> u64| {
        let by_group = |had: &Had| {
            let mut groups: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
            had.iter().for_each(|(device, had)| {
                groups.entry(group(*device)).or_default().extend(had.keys())
            });
            groups
        };
        let (has, wants) = (by_group(&source), by_group(&wanted));
        let nothing = BTreeSet::new();
        let missing = wants
            .iter()
            .map(|(g, wants)| wants.difference(has.get(g).unwrap_or(&nothing)).count());
        missing.sum::<usize>() as u64 * item
    };
    assert_eq!(
        bytes[3],
        missing(&|device| place(case, device).1),
        "{case}: over the network"
    );
    // Processes of one host have different numbers.
    let between = missing(&|device| place(case, device).0);
    assert_eq!(bytes[2] + bytes[3], between, "{case}: between processes");
    assert_eq!(
        bytes[1] + bytes[2] + bytes[3],
        missing(&|device| device),
        "{case}: between devices"
    );
}

/// A generator of pseudo-random numbers; equal seeds give the same numbers in every run.
struct Numbers(u64);

impl Numbers {
    /// Returns the next number, from 0 to `end` - 1.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn shuffled<T: Clone>(&mut self, items: &[T]) -> Vec<T> {
        let mut items = items.to_vec();
        (1..items.len())
            .rev()
            .for_each(|i| items.swap(i, self.below(i + 1)));
        items
    }
}

/// Ids of devices, with gaps.
const DEVICES: [u64; 10] = [0, 1, 2, 3, 7, 10, 11, 100, 101, u32::MAX as u64];

fn sharding(numbers: &mut Numbers, shape: &[usize]) -> Value {
    let devices = numbers.shuffled(&DEVICES);
    match numbers.below(5) {
        0 => json!({"device": devices[0]}),
        1 => {
            let dim = numbers.below(2 * shape.len()) as i64 - shape.len() as i64;
            json!({"chunk": {"dim": dim, "placements": devices[..1 + numbers.below(9)]}})
        }
        2 => {
            // Two blocks of rows, each cut in two along `dim`.
            let cut = numbers.below(shape[0] + 1);
            let dim = numbers.below(shape.len());
            let mut shards = Vec::new();
            for (start, end) in [(0, cut), (cut, shape[0])] {
                let mut region: Vec<[usize; 2]> = shape.iter().map(|size| [0, *size]).collect();
                region[0] = [start, end];
                let [low, high] = region[dim];
                let middle = low + numbers.below(high - low + 1);
                for range in [[low, middle], [middle, high]] {
                    region[dim] = range;
                    shards.push(json!({"device": devices[shards.len()], "region": region}));
                }
            }
            json!({ "shards": shards })
        }
        _ => {
            let sizes = [
                vec![2, 2],
                vec![2, 3],
                vec![4],
                vec![3, 2],
                vec![6],
                vec![2, 2, 2],
            ];
            let sizes = &sizes[numbers.below(sizes.len())];
            let names: Vec<String> = (0..sizes.len()).map(|axis| format!("a{axis}")).collect();
            let mut spec = vec![Vec::new(); shape.len()];
            for axis in numbers.shuffled(&names) {
                // One of the choices leaves the axis out of the spec, which gives replicas.
                if let Some(entry) = spec.get_mut(numbers.below(shape.len() + 1)) {
                    entry.push(axis);
                }
            }
            let count: usize = sizes.iter().product();
            let mesh = json!({"axis_names": names, "shape": sizes, "device_ids": devices[..count]});
            json!({"mesh": mesh, "spec": spec})
        }
    }
}

#[test]
fn plans_are_executable_and_move_the_minimum() {
    let mut numbers = Numbers(1);
    let shapes = [vec![24], vec![24, 24], vec![24, 48], vec![24, 24, 24]];
    let items = [("f32", 4), ("bf16", 2), ("i8", 1), ("c128", 16)];
    let (mut cases, mut bytes) = (Vec::new(), Vec::new());
    for _ in 0..300 {
        let shape = &shapes[numbers.below(shapes.len())];
        let (dtype, item) = items[numbers.below(items.len())];
        let (src, dst) = (sharding(&mut numbers, shape), sharding(&mut numbers, shape));
        let mut case = json!({"shape": shape, "dtype": dtype, "src": src, "dst": dst});
        let processes = [0, 5, 6, 4_000_000_000u64];
        if numbers.below(4) > 0 {
            let of = |device: &u64| (device.to_string(), json!(processes[numbers.below(4)]));
            case["process_of"] = Value::Object(DEVICES.iter().map(of).collect());
            if numbers.below(3) > 0 {
                let of = |process: &u64| (process.to_string(), json!([3, 9, 8][numbers.below(3)]));
                case["host_of"] = Value::Object(processes.iter().map(of).collect());
            }
        }
        cases.push(case);
        bytes.push(item);
    }
    let layouts = |side: &str| {
        let case = |case: &Value| json!({"sharding": case[side], "shape": case["shape"]});
        told("layout", &cases.iter().map(case).collect())
    };
    let (src, dst) = (layouts("src"), layouts("dst"));
    let answers = told("reshard", &Value::Array(cases.clone()));
    for (i, (case, item)) in cases.iter().zip(bytes).enumerate() {
        check(case, &src[i], &dst[i], &answers[i], item);
    }
    let relayed = answers
        .as_array()
        .unwrap()
        .iter()
        .filter(|answer| answer["steps"].as_u64() > Some(1))
        .count();
    assert!(
        relayed >= 20,
        "{relayed}: regions wanted more than once spread from where they come first"
    );
}

/// Returns a case for `mpmd plan`: blocks on two processes of one host become columns on the other
/// host. Each column block is on both devices of a process.
fn example() -> Value {
    json!({
        "shape": [8, 6],
        "dtype": "f32",
        "src": {
            "mesh": {"axis_names": ["x", "y"], "shape": [2, 2], "device_ids": [0, 1, 2, 3]},
            "spec": ["x", "y"],
        },
        "dst": {
            "mesh": {"axis_names": ["z", "r"], "shape": [2, 2], "device_ids": [4, 5, 6, 7]},
            "spec": [null, "z"],
        },
        "process_of": {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2, "5": 2, "6": 3, "7": 3},
        "host_of": {"0": 0, "1": 0, "2": 1, "3": 1},
    })
}

#[test]
fn without_maps_all_devices_are_of_one_process() {
    let mut case = example();
    case.as_object_mut()
        .unwrap()
        .retain(|field, _| !field.ends_with("_of"));
    let bytes = &told("reshard", &case)["bytes_by_link_class"];
    assert_eq!(
        *bytes,
        json!({"same_device": 0, "same_process": 384, "same_host": 0, "network": 0})
    );
    // Without `host_of` all processes are on one host.
    case["process_of"] = example()["process_of"].clone();
    let bytes = &told("reshard", &case)["bytes_by_link_class"];
    assert_eq!(
        *bytes,
        json!({"same_device": 0, "same_process": 192, "same_host": 192, "network": 0})
    );
}

#[test]
fn maps_must_name_all_devices_and_may_name_others() {
    let mut case = example();
    let answer = told("reshard", &case);
    case["process_of"]["99"] = json!(12);
    case["host_of"]["12"] = json!(0);
    case["host_of"]["13"] = json!(4);
    assert_eq!(told("reshard", &case), answer);
    case["process_of"].as_object_mut().unwrap().remove("6");
    let refusal = told("reshard", &case);
    assert_eq!(
        refusal,
        json!({"error": "unknown_device", "message": "dst: process_of has no device 6"})
    );
}

#[test]
fn all_partial_sums_go_to_the_destination() {
    let mesh = json!({"axis_names": ["x"], "shape": [2], "device_ids": [3, 4]});
    let src = json!({"mesh": mesh, "spec": [], "unreduced": ["x"]});
    let answer = told(
        "reshard",
        &json!({"shape": [2], "dtype": "f32", "src": src, "dst": {"device": 4}}),
    );
    let piece = |src| json!({"src": src, "dst": 4, "region": [[0, 2]]});
    assert_eq!(answer["pieces"], json!([piece(3), piece(4)]));
}
