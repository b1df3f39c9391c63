//! Checks that a schedule has each action once, on the right rank.

use super::error::ScheduleError;
use super::{Action, ActionKind};

/// Maximum number of problems that an error lists; further ones are only counted.
const NAMED: usize = 8;

/// A fault in the rows of a schedule. Positions in rows are indices from 0.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleFault {
    /// An action is missing.
    #[error("{action} is missing; stage {} is on {}", action.stage, rank_text(rank))]
    Missing {
        /// The missing action.
        action: Action,
        /// The rank that has the stage; `None` if no rank has it.
        rank: Option<usize>,
    },
    /// An action appears more than once.
    #[error(
        "{action} appears twice: {} and {}",
        place_text(first),
        place_text(other)
    )]
    Twice {
        /// The repeated action.
        action: Action,
        /// The position of the first occurrence.
        first: RowPlace,
        /// The position of the other occurrence.
        other: RowPlace,
    },
    /// An action is on another rank than the other actions of its stage.
    #[error(
        "{action} is on {}, but its stage is on rank {stage_on}",
        place_text(at)
    )]
    Elsewhere {
        /// The misplaced action.
        action: Action,
        /// The position of the action.
        at: RowPlace,
        /// The rank of the stage.
        stage_on: usize,
    },
    /// A gradient is computed twice: by a `B`, and by an `I` or a `W`.
    #[error("{both} already computes {part}")]
    Both {
        /// The `B`, which computes both gradients.
        both: Action,
        /// The `I` or `W`, which computes one of the gradients again.
        part: Action,
    },
    /// On one rank, an action comes before an action that it needs.
    #[error(
        "rank {rank} has {} at place {}, before {} at place {}, which it needs",
        action.action, action.place, needs.action, needs.place
    )]
    Order {
        /// The rank whose row is in the wrong order.
        rank: usize,
        /// The action that comes too early.
        action: PlacedAction,
        /// The action that comes later but is needed.
        needs: PlacedAction,
    },
    /// There are far fewer actions than the numbers of stages and microbatches require. Tables of
    /// that size would not fit into memory.
    #[error(
        "there are stages up to {} and microbatches up to {}, but only {actions} actions",
        stages.saturating_sub(1),
        microbatches.saturating_sub(1)
    )]
    Numbers {
        /// The highest stage, plus one.
        stages: usize,
        /// The highest microbatch, plus one.
        microbatches: usize,
        /// The number of actions in the rows.
        actions: usize,
    },
}

/// The position of an action in the rows of a schedule.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RowPlace {
    /// The rank that has the action in its row.
    pub rank: usize,
    /// The index in the rank's row.
    pub place: usize,
}

/// An action, and its index in its rank's row.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PlacedAction {
    /// The action at `place`.
    pub action: Action,
    /// The index in the row.
    pub place: usize,
}

fn rank_text(rank: &Option<usize>) -> String {
    rank.map_or("no rank".to_owned(), |rank| format!("rank {rank}"))
}

fn place_text(RowPlace { rank, place }: &RowPlace) -> String {
    format!("rank {rank}, place {place}")
}

/// Properties of a complete schedule, computed from its rows.
pub(super) struct CompleteSchedule {
    pub(super) microbatches: usize,
    pub(super) rank_of_stage: Vec<usize>,
    pub(super) has_backward: bool,
}

