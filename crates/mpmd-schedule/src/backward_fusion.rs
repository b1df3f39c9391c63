//! Joins the two gradients of stages that compute them together.

use super::schedule::{Action, ActionKind, Schedule, ScheduleError};

/// Returns the schedule with the two gradients of some stages joined to one action `B`, at the
/// position of the input gradient `I`. `fuses` is indexed by stage: true joins the stage's
/// gradients.
///
/// If any action changes, the returned schedule has no overlapped pairs.
///
/// # Errors
///
/// The errors of [`Schedule::new`].
pub fn fused(
    schedule: &Schedule,
    fuses: impl Fn(usize) -> bool,
) -> Result<Schedule, ScheduleError> {
    let changes = |action: &Action| action.kind == ActionKind::BackwardInput && fuses(action.stage);
    if !schedule.rows().iter().flatten().any(changes) {
        return Ok(schedule.clone());
    }

    let join = |action: &Action| match action.kind {
        ActionKind::BackwardInput if fuses(action.stage) => Some(Action {
            kind: ActionKind::Backward,
            ..*action
        }),
        ActionKind::BackwardWeight if fuses(action.stage) => None,
        _ => Some(*action),
    };

    let rows = schedule
        .rows()
        .iter()
        .map(|row| row.iter().filter_map(join).collect());
    Schedule::new(schedule.name(), rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_of_the_chosen_stages_are_joined() {
        let zb = Schedule::named("zb-h1", 2, 3, None).unwrap();
        let found = fused(&zb, |stage| stage == 1).unwrap();
        let kinds = |row: &[Action], kind| row.iter().filter(|a| a.kind == kind).count();
        assert_eq!(found.rows()[0], zb.rows()[0]);
        assert_eq!(kinds(&found.rows()[1], ActionKind::Backward), 3);
        assert_eq!(kinds(&found.rows()[1], ActionKind::BackwardWeight), 0);
        let plain = Schedule::one_f_one_b(3, 5).unwrap();
        assert_eq!(fused(&plain, |_| true).unwrap(), plain);
    }
}
