//! Fuzzes a job with faulty clients. Each of their requests is answered once, with a reply that
//! fits a message. No state is kept for clients that are gone.

use mpmd_fuzz::{Rng, integer};

use crate::job::*;
use crate::protocol::{LeaveKind, MAX_KEY_BYTES, MAX_VALUE_BYTES, frame, parts};
use crate::{Fact, FailureReport, Heir, Identity, SizeRange};
use mpmd_proto::router::{Failure, FailureKind};

const TIME_LIMIT: Duration = Duration::from_secs(60);

/// A job, and the requests of its clients.
struct Table {
    job: JobState,
    /// The number with which the job was started.
    processes: usize,
    now: Instant,
    /// The numbers of the unanswered requests of each open connection.
    asks: BTreeMap<Link, Vec<u64>>,
    next: Link,
    /// True if clients send texts that nearly fill a message.
    is_long: bool,
}

impl Table {
    fn random_link(&self, rng: &mut Rng) -> Link {
        rng.u64(..self.next + 2)
    }

    fn step(&mut self, rng: &mut Rng) {
        match rng.u8(..16) {
            0..2 => {
                self.job.opened(self.next, self.now);
                self.asks.insert(self.next, Vec::new());
                self.next += 1;
            }
            2 => {
                let link = self.random_link(rng);
                self.asks.remove(&link);
                self.job.closed(link, "its connection was closed");
            }
            3 => {
                let wait = if rng.bool() {
                    rng.u64(..5_000)
                } else {
                    rng.u64(..200_000)
                };
                self.now += Duration::from_millis(wait);
                self.tick();
            }
            _ => {
                let (link, request) = (
                    self.random_link(rng),
                    request(rng, self.processes, self.is_long),
                );
                if frame(&request).is_err() {
                    return;
                }
                if let (Some(asks), Some(ask)) = (self.asks.get_mut(&link), ask_of(&request)) {
                    asks.push(ask);
                }
                self.job.said(link, request, self.now);
            }
        }
        self.hear();
    }

    fn tick(&mut self) {
        let next = self.job.tick(self.now);
        assert!(next > self.now, "a server must not spin");
        assert!(
            next <= self.now + Duration::from_secs(1),
            "a server must ping"
        );
        self.hear();
    }

    fn hear(&mut self) {
        for action in self.job.actions() {
            match action {
                JobAction::Close(link) => {
                    let asks = self
                        .asks
                        .remove(&link)
                        .expect("an open connection is closed");
                    assert!(!self.job.clients.contains_key(&link), "{asks:?}");
                }
                JobAction::Say(link, reply) => {
                    for part in parts(reply.clone()) {
                        assert!(frame(&part).is_ok(), "a reply fits a message");
                    }
                    let asks = self
                        .asks
                        .get_mut(&link)
                        .expect("a closed connection gets no reply");
                    if let ServerReply::Answer { ask, .. } = reply {
                        let at = asks.iter().position(|open| *open == ask);
                        asks.swap_remove(at.expect("an ask is answered once"));
                    }
                }
            }
        }
        assert!(self.job.epochs.present() <= self.job.epochs.places());
        assert!(self.job.clients.keys().eq(self.asks.keys()));
        let waits = self.job.values.due().count() + self.job.barriers.due().count();
        let waits = waits + self.job.looks.due().count();
        assert!(waits <= self.asks.values().map(Vec::len).sum());
    }
}

fn ask_of(request: &ClientRequest) -> Option<u64> {
    match request {
        ClientRequest::Join { ask, .. }
        | ClientRequest::Set { ask, .. }
        | ClientRequest::Get { ask, .. }
        | ClientRequest::Barrier { ask, .. }
        | ClientRequest::Report { ask, .. }
        | ClientRequest::Look { ask, .. }
        | ClientRequest::Leave { ask, .. } => Some(*ask),
        ClientRequest::Clock { .. }
        | ClientRequest::Status { .. }
        | ClientRequest::Pong
        | ClientRequest::Whole => None,
    }
}

fn text(rng: &mut Rng, is_long: bool) -> String {
    match rng.u8(..32) {
        // Nearly fills a whole message.
        0..28 if is_long => "x".repeat(MAX_VALUE_BYTES + 4096 - rng.usize(20..120)),
        0 => "y".repeat(MAX_KEY_BYTES + rng.usize(..2)),
        _ => ["", "a", "b"][rng.usize(..3)].to_owned(),
    }
}

