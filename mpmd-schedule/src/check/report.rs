//! Checks a schedule: reports all its faults, its memory and its transfers.

use super::{Budget, Channel, Deadlock, Ledger, Names, Proof, RankPeak, check};
use crate::flow::{Flow, FlowError, Leaves, StepNames};
use crate::lower::{lower, lower_late};
use crate::{Action, ActionKind, Costs, Lowered, Schedule, ScheduleError};

/// The conditions that a schedule is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// The channel of its transfers.
    pub channel: Channel,
    /// When a result is sent: as soon as it is there, or in the order of the schedule. A runtime
    /// that sends in order needs [`Leaves::InOrder`], where a send may wait for an earlier one.
    pub leaves: Leaves,
    /// The costs of the stages. Only their bytes are used.
    pub costs: Option<&'a Costs>,
    /// The limit of the memory that a rank keeps; `None` for no limit.
    pub budget: Option<Budget>,
}

/// The result of checking a schedule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// All faults; empty if the schedule is fit to run.
    pub problems: Vec<Problem>,
    /// The proof that the schedule has no deadlock; `None` if it was not proved.
    pub proof: Option<Proof>,
    /// The peak memory of each rank, indexed by rank; empty if the rows are not a schedule.
    pub peaks: Vec<RankPeak>,
    /// The transfers between ranks, sorted by sending and receiving rank.
    pub links: Vec<Link>,
}

/// The transfers from one rank to another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Link {
    /// The sending rank.
    pub from: u32,
    /// The receiving rank.
    pub to: u32,
    /// The number of transfers.
    pub transfers: u64,
    /// The sum of the transfers' bytes; 0 without costs.
    pub bytes: u64,
}

/// A fault in a schedule. Places in rows are from 0.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Problem {
    /// There are no actions at all.
    Empty,
    /// An action is missing.
    Missing {
        /// The missing action.
        action: Action,
        /// The rank of the stage; `None` if no rank has it.
        rank: Option<usize>,
    },
    /// An action appears more than once.
    Twice {
        /// The action.
        action: Action,
        /// (rank, place in the rank's row) of the first occurrence.
        first: (usize, usize),
        /// (rank, place in the rank's row) of the other occurrence.
        other: (usize, usize),
    },
    /// An action is on another rank than its stage.
    Elsewhere {
        /// The action.
        action: Action,
        /// (rank, place in the rank's row) of the action.
        at: (usize, usize),
        /// The rank of the stage.
        stage_on: usize,
    },
    /// A gradient is computed twice: by a `B`, and by an `I` or a `W`.
    Both {
        /// The `B`.
        both: Action,
        /// The `I` or `W`.
        part: Action,
    },
    /// On one rank, an action comes before an action that it needs.
    Order {
        /// The rank.
        rank: usize,
        /// (action that comes too early, its place in the row)
        action: (Action, usize),
        /// (action that it needs, place of that action in the row)
        needs: (Action, usize),
    },
    /// Explicit transfers do not match the actions.
    Moves(FlowError),
    /// The schedule deadlocks.
    Deadlock(Deadlock),
    /// The schedule is invalid for another reason.
    Schedule(ScheduleError),
    /// There are far fewer actions than the numbers of stages and microbatches require.
    Numbers {
        /// The highest stage, plus one.
        stages: usize,
        /// The highest microbatch, plus one.
        microbatches: usize,
        /// The number of actions.
        actions: usize,
    },
    /// The number of further faults, which are not listed.
    More(usize),
    /// A rank exceeds the memory budget.
    Budget {
        /// The rank.
        rank: usize,
        /// The peak of the rank's memory, in the unit of the budget.
        peak: u64,
        /// The exceeded budget.
        budget: Budget,
        /// The action that first reaches the peak.
        at: Action,
    },
}

