//! Checks a schedule: reports all its faults, its memory and its transfers.

use super::{Budget, Channel, Deadlock, MemoryLedger, Names, Proof, RankPeak, check};
use crate::flow::{Flow, FlowError, Leaves, StepNames};
use crate::lower::{lower, lower_late};
use crate::schedule::{ActionPlaces, RowPlace, ScheduleFault};
use crate::{Action, ActionKind, Costs, Lowered, Schedule, ScheduleError};

/// The conditions that a schedule is checked against.
#[derive(Clone, Copy, Debug)]
pub struct CheckLimits<'a> {
    /// The channel over which the schedule transfers data.
    pub channel: Channel,
    /// The moment at which a rank can send a result. A runtime that sends in the order of the
    /// schedule needs [`Leaves::InOrder`], where a send may wait for an earlier one.
    pub leaves: Leaves,
    /// The costs of the stages. Only the numbers of bytes are used.
    pub costs: Option<&'a Costs>,
    /// The limit of the memory that a rank keeps; `None` for no limit.
    pub budget: Option<Budget>,
}

/// The result of checking a schedule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScheduleReport {
    /// All faults; empty if the schedule is fit to run.
    pub problems: Vec<Problem>,
    /// The proof that the schedule has no deadlock; `None` if it was not proved.
    pub proof: Option<Proof>,
    /// The peak memory of each rank, indexed by rank; empty if the rows are not a schedule.
    pub peaks: Vec<RankPeak>,
    /// The transfers between ranks, sorted by sending and receiving rank.
    pub links: Vec<LinkTraffic>,
}

/// The transfers from one rank to another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinkTraffic {
    /// The sending rank.
    pub from: u32,
    /// The receiving rank.
    pub to: u32,
    /// The number of transfers from `from` to `to`.
    pub transfers: u64,
    /// The sum of the transfers' bytes; 0 without costs.
    pub bytes: u64,
}

/// A fault in a schedule. Positions in rows are indices from 0.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Problem {
    /// There are no actions at all.
    Empty,
    /// An action is missing or misplaced.
    Fault(ScheduleFault),
    /// Sends and receives in the rows do not match the actions.
    Moves(FlowError),
    /// The schedule deadlocks.
    Deadlock(Deadlock),
    /// The schedule is invalid for another reason.
    Schedule(ScheduleError),
    /// The number of further faults, which are not listed.
    More(usize),
    /// A rank exceeds the memory budget.
    Budget {
        /// The rank that exceeds the budget.
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
        let line = match self {
            Self::Empty => "there is nothing in it".to_owned(),
            Self::Fault(fault) => fault.to_string(),
            Self::Moves(error) => error.to_string(),
            Self::Deadlock(deadlock) => return deadlock.lines(names),
            Self::Schedule(error) => error.to_string(),
            Self::More(count) => format!("and {count} more"),
            Self::Budget {
                rank,
                peak,
                budget: Budget::Activations(most),
                at,
            } => {
                format!("rank {rank} keeps {peak} activations at {at}; it may keep {most}")
            }
            Self::Budget {
                rank,
                peak,
                budget: Budget::Bytes(most),
                at,
            } => {
                format!("rank {rank} keeps {peak} bytes at {at}; it may keep {most}")
            }
        };
        vec![line]
    }
}

/// Checks a schedule over a channel and against a budget. A [`Schedule`] always has all actions in
/// a valid order.
pub fn check_schedule(schedule: &Schedule, limits: CheckLimits) -> ScheduleReport {
    let mut report = ScheduleReport::default();
    match lower(schedule) {
        Ok(rows) => report.prove(&rows, limits),
        // The halves of an overlapped pair may wait for each other; one after the other they
        // cannot.
        Err(_) => report.prove(&lower_late(schedule.rows()).into(), limits),
    }
    report
}

