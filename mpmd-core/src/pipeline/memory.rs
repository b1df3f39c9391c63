//! How much memory a step takes, from shapes and the schedule: known before anything runs.
//!
//! The model. Of each stage every device holds *kept* bytes all the time, and what the microbatches bring from the
//! beginning of the step until the forward pass that reads it has ended. A pass takes the memory of all its results when it begins, while what it
//! reads is still there, and lets what it read for the last time go when it ends:
//!
//! - the forward pass takes outputs and residuals, and lets its input go;
//! - the input gradient takes weight residuals, but those that are kept residuals, and the gradient of the
//!   inputs; it lets the residuals and the gradient of the outputs go;
//! - the weight gradient takes the sums with its first microbatch, and lets the weight residuals go;
//! - parameters that are stored otherwise are there from the beginning of the step until the last pass that
//!   reads them; finished gradients are there twice while they are put to the stored shardings.
//!
//! An array that goes to another stage is copied, or handed over. A copy takes memory at its taker from when it
//! was made until the pass that reads it has ended, and goes at its giver once it was sent. One that is handed
//! over takes none at its taker and stays its giver's until the taker's pass has ended.
//!
//! What goes by the order of one rank alone is exact. How far the neighbours are meanwhile is a question of time:
//! [`MemoryPlan::expected`] has every rank start as soon as it can, with passes of equal length (both gradients
//! take two) and moves that take next to none; [`MemoryPlan::at_most`] has everything come as early, and go back as
//! late, as the orders allow at all. Not counted are what kernels take for themselves, collectives, and packing.

use std::collections::BTreeMap;

use super::schedule::{Action, ActionKind, Schedule, ScheduleError};
use crate::topology::DeviceId;

/// What a device of a stage holds of one microbatch, or of the parameters, in bytes that its pool counts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StageBytes {
    /// What is there all the time: the parameters as they are stored, and what the caller keeps beside them.
    pub kept: u64,
    /// What each microbatch brings: the pipeline's input on the first stage, and side inputs.
    pub brought: u64,
    /// Parameters in the shardings that kernels compute with, where these are others than the stored ones.
    pub gathered: u64,
    /// The gradients that weight passes add to.
    pub gradients: u64,
    /// Those in the stored shardings, where they are put there.
    pub reduced: u64,
    /// What the forward pass is given by the stage before. Nothing on the first stage, and none of what is
    /// handed over.
    pub input: u64,
    /// What the forward pass gives.
    pub output: u64,
    /// Residuals of the forward pass.
    pub residual: u64,
    /// Those among them that are weight residuals as they are.
    pub kept_residual: u64,
    /// Weight residuals.
    pub weight_residual: u64,
    /// The gradient of the inputs, which the stage before is given. Nothing on the first stage.
    pub input_gradient: u64,
    /// What this stage is given of the gradient of its outputs. Nothing on the last stage, and none of what is
    /// handed over.
    pub output_gradient: u64,
    /// Whether the outputs are handed over, and so stay until the stage after has read them.
    pub lends_output: bool,
    /// The same of the gradient of the inputs.
    pub lends_input_gradient: bool,
}

/// The most memory that each device has in use in a step, in bytes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MemoryPlan {
    devices: BTreeMap<DeviceId, DeviceMemory>,
}

/// The most memory that a device, or a process, has in use in a step.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct DeviceMemory {
    /// Where neighbours are as fast as each other.
    pub expected: u64,
    /// Whatever the pace of the neighbours.
    pub at_most: u64,
}

impl MemoryPlan {
    /// The plan of a schedule, from what the devices of each stage hold.
    ///
    /// # Errors
    ///
    /// Where the schedule cannot proceed.
    ///
    /// # Panics
    ///
    /// Where there are not as many stages as the schedule has.
    pub fn new(
        schedule: &Schedule,
        stages: &[BTreeMap<DeviceId, StageBytes>],
    ) -> Result<Self, ScheduleError> {
        assert_eq!(schedule.stages(), stages.len(), "stages of schedule {}", schedule.name());
        let order = schedule.global_order()?;
        let (times, reach) = (Times::new(schedule, &order), Reach::new(schedule, &order));
        let mut found = BTreeMap::new();
        for device in stages.iter().flat_map(BTreeMap::keys) {
            found.entry(*device).or_insert_with(|| {
                let mine: Vec<_> = stages.iter().map(|devices| devices.get(device).copied()).collect();
                let of = |stage: usize| mine[stage];
                DeviceMemory {
                    expected: expected(schedule, &times, of),
                    at_most: at_most(schedule, &reach, of),
                }
            });
        }
        Ok(Self { devices: found })
    }