fn request(rng: &mut Rng, processes: usize, is_long: bool) -> ClientRequest {
    let text = |rng: &mut Rng| text(rng, is_long);
    let ask = rng.u64(..4);
    let peer_timeout = match rng.u8(..3) {
        0 => Duration::from_millis(rng.u64(..100_000)),
        1 => Duration::ZERO,
        _ => Duration::new(integer(rng), rng.u32(..1_000_000_000)),
    };
    match rng.u8(..12) {
        0..3 => {
            let process = if rng.u8(..8) == 0 {
                integer(rng) as u32
            } else {
                rng.u32(..5)
            };
            let processes = if rng.u8(..8) == 0 {
                integer(rng)
            } else {
                processes as u64
            };
            let mut member = JobMember::default();
            // Two long texts would not fit a message.
            match if is_long { 0 } else { rng.u8(..8) } {
                0 => member.program = text(rng),
                1 => member.host = text(rng),
                2 => member.trouble = Some(text(rng)),
                3..6 => member.sizes = SizeRange::of([1, 2, 3]),
                6 => {
                    let (address, mark) = (text(rng), rng.u128(..8));
                    member.heir = Some(Heir {
                        address,
                        mark,
                        since: integer(rng),
                    });
                }
                _ if rng.u8(..4) == 0 => member.facts = Box::new([Fact::new("--seed", text(rng))]),
                _ => {}
            }
            member.leaves = rng.u8(..3) == 0;
            let (epoch, waits) = (rng.u64(..4), rng.u8(..3) == 0);
            let run = rng.bool().then(|| u128::from(rng.u8(..8) > 0));
            let identity = Identity {
                key: rng.u128(..8),
                run,
            };
            let process = ProcessId(process);
            ClientRequest::Join {
                ask,
                process,
                processes,
                epoch,
                identity,
                waits,
                peer_timeout,
                member: Box::new(member),
            }
        }
        3 => ClientRequest::Set {
            ask,
            key: text(rng),
            value: vec![7; rng.usize(..40)],
        },
        4 => ClientRequest::Get {
            ask,
            key: text(rng),
            peer_timeout,
        },
        5 => ClientRequest::Barrier {
            ask,
            name: text(rng),
            peer_timeout,
        },
        6 => {
            let how = match rng.u8(..4) {
                0 => LeaveKind::Ends,
                1 => LeaveKind::Leaves,
                2 => LeaveKind::Returns,
                _ => LeaveKind::GivesBack(text(rng)),
            };
            ClientRequest::Leave { ask, how }
        }
        7 => {
            let process = ProcessId(integer(rng) as u32);
            let failure = Failure::new(FailureKind::Diverged, process, integer(rng), text(rng));
            ClientRequest::Report {
                ask,
                report: FailureReport {
                    failure,
                    hash: rng.bool().then_some(5),
                },
            }
        }
        8 | 9 => ClientRequest::Look {
            ask,
            words: vec![3; rng.usize(..40)],
        },
        10 if rng.bool() => ClientRequest::Status {
            look: rng.u64(..9),
            status: Ok(vec![3; rng.usize(..40)]),
        },
        10 => ClientRequest::Status {
            look: rng.u64(..9),
            status: Err(text(rng)),
        },
        _ => match rng.u8(..3) {
            0 => ClientRequest::Clock { ask },
            1 => ClientRequest::Whole,
            _ => ClientRequest::Pong,
        },
    }
}

#[test]
fn fuzz_rendezvous_job() {
    let start = Instant::now();
    mpmd_fuzz::cases("rendezvous-job", |rng| {
        let processes = rng.usize(1..5);
        let (job, asks) = (
            JobState::new(processes, TIME_LIMIT, 1, start),
            BTreeMap::new(),
        );
        let is_long = rng.u32(..512) == 0;
        let mut table = Table {
            job,
            processes,
            now: start,
            asks,
            next: 0,
            is_long,
        };
        for _ in 0..rng.u32(..60) {
            table.step(rng);
        }
        // All clients are silent from now on, so no request may stay open, however long its
        // timeout. A larger step would count as a stop of the server.
        let end = table.now + TIME_LIMIT * 2;
        while table.now < end {
            table.now += Duration::from_secs(2);
            table.tick();
        }
        assert!(
            table.asks.is_empty(),
            "unanswered requests: {:?}",
            table.asks
        );
        assert_eq!(
            table.job.values.due().count() + table.job.barriers.due().count(),
            0
        );
        assert_eq!(table.job.looks.due().count(), 0);
    });
}
