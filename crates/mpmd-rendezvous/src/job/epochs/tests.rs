//! Jobs that lose processes and go on in the next epoch.

mod ends;
mod facts;
mod late;
mod leavers;
mod resumed;
mod returners;
mod vectors;

use mpmd_base::VectorWidth;

use super::super::super::SizeRange;
use super::super::super::protocol::{ClientRequest, LeaveKind};
use super::super::{JobAction, JobState};
use super::*;
use mpmd_proto::router::{Failure, FailureKind};

const TIME_LIMIT: Duration = Duration::from_secs(60);

/// The identity of the job's run.
const RUN: u128 = 7 << 90;

/// A job of three processes and its clients. Process `p` of epoch `e` has link `10 * e + p`.
struct Table {
    job: JobState,
    now: Instant,
    /// The key of each process that has joined, by epoch and place. That of a new process is the
    /// number of its link.
    keys: BTreeMap<(u64, u32), u128>,
    /// The key with which each link has joined.
    joined_with: BTreeMap<Link, u128>,
    /// The fields of these names in the description of each process that joins.
    sizes: Vec<SizeRange>,
    is_added: bool,
    leaves: bool,
    facts: Vec<Fact>,
    vectors: VectorWidth,
}

impl Table {
    fn new() -> Self {
        let now = Instant::now();
        let (job, keys) = (JobState::new(3, TIME_LIMIT, RUN, now), BTreeMap::new());
        let joined_with = BTreeMap::new();
        let (sizes, facts) = (Vec::new(), Vec::new());
        Self {
            job,
            now,
            keys,
            joined_with,
            sizes,
            is_added: false,
            leaves: false,
            facts,
            vectors: VectorWidth::default(),
        }
    }

    /// Returns a job of three that runs.
    fn running() -> Self {
        Self::of_sizes(&[])
    }

    /// Returns a job of three that runs, whose later epochs may have these numbers of processes.
    fn of_sizes(sizes: &[u32]) -> Self {
        let mut table = Self {
            sizes: SizeRange::of(sizes.iter().copied()),
            ..Self::new()
        };
        (0..3).for_each(|process| table.join(1, process));
        assert_eq!(table.joined(), [(10, 0, 1), (11, 1, 1), (12, 2, 1)]);
        table
    }

    /// Lets a process join an epoch.
    fn join(&mut self, epoch: u64, process: u32) {
        self.join_as(10 * epoch + u64::from(process), epoch, process);
    }

    /// Lets a process join an epoch: the one that had this place in the epoch before, or a new one.
    fn join_as(&mut self, link: Link, epoch: u64, process: u32) {
        let before = self.keys.get(&(epoch - 1, process));
        let identity = match before {
            Some(key) => Identity {
                key: *key,
                run: Some(RUN),
            },
            None => Identity {
                key: link.into(),
                run: None,
            },
        };
        self.join_with(link, epoch, process, identity);
    }

    fn join_with(&mut self, link: Link, epoch: u64, process: u32, identity: Identity) {
        self.job.opened(link, self.now);
        self.joined_with.insert(link, identity.key);
        let (sizes, is_added, leaves) = (self.sizes.clone(), self.is_added, self.leaves);
        let (pid, facts) = (link as u32, self.facts.clone().into());
        let member = JobMember {
            pid,
            sizes,
            is_added,
            leaves,
            facts,
            vectors: self.vectors,
            ..JobMember::default()
        };
        let join = ClientRequest::Join {
            ask: 1,
            process: ProcessId(process),
            processes: 3,
            epoch,
            identity,
            waits: true,
            peer_timeout: TIME_LIMIT * 10,
            member: Box::new(member),
        };
        self.job.said(link, join, self.now);
    }

    /// Lets a process of the running epoch leave in order, and return if `returns` is true.
    fn leave(&mut self, link: Link, returns: bool) {
        let how = if returns {
            LeaveKind::Returns
        } else {
            LeaveKind::Leaves
        };
        self.job
            .said(link, ClientRequest::Leave { ask: 2, how }, self.now);
        if !returns {
            self.job.closed(link, "the connection was closed");
        }
    }

