//! Compares simulations with known figures, with closed forms, and with each other.

use proptest::prelude::*;

use super::*;
use crate::check::{Item, Names};
use crate::flow::Leaves::{AtOnce, InOrder};
use crate::flow::{Node, Post, Transfer};
use crate::lower::lower_late;
use crate::timeline::BarKind;
use crate::{Builtin, Costs, Schedule, StageCosts, lower};

impl Simulated {
    /// Returns the items that determine the makespan, from the first to the last. Each begins when
    /// the one before it ends.
    fn critical_path(&self) -> Vec<Item> {
        const NONE: u32 = u32::MAX;
        let count = self.nodes.len() as u32;
        let ends = self
            .nodes
            .iter()
            .chain(&self.transfers)
            .map(|span| span.end);
        // The first item with the latest end; nodes come before transfers.
        let last = (0..)
            .zip(ends)
            .fold(None, |best: Option<(u32, f64)>, (item, end)| match best {
                Some((_, latest)) if latest >= end => best,
                _ => Some((item, end)),
            });
        let mut path = Vec::new();
        let mut at = last.map_or(NONE, |(item, _)| item);
        while at != NONE && path.len() <= self.nodes.len() + self.transfers.len() {
            if at < count {
                path.push(Item::Node(at));
                at = self.causes.node[at as usize];
            } else {
                path.push(Item::Send(at - count));
                at = self.causes.transfer[(at - count) as usize];
            }
        }
        path.reverse();
        path
    }
}

fn units(builtin: Builtin, ranks: usize, microbatches: usize, chunks: usize) -> SimulatedSchedule {
    over(builtin, ranks, microbatches, chunks, Channel::Tags)
}

fn over(
    builtin: Builtin,
    ranks: usize,
    microbatches: usize,
    chunks: usize,
    channel: Channel,
) -> SimulatedSchedule {
    let schedule = builtin.schedule(ranks, microbatches, chunks).unwrap();
    simulate_schedule(
        &schedule,
        &Costs::units(schedule.stages()),
        InOrder,
        channel,
    )
    .unwrap()
}

fn equal(forward: f64, input: f64, weight: f64, stages: usize) -> Costs {
    let stage = StageCosts {
        forward,
        backward_input: input,
        backward_weight: weight,
        ..StageCosts::default()
    };
    Costs {
        stage: vec![stage; stages],
        ..Costs::units(0)
    }
}

#[test]
fn four_ranks_with_eight_microbatches_take_known_times() {
    for (builtin, chunks, makespan, idle) in [
        (Builtin::GPipe, 1, 33.0, [9.0, 6.0, 3.0, 0.0]),
        (Builtin::OneFOneB, 1, 33.0, [9.0, 6.0, 3.0, 0.0]),
        (Builtin::Eager1F1B, 1, 33.0, [9.0, 6.0, 3.0, 0.0]),
        (Builtin::Interleaved1F1B, 2, 57.0, [9.0, 6.0, 3.0, 0.0]),
        (Builtin::LoopedBfs, 2, 57.0, [9.0, 6.0, 3.0, 0.0]),
        (Builtin::ZbH1, 1, 27.0, [3.0, 2.0, 1.0, 0.0]),
        (
            Builtin::InterleavedZeroBubble,
            2,
            51.0,
            [3.0, 2.0, 1.0, 0.0],
        ),
        (Builtin::ZbvZeroBubble, 2, 51.0, [0.0, 0.0, 0.0, 0.0]),
        (Builtin::DualPipeV, 2, 54.0, [6.0, 5.0, 4.0, 3.0]),
    ] {
        let found = units(builtin, 4, 8, chunks).simulated;
        let work = 24.0 * chunks as f64;
        assert_eq!(
            (found.makespan, found.bubble()),
            (makespan, makespan - work),
            "{builtin:?}"
        );
        assert_eq!(
            found.lanes.iter().map(LaneTime::idle).collect::<Vec<_>>(),
            idle,
            "{builtin:?}"
        );
        assert!(
            (found.bubble_share() - (1.0 - work / makespan)).abs() < 1e-12,
            "{builtin:?}"
        );
    }
}

