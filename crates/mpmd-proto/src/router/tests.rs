//! Routers of several processes in one thread, on a network that delays and reorders messages by
//! seed.

mod credit;
mod disputes;
mod fuzz;
mod leaving;
mod lying;
mod parted;
mod spans;
mod zero_copy;

use super::*;

struct Bytes;

impl Cargo for Bytes {
    type Outgoing = Vec<u8>;
    type Incoming = Vec<u8>;
    type Waiter = PieceKey;
}

/// A small generator of random numbers: the tests must not depend on the version of a library.
struct Seeded(u64);

impl Seeded {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

struct Message {
    due: u64,
    from: ProcessId,
    to: ProcessId,
    header: Header,
    body: Vec<u8>,
}

/// The result of a wait: the bytes of the piece, or the failure.
type Outcome = Result<Vec<u8>, Arc<Failure>>;

struct Job {
    routers: Vec<Router<Bytes>>,
    dead: Vec<bool>,
    /// The process that no message reaches any more.
    deaf: Option<usize>,
    flying: Vec<Message>,
    outcomes: BTreeMap<(usize, PieceKey), Outcome>,
    reports: Vec<String>,
    discarded: usize,
    /// (Process, peer that it gave up).
    silent: Vec<(usize, usize)>,
    /// The rolling hash by (process, operation), for operations that a process has issued by
    /// itself.
    hashes: BTreeMap<(usize, u64), u128>,
    /// (Process, its loss of a peer).
    lost: Vec<(usize, Arc<Failure>)>,
    /// The faulty process, which may send any message.
    liar: Option<usize>,
    /// Number of the last operation up to which pieces were taken, by (sender, receiver) of
    /// zero-copy transfers.
    taken: BTreeMap<(usize, usize), u64>,
    seeded: Seeded,
    /// The simulated time in milliseconds.
    now: u64,
    max_delay: u64,
}

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn record(op: u64, hash: u128, what: &str) -> OpRecord {
    let (what, at) = (Arc::new(what.to_owned()), std::panic::Location::caller());
    OpRecord {
        op,
        hash,
        what,
        values: None,
        note: None,
        at,
    }
}

fn body(key: PieceKey, bytes: u64) -> Vec<u8> {
    (0..bytes)
        .map(|i| (key.0 * 31 + key.1 * 7 + i) as u8)
        .collect()
}

impl Job {
    fn new(processes: usize, seed: u64, max_delay: u64) -> Self {
        Self::zero_copy(processes, seed, max_delay, |_, _| false)
    }

    /// Creates a job in which the pairs for which `pairs` is true use zero-copy transfer. Messages
    /// are delayed by up to `max_delay` milliseconds, at random by `seed`.
    fn zero_copy(
        processes: usize,
        seed: u64,
        max_delay: u64,
        pairs: impl Fn(usize, usize) -> bool,
    ) -> Self {
        let router = |process| {
            Router::new(RouterConfig {
                process: ProcessId(process as u32),
                processes,
                epoch: 1,
                peer_timeout: at(60_000),
                heartbeat: at(500),
                zero_copy: (0..processes)
                    .map(|peer| peer != process && pairs(process, peer))
                    .collect(),
            })
        };
        Self {
            routers: (0..processes).map(router).collect(),
            dead: vec![false; processes],
            deaf: None,
            flying: Vec::new(),
            outcomes: BTreeMap::new(),
            reports: Vec::new(),
            discarded: 0,
            silent: Vec::new(),
            hashes: BTreeMap::new(),
            lost: Vec::new(),
            liar: None,
            taken: BTreeMap::new(),
            seeded: Seeded(seed),
            now: 0,
            max_delay,
        }
    }

    fn issue(&mut self, process: usize, hash: u128, what: &str) -> u64 {
        let op = self.routers[process].count() + 1;
        let now = at(self.now);
        self.routers[process].issue(record(op, hash, what), || now);
        self.hashes.insert((process, op), hash);
        self.act(process);
        op
    }