    fn die(&mut self, link: Link) {
        self.job.closed(link, "connection reset");
    }

    /// Lets time pass while these clients answer.
    fn pass(&mut self, time: Duration, awake: &[Link]) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.job.tick(self.now).min(end);
            awake
                .iter()
                .for_each(|link| self.job.said(*link, ClientRequest::Pong, self.now));
        }
        self.job.tick(self.now);
    }

    /// Takes the answers to requests to join since the last call.
    fn answers(&mut self) -> Vec<(Link, Result<RequestAnswer, RendezvousError>)> {
        for (process, seat) in (0..).zip(&self.job.epochs.seats) {
            let key = seat.as_ref().map(|seat| self.joined_with[&seat.link]);
            let key = key.map(|key| ((self.job.epochs.epoch, process), key));
            self.keys.extend(key);
        }
        let answers = self
            .job
            .actions()
            .into_iter()
            .filter_map(|action| match action {
                JobAction::Say(link, ServerReply::Answer { ask: 1, result }) => {
                    Some((link, result))
                }
                _ => None,
            });
        answers.collect()
    }

    /// Takes the clients that have joined since the last call, as (link, process, epoch).
    fn joined(&mut self) -> Vec<(Link, u32, u64)> {
        let joined = self
            .answers()
            .into_iter()
            .map(|(link, result)| match result {
                Ok(RequestAnswer::Members {
                    process,
                    epoch,
                    run: RUN,
                    members,
                    more: false,
                    ..
                }) => {
                    assert_eq!(u64::from(members[process.index()].pid), link);
                    (link, process.0, epoch)
                }
                other => panic!("{other:?}"),
            });
        joined.collect()
    }
}

#[test]
fn spare_takes_the_place_of_a_dead_process() {
    let mut table = Table::running();
    // Their numbers are beyond the job's, and any epoch will do.
    table.join_as(90, 1, 3);
    table.join_as(91, 1, 4);
    table.die(11);
    assert_eq!(table.job.epochs.wanted(), 0);
    table.leave(10, true);
    table.leave(12, true);
    table.join(2, 2);
    assert_eq!(table.joined(), []);
    assert_eq!(table.job.epochs.phase(), &EpochPhase::Gathering);
    table.join(2, 0);
    assert_eq!(table.joined(), [(20, 0, 2), (90, 1, 2), (22, 2, 2)]);
    // The next death takes the second spare; a third would want a new process.
    table.die(90);
    table.leave(20, true);
    table.join(3, 0);
    table.leave(22, true);
    table.join(3, 2);
    assert_eq!(table.joined(), [(30, 0, 3), (91, 1, 3), (32, 2, 3)]);
    table.die(30);
    assert_eq!(
        (table.job.epochs.wanted(), table.job.epochs.present()),
        (1, 2)
    );
}

#[test]
fn new_process_that_starts_later_takes_the_place() {
    let mut table = Table::running();
    table.die(10);
    table.leave(11, true);
    table.leave(12, true);
    table.join(2, 1);
    table.join(2, 2);
    assert_eq!((table.job.epochs.wanted(), table.joined()), (1, vec![]));
    // Its launcher gives it the number of the dead process.
    table.join_as(95, 1, 0);
    assert_eq!(table.joined(), [(95, 0, 2), (21, 1, 2), (22, 2, 2)]);
    assert_eq!(table.job.epochs.wanted(), 0);
}

#[test]
fn epoch_without_enough_processes_fails_and_names_the_missing() {
    let mut table = Table::running();
    table.die(11);
    table.leave(10, true);
    table.join(2, 0);
    table.leave(12, true);
    table.join(2, 2);
    table.pass(TIME_LIMIT, &[20, 22]);
    let missing = RendezvousError::Missing {
        missing: vec![ProcessId(1)],
        processes: 3,
        peer_timeout: TIME_LIMIT,
    };
    let both = [(20, Err(missing.clone())), (22, Err(missing.clone()))];
    assert_eq!(table.answers(), both);
    table.join_as(90, 1, 1);
    assert_eq!(table.answers(), [(90, Err(missing))]);
}

