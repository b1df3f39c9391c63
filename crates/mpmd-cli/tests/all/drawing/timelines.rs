//! Timelines to draw: two schedules with a simple simulation.

use mpmd_schedule::timeline::{Bar, Gap, Kind, Mark, MemoryPoint, Row, Timeline};

/// An action of a rank: (kind of pass, stage, microbatch).
type Action = (Kind, u32, u32);

/// The input of a simulation: the order of actions of each rank, and the lengths of passes.
struct Job {
    title: String,
    ranks: u32,
    stages: u32,
    orders: Vec<Vec<Action>>,
    /// Returns the rank of a stage, given (stage, number of ranks).
    rank_of: fn(u32, u32) -> u32,
    unit: &'static str,
    /// The length of one pass, in `unit`; a combined backward pass takes twice as long.
    one: f64,
    /// Limit on the random delay of a pass, as a part of its length. 0 gives the plan itself.
    noise: f64,
}

/// Returns the timeline of a 1F1B step in seconds, with its plan and all data of a trace.
pub(crate) fn one_forward_one_backward(ranks: u32, microbatches: u32) -> Timeline {
    let order = |rank: u32| {
        let warm = microbatches.min(ranks - 1 - rank);
        let mut order: Vec<Action> = (0..warm).map(|i| (Kind::Forward, rank, i)).collect();
        for i in warm..microbatches {
            order.extend([(Kind::Forward, rank, i), (Kind::Backward, rank, i - warm)]);
        }
        order.extend((microbatches - warm..microbatches).map(|i| (Kind::Backward, rank, i)));
        order
    };
    let orders: Vec<_> = (0..ranks).map(order).collect();
    let job = |noise| Job {
        title: format!("1F1B, {ranks} ranks, {microbatches} microbatches"),
        ranks,
        stages: ranks,
        orders: orders.clone(),
        rank_of: |stage, _| stage,
        unit: "s",
        one: 0.0021,
        noise,
    };
    let (planned, mut ran) = (simulated(&job(0.0)), simulated(&job(0.3)));
    let mut op = 0;
    for (row, plan) in ran.rows.iter_mut().zip(&planned.rows) {
        for (bar, plan) in row.bars.iter_mut().zip(&plan.bars) {
            bar.planned = Some((plan.start, plan.end));
            bar.op = Some(op);
            bar.issued = Some((bar.start - 0.0004).max(0.0));
            bar.at = Some(format!("examples/train.rs:{}", 40 + op % 7));
            op += 1;
        }
        row.memory
            .iter_mut()
            .for_each(|point| point.used = point.used * 48.5 * 1_048_576.0 + 3e8);
    }
    ran.memory_unit = "B".to_owned();
    ran
}

/// Returns the timeline of a step of a zero-bubble schedule in a V. Each rank has two stages; input
/// and weight gradients are separate passes.
pub(crate) fn zero_bubble_v(ranks: u32, microbatches: u32) -> Timeline {
    let order = |rank: u32| {
        let (a, b) = (rank, 2 * ranks - 1 - rank);
        let mut next = std::collections::BTreeMap::new();
        let mut order: Vec<Action> = Vec::new();
        let all = microbatches.max(2 * ranks - 1);
        let mut put = |kind: Kind, stage: u32| {
            let number = next.entry((kind, stage)).or_insert(0);
            order.push((kind, stage, *number));
            *number += 1;
            *number
        };
        use Kind::{BackwardInput as I, BackwardWeight as W, Forward as F};
        let mut begun = 0;
        for _ in 0..2 * (ranks - rank) - 1 {
            begun = put(F, a);
        }
        let mut passed = 0;
        for _ in 0..rank {
            passed = put(F, b);
            begun = put(F, a);
        }
        for _ in 0..ranks - rank {
            passed = put(F, b);
            put(I, b);
            put(W, b);
        }
        while passed < all {
            if begun < all {
                begun = put(F, a);
            }
            put(I, a);
            put(W, a);
            passed = put(F, b);
            put(I, b);
            put(W, b);
        }
        for _ in 0..rank {
            put(I, a);
            put(I, b);
        }
        for _ in 0..ranks - rank {
            put(I, a);
            put(W, a);
        }
        for stage in [b, a] {
            while put(W, stage) < all {}
        }
        // Numbers beyond the last microbatch only keep the pattern regular.
        order.retain(|(_, _, number)| *number < microbatches);
        order
    };
    simulated(&Job {
        title: format!("ZBV, {ranks} ranks, {microbatches} microbatches"),
        ranks,
        stages: 2 * ranks,
        orders: (0..ranks).map(order).collect(),
        rank_of: |stage, ranks| {
            if stage < ranks {
                stage
            } else {
                2 * ranks - 1 - stage
            }
        },
        unit: "unit",
        one: 1.0,
        noise: 0.0,
    })
}

