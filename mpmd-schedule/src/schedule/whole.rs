//! Checks that a schedule has each action once, on the right rank.

use std::collections::BTreeMap;

use super::error::ScheduleError;
use super::{Action, ActionKind};

/// The number of problems that an error lists; further ones are only counted.
const NAMED: usize = 8;

/// Properties of a valid schedule, computed from its rows.
pub(super) struct Whole {
    pub(super) microbatches: usize,
    pub(super) rank_of_stage: Vec<usize>,
    pub(super) has_backward: bool,
}

/// Checks that each overlapped pair has a forward and a backward pass next to each other, and that
/// pairs share no action.
pub(super) fn check_overlaps(
    name: &str,
    rows: &[Vec<Action>],
    overlaps: &[Vec<usize>],
) -> Result<(), ScheduleError> {
    let mut problems = Problems::default();
    if overlaps.len() != rows.len() {
        problems
            .add(|| format!("overlaps of {} ranks, but there are {}", overlaps.len(), rows.len()));
    }
    for (rank, (row, pairs)) in rows.iter().zip(overlaps).enumerate() {
        let mut free = 0;
        for &at in pairs {
            let place = format!("the overlapped pair of rank {rank} at position {at}");
            match (row.get(at), row.get(at + 1)) {
                _ if at < free => problems
                    .add(|| format!("{place}: two pairs share an action, or are not in order")),
                (Some(one), Some(other)) => {
                    if (one.kind == ActionKind::Forward) == (other.kind == ActionKind::Forward) {
                        problems.add(|| {
                            format!(
                                "{place}: {one} and {other} are not a forward and a backward pass"
                            )
                        });
                    }
                }
                (Some(one), None) => {
                    problems.add(|| format!("{place}: there is nothing after {one}"))
                }
                (None, _) => problems.add(|| format!("{place}: there is no position {at}")),
            }
            free = at.saturating_add(2);
        }
    }
    problems.end(name)
}

/// Checks that each action appears once and each stage is on one rank. Returns the properties of
/// the rows.
pub(super) fn check(name: &str, rows: &[Vec<Action>]) -> Result<Whole, ScheduleError> {
    let actions = || rows.iter().flatten();
    let stages = actions().map(|action| action.stage.saturating_add(1)).max().unwrap_or(0);
    let microbatches =
        actions().map(|action| action.microbatch.saturating_add(1)).max().unwrap_or(0);
    if stages == 0 {
        return Err(ScheduleError::Empty { ranks: rows.len(), microbatches });
    }
    let total: usize = rows.iter().map(Vec::len).sum();
    if stages.checked_mul(microbatches).is_none_or(|passes| passes > total) {
        // Each stage and microbatch needs a forward pass. Without this check, a single large number
        // would cost that much memory.
        return Err(too_few(name, rows, stages, microbatches));
    }
    let mut problems = Problems::default();
    let rank_of_stage = homes(rows, stages);
    let mut seen = vec![0_u8; stages * microbatches];
    for (rank, row) in rows.iter().enumerate() {
        for (position, action) in row.iter().enumerate() {
            let home = rank_of_stage[action.stage];
            if home != rank {
                problems.add(|| {
                    format!(
                        "{action} is on rank {rank}, position {position}, but stage {} is on rank \
                         {home}",
                        action.stage
                    )
                });
            }
            let cell = &mut seen[action.stage * microbatches + action.microbatch];
            if *cell & bit(action.kind) != 0 {
                problems.add(|| {
                    let first = place(rows, *action).unwrap_or((rank, position));
                    format!(
                        "{action} appears twice: on {}, and on {}",
                        at(first),
                        at((rank, position))
                    )
                });
            }
            *cell |= bit(action.kind);
        }
    }
    let has_backward = seen.iter().any(|bits| bits & !FORWARD != 0);
    for (cell, bits) in seen.iter().enumerate() {
        let (stage, microbatch) = (cell / microbatches, cell % microbatches);
        let of = |kind| Action { stage, kind, microbatch };
        let on = |kind| place(rows, of(kind)).map(at).unwrap_or_default();
        let missing = |kind| {
            format!("{} is missing (stage {stage} is on rank {})", of(kind), rank_of_stage[stage])
        };
        if bits & FORWARD == 0 {
            problems.add(|| missing(ActionKind::Forward));
        }
        match (bits & BOTH != 0, bits & INPUT != 0, bits & WEIGHT != 0) {
            (true, false, false) | (false, true, true) => {}
            (false, false, false) if !has_backward => {}
            (false, false, false) => problems.add(|| missing(ActionKind::Backward)),
            (false, true, false) => problems.add(|| {
                let (there, place) = (of(ActionKind::BackwardInput), on(ActionKind::BackwardInput));
                format!("{} is missing beside {there} on {place}", of(ActionKind::BackwardWeight))
            }),
            (false, false, true) => problems.add(|| {
                let (there, place) =
                    (of(ActionKind::BackwardWeight), on(ActionKind::BackwardWeight));
                format!("{} is missing beside {there} on {place}", of(ActionKind::BackwardInput))
            }),
            (true, input, _) => problems.add(|| {
                let other =
                    if input { ActionKind::BackwardInput } else { ActionKind::BackwardWeight };
                let (both, one) = (of(ActionKind::Backward), of(other));
                format!(
                    "{both} on {} already computes {one} on {}",
                    on(ActionKind::Backward),
                    on(other)
                )
            }),
        }
    }
    problems.end(name)?;
    Ok(Whole { microbatches, rank_of_stage, has_backward })
}