#[test]
fn process_that_is_not_replaced_fails_the_next_epoch_at_once() {
    let lost = RendezvousError::NotReplaced {
        process: ProcessId(1),
        why: "it was killed".to_owned(),
    };
    let tell = |table: &mut Table| {
        let killed = "it was killed".to_owned();
        table.job.is_not_replaced(ProcessId(1), killed);
    };
    for is_told_before in [true, false] {
        let mut table = Table::running();
        if is_told_before {
            tell(&mut table);
        }
        table.die(11);
        table.leave(10, true);
        table.join(2, 0);
        if !is_told_before {
            assert_eq!(table.answers(), []);
            tell(&mut table);
        }
        assert_eq!(table.answers(), [(20, Err(lost.clone()))]);
        table.leave(12, true);
        table.join(2, 2);
        assert_eq!(table.answers(), [(22, Err(lost.clone()))]);
    }
}

#[test]
fn place_of_a_process_that_is_not_replaced_goes_to_a_spare_that_waits() {
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    table.job.is_not_replaced(ProcessId(1), "killed".to_owned());
    table.die(11);
    for (link, process) in [(10, 0), (12, 2)] {
        table.leave(link, true);
        table.join(2, process);
    }
    assert_eq!(table.joined(), [(20, 0, 2), (90, 1, 2), (22, 2, 2)]);
}

#[test]
fn deaths_while_an_epoch_gathers_free_their_places() {
    let mut table = Table::running();
    for spare in 0..3 {
        table.join_as(90 + u64::from(spare), 1, 3 + spare);
    }
    table.die(11);
    table.leave(10, true);
    table.join(2, 0);
    // One that has joined the new epoch, a spare that has its place, and one that never left.
    table.die(20);
    table.die(90);
    assert_eq!(table.joined(), []);
    table.die(12);
    assert_eq!((table.job.epochs.wanted(), table.joined()), (1, vec![]));
    table.join_as(93, 1, 9);
    let joined = table.joined();
    assert_eq!(
        joined
            .iter()
            .map(|(_, process, epoch)| (*process, *epoch))
            .collect::<Vec<_>>(),
        [(0, 2), (1, 2), (2, 2)]
    );
    let mut links: Vec<Link> = joined.iter().map(|(link, ..)| *link).collect();
    links.sort_unstable();
    assert_eq!(links, [91, 92, 93]);
}

#[test]
fn spares_hear_of_the_end_of_the_job() {
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    table.pass(TIME_LIMIT * 5, &[10, 11, 12, 90]);
    table.leave(10, false);
    table.leave(11, false);
    assert_eq!(table.answers(), []);
    table.leave(12, false);
    assert_eq!(table.answers(), [(90, Ok(RequestAnswer::Done))]);
    table.join_as(91, 1, 3);
    assert_eq!(
        table.answers(),
        [(91, Ok(RequestAnswer::Done))],
        "it comes after the end"
    );
    // The same if all have failed and none returns; but not while one does.
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    table.die(10);
    table.leave(11, true);
    table.die(12);
    assert_eq!(table.answers(), []);
    table.join(2, 1);
    table.die(21);
    table.pass(TIME_LIMIT, &[90]);
    assert!(matches!(
        table.answers()[..],
        [(90, Err(RendezvousError::Missing { .. }))]
    ));
}

#[test]
fn process_that_has_finished_is_replaced_if_others_return() {
    let mut table = Table::running();
    table.leave(10, false);
    table.die(11);
    assert_eq!(table.job.epochs.wanted(), 1);
    table.leave(12, true);
    table.join(2, 2);
    assert_eq!(table.job.epochs.wanted(), 2);
    table.join_as(90, 1, 1);
    table.join_as(91, 1, 0);
    assert_eq!(table.joined(), [(90, 0, 2), (91, 1, 2), (22, 2, 2)]);
}