/// Simulates the job: each rank runs its order, each action as soon as its input has arrived.
/// Panics if the orders deadlock.
fn simulated(job: &Job) -> Timeline {
    let mut done = std::collections::BTreeMap::<Action, f64>::new();
    let mut rows: Vec<Row> = (0..job.ranks)
        .map(|rank| Row {
            name: format!("rank {rank}"),
            process: Some(rank),
            ..Row::default()
        })
        .collect();
    let mut at = vec![0; job.orders.len()];
    let mut held = vec![0.0; job.orders.len()];
    let send = 0.2 * job.one;
    loop {
        let before = at.clone();
        for rank in 0..job.ranks {
            let place = rank as usize;
            while let Some(action) = job.orders[place].get(at[place]) {
                let Some(needs) = needs(job, *action)
                    .map(|(needed, from)| {
                        let ended = done.get(&needed)?;
                        let way = if from == rank { 0.0 } else { send };
                        Some((ended + way, format!("{} of rank {from}", described(needed))))
                    })
                    .into_iter()
                    .collect::<Option<Vec<_>>>()
                else {
                    break;
                };
                run(
                    job,
                    &mut rows,
                    rank,
                    *action,
                    &needs,
                    &mut done,
                    &mut held[place],
                );
                at[place] += 1;
            }
        }
        if at == before {
            break;
        }
    }
    assert!(
        at.iter()
            .zip(&job.orders)
            .all(|(at, order)| *at == order.len()),
        "the orders deadlock"
    );
    let end = done.values().copied().fold(0.0, f64::max);
    for row in &mut rows {
        let last = row.bars.last().map_or(0.0, |bar| bar.end);
        if last < end {
            row.gaps.push(Gap {
                start: last,
                end,
                waits_for: String::new(),
            });
        }
        row.gaps.retain(|gap| gap.end - gap.start > 1e-9);
    }
    let marks = vec![Mark {
        name: "step 0".to_owned(),
        ..Mark::default()
    }];
    Timeline {
        title: job.title.clone(),
        unit: job.unit.to_owned(),
        end,
        marks,
        rows,
        ..Timeline::default()
    }
}

/// Returns (the action that must end before this one, its rank); `None` for the first stage's
/// forward pass. No action needs two.
fn needs(job: &Job, (kind, stage, number): Action) -> Option<(Action, u32)> {
    let whole = job.orders[0]
        .iter()
        .any(|(kind, _, _)| *kind == Kind::Backward);
    let back = if whole {
        Kind::Backward
    } else {
        Kind::BackwardInput
    };
    let needed = match kind {
        Kind::Forward if stage == 0 => return None,
        Kind::Forward => (kind, stage - 1, number),
        Kind::BackwardWeight => (Kind::BackwardInput, stage, number),
        _ if stage + 1 == job.stages => (Kind::Forward, stage, number),
        _ => (back, stage + 1, number),
    };
    Some((needed, (job.rank_of)(needed.1, job.ranks)))
}

fn run(
    job: &Job,
    rows: &mut [Row],
    rank: u32,
    action: Action,
    needs: &[(f64, String)],
    done: &mut std::collections::BTreeMap<Action, f64>,
    held: &mut f64,
) {
    let (kind, stage, number) = action;
    let row = &mut rows[rank as usize];
    let free = row.bars.last().map_or(0.0, |bar| bar.end);
    let (ready, what) = needs.first().cloned().unwrap_or_default();
    let start = free.max(ready);
    let waited = (start > free).then_some(what.clone());
    if let Some(what) = &waited {
        row.gaps.push(Gap {
            start: free,
            end: start,
            waits_for: what.clone(),
        });
    }
    // A pseudo-random number from the action, the same in every run.
    let random = f64::from(
        (stage * 7919 + number * 104_729 + kind as u32 * 31).wrapping_mul(2_654_435_761) >> 16,
    ) / 65_536.0;
    let cost = if kind == Kind::Backward { 2.0 } else { 1.0 };
    let end = start + cost * job.one * (1.0 + job.noise * random);
    let letter = match kind {
        Kind::Forward => "F",
        Kind::Backward => "B",
        Kind::BackwardInput => "I",
        _ => "W",
    };
    let name = format!("{stage}{letter}{number}");
    row.bars.push(Bar {
        kind,
        name,
        stage: Some(stage),
        microbatch: Some(number),
        start,
        end,
        waited_for: waited,
        ..Bar::default()
    });
    match kind {
        Kind::Forward => {
            *held += 1.0;
            row.memory.push(MemoryPoint {
                at: start,
                used: *held,
            });
        }
        Kind::Backward | Kind::BackwardWeight => {
            *held -= 1.0;
            row.memory.push(MemoryPoint {
                at: end,
                used: *held,
            });
        }
        _ => {}
    }
    let next = match kind {
        Kind::Forward => (stage + 1 < job.stages).then_some(stage + 1),
        Kind::BackwardWeight => None,
        _ => stage.checked_sub(1),
    };
    if let Some(to) = next
        .map(|next| (job.rank_of)(next, job.ranks))
        .filter(|to| *to != rank)
    {
        row.moves.push(Bar {
            kind: Kind::Move,
            name: format!(
                "{stage}SEND_{}{number}",
                if kind == Kind::Forward { "F" } else { "B" }
            ),
            stage: Some(stage),
            microbatch: Some(number),
            start: end,
            end: end + 0.2 * job.one,
            bytes: Some(4 << 20),
            to: Some(to),
            ..Bar::default()
        });
    }
    done.insert(action, end);
}

/// Returns a text that names an action as messages do, such as `stage 1, microbatch 0, forward`.
fn described((kind, stage, number): Action) -> String {
    let kind = match kind {
        Kind::Forward => "forward",
        Kind::Backward => "backward",
        Kind::BackwardInput => "input gradient",
        _ => "weight gradient",
    };
    format!("stage {stage}, microbatch {number}, {kind}")
}