#[test]
fn sending_gradients_before_weights_shortens_steps() {
    for (builtin, after_both, after_input) in [
        (Builtin::GPipe, 33.0, 30.0),
        (Builtin::OneFOneB, 33.0, 30.0),
        (Builtin::ZbH1, 27.0, 27.0),
    ] {
        let schedule = builtin.schedule(4, 8, 1).unwrap();
        let takes = |leaves| {
            simulate_schedule(&schedule, &Costs::units(4), leaves, Channel::Tags)
                .unwrap()
                .simulated
                .makespan
        };
        assert_eq!(
            (takes(InOrder), takes(AtOnce)),
            (after_both, after_input),
            "{builtin:?}"
        );
    }
}

#[test]
fn single_queue_lengthens_steps_by_known_factors() {
    let single = Channel::Single;
    let stretched = |builtin, ranks, microbatches, chunks| {
        let ideal = units(builtin, ranks, microbatches, chunks)
            .simulated
            .makespan;
        (
            over(builtin, ranks, microbatches, chunks, single)
                .simulated
                .makespan,
            ideal,
        )
    };
    let (slow, ideal) = stretched(Builtin::LoopedBfs, 8, 32, 4);
    assert!((slow / ideal - 2.46).abs() < 0.005, "{slow} {ideal}");
    assert_eq!(
        stretched(Builtin::Interleaved1F1B, 8, 16, 2),
        (172.0, 117.0)
    );
    assert_eq!(stretched(Builtin::DualPipeV, 8, 32, 2), (298.0, 206.0));
    for (ranks, microbatches) in [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32)] {
        let (slow, ideal) = stretched(Builtin::ZbvZeroBubble, ranks, microbatches, 2);
        assert!(
            slow <= ideal * 1.13,
            "{ranks} {microbatches}: {slow} {ideal}"
        );
    }
}

#[test]
fn queues_per_pair_or_direction_cost_nothing() {
    for builtin in Builtin::ALL {
        for (ranks, microbatches) in [(2, 4), (3, 6), (4, 8), (5, 15), (8, 16)] {
            for chunks in 1..4 {
                let Ok(schedule) = builtin.schedule(ranks, microbatches, chunks) else {
                    continue;
                };
                let costs = Costs::units(schedule.stages());
                let made = simulate_schedule(&schedule, &costs, InOrder, Channel::Tags).unwrap();
                for (channel, makespan) in made.channel_costs() {
                    let makespan = makespan.unwrap();
                    let ideal = made.simulated.makespan;
                    match channel {
                        Channel::Single => assert!(makespan >= ideal),
                        _ => assert_eq!(
                            makespan, ideal,
                            "{builtin:?} {ranks} {microbatches} {chunks} {channel}"
                        ),
                    }
                }
            }
        }
    }
}