/// Checks that each overlapped pair consists of neighbouring forward and backward passes, and that
/// pairs share no action.
pub(super) fn check_overlaps(
    name: &str,
    rows: &[Vec<Action>],
    overlaps: &[Vec<usize>],
) -> Result<(), ScheduleError> {
    let mut problems = Vec::new();
    if overlaps.len() != rows.len() {
        problems.push(format!(
            "overlaps of {} ranks, but there are {}",
            overlaps.len(),
            rows.len()
        ));
    }

    for (rank, (row, pairs)) in rows.iter().zip(overlaps).enumerate() {
        let mut free = 0;
        for &at in pairs {
            let problem = match (row.get(at), row.get(at + 1)) {
                _ if at < free => Some("two pairs share an action, or are not in order".to_owned()),
                (Some(one), Some(other)) => {
                    let alike =
                        (one.kind == ActionKind::Forward) == (other.kind == ActionKind::Forward);
                    alike
                        .then(|| format!("{one} and {other} are not a forward and a backward pass"))
                }
                (Some(one), None) => Some(format!("there is nothing after {one}")),
                (None, _) => Some(format!("there is no position {at}")),
            };

            let place = format!("the overlapped pair of rank {rank} at position {at}");
            problems.extend(problem.map(|problem| format!("{place}: {problem}")));
            free = at.saturating_add(2);
        }
    }

    if problems.is_empty() {
        Ok(())
    } else {
        Err(refused(name, &problems))
    }
}

/// Checks that each action appears once and each stage is on one rank. Returns properties of the
/// schedule.
pub(super) fn check(name: &str, rows: &[Vec<Action>]) -> Result<CompleteSchedule, ScheduleError> {
    if rows.iter().all(Vec::is_empty) {
        return Err(ScheduleError::Empty {
            ranks: rows.len(),
            microbatches: 0,
        });
    }

    let places = ActionPlaces::new(rows).map_err(|fault| refused(name, &[fault]))?;
    let mut faults = places.faults(rows);
    // The global order explains these better.
    faults.retain(|fault| !matches!(fault, ScheduleFault::Order { .. }));
    if !faults.is_empty() {
        return Err(refused(name, &faults));
    }

    let has_backward = has_backward(rows);
    let rank_of_stage = places
        .rank_of_stage
        .into_iter()
        .map(Option::unwrap_or_default)
        .collect();
    Ok(CompleteSchedule {
        microbatches: places.microbatches,
        rank_of_stage,
        has_backward,
    })
}

/// Returns the error that lists the first of these problems and counts the others.
fn refused(schedule: &str, problems: &[impl ToString]) -> ScheduleError {
    let named: Vec<String> = problems
        .iter()
        .take(NAMED)
        .map(ToString::to_string)
        .collect();
    let more = problems.len() - named.len();
    ScheduleError::Actions {
        schedule: schedule.to_owned(),
        problems: named,
        more,
    }
}

fn has_backward(rows: &[Vec<Action>]) -> bool {
    rows.iter()
        .flatten()
        .any(|action| action.kind != ActionKind::Forward)
}

/// Returns the position of an action's first occurrence. Searches linearly, so it is for errors
/// only.
pub(super) fn place(rows: &[Vec<Action>], action: Action) -> Option<RowPlace> {
    let position = |row: &Vec<Action>| row.iter().position(|other| *other == action);
    rows.iter().enumerate().find_map(|(rank, row)| {
        let place = position(row)?;
        Some(RowPlace { rank, place })
    })
}

const KINDS: [ActionKind; 4] = [
    ActionKind::Forward,
    ActionKind::BackwardInput,
    ActionKind::BackwardWeight,
    ActionKind::Backward,
];

/// Marks an action that is not in the rows.
const NONE: u32 = u32::MAX;

/// The position of the first occurrence of each action.
pub(crate) struct ActionPlaces {
    stages: usize,
    microbatches: usize,
    /// The lowest rank that has each stage.
    rank_of_stage: Vec<Option<usize>>,
    /// Indices of first occurrences in the rows of the stages' ranks, indexed by stage, microbatch
    /// and kind.
    first: Vec<u32>,
}

