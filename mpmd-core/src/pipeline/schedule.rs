//! Schedules: in which order each rank computes what. Data, and pure functions of it.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// What an action computes for its stage and microbatch.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum ActionKind {
    /// The outputs, and what the backward passes need.
    Forward,
    /// The gradient of the inputs.
    BackwardInput,
    /// The gradient of the parameters, added to what there is.
    BackwardWeight,
    /// Both gradients, one after the other.
    Backward,
}

/// One step of a rank: a stage computes something for a microbatch.
///
/// Shown as in torch's text format: stage, letter, microbatch; `2F0` is the forward pass of stage 2.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Action {
    /// The stage, from 0.
    pub stage: usize,
    /// What is computed.
    pub kind: ActionKind,
    /// The microbatch, from 0.
    pub microbatch: usize,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.kind {
            ActionKind::Forward => 'F',
            ActionKind::BackwardInput => 'I',
            ActionKind::BackwardWeight => 'W',
            ActionKind::Backward => 'B',
        };
        write!(f, "{}{letter}{}", self.stage, self.microbatch)
    }
}

/// For each rank, the order of its actions; and which rank each stage is on.
///
/// Ranks are the pipeline's own: which processes and devices stand behind one is the mesh's affair.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Schedule {
    name: String,
    microbatches: usize,
    rank_of_stage: Vec<usize>,
    /// Shared, so that a schedule is cheap to keep and to know again.
    rows: Arc<Vec<Vec<Action>>>,
}

/// What is wrong with a schedule. The caller's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// No ranks, or no microbatches.
    #[error("a schedule needs at least one rank and one microbatch, not {ranks} and {microbatches}")]
    Empty {
        /// Ranks asked for.
        ranks: usize,
        /// Microbatches asked for.
        microbatches: usize,
    },
    /// An action is missing, there twice, or on a rank that does not have the stage.
    #[error("schedule {schedule}: {problem}")]
    Actions {
        /// The schedule's name.
        schedule: String,
        /// Which action, and what is wrong with it.
        problem: String,
    },
    /// The orders of the ranks wait for each other in a circle.
    #[error("schedule {schedule} cannot proceed: {}", .heads.join("; "))]
    Stuck {
        /// The schedule's name.
        schedule: String,
        /// For each rank that is not done: its next action and what that waits for.
        heads: Vec<String>,
    },
}

impl Schedule {
    /// A schedule of the user's own: one order for each rank.
    ///
    /// # Errors
    ///
    /// Where an action is missing or there twice, a stage is on two ranks, or the orders cannot proceed.
    pub fn new(name: impl Into<String>, rows: Vec<Vec<Action>>) -> Result<Self, ScheduleError> {
        let name = name.into();
        let wrong = |problem: String| ScheduleError::Actions { schedule: name.clone(), problem };
        let actions = || rows.iter().flatten();
        let stages = actions().map(|action| action.stage + 1).max().unwrap_or(0);
        let microbatches = actions().map(|action| action.microbatch + 1).max().unwrap_or(0);
        if stages == 0 {
            return Err(ScheduleError::Empty { ranks: rows.len(), microbatches });
        }
        let mut rank_of_stage = vec![None; stages];
        let mut seen = HashSet::new();
        for (rank, row) in rows.iter().enumerate() {
            for action in row {
                let known = rank_of_stage[action.stage].get_or_insert(rank);
                if *known != rank {
                    return Err(wrong(format!("stage {} is on ranks {known} and {rank}", action.stage)));
                }
                if !seen.insert(*action) {
                    return Err(wrong(format!("{action} is there twice")));
                }
            }
        }
        for stage in 0..stages {
            for microbatch in 0..microbatches {
                let has = |kind| seen.contains(&Action { stage, kind, microbatch });
                let (both, input, weight) = (
                    has(ActionKind::Backward),
                    has(ActionKind::BackwardInput),
                    has(ActionKind::BackwardWeight),
                );
                let name = format!("stage {stage}, microbatch {microbatch}");
                if !has(ActionKind::Forward) {
                    return Err(wrong(format!("{name}: the forward pass is missing")));
                }
                if both && (input || weight) {
                    return Err(wrong(format!("{name}: B beside I or W computes a gradient twice")));
                }
                if !(both || input && weight) {
                    return Err(wrong(format!("{name}: a backward pass is missing")));
                }
            }
        }
        let rank_of_stage = rank_of_stage.into_iter().map(Option::unwrap_or_default).collect();
        let schedule = Self { name, microbatches, rank_of_stage, rows: Arc::new(rows) };
        schedule.global_order()?;
        Ok(schedule)
    }

