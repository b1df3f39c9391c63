//! Greedy orders: each step adds the action that can begin first on any rank.

use super::shop::{ActionParts, FORWARD, INPUT, MemoryChange, OrderRows, Shop, WEIGHT};

/// Parameters of a greedy order.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    /// Limit for filling a pause with a weight gradient: the pause must be at least this fraction
    /// of the weight gradient's cost.
    fits: f64,
    /// True if an input gradient is preferred to a forward pass that can begin at the same time.
    inputs_first: bool,
    /// Number of forward passes that a stage may run ahead of its input gradients, in addition to
    /// the number of 1F1B.
    ahead: usize,
}

impl Rules {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let fits = [0.0, 0.5, 1.0];
        fits.into_iter().flat_map(|fits| {
            [true, false].into_iter().flat_map(move |inputs_first| {
                [0, 1, 2, 4, usize::MAX / 2]
                    .into_iter()
                    .map(move |ahead| Self {
                        fits,
                        inputs_first,
                        ahead,
                    })
            })
        })
    }
}

impl Shop<'_> {
    /// Builds a greedy order: repeatedly appends the action that can begin first on any rank.
    /// Returns `None` if no rank can proceed within the budget.
    pub(super) fn greedy(&self, rules: Rules) -> Option<OrderRows> {
        let stages = self.placement.len();
        let mut rows: OrderRows = vec![Vec::new(); self.ranks];
        let mut of_rank: Vec<Vec<usize>> = vec![Vec::new(); self.ranks];
        self.placement
            .iter()
            .enumerate()
            .for_each(|(stage, rank)| of_rank[*rank].push(stage));

        let mut ends = vec![f64::NAN; 3 * stages * self.microbatches];
        let mut next = vec![[0usize; 3]; stages];
        let mut free = vec![0.0f64; self.ranks];
        let mut held = vec![0u64; self.ranks];
        let mut left = 3 * stages * self.microbatches;
        while left > 0 {
            let mut chosen: Option<(usize, NextAction)> = None;
            for rank in 0..self.ranks {
                let at = Greedy {
                    stages: &of_rank[rank],
                    ends: &ends,
                    next: &next,
                    free: free[rank],
                    held: held[rank],
                };
                if let Some(next) = self.choose(rules, &at)
                    && chosen.is_none_or(|(_, first)| next.start < first.start)
                {
                    chosen = Some((rank, next));
                }
            }

            let (rank, NextAction { start, id }) = chosen?;
            let ActionParts { stage, kind, .. } = self.parts(id);
            let end = start + self.cost(id);
            ends[id as usize] = end;
            free[rank] = end;

            next[stage][kind as usize] += 1;
            let MemoryChange { takes, frees } = self.memory(id);
            held[rank] = held[rank].saturating_add(takes).saturating_sub(frees);
            rows[rank].push(id);
            left -= 1;
        }
        Some(rows)
    }

    /// Returns the next action of a rank, or `None` if no action can begin.
    fn choose(&self, rules: Rules, at: &Greedy<'_>) -> Option<NextAction> {
        // A pass that is not a weight gradient, and whether its kind comes last by the rules.
        let mut other: Option<(NextAction, bool)> = None;
        let mut weight: Option<NextAction> = None;

        // Later stages first: their microbatches end sooner, and so free memory sooner.
        for stage in at.stages.iter().rev() {
            let next = at.next[*stage];
            for kind in [INPUT, FORWARD, WEIGHT] {
                let microbatch = next[kind as usize];
                let before = if kind == FORWARD {
                    usize::MAX
                } else {
                    next[kind as usize - 1]
                };
                if microbatch >= self.microbatches || microbatch >= before {
                    continue;
                }

                let id = self.id(*stage, kind, microbatch);
                let ready = match self.need(id) {
                    Some(need) => at.ends[need.id as usize] + need.way,
                    None => 0.0,
                };
                if ready.is_nan() || kind == FORWARD && !self.may_begin(rules, at, *stage) {
                    continue;
                }
                if kind != WEIGHT && at.held.saturating_add(self.memory(id).takes) > self.limit() {
                    continue;
                }

                let start = ready.max(at.free);
                if kind == WEIGHT {
                    if weight.is_none() {
                        weight = Some(NextAction { start, id });
                    }
                    continue;
                }

                let last = (kind == FORWARD) == rules.inputs_first;
                if other.is_none_or(|(first, after)| {
                    start < first.start || start == first.start && !last && after
                }) {
                    other = Some((NextAction { start, id }, last));
                }
            }
        }

        match (other, weight) {
            (Some((other, _)), Some(weight))
                if other.start - weight.start >= rules.fits * self.cost(weight.id)
                    && other.start > weight.start =>
            {
                Some(weight)
            }
            (Some((other, _)), _) => Some(other),
            (None, weight) => weight,
        }
    }

    /// Returns true if a stage may begin one more forward pass. `rules` limits how far its forward
    /// passes run ahead of its backward passes. Enough memory must also remain for one microbatch
    /// in each later stage of the rank; otherwise no memory would ever be freed.
    fn may_begin(&self, rules: Rules, at: &Greedy<'_>, stage: usize) -> bool {
        let [forward, input, _] = at.next[stage];
        let depth = self.placement.len() - stage;
        if forward - input >= depth.saturating_add(rules.ahead) {
            return false;
        }

        let later = at
            .stages
            .iter()
            .filter(|later| **later > stage && at.next[**later][0] < self.microbatches);
        let room: u64 = later
            .map(|later| {
                self.memory(self.id(*later, FORWARD, 0)).takes
                    + self.memory(self.id(*later, INPUT, 0)).takes
            })
            .sum();

        let own = self.memory(self.id(stage, FORWARD, 0)).takes
            + self.memory(self.id(stage, INPUT, 0)).takes;
        at.held.saturating_add(own).saturating_add(room) <= self.limit()
    }
}

/// An action that a rank can run next.
#[derive(Clone, Copy)]
struct NextAction {
    /// Earliest start time of the action.
    start: f64,
    id: u32,
}

/// The state of one rank while an order is built.
struct Greedy<'a> {
    stages: &'a [usize],
    ends: &'a [f64],
    next: &'a [[usize; 3]],
    free: f64,
    held: u64,
}
