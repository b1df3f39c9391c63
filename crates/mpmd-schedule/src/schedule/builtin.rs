//! The built-in schedules, by name.
//!
//! Their rules come from these systems: GPipe (arXiv 1811.06965), PipeDream-Flush or 1F1B and its
//! interleaved form (arXiv 2104.04473), eager 1F1B (arXiv 2211.05322); breadth-first or looped BFS
//! (arXiv 2211.05953), zero bubble H1 and V (arXiv 2401.10241, 2405.15362), DualPipeV (DeepSeek,
//! "cut in half"). The orders equal those of torch 2.11.0, cell by cell.

use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};

use super::error::ScheduleError;
use super::{Action, ActionKind, Schedule};

/// Maximum number of actions of a built-in schedule. They take 3 GiB of memory.
const MOST_ACTIONS: usize = 1 << 27;

/// A built-in schedule: a rule that gives each rank an order for any number of ranks, microbatches
/// and chunks. Chunks are the stages on each rank.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Builtin {
    /// Every forward pass, then every backward pass, in ascending order of microbatches.
    GPipe,
    /// GPipe with backward passes in descending order, as in its paper.
    GPipeReversed,
    /// With `m` microbatches, rank `r` of `p` warms up with `min(m, p - 1 - r)` forward passes,
    /// then alternates forward and backward.
    OneFOneB,
    /// 1F1B with `min(m, 2 (p - r) - 1)` forward passes of rank `r` of `p` before its first
    /// backward pass. This gives outputs time to travel. `m` is the number of microbatches.
    Eager1F1B,
    /// 1F1B with several stages on each rank, in rounds of microbatches.
    Interleaved1F1B,
    /// Several stages on each rank. A rank runs a stage for all microbatches before the next stage.
    LoopedBfs,
    /// Zero bubble H1: 1F1B whose pauses are filled with weight gradients.
    ZbH1,
    /// Zero bubble H1 with several stages on each rank.
    InterleavedZeroBubble,
    /// Zero bubble with two stages on each rank, placed as a V.
    ZbvZeroBubble,
    /// Stages placed as a V; a rank runs a forward and a backward pass at the same time.
    DualPipeV,
    /// Inference: forward passes only, in rounds of `p` microbatches on `p` ranks. In each round, a
    /// rank runs its stages one after the other.
    ForwardOnly,
}

impl Builtin {
    /// All built-in schedules.
    pub const ALL: [Self; 11] = [
        Self::GPipe,
        Self::GPipeReversed,
        Self::OneFOneB,
        Self::Eager1F1B,
        Self::Interleaved1F1B,
        Self::LoopedBfs,
        Self::ZbH1,
        Self::InterleavedZeroBubble,
        Self::ZbvZeroBubble,
        Self::DualPipeV,
        Self::ForwardOnly,
    ];

