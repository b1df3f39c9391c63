//! Reorders the weight gradients of a schedule into ascending order of microbatches.

use super::schedule::{Action, ActionKind, Schedule, ScheduleError};

/// Returns the schedule with each stage's weight gradients in ascending order of microbatches. A
/// weight gradient that comes too early moves behind that of the previous microbatch. If it was
/// part of a `B`, its input gradient stays at that position as an `I`.
///
/// Sums of floats depend on their order. So the results are bit for bit those of any schedule with
/// ascending weight gradients. The cost is memory: weight residuals are held for longer. If any
/// action moves, the returned schedule has no overlapped pairs.
///
/// # Errors
///
/// The errors of [`Schedule::new`].
pub fn ascending(schedule: &Schedule) -> Result<Schedule, ScheduleError> {
    let count = schedule.microbatches();
    let rows = schedule.rows().iter().map(|row| {
        // By stage: the next microbatch in order, and the microbatches that wait.
        let mut next = vec![0; schedule.stages()];
        let mut waiting = vec![vec![false; count]; schedule.stages()];
        let mut ordered = Vec::with_capacity(row.len());
        for action in row {
            let Action {
                stage,
                kind,
                microbatch,
            } = *action;

            let mine = matches!(kind, ActionKind::Backward | ActionKind::BackwardWeight);
            if !mine {
                ordered.push(*action);
                continue;
            }

            if microbatch != next[stage] {
                waiting[stage][microbatch] = true;
                if kind == ActionKind::Backward {
                    ordered.push(Action {
                        kind: ActionKind::BackwardInput,
                        ..*action
                    });
                }
                continue;
            }

            ordered.push(*action);
            next[stage] += 1;
            while next[stage] < count && waiting[stage][next[stage]] {
                let microbatch = next[stage];
                ordered.push(Action {
                    stage,
                    kind: ActionKind::BackwardWeight,
                    microbatch,
                });
                next[stage] += 1;
            }
        }
        ordered
    });

    let rows: Vec<Vec<Action>> = rows.collect();

    if rows == schedule.rows() {
        Ok(schedule.clone())
    } else {
        Schedule::new(schedule.name(), rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[(ActionKind, usize)]) -> Vec<Action> {
        cells
            .iter()
            .map(|(kind, microbatch)| Action {
                stage: 0,
                kind: *kind,
                microbatch: *microbatch,
            })
            .collect()
    }

    #[test]
    fn early_weight_gradients_wait_and_follow_in_order() {
        use ActionKind::{Backward, BackwardInput, BackwardWeight, Forward};
        let forwards = [(Forward, 0), (Forward, 1), (Forward, 2)];
        let descending = row(&[
            &forwards[..],
            &[(Backward, 2), (Backward, 1), (Backward, 0)],
        ]
        .concat());
        let found = ascending(&Schedule::new("down", vec![descending]).unwrap()).unwrap();
        let tail = [
            (BackwardInput, 2),
            (BackwardInput, 1),
            (Backward, 0),
            (BackwardWeight, 1),
            (BackwardWeight, 2),
        ];
        assert_eq!(found.rows(), [row(&[&forwards[..], &tail[..]].concat())]);
        let same = Schedule::one_f_one_b(3, 5).unwrap();
        assert_eq!(ascending(&same).unwrap(), same);
    }
}