    /// Each device's memory, in the order of their numbers.
    pub fn devices(&self) -> impl Iterator<Item = (DeviceId, DeviceMemory)> + '_ {
        self.devices.iter().map(|(device, memory)| (*device, *memory))
    }

    /// The sum over these devices, each at its own time of most use: those of a process.
    pub fn of(&self, devices: &[DeviceId]) -> DeviceMemory {
        let found = devices.iter().filter_map(|device| self.devices.get(device));
        found.fold(DeviceMemory::default(), |sum, one| DeviceMemory {
            expected: sum.expected + one.expected,
            at_most: sum.at_most + one.at_most,
        })
    }
}

/// What a pass takes a time of, so that moves are short beside it.
const PASS: u64 = 1 << 20;
/// What a move takes.
const MOVE: u64 = 1;

/// When each action begins and ends.
struct Times {
    of: BTreeMap<Action, (u64, u64)>,
}

impl Times {
    fn new(schedule: &Schedule, order: &[Action]) -> Self {
        let mut times = Self { of: BTreeMap::new() };
        let mut free = vec![0; schedule.ranks()];
        for action in order {
            let rank = schedule.rank_of(action.stage);
            let ready = schedule.needs(*action).map(|need| {
                let (_, end) = match need.kind {
                    // An input gradient goes its way before the weight gradient begins.
                    ActionKind::BackwardInput => times.input_gradient(need.stage, need.microbatch),
                    _ => times.forward(need.stage, need.microbatch),
                };
                end + if need.stage == action.stage { 0 } else { MOVE }
            });
            let start = ready.max().unwrap_or(0).max(free[rank]);
            let end = start + if action.kind == ActionKind::Backward { 2 * PASS } else { PASS };
            free[rank] = end;
            times.of.insert(*action, (start, end));
        }
        times
    }

    /// When an input gradient begins and ends, whoever makes it.
    fn input_gradient(&self, stage: usize, microbatch: usize) -> (u64, u64) {
        match self.of.get(&Action { stage, kind: ActionKind::BackwardInput, microbatch }) {
            Some(times) => *times,
            // The first half of both.
            None => {
                let both = Action { stage, kind: ActionKind::Backward, microbatch };
                self.of.get(&both).map_or((0, 0), |(start, end)| (*start, end - PASS))
            }
        }
    }

    fn weight_gradient(&self, stage: usize, microbatch: usize) -> (u64, u64) {
        match self.of.get(&Action { stage, kind: ActionKind::BackwardWeight, microbatch }) {
            Some(times) => *times,
            None => {
                let both = Action { stage, kind: ActionKind::Backward, microbatch };
                self.of.get(&both).map_or((0, 0), |(start, end)| (start + PASS, *end))
            }
        }
    }

    fn forward(&self, stage: usize, microbatch: usize) -> (u64, u64) {
        self.of.get(&Action { stage, kind: ActionKind::Forward, microbatch }).copied().unwrap_or_default()
    }
}

/// The action that makes an input gradient may make both.
fn made_by<T>(need: Action, known: &BTreeMap<Action, T>) -> Action {
    let both = Action { kind: ActionKind::Backward, ..need };
    if need.kind == ActionKind::BackwardInput && known.contains_key(&both) { both } else { need }
}