    fn hash(&self, process: usize, op: u64) -> u128 {
        let spanned = || {
            self.routers[process]
                .history
                .hash_at(op)
                .expect("issued lately")
        };
        self.hashes
            .get(&(process, op))
            .copied()
            .unwrap_or_else(spanned)
    }

    fn expect(&mut self, process: usize, from: usize, key: PieceKey, bytes: u64) {
        let hash = self.hash(process, key.0);
        self.routers[process].expect(ProcessId(from as u32), key, hash, bytes, key, at(self.now));
        self.act(process);
    }

    fn offer(&mut self, process: usize, to: usize, key: PieceKey, bytes: u64) {
        let hash = self.hash(process, key.0);
        self.routers[process].offer(ProcessId(to as u32), key, hash, bytes, body(key, bytes));
        self.act(process);
    }

    fn act(&mut self, process: usize) {
        for action in self.routers[process].take_actions() {
            match action {
                RouterAction::Post { to, header, body } => {
                    let body = match body {
                        Body::Empty => Vec::new(),
                        Body::Control(bytes) | Body::Cargo(bytes) => bytes,
                    };
                    assert_eq!(body.len() as u64, header.payload_bytes(), "{header:?}");
                    let header =
                        Header::decode(&header.encode()).expect("routers send valid headers");
                    let due = self.now + self.seeded.next(self.max_delay + 1);
                    self.flying.push(Message {
                        due,
                        from: ProcessId(process as u32),
                        to,
                        header,
                        body,
                    });
                }
                RouterAction::Deliver { waiter, result } => {
                    let before = self.outcomes.insert((process, waiter), result);
                    assert!(before.is_none(), "a wait is told once");
                }
                RouterAction::Answer { to, op, piece } => {
                    self.routers[process].answer(
                        to,
                        op,
                        piece,
                        format!("process {process} computes"),
                        None,
                    );
                    self.act(process);
                }
                RouterAction::HangReport(text) => self.reports.push(text),
                RouterAction::Taken { by, op } => {
                    let before = self.taken.insert((process, by.index()), op);
                    // Once a job has failed it waits for nothing, so later reports may be out of
                    // order.
                    let is_free = self.liar == Some(by.index()) || before == Some(u64::MAX);
                    assert!(
                        is_free || before.is_none_or(|before| before <= op),
                        "{before:?} before {op}"
                    );
                }
                RouterAction::Discard { .. } => self.discarded += 1,
                RouterAction::NeverTaken { by } => {
                    self.taken.insert((process, by.index()), u64::MAX);
                }
                RouterAction::PeerLost(failure) => self.lost.push((process, failure)),
                RouterAction::Failed(_) => {}
                RouterAction::GiveUp { peer, .. } => self.silent.push((process, peer.index())),
            }
        }
    }

    /// Delivers a message of `from` to the router of `to` at once, even one that its sender could
    /// not have sent.
    fn say(&mut self, from: usize, to: usize, header: Header, body: &[u8]) {
        let header = Header { epoch: 1, ..header };
        self.routers[to].arrived(
            ProcessId(from as u32),
            header,
            body.to_vec(),
            body,
            at(self.now),
        );
        self.act(to);
    }

    /// Lets one millisecond pass: delivers the messages that are due, and sometimes ticks the
    /// routers.
    fn step(&mut self) {
        self.now += 1;
        while let Some(index) = self
            .flying
            .iter()
            .position(|message| message.due <= self.now)
        {
            let message = self.flying.swap_remove(index);
            let to = message.to.index();
            if self.dead[to] || self.deaf == Some(to) {
                continue;
            }
            let incoming = message.body.clone();
            self.routers[to].arrived(
                message.from,
                message.header,
                incoming,
                &message.body,
                at(self.now),
            );
            self.act(to);
        }
        for process in 0..self.routers.len() {
            if !self.dead[process] && self.now.is_multiple_of(50) {
                self.routers[process].tick(at(self.now));
                self.act(process);
            }
        }
    }

    fn run(&mut self, millis: u64) {
        (0..millis).for_each(|_| self.step());
    }

