//! Schedules: the order of computations on each rank, as plain data with pure functions.

mod builtin;
mod error;
mod faults;
mod order;

use std::fmt;
use std::sync::Arc;

pub use builtin::Builtin;
pub use error::ScheduleError;
pub(crate) use faults::ActionPlaces;
pub use faults::{PlacedAction, RowPlace, ScheduleFault};

/// The kind of computation that an action performs for its stage and microbatch.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum ActionKind {
    /// The forward pass: computes the outputs, and the residuals for the backward passes.
    Forward,
    /// The input gradient: computes the gradient of the stage's inputs.
    BackwardInput,
    /// The weight gradient: computes the gradient of the parameters and adds it to the sum so far.
    BackwardWeight,
    /// The whole backward pass: the input gradient, then the weight gradient.
    Backward,
}

impl ActionKind {
    /// Returns the letter of the kind in torch's text format: `F`, `I`, `W` or `B`.
    pub fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
            Self::Backward => 'B',
        }
    }
}

/// One step of a rank: the computation of a stage for a microbatch.
///
/// Displayed as in torch's text format: stage, letter, microbatch. `2F0` is the forward pass of
/// stage 2.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Action {
    /// The stage, from 0.
    pub stage: usize,
    /// The kind of computation.
    pub kind: ActionKind,
    /// The microbatch, from 0.
    pub microbatch: usize,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.microbatch)
    }
}

/// The way in which stages are placed on ranks.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum StagePlacement {
    /// Stage `s` is on rank `s mod p` of `p` ranks. With several stages per rank, stages go round
    /// the ranks.
    Loop,
    /// Two stages per rank, in the form of a V: rank `r` of `p` has stages `r` and `2p - 1 - r`.
    V,
    /// Any other placement.
    Custom,
}

impl StagePlacement {
    /// Returns `loop`, `V` or `custom`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::V => "V",
            Self::Custom => "custom",
        }
    }
}

/// The order of actions on each rank, and the rank of each stage.
///
/// A rank is a position in the pipeline. The mesh maps ranks to processes and devices.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Schedule {
    name: String,
    microbatches: usize,
    rank_of_stage: Arc<Vec<usize>>,
    /// The actions of each rank in order. Shared, so that clones and comparisons are cheap.
    rows: Arc<Vec<Vec<Action>>>,
    /// For each rank, the positions in its row at which overlapped pairs begin, ascending.
    overlaps: Arc<Vec<Vec<usize>>>,
    has_backward: bool,
}

impl Schedule {
    /// Creates a schedule from one order for each rank.
    ///
    /// Each stage has all its actions on one rank; a rank may have several stages. For each
    /// microbatch, each stage has a forward pass, and either `B` or both `I` and `W`. For
    /// inference, no stage has backward passes.
    ///
    /// # Errors
    ///
    /// If an action is missing or appears twice, or if a stage is on two ranks. Also if the ranks
    /// wait for each other in a cycle.
    pub fn new(name: impl Into<String>, rows: Vec<Vec<Action>>) -> Result<Self, ScheduleError> {
        let overlaps = vec![Vec::new(); rows.len()];
        Self::with_overlaps(name, rows, overlaps)
    }

    /// Creates a schedule like [`Schedule::new`], with overlapped pairs: two neighbouring actions
    /// that a rank computes at the same time if it can. `overlaps` has, for each rank, the
    /// positions at which pairs begin, ascending. A runtime without overlap computes the two
    /// actions one after the other.
    ///
    /// # Errors
    ///
    /// The errors of [`Schedule::new`], and:
    ///
    /// - if a pair is not a forward and a backward pass next to each other in the row;
    /// - if two pairs share an action;
    /// - if one action of a pair needs a result of the other, so that they cannot begin together.
    pub fn with_overlaps(
        name: impl Into<String>,
        rows: Vec<Vec<Action>>,
        overlaps: Vec<Vec<usize>>,
    ) -> Result<Self, ScheduleError> {
        let name = name.into();
        faults::check_overlaps(&name, &rows, &overlaps)?;
        let faults::CompleteSchedule {
            microbatches,
            rank_of_stage,
            has_backward,
        } = faults::check(&name, &rows)?;

        let schedule = Self {
            name,
            microbatches,
            rank_of_stage: Arc::new(rank_of_stage),
            rows: Arc::new(rows),
            overlaps: Arc::new(overlaps),
            has_backward,
        };

        schedule.global_order()?;
        schedule.check_pairs()?;
        Ok(schedule)
    }

