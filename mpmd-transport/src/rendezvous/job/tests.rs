//! Jobs of simulated clients: each test checks the replies and their times.

use super::super::protocol::ProcessStatus;
use super::super::{Identity, Member};
use super::*;

const TIME_LIMIT: Duration = Duration::from_secs(60);

/// A job in which process `p` is connected by link `p + 10`.
struct Table {
    job: Job,
    now: Instant,
}

impl Table {
    fn new(processes: usize) -> Self {
        let now = Instant::now();
        Self { job: Job::new(processes, TIME_LIMIT, 1, now), now }
    }

    fn running(processes: usize) -> Self {
        let mut table = Self::new(processes);
        for process in 0..processes {
            table.join(process as u32, "");
        }
        assert_eq!(table.job.phase(), &Phase::Running);
        table.said();
        table
    }

    fn join(&mut self, process: u32, program: &str) {
        self.open_and_join(u64::from(process) + 10, process, program);
    }

    fn open_and_join(&mut self, link: Link, process: u32, program: &str) {
        self.job.opened(link, self.now);
        let member = Member { pid: process + 100, program: program.into(), ..Member::default() };
        let processes = self.job.seats.len() as u64;
        let peer_timeout = Duration::from_secs(3600);
        let identity = Identity { key: process.into(), run: None };
        let process = ProcessId(process);
        let join = Request::Join {
            ask: 1,
            process,
            processes,
            epoch: 1,
            identity,
            waits: false,
            peer_timeout,
            member,
        };
        self.job.said(link, join, self.now);
    }

    fn barrier(&mut self, link: Link, peer_timeout: Duration) {
        self.job.said(link, Request::Barrier { ask: 7, name: "b".into(), peer_timeout }, self.now);
    }

    /// Takes the replies since the last call, except pings, as (link, reply).
    fn said(&mut self) -> Vec<(Link, Reply)> {
        let actions = self.job.actions().into_iter();
        let said = actions.filter_map(|action| match action {
            Action::Say(link, reply) => Some((link, reply)),
            Action::Close(_) => None,
        });
        said.filter(|(_, reply)| *reply != Reply::Ping).collect()
    }

    /// Lets time pass as with a live server, while all clients in `awake` answer.
    fn pass(&mut self, time: Duration, awake: &[Link]) {
        let end = self.now + time;
        while self.now < end {
            let next = self.job.tick(self.now);
            assert!(next > self.now, "a server must not spin");
            self.now = next.min(end);
            for &link in awake {
                self.job.said(link, Request::Pong, self.now);
            }
        }
        self.job.tick(self.now);
    }
}

fn errors(said: Vec<(Link, Reply)>) -> Vec<(Link, RendezvousError)> {
    let errors = said.into_iter().filter_map(|(link, reply)| match reply {
        Reply::Answer { result: Err(error), .. } => Some((link, error)),
        _ => None,
    });
    errors.collect()
}

#[test]
fn all_get_the_members_when_the_last_has_joined() {
    let mut table = Table::new(3);
    table.join(2, "p");
    table.join(0, "p");
    assert!(table.said().is_empty());
    table.join(1, "p");
    let said = table.said();
    assert_eq!(said.iter().map(|(link, _)| *link).collect::<Vec<_>>(), [10, 11, 12]);
    for (_, reply) in said {
        let Reply::Answer { ask: 1, result: Ok(Answer::Members { members, more: false, .. }) } =
            reply
        else {
            panic!("{reply:?}")
        };
        assert_eq!(members.iter().map(|m| m.pid).collect::<Vec<_>>(), [100, 101, 102]);
    }
}

#[test]
fn missing_processes_are_named_also_to_late_comers() {
    let mut table = Table::new(4);
    table.join(0, "");
    table.join(3, "");
    table.pass(TIME_LIMIT, &[10, 13]);
    let missing = RendezvousError::Missing {
        missing: vec![ProcessId(1), ProcessId(2)],
        processes: 4,
        peer_timeout: TIME_LIMIT,
    };
    assert_eq!(errors(table.said()), [(10, missing.clone()), (13, missing.clone())]);
    assert_eq!(table.job.phase(), &Phase::Failed(missing.clone()));
    table.join(1, "");
    assert_eq!(errors(table.said()), [(11, missing)]);
}