    fn kill(&mut self, process: usize) {
        self.dead[process] = true;
        for other in (0..self.routers.len()).filter(|other| *other != process) {
            self.routers[other].peer_down(ProcessId(process as u32), "connection reset");
            self.act(other);
        }
    }
}

/// One piece of an operation: (sender, receiver, bytes).
type Move = (usize, usize, u64);

/// Returns a random program of `ops` operations, each with its pieces. Some have none.
fn program(processes: usize, ops: usize, seeded: &mut Seeded) -> Vec<Vec<Move>> {
    let sizes = [0, 1, 100, EAGER_BYTES, EAGER_BYTES + 1, 70_000];
    (0..ops)
        .map(|_| {
            (0..seeded.next(4))
                .filter_map(|_| {
                    let (from, to) = (seeded.next(processes as u64), seeded.next(processes as u64));
                    let bytes = sizes[seeded.next(sizes.len() as u64) as usize];
                    (from != to).then_some((from as usize, to as usize, bytes))
                })
                .collect()
        })
        .collect()
}

#[test]
fn every_piece_arrives_at_any_delay_and_pace() {
    for seed in 0..150 {
        let mut seeded = Seeded(seed);
        let processes = 2 + seeded.next(7) as usize;
        let program = program(processes, 40, &mut seeded);
        // Zero-copy transfer between no pairs, some pairs, or all pairs.
        let among = [0, 2, 8][seed as usize % 3];
        let pairs =
            |a: usize, b: usize| a.max(b) < among || (among == 2 && (a + b).is_multiple_of(2));
        let mut job = Job::zero_copy(processes, seed, seeded.next(40), pairs);
        // Data becomes ready in any order after its operation was issued.
        let mut unready: Vec<(usize, usize, PieceKey, u64)> = Vec::new();
        let mut next = vec![0; processes];
        while next.iter().any(|next| *next < program.len()) || !unready.is_empty() {
            let process = seeded.next(processes as u64) as usize;
            if next[process] < program.len() {
                let op = job.issue(process, next[process] as u128 + 77, "op");
                for (piece, (from, to, bytes)) in program[next[process]].iter().enumerate() {
                    let key = (op, piece as u64);
                    if *to == process {
                        job.expect(process, *from, key, *bytes);
                    }
                    if *from == process {
                        unready.push((process, *to, key, *bytes));
                    }
                }
                next[process] += 1;
            }
            if !unready.is_empty() && seeded.next(2) == 0 {
                let (process, to, key, bytes) =
                    unready.swap_remove(seeded.next(unready.len() as u64) as usize);
                job.offer(process, to, key, bytes);
            }
            job.step();
        }
        job.run(500);
        for (index, moves) in program.iter().enumerate() {
            for (piece, (_, to, bytes)) in moves.iter().enumerate() {
                let key = (index as u64 + 1, piece as u64);
                let outcome = job
                    .outcomes
                    .get(&(*to, key))
                    .unwrap_or_else(|| panic!("seed {seed}: {key:?}"));
                assert_eq!(
                    outcome.as_ref().expect("delivered"),
                    &body(key, *bytes),
                    "seed {seed}"
                );
            }
        }
        // Every sender knows that all its zero-copy pieces were taken.
        for (index, moves) in program.iter().enumerate() {
            for (from, to, _) in moves.iter().filter(|(from, to, _)| pairs(*from, *to)) {
                let taken = job.taken.get(&(*from, *to)).copied().unwrap_or(0);
                assert!(
                    taken > index as u64,
                    "seed {seed}: {taken} of {}, {from} to {to}",
                    index + 1
                );
            }
        }
        assert!(job.routers.iter().all(|router| router.failed().is_none()));
    }
}

#[test]
fn large_pieces_wait_for_grant_and_small_ones_for_credit() {
    let mut job = Job::new(2, 1, 0);
    let sent = 3 * EAGER_CREDIT / EAGER_BYTES;
    for _ in 0..sent {
        let op = job.issue(0, 5, "small");
        job.offer(0, 1, (op, 0), EAGER_BYTES);
    }
    let op = job.issue(0, 5, "large");
    job.offer(0, 1, (op, 0), 1 << 20);
    let flying =
        |job: &Job, kind| job.flying.iter().filter(|m| m.header.kind == kind).count() as u64;
    assert!(
        flying(&job, MessageKind::Eager) * EAGER_BYTES <= EAGER_CREDIT,
        "unclaimed bytes are bounded"
    );
    assert_eq!(
        flying(&job, MessageKind::Eager) + flying(&job, MessageKind::Offer),
        sent
    );
    assert_eq!(
        flying(&job, MessageKind::Data),
        0,
        "nothing large moves before its grant"
    );
    job.run(5);
    for _ in 0..=sent {
        let op = job.issue(1, 5, "same");
        job.expect(
            1,
            0,
            (op, 0),
            if op <= sent { EAGER_BYTES } else { 1 << 20 },
        );
    }
    job.run(20);
    assert_eq!(
        job.outcomes
            .values()
            .filter(|outcome| outcome.is_ok())
            .count() as u64,
        sent + 1
    );
    // The credit came back: the next small piece is eager again.
    let op = job.issue(0, 6, "again");
    job.offer(0, 1, (op, 0), 10);
    assert_eq!(flying(&job, MessageKind::Eager), 1);
}

#[test]
fn dead_process_fails_every_wait_and_is_named() {
    let mut job = Job::new(3, 2, 3);
    for process in 0..3 {
        job.issue(process, 9, "device_put");
    }
    job.expect(0, 1, (1, 0), 100);
    job.expect(2, 1, (1, 1), 100_000);
    job.kill(1);
    for (process, key) in [(0, (1, 0)), (2, (1, 1))] {
        let failure = job.outcomes[&(process, key)].as_ref().unwrap_err();
        assert_eq!(
            (failure.kind, failure.process, failure.op),
            (FailureKind::PeerLost, ProcessId(1), 1)
        );
        assert!(
            failure
                .message
                .contains("process 1 is gone (connection reset)"),
            "{failure}"
        );
        assert!(
            failure.message.contains("operation 1 (device_put)"),
            "{failure}"
        );
    }
    // A later operation fails too, at once.
    job.issue(0, 10, "later");
    job.expect(0, 1, (2, 0), 1);
    assert!(job.outcomes[&(0, (2, 0))].is_err());
}

#[test]
fn stopped_process_is_lost_after_peer_timeout() {
    let mut job = Job::new(2, 3, 2);
    job.issue(0, 9, "device_put");
    job.expect(0, 1, (1, 0), 100);
    job.run(1000);
    assert!(job.outcomes.is_empty());
    job.dead[1] = true;
    job.run(62_000);
    let failure = job.outcomes[&(0, (1, 0))].as_ref().unwrap_err();
    assert!(
        failure.message.contains("no sign of life for 60 s"),
        "{failure}"
    );
    assert_eq!(
        job.silent,
        [(0, 1)],
        "reported once, so that transfers in flight can be given up"
    );
}

#[test]
fn starting_process_may_be_silent_for_longer() {
    let mut job = Job::new(2, 3, 2);
    job.issue(0, 9, "device_put");
    job.expect(0, 1, (1, 0), 100);
    job.routers[0].allow_start(ProcessId(1), Duration::from_secs(100));
    job.dead[1] = true;
    // A stop of the waiting process does not end the time to start.
    job.run(20_000);
    job.now += 40_000;
    job.run(90_000);
    assert!(job.outcomes.is_empty() && job.silent.is_empty());
    job.run(52_000);
    let failure = job.outcomes[&(0, (1, 0))].as_ref().unwrap_err();
    assert!(failure.message.contains("no sign of life"), "{failure}");
}

#[test]
fn deaf_process_lets_the_others_find_the_dead_one() {
    let mut job = Job::new(4, 3, 2);
    for process in 0..4 {
        job.issue(process, 9, "device_put");
    }
    // It waits for a peer that is well.
    job.expect(3, 0, (1, 0), 100);
    job.run(1000);
    job.dead[2] = true;
    job.deaf = Some(3);
    for (process, more) in [(0, 60_900), (1, 0), (3, 2000)] {
        job.run(more);
        let failure = job.routers[process].trouble().expect("a peer is lost");
        assert_eq!(failure.kind, FailureKind::PeerLost);
        assert!(
            failure.message.contains("operation 1 (device_put)"),
            "{failure}"
        );
        let said = match process {
            3 => "process 0 is gone, or process 1 is gone, or process 2 is gone (from all",
            _ => "process 2 is gone (no sign of life",
        };
        assert!(failure.message.starts_with(said), "{failure}");
    }
}

#[test]
fn peer_that_the_rendezvous_lost_is_gone_if_silent() {
    let mut job = Job::new(3, 3, 2);
    job.issue(0, 9, "device_put");
    job.expect(0, 1, (1, 0), 100);
    job.expect(0, 2, (1, 1), 100);
    job.run(1000);
    job.dead[1] = true;
    let lose = |job: &mut Job, process: u32| {
        let now = at(job.now);
        job.routers[0].suspect(ProcessId(process), "its connection was closed", now);
        job.act(0);
    };
    lose(&mut job, 1);
    lose(&mut job, 2);
    assert!(job.outcomes.is_empty(), "that one is gone is not known yet");
    job.run(2000);
    let failure = job.outcomes[&(0, (1, 0))].as_ref().unwrap_err();
    assert!(
        failure
            .message
            .contains("process 1 is gone (its connection was closed)"),
        "{failure}"
    );
    assert_eq!(
        job.silent,
        [(0, 1)],
        "so that transfers in flight can be given up"
    );
    job.run(10_000);
    assert!(
        !job.outcomes.contains_key(&(0, (1, 1))),
        "the other is well"
    );
}

#[test]
fn piece_that_arrives_after_the_loss_of_its_sender_is_dropped() {
    let mut job = Job::new(2, 3, 2);
    for process in [0, 1] {
        job.issue(process, 9, "device_put");
    }
    job.expect(0, 1, (1, 0), 100);
    job.offer(1, 0, (1, 0), 100);
    job.routers[0].peer_down(ProcessId(1), "its process has ended");
    job.act(0);
    job.run(1000);
    let failure = job.outcomes[&(0, (1, 0))].as_ref().unwrap_err();
    assert!(failure.message.contains("process 1 is gone"), "{failure}");
    assert_eq!(job.routers[0].kept(), 0);
}

/// Process 1 leaves because process 2 has died, and its goodbye does not arrive.
#[test]
fn loss_after_another_names_both() {
    let mut job = Job::new(3, 3, 2);
    job.issue(0, 9, "device_put");
    job.expect(0, 1, (1, 0), 100);
    for (process, why) in [(2, "killed"), (1, "closed")] {
        job.routers[0].peer_down(ProcessId(process), why);
        job.act(0);
    }
    let failure = job.outcomes[&(0, (1, 0))].as_ref().unwrap_err();
    assert!(
        failure
            .message
            .starts_with("process 1 is gone (closed); operation 1"),
        "{failure}"
    );
    let before = "waited for it; before that: process 2 is gone (killed)";
    assert!(failure.message.contains(before), "{failure}");
    let first = job.routers[0].trouble().expect("two are lost");
    assert_eq!(
        first.process,
        ProcessId(2),
        "the first loss, not that of the lowest process"
    );
}

/// Process 3 has failed, and 1 does not hear why. Process 0 has heard it when 1 tells of its loss.
#[test]
fn failure_that_a_peer_tells_after_another_names_both() {
    let mut job = Job::new(4, 3, 2);
    for process in [0, 1] {
        job.issue(process, 9, "device_put");
    }
    job.expect(0, 1, (1, 0), 100);
    let failed = Failure::new(FailureKind::Kernel, ProcessId(3), 1, "the kernel failed");
    let gone = "process 3 is gone (closed); before that: process 2 is gone (closed)";
    let gone = Failure::new(FailureKind::PeerLost, ProcessId(2), 1, gone);
    for (process, failure) in [(3, failed), (1, gone)] {
        job.routers[process].goodbye(Some(&failure), at(job.now));
        job.act(process);
        job.run(10);
    }
    let failure = job.outcomes[&(0, (1, 0))].as_ref().unwrap_err();
    assert_eq!(
        failure.message,
        "process 3 is gone (closed); before that: the kernel failed"
    );
}

#[test]
fn job_stopped_beyond_peer_timeout_goes_on() {
    let mut job = Job::new(2, 3, 2);
    job.issue(0, 9, "device_put");
    job.expect(0, 1, (1, 0), 100);
    job.run(1000);
    // Both are stopped; the rendezvous has just lost one.
    let now = at(job.now);
    job.routers[0].suspect(ProcessId(1), "its connection was closed", now);
    job.now += 200_000;
    job.run(30_000);
    assert!(job.silent.is_empty() && job.outcomes.is_empty());
    assert!(
        job.reports.is_empty(),
        "nobody has waited that long: {:?}",
        job.reports
    );
}

#[test]
fn poison_arrives_instead_of_the_piece_early_or_late() {
    let mut job = Job::new(2, 4, 5);
    let failure = Failure::new(FailureKind::Kernel, ProcessId(0), 1, "the kernel broke");
    for _ in 0..2 {
        job.issue(0, 9, "op");
    }
    job.routers[0].poison(ProcessId(1), 1, 0, &failure);
    job.act(0);
    job.run(10);
    for _ in 0..2 {
        job.issue(1, 9, "op");
    }
    job.expect(1, 0, (1, 0), 1 << 20);
    job.expect(1, 0, (2, 0), 1 << 20);
    job.routers[0].poison(ProcessId(1), 2, 0, &failure);
    job.act(0);
    job.run(10);
    for key in [(1, 0), (2, 0)] {
        assert_eq!(**job.outcomes[&(1, key)].as_ref().unwrap_err(), failure);
    }
}

#[test]
fn arrived_piece_is_taken_after_its_sender_is_gone() {
    for in_order in [true, false] {
        let mut job = Job::new(2, 15, 0);
        job.issue(0, 1, "op");
        job.offer(0, 1, (1, 0), 10);
        if in_order {
            job.routers[0].goodbye(None, at(job.now));
            job.act(0);
        }
        job.run(5);
        job.kill(0);
        job.issue(1, 1, "op");
        job.expect(1, 0, (1, 0), 10);
        job.expect(1, 0, (1, 1), 10);
        assert_eq!(
            job.outcomes[&(1, (1, 0))].as_ref().unwrap(),
            &body((1, 0), 10),
            "in order: {in_order}"
        );
        assert!(
            job.outcomes[&(1, (1, 1))].is_err(),
            "and a piece that has not arrived never will"
        );
    }
}

#[test]
fn loss_without_waits_names_the_latest_operation() {
    let lost = |job: &mut Job| {
        job.routers[0].peer_down(ProcessId(1), "connection reset");
        let failure = job.routers[0]
            .take_actions()
            .into_iter()
            .find_map(|action| match action {
                RouterAction::PeerLost(failure) => Some(failure.message.clone()),
                _ => None,
            });
        failure.expect("a loss")
    };
    let start = || {
        let mut job = Job::new(2, 14, 0);
        job.issue(0, 1, "first");
        job.issue(0, 2, "second");
        job
    };
    let text = lost(&mut start());
    assert!(
        text.starts_with("process 1 is gone (connection reset) before the program ended"),
        "{text}"
    );
    assert!(
        text.contains("process 0 had issued operation 2 (second) at"),
        "{text}"
    );
    let mut job = start();
    job.offer(0, 1, (1, 0), EAGER_BYTES + 1);
    let text = lost(&mut job);
    assert!(
        text.contains("operation 1 (first) at") && text.contains("waited for it"),
        "{text}"
    );
}

#[test]
fn long_wait_is_reported_with_the_chain_to_the_root() {
    let mut job = Job::new(3, 9, 5);
    for process in 0..3 {
        job.issue(process, 1, "op a");
        job.issue(process, 2, "op b");
    }
    // 0 waits for 1, which waits for 2, which computes.
    job.expect(0, 1, (2, 0), 10);
    job.expect(1, 2, (1, 0), 10);
    job.run(61_000);
    let report = job
        .reports
        .iter()
        .find(|report| report.starts_with("process 0:"))
        .expect("reported");
    assert!(report.contains("operation 2 (op b)"), "{report}");
    assert!(
        report.contains("process 1 waits in operation 1 (op a)"),
        "{report}"
    );
    assert!(report.contains("process 2 computes"), "{report}");
    assert!(job.outcomes.is_empty(), "a slow peer is no error");
    // Process 1 is the root itself if an operation lower than its wait is running there.
    let waits = "process 1 waits in operation 1 (op a)";
    let chain = job.routers[1].chain(Some(1));
    assert!(
        chain[0].starts_with(waits) && chain.len() == 2,
        "a collective of the same operation: {chain:?}"
    );
    assert!(job.routers[1].chain(Some(0)).is_empty());
    assert_eq!(job.routers[0].describe(3), None);
    // A process that waits for nobody knows its peers' activity once it has asked.
    job.routers[2].ask_all();
    job.act(2);
    job.run(50);
    let said = job.routers[2].last_words();
    assert!(said.iter().any(|line| line.starts_with(waits)), "{said:?}");
}

#[test]
fn early_end_with_an_error_reaches_peers_as_that_error() {
    let mut job = Job::new(2, 10, 5);
    for process in 0..2 {
        job.issue(process, 1, "op");
    }
    job.issue(0, 2, "further on");
    job.expect(0, 1, (1, 0), 10);
    let failure = Failure::new(
        FailureKind::Left,
        ProcessId(1),
        0,
        "process 1 ended early: out of data",
    );
    job.routers[1].goodbye(Some(&failure), at(0));
    job.act(1);
    job.run(3000);
    assert_eq!(**job.outcomes[&(0, (1, 0))].as_ref().unwrap_err(), failure);
    assert!(job.routers[0].still_here().is_empty());
}

#[test]
fn messages_of_another_incarnation_are_ignored() {
    let mut job = Job::new(2, 11, 0);
    job.issue(1, 1, "op");
    job.expect(1, 0, (1, 0), 3);
    let header = Header {
        op: 1,
        bytes: 3,
        hash: 1,
        epoch: 99,
        ..Header::new(MessageKind::Eager)
    };
    job.routers[1].arrived(ProcessId(0), header, vec![1, 2, 3], &[], at(1));
    job.act(1);
    assert!(job.outcomes.is_empty());
}

#[test]
fn declined_piece_of_any_size_leaves_its_sender() {
    for (seed, bytes) in [(1, 10), (2, EAGER_BYTES + 1), (3, 70_000)] {
        let mut job = Job::new(2, seed, 10);
        job.issue(0, 1, "collective");
        job.issue(1, 1, "collective");
        if seed == 2 {
            job.offer(0, 1, (1, 0), bytes);
        }
        let now = at(job.now);
        job.routers[1].decline(ProcessId(0), (1, 0), 1, (1, 0), now);
        job.act(1);
        job.run(30);
        if seed != 2 {
            job.offer(0, 1, (1, 0), bytes);
        }
        job.run(30);
        assert!(job.outcomes[&(1, (1, 0))].is_ok(), "{bytes} bytes");
    }
}

#[test]
fn piece_for_a_peer_that_left_with_an_error_is_dropped() {
    let mut job = Job::new(2, 13, 0);
    job.issue(0, 1, "device_put");
    job.issue(0, 2, "device_put");
    job.offer(0, 1, (1, 0), 100_000);
    assert_eq!(job.discarded, 0);
    let failure = Failure::new(FailureKind::Left, ProcessId(1), 0, "out of data");
    job.routers[1].goodbye(Some(&failure), at(0));
    job.act(1);
    job.run(5);
    assert_eq!(job.discarded, 1);
    job.offer(0, 1, (2, 0), 100_000);
    assert_eq!(job.discarded, 2);
}