impl Problem {
    /// Describes the fault in one or more lines of text.
    pub fn lines(&self, names: &dyn Names) -> Vec<String> {
        let place = |(rank, place): (usize, usize)| format!("rank {rank}, place {place}");
        let line = match self {
            Self::Empty => "there is nothing in it".to_owned(),
            Self::Missing { action, rank: Some(rank) } => {
                format!("{action} is missing; stage {} is on rank {rank}", action.stage)
            }
            Self::Missing { action, rank: None } => {
                format!("{action} is missing; stage {} is on no rank", action.stage)
            }
            Self::Twice { action, first, other } => {
                format!("{action} appears twice: {} and {}", place(*first), place(*other))
            }
            Self::Elsewhere { action, at, stage_on } => {
                format!("{action} is on {}, but its stage is on rank {stage_on}", place(*at))
            }
            Self::Both { both, part } => format!("{both} already computes {part}"),
            Self::Order { rank, action, needs } => format!(
                "rank {rank} has {} at place {}, before {} at place {}, which it needs",
                action.0, action.1, needs.0, needs.1
            ),
            Self::Moves(error) => error.to_string(),
            Self::Deadlock(deadlock) => return deadlock.lines(names),
            Self::Schedule(error) => error.to_string(),
            Self::Numbers { stages, microbatches, actions } => format!(
                "there are stages up to {} and microbatches up to {}, but only {actions} actions",
                stages.saturating_sub(1),
                microbatches.saturating_sub(1)
            ),
            Self::More(count) => format!("and {count} more"),
            Self::Budget { rank, peak, budget: Budget::Activations(most), at } => {
                format!("rank {rank} keeps {peak} activations at {at}; it may keep {most}")
            }
            Self::Budget { rank, peak, budget: Budget::Bytes(most), at } => {
                format!("rank {rank} keeps {peak} bytes at {at}; it may keep {most}")
            }
        };
        vec![line]
    }
}

/// Checks a schedule over a channel and against a budget. Its actions are known to be complete and
/// in order.
pub fn check_schedule(schedule: &Schedule, limits: Limits) -> Report {
    let mut report = Report::default();
    match lower(schedule) {
        Ok(rows) => report.prove(&rows, limits),
        // The halves of an overlapped pair may wait for each other; one after the other they
        // cannot.
        Err(_) => report.prove(&lower_late(schedule.rows()).into(), limits),
    }
    report
}

/// Checks rows that may not be a valid schedule; faults are listed in the report. If the rows have
/// no transfers, those of [`lower`] are added.
pub fn check_lowered(rows: &Lowered, limits: Limits) -> Report {
    let (actions, pairs) = rows.actions();
    let mut report = Report::default();
    if let Some(problem) = numbers(&actions) {
        report.problems.push(problem);
        return report;
    }
    report.whole(&actions);
    if !report.problems.is_empty() {
        let more = report.problems.len().saturating_sub(NAMED);
        report.problems.truncate(NAMED);
        if more > 0 {
            report.problems.push(Problem::More(more));
        }
        report.circle(&actions);
        return report;
    }
    if rows.has_moves() {
        report.prove(rows, limits);
        return report;
    }
    match Schedule::with_overlaps("", actions, pairs) {
        Ok(schedule) => check_schedule(&schedule, limits),
        Err(error) => {
            report.circle(&rows.actions().0);
            if report.problems.is_empty() {
                report.problems.push(Problem::Schedule(error));
            }
            report
        }
    }
}

/// The limit for the number of missing or misplaced actions that a report lists.
const NAMED: usize = 100;

/// Returns a fault if stage and microbatch numbers are far too large for the number of actions.
/// Such a schedule cannot be right, and tables for it would not fit into memory.
fn numbers(rows: &[Vec<Action>]) -> Option<Problem> {
    let actions = || rows.iter().flatten();
    let stages = actions().map(|action| action.stage.saturating_add(1)).max().unwrap_or(0);
    let microbatches =
        actions().map(|action| action.microbatch.saturating_add(1)).max().unwrap_or(0);
    let count: usize = rows.iter().map(Vec::len).sum();
    // A complete schedule has at least one action for each.
    let most = count.saturating_mul(4).saturating_add(1 << 16);
    let fits = stages.checked_mul(microbatches).is_some_and(|needed| needed <= most);
    (!fits).then_some(Problem::Numbers { stages, microbatches, actions: count })
}

impl Report {
    /// Returns true if there are no faults and the schedule has a proof.
    pub fn is_fit(&self) -> bool {
        self.problems.is_empty() && self.proof.is_some()
    }