#[test]
fn duplicate_is_refused_and_the_job_goes_on() {
    let mut table = Table::new(2);
    table.join(1, "");
    table.job.opened(50, table.now);
    let peer_timeout = Duration::from_secs(3600);
    let member = Member { pid: 7, ..Member::default() };
    let join = Request::Join {
        ask: 1,
        process: ProcessId(1),
        processes: 2,
        epoch: 1,
        identity: Identity { key: 7, run: None },
        waits: false,
        peer_timeout,
        member,
    };
    table.job.said(50, join, table.now);
    let held = RendezvousError::Duplicate { process: ProcessId(1), host: String::new(), pid: 101 };
    assert_eq!(errors(table.said()), [(50, held)]);
    table.join(0, "");
    assert_eq!(table.job.phase(), &Phase::Running);
    table.job.closed(50, "closed");
    assert_eq!(table.job.present(), 2);
}

#[test]
fn reconnecting_process_keeps_its_number() {
    let mut table = Table::new(2);
    table.join(1, "");
    // The end of its first connection has not been seen yet.
    table.open_and_join(50, 1, "");
    table.join(0, "");
    let heard: Vec<Link> = table.said().into_iter().map(|(link, _)| link).collect();
    assert_eq!(heard, [10, 50]);
    table.job.closed(11, "connection reset");
    assert_eq!((table.job.present(), table.said()), (2, vec![]));
}

#[test]
fn process_may_rejoin_before_job_is_complete() {
    let mut table = Table::new(2);
    table.join(1, "");
    table.job.closed(11, "connection closed");
    table.open_and_join(50, 1, "");
    table.join(0, "");
    assert_eq!(table.job.phase(), &Phase::Running);
    assert!(errors(table.said()).is_empty());
}

#[test]
fn nobody_joins_a_complete_job() {
    let mut table = Table::running(2);
    table.job.closed(11, "connection closed");
    table.said();
    table.open_and_join(50, 1, "");
    let error = RendezvousError::Complete { process: ProcessId(1), processes: 2 };
    assert_eq!(errors(table.said()), [(50, error)]);
}

#[test]
fn different_programs_fail_the_job_for_all() {
    let mut table = Table::new(3);
    table.join(0, "a");
    table.join(2, "b");
    let said = errors(table.said());
    assert_eq!(said.iter().map(|(link, _)| *link).collect::<Vec<_>>(), [10, 12]);
    for (_, error) in said {
        assert!(
            matches!(
                &error,
                RendezvousError::Program { process: ProcessId(2), other: ProcessId(0), .. }
            ),
            "{error}"
        );
    }
    assert!(matches!(table.job.phase(), Phase::Failed(RendezvousError::Program { .. })));
}

#[test]
fn silent_process_is_dropped_after_peer_timeout() {
    let mut table = Table::running(3);
    table.pass(TIME_LIMIT - Duration::from_secs(2), &[10, 12]);
    assert!(table.said().is_empty());
    table.pass(Duration::from_secs(4), &[10, 12]);
    let said = table.said();
    let downs: Vec<Link> = said
        .iter()
        .filter(|(_, reply)| matches!(reply, Reply::Down { process: ProcessId(1), .. }))
        .map(|(link, _)| *link)
        .collect();
    assert_eq!(downs, [10, 12]);
    assert!(said.iter().any(|(link, reply)| *link == 11 && matches!(reply, Reply::Dropped { .. })));
}

#[test]
fn stopped_server_drops_no_client() {
    let mut table = Table::running(2);
    table.job.tick(table.now);
    table.now += TIME_LIMIT * 3;
    table.job.tick(table.now);
    assert!(table.said().is_empty());
    assert_eq!(table.job.present(), 2);
}

#[test]
fn server_stop_extends_all_deadlines() {
    let mut table = Table::new(2);
    table.join(0, "");
    table.job.opened(50, table.now);
    table.job.said(
        10,
        Request::Get { ask: 3, key: "k".into(), peer_timeout: TIME_LIMIT },
        table.now,
    );
    table.job.tick(table.now);
    table.now += TIME_LIMIT * 3;
    table.job.tick(table.now);
    assert!(table.said().is_empty());
    table.join(1, "");
    assert_eq!(table.job.phase(), &Phase::Running);
    table.said();
    table.job.said(50, Request::Set { ask: 4, key: "k".into(), value: vec![1] }, table.now);
    assert_eq!(table.said()[0], (10, Reply::Answer { ask: 3, result: Ok(Answer::Value(vec![1])) }));
}