    /// Returns the name of the built-in schedule, which its schedules have too. It is torch's name
    /// if torch has the schedule.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "GPipe",
            Self::GPipeReversed => "GPipe-reversed",
            Self::OneFOneB => "1F1B",
            Self::Eager1F1B => "Eager1F1B",
            Self::Interleaved1F1B => "Interleaved1F1B",
            Self::LoopedBfs => "LoopedBFS",
            Self::ZbH1 => "ZB-H1",
            Self::InterleavedZeroBubble => "InterleavedZeroBubble",
            Self::ZbvZeroBubble => "ZBVZeroBubble",
            Self::DualPipeV => "DualPipeV",
            Self::ForwardOnly => "ForwardOnly",
        }
    }

    /// Returns the built-in schedule with this name, or `None` if there is none. Case, `-`, `_` and
    /// spaces do not matter. The short names `interleaved`, `bfs`, `zb1p`, `zbv`, `forward`, and
    /// `eager` are accepted too.
    pub fn named(name: &str) -> Option<Self> {
        let plain = |name: &str| -> String {
            name.chars()
                .filter(|c| !matches!(c, '-' | '_' | ' '))
                .map(|c| c.to_ascii_lowercase())
                .collect()
        };

        let asked = plain(name);
        let short = match asked.as_str() {
            "interleaved" => Some(Self::Interleaved1F1B),
            "bfs" => Some(Self::LoopedBfs),
            "zb1p" => Some(Self::InterleavedZeroBubble),
            "zbv" => Some(Self::ZbvZeroBubble),
            "eager" => Some(Self::Eager1F1B),
            "forward" => Some(Self::ForwardOnly),
            _ => None,
        };

        short.or_else(|| {
            Self::ALL
                .into_iter()
                .find(|builtin| plain(builtin.name()) == asked)
        })
    }

    /// Returns the names of all built-in schedules as a list for messages.
    pub(super) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// Returns the default number of stages on each rank: two for schedules with several stages per
    /// rank, else one.
    pub fn default_chunks(self) -> usize {
        match self {
            Self::Interleaved1F1B
            | Self::LoopedBfs
            | Self::InterleavedZeroBubble
            | Self::ZbvZeroBubble
            | Self::DualPipeV => 2,
            _ => 1,
        }
    }

    /// Creates the schedule for `ranks` ranks with `chunks` stages each.
    ///
    /// # Errors
    ///
    /// - [`ScheduleError::Empty`] if `ranks` or `microbatches` is 0.
    /// - [`ScheduleError::Rule`] if the rule does not allow these numbers, or there would be more
    ///   than 2^27 actions. GPipe, 1F1B, eager 1F1B and ZB-H1 have one stage per rank, ZBV and
    ///   DualPipeV two. The interleaved schedules divide their `m` microbatches on `p` ranks into
    ///   `max(1, m div p)` rounds of equally many. DualPipeV needs at least two microbatches per
    ///   rank. All others allow fewer microbatches than ranks.
    pub fn schedule(
        self,
        ranks: usize,
        microbatches: usize,
        chunks: usize,
    ) -> Result<Schedule, ScheduleError> {
        if ranks == 0 || microbatches == 0 {
            return Err(ScheduleError::Empty {
                ranks,
                microbatches,
            });
        }

        let size = BuiltinSize {
            ranks,
            microbatches,
            chunks,
        };
        self.check(size)?;
        let mut rows = Vec::with_capacity(ranks);
        let mut overlaps = Vec::with_capacity(ranks);

        for rank in 0..ranks {
            let mut row = RankRow::new(3 * microbatches * chunks);
            match self {
                Self::GPipe => size.gpipe(rank, false, &mut row),
                Self::GPipeReversed => size.gpipe(rank, true, &mut row),
                Self::OneFOneB => size.interleaved(rank, ranks - 1 - rank, &mut row),
                Self::Eager1F1B => size.interleaved(rank, 2 * (ranks - rank) - 2, &mut row),
                Self::Interleaved1F1B => {
                    size.interleaved(rank, size.first_chunks() + 2 * (ranks - 1 - rank), &mut row)
                }
                Self::LoopedBfs => size.breadth_first(rank, &mut row),
                Self::ZbH1 | Self::InterleavedZeroBubble => size.zero_bubble(rank, &mut row),
                Self::ZbvZeroBubble => size.zbv(rank, &mut row),
                Self::DualPipeV => size.dual_pipe_v(rank, &mut row),
                Self::ForwardOnly => size.forward_only(rank, &mut row),
            }

            row.actions.shrink_to_fit();
            rows.push(row.actions);
            overlaps.push(row.overlaps);
        }
        Schedule::with_overlaps(self.name(), rows, overlaps)
    }

    /// Fails if the schedule does not allow these numbers of ranks, microbatches and stages.
    fn check(self, size: BuiltinSize) -> Result<(), ScheduleError> {
        let BuiltinSize {
            ranks,
            microbatches,
            chunks,
        } = size;
        let refuse = |rule: String| {
            Err(ScheduleError::Rule {
                schedule: self.name(),
                ranks,
                microbatches,
                chunks,
                rule,
            })
        };

        match self {
            Self::GPipe | Self::GPipeReversed | Self::OneFOneB | Self::Eager1F1B | Self::ZbH1
                if chunks != 1 =>
            {
                return refuse("it has one stage a rank".to_owned());
            }
            Self::ZbvZeroBubble | Self::DualPipeV if chunks != 2 => {
                return refuse("it has two stages a rank".to_owned());
            }
            _ if chunks == 0 => return refuse("a rank needs a stage".to_owned()),
            _ => {}
        }

        let passes = [ranks, microbatches, chunks, 3]
            .into_iter()
            .try_fold(1, usize::checked_mul);
        if passes.is_none_or(|passes| passes > MOST_ACTIONS) {
            return refuse(format!("that is more than {MOST_ACTIONS} actions"));
        }

        let rounds = (microbatches / ranks).max(1);
        if matches!(
            self,
            Self::Interleaved1F1B | Self::InterleavedZeroBubble | Self::ZbH1
        ) && chunks > 1
            && !microbatches.is_multiple_of(rounds)
        {
            let below = (1..microbatches)
                .rev()
                .find(|m| m.is_multiple_of((m / ranks).max(1)));
            return refuse(format!(
                "its microbatches go in {rounds} rounds (microbatches / ranks) of equally many, \
                 and {rounds} does \
                 not divide {microbatches}; {} and {} would do",
                below.unwrap_or(1),
                (microbatches..)
                    .find(|m| m.is_multiple_of((m / ranks).max(1)))
                    .unwrap_or(microbatches)
            ));
        }

        if self == Self::DualPipeV && microbatches < 2 * ranks {
            return refuse(format!(
                "it needs two microbatches a rank, {}, at the least",
                2 * ranks
            ));
        }
        Ok(())
    }
}