    /// Creates the built-in schedule with this name; see [`Builtin::named`]. Case, `-`, `_` and
    /// spaces in the name do not matter. `chunks` is the number of stages on each rank; `None`
    /// means [`Builtin::default_chunks`].
    ///
    /// # Errors
    ///
    /// If there is no such schedule, or it does not allow these numbers; see [`Builtin::schedule`].
    pub fn named(
        name: &str,
        ranks: usize,
        microbatches: usize,
        chunks: Option<usize>,
    ) -> Result<Self, ScheduleError> {
        let Some(builtin) = Builtin::named(name) else {
            return Err(ScheduleError::Unknown {
                name: name.to_owned(),
            });
        };
        builtin.schedule(
            ranks,
            microbatches,
            chunks.unwrap_or(builtin.default_chunks()),
        )
    }

    /// Creates a GPipe schedule: every forward pass, then every backward pass, in ascending order
    /// of microbatches.
    ///
    /// # Errors
    ///
    /// If `ranks` or `microbatches` is 0.
    pub fn gpipe(ranks: usize, microbatches: usize) -> Result<Self, ScheduleError> {
        Builtin::GPipe.schedule(ranks, microbatches, 1)
    }

    /// Creates a 1F1B schedule for `m` microbatches. Rank `r` of `p` warms up with
    /// `min(m, p - 1 - r)` forward passes. Then it alternates forward and backward passes, and ends
    /// with the remaining backward passes. Fewer microbatches than ranks are allowed.
    ///
    /// # Errors
    ///
    /// If `ranks` or `microbatches` is 0.
    pub fn one_f_one_b(ranks: usize, microbatches: usize) -> Result<Self, ScheduleError> {
        Builtin::OneFOneB.schedule(ranks, microbatches, 1)
    }

    /// Returns the schedule's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the same schedule with another name.
    pub fn renamed(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.rank_of_stage.len()
    }

