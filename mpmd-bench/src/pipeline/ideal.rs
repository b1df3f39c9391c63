//! Computes the length of a step in which only the kernels take time.

use std::collections::HashMap;
use std::time::Duration;

use mpmd_schedule::{Action, ActionKind, Schedule, ScheduleError};

/// Returns the length of a step: the time at which the last rank ends. Each rank works through its
/// order, waits only for the passes that its next action needs, and then updates its parameters.
///
/// `time` returns the length of each action, `update` the length of each rank's update. Moves take
/// no time.
///
/// # Errors
///
/// If the orders of the ranks wait for each other in a cycle.
pub(super) fn makespan(
    schedule: &Schedule,
    mut time: impl FnMut(Action) -> Duration,
    update: impl Fn(usize) -> Duration,
) -> Result<Duration, ScheduleError> {
    let mut free = vec![Duration::ZERO; schedule.ranks()];
    // The ends of forward passes and of input gradients, by stage and microbatch.
    let (mut forwards, mut inputs) = (HashMap::new(), HashMap::new());
    for action in schedule.global_order()? {
        let Action { stage, kind, microbatch } = action;
        let rank = schedule.rank_of(stage);
        // Inputs from the same rank need no check: they are earlier in its order.
        let needs = match kind {
            ActionKind::Forward => {
                stage.checked_sub(1).and_then(|before| forwards.get(&(before, microbatch)))
            }
            ActionKind::BackwardWeight => None,
            _ => inputs.get(&(stage + 1, microbatch)),
        };
        let end = free[rank].max(needs.copied().unwrap_or_default()) + time(action);
        free[rank] = end;
        match kind {
            ActionKind::Forward => drop(forwards.insert((stage, microbatch), end)),
            ActionKind::BackwardWeight => {}
            // A combined backward pass yields its input gradient at its end, as the schedule's
            // formula has one action for both gradients.
            _ => drop(inputs.insert((stage, microbatch), end)),
        }
    }
    let ends = free.iter().enumerate().map(|(rank, end)| *end + update(rank));
    Ok(ends.max().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Duration = Duration::from_millis(1);

    /// Returns the makespan with the (forward, backward) milliseconds of each stage, and no update.
    fn of(schedule: &Schedule, times: &[(u32, u32)]) -> Duration {
        let time = |action: Action| {
            let (forward, backward) = times[action.stage];
            ONE * if action.kind == ActionKind::Forward { forward } else { backward }
        };
        makespan(schedule, time, |_| Duration::ZERO).unwrap()
    }

    #[test]
    fn equal_stages_give_the_closed_form() {
        // (m + p - 1) (F + B), for both schedules.
        for (ranks, microbatches) in [(1, 1), (1, 5), (2, 8), (4, 8), (4, 2), (8, 24)] {
            for name in ["gpipe", "1f1b"] {
                let schedule = Schedule::named(name, ranks, microbatches, None).unwrap();
                let expected = ONE * ((microbatches + ranks - 1) * 3) as u32;
                assert_eq!(
                    of(&schedule, &vec![(1, 2); ranks]),
                    expected,
                    "{name} {ranks} {microbatches}"
                );
            }
        }
    }

    #[test]
    fn a_slow_stage_sets_the_pace() {
        // Stage 1 works without a pause from 1 to 1 + 3 * (2 + 4). Then follows stage 0's last
        // backward.
        let schedule = Schedule::gpipe(2, 3).unwrap();
        assert_eq!(of(&schedule, &[(1, 2), (2, 4)]), ONE * (1 + 18 + 2));
        // Stage 0 is the slow one. Its forwards end at 6, stage 1's last forward at 7. From 7 + 2
        // on, backwards arrive faster than stage 0 computes them.
        assert_eq!(of(&schedule, &[(2, 4), (1, 2)]), ONE * (9 + 12));
    }

    #[test]
    fn the_update_that_ends_last_counts() {
        let schedule = Schedule::one_f_one_b(2, 1).unwrap();
        let with =
            |updates: [u32; 2]| makespan(&schedule, |_| ONE, |rank| ONE * updates[rank]).unwrap();
        // F0 F1 B1 B0: rank 1 ends at 3, rank 0 at 4.
        assert_eq!((with([0, 0]), with([2, 0]), with([0, 5])), (ONE * 4, ONE * 6, ONE * 8));
    }
}
