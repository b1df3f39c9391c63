//! Jobs that go on at another service.

use super::super::super::super::{CommitStanding, Heir, JoinedEpoch};
use super::*;

/// The key of the process that had this place in the epoch before.
fn key(process: u32) -> u128 {
    u128::from(process) + 50
}

/// Returns the member with this key, which has been in the job since an epoch.
fn heir(key: u128, since: u64) -> Option<Heir> {
    let mark = Identity { key, run: None }.mark();
    Some(Heir {
        address: format!("host:{key}"),
        mark,
        since,
    })
}

/// Returns a job that goes on after epoch 4 of these members, of whom some live.
fn resumed(members: Vec<JobMember>, lives: &[bool], sizes: &[u32]) -> Table {
    resumed_from(CommitStanding::default(), members, lives, sizes)
}

fn resumed_from(
    standing: CommitStanding,
    members: Vec<JobMember>,
    lives: &[bool],
    sizes: &[u32],
) -> Table {
    let past = JoinedEpoch {
        process: ProcessId(1),
        epoch: 4,
        run: RUN,
        members,
        standing,
    };
    let mut table = Table {
        sizes: SizeRange::of(sizes.iter().copied()),
        ..Table::new()
    };
    table.job = JobState::resumed(3, TIME_LIMIT, &past, lives, table.now);
    table
}

/// Returns a job of three the first of which ran the service.
fn after_the_first(lives: &[bool], sizes: &[u32]) -> Table {
    let member = |process| JobMember {
        heir: (process > 0).then(|| heir(key(process), 1)).flatten(),
        ..JobMember::default()
    };
    resumed((0..3).map(member).collect(), lives, sizes)
}

impl Table {
    fn returns(&mut self, link: Link, process: u32, epoch: u64) {
        let identity = Identity {
            key: key(process),
            run: Some(RUN),
        };
        self.join_with(link, epoch, process, identity);
    }

    fn spare(&mut self, link: Link) {
        self.join_with(
            link,
            1,
            7,
            Identity {
                key: link.into(),
                run: None,
            },
        );
    }
}

#[test]
fn processes_keep_places_and_a_spare_gets_that_of_the_host() {
    let mut table = after_the_first(&[false, true, true], &[]);
    assert_eq!(
        (table.job.epochs.wanted(), table.job.epochs.has_begun()),
        (1, true)
    );
    table.returns(52, 2, 5);
    table.spare(90);
    assert_eq!(table.joined(), []);
    table.returns(51, 1, 5);
    assert_eq!(table.joined(), [(90, 0, 5), (51, 1, 5), (52, 2, 5)]);
}

#[test]
fn job_that_may_shrinks_at_once_without_those_that_are_gone() {
    let mut table = after_the_first(&[false, false, true], &[1, 2, 3]);
    table.returns(52, 2, 5);
    assert_eq!(table.joined(), [(52, 0, 5)]);
    let mut table = after_the_first(&[false, true, true], &[1, 2, 3]);
    table.returns(52, 2, 5);
    assert_eq!(table.joined(), [], "process 1 is awaited");
    table.pass(TIME_LIMIT, &[52]);
    assert_eq!(table.joined(), [(52, 0, 5)]);
}

#[test]
fn job_without_a_process_for_a_place_fails_in_time() {
    let mut table = after_the_first(&[false, true, true], &[]);
    table.returns(51, 1, 5);
    table.returns(52, 2, 5);
    table.pass(TIME_LIMIT, &[51, 52]);
    let answers = table.answers();
    assert_eq!(answers.len(), 2);
    let missing = |answer: &Result<_, RendezvousError>| match answer {
        Err(RendezvousError::Missing { missing, .. }) => missing == &[ProcessId(0)],
        _ => false,
    };
    assert!(
        answers.iter().all(|(_, answer)| missing(answer)),
        "{answers:?}"
    );
}

#[test]
fn processes_that_know_other_epochs_keep_their_places() {
    let mut table = after_the_first(&[false, true, true], &[2]);
    // The first service was lost while it told the members of epoch 5.
    table.returns(51, 1, 6);
    table.returns(52, 2, 4);
    assert_eq!(table.joined(), [(51, 0, 5), (52, 1, 5)]);
}