/// Checks rows that may not be a valid schedule; the report lists their faults. If the rows have no
/// transfers, those of [`lower`] are added.
pub fn check_lowered(rows: &Lowered, limits: CheckLimits) -> ScheduleReport {
    let (actions, pairs) = rows.actions();
    let mut report = ScheduleReport::default();
    if actions.iter().all(Vec::is_empty) {
        report.problems.push(Problem::Empty);
        return report;
    }

    let places = match ActionPlaces::new(&actions) {
        Ok(places) => places,
        Err(fault) => {
            report.problems.push(Problem::Fault(fault));
            return report;
        }
    };

    let faults = places.faults(&actions);
    if !faults.is_empty() {
        let more = faults.len().saturating_sub(NAMED);
        report
            .problems
            .extend(faults.into_iter().take(NAMED).map(Problem::Fault));
        report
            .problems
            .extend((more > 0).then_some(Problem::More(more)));
        report.circle(&actions, &places);
        return report;
    }

    if rows.has_moves() {
        report.prove(rows, limits);
        return report;
    }

    match Schedule::with_overlaps("", actions, pairs) {
        Ok(schedule) => check_schedule(&schedule, limits),
        Err(error) => {
            report.circle(&rows.actions().0, &places);
            if report.problems.is_empty() {
                report.problems.push(Problem::Schedule(error));
            }
            report
        }
    }
}

/// Maximum number of missing or misplaced actions that a report lists.
const NAMED: usize = 100;

impl ScheduleReport {
    /// Returns true if there are no faults and the schedule has a proof.
    pub fn is_fit(&self) -> bool {
        self.problems.is_empty() && self.proof.is_some()
    }

    /// Adds a problem if the ranks wait for each other over any channel. If an action appears
    /// twice, the first one counts. Missing actions are ignored.
    fn circle(&mut self, rows: &[Vec<Action>], places: &ActionPlaces) {
        let rows = rows.iter().enumerate().map(|(rank, row)| {
            let row = row.iter().enumerate();
            row.filter(|(place, action)| {
                places.of(**action)
                    == Some(RowPlace {
                        rank,
                        place: *place,
                    })
            })
            .map(|(_, action)| *action)
            .filter(|action| {
                // If a `B` has its parts beside it, only the `B` counts.
                let both = Action {
                    kind: ActionKind::Backward,
                    ..*action
                };
                matches!(action.kind, ActionKind::Forward | ActionKind::Backward)
                    || places.of(both).is_none()
            })
            .collect()
        });
        let rows: Vec<Vec<Action>> = rows.collect();

        if let Ok(flow) = Flow::of_lowered(&lower_late(&rows).into(), Leaves::AtOnce)
            && let Err(deadlock) = check(&flow, Channel::Tags)
            && !deadlock.cycle.is_empty()
        {
            self.problems.push(Problem::Deadlock(deadlock));
        }
    }

    fn prove(&mut self, rows: &Lowered, limits: CheckLimits) {
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

        let ledger = MemoryLedger::new(&flow, names, limits.costs);
        self.peaks = ledger.peaks(&flow);
        self.links = links(&flow);

        for (rank, peak) in self.peaks.iter().enumerate() {
            let (most, kept, tag) = match limits.budget {
                Some(Budget::Activations(most)) => (most, peak.activations, peak.activations_at),
                Some(Budget::Bytes(most)) => (most, peak.bytes, peak.bytes_at),
                None => continue,
            };
            if let (true, Some(at), Some(budget)) =
                (kept > most, names.step(tag).action(), limits.budget)
            {
                self.problems.push(Problem::Budget {
                    rank,
                    peak: kept,
                    budget,
                    at,
                });
            }
        }
    }
}