    /// Adds a problem for every action that is missing, or appears twice. Does the same for actions
    /// on another rank than their stage, and for those before an action of their rank that they
    /// need.
    fn whole(&mut self, rows: &[Vec<Action>]) {
        let places = Places::new(rows);
        if places.stages == 0 {
            self.problems.push(Problem::Empty);
            return;
        }
        for (rank, row) in rows.iter().enumerate() {
            for (place, action) in row.iter().enumerate() {
                let stage_on = places.rank_of_stage[action.stage].unwrap_or(rank);
                let first = places.of(*action).unwrap_or((rank, place));
                if stage_on != rank {
                    self.problems.push(Problem::Elsewhere {
                        action: *action,
                        at: (rank, place),
                        stage_on,
                    });
                } else if first != (rank, place) {
                    self.problems.push(Problem::Twice {
                        action: *action,
                        first,
                        other: (rank, place),
                    });
                }
            }
        }
        let has_backward = rows.iter().flatten().any(|action| action.kind != ActionKind::Forward);
        for stage in 0..places.stages {
            for microbatch in 0..places.microbatches {
                self.whole_microbatch(&places, stage, microbatch, has_backward);
            }
        }
    }

    fn whole_microbatch(
        &mut self,
        places: &Places,
        stage: usize,
        microbatch: usize,
        has_backward: bool,
    ) {
        let of = |kind| Action { stage, kind, microbatch };
        let [forward, input, weight, both] = KINDS.map(|kind| places.of(of(kind)));
        let rank = places.rank_of_stage[stage];
        let missing = |kind| Problem::Missing { action: of(kind), rank };
        use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
        if forward.is_none() {
            self.problems.push(missing(Forward));
        }
        match (both, input, weight) {
            (None, None, None) if has_backward => self.problems.push(missing(Backward)),
            (None, None, Some(_)) => self.problems.push(missing(BackwardInput)),
            (None, Some(_), None) => self.problems.push(missing(BackwardWeight)),
            (Some(_), _, _) => {
                for (part, kind) in [(input, BackwardInput), (weight, BackwardWeight)] {
                    if part.is_some() {
                        self.problems.push(Problem::Both { both: of(Backward), part: of(kind) });
                    }
                }
            }
            _ => {}
        }
        let mut after = |first: Action, then: Action| {
            if let (Some(needs), Some(action)) = (places.of(first), places.of(then))
                && needs.0 == action.0
                && needs.1 > action.1
            {
                let (action, needs) = ((then, action.1), (first, needs.1));
                self.problems.push(Problem::Order {
                    rank: places.of(then).unwrap_or_default().0,
                    action,
                    needs,
                });
            }
        };
        for input in [BackwardInput, Backward] {
            after(of(Forward), of(input));
        }
        after(of(BackwardInput), of(BackwardWeight));
        if stage > 0 {
            after(Action { stage: stage - 1, ..of(Forward) }, of(Forward));
            for (first, then) in [
                (BackwardInput, BackwardInput),
                (BackwardInput, Backward),
                (Backward, BackwardInput),
                (Backward, Backward),
            ] {
                after(of(first), Action { stage: stage - 1, ..of(then) });
            }
        }
    }

    /// Adds a problem if ranks wait for each other over any channel. If an action appears twice,
    /// the first one counts. A missing action is not waited for.
    fn circle(&mut self, rows: &[Vec<Action>]) {
        let places = Places::new(rows);
        let first = |(rank, row): (usize, &Vec<Action>)| {
            let row = row.iter().enumerate();
            row.filter(|(place, action)| places.of(**action) == Some((rank, *place)))
                .map(|(_, action)| *action)
                .filter(|action| {
                    // If a `B` has its parts beside it, only the `B` counts.
                    let both = Action { kind: ActionKind::Backward, ..*action };
                    matches!(action.kind, ActionKind::Forward | ActionKind::Backward)
                        || places.of(both).is_none()
                })
                .collect()
        };
        let rows: Vec<Vec<Action>> = rows.iter().enumerate().map(first).collect();
        if let Ok(flow) = Flow::of_lowered(&lower_late(&rows).into(), Leaves::AtOnce)
            && let Err(deadlock) = check(&flow, Channel::TAGS)
            && !deadlock.cycle.is_empty()
        {
            self.problems.push(Problem::Deadlock(deadlock));
        }
    }

