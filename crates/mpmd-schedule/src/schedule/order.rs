//! One global order of all actions. If there is none, an error with the ranks that wait for each
//! other.

use std::collections::{BTreeSet, VecDeque};

use super::error::ScheduleError;
use super::faults::{RowPlace, place};
use super::{Action, ActionKind, Schedule};

impl Schedule {
    /// Returns all actions of the schedule in one sequence that keeps each rank's order. Each
    /// action comes after the actions that it needs.
    ///
    /// Among the possible orders, this is the one in which ranks take turns as if all actions were
    /// equally long. If a program issues actions in this order, no rank runs out of work early.
    ///
    /// # Errors
    ///
    /// If the ranks' orders wait for each other in a cycle.
    pub fn global_order(&self) -> Result<Vec<Action>, ScheduleError> {
        self.rounds(false)
    }

    /// Checks that the ranks can proceed even if both actions of an overlapped pair wait until both
    /// can begin.
    pub(super) fn check_pairs(&self) -> Result<(), ScheduleError> {
        if self.overlaps.iter().any(|pairs| !pairs.is_empty()) {
            self.rounds(true)?;
        }
        Ok(())
    }

    /// Returns all actions in rounds. In each round, each rank runs its next action if the actions
    /// that it needs were done in earlier rounds. If `together`, an overlapped pair counts as one
    /// action.
    fn rounds(&self, together: bool) -> Result<Vec<Action>, ScheduleError> {
        let total = self.rows.iter().map(Vec::len).sum();
        let mut next = vec![0; self.rows.len()];
        let mut pairs = vec![0; self.rows.len()];
        let mut done = Done::new(self);
        let mut order = Vec::with_capacity(total);

        // The next action of a rank can become ready only after one of two events in the last
        // round. Either the rank itself did an action, or a rank that it waits for did.
        let mut asked: Vec<usize> = (0..self.rows.len()).collect();
        let mut is_asked = vec![false; self.rows.len()];
        while order.len() < total {
            let before = order.len();
            for &rank in &asked {
                is_asked[rank] = false;
                let head = self.head(rank, next[rank], together.then_some(pairs[rank]));
                if head
                    .iter()
                    .all(|action| self.needs(*action).all(|need| done.has(need)))
                {
                    order.extend_from_slice(head);
                    next[rank] += head.len();
                    pairs[rank] += usize::from(head.len() == 2);
                }
            }

            if order.len() == before {
                let heads: Vec<&[Action]> = (0..self.rows.len())
                    .map(|rank| self.head(rank, next[rank], together.then_some(pairs[rank])))
                    .collect();
                return Err(self.stuck(&heads, &next, &done));
            }

            asked.clear();
            for action in &order[before..] {
                done.add(*action);
                let before = action.stage.saturating_sub(1);
                let after = (action.stage + 1).min(self.stages() - 1);
                for stage in [before, action.stage, after] {
                    let rank = self.rank_of_stage[stage];
                    if !std::mem::replace(&mut is_asked[rank], true) {
                        asked.push(rank);
                    }
                }
            }
            asked.sort_unstable();
        }
        Ok(order)
    }

    /// Returns the actions that a rank runs together from index `next` on: one action, or two if an
    /// overlapped pair begins there. Empty at the end of the row.
    fn head(&self, rank: usize, next: usize, pair: Option<usize>) -> &[Action] {
        let is_pair = pair.is_some_and(|pair| self.overlaps[rank].get(pair) == Some(&next));
        let row = &self.rows[rank];
        &row[next..row.len().min(next + if is_pair { 2 } else { 1 })]
    }