    /// Returns the number of microbatches.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Returns the rank of a stage.
    ///
    /// # Panics
    ///
    /// If the stage does not exist.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.rank_of_stage[stage]
    }

    /// Returns the rank of each stage, indexed by stage.
    pub fn ranks_of_stages(&self) -> &[usize] {
        &self.rank_of_stage
    }

    /// Returns the placement of the stages on the ranks. On a single rank it is
    /// [`StagePlacement::Loop`].
    pub fn placement(&self) -> StagePlacement {
        let ranks = self.ranks();
        let stages = self.stages();
        let is =
            |of: &dyn Fn(usize) -> usize| (0..stages).all(|stage| self.rank_of(stage) == of(stage));
        if stages.is_multiple_of(ranks) && is(&|stage| stage % ranks) {
            StagePlacement::Loop
        } else if stages == 2 * ranks && is(&|stage| stage.min(2 * ranks - 1 - stage)) {
            StagePlacement::V
        } else {
            StagePlacement::Custom
        }
    }

    /// Returns true if the schedule has backward passes. Either all stages have them or, for
    /// inference, none.
    pub fn has_backward(&self) -> bool {
        self.has_backward
    }

    /// Returns the order of actions on each rank, indexed by rank.
    pub fn rows(&self) -> &[Vec<Action>] {
        &self.rows
    }

    /// Returns the positions in a rank's row at which overlapped pairs begin, ascending. In torch's
    /// text, the action at such a position and the next one are `(a;b)OVERLAP_F_B`.
    ///
    /// # Panics
    ///
    /// If the rank does not exist.
    pub fn overlaps(&self, rank: usize) -> &[usize] {
        &self.overlaps[rank]
    }

    /// Returns a rank's row as in torch's text: one string for each action or overlapped pair.
    ///
    /// # Panics
    ///
    /// If the rank does not exist.
    pub fn cells(&self, rank: usize) -> Vec<String> {
        self.paired(rank)
            .map(|(one, other)| match other {
                Some(other) => format!("({one};{other})OVERLAP_F_B"),
                None => one.to_string(),
            })
            .collect()
    }

    /// Returns (action, partner) for a rank's actions, in order. The partner is the second action
    /// of an overlapped pair, which is not listed again.
    pub(super) fn paired(&self, rank: usize) -> impl Iterator<Item = (Action, Option<Action>)> {
        let mut row = self.rows[rank].iter().copied().enumerate();
        let mut pairs = self.overlaps[rank].iter().copied().peekable();
        std::iter::from_fn(move || {
            let (at, action) = row.next()?;
            let other = if pairs.next_if_eq(&at).is_some() {
                row.next()
            } else {
                None
            };
            Some((action, other.map(|(_, other)| other)))
        })
    }

    /// Returns the actions that an action needs. An input gradient is given as `I`, even if a `B`
    /// computes it.
    pub(super) fn needs(&self, action: Action) -> impl Iterator<Item = Action> + use<> {
        let Action {
            stage,
            kind,
            microbatch,
        } = action;
        let of = |stage, kind| {
            Some(Action {
                stage,
                kind,
                microbatch,
            })
        };

        let needs = match kind {
            ActionKind::Forward if stage == 0 => [None, None],
            ActionKind::Forward => [of(stage - 1, ActionKind::Forward), None],
            ActionKind::BackwardWeight => [of(stage, ActionKind::BackwardInput), None],
            ActionKind::BackwardInput | ActionKind::Backward => {
                let after = (stage + 1 < self.stages()).then_some(stage + 1);
                [
                    of(stage, ActionKind::Forward),
                    after.and_then(|after| of(after, ActionKind::BackwardInput)),
                ]
            }
        };

        needs.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
    use super::*;

    fn a(stage: usize, kind: ActionKind, microbatch: usize) -> Action {
        Action {
            stage,
            kind,
            microbatch,
        }
    }

    #[test]
    fn placement_of_each_schedule_is_detected() {
        let named = |name, chunks| {
            Schedule::named(name, 3, 6, Some(chunks)).map(|schedule| schedule.placement())
        };
        assert_eq!(named("1f1b", 1), Ok(StagePlacement::Loop));
        assert_eq!(named("interleaved", 3), Ok(StagePlacement::Loop));
        assert_eq!(named("dualpipev", 2), Ok(StagePlacement::V));
        let one = |stage| vec![a(stage, Forward, 0), a(stage, Backward, 0)];
        let swapped = Schedule::new("x", vec![one(1), one(0)]).unwrap();
        assert_eq!(swapped.placement(), StagePlacement::Custom);
        assert_eq!(swapped.ranks_of_stages(), [1, 0]);
    }

    #[test]
    fn overlapped_pairs_are_cells_and_checked() {
        let row = vec![
            a(0, Forward, 0),
            a(0, Forward, 1),
            a(0, Backward, 0),
            a(0, Backward, 1),
        ];
        let with = |pairs: Vec<usize>| Schedule::with_overlaps("x", vec![row.clone()], vec![pairs]);
        let schedule = with(vec![1]).unwrap();
        assert_eq!(schedule.cells(0), ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]);
        assert_eq!(schedule.rows()[0], row);
        for (pairs, expected) in [
            (vec![0], "0F0 and 0F1"),
            (vec![3], "nothing after"),
            (vec![1, 1], "two pairs"),
            (vec![9], "no position"),
        ] {
            let error = with(pairs).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn inference_has_no_backward_passes() {
        let schedule =
            Schedule::new("x", vec![vec![a(0, Forward, 0)], vec![a(1, Forward, 0)]]).unwrap();
        assert!(!schedule.has_backward());
        let rows = vec![
            vec![a(0, Forward, 0)],
            vec![a(1, Forward, 0), a(1, Backward, 0)],
        ];
        let error = Schedule::new("x", rows).unwrap_err().to_string();
        assert!(
            error.contains("0B0 is missing; stage 0 is on rank 0"),
            "{error}"
        );
    }

    #[test]
    fn actions_need_their_neighbour_stages() {
        let schedule = Schedule::gpipe(2, 1).unwrap();
        let needs = |action| {
            schedule
                .needs(action)
                .map(|need| need.to_string())
                .collect::<Vec<_>>()
        };
        assert!(needs(a(0, Forward, 0)).is_empty());
        assert_eq!(needs(a(1, Forward, 0)), ["0F0"]);
        assert_eq!(needs(a(0, Backward, 0)), ["0F0", "1I0"]);
        assert_eq!(needs(a(1, BackwardInput, 0)), ["1F0"]);
        assert_eq!(needs(a(1, BackwardWeight, 0)), ["1I0"]);
    }
}
