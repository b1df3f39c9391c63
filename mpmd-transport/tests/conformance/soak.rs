//! A thousand messages of random sizes. At random, their payloads are read, dropped or kept for a
//! while. Then the transports end, one in order and one not. The test is small enough to run under
//! valgrind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use mpmd_memory::{OwnedBuffer, Pool, SharedBuffer};
use mpmd_proto::{Header, MessageKind, ProcessId};
use mpmd_transport::transport::{Fetch, FetchDone};
use mpmd_transport::{Handler, Payload, Ticket, TransportError};
use parking_lot::{Condvar, Mutex};

use crate::cluster::{Kind, connected, id, pattern, pattern_is_intact};

const MESSAGES: u64 = 1000;

/// Limit on the bytes of a common message; the rare large ones exceed all that a transport sends at
/// once.
const BYTES: usize = 32 << 10;
const LARGE_BYTES: usize = 1 << 20;
const RARE: u64 = 50;

/// Limit on the messages of one process that are posted and not ended.
const LEAD: usize = 40;

/// Time limit for an event that has to come, under valgrind.
const TIME_LIMIT: Duration = Duration::from_secs(150);

/// Limit on the buffers that one process keeps for a while.
const HELD: usize = 8;

pub(crate) fn payloads_are_dropped_at_any_time(kind: Kind) {
    let before = engines();
    let pools = [Pool::new("first", None), Pool::new("second", None)];
    let ends = pools.each_ref().map(|pool| End::new(pool.clone()));
    let transports = connected(kind, 2);
    for (transport, end) in transports.iter().zip(&ends) {
        transport.start(end.clone());
    }
    let mut random = Rng::with_seed(1);
    for number in 1..=MESSAGES {
        let from = random.usize(..2);
        let bytes = match random.u64(..RARE) {
            0 => LARGE_BYTES - random.usize(..100),
            _ => {
                // Small sizes are as frequent as large ones.
                let order = 1 + random.u64(..u64::from(BYTES.ilog2()));
                1 + random.usize(..1 << order)
            }
        };
        let message = if random.u64(..4) == 0 {
            MessageKind::Eager
        } else {
            MessageKind::Data
        };
        let header = Header {
            op: number,
            bytes: bytes as u64,
            ..Header::new(message)
        };
        let mut payload = pools[from].allocate(bytes).expect("a pool without limit");
        payload.copy_from_slice(&pattern(id(from), &header));
        let payload = payload.freeze();
        ends[from].posted();
        // The poster's own reference is dropped now, or after the transport's.
        if random.u64(..2) == 0 {
            ends[from].keep(payload.clone());
        }
        transports[from].post(id(1 - from), header, Some(payload), Ticket(number));
        wait(&ends, from, "room for more", |seen| {
            seen.posted - seen.done.len() < LEAD
        });
    }
    for (from, end) in ends.iter().enumerate() {
        wait(&ends, from, "the end of all that was posted", |seen| {
            seen.done.len() == seen.posted
        });
        end.read(|seen| {
            assert!(
                seen.done.values().all(|ended| *ended == [Ok(())]),
                "{:?}",
                seen.done
            )
        });
    }
    for (to, end) in ends.iter().enumerate() {
        let sent = ends[1 - to].read(|seen| seen.posted);
        wait(&ends, to, "all that was sent", |seen| {
            seen.arrived == sent && seen.held.is_empty() && seen.open == 0
        });
        end.read(|seen| assert_eq!((seen.wrong, &seen.lost[..]), (0, &[][..])));
        assert!(end.read(|seen| seen.right) > MESSAGES as usize / 10);
    }
    // Then payloads in all states: being sent, waiting, held.
    ends.iter().for_each(|end| end.seen.lock().holds_all = true);
    for (from, transport) in transports.iter().enumerate() {
        for number in 1..=10 {
            let op = MESSAGES + 10 * from as u64 + number;
            let header = Header {
                op,
                bytes: LARGE_BYTES as u64,
                ..Header::new(MessageKind::Data)
            };
            ends[from].posted();
            let payload = SharedBuffer::from(vec![7; LARGE_BYTES]);
            transport.post(id(1 - from), header, Some(payload), Ticket(op));
        }
    }
    wait(&ends, 1, "a payload to hold", |seen| !seen.held.is_empty());
    let [first, second] =
        <[_; 2]>::try_from(transports).unwrap_or_else(|_| panic!("two were asked for"));
    first.shutdown(Duration::from_millis(100));
    drop((first, second));
    for (from, end) in ends.iter().enumerate() {
        wait(&ends, from, "the end of every ticket", |seen| {
            seen.done.len() == seen.posted
        });
        end.read(|seen| {
            assert!(
                seen.done.values().all(|ended| ended.len() == 1),
                "{:?}",
                seen.done
            )
        });
        // Fetched or dropped: the sender is gone, so no payload can arrive.
        end.seen.lock().holds_all = false;
    }
    for (to, end) in ends.iter().enumerate() {
        wait(&ends, to, "the end of every payload", |seen| {
            seen.held.is_empty() && seen.open == 0
        });
        end.read(|seen| assert_eq!(seen.wrong, 0));
        end.forget();
    }
    // The transport drops its buffers when its thread ends.
    let until = Instant::now() + TIME_LIMIT;
    while pools.iter().any(|pool| pool.stats().live > 0) {
        assert!(Instant::now() < until, "still in use: {pools:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Nothing joins the thread of a dropped transport. If this process ended before it, valgrind
    // would report its memory as lost.
    while engines() > before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the number of transports' threads in this process. Other tests may have started some.
fn engines() -> usize {
    let threads = std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| name.starts_with("mpmd-")).count()
}

/// Blocks until the end with index `which` has seen `enough`; panics after the time limit.
/// Meanwhile reads or drops held payloads at random.
fn wait(ends: &[Arc<End>; 2], which: usize, event: &str, enough: impl Fn(&Seen) -> bool) {
    let until = Instant::now() + TIME_LIMIT;
    loop {
        ends.iter().for_each(|end| end.decide());
        let mut seen = ends[which].seen.lock();
        if enough(&seen) {
            return;
        }
        let (posted, done, open) = (seen.posted, seen.done.len(), seen.open);
        let state = || format!("{done} of {posted} have ended, {open} fetches are open");
        assert!(Instant::now() < until, "{event} has not come: {}", state());
        // A held payload may delay those behind it, without any event.
        ends[which]
            .changed
            .wait_for(&mut seen, Duration::from_millis(2));
    }
}

/// The handler of one of the two processes, which treats payloads at random.
struct End {
    me: std::sync::Weak<Self>,
    pool: Pool,
    seen: Mutex<Seen>,
    changed: Condvar,
}

struct Seen {
    random: Rng,
    posted: usize,
    done: BTreeMap<Ticket, Vec<Result<(), TransportError>>>,
    /// Payloads of this end's own messages, dropped at random.
    kept: Vec<SharedBuffer>,
    arrived: usize,
    /// True if payloads stay held until told otherwise.
    holds_all: bool,
    /// Payloads that are neither read nor dropped yet.
    held: Vec<(ProcessId, Header, Box<dyn Fetch>)>,
    /// Buffers that were read into and not dropped yet.
    read: Vec<OwnedBuffer>,
    /// Number of fetches that have not ended.
    open: usize,
    right: usize,
    wrong: usize,
    lost: Vec<TransportError>,
}

impl End {
    fn new(pool: Pool) -> Arc<Self> {
        let seen = Seen {
            random: Rng::with_seed(2),
            posted: 0,
            done: BTreeMap::new(),
            kept: Vec::new(),
            arrived: 0,
            holds_all: false,
            held: Vec::new(),
            read: Vec::new(),
            open: 0,
            right: 0,
            wrong: 0,
            lost: Vec::new(),
        };
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            pool,
            seen: Mutex::new(seen),
            changed: Condvar::new(),
        })
    }

    fn posted(&self) {
        self.seen.lock().posted += 1;
    }

    /// Keeps a reference to a payload for a while. Drops a random earlier one if too many are kept.
    fn keep(&self, payload: SharedBuffer) {
        let mut seen = self.seen.lock();
        seen.kept.push(payload);
        let dropped = if seen.kept.len() > HELD {
            let chosen = seen.random.usize(..HELD);
            Some(seen.kept.swap_remove(chosen))
        } else {
            None
        };
        drop(seen);
        drop(dropped);
    }

    /// Reads or drops all held payloads at random, unless all are to stay held.
    fn decide(&self) {
        let mut seen = self.seen.lock();
        if seen.holds_all || seen.held.is_empty() {
            return;
        }
        let (held, fate) = (std::mem::take(&mut seen.held), seen.random.u64(..3));
        drop(seen);
        for ((from, header, fetch), at) in held.into_iter().zip(fate..) {
            if at.is_multiple_of(3) {
                drop(fetch);
            } else {
                self.fetch(from, header, fetch);
            }
        }
    }

    /// Drops all buffers that were read, and all kept payloads.
    fn forget(&self) {
        let mut seen = self.seen.lock();
        let kept = (
            std::mem::take(&mut seen.kept),
            std::mem::take(&mut seen.read),
        );
        drop(seen);
        drop(kept);
    }

    fn fetch(&self, from: ProcessId, header: Header, fetch: Box<dyn Fetch>) {
        let into = self
            .pool
            .allocate(header.bytes as usize)
            .expect("a pool without limit");
        self.seen.lock().open += 1;
        let me = self.me.clone();
        let then = move |result: Result<OwnedBuffer, TransportError>| {
            let Some(me) = me.upgrade() else { return };
            let mut dropped = None;
            let mut seen = me.seen.lock();
            match result {
                Ok(buffer) => {
                    seen.note(pattern_is_intact(from, &header, &buffer) || header.op > MESSAGES);
                    // Dropped now, or after other payloads were read.
                    seen.read.push(buffer);
                    if seen.read.len() > HELD {
                        let chosen = seen.random.usize(..HELD);
                        dropped = Some(seen.read.swap_remove(chosen));
                    }
                }
                Err(error) => seen.lost.push(error),
            }
            seen.open -= 1;
            drop(seen);
            drop(dropped);
            me.changed.notify_all();
        };
        fetch.fetch(into, Box::new(then));
    }

    fn read<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.seen.lock())
    }
}

