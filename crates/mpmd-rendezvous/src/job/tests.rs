//! Jobs of simulated clients: each test checks the replies and their times. Those of one part of a
//! job are in its file.

mod fuzz;
mod sleepers;

use super::super::Identity;
use super::super::protocol::MAX_KEY_BYTES;
use super::*;

pub(super) const TIME_LIMIT: Duration = Duration::from_secs(60);

/// A job in which process `p` is connected by link `p + 10`.
pub(super) struct Table {
    pub(super) job: JobState,
    pub(super) now: Instant,
}

impl Table {
    pub(super) fn new(processes: usize) -> Self {
        let now = Instant::now();
        Self {
            job: JobState::new(processes, TIME_LIMIT, 1, now),
            now,
        }
    }

    pub(super) fn running(processes: usize) -> Self {
        let mut table = Self::new(processes);
        for process in 0..processes {
            table.join(process as u32, "");
        }
        assert_eq!(table.job.epochs.phase(), &EpochPhase::Running);
        table.said();
        table
    }

    pub(super) fn join(&mut self, process: u32, program: &str) {
        self.open_and_join(u64::from(process) + 10, process, program);
    }

    pub(super) fn open_and_join(&mut self, link: Link, process: u32, program: &str) {
        self.job.opened(link, self.now);
        let member = JobMember {
            pid: process + 100,
            program: program.into(),
            ..JobMember::default()
        };
        let processes = self.job.epochs.places() as u64;
        let peer_timeout = Duration::from_secs(3600);
        let identity = Identity {
            key: process.into(),
            run: None,
        };
        let process = ProcessId(process);
        let join = ClientRequest::Join {
            ask: 1,
            process,
            processes,
            epoch: 1,
            identity,
            waits: false,
            peer_timeout,
            member: Box::new(member),
        };
        self.job.said(link, join, self.now);
    }

    pub(super) fn barrier(&mut self, link: Link, peer_timeout: Duration) {
        self.job.said(
            link,
            ClientRequest::Barrier {
                ask: 7,
                name: "b".into(),
                peer_timeout,
            },
            self.now,
        );
    }

    /// Takes the replies since the last call, except pings, as (link, reply).
    pub(super) fn said(&mut self) -> Vec<(Link, ServerReply)> {
        let actions = self.job.actions().into_iter();
        let said = actions.filter_map(|action| match action {
            JobAction::Say(link, reply) => Some((link, reply)),
            JobAction::Close(_) => None,
        });
        said.filter(|(_, reply)| *reply != ServerReply::Ping)
            .collect()
    }

    /// Lets time pass as with a live server, while all clients in `awake` answer.
    pub(super) fn pass(&mut self, time: Duration, awake: &[Link]) {
        let end = self.now + time;
        while self.now < end {
            let next = self.job.tick(self.now);
            assert!(next > self.now, "a server must not spin");
            self.now = next.min(end);
            for &link in awake {
                self.job.said(link, ClientRequest::Pong, self.now);
            }
        }
        self.job.tick(self.now);
    }
}

pub(super) fn errors(said: Vec<(Link, ServerReply)>) -> Vec<(Link, RendezvousError)> {
    let errors = said.into_iter().filter_map(|(link, reply)| match reply {
        ServerReply::Answer {
            result: Err(error), ..
        } => Some((link, error)),
        _ => None,
    });
    errors.collect()
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
        .filter(|(_, reply)| {
            matches!(
                reply,
                ServerReply::Down {
                    process: ProcessId(1),
                    ..
                }
            )
        })
        .map(|(link, _)| *link)
        .collect();
    assert_eq!(downs, [10, 12]);
    assert!(
        said.iter()
            .any(|(link, reply)| *link == 11 && matches!(reply, ServerReply::Dropped { .. }))
    );
}

#[test]
fn stopped_server_drops_no_client() {
    let mut table = Table::running(2);
    table.job.tick(table.now);
    table.now += TIME_LIMIT * 3;
    table.job.tick(table.now);
    assert!(table.said().is_empty());
    assert_eq!(table.job.epochs.present(), 2);
}

#[test]
fn server_stop_extends_all_deadlines() {
    let mut table = Table::new(2);
    table.join(0, "");
    table.job.opened(50, table.now);
    table.job.said(
        10,
        ClientRequest::Get {
            ask: 3,
            key: "k".into(),
            peer_timeout: TIME_LIMIT,
        },
        table.now,
    );
    table.job.tick(table.now);
    table.now += TIME_LIMIT * 3;
    table.job.tick(table.now);
    assert!(table.said().is_empty());
    table.join(1, "");
    assert_eq!(table.job.epochs.phase(), &EpochPhase::Running);
    table.said();
    table.job.said(
        50,
        ClientRequest::Set {
            ask: 4,
            key: "k".into(),
            value: vec![1],
        },
        table.now,
    );
    assert_eq!(
        table.said()[0],
        (
            10,
            ServerReply::Answer {
                ask: 3,
                result: Ok(RequestAnswer::Value(vec![1]))
            }
        )
    );
}

#[test]
fn too_long_keys_hosts_and_programs_are_refused() {
    let mut table = Table::running(2);
    let long = || "x".repeat(MAX_KEY_BYTES + 1);
    table.job.said(
        10,
        ClientRequest::Get {
            ask: 7,
            key: long(),
            peer_timeout: TIME_LIMIT,
        },
        table.now,
    );
    let refusals = errors(table.said());
    let [
        (
            10,
            RendezvousError::TooLong {
                what,
                bytes: 1025,
                limit: 1024,
            },
        ),
    ] = &refusals[..]
    else {
        panic!("{refusals:?}")
    };
    assert_eq!(what, "a key");
    let mut table = Table::new(2);
    for (link, member, expected) in [
        (
            10,
            JobMember {
                host: long(),
                ..JobMember::default()
            },
            "the name of a host",
        ),
        (
            11,
            JobMember {
                program: long(),
                ..JobMember::default()
            },
            "the fingerprint of a program",
        ),
    ] {
        table.job.opened(link, table.now);
        let process = ProcessId(link as u32 - 10);
        let join = ClientRequest::Join {
            ask: 1,
            process,
            processes: 2,
            epoch: 1,
            identity: Identity {
                key: link.into(),
                run: None,
            },
            waits: false,
            peer_timeout: TIME_LIMIT,
            member: Box::new(member),
        };
        table.job.said(link, join, table.now);
        let said = errors(table.said());
        assert!(
            said.len() == 1 && said[0].1.to_string().starts_with(expected),
            "{said:?}"
        );
    }
}