    fn prove(&mut self, rows: &Lowered, limits: Limits) {
        let mut flow = match Flow::of_lowered(rows, Leaves::AtOnce) {
            Ok(flow) => flow,
            Err(error) => return self.problems.push(Problem::Moves(error)),
        };
        let names = StepNames::of_lowered(&rows.steps);
        if let Some(costs) = limits.costs {
            names.weigh(&mut flow, costs);
        }
        let proof = match limits.leaves {
            Leaves::AtOnce => check(&flow, limits.channel),
            leaves => match Flow::of_lowered(rows, leaves) {
                Ok(flow) => check(&flow, limits.channel),
                Err(error) => return self.problems.push(Problem::Moves(error)),
            },
        };
        match proof {
            Ok(proof) => self.proof = Some(proof),
            Err(deadlock) => self.problems.push(Problem::Deadlock(deadlock)),
        }
        let ledger = Ledger::new(&flow, names, limits.costs);
        self.peaks = ledger.peaks(&flow);
        self.links = links(&flow);
        for (rank, peak) in self.peaks.iter().enumerate() {
            let (most, kept, tag) = match limits.budget {
                Some(Budget::Activations(most)) => (most, peak.activations, peak.at.0),
                Some(Budget::Bytes(most)) => (most, peak.bytes, peak.at.1),
                None => continue,
            };
            if let (true, Some(at), Some(budget)) =
                (kept > most, names.step(tag).action(), limits.budget)
            {
                self.problems.push(Problem::Budget { rank, peak: kept, budget, at });
            }
        }
    }
}

/// Returns the transfers of each pair of processes, sorted by sender and receiver.
fn links(flow: &Flow) -> Vec<Link> {
    let mut pairs: Vec<(u32, u32, u64)> = flow
        .transfers
        .iter()
        .map(|transfer| (transfer.from, transfer.to, transfer.bytes))
        .collect();
    pairs.sort_unstable();
    let mut links: Vec<Link> = Vec::new();
    for (from, to, bytes) in pairs {
        match links.last_mut().filter(|link| (link.from, link.to) == (from, to)) {
            Some(link) => {
                link.transfers += 1;
                link.bytes += bytes;
            }
            None => links.push(Link { from, to, transfers: 1, bytes }),
        }
    }
    links
}

const KINDS: [ActionKind; 4] = [
    ActionKind::Forward,
    ActionKind::BackwardInput,
    ActionKind::BackwardWeight,
    ActionKind::Backward,
];

/// The first place of each action.
struct Places {
    stages: usize,
    microbatches: usize,
    /// The first rank, in order of ranks, that has the stage.
    rank_of_stage: Vec<Option<usize>>,
    /// Indexed by stage, microbatch and kind.
    first: Vec<Option<(u32, u32)>>,
}

impl Places {
    fn new(rows: &[Vec<Action>]) -> Self {
        let actions = || rows.iter().flatten();
        let stages = actions().map(|action| action.stage + 1).max().unwrap_or(0);
        let microbatches = actions().map(|action| action.microbatch + 1).max().unwrap_or(0);
        let mut places = Self {
            stages,
            microbatches,
            rank_of_stage: vec![None; stages],
            first: vec![None; stages * microbatches * KINDS.len()],
        };
        for (rank, row) in rows.iter().enumerate() {
            for (place, action) in row.iter().enumerate() {
                if *places.rank_of_stage[action.stage].get_or_insert(rank) == rank {
                    let at = places.at(*action);
                    places.first[at].get_or_insert((rank as u32, place as u32));
                }
            }
        }
        places
    }

    fn at(&self, action: Action) -> usize {
        let kind = KINDS.iter().position(|kind| *kind == action.kind).unwrap_or_default();
        (action.stage * self.microbatches + action.microbatch) * KINDS.len() + kind
    }