/// The row of a rank under construction.
struct RankRow {
    actions: Vec<Action>,
    overlaps: Vec<usize>,
}

impl RankRow {
    fn new(capacity: usize) -> Self {
        Self {
            actions: Vec::with_capacity(capacity),
            overlaps: Vec::new(),
        }
    }

    fn push(&mut self, stage: usize, kind: ActionKind, microbatch: usize) {
        self.actions.push(Action {
            stage,
            kind,
            microbatch,
        });
    }
}

/// A pass of a microbatch through a stage.
#[derive(Clone, Copy)]
struct StagePass {
    stage: usize,
    microbatch: usize,
}

/// The numbers of ranks, microbatches and chunks that a schedule is created for.
#[derive(Clone, Copy)]
struct BuiltinSize {
    ranks: usize,
    microbatches: usize,
    chunks: usize,
}

impl BuiltinSize {
    /// Returns the number of microbatches in a round.
    fn round(self) -> usize {
        self.microbatches / (self.microbatches / self.ranks).max(1)
    }

    /// Returns the number of forward passes of a rank before its last chunk begins.
    fn first_chunks(self) -> usize {
        (self.chunks - 1) * self.round()
    }

    /// Returns the `n`-th pass of a rank, counted from 0, if its chunks take turns in rounds.
    /// Counts only forward passes if `forward`. Otherwise counts only backward passes, whose chunks
    /// descend.
    fn nth(self, rank: usize, n: usize, forward: bool) -> StagePass {
        let Self {
            ranks,
            microbatches,
            chunks,
        } = self;
        if chunks == 1 {
            // Also valid if microbatches do not divide into equal rounds.
            return StagePass {
                stage: rank,
                microbatch: n,
            };
        }

        let round = self.round();
        let chunk = n / round % chunks;
        let chunk = if forward { chunk } else { chunks - 1 - chunk };
        let microbatch = n / (round * chunks) * round + n % round;
        debug_assert!(microbatch < microbatches);
        StagePass {
            stage: chunk * ranks + rank,
            microbatch,
        }
    }

    fn gpipe(self, rank: usize, reversed: bool, row: &mut RankRow) {
        let Self { microbatches, .. } = self;
        for microbatch in 0..microbatches {
            row.push(rank, Forward, microbatch);
        }
        for n in 0..microbatches {
            row.push(
                rank,
                Backward,
                if reversed { microbatches - 1 - n } else { n },
            );
        }
    }

    /// Builds the row of a rank for all forms of 1F1B. First come `warm_up` forward passes, then
    /// forward and backward passes in turn, then the remaining backward passes.
    fn interleaved(self, rank: usize, warm_up: usize, row: &mut RankRow) {
        let passes = self.microbatches * self.chunks;
        let warm_up = warm_up.min(passes);
        for n in 0..passes + warm_up {
            if n < passes {
                let StagePass { stage, microbatch } = self.nth(rank, n, true);
                row.push(stage, Forward, microbatch);
            }
            if n >= warm_up {
                let StagePass { stage, microbatch } = self.nth(rank, n - warm_up, false);
                row.push(stage, Backward, microbatch);
            }
        }
    }

