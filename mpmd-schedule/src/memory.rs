//! Predicts the memory of a training step from shapes and the schedule, before anything runs.
//!
//! The model: for each stage, a device holds *kept* bytes all the time. The arrays of a microbatch
//! stay from the start of the step until the end of the forward pass that reads them. A pass
//! allocates all its results when it begins, while its inputs still exist. When it ends, it frees
//! the inputs that no later pass reads:
//!
//! - the forward pass allocates outputs and residuals, and frees its input;
//! - the input gradient allocates weight residuals, except those that are kept residuals, and the
//!   gradient of the inputs; it frees the residuals and the gradient of the outputs;
//! - the weight gradient allocates the sums with its first microbatch, and frees the weight
//!   residuals;
//! - parameters that are stored in another sharding stay from the start of the step until the last
//!   pass that reads them; finished gradients exist twice during the transfer to the stored
//!   shardings.
//!
//! With recomputation, the results of the forward pass exist during its first run, and again from
//! its second run on. Its inputs stay until then. Objects among the residuals take no memory in the
//! first run. A stage in front of all that is trained has only forward passes. If one kernel
//! computes both gradients, the residuals stay until it has ended, and there are no weight
//! residuals.
//!
//! An array reaches another stage by copy or by zero-copy transfer. A stage on the same devices
//! uses the same array, which counts like a zero-copy transfer. A copy takes memory at the receiver
//! from its arrival until the reading pass has ended; the sender frees the array once it is sent. A
//! zero-copy transfer takes no memory at the receiver. The array stays with the sender until the
//! receiver's pass has ended.
//!
//! Effects of one rank's own order are exact. The progress of the neighbours is a question of time:
//!
//! - [`StepMemory::expected`] starts every rank as soon as it can. Passes have equal length (both
//!   gradients take two), and transfers take next to no time.
//! - [`StepMemory::at_most`] lets every array arrive as early, and return as late, as the orders
//!   allow.
//!
//! Not counted are temporary buffers of kernels, collectives, and packing.

use std::collections::BTreeMap;

use super::holds::{Hold, OnDevice, StageBytes, holds};
use super::pace::{Pace, StagePace};
use super::schedule::{Schedule, ScheduleError};
use mpmd_base::DeviceId;

/// The predicted peak memory of each device in a step, in bytes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StepMemory {
    devices: BTreeMap<DeviceId, StepDeviceMemory>,
}

/// The predicted peak memory of a device, or of a process, in a step, in bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StepDeviceMemory {
    /// Bytes that exist all the time; the peaks include them.
    pub kept: u64,
    /// The peak in bytes if all ranks run at the same pace.
    pub expected: u64,
    /// The upper bound of the peak in bytes, for any pace of the neighbours.
    pub at_most: u64,
}

impl StepMemory {
    /// Predicts the peak memory of each device in a step of `schedule`. `stages` has, for each
    /// stage, the memory of its devices. Each stage takes the outputs of the stage before.
    ///
    /// # Errors
    ///
    /// If the schedule cannot proceed.
    ///
    /// # Panics
    ///
    /// If the number of stages differs from the schedule's.
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

    /// Like `new`, for any links between stages.
    #[doc(hidden)]
    pub fn of_net(
        schedule: &Schedule,
        stages: &[BTreeMap<DeviceId, OnDevice>],
    ) -> Result<Self, ScheduleError> {
        assert_eq!(schedule.stages(), stages.len(), "stages of schedule {}", schedule.name());
        let lanes = lanes(schedule, stages);
        let any = |stage: usize, has: fn(&StageBytes) -> bool| {
            stages[stage].values().any(|device| has(&device.bytes))
        };
        let of = |stage: usize| StagePace {
            lane: lanes[stage],
            recomputes: any(stage, |bytes| bytes.recomputes),
            keeps_inputs: any(stage, |bytes| bytes.keeps_inputs),
            fuses: any(stage, |bytes| bytes.fuses),
            forward_only: any(stage, |bytes| bytes.forward_only),
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
        let memory = |(lane, kept, holds): (usize, u64, Vec<Hold>)| StepDeviceMemory {
            kept,
            expected: kept + most(holds.iter().map(|hold| (hold.bytes, hold.expected(&pace)))),
            at_most: kept + most(holds.iter().map(|hold| (hold.bytes, hold.at_most(&pace, lane)))),
        };
        Ok(Self { devices: found.into_iter().map(|(device, of)| (device, memory(of))).collect() })
    }

    /// Returns (device, memory) for each device, in the order of device numbers.
    pub fn devices(&self) -> impl Iterator<Item = (DeviceId, StepDeviceMemory)> + '_ {
        self.devices.iter().map(|(device, memory)| (*device, *memory))
    }

