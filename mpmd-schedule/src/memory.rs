//! How much memory a step takes, from shapes and the schedule: known before anything runs.
//!
//! The model. Of each stage every device holds *kept* bytes all the time, and what the microbatches
//! bring from the beginning of the step until the forward pass that reads it has ended. A pass
//! takes the memory of all its results when it begins, while what it reads is still there, and lets
//! what it read for the last time go when it ends:
//!
//! - the forward pass takes outputs and residuals, and lets its input go;
//! - the input gradient takes weight residuals, but those that are kept residuals, and the gradient
//!   of the inputs; it lets the residuals and the gradient of the outputs go;
//! - the weight gradient takes the sums with its first microbatch, and lets the weight residuals
//!   go;
//! - parameters that are stored otherwise are there from the beginning of the step until the last
//!   pass that reads them; finished gradients are there twice while they are put to the stored
//!   shardings.
//!
//! Where the forward pass is computed again, its results are there while it runs first, and from
//! when it runs again; what it reads stays until then. Where both gradients are one kernel the
//! residuals stay until it has ended, and there are no weight residuals.
//!
//! An array that goes to another stage is copied, or handed over. To one on the same devices it is
//! as if handed over: the same array. A copy takes memory at its taker from when it was made until
//! the pass that reads it has ended, and goes at its giver once it was sent. One that is handed
//! over takes none at its taker and stays its giver's until the taker's pass has ended.
//!
//! What goes by the order of one rank alone is exact. How far the neighbours are meanwhile is a
//! question of time: [`MemoryPlan::expected`] has every rank start as soon as it can, with passes
//! of equal length (both gradients take two) and moves that take next to none;
//! [`MemoryPlan::at_most`] has everything come as early, and go back as late, as the orders allow
//! at all. Not counted are what kernels take for themselves, collectives, and packing.

use std::collections::BTreeMap;

use super::holds::{Hold, OnDevice, holds};
use super::pace::{Pace, StagePace};
use super::schedule::{Schedule, ScheduleError};
use mpmd_ids::DeviceId;

/// What a device of a stage holds of one microbatch, or of the parameters, in bytes that its pool
/// counts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StageBytes {
    /// What is there all the time: the parameters as they are stored, and what the caller keeps
    /// beside them.
    pub kept: u64,
    /// What each microbatch brings: the pipeline's input on the first stage, and side inputs.
    pub brought: u64,
    /// Parameters in the shardings that kernels compute with, where these are others than the
    /// stored ones.
    pub gathered: u64,
    /// The gradients that weight passes add to.
    pub gradients: u64,
    /// Those in the stored shardings, where they are put there.
    pub reduced: u64,
    /// What the forward pass is given by the stage before. Nothing on the first stage, and none of
    /// what is handed over.
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
    /// What this stage is given of the gradient of its outputs. Nothing on the last stage, and none
    /// of what is handed over.
    pub output_gradient: u64,
    /// Whether the outputs are handed over, and so stay until the stage after has read them.
    pub lends_output: bool,
    /// The same of the gradient of the inputs.
    pub lends_input_gradient: bool,
    /// Whether the forward pass leaves no residuals, and is computed again for the backward pass,
    /// from inputs that stay until then.
    pub recomputes: bool,
    /// Whether there are no weight residuals where a schedule has both gradients as one action.
    pub fuses: bool,
}

/// The most memory that each device has in use in a step, in bytes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MemoryPlan {
    devices: BTreeMap<DeviceId, DeviceMemory>,
}

/// The most memory that a device, or a process, has in use in a step.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct DeviceMemory {
    /// What is there all the time.
    pub kept: u64,
    /// Where neighbours are as fast as each other.
    pub expected: u64,
    /// Whatever the pace of the neighbours.
    pub at_most: u64,
}

