//! A handler that records all calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::{Header, ProcessId};
use mpmd_transport::transport::Fetch;
use mpmd_transport::{Handler, Payload, Ticket, TransportError};
use parking_lot::{Condvar, Mutex};

use crate::cluster::pattern_is_intact;

/// Time limit for an event that has to come.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The treatment of payloads that can be fetched.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Manner {
    Fetch,
    Hold,
    Discard,
}

/// A handler that records all calls, in order.
pub(crate) struct Recorder {
    me: std::sync::Weak<Self>,
    pub(crate) pool: Pool,
    seen: Mutex<Seen>,
    changed: Condvar,
}

#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) manner: Option<Manner>,
    /// Messages that arrived with their whole payload, in order of completion.
    pub(crate) complete: Vec<Arrived>,
    /// Payloads that are held, under [`Manner::Hold`]: (sender, header, payload).
    pub(crate) held: Vec<(ProcessId, Header, Held)>,
    pub(crate) discarded: usize,
    pub(crate) lost: Vec<TransportError>,
    pub(crate) done: BTreeMap<Ticket, Vec<Result<(), TransportError>>>,
    pub(crate) down: Vec<(ProcessId, TransportError)>,
    /// The names of all events, in order.
    pub(crate) log: Vec<&'static str>,
}

/// A payload that has not been read yet.
pub(crate) enum Held {
    Waiting(Box<dyn Fetch>),
    Lent(SharedBuffer),
}

impl Held {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Waiting(fetch) => fetch.bytes(),
            Self::Lent(bytes) => bytes.len() as u64,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived {
    pub(crate) from: ProcessId,
    pub(crate) header: Header,
    /// True if the payload equals the [`pattern`](crate::cluster::pattern) for this message.
    pub(crate) intact: bool,
}

impl Recorder {
    pub(crate) fn new(manner: Manner) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            pool: Pool::new("recorder", None),
            seen: Mutex::new(Seen {
                manner: Some(manner),
                ..Seen::default()
            }),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn set_manner(&self, manner: Manner) {
        self.seen.lock().manner = Some(manner);
    }

    /// Blocks until `enough` returns a value, and returns it. Panics after the time limit.
    pub(crate) fn wait<T>(&self, event: &str, enough: impl Fn(&Seen) -> Option<T>) -> T {
        let until = Instant::now() + TIME_LIMIT;
        let mut seen = self.seen.lock();
        loop {
            if let Some(found) = enough(&seen) {
                return found;
            }
            let late = self.changed.wait_until(&mut seen, until).timed_out();
            assert!(
                !late,
                "{event} has not come; heard so far: {:?}, done: {:?}",
                seen.log, seen.done
            );
        }
    }

    /// Blocks until `count` messages are complete, and returns them. Panics if one is damaged or
    /// there are more.
    pub(crate) fn wait_complete(&self, count: usize) -> Vec<Arrived> {
        let complete = self.wait("a message", |seen| {
            (seen.complete.len() >= count).then(|| seen.complete.clone())
        });
        assert!(
            complete.iter().all(|message| message.intact),
            "{complete:?}"
        );
        assert_eq!(complete.len(), count, "{complete:?}");
        complete
    }

    pub(crate) fn wait_held(&self, count: usize) {
        self.wait("a payload to hold", |seen| {
            (seen.held.len() >= count).then_some(())
        });
    }

    pub(crate) fn wait_done(&self, ticket: Ticket) -> Result<(), TransportError> {
        self.wait("the end of a ticket", |seen| {
            seen.done.get(&ticket).map(|results| results[0].clone())
        })
    }

    pub(crate) fn wait_down(&self, peer: ProcessId) -> TransportError {
        self.wait("the end of a peer", |seen| {
            seen.down
                .iter()
                .find(|(down, _)| *down == peer)
                .map(|(_, why)| why.clone())
        })
    }

    pub(crate) fn read<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.seen.lock())
    }

    /// Reads all held payloads, and records their messages as complete.
    pub(crate) fn release(&self) {
        let held = std::mem::take(&mut self.seen.lock().held);
        for (from, header, payload) in held {
            self.take(from, header, payload);
        }
    }

    /// Discards all held payloads.
    pub(crate) fn discard(&self) {
        let held = std::mem::take(&mut self.seen.lock().held);
        drop(held);
    }

    fn take(&self, from: ProcessId, header: Header, payload: Held) {
        match payload {
            Held::Waiting(fetch) => self.fetch(from, header, fetch),
            Held::Lent(bytes) => self.complete(from, header, &bytes),
        }
    }

    fn fetch(&self, from: ProcessId, header: Header, fetch: Box<dyn Fetch>) {
        let into = self
            .pool
            .allocate(usize::try_from(fetch.bytes()).unwrap())
            .unwrap();
        let me = self.me.clone();
        fetch.fetch(
            into,
            Box::new(move |result| {
                let Some(me) = me.upgrade() else { return };
                match result {
                    Ok(buffer) => me.complete(from, header, &buffer),
                    Err(error) => me.note("lost", |seen| seen.lost.push(error)),
                }
            }),
        );
    }

    fn complete(&self, from: ProcessId, header: Header, bytes: &[u8]) {
        let intact =
            bytes.len() as u64 == header.payload_bytes() && pattern_is_intact(from, &header, bytes);
        self.note("complete", |seen| {
            seen.complete.push(Arrived {
                from,
                header,
                intact,
            })
        });
    }

    /// Reads, holds or discards a payload that can be fetched later, as the manner says.
    fn waits(&self, from: ProcessId, header: Header, payload: Held) {
        assert_eq!(payload.bytes(), header.bytes);
        let manner = self.seen.lock().manner;
        match manner {
            Some(Manner::Hold) => self.note("held", |seen| seen.held.push((from, header, payload))),
            Some(Manner::Discard) => {
                drop(payload);
                self.note("discarded", |seen| seen.discarded += 1);
            }
            _ => self.take(from, header, payload),
        }
    }

    fn note(&self, event: &'static str, change: impl FnOnce(&mut Seen)) {
        let mut seen = self.seen.lock();
        change(&mut seen);
        seen.log.push(event);
        self.changed.notify_all();
    }
}

impl Handler for Recorder {
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload) {
        match payload {
            Payload::Empty => self.complete(from, header, &[]),
            Payload::Inline(bytes) => self.complete(from, header, &bytes),
            Payload::Lent(bytes) => self.waits(from, header, Held::Lent(bytes)),
            Payload::Waiting(fetch) => self.waits(from, header, Held::Waiting(fetch)),
        }
    }

    fn done(&self, ticket: Ticket, result: Result<(), TransportError>) {
        self.note("done", |seen| {
            seen.done.entry(ticket).or_default().push(result)
        });
    }

    fn peer_down(&self, peer: ProcessId, why: TransportError) {
        self.note("down", |seen| seen.down.push((peer, why)));
    }
}