#[test]
fn late_barrier_names_missing_and_can_be_retried() {
    let mut table = Table::running(3);
    table.barrier(10, Duration::from_secs(5));
    table.barrier(12, Duration::from_secs(9));
    table.pass(Duration::from_secs(6), &[10, 11, 12]);
    let error = RendezvousError::Barrier {
        name: "b".into(),
        missing: vec![ProcessId(1)],
        processes: 3,
        peer_timeout: Duration::from_secs(5),
    };
    assert_eq!(errors(table.said()), [(10, error)]);
    table.barrier(10, Duration::from_secs(5));
    table.barrier(11, Duration::from_secs(5));
    let said = table.said();
    assert_eq!(said.len(), 3);
    assert!(errors(said).is_empty());
}

#[test]
fn barrier_breaks_when_a_process_is_gone() {
    let mut table = Table::running(3);
    table.barrier(10, TIME_LIMIT);
    table.job.closed(11, "connection reset");
    let said = table.said();
    assert!(
        said.contains(&(12, Reply::Down { process: ProcessId(1), why: "connection reset".into() }))
    );
    let broken = |said| matches!(&errors(said)[..], [(10, RendezvousError::BarrierBroken { .. })]);
    assert!(broken(said));
    table.barrier(10, TIME_LIMIT);
    assert!(broken(table.said()));
}

#[test]
fn set_answers_pending_get_and_leave_is_not_down() {
    let mut table = Table::running(2);
    table.job.said(
        10,
        Request::Get { ask: 3, key: "k".into(), peer_timeout: TIME_LIMIT },
        table.now,
    );
    table.job.said(11, Request::Set { ask: 4, key: "k".into(), value: vec![1] }, table.now);
    let said = table.said();
    assert_eq!(said[0], (10, Reply::Answer { ask: 3, result: Ok(Answer::Value(vec![1])) }));
    table.job.said(11, Request::Leave { ask: 5, returns: false }, table.now);
    table.job.closed(11, "connection closed");
    assert_eq!(table.said(), [(11, Reply::Answer { ask: 5, result: Ok(Answer::Done) })]);
    assert_eq!(table.job.present(), 1);
}

#[test]
fn too_long_keys_hosts_and_programs_are_refused() {
    let mut table = Table::running(2);
    let long = || "x".repeat(MAX_KEY_BYTES + 1);
    table.job.said(10, Request::Get { ask: 7, key: long(), peer_timeout: TIME_LIMIT }, table.now);
    let refusals = errors(table.said());
    let [(10, RendezvousError::TooLong { what, bytes: 1025, limit: 1024 })] = &refusals[..] else {
        panic!("{refusals:?}")
    };
    assert_eq!(what, "a key");
    let mut table = Table::new(2);
    for (link, member, expected) in [
        (10, Member { host: long(), ..Member::default() }, "the name of a host"),
        (11, Member { program: long(), ..Member::default() }, "the fingerprint of a program"),
    ] {
        table.job.opened(link, table.now);
        let process = ProcessId(link as u32 - 10);
        let join = Request::Join {
            ask: 1,
            process,
            processes: 2,
            epoch: 1,
            identity: Identity { key: link.into(), run: None },
            waits: false,
            peer_timeout: TIME_LIMIT,
            member,
        };
        table.job.said(link, join, table.now);
        let said = errors(table.said());
        assert!(said.len() == 1 && said[0].1.to_string().starts_with(expected), "{said:?}");
    }
}

/// A look as its client sees it: (statuses by process, final answer).
type Seen = (Vec<(u32, ProcessStatus)>, Option<Result<Answer, RendezvousError>>);

fn seen(said: &[(Link, Reply)], to: Link) -> Seen {
    let (mut statuses, mut end) = (Vec::new(), None);
    for (_, reply) in said.iter().filter(|(link, _)| *link == to) {
        assert!(end.is_none(), "nothing follows the end: {reply:?}");
        match reply {
            Reply::Status { ask: 3, process, status } => {
                statuses.push((process.0, status.clone()));
            }
            Reply::Answer { ask: 3, result } => end = Some(result.clone()),
            other => panic!("{other:?}"),
        }
    }
    (statuses, end)
}

