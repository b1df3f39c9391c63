//! The scheduling problem of the search: its actions, the makespan of an order, and its critical
//! path.

use crate::check::Budget;
use crate::costs::{Costs, StageCosts};
use crate::schedule::{Action, ActionKind, Schedule};

/// The kinds of actions: the remainder of an action's number modulo 3.
pub(super) const FORWARD: u32 = 0;
pub(super) const INPUT: u32 = 1;
pub(super) const WEIGHT: u32 = 2;

/// For each rank, the numbers of its actions in order, as given by [`Shop::id`].
pub(super) type OrderRows = Vec<Vec<u32>>;

/// The scheduling problem: actions, costs and budget.
pub(super) struct Shop<'a> {
    /// The rank of each stage, indexed by stage.
    pub(super) placement: Vec<usize>,
    pub(super) ranks: usize,
    pub(super) microbatches: usize,
    pub(super) costs: &'a Costs,
    pub(super) budget: Option<Budget>,
}

/// The simulated times of an order.
pub(super) struct OrderRun {
    pub(super) makespan: f64,
    /// Positions of actions on the critical path that the next action in the row follows without a
    /// pause.
    pub(super) critical: Vec<OrderPlace>,
}

/// The parts of an action's id.
pub(super) struct ActionParts {
    pub(super) stage: usize,
    /// The kind of the action: `FORWARD`, `INPUT` or `WEIGHT`.
    pub(super) kind: u32,
    pub(super) microbatch: usize,
}

/// An action of another stage that an action needs.
pub(super) struct StageNeed {
    pub(super) id: u32,
    /// Transfer time of the needed result; 0 if it stays on the rank.
    pub(super) way: f64,
}

/// The memory that an action allocates at its start and frees at its end.
pub(super) struct MemoryChange {
    pub(super) takes: u64,
    pub(super) frees: u64,
}

/// The position of an action: its rank, and its index in the rank's row.
#[derive(Clone, Copy)]
pub(super) struct OrderPlace {
    pub(super) rank: usize,
    pub(super) place: usize,
}

/// The order of actions on each rank, and its makespan.
#[derive(Clone)]
pub(super) struct TimedOrder {
    pub(super) makespan: f64,
    pub(super) rows: OrderRows,
}

