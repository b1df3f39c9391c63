//! Processes between two epochs.

use super::*;

#[test]
fn process_that_does_not_return_in_time_loses_its_place() {
    let mut table = Table::running();
    table.die(11);
    table.leave(10, true);
    table.leave(12, true);
    table.join(2, 0);
    table.join_as(90, 1, 3);
    assert_eq!((table.job.epochs.wanted(), table.joined()), (0, vec![]));
    table.pass(TIME_LIMIT, &[20, 90]);
    assert_eq!((table.job.epochs.wanted(), table.joined()), (1, vec![]));
    table.join_as(91, 1, 4);
    assert_eq!(table.joined(), [(20, 0, 2), (90, 1, 2), (91, 2, 2)]);
    // The late one becomes a spare.
    table.join(2, 2);
    assert_eq!(table.joined(), []);
    table.die(20);
    assert_eq!(table.job.epochs.wanted(), 0);
}

#[test]
fn process_that_dies_before_it_has_returned_loses_its_place_at_once() {
    // Before and after another process has begun the next epoch.
    for begins_first in [false, true] {
        let mut table = Table::running();
        table.die(11);
        table.join_as(90, 1, 3);
        table.join_as(91, 1, 4);
        table.leave(10, true);
        table.leave(12, true);
        if begins_first {
            table.join(2, 0);
        }
        table.die(12);
        if !begins_first {
            table.join(2, 0);
        }
        assert_eq!(table.joined(), [(20, 0, 2), (90, 1, 2), (91, 2, 2)]);
    }
}

#[test]
fn connection_that_a_process_has_left_over_is_closed_once_it_has_joined() {
    let mut table = Table::running();
    table.leave(10, true);
    assert!(!table.job.actions().contains(&JobAction::Close(10)));
    table.join(2, 0);
    assert!(table.job.actions().contains(&JobAction::Close(10)));
    // It ends later than the process has joined.
    table.die(10);
    table.leave(11, true);
    table.leave(12, true);
    table.join(2, 1);
    table.join(2, 2);
    assert_eq!(table.joined(), [(20, 0, 2), (21, 1, 2), (22, 2, 2)]);
}

#[test]
fn epoch_ends_without_all_that_die_before_they_have_returned() {
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    for link in 10..13 {
        table.leave(link, true);
    }
    for link in 10..12 {
        table.die(link);
    }
    assert_eq!(table.answers(), []);
    table.die(12);
    let lost = RendezvousError::AllLost { processes: 3 };
    assert_eq!(table.answers(), [(90, Err(lost))]);
}

#[test]
fn late_end_of_an_old_connection_does_not_matter() {
    let mut table = Table::running();
    table.die(11);
    table.join_as(90, 1, 3);
    // They join before the service has seen the ends of their old connections.
    table.join(2, 0);
    table.join(2, 2);
    assert_eq!(table.joined(), [(20, 0, 2), (90, 1, 2), (22, 2, 2)]);
    table.die(10);
    table.leave(12, false);
    assert_eq!(
        (table.job.epochs.present(), table.job.epochs.wanted()),
        (3, 0)
    );
}

#[test]
fn epoch_waits_once_more_for_new_processes() {
    let mut table = Table::running();
    // One never returns.
    table.leave(10, true);
    for process in [1, 2] {
        table.leave(10 + u64::from(process), true);
        table.join(2, process);
    }
    table.pass(TIME_LIMIT * 3 / 2, &[21, 22]);
    assert_eq!(table.joined(), []);
    table.join_as(90, 1, 3);
    assert_eq!(table.joined(), [(90, 0, 2), (21, 1, 2), (22, 2, 2)]);
    table.die(90);
    table.leave(21, true);
    table.join(3, 1);
    table.pass(TIME_LIMIT * 3, &[22, 31]);
    let missing = |answer: &(Link, Result<RequestAnswer, RendezvousError>)| {
        matches!(answer, (31, Err(RendezvousError::Missing { .. })))
    };
    assert!(matches!(&table.answers()[..], [answer] if missing(answer)));
    // So does a spare that comes too late.
    table.join_as(91, 1, 3);
    let answers = table.answers();
    assert!(
        matches!(&answers[..], [(91, Err(RendezvousError::Missing { .. }))]),
        "{answers:?}"
    );
}
