//! The scheduling problem of the search: its actions, the makespan of an order, and its critical
//! path.

use crate::check::Budget;
use crate::costs::{Costs, StageCosts};
use crate::schedule::{Action, ActionKind, Schedule};

/// Kinds of actions: the number of an action modulo 3.
pub(super) const FORWARD: u32 = 0;
pub(super) const INPUT: u32 = 1;
pub(super) const WEIGHT: u32 = 2;

/// For each rank, the numbers of its actions, in order. `Shop::id` defines the numbers.
pub(super) type Rows = Vec<Vec<u32>>;

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
pub(super) struct Run {
    pub(super) makespan: f64,
    /// Neighbours in a rank's row that follow each other without pause on the critical path: (rank,
    /// index of the first in the row).
    pub(super) critical: Vec<(usize, usize)>,
}

impl Shop<'_> {
    pub(super) fn id(&self, stage: usize, kind: u32, microbatch: usize) -> u32 {
        ((stage * self.microbatches + microbatch) * 3) as u32 + kind
    }

    pub(super) fn parts(&self, id: u32) -> (usize, u32, usize) {
        let place = id as usize / 3;
        (place / self.microbatches, id % 3, place % self.microbatches)
    }

    pub(super) fn action(&self, id: u32) -> Action {
        let (stage, kind, microbatch) = self.parts(id);
        let kind = match kind {
            FORWARD => ActionKind::Forward,
            INPUT => ActionKind::BackwardInput,
            _ => ActionKind::BackwardWeight,
        };
        Action {
            stage,
            kind,
            microbatch,
        }
    }

    pub(super) fn rows_of(&self, schedule: &Schedule) -> Rows {
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
        let (stage, kind, _) = self.parts(id);
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

    /// Returns (action, transfer time) for the action of another stage that `id` needs. `None` if
    /// it needs no other stage. The transfer time is 0 on the same rank.
    pub(super) fn need(&self, id: u32) -> Option<(u32, f64)> {
        let (stage, kind, microbatch) = self.parts(id);
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
                Some((self.id(stage - 1, FORWARD, microbatch), way))
            }
            INPUT if stage + 1 < self.placement.len() => {
                let way = way(stage + 1, self.costs.stage[stage + 1].send_backward);
                Some((self.id(stage + 1, INPUT, microbatch), way))
            }
            _ => None,
        }
    }

    /// Returns the action of another stage that needs `id`, or `None`.
    pub(super) fn needed_by(&self, id: u32) -> Option<u32> {
        let (stage, kind, microbatch) = self.parts(id);
        match kind {
            FORWARD if stage + 1 < self.placement.len() => {
                Some(self.id(stage + 1, FORWARD, microbatch))
            }
            INPUT if stage > 0 => Some(self.id(stage - 1, INPUT, microbatch)),
            _ => None,
        }
    }

    /// Returns (memory taken at the start, memory freed at the end) of an action: bytes if the
    /// budget is in bytes, else activations.
    pub(super) fn memory(&self, id: u32) -> (u64, u64) {
        let (stage, kind, _) = self.parts(id);
        let StageCosts {
            activation_bytes,
            weight_residual_bytes,
            ..
        } = self.costs.stage[stage];
        match (self.budget, kind) {
            (Some(Budget::Bytes(_)), FORWARD) => (activation_bytes, 0),
            (Some(Budget::Bytes(_)), INPUT) => (weight_residual_bytes, activation_bytes),
            (Some(Budget::Bytes(_)), _) => (0, weight_residual_bytes),
            (_, FORWARD) => (1, 0),
            (_, INPUT) => (0, 0),
            _ => (0, 1),
        }
    }

    pub(super) fn limit(&self) -> u64 {
        match self.budget {
            None => u64::MAX,
            Some(Budget::Activations(most) | Budget::Bytes(most)) => most,
        }
    }

    /// Returns true if a rank that runs these actions in order stays within the budget.
    pub(super) fn holds(&self, row: &[u32]) -> bool {
        let (limit, mut held) = (self.limit(), 0);
        row.iter().all(|id| {
            let (takes, gives) = self.memory(*id);
            held = u64::saturating_add(held, takes);
            let within = held <= limit;
            held = held.saturating_sub(gives);
            within
        })
    }

    /// Returns true if microbatches come in ascending order within each stage and kind of action.
    pub(super) fn ascends(&self, rows: &Rows) -> bool {
        rows.iter().all(|row| {
            let mut next = vec![0; 3 * self.placement.len()];
            row.iter().all(|id| {
                let (stage, kind, microbatch) = self.parts(*id);
                let next = &mut next[3 * stage + kind as usize];
                *next += 1;
                *next == microbatch + 1
            })
        })
    }

    /// Returns true if two neighbours of a row may be swapped. They may not if they have the same
    /// stage and kind, or the same stage and microbatch. They also may not if the second needs the
    /// first.
    pub(super) fn may_swap(&self, first: u32, second: u32) -> bool {
        let ((stage, kind, microbatch), (other, later, next)) =
            (self.parts(first), self.parts(second));
        let same_stage = stage == other;
        let same_queue = same_stage && kind == later;
        let of_one = same_stage && microbatch == next;
        !same_queue && !of_one && self.need(second).is_none_or(|(need, _)| need != first)
    }

    /// Simulates the orders, with each action as early as possible. Returns `None` if the ranks
    /// wait for each other in a cycle.
    pub(super) fn run(&self, rows: &Rows) -> Option<Run> {
        let total: usize = rows.iter().map(Vec::len).sum();
        let mut ends = vec![f64::NAN; 3 * self.placement.len() * self.microbatches];
        let mut next = vec![0; self.ranks];
        let mut free = vec![0.0f64; self.ranks];
        let mut woken: Vec<usize> = (0..self.ranks).rev().collect();
        let mut done = 0;
        while let Some(rank) = woken.pop() {
            while let Some(id) = rows[rank].get(next[rank]) {
                let mut start = free[rank];
                if let Some((need, way)) = self.need(*id) {
                    let end = ends[need as usize];
                    if end.is_nan() {
                        break;
                    }
                    start = start.max(end + way);
                }
                let end = start + self.cost(*id);
                (ends[*id as usize], free[rank]) = (end, end);
                next[rank] += 1;
                done += 1;
                if let Some(user) = self.needed_by(*id) {
                    let other = self.placement[self.parts(user).0];
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
        Some(Run {
            makespan: free[last],
            critical: self.critical(rows, &ends, last),
        })
    }

    /// Follows the critical path back from the last action of rank `last`. Returns the pairs of
    /// [`Run::critical`], the latest first.
    pub(super) fn critical(&self, rows: &Rows, ends: &[f64], last: usize) -> Vec<(usize, usize)> {
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
            let rank = self.placement[self.parts(id).0];
            let place = places[id as usize] as usize;
            let before = place.checked_sub(1).map(|place| rows[rank][place]);
            let free = before.map_or(0.0, |before| ends[before as usize]);
            match (self.need(id), before) {
                (Some((need, way)), _) if ends[need as usize] + way > free => id = need,
                (_, Some(before)) => {
                    found.push((rank, place - 1));
                    id = before;
                }
                (_, None) => return found,
            }
        }
    }
}