impl Shop<'_> {
    pub(super) fn id(&self, stage: usize, kind: u32, microbatch: usize) -> u32 {
        ((stage * self.microbatches + microbatch) * 3) as u32 + kind
    }

    pub(super) fn parts(&self, id: u32) -> ActionParts {
        let place = id as usize / 3;
        ActionParts {
            stage: place / self.microbatches,
            kind: id % 3,
            microbatch: place % self.microbatches,
        }
    }

    pub(super) fn action(&self, id: u32) -> Action {
        let parts = self.parts(id);
        let kind = match parts.kind {
            FORWARD => ActionKind::Forward,
            INPUT => ActionKind::BackwardInput,
            _ => ActionKind::BackwardWeight,
        };
        Action {
            stage: parts.stage,
            kind,
            microbatch: parts.microbatch,
        }
    }

    pub(super) fn rows_of(&self, schedule: &Schedule) -> OrderRows {
        let ids = |action: &Action| {
            let id = |kind| self.id(action.stage, kind, action.microbatch);
            match action.kind {
                ActionKind::Forward => vec![id(FORWARD)],
                ActionKind::BackwardInput => vec![id(INPUT)],
                ActionKind::BackwardWeight => vec![id(WEIGHT)],
                ActionKind::Backward => vec![id(INPUT), id(WEIGHT)],
            }
        };
        schedule
            .rows()
            .iter()
            .map(|row| row.iter().flat_map(ids).collect())
            .collect()
    }

    /// Returns the duration of an action, in the unit of the costs.
    pub(super) fn cost(&self, id: u32) -> f64 {
        let ActionParts { stage, kind, .. } = self.parts(id);
        let StageCosts {
            forward,
            backward_input,
            backward_weight,
            ..
        } = self.costs.stage[stage];
        match kind {
            FORWARD => forward,
            INPUT => backward_input,
            _ => backward_weight,
        }
    }

    /// Returns the number of actions of all ranks.
    pub(super) fn actions(&self) -> usize {
        3 * self.placement.len() * self.microbatches
    }

    /// Returns the action of another stage that `id` needs. `None` if it needs no other stage.
    pub(super) fn need(&self, id: u32) -> Option<StageNeed> {
        let ActionParts {
            stage,
            kind,
            microbatch,
        } = self.parts(id);
        let way = |from: usize, cost: f64| {
            if self.placement[from] == self.placement[stage] {
                0.0
            } else {
                cost
            }
        };

        match kind {
            FORWARD if stage > 0 => {
                let way = way(stage - 1, self.costs.stage[stage - 1].send_forward);
                let id = self.id(stage - 1, FORWARD, microbatch);
                Some(StageNeed { id, way })
            }
            INPUT if stage + 1 < self.placement.len() => {
                let way = way(stage + 1, self.costs.stage[stage + 1].send_backward);
                let id = self.id(stage + 1, INPUT, microbatch);
                Some(StageNeed { id, way })
            }
            _ => None,
        }
    }

    /// Returns the action of another stage that needs the result of `id`, or `None`.
    pub(super) fn needed_by(&self, id: u32) -> Option<u32> {
        let ActionParts {
            stage,
            kind,
            microbatch,
        } = self.parts(id);
        match kind {
            FORWARD if stage + 1 < self.placement.len() => {
                Some(self.id(stage + 1, FORWARD, microbatch))
            }
            INPUT if stage > 0 => Some(self.id(stage - 1, INPUT, microbatch)),
            _ => None,
        }
    }

    /// Returns the memory that an action allocates and frees: in bytes if the budget is in bytes,
    /// else in activations.
    pub(super) fn memory(&self, id: u32) -> MemoryChange {
        let ActionParts { stage, kind, .. } = self.parts(id);
        let StageCosts {
            activation_bytes,
            weight_residual_bytes,
            ..
        } = self.costs.stage[stage];

        let (takes, frees) = match (self.budget, kind) {
            (Some(Budget::Bytes(_)), FORWARD) => (activation_bytes, 0),
            (Some(Budget::Bytes(_)), INPUT) => (weight_residual_bytes, activation_bytes),
            (Some(Budget::Bytes(_)), _) => (0, weight_residual_bytes),
            (_, FORWARD) => (1, 0),
            (_, INPUT) => (0, 0),
            _ => (0, 1),
        };
        MemoryChange { takes, frees }
    }

    pub(super) fn limit(&self) -> u64 {
        match self.budget {
            None => u64::MAX,
            Some(Budget::Activations(most) | Budget::Bytes(most)) => most,
        }
    }

    /// Returns true if a rank that runs the actions of `row` in order stays within the budget.
    pub(super) fn holds(&self, row: &[u32]) -> bool {
        let limit = self.limit();
        let mut held = 0;
        row.iter().all(|id| {
            let MemoryChange { takes, frees } = self.memory(*id);
            held = u64::saturating_add(held, takes);
            let within = held <= limit;
            held = held.saturating_sub(frees);
            within
        })
    }

    /// Returns true if, for each stage and kind of action, the microbatches are in ascending order.
    pub(super) fn ascends(&self, rows: &OrderRows) -> bool {
        rows.iter().all(|row| {
            let mut next = vec![0; 3 * self.placement.len()];
            row.iter().all(|id| {
                let ActionParts {
                    stage,
                    kind,
                    microbatch,
                } = self.parts(*id);
                let next = &mut next[3 * stage + kind as usize];
                *next += 1;
                *next == microbatch + 1
            })
        })
    }

    /// Returns true if two neighbours of a row may be swapped. They may not if they have the same
    /// stage and kind, if they have the same stage and microbatch, or if `second` needs `first`.
    pub(super) fn may_swap(&self, first: u32, second: u32) -> bool {
        let one = self.parts(first);
        let other = self.parts(second);
        let same_stage = one.stage == other.stage;
        let same_queue = same_stage && one.kind == other.kind;
        let of_one = same_stage && one.microbatch == other.microbatch;
        !same_queue && !of_one && self.need(second).is_none_or(|need| need.id != first)
    }

    /// Simulates the order, starting each action as early as possible. Returns `None` if the ranks
    /// wait for each other in a cycle.
    pub(super) fn run(&self, rows: &OrderRows) -> Option<OrderRun> {
        let total: usize = rows.iter().map(Vec::len).sum();
        let mut ends = vec![f64::NAN; 3 * self.placement.len() * self.microbatches];
        let mut next = vec![0; self.ranks];
        let mut free = vec![0.0f64; self.ranks];
        let mut woken: Vec<usize> = (0..self.ranks).rev().collect();
        let mut done = 0;

        while let Some(rank) = woken.pop() {
            while let Some(id) = rows[rank].get(next[rank]) {
                let mut start = free[rank];
                if let Some(need) = self.need(*id) {
                    let end = ends[need.id as usize];
                    if end.is_nan() {
                        break;
                    }
                    start = start.max(end + need.way);
                }

                let end = start + self.cost(*id);
                ends[*id as usize] = end;
                free[rank] = end;
                next[rank] += 1;
                done += 1;
                if let Some(user) = self.needed_by(*id) {
                    let other = self.placement[self.parts(user).stage];
                    if other != rank {
                        woken.push(other);
                    }
                }
            }
        }

        if done < total {
            return None;
        }

        let last = (0..self.ranks).max_by(|a, b| free[*a].total_cmp(&free[*b]))?;
        Some(OrderRun {
            makespan: free[last],
            critical: self.critical(rows, &ends, last),
        })
    }

    /// Follows the critical path back from the last action of rank `last`. Returns the positions
    /// for [`OrderRun::critical`], the latest first.
    pub(super) fn critical(&self, rows: &OrderRows, ends: &[f64], last: usize) -> Vec<OrderPlace> {
        let mut places = vec![0u32; ends.len()];
        for row in rows {
            row.iter()
                .enumerate()
                .for_each(|(place, id)| places[*id as usize] = place as u32);
        }

        let mut found = Vec::new();
        let Some(mut id) = rows[last].last().copied() else {
            return found;
        };

        loop {
            let rank = self.placement[self.parts(id).stage];
            let place = places[id as usize] as usize;
            let before = place.checked_sub(1).map(|place| rows[rank][place]);
            let free = before.map_or(0.0, |before| ends[before as usize]);

            match (self.need(id), before) {
                (Some(need), _) if ends[need.id as usize] + need.way > free => id = need.id,
                (_, Some(before)) => {
                    found.push(OrderPlace {
                        rank,
                        place: place - 1,
                    });
                    id = before;
                }
                (_, None) => return found,
            }
        }
    }
}