/// The most that is there at a time, where every rank starts as soon as it can.
fn expected(schedule: &Schedule, times: &Times, of: impl Fn(usize) -> Option<StageBytes>) -> u64 {
    let mut curve = Curve::default();
    let last = schedule.stages() - 1;
    for stage in 0..schedule.stages() {
        let Some(bytes) = of(stage) else { continue };
        let count = schedule.microbatches();
        curve.whole(bytes.kept);
        let (mut first_weight, mut last_weight, mut last_read) = (u64::MAX, 0, 0);
        for microbatch in 0..count {
            let forward = times.forward(stage, microbatch);
            let input = times.input_gradient(stage, microbatch);
            let weight = times.weight_gradient(stage, microbatch);
            first_weight = first_weight.min(weight.0);
            last_weight = last_weight.max(weight.1);
            last_read = last_read.max(forward.1).max(input.1);
            curve.held(bytes.brought, 0, forward.1);
            if stage > 0 {
                let came = times.forward(stage - 1, microbatch).1 + MOVE;
                curve.held(bytes.input, came, forward.1);
                let went = if bytes.lends_input_gradient {
                    times.input_gradient(stage - 1, microbatch).1 + MOVE
                } else {
                    input.1 + 2 * MOVE
                };
                curve.held(bytes.input_gradient, input.0, went);
            }
            if stage < last {
                let came = times.input_gradient(stage + 1, microbatch).1 + MOVE;
                curve.held(bytes.output_gradient, came, input.1);
                let went = if bytes.lends_output {
                    times.forward(stage + 1, microbatch).1 + MOVE
                } else {
                    forward.1 + 2 * MOVE
                };
                curve.held(bytes.output, forward.0, went);
            } else {
                curve.held(bytes.output, forward.0, u64::MAX);
            }
            curve.held(bytes.residual - bytes.kept_residual, forward.0, input.1);
            curve.held(bytes.kept_residual, forward.0, weight.1);
            curve.held(bytes.weight_residual - bytes.kept_residual, input.0, weight.1);
        }
        curve.held(bytes.gathered, 0, last_read);
        let gone = if bytes.reduced > 0 { last_weight + MOVE } else { u64::MAX };
        curve.held(bytes.gradients, first_weight, gone);
        curve.held(bytes.reduced, last_weight, u64::MAX);
    }
    curve.most()
}

/// Bytes over time.
#[derive(Default)]
struct Curve {
    whole: u64,
    /// At a time first what goes, then what comes.
    events: Vec<(u64, bool, u64)>,
}

impl Curve {
    fn whole(&mut self, bytes: u64) {
        self.whole += bytes;
    }

    fn held(&mut self, bytes: u64, from: u64, until: u64) {
        if bytes > 0 && from < until {
            self.events.extend([(from, true, bytes), (until, false, bytes)]);
        }
    }

    fn most(mut self) -> u64 {
        self.events.sort_unstable();
        let (mut now, mut most) = (self.whole, self.whole);
        for (_, comes, bytes) in self.events {
            if comes {
                now += bytes;
                most = most.max(now);
            } else {
                now -= bytes;
            }
        }
        most
    }
}

/// What is over, and what cannot have begun, when an action runs.
struct Reach {
    /// For each action its place in its rank's row and, by rank, how many actions of that rank's row surely are
    /// over when it begins.
    of: BTreeMap<Action, (usize, Vec<usize>)>,
}

impl Reach {
    fn new(schedule: &Schedule, order: &[Action]) -> Self {
        let mut of: BTreeMap<Action, (usize, Vec<usize>)> = BTreeMap::new();
        // By rank, what is over after its last action so far.
        let mut after = vec![vec![0; schedule.ranks()]; schedule.ranks()];
        for action in order {
            let rank = schedule.rank_of(action.stage);
            let mut over = after[rank].clone();
            for need in schedule.needs(*action) {
                let need = made_by(need, &of);
                let Some((place, before)) = of.get(&need) else { continue };
                over.iter_mut().zip(before).for_each(|(over, before)| *over = (*over).max(*before));
                let on = schedule.rank_of(need.stage);
                over[on] = over[on].max(place + 1);
            }
            let place = over[rank];
            after[rank].clone_from(&over);
            after[rank][rank] = place + 1;
            of.insert(*action, (place, over));
        }
        Self { of }
    }

    fn action(&self, stage: usize, kind: ActionKind, microbatch: usize) -> Action {
        let action = Action { stage, kind, microbatch };
        let both = Action { kind: ActionKind::Backward, ..action };
        if kind != ActionKind::Forward && self.of.contains_key(&both) { both } else { action }
    }

    /// Whether `other` is over before `action` begins, whatever the pace.
    fn is_over(&self, schedule: &Schedule, other: Action, action: Action) -> bool {
        let ((place, _), (_, over)) = (&self.of[&other], &self.of[&action]);
        *place < over[schedule.rank_of(other.stage)]
    }
}