#[test]
fn timeline_of_a_small_step_is_exact() {
    let schedule = Schedule::gpipe(2, 2).unwrap();
    let mut costs = Costs::units(2);
    costs.stage[0].send_forward = 0.5;
    let made = simulate_schedule(&schedule, &costs, AtOnce, Channel::Tags).unwrap();
    // 0F0 ends at 1, its transfer at 1.5, 1F0 at 2.5, 1F1 at 3.5, 1I0 at 4.5. After 1W0, 1I1 ends
    // at 6.5, 0I1 at 7.5, 0W1 at 8.5.
    assert_eq!(made.simulated.makespan, 8.5);
    let path: Vec<String> = made
        .simulated
        .critical_path()
        .into_iter()
        .map(|item| match item {
            Item::Node(node) => made.names.node(made.flow.nodes[node as usize].tag),
            Item::Send(transfer) | Item::Receive(transfer) => made
                .names
                .transfer(made.flow.transfers[transfer as usize].tag),
        })
        .collect();
    assert_eq!(
        path,
        [
            "0F0", "0F1", "0SEND_F1", "1F1", "1B0", "1B0", "1B1", "1SEND_B1", "0B1", "0B1"
        ]
    );
    let timeline = made.timeline("gpipe", "unit");
    assert_eq!((timeline.end, timeline.rows.len()), (8.5, 2));
    let row = &timeline.rows[0];
    assert_eq!((row.name.as_str(), row.process), ("rank 0", Some(0)));
    let bars: Vec<(&str, BarKind, f64, f64)> = row
        .bars
        .iter()
        .map(|bar| (bar.name.as_str(), bar.kind, bar.start, bar.end))
        .collect();
    assert_eq!(
        bars,
        [
            ("0F0", BarKind::Forward, 0.0, 1.0),
            ("0F1", BarKind::Forward, 1.0, 2.0),
            ("0B0", BarKind::Backward, 4.5, 6.5),
            ("0B1", BarKind::Backward, 6.5, 8.5)
        ]
    );
    assert_eq!(
        (row.bars[2].stage, row.bars[2].microbatch),
        (Some(0), Some(0))
    );
    let [gap] = &row.gaps[..] else {
        panic!("{:?}", row.gaps)
    };
    assert_eq!(
        (gap.start, gap.end, gap.waits_for.as_str()),
        (2.0, 4.5, "1B0 of rank 1")
    );
    assert_eq!(row.bars[2].waited_for.as_deref(), Some("1B0 of rank 1"));
    let moves: Vec<(&str, f64, f64)> = row
        .moves
        .iter()
        .map(|bar| (bar.name.as_str(), bar.start, bar.end))
        .collect();
    assert_eq!(moves, [("0SEND_F0", 1.0, 1.5), ("0SEND_F1", 2.0, 2.5)]);
    let memory: Vec<(f64, f64)> = row
        .memory
        .iter()
        .map(|point| (point.at, point.used))
        .collect();
    assert_eq!(
        memory,
        [(0.0, 0.0), (0.0, 1.0), (1.0, 2.0), (6.5, 1.0), (8.5, 0.0)]
    );
    assert_eq!(timeline.bubble(0.0, 8.5), made.simulated.bubble_share());
}

#[test]
fn gaps_name_the_operation_that_delays_a_message() {
    let single = Channel::Single;
    let made = over(Builtin::LoopedBfs, 4, 8, 2, single);
    let timeline = made.timeline("bfs", "unit");
    let held = |gap: &crate::timeline::TimelineGap| {
        gap.waits_for.contains("held up by") || gap.waits_for.contains("after")
    };
    assert!(timeline.rows.iter().flat_map(|row| &row.gaps).any(held));
}

#[test]
fn invalid_costs_and_deadlocks_are_reported() {
    let schedule = Schedule::gpipe(2, 2).unwrap();
    let told = |costs: &Costs| {
        simulate_schedule(&schedule, costs, AtOnce, Channel::Tags)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        told(&Costs::units(3)),
        "the costs are of 3 stages, the schedule has 2"
    );
    let mut costs = Costs::units(2);
    costs.stage[1].forward = f64::NAN;
    assert_eq!(
        told(&costs),
        "the cost NaN of stage 1 is not a finite, non-negative time"
    );
    let late = lower_late(Schedule::one_f_one_b(4, 8).unwrap().rows());
    let single = Channel::Single;
    let deadlock = simulate_lowered(&late.into(), &Costs::units(4), AtOnce, single).unwrap_err();
    assert!(
        matches!(&deadlock, SimulateError::Deadlock(deadlock) if !deadlock.cycle.is_empty()),
        "{deadlock}"
    );
}

/// Builds a flow. `lanes` has the process of each lane, and `posts` the posts of each process.
/// `nodes` are (lane, taken transfers), `transfers` are (sender, receiver, source node).
fn flow_of(
    lanes: &[u32],
    nodes: &[(u32, &[u32])],
    transfers: &[(u32, u32, u32)],
    posts: &[&[Post]],
) -> Flow {
    let mut flow = Flow {
        lanes: lanes.to_vec(),
        processes: posts.len() as u32,
        ..Flow::default()
    };
    for (lane, takes) in nodes {
        let takes_at = (flow.takes.len() as u32, takes.len() as u32);
        flow.nodes.push(Node {
            lane: *lane,
            needs: (0, 0),
            takes: takes_at,
            tag: 0,
        });
        flow.takes.extend_from_slice(takes);
    }
    let transfer = |(from, to, after): &(u32, u32, u32)| Transfer {
        from: *from,
        to: *to,
        after: *after,
        bytes: 0,
        tag: 0,
    };
    flow.transfers = transfers.iter().map(transfer).collect();
    flow.posts = posts.iter().map(|posts| posts.to_vec()).collect();
    flow
}