#[test]
fn spare_with_another_program_is_refused_at_once() {
    let mut table = Table::running();
    table.job.opened(90, table.now);
    let member = JobMember {
        program: "other".into(),
        ..JobMember::default()
    };
    let join = ClientRequest::Join {
        ask: 1,
        process: ProcessId(3),
        processes: 3,
        epoch: 1,
        identity: Identity { key: 90, run: None },
        waits: true,
        peer_timeout: TIME_LIMIT,
        member: Box::new(member),
    };
    table.job.said(90, join, table.now);
    assert!(matches!(
        table.answers()[..],
        [(90, Err(RendezvousError::Program { .. }))]
    ));
}

/// The service was started anew with the same token, so that survivors of the first run find the
/// second.
#[test]
fn process_of_another_run_is_refused() {
    let mut table = Table::running();
    table.die(11);
    let identity = Identity {
        key: 11,
        run: Some(RUN + 1),
    };
    table.join_with(20, 2, 1, identity);
    let refused = RendezvousError::OtherRun {
        process: ProcessId(1),
    };
    assert_eq!(table.answers(), [(20, Err(refused))]);
    assert_eq!(
        (table.job.epochs.phase(), table.job.epochs.wanted()),
        (&EpochPhase::Running, 1)
    );
}

#[test]
fn spare_takes_the_place_of_a_process_that_never_came() {
    let mut table = Table::new();
    table.join(1, 0);
    table.join(1, 2);
    table.join_as(90, 1, 3);
    table.pass(TIME_LIMIT / 2, &[10, 12, 90]);
    assert_eq!((table.joined(), table.job.epochs.wanted()), (vec![], 0));
    table.pass(TIME_LIMIT / 2, &[10, 12, 90]);
    assert_eq!(table.joined(), [(10, 0, 1), (90, 1, 1), (12, 2, 1)]);
}

#[test]
fn process_that_dies_before_the_first_epoch_is_replaced_at_once() {
    let mut table = Table::new();
    table.join(1, 0);
    table.join(1, 1);
    table.die(11);
    table.join(1, 2);
    assert_eq!((table.joined(), table.job.epochs.wanted()), (vec![], 1));
    table.join_as(90, 1, 3);
    assert_eq!(table.joined(), [(10, 0, 1), (90, 1, 1), (12, 2, 1)]);
}

#[test]
fn value_of_a_lost_process_never_comes() {
    let mut table = Table::running();
    let get = |table: &mut Table, link| {
        let (key, peer_timeout) = ("k".to_owned(), TIME_LIMIT);
        table.job.said(
            link,
            ClientRequest::Get {
                ask: 1,
                key,
                peer_timeout,
            },
            table.now,
        );
        table.answers()
    };
    assert_eq!(get(&mut table, 11), []);
    // Another may still set it.
    table.leave(12, false);
    assert_eq!(table.answers(), []);
    table.die(10);
    let never = |link| {
        let (key, why) = ("k".to_owned(), "connection reset".to_owned());
        (
            link,
            Err(RendezvousError::NeverSet {
                key,
                process: ProcessId(0),
                why,
            }),
        )
    };
    assert_eq!(table.answers(), [never(11)]);
    assert_eq!(get(&mut table, 11), [never(11)], "nor if asked for later");
}

#[test]
fn process_whose_place_is_taken_waits_for_another() {
    let mut table = Table::running();
    table.leave(12, true);
    table.leave(11, true);
    table.join(2, 2);
    // Process 0 is lost, and a new one comes with its number. The lost one wakes.
    table.die(10);
    table.join_as(95, 1, 0);
    table.join(2, 0);
    assert_eq!(table.joined(), []);
    table.join(2, 1);
    assert_eq!(table.joined(), [(95, 0, 2), (21, 1, 2), (22, 2, 2)]);
    table.die(22);
    table.leave(21, true);
    table.join(3, 1);
    table.leave(95, true);
    table.join(3, 0);
    assert_eq!(table.joined(), [(30, 0, 3), (31, 1, 3), (20, 2, 3)]);
}