impl MemoryPlan {
    /// The plan of a schedule, from what the devices of each stage hold, where each stage takes
    /// what the one before it gives.
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
        let on = |stage: usize, bytes: &StageBytes| {
            OnDevice::in_chain(*bytes, stage, stage + 1 == stages.len())
        };
        let stages: Vec<BTreeMap<DeviceId, OnDevice>> = stages
            .iter()
            .enumerate()
            .map(|(stage, devices)| {
                devices.iter().map(|(device, bytes)| (*device, on(stage, bytes))).collect()
            })
            .collect();
        Self::of_net(schedule, &stages)
    }

    /// The same, whatever goes from which stage to which.
    #[doc(hidden)]
    pub fn of_net(
        schedule: &Schedule,
        stages: &[BTreeMap<DeviceId, OnDevice>],
    ) -> Result<Self, ScheduleError> {
        assert_eq!(schedule.stages(), stages.len(), "stages of schedule {}", schedule.name());
        let lanes = lanes(schedule, stages);
        let any = |stage: usize, what: fn(&StageBytes) -> bool| {
            stages[stage].values().any(|device| what(&device.bytes))
        };
        let of = |stage: usize| StagePace {
            lane: lanes[stage],
            recomputes: any(stage, |bytes| bytes.recomputes),
            fuses: any(stage, |bytes| bytes.fuses),
        };
        let paces: Vec<StagePace> = (0..stages.len()).map(of).collect();
        let pace = Pace::new(schedule, &paces)?;
        let mut found: BTreeMap<DeviceId, (usize, u64, Vec<Hold>)> = BTreeMap::new();
        for (stage, devices) in stages.iter().enumerate() {
            for (device, on) in devices {
                let (lane, kept, all) = found.entry(*device).or_default();
                *lane = lanes[stage];
                *kept += on.bytes.kept;
                all.extend(holds(&pace, stage, on, schedule.microbatches(), paces[stage].fuses));
            }
        }
        let memory = |(lane, kept, holds): (usize, u64, Vec<Hold>)| DeviceMemory {
            kept,
            expected: kept + most(holds.iter().map(|hold| (hold.bytes, hold.expected(&pace)))),
            at_most: kept + most(holds.iter().map(|hold| (hold.bytes, hold.at_most(&pace, lane)))),
        };
        Ok(Self { devices: found.into_iter().map(|(device, of)| (device, memory(of))).collect() })
    }

    /// Each device's memory, in the order of their numbers.
    pub fn devices(&self) -> impl Iterator<Item = (DeviceId, DeviceMemory)> + '_ {
        self.devices.iter().map(|(device, memory)| (*device, *memory))
    }

    /// The sum over these devices, each at its own time of most use: those of a process.
    pub fn of(&self, devices: &[DeviceId]) -> DeviceMemory {
        let found = devices.iter().filter_map(|device| self.devices.get(device));
        found.fold(DeviceMemory::default(), |sum, one| DeviceMemory {
            kept: sum.kept + one.kept,
            expected: sum.expected + one.expected,
            at_most: sum.at_most + one.at_most,
        })
    }
}

/// For each stage a number: the same where stages run one at a time, because they are on one rank
/// or share a device.
fn lanes(schedule: &Schedule, stages: &[BTreeMap<DeviceId, OnDevice>]) -> Vec<usize> {
    let mut lanes: Vec<usize> = (0..stages.len()).map(|stage| schedule.rank_of(stage)).collect();
    let mut lane_of: BTreeMap<DeviceId, usize> = BTreeMap::new();
    for (stage, devices) in stages.iter().enumerate() {
        for device in devices.keys() {
            let (one, other) = (*lane_of.entry(*device).or_insert(lanes[stage]), lanes[stage]);
            if one != other {
                let (low, high) = (one.min(other), one.max(other));
                lanes
                    .iter_mut()
                    .chain(lane_of.values_mut())
                    .filter(|lane| **lane == high)
                    .for_each(|lane| *lane = low);
            }
        }
    }
    lanes
}

/// The most that is there at a time, of bytes that are there from a time until another.
fn most<T: Copy + Ord>(held: impl Iterator<Item = (u64, (T, T))>) -> u64 {
    // At a time first what goes, then what comes.
    let mut events: Vec<(T, bool, u64)> = Vec::new();
    for (bytes, (from, until)) in held.filter(|(_, (from, until))| from < until) {
        events.extend([(from, true, bytes), (until, false, bytes)]);
    }
    events.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, comes, bytes) in events {
        if comes {
            now += bytes;
            most = most.max(now);
        } else {
            now -= bytes;
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::super::schedule::{Action, ActionKind};
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
                assert!(gpipe.iter().all(
                    |found| *found == (1000 + microbatches as u64, 1000 + microbatches as u64)
                ));
                let found = plan(&Schedule::one_f_one_b(ranks, microbatches).unwrap(), &stages);
                for (rank, found) in found.into_iter().enumerate() {
                    let most = 1000 + microbatches.min(ranks - rank) as u64;
                    assert_eq!(
                        found,
                        (most, most),
                        "rank {rank} of {ranks}, {microbatches} microbatches"
                    );
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
        // Without them: the residuals of the second, and what the first weight gradient needs: its
        // own residuals, of which 400 have gone, and the gradients. The bound does not look into a
        // pass.
        let most = 1_000_000 + 10_000 + 1_000 + 700;
        assert_eq!(plan(&schedule, &[StageBytes { brought: 0, ..bytes }]), [(most, most + 400)]);
    }

    #[test]
    fn what_is_handed_over_counts_with_its_owner_until_it_was_read() {
        let schedule = Schedule::gpipe(2, 4).unwrap();
        let sender = StageBytes { output: 1, ..StageBytes::default() };
        let taker = StageBytes { input: 1, ..StageBytes::default() };
        // A copy is sent while the next pass begins. As fast as each other, the second has one to
        // work on and one that came when that ended; whatever the pace, the first has done all
        // four.
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
        let bytes = StageBytes {
            kept: 100,
            gathered: 10,
            gradients: 10,
            reduced: 1,
            ..StageBytes::default()
        };
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
        let row =
            row.flat_map(|kind| (0..3).map(move |microbatch| action(kind, microbatch))).collect();
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