    /// Returns the error that describes a shortest cycle of ranks that wait for each other. `heads`
    /// are the next actions of each rank.
    fn stuck(&self, heads: &[&[Action]], next: &[usize], done: &Done) -> ScheduleError {
        let missing = |head: &&[Action]| {
            let needs = head.iter().flat_map(|action| self.needs(*action));
            needs.filter(|need| !done.has(*need)).collect::<Vec<_>>()
        };

        let waits: Vec<Vec<Action>> = heads.iter().map(missing).collect();
        let cycle = (0..heads.len())
            .filter_map(|rank| self.circle(rank, &waits))
            .min_by_key(Vec::len)
            .unwrap_or_default();

        let shown = |rank: usize| match heads[rank] {
            [one, other] => format!("({one};{other})OVERLAP_F_B"),
            head => head.iter().map(ToString::to_string).collect(),
        };
        let said = cycle.iter().map(|RankWait { rank, need }| {
            let made = self.made_by(*need);
            let RowPlace {
                rank: on,
                place: position,
            } = place(&self.rows, made).unwrap_or_default();
            let behind = if heads[on].contains(&made) {
                String::new()
            } else {
                format!(", behind {} at position {}", shown(on), next[on])
            };
            format!(
                "rank {rank} is at {}, position {}, which waits for {made} on rank {on}, position \
                 {position}{behind}",
                shown(*rank),
                next[*rank]
            )
        });

        let waiting = waits.iter().filter(|needs| !needs.is_empty()).count();
        ScheduleError::Stuck {
            schedule: self.name.clone(),
            cycle: said.collect(),
            ranks: waiting,
        }
    }

    /// Returns a shortest cycle of waiting ranks through rank `start`, or `None` if there is none.
    fn circle(&self, start: usize, waits: &[Vec<Action>]) -> Option<Vec<RankWait>> {
        let mut from: Vec<Option<RankWait>> = vec![None; waits.len()];
        let mut queue = VecDeque::from([start]);
        let mut known = BTreeSet::new();

        while let Some(rank) = queue.pop_front() {
            for need in &waits[rank] {
                let on = self.rank_of(need.stage);
                if !known.insert(on) {
                    continue;
                }

                from[on] = Some(RankWait { rank, need: *need });
                if on == start {
                    let mut circle = Vec::new();
                    let mut at = start;
                    while let Some(wait) = from[at] {
                        circle.push(wait);
                        at = wait.rank;
                        if at == start {
                            break;
                        }
                    }
                    circle.reverse();
                    return Some(circle);
                }
                queue.push_back(on);
            }
        }
        None
    }

    /// Returns the action of the schedule that computes the result of `need`: `need` itself, or the
    /// `B` that contains this input gradient.
    fn made_by(&self, need: Action) -> Action {
        let both = Action {
            kind: ActionKind::Backward,
            ..need
        };
        if need.kind == ActionKind::BackwardInput && place(&self.rows, need).is_none() {
            both
        } else {
            need
        }
    }
}

/// A rank, and the action that it waits for.
#[derive(Clone, Copy)]
struct RankWait {
    rank: usize,
    need: Action,
}

/// The passes done for each stage and microbatch.
struct Done {
    microbatches: usize,
    /// Bits for each stage and microbatch: bit 0 for the forward pass, bit 1 for the input
    /// gradient.
    passes: Vec<u8>,
}

impl Done {
    fn new(schedule: &Schedule) -> Self {
        let microbatches = schedule.microbatches;
        Self {
            microbatches,
            passes: vec![0; schedule.stages() * microbatches],
        }
    }

    fn bit(kind: ActionKind) -> u8 {
        match kind {
            ActionKind::Forward => 1,
            ActionKind::BackwardInput | ActionKind::Backward => 2,
            // No action needs it.
            ActionKind::BackwardWeight => 0,
        }
    }

    fn add(&mut self, action: Action) {
        self.passes[action.stage * self.microbatches + action.microbatch] |= Self::bit(action.kind);
    }