    /// GPipe: every forward pass, then every backward pass, in ascending order of microbatches.
    ///
    /// # Errors
    ///
    /// Without ranks or microbatches.
    pub fn gpipe(ranks: usize, microbatches: usize) -> Result<Self, ScheduleError> {
        Self::one_stage_a_rank("GPipe", ranks, microbatches, |_| microbatches)
    }

    /// 1F1B: rank `r` of `p` warms up with `min(m, p - 1 - r)` forward passes, then alternates forward and
    /// backward, then drains. Fewer microbatches than ranks work too.
    ///
    /// # Errors
    ///
    /// Without ranks or microbatches.
    pub fn one_f_one_b(ranks: usize, microbatches: usize) -> Result<Self, ScheduleError> {
        Self::one_stage_a_rank("1F1B", ranks, microbatches, |rank| microbatches.min(ranks - 1 - rank))
    }

    /// The schedule of this name, as `gpipe` or `1f1b` (upper or lower case).
    pub fn named(name: &str, ranks: usize, microbatches: usize) -> Option<Result<Self, ScheduleError>> {
        match name.to_ascii_lowercase().as_str() {
            "gpipe" => Some(Self::gpipe(ranks, microbatches)),
            "1f1b" => Some(Self::one_f_one_b(ranks, microbatches)),
            _ => None,
        }
    }

    /// One stage on each rank: `warm_up(rank)` forwards, then one forward and one backward in turn, then the
    /// backwards that are left.
    fn one_stage_a_rank(
        name: &str,
        ranks: usize,
        microbatches: usize,
        warm_up: impl Fn(usize) -> usize,
    ) -> Result<Self, ScheduleError> {
        if ranks == 0 || microbatches == 0 {
            return Err(ScheduleError::Empty { ranks, microbatches });
        }
        let row = |rank: usize| {
            let forward = |microbatch| Action { stage: rank, kind: ActionKind::Forward, microbatch };
            let backward = |microbatch| Action { stage: rank, kind: ActionKind::Backward, microbatch };
            let warm = warm_up(rank);
            let mut row: Vec<Action> = (0..warm).map(forward).collect();
            for i in 0..microbatches - warm {
                row.extend([forward(warm + i), backward(i)]);
            }
            row.extend((microbatches - warm..microbatches).map(backward));
            row
        };
        Self::new(name, (0..ranks).map(row).collect())
    }