#[test]
fn observer_sees_each_process_or_the_reason_why_not() {
    let mut table = Table::running(4);
    let observer = 77;
    table.job.opened(observer, table.now);
    table.job.said(observer, Request::Look { ask: 3 }, table.now);
    let look = table.said();
    let asked: Vec<_> = look.iter().map(|(link, _)| *link).collect();
    assert_eq!(asked, [10, 11, 12, 13]);
    let Reply::Look { look } = look[0].1 else { panic!("{look:?}") };
    // A second look has to wait for the first. A stranger's status, one for another look and a
    // second one are ignored.
    table.job.said(observer, Request::Look { ask: 4 }, table.now);
    assert!(matches!(errors(table.said())[..], [(77, RendezvousError::OutOfTurn { .. })]));
    let status = |look, byte| Request::Status { look, status: Ok(vec![byte]) };
    table.job.said(observer, status(look, 9), table.now);
    table.job.said(11, status(look + 1, 9), table.now);
    table.job.said(11, status(look, 1), table.now);
    table.job.said(11, status(look, 9), table.now);
    let long = Request::Status { look, status: Ok(vec![0; MAX_VALUE_BYTES + 1]) };
    table.job.said(12, long, table.now);
    table.job.closed(13, "it was killed");
    let said: Vec<_> = table
        .said()
        .into_iter()
        .filter(|(_, reply)| !matches!(reply, Reply::Down { .. }))
        .collect();
    let (statuses, end) = seen(&said, observer);
    let long = Err(format!("its status has {} bytes", MAX_VALUE_BYTES + 1));
    assert_eq!(statuses, [(1, Ok(vec![1])), (2, long), (3, Err("it was killed".into()))]);
    assert_eq!(end, None);
    // Process 0 is stopped.
    table.pass(Duration::from_secs(1), &[11, 12, observer]);
    let (statuses, end) = seen(&table.said(), observer);
    assert_eq!(statuses, [(0, Err("no answer within 1s".into()))]);
    assert_eq!(end, Some(Ok(Answer::Done)));
    // The ended process is known at the next look.
    table.job.said(observer, Request::Look { ask: 3 }, table.now);
    let (statuses, _) = seen(&table.said(), observer);
    assert_eq!(statuses, [(3, Err("it was killed".into()))]);
    // An observer that goes leaves nothing behind.
    table.job.closed(observer, "it was closed");
    assert!(table.job.looks.is_empty() && table.job.present() == 3);
}

#[test]
fn observer_may_stay_without_joining() {
    let mut table = Table::running(1);
    table.job.opened(77, table.now);
    table.job.opened(78, table.now);
    table.job.said(77, Request::Look { ask: 3 }, table.now);
    table.pass(TIME_LIMIT * 10, &[10, 77, 78]);
    let dropped: Vec<_> = table
        .said()
        .into_iter()
        .filter(|(_, reply)| matches!(reply, Reply::Dropped { .. }))
        .collect();
    assert!(matches!(dropped[..], [(78, _)]), "{dropped:?}");
    // Without a sign of life it is dropped like any client, and the job runs on.
    table.pass(TIME_LIMIT * 2, &[10]);
    assert!(table.said().iter().any(|(link, reply)| {
        *link == 77 && matches!(reply, Reply::Dropped { why } if why.contains("silent"))
    }));
    assert_eq!(table.job.present(), 1);
}

#[test]
fn look_at_an_incomplete_job_names_the_missing() {
    let mut table = Table::new(2);
    table.join(1, "");
    table.job.opened(77, table.now);
    table.job.said(77, Request::Look { ask: 3 }, table.now);
    let (statuses, end) = seen(&table.said(), 77);
    let [missing, waits] =
        ["it has not joined yet", "it waits for others to join"].map(|why| Err(why.to_owned()));
    assert_eq!(statuses, [(0, missing), (1, waits)]);
    assert_eq!(end, Some(Ok(Answer::Done)));
    table.pass(TIME_LIMIT, &[11, 77]);
    table.said();
    table.job.said(77, Request::Look { ask: 3 }, table.now);
    let (_, end) = seen(&table.said(), 77);
    assert!(matches!(end, Some(Err(RendezvousError::Missing { .. }))), "{end:?}");
}