    fn has(&self, need: Action) -> bool {
        self.passes[need.stage * self.microbatches + need.microbatch] & Self::bit(need.kind) != 0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::Builtin;
    use super::ActionKind::{Backward, Forward};
    use super::*;

    /// Returns the global order, computed by plain rounds that ask every rank in every round.
    fn slow(schedule: &Schedule) -> Vec<Action> {
        let mut next = vec![0; schedule.ranks()];
        let (mut done, mut order) = (HashSet::new(), Vec::new());
        loop {
            let mut ready = Vec::new();
            for (row, next) in schedule.rows().iter().zip(&mut next) {
                let Some(&action) = row.get(*next) else {
                    continue;
                };
                let is_done = |need: Action| {
                    done.contains(&need)
                        || need.kind == ActionKind::BackwardInput
                            && done.contains(&Action {
                                kind: Backward,
                                ..need
                            })
                };
                if schedule.needs(action).all(is_done) {
                    *next += 1;
                    ready.push(action);
                }
            }
            if ready.is_empty() {
                return order;
            }
            done.extend(ready.iter().copied());
            order.extend(ready);
        }
    }

    #[test]
    fn global_order_equals_that_of_plain_rounds() {
        for builtin in Builtin::ALL {
            for ranks in 1..6 {
                for microbatches in 1..12 {
                    let chunks = builtin.default_chunks();
                    let Ok(schedule) = builtin.schedule(ranks, microbatches, chunks) else {
                        continue;
                    };
                    let order = schedule.global_order().unwrap();
                    assert_eq!(order, slow(&schedule), "{builtin:?} {ranks} {microbatches}");
                    for (rank, row) in schedule.rows().iter().enumerate() {
                        let part: Vec<Action> = order
                            .iter()
                            .filter(|a| schedule.rank_of(a.stage) == rank)
                            .copied()
                            .collect();
                        assert_eq!(&part, row);
                    }
                }
            }
        }
    }

    #[test]
    fn shortest_cycle_is_reported() {
        let a = |stage, kind, microbatch| Action {
            stage,
            kind,
            microbatch,
        };
        let circle = vec![
            vec![
                a(0, Forward, 0),
                a(0, Backward, 0),
                a(0, Forward, 1),
                a(0, Backward, 1),
            ],
            vec![
                a(1, Forward, 0),
                a(1, Forward, 1),
                a(1, Backward, 0),
                a(1, Backward, 1),
            ],
            vec![
                a(2, Forward, 0),
                a(2, Forward, 1),
                a(2, Backward, 0),
                a(2, Backward, 1),
            ],
        ];
        let error = Schedule::new("x", circle).unwrap_err();
        let ScheduleError::Stuck { cycle, ranks, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((cycle.len(), *ranks), (2, 3));
        let text = error.to_string();
        let first = "rank 0 is at 0B0, position 1, which waits for 1B0 on rank 1, position 2, \
            behind 1F1 at position 1";
        let second = "rank 1 is at 1F1, position 1, which waits for 0F1 on rank 0, position 2, \
            behind 0B0 at position 1";
        assert!(text.contains(first) && text.contains(second), "{text}");
    }

    #[test]
    fn pair_that_cannot_begin_together_is_refused() {
        let a = |stage, kind, microbatch| Action {
            stage,
            kind,
            microbatch,
        };
        // One after the other it works: 0B0 needs 1B0, which comes after 1F1. And 1F1 needs 0F1.
        let rows = vec![
            vec![
                a(0, Forward, 0),
                a(0, Forward, 1),
                a(0, Backward, 0),
                a(0, Backward, 1),
            ],
            vec![
                a(1, Forward, 0),
                a(1, Forward, 1),
                a(1, Backward, 0),
                a(1, Backward, 1),
            ],
        ];
        assert!(Schedule::new("x", rows.clone()).is_ok());
        let error = Schedule::with_overlaps("x", rows, vec![vec![1], vec![]])
            .unwrap_err()
            .to_string();
        let expected = "rank 0 is at (0F1;0B0)OVERLAP_F_B, position 1, which waits for 1B0 on \
            rank 1, position 2, \
                        behind 1F1 at position 1";
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn a_rank_can_wait_for_itself() {
        let a = |kind| Action {
            stage: 0,
            kind,
            microbatch: 0,
        };
        let error = Schedule::new("x", vec![vec![a(Backward), a(Forward)]])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(
                "rank 0 is at 0B0, position 0, which waits for 0F0 on rank 0, position 1"
            ),
            "{error}"
        );
    }
}