#[test]
fn spares_hear_that_all_processes_are_lost() {
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    table.die(10);
    table.leave(11, true);
    table.die(12);
    // One was to return, and dies before it does.
    table.pass(TIME_LIMIT / 2, &[90]);
    assert_eq!(table.answers(), []);
    table.pass(TIME_LIMIT / 2, &[90]);
    let lost = |link| (link, Err(RendezvousError::AllLost { processes: 3 }));
    assert_eq!(table.answers(), [lost(90)]);
    assert!(
        table
            .job
            .epochs
            .parts()
            .contains(&(ProcessId(1), ProcessPart::Out)),
        "nobody waits for its end"
    );
    table.join_as(91, 1, 4);
    assert_eq!(table.answers(), [lost(91)]);
}

#[test]
fn process_that_was_in_the_job_is_preferred_to_a_spare() {
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    table.die(10);
    // Given up, and awake again before another has begun the next epoch.
    table.die(11);
    table.join_as(91, 2, 1);
    table.leave(12, true);
    table.join(2, 2);
    let joined = table.joined();
    assert_eq!(joined, [(90, 0, 2), (91, 1, 2), (22, 2, 2)]);
    // Of two that wait for one place.
    table.join_as(92, 1, 4);
    table.die(90);
    table.join_as(93, 2, 0);
    table.leave(22, true);
    table.leave(91, true);
    table.join(3, 2);
    table.join(3, 1);
    assert_eq!(table.joined(), [(93, 0, 3), (31, 1, 3), (32, 2, 3)]);
}

/// A process that shows the token, but was not in the epoch that it claims to come from.
#[test]
fn stranger_ends_no_epoch_and_takes_no_place() {
    let mut table = Table::running();
    let stranger = |key| Identity {
        key,
        run: Some(RUN),
    };
    table.join_with(80, 2, 1, stranger(80));
    assert_eq!(
        (table.job.epochs.phase(), table.job.epochs.present()),
        (&EpochPhase::Running, 3)
    );
    assert_eq!(table.answers(), [], "it waits as a spare");
    // Nor can a spare or a process that has left in order begin an epoch.
    table.join_as(90, 1, 3);
    table.leave(90, true);
    table.join_with(91, 2, 2, stranger(90));
    table.leave(10, false);
    table.join_with(92, 2, 0, stranger(10));
    assert_eq!(
        (table.job.epochs.phase(), table.job.epochs.present()),
        (&EpochPhase::Running, 2)
    );
    // A member begins one. Others cannot have the place of one that returns.
    table.leave(11, true);
    table.leave(12, true);
    table.join(2, 1);
    table.join_with(81, 2, 2, stranger(81));
    let places = |table: &Table| {
        let seats = table.job.epochs.seats.iter();
        seats
            .map(|seat| seat.as_ref().map(|seat| seat.link))
            .collect::<Vec<_>>()
    };
    let has_been = Some(92);
    assert_eq!(places(&table), [has_been, Some(21), None]);
    table.join(2, 2);
    assert_eq!(table.joined(), [(92, 0, 2), (21, 1, 2), (22, 2, 2)]);
}

/// It has the numbers of the holder, which all processes are told, but not its key.
#[test]
fn holder_is_known_by_its_key_alone() {
    let mut table = Table::new();
    table.join(1, 1);
    let member = JobMember {
        pid: 11,
        ..JobMember::default()
    };
    for waits in [false, true] {
        let link = 80 + u64::from(waits);
        table.job.opened(link, table.now);
        let join = ClientRequest::Join {
            ask: 1,
            process: ProcessId(1),
            processes: 3,
            epoch: 1,
            identity: Identity { key: 80, run: None },
            waits,
            peer_timeout: TIME_LIMIT,
            member: Box::new(member.clone()),
        };
        table.job.said(link, join, table.now);
    }
    let held = RendezvousError::Duplicate {
        process: ProcessId(1),
        host: String::new(),
        pid: 11,
    };
    assert_eq!(table.answers(), [(80, Err(held))]);
    table.join(1, 0);
    table.join(1, 2);
    assert_eq!(table.joined(), [(10, 0, 1), (11, 1, 1), (12, 2, 1)]);
}