/// Names that show tags as numbers.
struct Nameless;

impl Names for Nameless {
    fn node(&self, tag: u32) -> String {
        tag.to_string()
    }

    fn transfer(&self, tag: u32) -> String {
        tag.to_string()
    }
}

/// The value of `Transfer::after` for data that exist from the beginning.
const FROM_THE_BEGINNING: u32 = u32::MAX;

#[test]
fn last_transfer_counts_though_no_node_takes_it() {
    use Post::{Receive, Send};
    let posts: [&[Post]; 2] = [&[Send(0), Send(1)], &[Receive(0), Receive(1)]];
    let transfers = [(0, 1, 0), (0, 1, FROM_THE_BEGINNING)];
    let flow = flow_of(&[0, 1], &[(0, &[]), (1, &[0])], &transfers, &posts);
    let times = ItemTimes {
        nodes: vec![2.0, 3.0],
        transfers: vec![1.0, 7.0],
    };
    let queued = simulate(&flow, &times, Channel::Single).unwrap();
    assert_eq!((queued.makespan, queued.lanes[1].last), (10.0, 6.0));
    assert_eq!(
        queued.critical_path(),
        [Item::Node(0), Item::Send(0), Item::Send(1)]
    );
    let timeline = queued.timeline(&flow, &Nameless, "", "unit");
    assert_eq!((timeline.end, timeline.rows[0].moves[1].end), (10.0, 10.0));
    // Over tags it leaves at once, and still ends last.
    let at_once = simulate(&flow, &times, Channel::Tags).unwrap();
    assert_eq!(
        (at_once.makespan, at_once.critical_path()),
        (7.0, vec![Item::Send(1)])
    );
}

#[test]
fn transfers_that_are_never_taken_are_a_deadlock() {
    use Post::{Receive, Send};
    let transfers = [(0, 1, FROM_THE_BEGINNING), (1, 0, FROM_THE_BEGINNING)];
    let sends_first = [[Send(0), Receive(1)], [Send(1), Receive(0)]];
    // The node ends all the same: only the transfers remain.
    let posts: [&[Post]; 2] = [&sends_first[0], &sends_first[1]];
    let flow = flow_of(&[0], &[(0, &[])], &transfers, &posts);
    let times = ItemTimes {
        nodes: vec![1.0],
        transfers: vec![1.0; 2],
    };
    assert!(simulate(&flow, &times, Channel::Tags).is_ok());
    assert_eq!(
        simulate(&flow, &times, Channel::Single).unwrap_err().undone,
        (0, 2)
    );
}

/// Returns the makespan over the channel `tags`, computed directly from the rules, in rounds until
/// nothing changes.
fn by_rounds(flow: &Flow, times: &ItemTimes) -> f64 {
    let mut ends = vec![f64::NAN; flow.nodes.len()];
    loop {
        let before = ends.iter().filter(|end| end.is_nan()).count();
        let mut lanes = vec![0.0; flow.lanes.len()];
        for (number, node) in flow.nodes.iter().enumerate() {
            let needs = flow
                .needs_of(number as u32)
                .iter()
                .map(|need| ends[*need as usize]);
            let takes = flow.takes_of(number as u32).iter().map(|taken| {
                let after = flow.transfers[*taken as usize].after;
                ends[after as usize] + times.transfers[*taken as usize]
            });
            // `max` would drop NaN, which marks unknown times.
            let start = needs
                .chain(takes)
                .fold(lanes[node.lane as usize], |latest: f64, at| {
                    if latest.is_nan() || at.is_nan() {
                        f64::NAN
                    } else {
                        latest.max(at)
                    }
                });
            ends[number] = start + times.nodes[number];
            lanes[node.lane as usize] = ends[number];
        }
        let left = ends.iter().filter(|end| end.is_nan()).count();
        assert!(left < before || left == 0);
        if left == 0 && before == 0 {
            return ends.into_iter().fold(0.0, f64::max);
        }
    }
}

