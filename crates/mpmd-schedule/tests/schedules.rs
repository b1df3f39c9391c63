//! Built-in schedules: their orders, their text, and their costs.

use std::collections::HashMap;

use mpmd_schedule::{Action, ActionKind, Builtin, Dialect, Schedule, ScheduleText};
use serde_json::Value;

fn cases(golden: &str) -> Vec<Value> {
    let golden: Value = serde_json::from_str(golden).expect("well-formed");
    golden["cases"].as_array().expect("cases").clone()
}

/// Returns (schedule, name for messages) of a case of the golden file.
fn schedule(case: &Value) -> (Schedule, String) {
    let number = |key: &str| case[key].as_u64().expect("a number") as usize;
    let name = case["schedule"].as_str().expect("a name");
    let (ranks, microbatches, chunks) = (
        number("ranks"),
        number("microbatches"),
        number("chunks_per_rank"),
    );
    let schedule = Schedule::named(name, ranks, microbatches, Some(chunks)).expect("a schedule");
    assert_eq!((schedule.name(), schedule.stages()), (name, ranks * chunks));
    (schedule, format!("{name} {ranks} {microbatches} {chunks}"))
}

#[test]
fn orders_match_the_golden_file() {
    let cases = cases(include_str!("golden/schedules.json"));
    for case in &cases {
        let (schedule, called) = schedule(case);
        let rows: Vec<Vec<String>> =
            serde_json::from_value(case["rows"].clone()).expect("rows of cells");
        let ours: Vec<Vec<String>> = (0..schedule.ranks())
            .map(|rank| schedule.cells(rank))
            .collect();
        assert_eq!(ours, rows, "{called}");
    }
    assert_eq!(cases.len(), 101);
}

#[test]
fn text_matches_torch_to_the_byte() {
    let cases = cases(include_str!("golden/torch_text.json"));
    for case in &cases {
        let (schedule, called) = schedule(case);
        let theirs = |flavour: &str| case[flavour].as_str().expect("a text");
        for flavour in [Dialect::ComputeOnly, Dialect::ComputeComms] {
            let theirs = theirs(flavour.name());
            for asked in [None, Some(flavour)] {
                let read = ScheduleText::parse(theirs, asked).unwrap();
                assert_eq!(read.flavour, flavour, "{called}");
                assert_eq!(read.to_csv(), theirs, "{called}");
                assert_eq!(
                    read.schedule(schedule.name()).unwrap(),
                    schedule,
                    "{called}"
                );
            }
        }
        let lowered = ScheduleText::of(&schedule, Dialect::ComputeComms).unwrap();
        assert_eq!(lowered.to_csv(), theirs("compute_comms"), "{called}");
        // Torch's text includes waits; this one does not.
        let ours = ScheduleText::of(&schedule, Dialect::ComputeOnly).unwrap();
        assert_eq!(
            ours.hash(),
            ScheduleText::parse(theirs("compute_only"), None)
                .unwrap()
                .hash(),
            "{called}"
        );
    }
    assert_eq!(cases.len(), 35);
}

/// The results of a simulated schedule, in units of time.
struct Run {
    makespan: usize,
    /// By rank: the largest number of forward passes that wait for their gradients at one time.
    activations: Vec<usize>,
    /// By rank: idle time between the rank's first and last action.
    idle: Vec<usize>,
}

/// Simulates a schedule with passes that take `(F, I, W)` units of time, and transfers that take
/// none. As in the closed forms, a `B` gives its gradient at its end. An overlapped pair starts
/// when both actions can, and its actions run one after the other.
fn run(schedule: &Schedule, (forward, input, weight): (usize, usize, usize)) -> Run {
    use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
    let ranks = schedule.ranks();
    let mut next = vec![0; ranks];
    let mut free = vec![0; ranks];
    let mut idle = vec![0; ranks];
    let (mut live, mut most) = (vec![0_usize; ranks], vec![0; ranks]);
    let mut ends: HashMap<(usize, bool, usize), usize> = HashMap::new();
    loop {
        let before = next.clone();
        for rank in 0..ranks {
            let row = &schedule.rows()[rank][next[rank]..];
            let is_pair = schedule.overlaps(rank).contains(&next[rank]);
            let head = &row[..row.len().min(if is_pair { 2 } else { 1 })];
            let mut ready = head.iter().map(
                |&Action {
                     stage,
                     kind,
                     microbatch,
                 }| {
                    let end = |stage: usize, forward: bool| {
                        ends.get(&(stage, forward, microbatch)).copied()
                    };
                    let first =
                        |needed: bool, end: Option<usize>| if needed { end } else { Some(0) };
                    match kind {
                        Forward => first(stage > 0, end(stage.wrapping_sub(1), true)),
                        BackwardWeight => end(stage, false),
                        _ => {
                            let after = first(stage + 1 < schedule.stages(), end(stage + 1, false));
                            Some(end(stage, true)?.max(after?))
                        }
                    }
                },
            );
            let Some(start) = ready.try_fold(free[rank], |all, one| Some(all.max(one?))) else {
                continue;
            };
            if next[rank] > 0 && !head.is_empty() {
                idle[rank] += start - free[rank];
            }
            free[rank] = start;
            for &Action {
                stage,
                kind,
                microbatch,
            } in head
            {
                free[rank] += match kind {
                    Forward => forward,
                    BackwardInput => input,
                    BackwardWeight => weight,
                    _ => input + weight,
                };
                if kind != BackwardWeight {
                    ends.insert((stage, kind == Forward, microbatch), free[rank]);
                }
                match kind {
                    Forward => live[rank] += 1,
                    Backward | BackwardWeight => live[rank] -= 1,
                    _ => {}
                }
                most[rank] = most[rank].max(live[rank]);
                next[rank] += 1;
            }
        }
        if next == before {
            break;
        }
    }
    assert!(
        next.iter()
            .zip(schedule.rows())
            .all(|(next, row)| *next == row.len())
    );
    Run {
        makespan: free.into_iter().max().unwrap(),
        activations: most,
        idle,
    }
}