    /// Returns (rank, place) of the first occurrence of an action; `None` if there is none on the
    /// rank of its stage.
    fn of(&self, action: Action) -> Option<(usize, usize)> {
        self.first[self.at(action)].map(|(rank, place)| (rank as usize, place as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builtin, Step, StepKind};

    const LIMITS: Limits =
        Limits { channel: Channel::TAGS, leaves: Leaves::AtOnce, costs: None, budget: None };

    fn steps(schedule: &Schedule) -> Vec<Vec<Step>> {
        schedule
            .rows()
            .iter()
            .map(|row| row.iter().map(|action| Step::of_action(*action)).collect())
            .collect()
    }

    fn lines(report: &Report, microbatches: usize) -> Vec<String> {
        let names = StepNames::new(microbatches);
        report.problems.iter().flat_map(|problem| problem.lines(&names)).collect()
    }

    #[test]
    fn impossible_pairs_and_huge_numbers_are_refused() {
        let of = |text: &str| {
            let text = crate::Text::parse(text, None).unwrap();
            check_lowered(&Lowered::of_text(&text), LIMITS)
        };
        let pair = of("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n");
        assert!(!pair.is_fit() && !pair.problems.is_empty(), "{pair:?}");
        for wild in ["4000000000F0\n", "4000000000F4000000000\n"] {
            let report = of(wild);
            assert!(
                matches!(report.problems[..], [Problem::Numbers { actions: 1, .. }]),
                "{report:?}"
            );
        }
    }

    #[test]
    fn half_of_a_backward_pass_lacks_the_other_half() {
        for (text, lacks) in
            [("0F0,0I0\n", ActionKind::BackwardWeight), ("0F0,0W0\n", ActionKind::BackwardInput)]
        {
            let text = crate::Text::parse(text, None).unwrap();
            let report = check_lowered(&Lowered::of_text(&text), LIMITS);
            let action = Action { stage: 0, kind: lacks, microbatch: 0 };
            assert_eq!(report.problems, [Problem::Missing { action, rank: Some(0) }]);
        }
    }

    #[test]
    fn sends_in_order_deadlock_where_sends_at_once_do_not() {
        let text = "0F0,0B0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n";
        let rows = Lowered::of_text(&crate::Text::parse(text, None).unwrap());
        assert!(check_lowered(&rows, LIMITS).is_fit());
        let in_order = check_lowered(&rows, Limits { leaves: Leaves::InOrder, ..LIMITS });
        assert!(matches!(in_order.problems[..], [Problem::Deadlock(_)]), "{in_order:?}");
    }

    #[test]
    fn all_faults_are_reported_with_places() {
        let mut rows = steps(&Schedule::gpipe(2, 3).unwrap());
        // 0F0 0F1 0F2 0B0 0B1 0B2, and the same for stage 1.
        rows[0].swap(0, 3);
        rows[0].remove(4);
        let twice = rows[1][1];
        rows[1].push(twice);
        let mut lost = rows[1][2];
        lost.stage = 0;
        rows[1].push(lost);
        let report = check_lowered(&rows.into(), LIMITS);
        assert_eq!(
            lines(&report, 3)[..4],
            [
                "1F1 appears twice: rank 1, place 1 and rank 1, place 6",
                "0F2 is on rank 1, place 7, but its stage is on rank 0",
                "rank 0 has 0B0 at place 0, before 0F0 at place 3, which it needs",
                "0B1 is missing; stage 0 is on rank 0",
            ]
        );
        // The order is also a cycle within one rank.
        let Some(Problem::Deadlock(deadlock)) = report.problems.last() else {
            panic!("{report:?}")
        };
        assert_eq!(deadlock.cycle.len(), 2, "{:?}", lines(&report, 3));
    }

    #[test]
    fn split_gradients_beside_b_or_incomplete_are_reported() {
        let step = |kind| Step { stage: 0, kind: StepKind::Compute(kind), microbatch: 0 };
        use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
        let report = check_lowered(
            &vec![vec![step(Forward), step(Backward), step(BackwardInput)]].into(),
            LIMITS,
        );
        assert_eq!(lines(&report, 1), ["0B0 already computes 0I0"]);
        let report = check_lowered(&vec![vec![step(Forward), step(BackwardWeight)]].into(), LIMITS);
        assert_eq!(lines(&report, 1), ["0I0 is missing; stage 0 is on rank 0"]);
        assert_eq!(
            lines(&check_lowered(&vec![vec![]].into(), LIMITS), 1),
            ["there is nothing in it"]
        );
        assert!(check_lowered(&vec![vec![step(Forward)]].into(), LIMITS).is_fit());
    }

    #[test]
    fn builtin_schedules_have_known_peaks() {
        // Four ranks, eight microbatches: activations in chunks, by rank.
        for (builtin, peaks) in [
            (Builtin::GPipe, [8, 8, 8, 8]),
            (Builtin::OneFOneB, [4, 3, 2, 1]),
            (Builtin::Interleaved1F1B, [11, 9, 7, 5]),
            (Builtin::LoopedBfs, [16, 16, 16, 16]),
            (Builtin::ZbH1, [4, 4, 4, 4]),
            (Builtin::InterleavedZeroBubble, [8, 8, 8, 8]),
            (Builtin::ZbvZeroBubble, [8, 8, 8, 8]),
            (Builtin::DualPipeV, [9, 9, 9, 9]),
            (Builtin::ForwardOnly, [1, 1, 1, 1]),
        ] {
            let schedule = builtin.schedule(4, 8, builtin.default_chunks()).unwrap();
            let report = check_schedule(&schedule, LIMITS);
            let found: Vec<u64> = report.peaks.iter().map(|peak| peak.activations).collect();
            assert_eq!(found, peaks, "{builtin:?}");
            assert!(report.is_fit() && report.proof.is_some());
        }
    }

    #[test]
    fn budgets_hold_and_links_are_counted() {
        let schedule = Schedule::one_f_one_b(3, 6).unwrap();
        let mut costs = Costs::units(3);
        for stage in &mut costs.stage {
            (stage.activation_bytes, stage.weight_residual_bytes) = (100, 10);
            (stage.output_bytes, stage.gradient_bytes) = (7, 5);
        }
        let limits = Limits { costs: Some(&costs), budget: Some(Budget::Bytes(250)), ..LIMITS };
        let report = check_schedule(&schedule, limits);
        // Three forward passes, and at the first backward pass the residuals of its weight
        // gradient.
        let bytes: Vec<u64> = report.peaks.iter().map(|peak| peak.bytes).collect();
        assert_eq!(bytes, [310, 210, 110]);
        assert_eq!(lines(&report, 6), ["rank 0 keeps 310 bytes at 0B0; it may keep 250"]);
        let link = |from, to, bytes| Link { from, to, transfers: 6, bytes };
        assert_eq!(report.links, [link(0, 1, 42), link(1, 0, 30), link(1, 2, 42), link(2, 1, 30)]);
        let limits = Limits { budget: Some(Budget::Activations(2)), ..LIMITS };
        let report = check_schedule(&schedule, limits);
        assert_eq!(lines(&report, 6), ["rank 0 keeps 3 activations at 0F2; it may keep 2"]);
    }

    #[test]
    fn weight_residuals_count_from_input_to_weight_gradient() {
        use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
        let schedule = Builtin::ZbH1.schedule(3, 9, 1).unwrap();
        let mut costs = Costs::units(3);
        for stage in &mut costs.stage {
            (stage.activation_bytes, stage.weight_residual_bytes) = (10, 100);
        }
        let report = check_schedule(&schedule, Limits { costs: Some(&costs), ..LIMITS });
        for (row, peak) in steps(&schedule).iter().zip(&report.peaks) {
            let (mut kept, mut most) = (0u64, 0);
            for step in row {
                let (more, less) = match step.kind {
                    StepKind::Compute(Forward) => (10, 0),
                    StepKind::Compute(BackwardInput) => (100, 10),
                    StepKind::Compute(BackwardWeight) => (0, 100),
                    StepKind::Compute(Backward) => (100, 110),
                    _ => (0, 0),
                };
                kept += more;
                most = most.max(kept);
                kept -= less;
            }
            assert_eq!((peak.bytes, kept), (most, 0));
        }
    }

    #[test]
    fn cycle_over_ranks_is_found_without_transfers() {
        let mut rows = steps(&Schedule::gpipe(2, 2).unwrap());
        // 0F0 0B0 0F1 0B1 beside 1F0 1F1 1B0 1B1.
        rows[0].swap(1, 2);
        let report = check_lowered(&rows.into(), LIMITS);
        let [Problem::Deadlock(deadlock)] = &report.problems[..] else { panic!("{report:?}") };
        assert_eq!(deadlock.cycle.len(), 8);
    }
}