    fn breadth_first(self, rank: usize, row: &mut RankRow) {
        let stage = |chunk| chunk * self.ranks + rank;
        for chunk in 0..self.chunks {
            for microbatch in 0..self.microbatches {
                row.push(stage(chunk), Forward, microbatch);
            }
        }
        for chunk in (0..self.chunks).rev() {
            for microbatch in (0..self.microbatches).rev() {
                row.push(stage(chunk), Backward, microbatch);
            }
        }
    }

    /// Builds the row of a rank for 1F1B with separate weight gradients. From the `rank`-th input
    /// gradient on, the oldest waiting weight gradient follows each one. The remaining weight
    /// gradients come at the end.
    fn zero_bubble(self, rank: usize, row: &mut RankRow) {
        let passes = self.microbatches * self.chunks;
        let warm_up = (self.first_chunks() + self.ranks - 1 - rank).min(passes);
        let weight = |n: usize, row: &mut RankRow| {
            let StagePass { stage, microbatch } = self.nth(rank, n, false);
            row.push(stage, BackwardWeight, microbatch);
        };

        for n in 0..passes + warm_up {
            if n < passes {
                let StagePass { stage, microbatch } = self.nth(rank, n, true);
                row.push(stage, Forward, microbatch);
            }
            if n >= warm_up {
                let backward = n - warm_up;
                let StagePass { stage, microbatch } = self.nth(rank, backward, false);
                row.push(stage, BackwardInput, microbatch);
                if backward >= rank {
                    weight(backward - rank, row);
                }
            }
        }

        for n in passes.saturating_sub(rank)..passes {
            weight(n, row);
        }
    }

    /// Builds a row of forward passes in rounds of `p` microbatches on `p` ranks. The last round
    /// may have fewer. Each round passes through all chunks of the rank.
    fn forward_only(self, rank: usize, row: &mut RankRow) {
        for first in (0..self.microbatches).step_by(self.ranks) {
            for chunk in 0..self.chunks {
                for microbatch in first..(first + self.ranks).min(self.microbatches) {
                    row.push(chunk * self.ranks + rank, Forward, microbatch);
                }
            }
        }
    }

    fn zbv(self, rank: usize, row: &mut RankRow) {
        let Self {
            ranks,
            microbatches,
            ..
        } = self;
        // The rule assumes at least this many microbatches; passes of nonexistent ones are left
        // out.
        let all = microbatches.max(2 * ranks - 1);
        let mut v = VProgress::new(self, rank);
        for _ in 0..2 * (ranks - rank) - 1 {
            v.next(There, Forward, row);
        }
        for _ in 0..rank {
            v.next(Back, Forward, row);
            v.next(There, Forward, row);
        }

        for _ in rank..ranks {
            v.each(Back, &[Forward, BackwardInput, BackwardWeight], row);
        }
        while v.count(Back, Forward) < all {
            if v.count(There, Forward) < all {
                v.next(There, Forward, row);
            }
            v.each(There, &[BackwardInput, BackwardWeight], row);
            v.each(Back, &[Forward, BackwardInput, BackwardWeight], row);
        }

        for _ in 0..rank {
            v.next(There, BackwardInput, row);
            v.next(Back, BackwardInput, row);
        }
        for _ in rank..ranks {
            v.each(There, &[BackwardInput, BackwardWeight], row);
        }

        while v.count(Back, BackwardWeight) < all {
            v.next(Back, BackwardWeight, row);
        }
        while v.count(There, BackwardWeight) < all {
            v.next(There, BackwardWeight, row);
        }
    }

    fn dual_pipe_v(self, rank: usize, row: &mut RankRow) {
        let Self {
            ranks,
            microbatches,
            ..
        } = self;

        let after = ranks - 1 - rank;
        let mut v = VProgress::new(self, rank);
        for _ in 0..2 * after {
            v.next(There, Forward, row);
        }
        for _ in 0..rank + 1 {
            v.next(There, Forward, row);
            v.next(Back, Forward, row);
        }
        for _ in 0..after {
            v.input(Back, row);
            v.oldest(row);
            v.next(Back, Forward, row);
        }

        for n in 0..microbatches - 2 * ranks + rank + 1 {
            v.pair(There, Back, n > 0 || after > 0, row);
            v.pair(Back, There, true, row);
        }
        for _ in 0..after {
            v.both(Back, row);
            v.pair(Back, There, true, row);
        }

        let mut split = false;
        for n in 0..rank + 1 {
            let turn = n == rank.div_ceil(2);
            split |= turn && !rank.is_multiple_of(2);
            v.whole_or_input(Back, split, row);
            split |= turn;
            v.whole_or_input(There, split, row);
        }

        for _ in 0..after {
            v.oldest(row);
            v.whole_or_input(There, split, row);
        }
        while v.oldest(row) {}
    }
}