/// Returns the transfers of each pair of processes, sorted by sender and receiver.
fn links(flow: &Flow) -> Vec<LinkTraffic> {
    let mut pairs: Vec<(u32, u32, u64)> = flow
        .transfers
        .iter()
        .map(|transfer| (transfer.from, transfer.to, transfer.bytes))
        .collect();
    pairs.sort_unstable();

    let mut links: Vec<LinkTraffic> = Vec::new();
    for (from, to, bytes) in pairs {
        match links
            .last_mut()
            .filter(|link| (link.from, link.to) == (from, to))
        {
            Some(link) => {
                link.transfers += 1;
                link.bytes += bytes;
            }
            None => links.push(LinkTraffic {
                from,
                to,
                transfers: 1,
                bytes,
            }),
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builtin, Step, StepKind};

    const LIMITS: CheckLimits = CheckLimits {
        channel: Channel::Tags,
        leaves: Leaves::AtOnce,
        costs: None,
        budget: None,
    };

    fn steps(schedule: &Schedule) -> Vec<Vec<Step>> {
        schedule
            .rows()
            .iter()
            .map(|row| row.iter().map(|action| Step::of_action(*action)).collect())
            .collect()
    }

    fn lines(report: &ScheduleReport, microbatches: usize) -> Vec<String> {
        let names = StepNames::new(microbatches);
        report
            .problems
            .iter()
            .flat_map(|problem| problem.lines(&names))
            .collect()
    }

    #[test]
    fn impossible_pairs_and_huge_numbers_are_refused() {
        let of = |text: &str| {
            let text = crate::ScheduleText::parse(text, None).unwrap();
            check_lowered(&Lowered::of_text(&text), LIMITS)
        };
        let pair = of("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n");
        assert!(!pair.is_fit() && !pair.problems.is_empty(), "{pair:?}");
        for wild in ["4000000000F0\n", "4000000000F4000000000\n"] {
            let report = of(wild);
            assert!(
                matches!(
                    report.problems[..],
                    [Problem::Fault(ScheduleFault::Numbers { actions: 1, .. })]
                ),
                "{report:?}"
            );
        }
    }

    #[test]
    fn half_of_a_backward_pass_lacks_the_other_half() {
        for (text, lacks) in [
            ("0F0,0I0\n", ActionKind::BackwardWeight),
            ("0F0,0W0\n", ActionKind::BackwardInput),
        ] {
            let text = crate::ScheduleText::parse(text, None).unwrap();
            let report = check_lowered(&Lowered::of_text(&text), LIMITS);
            let action = Action {
                stage: 0,
                kind: lacks,
                microbatch: 0,
            };
            assert_eq!(
                report.problems,
                [Problem::Fault(ScheduleFault::Missing {
                    action,
                    rank: Some(0)
                })]
            );
        }
    }

    #[test]
    fn sends_in_order_deadlock_where_sends_at_once_do_not() {
        let text = "0F0,0B0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n";
        let rows = Lowered::of_text(&crate::ScheduleText::parse(text, None).unwrap());
        assert!(check_lowered(&rows, LIMITS).is_fit());
        let in_order = check_lowered(
            &rows,
            CheckLimits {
                leaves: Leaves::InOrder,
                ..LIMITS
            },
        );
        assert!(
            matches!(in_order.problems[..], [Problem::Deadlock(_)]),
            "{in_order:?}"
        );
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
        let step = |kind| Step {
            stage: 0,
            kind: StepKind::Compute(kind),
            microbatch: 0,
        };
        use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
        let report = check_lowered(
            &vec![vec![step(Forward), step(Backward), step(BackwardInput)]].into(),
            LIMITS,
        );
        assert_eq!(lines(&report, 1), ["0B0 already computes 0I0"]);
        let report = check_lowered(
            &vec![vec![step(Forward), step(BackwardWeight)]].into(),
            LIMITS,
        );
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
        let limits = CheckLimits {
            costs: Some(&costs),
            budget: Some(Budget::Bytes(250)),
            ..LIMITS
        };
        let report = check_schedule(&schedule, limits);
        // Three forward passes, and at the first backward pass the residuals of its weight
        // gradient.
        let bytes: Vec<u64> = report.peaks.iter().map(|peak| peak.bytes).collect();
        assert_eq!(bytes, [310, 210, 110]);
        assert_eq!(
            lines(&report, 6),
            ["rank 0 keeps 310 bytes at 0B0; it may keep 250"]
        );
        let link = |from, to, bytes| LinkTraffic {
            from,
            to,
            transfers: 6,
            bytes,
        };
        assert_eq!(
            report.links,
            [
                link(0, 1, 42),
                link(1, 0, 30),
                link(1, 2, 42),
                link(2, 1, 30)
            ]
        );
        let limits = CheckLimits {
            budget: Some(Budget::Activations(2)),
            ..LIMITS
        };
        let report = check_schedule(&schedule, limits);
        assert_eq!(
            lines(&report, 6),
            ["rank 0 keeps 3 activations at 0F2; it may keep 2"]
        );
    }

    #[test]
    fn weight_residuals_count_from_input_to_weight_gradient() {
        use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
        let schedule = Builtin::ZbH1.schedule(3, 9, 1).unwrap();
        let mut costs = Costs::units(3);
        for stage in &mut costs.stage {
            (stage.activation_bytes, stage.weight_residual_bytes) = (10, 100);
        }
        let report = check_schedule(
            &schedule,
            CheckLimits {
                costs: Some(&costs),
                ..LIMITS
            },
        );
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
        let [Problem::Deadlock(deadlock)] = &report.problems[..] else {
            panic!("{report:?}")
        };
        assert_eq!(deadlock.cycle.len(), 8);
    }
}