    /// The schedule's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.rows.len()
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.rank_of_stage.len()
    }

    /// Number of microbatches.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// The rank that a stage is on.
    ///
    /// # Panics
    ///
    /// Where there is no such stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.rank_of_stage[stage]
    }

    /// The order of each rank.
    pub fn rows(&self) -> &[Vec<Action>] {
        &self.rows
    }

    /// All actions in one order whose part on each rank is that rank's order, and in which each action
    /// comes after what it needs.
    ///
    /// Of the orders there are it is the one in which ranks take turns as they would with actions of equal
    /// length: a program that issues in it lets no rank run dry.
    ///
    /// # Errors
    ///
    /// Where the ranks' orders wait for each other in a circle.
    pub fn global_order(&self) -> Result<Vec<Action>, ScheduleError> {
        let total = self.rows.iter().map(Vec::len).sum();
        let mut next = vec![0; self.rows.len()];
        let mut done = HashSet::with_capacity(total);
        let mut order = Vec::with_capacity(total);
        while order.len() < total {
            // One round: each rank does its next action if what it needs was done in an earlier round.
            let ready: Vec<Action> = self
                .rows
                .iter()
                .zip(&mut next)
                .filter_map(|(row, next)| {
                    let action = *row.get(*next)?;
                    self.needs(action).iter().all(|need| self.is_done(*need, &done)).then(|| {
                        *next += 1;
                        action
                    })
                })
                .collect();
            if ready.is_empty() {
                return Err(self.stuck(&next, &done));
            }
            done.extend(ready.iter().copied());
            order.extend(ready);
        }
        Ok(order)
    }

    /// What an action needs from others: `I` stands for the input gradient, also where a `B` makes it.
    pub(super) fn needs(&self, action: Action) -> Vec<Action> {
        let Action { stage, kind, microbatch } = action;
        let of = |stage, kind| Action { stage, kind, microbatch };
        match kind {
            ActionKind::Forward if stage == 0 => Vec::new(),
            ActionKind::Forward => vec![of(stage - 1, ActionKind::Forward)],
            ActionKind::BackwardWeight => vec![of(stage, ActionKind::BackwardInput)],
            ActionKind::BackwardInput | ActionKind::Backward => {
                let mut needs = vec![of(stage, ActionKind::Forward)];
                if stage + 1 < self.stages() {
                    needs.push(of(stage + 1, ActionKind::BackwardInput));
                }
                needs
            }
        }
    }

    fn is_done(&self, need: Action, done: &HashSet<Action>) -> bool {
        done.contains(&need)
            || need.kind == ActionKind::BackwardInput
                && done.contains(&Action { kind: ActionKind::Backward, ..need })
    }

    fn stuck(&self, next: &[usize], done: &HashSet<Action>) -> ScheduleError {
        let heads = self.rows.iter().zip(next).enumerate().filter_map(|(rank, (row, next))| {
            let action = *row.get(*next)?;
            let missing = self.needs(action).into_iter().find(|need| !self.is_done(*need, done))?;
            let on = self.rank_of(missing.stage);
            Some(format!("rank {rank} is at {action}, which waits for {missing} on rank {on}"))
        });
        ScheduleError::Stuck { schedule: self.name.clone(), heads: heads.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(schedule: &Schedule) -> Vec<String> {
        let row = |row: &Vec<Action>| row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        schedule.rows().iter().map(row).collect()
    }

    #[test]
    fn one_f_one_b_is_the_known_order() {
        let schedule = Schedule::one_f_one_b(2, 3).unwrap();
        assert_eq!(text(&schedule), ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]);
    }

    #[test]
    fn fewer_microbatches_than_ranks_work() {
        let schedule = Schedule::one_f_one_b(4, 2).unwrap();
        assert_eq!(text(&schedule)[0], "0F0 0F1 0B0 0B1");
        assert_eq!(schedule.global_order().unwrap().len(), 16);
    }

    #[test]
    fn the_global_order_keeps_every_ranks_order_and_every_need() {
        for ranks in 1..6 {
            for microbatches in 1..8 {
                for schedule in
                    [Schedule::gpipe(ranks, microbatches), Schedule::one_f_one_b(ranks, microbatches)]
                {
                    let schedule = schedule.unwrap();
                    let order = schedule.global_order().unwrap();
                    for (rank, row) in schedule.rows().iter().enumerate() {
                        let part: Vec<Action> =
                            order.iter().filter(|a| schedule.rank_of(a.stage) == rank).copied().collect();
                        assert_eq!(&part, row);
                    }
                    let mut done = HashSet::new();
                    for action in order {
                        assert!(schedule.needs(action).iter().all(|need| schedule.is_done(*need, &done)));
                        done.insert(action);
                    }
                }
            }
        }
    }

    #[test]
    fn faults_are_named() {
        let a = |stage, kind, microbatch| Action { stage, kind, microbatch };
        use ActionKind::{Backward, BackwardInput, Forward};
        let missing = Schedule::new("x", vec![vec![a(0, Forward, 0)]]).unwrap_err().to_string();
        assert!(missing.contains("stage 0, microbatch 0: a backward pass is missing"), "{missing}");
        let twice = vec![vec![a(0, Forward, 0), a(0, Forward, 0), a(0, Backward, 0)]];
        assert!(Schedule::new("x", twice).unwrap_err().to_string().contains("0F0 is there twice"));
        let both = vec![vec![a(0, Forward, 0), a(0, BackwardInput, 0), a(0, Backward, 0)]];
        assert!(Schedule::new("x", both).unwrap_err().to_string().contains("twice"));
        let circle = vec![
            vec![a(0, Forward, 0), a(0, Backward, 0), a(0, Forward, 1), a(0, Backward, 1)],
            vec![a(1, Forward, 0), a(1, Forward, 1), a(1, Backward, 0), a(1, Backward, 1)],
        ];
        let stuck = Schedule::new("x", circle).unwrap_err().to_string();
        assert!(stuck.contains("rank 0 is at 0B0, which waits for 1I0 on rank 1"), "{stuck}");
        assert!(stuck.contains("rank 1 is at 1F1, which waits for 0F1 on rank 0"), "{stuck}");
    }
}