/// The most that can be there while an action of the device runs.
fn at_most(schedule: &Schedule, reach: &Reach, of: impl Fn(usize) -> Option<StageBytes>) -> u64 {
    use ActionKind::{BackwardInput, BackwardWeight, Forward};
    let last = schedule.stages() - 1;
    let stages: Vec<(usize, StageBytes)> =
        (0..schedule.stages()).filter_map(|stage| Some((stage, of(stage)?))).collect();
    let count = schedule.microbatches();
    let kept: u64 = stages.iter().map(|(_, bytes)| bytes.kept).sum();
    let during = |now: Action| {
        // Of this and other ranks: over for sure, or perhaps begun.
        let over = |other: Action| other != now && reach.is_over(schedule, other, now);
        let begun = |other: Action| other == now || !reach.is_over(schedule, now, other);
        // A pass of this device has begun, and not ended, or ended: these are known.
        let mine_begun = |other: Action| other == now || over(other);
        let mut sum = kept;
        for (stage, bytes) in &stages {
            let stage = *stage;
            let mut weights_begun = false;
            let mut weights_left = false;
            for microbatch in 0..count {
                let of = |stage, kind| reach.action(stage, kind, microbatch);
                let (forward, input, weight) =
                    (of(stage, Forward), of(stage, BackwardInput), of(stage, BackwardWeight));
                weights_begun |= mine_begun(weight);
                weights_left |= !over(weight);
                let mut add = |bytes: u64, held: bool| sum += if held { bytes } else { 0 };
                add(bytes.brought, !over(forward));
                if stage > 0 {
                    add(bytes.input, begun(of(stage - 1, Forward)) && !over(forward));
                    let left = !over(of(stage - 1, BackwardInput));
                    add(bytes.input_gradient, mine_begun(input) && left);
                }
                if stage < last {
                    add(bytes.output_gradient, begun(of(stage + 1, BackwardInput)) && !over(input));
                    add(bytes.output, mine_begun(forward) && !over(of(stage + 1, Forward)));
                } else {
                    add(bytes.output, mine_begun(forward));
                }
                add(bytes.residual - bytes.kept_residual, mine_begun(forward) && !over(input));
                add(bytes.kept_residual, mine_begun(forward) && !over(weight));
                add(bytes.weight_residual - bytes.kept_residual, mine_begun(input) && !over(weight));
            }
            sum += bytes.gathered;
            if weights_begun {
                sum += bytes.gradients;
            }
            if !weights_left || reduces_now(reach, now, stage, count) {
                sum += bytes.reduced;
            }
        }
        sum
    };
    let mine = |action: &Action| stages.iter().any(|(stage, _)| *stage == action.stage);
    reach.of.keys().copied().filter(mine).map(during).max().unwrap_or(kept)
}

