//! Start and end of the passes of a step: expected times, and the bounds that the orders of all
//! ranks guarantee.

use super::schedule::{Action, ActionKind, Schedule, ScheduleError};

/// Assumed time of a pass, in an arbitrary unit. Transfers are short beside it.
const PASS: u64 = 1 << 20;
/// Assumed time of a transfer, in the unit of `PASS`.
pub(super) const MOVE: u64 = 1;

/// One of the computations that an action consists of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Pass {
    pub(super) stage: usize,
    pub(super) kind: PassKind,
    pub(super) microbatch: usize,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum PassKind {
    Forward,
    /// The recomputed forward pass, right before the input gradient.
    Again,
    Input,
    Weight,
}

/// Properties of a stage that its pace depends on, beside the order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StagePace {
    /// The number of the stage's lane. Passes of one lane run one at a time.
    pub(super) lane: usize,
    pub(super) recomputes: bool,
    pub(super) keeps_inputs: bool,
    pub(super) fuses: bool,
    pub(super) forward_only: bool,
}

/// Expected times and guaranteed bounds of all passes.
pub(super) struct Pace {
    microbatches: usize,
    lanes: Vec<usize>,
    /// For each stage, true if its inputs stay until the input gradient.
    keeps_inputs: Vec<bool>,
    actions: Vec<Ran>,
    /// Indices of the actions of each lane, in order.
    rows: Vec<Vec<usize>>,
    /// Indexed by stage, microbatch and kind.
    passes: Vec<Option<Timed>>,
}

struct Ran {
    lane: usize,
    /// The index of the action in its lane.
    place: usize,
    /// For each lane, the number of its actions that are surely over when this one begins.
    over: Vec<usize>,
}

#[derive(Clone, Copy)]
struct Timed {
    action: usize,
    start: u64,
    end: u64,
}

impl Pace {
    pub(super) fn new(schedule: &Schedule, stages: &[StagePace]) -> Result<Self, ScheduleError> {
        let order = schedule.global_order()?;
        let (count, lanes) =
            (schedule.microbatches(), stages.iter().map(|stage| stage.lane + 1).max());
        let lanes = lanes.unwrap_or_default();
        let mut pace = Self {
            microbatches: count,
            lanes: stages.iter().map(|stage| stage.lane).collect(),
            keeps_inputs: stages.iter().map(|stage| stage.keeps_inputs).collect(),
            actions: Vec::with_capacity(order.len()),
            rows: vec![Vec::new(); lanes],
            passes: vec![None; 4 * count * stages.len()],
        };
        // For each lane: the actions that are over after its last action so far, and the end of
        // that action.
        let mut after = vec![vec![0; lanes]; lanes];
        let mut free = vec![0; lanes];
        for action in order {
            let of = stages[action.stage];
            if of.forward_only && action.kind != ActionKind::Forward {
                continue;
            }
            let lane = of.lane;
            let mut over = after[lane].clone();
            let mut start = free[lane];
            for need in pace.needs(action, stages.len()) {
                let Some(Timed { action: before, end, .. }) = pace.timed(need) else { continue };
                let ran = &pace.actions[before];
                over.iter_mut()
                    .zip(&ran.over)
                    .for_each(|(over, before)| *over = (*over).max(*before));
                over[ran.lane] = over[ran.lane].max(ran.place + 1);
                start = start.max(end + if need.stage == action.stage { 0 } else { MOVE });
            }
            let place = pace.rows[lane].len();
            over[lane] = place;
            after[lane].clone_from(&over);
            after[lane][lane] = place + 1;
            free[lane] = pace.time(action, of, start);
            pace.rows[lane].push(pace.actions.len());
            pace.actions.push(Ran { lane, place, over });
        }
        Ok(pace)
    }

