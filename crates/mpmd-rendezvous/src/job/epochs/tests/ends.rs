//! The end of a job, and processes that were cut off at it.

use super::*;

impl Table {
    /// Lets a process leave a job that has ended well.
    fn end(&mut self, link: Link) {
        self.job.said(
            link,
            ClientRequest::Leave {
                ask: 2,
                how: LeaveKind::Ends,
            },
            self.now,
        );
        self.job.closed(link, "the connection was closed");
    }
}

#[test]
fn process_cut_off_at_a_good_end_begins_no_epoch() {
    let mut table = Table::of_sizes(&[1, 2, 3]);
    table.die(11);
    table.end(10);
    table.join(2, 1);
    assert_eq!(table.job.epochs.epoch, 1, "nothing is left to do");
    assert_eq!(table.answers(), []);
    table.end(12);
    assert_eq!(table.answers(), [(21, Ok(RequestAnswer::Done))]);
}

#[test]
fn epoch_that_a_process_cut_off_at_the_end_has_begun_is_over() {
    let mut table = Table::of_sizes(&[1, 2, 3]);
    table.die(11);
    table.join(2, 1);
    assert_eq!(
        table.job.epochs.phase(),
        &EpochPhase::Gathering,
        "the others are awaited"
    );
    table.end(10);
    assert_eq!(table.answers(), [(21, Ok(RequestAnswer::Done))]);
    table.end(12);
    assert!(table.job.epochs.is_over());
    table.join_as(90, 1, 3);
    assert_eq!(table.answers(), [(90, Ok(RequestAnswer::Done))]);
    let left = |place| ProcessPart::Left(ProcessId(place));
    let parts: Vec<ProcessPart> = table
        .job
        .epochs
        .parts()
        .into_iter()
        .map(|(_, part)| part)
        .collect();
    assert!(
        parts.contains(&left(0)) && parts.contains(&left(2)),
        "{parts:?}"
    );
}

#[test]
fn others_begin_an_epoch_after_one_has_left_in_the_middle() {
    let mut table = Table::of_sizes(&[1, 2, 3]);
    table.leave(10, false);
    table.leave(11, true);
    table.leave(12, true);
    table.join(2, 1);
    table.join(2, 2);
    assert_eq!(table.joined(), [(21, 0, 2), (22, 1, 2)]);
}

#[test]
fn job_with_thousands_of_sizes_begins_and_grows() {
    let sizes: Vec<u32> = (1..=4000).chain((4002..9000).step_by(2)).collect();
    let mut table = Table::of_sizes(&sizes);
    table.is_added = true;
    table.join_as(90, 1, 3);
    (10..13).for_each(|link| table.leave(link, true));
    (0..3).for_each(|process| table.join(2, process));
    assert_eq!(
        table.joined(),
        [(20, 0, 2), (21, 1, 2), (22, 2, 2), (90, 3, 2)]
    );
}

#[test]
fn busy_process_is_awaited_beside_a_free_place() {
    for sizes in [[2, 3], [1, 3]] {
        let mut table = Table::of_sizes(&sizes);
        table.die(11);
        table.leave(10, true);
        table.join(2, 0);
        table.pass(TIME_LIMIT, &[12, 20]);
        if sizes == [1, 3] {
            let answers = table.answers();
            let is_missing = matches!(answers[..], [(20, Err(RendezvousError::Missing { .. }))]);
            assert!(is_missing, "{answers:?}");
            continue;
        }
        assert_eq!(busy(&mut table), [(20, vec![2])]);
        table.leave(12, true);
        table.join(2, 2);
        assert_eq!(table.joined(), [(20, 0, 2), (22, 1, 2)]);
    }
}

impl Table {
    /// Takes the messages that an epoch is over since the last call, as (link, process that left).
    fn told_over(&mut self) -> Vec<(Link, u32)> {
        let actions = self.job.actions().into_iter();
        let told = actions.filter_map(|action| match action {
            JobAction::Say(link, ServerReply::EpochOver { by }) => Some((link, by.0)),
            _ => None,
        });
        told.collect()
    }
}

/// A process that is lost while the epoch begins may keep another from connecting. That one leaves,
/// and a third, which has connected to both, hears nothing from it.
#[test]
fn others_hear_once_that_their_epoch_is_over() {
    let mut table = Table::running();
    table.die(12);
    assert_eq!(table.told_over(), [], "they hear of the loss");
    table.leave(11, true);
    assert_eq!(table.told_over(), [(10, 1)]);
    table.leave(10, true);
    table.join(2, 1);
    table.join(2, 0);
    table.join_as(90, 1, 2);
    assert_eq!(table.joined(), [(20, 0, 2), (21, 1, 2), (90, 2, 2)]);

    // A process that was cut off begins the next epoch without leaving this one.
    table.join(3, 1);
    assert_eq!(table.told_over(), [(20, 1), (90, 1)]);
    table.leave(20, true);
    assert_eq!(table.told_over(), []);
}

/// The launcher sees a process end that has left its epoch and has not joined the next one. No
/// connection tells the service so.
#[test]
fn place_of_a_process_that_ends_between_two_epochs_is_free_at_once() {
    let spare_has_it = [(20, 0, 2), (21, 1, 2), (90, 2, 2)];

    // While the next epoch gathers.
    let mut table = Table::running();
    table.leave(12, true);
    table.leave(10, true);
    table.join(2, 0);
    table.join_as(90, 1, 5);
    table.leave(11, true);
    table.join(2, 1);
    assert_eq!((table.job.epochs.wanted(), table.joined()), (0, vec![]));
    table.job.place_is_free(EndedProcess::at(2, 2));
    assert_eq!(table.joined(), spare_has_it);

    // While the epoch that it has left still runs.
    let mut table = Table::running();
    table.leave(12, true);
    table.job.place_is_free(EndedProcess::at(2, 2));
    assert_eq!(table.job.epochs.wanted(), 1);
    table.join_as(90, 1, 5);
    [10, 11]
        .into_iter()
        .for_each(|link| table.leave(link, true));
    [0, 1].into_iter().for_each(|place| table.join(2, place));
    assert_eq!(table.joined(), spare_has_it);

    // Before the service has read that it leaves.
    let mut table = Table::running();
    table.job.place_is_free(EndedProcess::at(2, 2));
    table.leave(12, true);
    assert_eq!(table.job.epochs.wanted(), 1);
    table.join_as(90, 1, 5);
    [10, 11]
        .into_iter()
        .for_each(|link| table.leave(link, true));
    [0, 1].into_iter().for_each(|place| table.join(2, place));
    assert_eq!(table.joined(), spare_has_it);

    // The place that it had once is another's now.
    table.job.place_is_free(EndedProcess::at(2, 2));
    assert_eq!(
        (table.job.epochs.wanted(), table.job.epochs.present()),
        (0, 3)
    );
}