/// The two stages of a rank in a V-shaped placement: `There` is the earlier stage, `Back` the
/// later.
#[derive(Clone, Copy)]
enum Leg {
    There,
    Back,
}
use Leg::{Back, There};

/// The progress of a rank in a V-shaped placement.
struct VProgress {
    stages: [usize; 2],
    microbatches: usize,
    /// Numbers of passes so far, indexed by [`Leg`], then by kind: forward, input gradient, weight
    /// gradient.
    counts: [[usize; 3]; 2],
    /// Weight gradients whose input gradient was computed separately, the oldest first.
    waiting: Vec<StagePass>,
    /// Number of passes in `waiting` that are already in the row.
    taken: usize,
}

impl VProgress {
    fn new(size: BuiltinSize, rank: usize) -> Self {
        Self {
            stages: [rank, 2 * size.ranks - 1 - rank],
            microbatches: size.microbatches,
            counts: [[0; 3]; 2],
            waiting: Vec::new(),
            taken: 0,
        }
    }

    fn column(kind: ActionKind) -> usize {
        match kind {
            Forward => 0,
            BackwardInput | Backward => 1,
            BackwardWeight => 2,
        }
    }

    fn count(&self, leg: Leg, kind: ActionKind) -> usize {
        self.counts[leg as usize][Self::column(kind)]
    }

    /// Appends the leg's next pass of this kind to `row` if its microbatch exists. Counts the pass
    /// in either case.
    fn next(&mut self, leg: Leg, kind: ActionKind, row: &mut RankRow) {
        let count = &mut self.counts[leg as usize][Self::column(kind)];
        if *count < self.microbatches {
            row.push(self.stages[leg as usize], kind, *count);
        }
        *count += 1;
    }

    fn each(&mut self, leg: Leg, kinds: &[ActionKind], row: &mut RankRow) {
        for kind in kinds {
            self.next(leg, *kind, row);
        }
    }

    /// Appends the leg's next input gradient to `row`. [`oldest`](Self::oldest) appends its weight
    /// gradient later.
    fn input(&mut self, leg: Leg, row: &mut RankRow) {
        self.waiting.push(StagePass {
            stage: self.stages[leg as usize],
            microbatch: self.count(leg, BackwardInput),
        });
        self.next(leg, BackwardInput, row);
    }

    fn both(&mut self, leg: Leg, row: &mut RankRow) {
        self.next(leg, Backward, row);
    }

    fn whole_or_input(&mut self, leg: Leg, input: bool, row: &mut RankRow) {
        if input {
            self.input(leg, row)
        } else {
            self.both(leg, row)
        }
    }

    /// Appends the oldest waiting weight gradient to `row`. Returns false if none is waiting.
    fn oldest(&mut self, row: &mut RankRow) -> bool {
        let Some(StagePass { stage, microbatch }) = self.waiting.get(self.taken).copied() else {
            return false;
        };
        self.taken += 1;
        row.push(stage, BackwardWeight, microbatch);
        true
    }