#[test]
fn process_of_another_run_or_with_another_key_has_no_place() {
    let mut table = after_the_first(&[false, true, true], &[]);
    let identity = Identity {
        key: key(1),
        run: Some(RUN + 1),
    };
    table.join_with(51, 5, 1, identity);
    let other = RendezvousError::OtherRun {
        process: ProcessId(1),
    };
    assert_eq!(table.answers(), [(51, Err(other))]);
    // All members know a mark of the key, which gives no place.
    let mark = Identity {
        key: key(1),
        run: None,
    }
    .mark();
    table.join_with(
        53,
        5,
        1,
        Identity {
            key: mark,
            run: Some(RUN),
        },
    );
    table.returns(52, 2, 5);
    table.returns(61, 1, 5);
    assert_eq!(table.joined(), [(53, 0, 5), (61, 1, 5), (52, 2, 5)]);
}

#[test]
fn those_who_were_there_first_are_first_in_the_succession() {
    let mut table = Table::new();
    let join = |table: &mut Table, link: Link, epoch, process, key| {
        table.job.opened(link, table.now);
        let (identity, peer_timeout) = (Identity { key, run: None }, TIME_LIMIT);
        let heir = heir(key, 77).filter(|_| key != 50);
        let member = JobMember {
            pid: link as u32,
            heir,
            ..JobMember::default()
        };
        let (ask, process, processes, waits) = (1, ProcessId(process), 3, true);
        let join = ClientRequest::Join {
            ask,
            process,
            processes,
            epoch,
            identity,
            waits,
            peer_timeout,
            member: Box::new(member),
        };
        table.job.said(link, join, table.now);
    };
    (0..3).for_each(|process| {
        join(
            &mut table,
            10 + u64::from(process),
            1,
            process,
            key(process),
        )
    });
    table.job.actions();
    let told = |table: &mut Table, link| {
        let actions = table.job.actions().into_iter();
        let told = actions.filter_map(|action| match action {
            JobAction::Say(
                to,
                ServerReply::Heirs {
                    run: RUN,
                    addresses,
                },
            ) if to == link => Some(addresses),
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    join(&mut table, 90, 1, 3, 90);
    assert_eq!(told(&mut table, 90), [["host:51", "host:52"]]);
    join(&mut table, 91, 1, 4, 91);
    assert_eq!(told(&mut table, 91), [["host:51", "host:52"]]);
    table.die(11);
    table.leave(10, true);
    table.leave(12, true);
    join(&mut table, 20, 2, 0, key(0));
    join(&mut table, 22, 2, 2, key(2));
    // The first spare has place 1, and is behind process 2.
    assert_eq!(told(&mut table, 91), [["host:52", "host:90"]]);
}

#[test]
fn service_that_goes_on_waits_for_those_that_leave() {
    let member = |process| JobMember {
        heir: (process > 0).then(|| heir(key(process), 4)).flatten(),
        ..JobMember::default()
    };
    let members: Vec<JobMember> = (0..2).map(member).collect();
    let standing = CommitStanding {
        whole: Some(3),
        leavers: 1,
    };
    let table = || resumed_from(standing, members.clone(), &[false, true], &[1, 2, 3]);
    let mut awaited = table();
    awaited.returns(51, 1, 5);
    assert_eq!(awaited.joined(), []);
    awaited.leaves = true;
    awaited.returns(57, 7, 5);
    assert_eq!(
        awaited.joined(),
        [(57, 0, 5), (51, 1, 5)],
        "it has the place of the lost one"
    );
    let mut late = table();
    late.returns(51, 1, 5);
    late.pass(TIME_LIMIT, &[51]);
    assert_eq!(late.joined(), [(51, 0, 5)]);
}

#[test]
fn process_that_ran_the_service_and_leaves_is_awaited() {
    let mut table = after_the_first(&[true, true, true], &[1, 2, 3]);
    table.returns(51, 1, 5);
    table.returns(52, 2, 5);
    assert_eq!(table.joined(), []);
    table.leaves = true;
    table.returns(50, 0, 5);
    assert_eq!(table.joined(), [(51, 0, 5), (52, 1, 5)]);
}