/// Whether this may be the last weight gradient of a stage: its gradients are put away as it ends.
fn reduces_now(reach: &Reach, now: Action, stage: usize, count: usize) -> bool {
    let place = |microbatch| reach.of[&reach.action(stage, ActionKind::BackwardWeight, microbatch)].0;
    now.stage == stage && (0..count).all(|microbatch| place(microbatch) <= reach.of[&now].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(schedule: &Schedule, stages: &[StageBytes]) -> Vec<(u64, u64)> {
        let stages: Vec<BTreeMap<DeviceId, StageBytes>> = stages
            .iter()
            .enumerate()
            .map(|(stage, bytes)| BTreeMap::from([(DeviceId(stage as u32), *bytes)]))
            .collect();
        let plan = MemoryPlan::new(schedule, &stages).unwrap();
        plan.devices().map(|(_, memory)| (memory.expected, memory.at_most)).collect()
    }

    /// Residuals alone: as many as there are forwards before their backwards.
    #[test]
    fn residuals_pile_up_as_the_schedule_says() {
        let bytes = StageBytes { kept: 1000, residual: 1, ..StageBytes::default() };
        for microbatches in [2, 4, 9] {
            for ranks in [1, 2, 4] {
                let stages = vec![bytes; ranks];
                let gpipe = plan(&Schedule::gpipe(ranks, microbatches).unwrap(), &stages);
                assert!(
                    gpipe
                        .iter()
                        .all(|found| *found == (1000 + microbatches as u64, 1000 + microbatches as u64))
                );
                let found = plan(&Schedule::one_f_one_b(ranks, microbatches).unwrap(), &stages);
                for (rank, found) in found.into_iter().enumerate() {
                    let most = 1000 + microbatches.min(ranks - rank) as u64;
                    assert_eq!(found, (most, most), "rank {rank} of {ranks}, {microbatches} microbatches");
                }
            }
        }
    }

    #[test]
    fn one_stage_by_hand() {
        let schedule = Schedule::gpipe(1, 2).unwrap();
        let bytes = StageBytes {
            kept: 1_000_000,
            brought: 100_000,
            gradients: 10_000,
            residual: 1_000,
            kept_residual: 600,
            weight_residual: 700,
            ..StageBytes::default()
        };
        // In the first forward pass there are both inputs.
        let most = 1_000_000 + 2 * 100_000 + 1_000;
        assert_eq!(plan(&schedule, &[bytes]), [(most, most)]);
        // Without them: the residuals of the second, and what the first weight gradient needs: its own
        // residuals, of which 400 have gone, and the gradients. The bound does not look into a pass.
        let most = 1_000_000 + 10_000 + 1_000 + 700;
        assert_eq!(plan(&schedule, &[StageBytes { brought: 0, ..bytes }]), [(most, most + 400)]);
    }

    #[test]
    fn what_is_handed_over_counts_with_its_owner_until_it_was_read() {
        let schedule = Schedule::gpipe(2, 4).unwrap();
        let sender = StageBytes { output: 1, ..StageBytes::default() };
        let taker = StageBytes { input: 1, ..StageBytes::default() };
        // A copy is sent while the next pass begins. As fast as each other, the second has one to work on and
        // one that came when that ended; whatever the pace, the first has done all four.
        assert_eq!(plan(&schedule, &[sender, taker]), [(2, 4), (1, 4)]);
        let lender = StageBytes { lends_output: true, ..sender };
        let nothing = StageBytes::default();
        // What was read goes back just after the third has begun.
        assert_eq!(plan(&schedule, &[lender, nothing]), [(3, 4), (0, 0)]);
        // In 1F1B the first waits for the second's backward: it is never more than two ahead.
        let schedule = Schedule::one_f_one_b(2, 8).unwrap();
        assert_eq!(plan(&schedule, &[lender, taker]), [(2, 2), (1, 2)]);
    }

    #[test]
    fn parameters_stored_otherwise_are_there_twice_and_so_are_their_gradients_at_the_end() {
        let bytes =
            StageBytes { kept: 100, gathered: 10, gradients: 10, reduced: 1, ..StageBytes::default() };
        let schedule = Schedule::gpipe(1, 3).unwrap();
        assert_eq!(plan(&schedule, &[bytes]), [(120, 121)]);
        let no_gathering = StageBytes { gathered: 0, ..bytes };
        assert_eq!(plan(&schedule, &[no_gathering]), [(111, 111)]);
    }

    #[test]
    fn gradients_apart_hold_weight_residuals_until_their_own_turn() {
        use ActionKind::{BackwardInput, BackwardWeight, Forward};
        let action = |kind, microbatch| Action { stage: 0, kind, microbatch };
        let row = [Forward, BackwardInput, BackwardWeight].into_iter();
        let row = row.flat_map(|kind| (0..3).map(move |microbatch| action(kind, microbatch))).collect();
        let schedule = Schedule::new("apart", vec![row]).unwrap();
        let bytes = StageBytes { residual: 5, weight_residual: 7, ..StageBytes::default() };
        // At the last input gradient: one residual, and three weight residuals.
        assert_eq!(plan(&schedule, &[bytes]), [(5 + 3 * 7, 5 + 3 * 7)]);
    }

    #[test]
    fn the_expected_is_never_above_the_bound() {
        let bytes = StageBytes {
            kept: 3,
            brought: 2,
            gradients: 5,
            input: 7,
            output: 11,
            residual: 13,
            kept_residual: 6,
            weight_residual: 17,
            input_gradient: 19,
            output_gradient: 23,
            gathered: 29,
            reduced: 31,
            ..StageBytes::default()
        };
        for lends in [false, true] {
            let bytes = StageBytes { lends_output: lends, lends_input_gradient: lends, ..bytes };
            for ranks in 1..6 {
                for microbatches in 1..9 {
                    for name in ["gpipe", "1f1b"] {
                        let schedule = Schedule::named(name, ranks, microbatches, None).unwrap();
                        for (expected, at_most) in plan(&schedule, &vec![bytes; ranks]) {
                            assert!(
                                expected <= at_most,
                                "{name} {ranks} {microbatches}: {expected} {at_most}"
                            );
                        }
                    }
                }
            }
        }
    }
}