/// Takes the messages on busy processes since the last call, as (link, processes).
fn busy(table: &mut Table) -> Vec<(Link, Vec<u32>)> {
    let busy = table
        .job
        .actions()
        .into_iter()
        .filter_map(|action| match action {
            JobAction::Say(link, ServerReply::Busy { processes, .. }) => Some((
                link,
                processes.into_iter().map(|process| process.0).collect(),
            )),
            _ => None,
        });
    busy.collect()
}

#[test]
fn busy_process_keeps_its_place_while_it_answers() {
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    table.join_as(91, 1, 4);
    table.die(11);
    table.leave(10, true);
    table.join(2, 0);
    table.answers();
    // The program of process 2 does not look at the job for a long time.
    for _ in 0..3 {
        table.pass(TIME_LIMIT, &[12, 20, 90, 91]);
        assert_eq!(busy(&mut table), [(20, vec![2])]);
    }
    table.leave(12, true);
    table.pass(TIME_LIMIT - Duration::from_secs(1), &[20, 90, 91]);
    table.join(2, 2);
    assert_eq!(table.joined(), [(20, 0, 2), (90, 1, 2), (22, 2, 2)]);
}

#[test]
fn busy_process_that_falls_silent_loses_its_place() {
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    table.die(11);
    table.leave(10, true);
    table.join(2, 0);
    table.pass(TIME_LIMIT, &[12, 20, 90]);
    assert_eq!(table.job.epochs.wanted(), 0);
    assert_eq!(busy(&mut table), [(20, vec![2])]);
    // It is stopped, so that its place is free after the peer timeout. Another has the time to
    // come.
    table.pass(TIME_LIMIT + Duration::from_secs(1), &[20, 90]);
    assert_eq!(table.job.epochs.wanted(), 1);
    table.pass(TIME_LIMIT - Duration::from_secs(2), &[20, 90]);
    table.join_as(91, 1, 4);
    let joined = table.joined();
    assert_eq!(joined, [(20, 0, 2), (90, 1, 2), (91, 2, 2)]);
}

#[test]
fn free_place_is_not_held_open_by_a_busy_process() {
    let mut table = Table::running();
    table.die(11);
    table.leave(10, true);
    table.join(2, 0);
    table.pass(TIME_LIMIT, &[12, 20]);
    let answers = table.answers();
    assert!(
        matches!(answers[..], [(20, Err(RendezvousError::Missing { .. }))]),
        "{answers:?}"
    );
}

#[test]
fn requests_of_an_ended_epoch_fail_at_once() {
    let mut table = Table::running();
    let get = |table: &mut Table, link| {
        let (key, peer_timeout) = ("k".to_owned(), TIME_LIMIT);
        table.job.said(
            link,
            ClientRequest::Get {
                ask: 1,
                key,
                peer_timeout,
            },
            table.now,
        );
        table.answers()
    };
    assert_eq!(get(&mut table, 12), []);
    // Process 0 has seen a loss that the service has not.
    table.leave(10, true);
    assert!(matches!(
        table.answers()[..],
        [(12, Err(RendezvousError::NeverSet { .. }))]
    ));
    table.join(2, 0);
    let answers = get(&mut table, 12);
    assert!(
        matches!(answers[..], [(12, Err(RendezvousError::NeverSet { .. }))]),
        "{answers:?}"
    );
    // Its failure is not one of the next epoch.
    let failure = Failure::new(
        FailureKind::PeerLost,
        ProcessId(0),
        1,
        "it is lost".to_owned(),
    );
    table.job.said(
        12,
        ClientRequest::Report {
            ask: 3,
            report: FailureReport {
                failure,
                hash: None,
            },
        },
        table.now,
    );
    assert_eq!(table.job.epochs.reports(), []);
}

