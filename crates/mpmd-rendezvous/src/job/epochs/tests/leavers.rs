//! Processes that leave in order, and deaths before the others can do without them.

use super::*;

/// Lets a process of epoch 1 leave the job.
fn leave_job(table: &mut Table, process: u32) {
    table.leave(10 + u64::from(process), true);
    table.leaves = true;
    table.join(2, process);
    table.leaves = false;
}

fn whole(table: &mut Table, link: Link) {
    table.job.said(link, ClientRequest::Whole, table.now);
}

#[test]
fn leaver_ends_once_a_commit_of_the_others_is_whole() {
    let mut table = Table::of_sizes(&[1, 2]);
    whole(&mut table, 10);
    leave_job(&mut table, 1);
    assert_eq!(table.answers(), []);
    for process in [0, 2] {
        table.leave(10 + u64::from(process), true);
        table.join(2, process);
    }
    assert_eq!(table.joined(), [(20, 0, 2), (22, 1, 2)]);
    table.pass(TIME_LIMIT * 3, &[20, 21, 22]);
    assert_eq!(table.answers(), []);
    whole(&mut table, 21);
    assert_eq!(table.answers(), [], "it is none of the epoch");
    whole(&mut table, 20);
    assert_eq!(table.answers(), [(21, Ok(RequestAnswer::Done))]);
}

#[test]
fn leaver_is_called_back_by_a_death_at_any_time_before() {
    // The order of (the leaver's return, the death, the return of the last one).
    for order in [[0, 1, 2], [1, 0, 2], [0, 2, 1], [1, 2, 0]] {
        let mut table = Table::of_sizes(&[1, 2]);
        whole(&mut table, 10);
        for event in order {
            match event {
                0 => leave_job(&mut table, 1),
                1 => table.die(10),
                _ => {
                    table.leave(12, true);
                    table.join(2, 2);
                }
            }
        }
        assert_eq!(table.joined(), [(21, 0, 2), (22, 1, 2)], "{order:?}");
    }
}

#[test]
fn leaver_goes_on_alone_if_all_others_are_lost() {
    let mut table = Table::of_sizes(&[1, 2]);
    whole(&mut table, 10);
    leave_job(&mut table, 1);
    for process in [0, 2] {
        table.leave(10 + u64::from(process), true);
        table.join(2, process);
    }
    assert_eq!(table.joined().len(), 2);
    table.die(20);
    assert_eq!(table.answers(), []);
    table.die(22);
    assert_eq!(table.joined(), [(21, 0, 3)]);
    assert!(!table.job.epochs.is_over());
}

#[test]
fn leaver_is_not_needed_by_a_job_that_has_ended() {
    let mut table = Table::of_sizes(&[1, 2]);
    whole(&mut table, 10);
    leave_job(&mut table, 1);
    table.leave(10, false);
    table.leave(12, false);
    assert_eq!(table.answers(), [(21, Ok(RequestAnswer::Done))]);
    assert!(
        table
            .job
            .epochs
            .parts()
            .contains(&(ProcessId(1), ProcessPart::Left(ProcessId(1))))
    );
}

#[test]
fn leavers_have_places_before_processes_without_copies() {
    // Two of the three processes of a job that neither shrinks nor grows.
    let mut table = Table::running();
    whole(&mut table, 10);
    leave_job(&mut table, 0);
    leave_job(&mut table, 1);
    table.join_as(90, 1, 3);
    table.join_as(91, 1, 4);
    table.leave(12, true);
    table.join(2, 2);
    assert_eq!(table.joined(), [(90, 0, 2), (91, 1, 2), (22, 2, 2)]);
    table.die(22);
    table.leave(90, true);
    table.join(3, 0);
    table.leave(91, true);
    table.join(3, 1);
    let links: Vec<Link> = table.joined().iter().map(|(link, ..)| *link).collect();
    let leavers = links.iter().filter(|link| [20, 21].contains(link)).count();
    assert_eq!(leavers, 2, "{links:?}");
}

/// Lets these processes of epoch 1 return.
fn return_all(table: &mut Table, processes: &[u32]) {
    for process in processes {
        table.leave(10 + u64::from(*process), true);
        table.join(2, *process);
    }
}

#[test]
fn leaver_stays_if_its_replacement_dies_before_the_change() {
    // The order of (the leaver's return, the spare's death, the return of process 0).
    for order in [
        [0, 1, 2],
        [1, 0, 2],
        [0, 2, 1],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        // The program goes on with three processes alone.
        for sizes in [&[][..], &[3]] {
            let mut table = Table::of_sizes(sizes);
            table.join_as(90, 1, 3);
            whole(&mut table, 10);
            for event in order {
                match event {
                    0 => leave_job(&mut table, 1),
                    1 => table.die(90),
                    _ => return_all(&mut table, &[0]),
                }
            }
            return_all(&mut table, &[2]);
            let all = [(20, 0, 2), (21, 1, 2), (22, 2, 2)];
            assert_eq!(table.joined(), all, "{order:?}, {sizes:?}");
        }
    }
}

#[test]
fn leaver_stays_if_its_replacement_never_joins() {
    let mut table = Table::running();
    table.job.owner_starts(1);
    whole(&mut table, 10);
    leave_job(&mut table, 1);
    return_all(&mut table, &[0, 2]);
    assert_eq!(table.joined(), [], "a process may still be started");
    table.pass(TIME_LIMIT * 3, &[20, 21, 22]);
    assert_eq!(table.joined(), [(20, 0, 2), (21, 1, 2), (22, 2, 2)]);
}

#[test]
fn of_two_leavers_one_stays_if_one_replacement_dies() {
    let leave_both = |table: &mut Table| {
        whole(table, 10);
        leave_job(table, 1);
        leave_job(table, 2);
    };
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    table.join_as(91, 1, 4);
    leave_both(&mut table);
    table.die(90);
    return_all(&mut table, &[0]);
    assert_eq!(table.joined(), [(20, 0, 2), (91, 1, 2), (22, 2, 2)]);

    // The launcher starts another one, until it may start none.
    let mut table = Table::running();
    table.job.owner_starts(2);
    leave_both(&mut table);
    return_all(&mut table, &[0]);
    assert_eq!((table.joined(), table.job.epochs.wanted()), (vec![], 2));
    table.job.owner_starts(1);
    table.job.owner_starts(0);
    assert_eq!(table.joined(), [(20, 0, 2), (21, 1, 2), (22, 2, 2)]);

    // The program goes on with one, but not with two.
    let mut table = Table::of_sizes(&[1, 3]);
    leave_both(&mut table);
    return_all(&mut table, &[0]);
    assert_eq!(table.joined(), [(20, 0, 2)]);
}

#[test]
fn process_0_hears_how_many_can_replace_others() {
    let mut table = Table::of_sizes(&[3]);
    let replacements = |table: &mut Table| -> Vec<(Link, u32)> {
        let said = table.job.actions().into_iter();
        let said = said.filter_map(|action| match action {
            JobAction::Say(link, ServerReply::CouldHave { replacements, .. }) => {
                Some((link, replacements))
            }
            _ => None,
        });
        said.collect()
    };

    table.join_as(90, 1, 3);
    table.job.owner_starts(3);
    table.job.owner_starts(0);
    assert_eq!(replacements(&mut table), [(10, 1), (10, 4), (10, 1)]);
    table.join_as(91, 1, 4);
    table.die(12);
    replacements(&mut table);
    go_on(&mut table, 2, &[10, 11], &[]);
    assert_eq!(replacements(&mut table), [(20, 1)], "one waits on");
}