    /// Returns the sum over these devices, for instance those of a process. Each device counts with
    /// its own peak; unknown devices count as 0.
    pub fn of(&self, devices: &[DeviceId]) -> StepDeviceMemory {
        let found = devices.iter().filter_map(|device| self.devices.get(device));
        found.fold(StepDeviceMemory::default(), |sum, one| StepDeviceMemory {
            kept: sum.kept + one.kept,
            expected: sum.expected + one.expected,
            at_most: sum.at_most + one.at_most,
        })
    }
}

/// Returns a lane number for each stage. Stages have the same lane if they run one at a time,
/// because they are on one rank or share a device.
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

/// Returns the peak of a sum of bytes. Each item is (bytes, (time of allocation, time of release)).
fn most<T: Copy + Ord>(held: impl Iterator<Item = (u64, (T, T))>) -> u64 {
    // Releases sort before allocations at the same time.
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
        let plan = StepMemory::new(schedule, &stages).unwrap();
        plan.devices().map(|(_, memory)| (memory.expected, memory.at_most)).collect()
    }

    #[test]
    fn residuals_accumulate_in_schedule_order() {
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
    fn one_stage_peaks_as_computed_by_hand() {
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
        // The first forward pass holds both inputs.
        let most = 1_000_000 + 2 * 100_000 + 1_000;
        assert_eq!(plan(&schedule, &[bytes]), [(most, most)]);
        // Without inputs, the peak has three parts: the second microbatch's residuals, the
        // gradients, and the first's weight residuals. 400 bytes of the first residuals are freed.
        // The bound does not look into a pass.
        let most = 1_000_000 + 10_000 + 1_000 + 700;
        assert_eq!(plan(&schedule, &[StageBytes { brought: 0, ..bytes }]), [(most, most + 400)]);
    }

    #[test]
    fn lent_output_counts_at_its_owner_until_read() {
        let schedule = Schedule::gpipe(2, 4).unwrap();
        let sender = StageBytes { output: 1, ..StageBytes::default() };
        let taker = StageBytes { input: 1, ..StageBytes::default() };
        // A copy is sent while the next pass begins. At equal pace, the second stage's next input
        // arrives as the current one is freed. At any pace, the first stage may have done all four.
        assert_eq!(plan(&schedule, &[sender, taker]), [(2, 4), (1, 4)]);
        let lender = StageBytes { lends_output: true, ..sender };
        let nothing = StageBytes::default();
        // The read array is returned just after the third pass has begun.
        assert_eq!(plan(&schedule, &[lender, nothing]), [(3, 4), (0, 0)]);
        // In 1F1B the first stage waits for the second's backward pass: it is at most two ahead.
        let schedule = Schedule::one_f_one_b(2, 8).unwrap();
        assert_eq!(plan(&schedule, &[lender, taker]), [(2, 2), (1, 2)]);
    }

    #[test]
    fn other_compute_shardings_double_params_and_last_gradients() {
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
    fn forward_only_stage_holds_residuals_for_one_pass() {
        let bytes = StageBytes {
            kept: 1000,
            gradients: 100,
            residual: 10,
            unkept_residual: 4,
            output_gradient: 1,
            forward_only: true,
            ..StageBytes::default()
        };
        let trained = StageBytes { residual: 1, ..StageBytes::default() };
        let schedule = Schedule::gpipe(2, 4).unwrap();
        assert_eq!(plan(&schedule, &[bytes, trained]), [(1006, 1006), (4, 4)]);
    }

    #[test]
    fn separate_weight_gradients_hold_residuals_until_they_run() {
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
    fn expected_peak_is_never_above_the_bound() {
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