impl ActionPlaces {
    /// Finds the first occurrences of all actions in `rows`. Fails if stage and microbatch numbers
    /// are far too large for the number of actions.
    pub(crate) fn new(rows: &[Vec<Action>]) -> Result<Self, ScheduleFault> {
        let actions = || rows.iter().flatten();
        let stages = actions()
            .map(|action| action.stage.saturating_add(1))
            .max()
            .unwrap_or(0);
        let microbatches = actions()
            .map(|action| action.microbatch.saturating_add(1))
            .max()
            .unwrap_or(0);

        let count: usize = rows.iter().map(Vec::len).sum();
        // A complete schedule has at least one action for each.
        let most = count.saturating_mul(4).saturating_add(1 << 16);
        let cells = stages
            .checked_mul(microbatches)
            .filter(|cells| *cells <= most);
        let cells = cells.ok_or(ScheduleFault::Numbers {
            stages,
            microbatches,
            actions: count,
        })?;
        let rank_of_stage = vec![None; stages];
        let first = vec![NONE; cells * KINDS.len()];

        let mut places = Self {
            stages,
            microbatches,
            rank_of_stage,
            first,
        };

        for (rank, row) in rows.iter().enumerate() {
            for (place, action) in row.iter().enumerate() {
                if *places.rank_of_stage[action.stage].get_or_insert(rank) == rank {
                    let at = places.at(*action);
                    places.first[at] = places.first[at].min(place as u32);
                }
            }
        }
        Ok(places)
    }

    fn at(&self, action: Action) -> usize {
        let kind = KINDS
            .iter()
            .position(|kind| *kind == action.kind)
            .unwrap_or_default();
        (action.stage * self.microbatches + action.microbatch) * KINDS.len() + kind
    }

    /// Returns the position of an action's first occurrence. `None` if the rank of its stage does
    /// not have the action.
    pub(crate) fn of(&self, action: Action) -> Option<RowPlace> {
        let place = self.first[self.at(action)];
        self.rank_of_stage[action.stage]
            .filter(|_| place != NONE)
            .map(|rank| RowPlace {
                rank,
                place: place as usize,
            })
    }

    /// Returns a fault for every action that is missing, repeated, or on another rank than its
    /// stage. Also returns one for every action that comes before an action of the same rank that
    /// it needs.
    pub(crate) fn faults(&self, rows: &[Vec<Action>]) -> Vec<ScheduleFault> {
        let mut faults = Vec::new();
        for (rank, row) in rows.iter().enumerate() {
            for (place, &action) in row.iter().enumerate() {
                let at = RowPlace { rank, place };
                let stage_on = self.rank_of_stage[action.stage];
                let first = self.of(action).unwrap_or(at);
                if let Some(stage_on) = stage_on.filter(|stage_on| *stage_on != rank) {
                    faults.push(ScheduleFault::Elsewhere {
                        action,
                        at,
                        stage_on,
                    });
                } else if first != at {
                    faults.push(ScheduleFault::Twice {
                        action,
                        first,
                        other: at,
                    });
                }
            }
        }

        let has_backward = has_backward(rows);
        for stage in 0..self.stages {
            for microbatch in 0..self.microbatches {
                self.add_faults_of(stage, microbatch, has_backward, &mut faults);
            }
        }
        faults
    }