#[test]
fn failure_of_a_process_that_has_left_outlives_its_epoch() {
    let mut table = Table::running();
    table.die(11);
    let failure = Failure::new(FailureKind::Kernel, ProcessId(0), 1, "it failed".to_owned());
    let report = FailureReport {
        failure,
        hash: None,
    };
    table.job.said(
        10,
        ClientRequest::Report {
            ask: 3,
            report: report.clone(),
        },
        table.now,
    );
    table.leave(10, false);
    // Process 2 has only seen the loss of process 1, and goes on first.
    table.leave(12, true);
    table.join(2, 2);
    assert_eq!(table.job.epochs.reports(), [(ProcessId(0), report)]);
    assert!(
        table
            .job
            .epochs
            .parts()
            .contains(&(ProcessId(0), ProcessPart::Left(ProcessId(0))))
    );
}

#[test]
fn parts_tell_who_has_which_place() {
    let part = |table: &Table, number| {
        let parts = table.job.epochs.parts();
        let found = parts.iter().find(|(known, _)| *known == ProcessId(number));
        found.map(|(_, part)| *part)
    };
    let holds = |process| Some(ProcessPart::Holds(ProcessId(process)));
    let mut table = Table::running();
    table.join_as(90, 1, 3);
    assert_eq!(
        [1, 3, 4].map(|number| part(&table, number)),
        [holds(1), Some(ProcessPart::Waits), None]
    );
    table.die(11);
    assert_eq!(part(&table, 1), holds(1), "others have not gone on yet");
    table.leave(10, true);
    table.leave(12, true);
    table.join(2, 0);
    table.join(2, 2);
    table.joined();
    let died = Some(ProcessPart::Died(ProcessId(1)));
    let expected = [holds(0), died, holds(2), holds(1)];
    assert_eq!([0, 1, 2, 3].map(|number| part(&table, number)), expected);
    // One is stopped, and given up.
    table.pass(TIME_LIMIT + Duration::from_secs(1), &[20, 90]);
    assert_eq!(part(&table, 2), Some(ProcessPart::Out));
    table.leave(20, false);
    let left = Some(ProcessPart::Left(ProcessId(0)));
    assert_eq!((part(&table, 0), table.job.epochs.is_over()), (left, false));
    table.leave(90, false);
    assert_eq!(part(&table, 3), Some(ProcessPart::Left(ProcessId(1))));
    assert_eq!(
        (table.job.epochs.is_over(), table.job.epochs.wanted()),
        (true, 0)
    );
    // A spare that goes is forgotten.
    table.join_as(95, 1, 5);
    table.die(95);
    assert_eq!(part(&table, 5), None);
}

/// Lets all processes of a running epoch but some leave it and join the next one.
fn go_on(table: &mut Table, epoch: u64, links: &[Link], without: &[Link]) {
    let goes_on = |link: &&Link| !without.contains(link);
    let places: Vec<u32> = links
        .iter()
        .filter(goes_on)
        .map(|link| place(table, *link))
        .collect();
    links
        .iter()
        .filter(goes_on)
        .for_each(|link| table.leave(*link, true));
    places
        .into_iter()
        .for_each(|place| table.join(epoch, place));
}

fn place(table: &Table, link: Link) -> u32 {
    table.job.epochs.place_of(link).expect("it has one").0
}

/// Takes the sizes that processes were told since the last call, as (link, processes).
fn told(table: &mut Table) -> Vec<(Link, u32)> {
    let told = table
        .job
        .actions()
        .into_iter()
        .filter_map(|action| match action {
            JobAction::Say(link, ServerReply::CouldHave { processes, .. }) => {
                Some((link, processes))
            }
            _ => None,
        });
    told.collect()
}

#[test]
fn job_without_spares_shrinks_and_renumbers() {
    let mut table = Table::of_sizes(&[1, 2, 3]);
    table.die(10);
    go_on(&mut table, 2, &[11, 12], &[]);
    assert_eq!(table.joined(), [(21, 0, 2), (22, 1, 2)]);
    assert_eq!(
        (table.job.epochs.places(), table.job.epochs.wanted()),
        (2, 1)
    );
    // A late word of the dead process's old connection concerns nobody.
    table.die(10);
    assert_eq!(table.job.epochs.present(), 2);
    table.die(21);
    go_on(&mut table, 3, &[22], &[]);
    assert_eq!(table.joined(), [(31, 0, 3)]);
    assert_eq!(table.job.epochs.places(), 1);
}