impl Seen {
    fn note(&mut self, right: bool) {
        self.right += usize::from(right);
        self.wrong += usize::from(!right);
    }
}

impl Handler for End {
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload) {
        let mut seen = self.seen.lock();
        seen.arrived += 1;
        match payload {
            Payload::Empty => seen.note(header.bytes == 0),
            Payload::Lent(bytes) => seen.held.push((from, header, Box::new(OnLoan(bytes)))),
            Payload::Inline(bytes) => {
                let looks = seen.random.u64(..3) > 0;
                seen.note(!looks || pattern_is_intact(from, &header, &bytes));
            }
            Payload::Waiting(fetch) => seen.held.push((from, header, fetch)),
        }
        let at_once = seen.random.u64(..3) > 0;
        drop(seen);
        if at_once {
            self.decide();
        }
        self.changed.notify_all();
    }

    fn done(&self, ticket: Ticket, result: Result<(), TransportError>) {
        self.seen
            .lock()
            .done
            .entry(ticket)
            .or_default()
            .push(result);
        self.changed.notify_all();
    }

    fn peer_down(&self, _: ProcessId, _: TransportError) {}
}

/// A lent payload that is held, then copied or dropped like one that waits to be fetched.
struct OnLoan(SharedBuffer);

impl Fetch for OnLoan {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn fetch(self: Box<Self>, mut into: OwnedBuffer, then: FetchDone) {
        into.copy_from_slice(&self.0);
        drop(self);
        then(Ok(into));
    }
}