    fn add_faults_of(
        &self,
        stage: usize,
        microbatch: usize,
        has_backward: bool,
        faults: &mut Vec<ScheduleFault>,
    ) {
        use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
        let of = |kind| Action {
            stage,
            kind,
            microbatch,
        };

        let [forward, input, weight, both] = KINDS.map(|kind| self.of(of(kind)));
        let rank = self.rank_of_stage[stage];
        let missing = |kind| ScheduleFault::Missing {
            action: of(kind),
            rank,
        };
        if forward.is_none() {
            faults.push(missing(Forward));
        }

        match (both, input, weight) {
            (None, None, None) if has_backward => faults.push(missing(Backward)),
            (None, None, Some(_)) => faults.push(missing(BackwardInput)),
            (None, Some(_), None) => faults.push(missing(BackwardWeight)),
            (Some(_), _, _) => {
                for (part, kind) in [(input, BackwardInput), (weight, BackwardWeight)] {
                    let both = ScheduleFault::Both {
                        both: of(Backward),
                        part: of(kind),
                    };
                    faults.extend(part.map(|_| both));
                }
            }
            _ => {}
        }

        let mut after = |first: Action, then: Action| {
            if let (Some(needs), Some(action)) = (self.of(first), self.of(then))
                && needs.rank == action.rank
                && needs.place > action.place
            {
                faults.push(ScheduleFault::Order {
                    rank: action.rank,
                    action: PlacedAction {
                        action: then,
                        place: action.place,
                    },
                    needs: PlacedAction {
                        action: first,
                        place: needs.place,
                    },
                });
            }
        };

        for input in [BackwardInput, Backward] {
            after(of(Forward), of(input));
        }
        after(of(BackwardInput), of(BackwardWeight));
        if stage > 0 {
            after(
                Action {
                    stage: stage - 1,
                    ..of(Forward)
                },
                of(Forward),
            );
            for first in [BackwardInput, Backward] {
                for then in [BackwardInput, Backward] {
                    after(
                        of(first),
                        Action {
                            stage: stage - 1,
                            ..of(then)
                        },
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Schedule;
    use super::ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
    use super::*;

    fn a(stage: usize, kind: ActionKind, microbatch: usize) -> Action {
        Action {
            stage,
            kind,
            microbatch,
        }
    }

    fn error(rows: Vec<Vec<Action>>) -> String {
        Schedule::new("x", rows).unwrap_err().to_string()
    }

    #[test]
    fn each_fault_is_reported_with_its_place() {
        let twice = error(vec![vec![
            a(0, Forward, 0),
            a(0, Backward, 0),
            a(0, Forward, 0),
        ]]);
        assert!(
            twice.contains("0F0 appears twice: rank 0, place 0 and rank 0, place 2"),
            "{twice}"
        );
        let both = error(vec![vec![
            a(0, Forward, 0),
            a(0, BackwardInput, 0),
            a(0, Backward, 0),
        ]]);
        assert!(both.contains("0B0 already computes 0I0"), "{both}");
        let half = error(vec![vec![a(0, Forward, 0), a(0, BackwardInput, 0)]]);
        assert!(
            half.contains("0W0 is missing; stage 0 is on rank 0"),
            "{half}"
        );
        let half = error(vec![vec![a(0, Forward, 0), a(0, BackwardWeight, 0)]]);
        assert!(
            half.contains("0I0 is missing; stage 0 is on rank 0"),
            "{half}"
        );
        let elsewhere = error(vec![
            vec![a(0, Forward, 0), a(1, Forward, 0), a(0, Backward, 0)],
            vec![a(1, Forward, 1), a(1, Backward, 1), a(1, Backward, 0)],
        ]);
        let expected = "1F1 is on rank 1, place 0, but its stage is on rank 0";
        assert!(
            elsewhere.contains(expected) && elsewhere.contains("0F1 is missing"),
            "{elsewhere}"
        );
    }

    #[test]
    fn all_faults_are_counted_and_the_first_are_listed() {
        // Stage 1 has its forward and backward passes for microbatch 19 only.
        let mut rows: Vec<Vec<Action>> = vec![Vec::new(), Vec::new()];
        for microbatch in 0..20 {
            rows[0].extend([a(0, Forward, microbatch), a(0, Backward, microbatch)]);
        }
        rows[1].extend([a(1, Forward, 19), a(1, Backward, 19)]);
        let Err(ScheduleError::Actions { problems, more, .. }) = Schedule::new("x", rows) else {
            panic!("38 actions are missing")
        };
        assert_eq!((problems.len(), more), (8, 30));
        assert!(problems[0].starts_with("1F0 is missing"), "{problems:?}");
        assert!(problems[1].starts_with("1B0 is missing"), "{problems:?}");
    }

    #[test]
    fn large_numbers_cost_no_memory() {
        let huge = usize::MAX;
        let far = error(vec![vec![a(huge, Forward, 0)]]);
        assert!(far.contains("but only 1 actions"), "{far}");
        let far = error(vec![vec![
            a(0, Forward, 0),
            a(0, Forward, huge),
            a(3, Backward, huge - 1),
        ]]);
        assert!(far.contains("but only 3 actions"), "{far}");
        assert!(matches!(
            Schedule::new("x", vec![Vec::new()]),
            Err(ScheduleError::Empty { ranks: 1, .. })
        ));
    }
}