    /// Appends the next forward pass of one leg and the next backward pass of the other to `row`.
    /// They form an overlapped pair if `overlapped`.
    fn pair(&mut self, forward: Leg, backward: Leg, overlapped: bool, row: &mut RankRow) {
        if overlapped {
            row.overlaps.push(row.actions.len());
        }
        self.next(forward, Forward, row);
        self.both(backward, row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(schedule: &Schedule) -> Vec<String> {
        (0..schedule.ranks())
            .map(|rank| schedule.cells(rank).join(" "))
            .collect()
    }

    #[test]
    fn small_schedules_have_the_known_orders() {
        let of = |name, ranks, microbatches| {
            text(&Schedule::named(name, ranks, microbatches, None).unwrap())
        };
        assert_eq!(
            of("1f1b", 2, 3),
            ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
        );
        assert_eq!(of("eager-1f1b", 2, 4)[0], "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
        assert_eq!(of("GPipe reversed", 1, 3), ["0F0 0F1 0F2 0B2 0B1 0B0"]);
        assert_eq!(
            of("zb-h1", 2, 2),
            ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
        );
        let forward = Schedule::named("forward", 2, 3, Some(2)).unwrap();
        assert_eq!(
            text(&forward),
            ["0F0 0F1 2F0 2F1 0F2 2F2", "1F0 1F1 3F0 3F1 1F2 3F2"]
        );
        assert_eq!(
            text(&Schedule::one_f_one_b(4, 2).unwrap())[0],
            "0F0 0F1 0B0 0B1"
        );
    }

    #[test]
    fn every_name_is_known_in_any_spelling() {
        for builtin in Builtin::ALL {
            let name = builtin.name();
            for spelled in [
                name.to_owned(),
                name.to_uppercase(),
                name.to_lowercase().replace('-', "_"),
            ] {
                assert_eq!(Builtin::named(&spelled), Some(builtin), "{spelled}");
            }
        }
        for (alias, builtin) in [
            ("eager1f1b", Builtin::Eager1F1B),
            ("interleaved", Builtin::Interleaved1F1B),
            ("bfs", Builtin::LoopedBfs),
            ("zbh1", Builtin::ZbH1),
            ("ZB1P", Builtin::InterleavedZeroBubble),
            ("zbv", Builtin::ZbvZeroBubble),
            ("dual-pipe-v", Builtin::DualPipeV),
            ("forward", Builtin::ForwardOnly),
        ] {
            assert_eq!(Builtin::named(alias), Some(builtin), "{alias}");
        }
        assert_eq!(Builtin::named("zb"), None);
    }

    #[test]
    fn zb_h1_equals_interleaved_zero_bubble_with_one_chunk() {
        for ranks in 1..6 {
            for microbatches in 1..12 {
                let of = |builtin: Builtin| builtin.schedule(ranks, microbatches, 1).unwrap();
                assert_eq!(
                    of(Builtin::ZbH1).rows(),
                    of(Builtin::InterleavedZeroBubble).rows()
                );
            }
        }
    }

    #[test]
    fn few_microbatches_work_if_the_rule_allows_them() {
        for builtin in Builtin::ALL {
            for ranks in 1..7 {
                for microbatches in 1..14_usize {
                    for chunks in 1..4 {
                        let allowed = match builtin {
                            Builtin::GPipe
                            | Builtin::GPipeReversed
                            | Builtin::OneFOneB
                            | Builtin::Eager1F1B
                            | Builtin::ZbH1 => chunks == 1,
                            Builtin::ZbvZeroBubble => chunks == 2,
                            Builtin::DualPipeV => chunks == 2 && microbatches >= 2 * ranks,
                            Builtin::Interleaved1F1B | Builtin::InterleavedZeroBubble => {
                                chunks == 1
                                    || microbatches.is_multiple_of((microbatches / ranks).max(1))
                            }
                            Builtin::LoopedBfs | Builtin::ForwardOnly => true,
                        };
                        let found = builtin.schedule(ranks, microbatches, chunks);
                        assert_eq!(
                            found.is_ok(),
                            allowed,
                            "{builtin:?} {ranks} {microbatches} {chunks} {found:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn errors_say_what_is_allowed() {
        let error = |name, ranks, microbatches, chunks| {
            Schedule::named(name, ranks, microbatches, chunks)
                .unwrap_err()
                .to_string()
        };
        let found = error("interleaved", 2, 5, None);
        let expected = "Interleaved1F1B with 2 ranks, 5 microbatches and 2 stages a rank: its \
            microbatches go in 2 \
                        rounds (microbatches / ranks) of equally many, and 2 does not divide 5; 4 \
                        and 6 would do";
        assert_eq!(found, expected);
        assert!(
            error("dualpipev", 4, 7, None).contains("two microbatches a rank, 8, at the least")
        );
        assert!(error("zbv", 4, 8, Some(1)).contains("two stages a rank"));
        assert!(error("gpipe", 4, 8, Some(2)).contains("one stage a rank"));
        assert!(error("bfs", 4, 8, Some(0)).contains("a rank needs a stage"));
        assert!(error("bfs", usize::MAX, 8, Some(4)).contains("more than"));
        assert!(error("gpipe", 0, 8, None).contains("at least one rank"));
        assert!(error("nonsense", 4, 8, None).contains("there are GPipe, GPipe-reversed, 1F1B,"));
    }
}