#[test]
fn costs_for_four_ranks_and_eight_microbatches_match_table() {
    type Row = (
        &'static str,
        Option<usize>,
        usize,
        usize,
        [usize; 4],
        [usize; 4],
    );
    let table: [Row; 8] = [
        ("gpipe", None, 33, 24, [8; 4], [9, 6, 3, 0]),
        ("1f1b", None, 33, 24, [4, 3, 2, 1], [9, 6, 3, 0]),
        ("interleaved", Some(2), 57, 48, [11, 9, 7, 5], [9, 6, 3, 0]),
        ("bfs", Some(2), 57, 48, [16; 4], [9, 6, 3, 0]),
        ("zbh1", None, 27, 24, [4; 4], [3, 2, 1, 0]),
        ("zb1p", Some(2), 51, 48, [8; 4], [3, 2, 1, 0]),
        ("zbv", None, 51, 48, [8; 4], [0; 4]),
        ("dualpipev", None, 54, 48, [9; 4], [6, 5, 4, 3]),
    ];
    for (name, chunks, makespan, ideal, activations, idle) in table {
        let schedule = Schedule::named(name, 4, 8, chunks).unwrap();
        let found = run(&schedule, (1, 1, 1));
        assert_eq!(found.makespan, makespan, "{name}");
        assert_eq!(8 * 3 * schedule.stages() / 4, ideal, "{name}");
        assert_eq!(found.activations, activations, "{name}");
        assert_eq!(found.idle, idle, "{name}");
    }
}

#[test]
fn bubbles_and_activations_match_closed_forms() {
    for p in 1..7_usize {
        for m in 1..25_usize {
            for v in 1..5_usize {
                for costs in [(1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 2, 4), (5, 1, 3)] {
                    forms(p, m, v, costs);
                }
            }
        }
    }
}

fn forms(p: usize, m: usize, v: usize, costs @ (f, i, w): (usize, usize, usize)) {
    for builtin in Builtin::ALL {
        let Ok(schedule) = builtin.schedule(p, m, v) else {
            continue;
        };
        let found = run(&schedule, costs);
        let passes = if schedule.has_backward() {
            f + i + w
        } else {
            f
        };
        let bubble = found.makespan - m * v * passes;
        let called = format!("{builtin:?} p {p} m {m} v {v} {costs:?}");
        let k = m / (m / p).max(1);
        let all = (p - 1) * (f + i + w);
        let each = |of: &dyn Fn(usize) -> usize| (0..p).map(of).collect::<Vec<_>>();
        let (expected, activations) = match builtin {
            Builtin::GPipe | Builtin::GPipeReversed => (Some(all), each(&|_| m)),
            Builtin::OneFOneB => (Some(all), each(&|r| m.min(p - r))),
            Builtin::Eager1F1B => (Some(all), each(&|r| m.min(2 * (p - r) - 1))),
            Builtin::Interleaved1F1B => (
                m.is_multiple_of(p).then_some(all),
                each(&|r| (m * v).min((v - 1) * k + 2 * (p - 1 - r) + 1)),
            ),
            Builtin::LoopedBfs => ((m >= p).then_some(all), each(&|_| m * v)),
            Builtin::ZbH1 | Builtin::InterleavedZeroBubble => (
                m.is_multiple_of(p)
                    .then_some((p - 1) * (f + i - f.min(i).min(w))),
                if m.is_multiple_of(p) {
                    each(&|_| (m * v).min((v - 1) * k + p))
                } else {
                    found.activations.clone()
                },
            ),
            Builtin::ZbvZeroBubble if m >= 2 * p => {
                ((f == i && i == w).then_some((p - 1) * f), each(&|_| 2 * p))
            }
            Builtin::DualPipeV => (
                (f == i && i == w).then_some((p - 1) * 2 * f),
                each(&|_| 2 * p + 1),
            ),
            Builtin::ForwardOnly => (m.is_multiple_of(p).then_some((p - 1) * f), each(&|_| m * v)),
            _ => continue,
        };
        assert_eq!(found.activations, activations, "{called}");
        if let Some(expected) = expected {
            assert_eq!(bubble, expected, "{called}");
        }
    }
}