const FORWARD: u8 = 1;
const INPUT: u8 = 2;
const WEIGHT: u8 = 4;
const BOTH: u8 = 8;

fn bit(kind: ActionKind) -> u8 {
    match kind {
        ActionKind::Forward => FORWARD,
        ActionKind::BackwardInput => INPUT,
        ActionKind::BackwardWeight => WEIGHT,
        ActionKind::Backward => BOTH,
    }
}

/// Returns the rank of each stage: the rank with most of its actions. A stage without actions is on
/// rank 0, and all its actions are missing.
fn homes(rows: &[Vec<Action>], stages: usize) -> Vec<usize> {
    let mut homes = vec![None; stages];
    let mut several = false;
    for (rank, row) in rows.iter().enumerate() {
        for action in row {
            several |= *homes[action.stage].get_or_insert(rank) != rank;
        }
    }
    if several {
        let mut counts: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for (rank, row) in rows.iter().enumerate() {
            for action in row {
                *counts.entry((action.stage, rank)).or_default() += 1;
            }
        }
        let mut most = vec![0; stages];
        for ((stage, rank), count) in counts {
            if count > most[stage] {
                (most[stage], homes[stage]) = (count, Some(rank));
            }
        }
    }
    homes.into_iter().map(Option::unwrap_or_default).collect()
}

/// Returns the first (rank, position) of an action. It is a linear search, for errors only.
pub(super) fn place(rows: &[Vec<Action>], action: Action) -> Option<(usize, usize)> {
    let position = |row: &Vec<Action>| row.iter().position(|other| *other == action);
    rows.iter().enumerate().find_map(|(rank, row)| Some((rank, position(row)?)))
}

fn at((rank, position): (usize, usize)) -> String {
    format!("rank {rank}, position {position}")
}

/// Returns the error for fewer actions than forward passes, without allocating a table of all
/// passes.
fn too_few(name: &str, rows: &[Vec<Action>], stages: usize, microbatches: usize) -> ScheduleError {
    let forward = |action: &&Action| action.kind == ActionKind::Forward;
    let mut there: Vec<(usize, usize)> = rows
        .iter()
        .flatten()
        .filter(forward)
        .map(|action| (action.stage, action.microbatch))
        .collect();
    there.sort_unstable();
    there.dedup();
    let mut there_next = there.iter().copied().peekable();
    let missing = (0..stages)
        .flat_map(|stage| (0..microbatches).map(move |microbatch| (stage, microbatch)))
        .filter(|pass| there_next.next_if_eq(pass).is_none());
    let problems = missing.take(NAMED).map(|(stage, microbatch)| {
        let action = Action { stage, kind: ActionKind::Forward, microbatch };
        format!("{action} is missing, of {stages} stages and {microbatches} microbatches")
    });
    let problems: Vec<String> = problems.collect();
    let more = stages.saturating_mul(microbatches) - there.len() - problems.len();
    ScheduleError::Actions { schedule: name.to_owned(), problems, more }
}

/// The first problems, and the number of further ones.
#[derive(Default)]
struct Problems {
    named: Vec<String>,
    more: usize,
}

impl Problems {
    fn add(&mut self, problem: impl FnOnce() -> String) {
        if self.named.len() < NAMED { self.named.push(problem()) } else { self.more += 1 }
    }

    fn end(self, schedule: &str) -> Result<(), ScheduleError> {
        if self.named.is_empty() {
            return Ok(());
        }
        Err(ScheduleError::Actions {
            schedule: schedule.to_owned(),
            problems: self.named,
            more: self.more,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Schedule;
    use super::ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
    use super::*;

    fn a(stage: usize, kind: ActionKind, microbatch: usize) -> Action {
        Action { stage, kind, microbatch }
    }

    fn error(rows: Vec<Vec<Action>>) -> String {
        Schedule::new("x", rows).unwrap_err().to_string()
    }

    #[test]
    fn each_fault_is_reported_with_its_place() {
        let twice = error(vec![vec![a(0, Forward, 0), a(0, Backward, 0), a(0, Forward, 0)]]);
        assert!(
            twice.contains("0F0 appears twice: on rank 0, position 0, and on rank 0, position 2"),
            "{twice}"
        );
        let both = error(vec![vec![a(0, Forward, 0), a(0, BackwardInput, 0), a(0, Backward, 0)]]);
        let expected = "0B0 on rank 0, position 2 already computes 0I0 on rank 0, position 1";
        assert!(both.contains(expected), "{both}");
        let half = error(vec![vec![a(0, Forward, 0), a(0, BackwardInput, 0)]]);
        assert!(half.contains("0W0 is missing beside 0I0 on rank 0, position 1"), "{half}");
        let half = error(vec![vec![a(0, Forward, 0), a(0, BackwardWeight, 0)]]);
        assert!(half.contains("0I0 is missing beside 0W0 on rank 0, position 1"), "{half}");
        let elsewhere = error(vec![
            vec![a(0, Forward, 0), a(1, Forward, 0), a(0, Backward, 0)],
            vec![a(1, Forward, 1), a(1, Backward, 1), a(1, Backward, 0)],
        ]);
        let expected = "1F0 is on rank 0, position 1, but stage 1 is on rank 1";
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
        assert!(far.contains("0F0 is missing"), "{far}");
        let far =
            error(vec![vec![a(0, Forward, 0), a(0, Forward, huge), a(3, Backward, huge - 1)]]);
        assert!(far.contains("0F1 is missing") && far.contains("more"), "{far}");
        assert!(matches!(
            Schedule::new("x", vec![Vec::new()]),
            Err(ScheduleError::Empty { ranks: 1, .. })
        ));
    }
}