    /// Returns the passes that must be over before an action begins.
    fn needs(&self, action: Action, stages: usize) -> Vec<Pass> {
        let Action { stage, kind, microbatch } = action;
        let of = |stage, kind| Pass { stage, kind, microbatch };
        match kind {
            ActionKind::Forward if stage == 0 => Vec::new(),
            ActionKind::Forward => vec![of(stage - 1, PassKind::Forward)],
            ActionKind::BackwardWeight => vec![of(stage, PassKind::Input)],
            _ if stage + 1 == stages => vec![of(stage, PassKind::Forward)],
            _ => vec![of(stage, PassKind::Forward), of(stage + 1, PassKind::Input)],
        }
    }

    /// Records the times of the passes of an action that begins at `start`, and returns the time at
    /// which it ends.
    fn time(&mut self, action: Action, of: StagePace, start: u64) -> u64 {
        use PassKind::{Again, Forward, Input, Weight};
        let again = if of.recomputes { PASS } else { 0 };
        // (kind, start, end) of each pass, relative to the start of the action.
        let passes: &[(PassKind, u64, u64)] = match action.kind {
            ActionKind::Forward => &[(Forward, 0, PASS)],
            ActionKind::BackwardWeight => &[(Weight, 0, PASS)],
            ActionKind::Backward if of.fuses => &[
                (Again, 0, again),
                (Input, again, again + 2 * PASS),
                (Weight, again, again + 2 * PASS),
            ],
            ActionKind::Backward => {
                let input = again + PASS;
                &[(Again, 0, again), (Input, again, input), (Weight, input, input + PASS)]
            }
            _ => &[(Again, 0, again), (Input, again, again + PASS)],
        };
        let mut end = start;
        for (kind, from, until) in passes.iter().copied().filter(|(_, from, until)| from < until) {
            let place =
                self.place(Pass { stage: action.stage, kind, microbatch: action.microbatch });
            self.passes[place] =
                Some(Timed { action: self.actions.len(), start: start + from, end: start + until });
            end = start + until;
        }
        end
    }

    fn place(&self, Pass { stage, kind, microbatch }: Pass) -> usize {
        4 * (stage * self.microbatches + microbatch) + kind as usize
    }

    fn timed(&self, pass: Pass) -> Option<Timed> {
        self.passes[self.place(pass)]
    }

    /// Returns true if the schedule has the pass.
    pub(super) fn has(&self, pass: Pass) -> bool {
        self.timed(pass).is_some()
    }

    /// Returns the last pass that reads the input of a stage's forward pass.
    pub(super) fn last_reader(&self, stage: usize, microbatch: usize) -> Pass {
        let of = |kind| Pass { stage, kind, microbatch };
        let input = of(PassKind::Input);
        if self.keeps_inputs[stage] && self.has(input) {
            return input;
        }
        let again = of(PassKind::Again);
        if self.has(again) { again } else { of(PassKind::Forward) }
    }

    /// Returns the expected (start, end) of the pass, in the unit of `PASS`; (0, 0) if the schedule
    /// lacks the pass.
    pub(super) fn times(&self, pass: Pass) -> (u64, u64) {
        self.timed(pass).map_or((0, 0), |timed| (timed.start, timed.end))
    }

    pub(super) fn lane(&self, stage: usize) -> usize {
        self.lanes[stage]
    }

    /// Returns the number of actions of the lane.
    pub(super) fn actions(&self, lane: usize) -> usize {
        self.rows[lane].len()
    }

    /// Returns the index of the first action of the lane during which the pass may have begun.
    pub(super) fn may_begin(&self, pass: Pass, lane: usize) -> usize {
        self.timed(pass).map_or(0, |timed| self.actions[timed.action].over[lane])
    }

    /// Returns the index of the first action of the lane that surely begins after the pass is over.
    /// It is the number of the lane's actions if there is none.
    pub(super) fn is_over(&self, pass: Pass, lane: usize) -> usize {
        let Some(timed) = self.timed(pass) else { return self.rows[lane].len() };
        let Ran { lane: on, place, .. } = self.actions[timed.action];
        self.rows[lane].partition_point(|action| self.actions[*action].over[on] <= place)
    }
}