/// Returns (start, duration) of an item of a critical path.
fn span_on_path(made: &SimulatedSchedule, item: Item) -> (f64, f64) {
    match item {
        Item::Node(node) => {
            let span = made.simulated.nodes[node as usize];
            (span.start, span.end - span.start)
        }
        Item::Send(transfer) => {
            let start = made.simulated.transfers[transfer as usize].start;
            (start, made.times.transfers[transfer as usize])
        }
        Item::Receive(transfer) => (made.simulated.transfers[transfer as usize].end, 0.0),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn bubbles_have_their_closed_forms(
        ranks in 1usize..7,
        rounds in 1usize..4,
        chunks in 1usize..4,
        costs in (1u32..20, 1u32..20, 1u32..20),
    ) {
        let (f, i, w) = (f64::from(costs.0), f64::from(costs.1), f64::from(costs.2));
        let skew = (ranks - 1) as f64;
        let microbatches = ranks * rounds;
        for (builtin, chunks, bubble) in [
            (Builtin::GPipe, 1, skew * (f + i + w)),
            (Builtin::OneFOneB, 1, skew * (f + i + w)),
            (Builtin::Eager1F1B, 1, skew * (f + i + w)),
            (Builtin::Interleaved1F1B, chunks, skew * (f + i + w)),
            (Builtin::LoopedBfs, chunks, skew * (f + i + w)),
            (Builtin::ZbH1, 1, skew * (f + i - f.min(i).min(w))),
        ] {
            let schedule = builtin.schedule(ranks, microbatches, chunks).unwrap();
            let costs = equal(f, i, w, schedule.stages());
            let made = simulate_schedule(&schedule, &costs, InOrder, Channel::Tags).unwrap();
            prop_assert_eq!(made.simulated.bubble(), bubble, "{:?}", builtin);
        }
    }

    #[test]
    fn makespan_follows_rules_and_equals_critical_path(
        which in 0usize..11,
        ranks in 1usize..5,
        rounds in 1usize..4,
        costs in prop::collection::vec((0u32..9, 0u32..9, 0u32..9, 0u32..5, 0u32..5), 16),
    ) {
        let builtin = Builtin::ALL[which];
        let schedule = builtin.schedule(ranks, ranks * rounds, builtin.default_chunks());
        prop_assume!(schedule.is_ok());
        let schedule = schedule.unwrap();
        let stage = |cost: &(u32, u32, u32, u32, u32)| StageCosts {
            forward: f64::from(cost.0),
            backward_input: f64::from(cost.1),
            backward_weight: f64::from(cost.2),
            send_forward: f64::from(cost.3),
            send_backward: f64::from(cost.4),
            ..StageCosts::default()
        };
        let stage = costs[..schedule.stages()].iter().map(stage).collect();
        let costs = Costs { stage, ..Costs::units(0) };
        let made = simulate_schedule(&schedule, &costs, AtOnce, Channel::Tags).unwrap();
        prop_assert_eq!(made.simulated.makespan, by_rounds(&made.flow, &made.times));
        let rows = lower(&schedule).unwrap();
        for channel in Channel::ALL {
            let found = simulate_lowered(&rows, &costs, AtOnce, channel).unwrap();
            prop_assert!(found.simulated.makespan >= made.simulated.makespan);
            let mut at = 0.0;
            for item in found.simulated.critical_path() {
                let begins_and_takes = span_on_path(&found, item);
                prop_assert_eq!(at, begins_and_takes.0, "{}: {:?}", channel, item);
                at += begins_and_takes.1;
            }
            prop_assert_eq!(at, found.simulated.makespan);
        }
    }
}