#[test]
fn size_that_the_program_refuses_is_waited_out() {
    let mut table = Table::of_sizes(&[1, 3]);
    table.die(10);
    go_on(&mut table, 2, &[11, 12], &[]);
    assert_eq!(table.joined(), []);
    table.pass(TIME_LIMIT + Duration::from_secs(1), &[21, 22]);
    let missing = RendezvousError::Missing {
        missing: vec![ProcessId(0)],
        processes: 3,
        peer_timeout: TIME_LIMIT,
    };
    assert_eq!(
        table.answers(),
        [(21, Err(missing.clone())), (22, Err(missing))]
    );
}

#[test]
fn place_is_kept_free_while_the_owner_may_start() {
    let mut table = Table::of_sizes(&[2, 3]);
    table.job.owner_starts(1);
    table.die(10);
    go_on(&mut table, 2, &[11, 12], &[]);
    assert_eq!(table.joined(), []);
    table.job.owner_starts(0);
    assert_eq!(table.joined(), [(21, 0, 2), (22, 1, 2)]);
    // Or none comes in time.
    table.job.owner_starts(1);
    table.die(22);
    table.sizes = SizeRange::of([1]);
    go_on(&mut table, 3, &[21], &[]);
    assert_eq!(table.joined(), []);
    table.pass(TIME_LIMIT + Duration::from_secs(1), &[30]);
    assert_eq!(table.joined(), [(30, 0, 3)]);
}

#[test]
fn spare_that_comes_later_makes_the_job_as_large_as_before() {
    let mut table = Table::of_sizes(&[2, 3, 4]);
    table.die(11);
    go_on(&mut table, 2, &[10, 12], &[]);
    assert_eq!(table.joined(), [(20, 0, 2), (22, 1, 2)]);
    // Its number is beyond the job's. A second one finds no room.
    table.join_as(90, 1, 3);
    assert_eq!(told(&mut table), [(20, 3)]);
    table.join_as(91, 1, 4);
    assert_eq!(told(&mut table), [(20, 3)]);
    go_on(&mut table, 3, &[20, 22], &[]);
    assert_eq!(table.joined(), [(30, 0, 3), (31, 1, 3), (90, 2, 3)]);
    table.die(90);
    assert_eq!(table.job.epochs.wanted(), 0, "the other spare waits");
}

#[test]
fn spare_that_goes_again_is_told() {
    let mut table = Table::of_sizes(&[2, 3]);
    table.die(11);
    go_on(&mut table, 2, &[10, 12], &[]);
    table.joined();
    table.join_as(90, 1, 3);
    table.die(90);
    assert_eq!(told(&mut table), [(20, 3), (20, 2)]);
}

#[test]
fn added_processes_make_the_job_larger_than_it_was() {
    let mut table = Table::of_sizes(&[3, 5]);
    table.join_as(90, 1, 3);
    table.is_added = true;
    table.join_as(91, 1, 4);
    assert_eq!(told(&mut table), [(10, 3), (10, 3)], "no size of four");
    table.join_as(92, 1, 5);
    assert_eq!(told(&mut table), [(10, 5)]);
    go_on(&mut table, 2, &[10, 11, 12], &[]);
    let all = [(20, 0, 2), (21, 1, 2), (22, 2, 2), (91, 3, 2), (92, 4, 2)];
    assert_eq!(table.joined(), all, "the spare waits on");
}

#[test]
fn process_that_leaves_in_order_has_no_place_in_the_next_epoch() {
    for is_first in [true, false] {
        let mut table = Table::of_sizes(&[2, 3]);
        if is_first {
            table.leave(11, false);
        }
        go_on(&mut table, 2, &[10, 12], &[]);
        if !is_first {
            assert_eq!(table.joined(), [], "it has not gone yet");
            table.leave(11, false);
        }
        assert_eq!(table.joined(), [(20, 0, 2), (22, 1, 2)]);
        let parts = table.job.epochs.parts();
        assert!(
            parts.contains(&(ProcessId(1), ProcessPart::Out)),
            "{parts:?}"
        );
    }
}
