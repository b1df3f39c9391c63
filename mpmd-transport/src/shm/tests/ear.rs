//! Helpers for tests of whole transports.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::shm::ShmConfig;
use crate::transport::{Handler, Payload, Ticket, TransportError};
use mpmd_proto::wire::{Header, ProcessId};

/// Time limit for a wait: longer than anything in these tests takes.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(20);
/// A handler that records its calls.
#[derive(Default)]
pub(super) struct Ear {
    pub(super) heard: Mutex<Heard>,
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct Heard {
    pub(super) arrived: Vec<(ProcessId, Payload)>,
    pub(super) done: Vec<(Ticket, Result<(), TransportError>)>,
    pub(super) down: Vec<(ProcessId, TransportError)>,
}

impl Ear {
    fn note(&self, note: impl FnOnce(&mut Heard)) {
        note(&mut self.heard.lock());
        self.changed.notify_all();
    }

    pub(super) fn wait<T>(&self, event: &str, mut found: impl FnMut(&mut Heard) -> Option<T>) -> T {
        let until = Instant::now() + TIME_LIMIT;
        let mut heard = self.heard.lock();
        loop {
            if let Some(found) = found(&mut heard) {
                return found;
            }
            let late = self.changed.wait_until(&mut heard, until).timed_out();
            assert!(!late, "timed out waiting for {event}");
        }
    }

    pub(super) fn down(&self, peer: u32) -> TransportError {
        let of = |heard: &mut Heard| {
            heard
                .down
                .iter()
                .find(|down| down.0.0 == peer)
                .map(|down| down.1.clone())
        };
        self.wait("the end of a peer", of)
    }

    pub(super) fn next_from(&self, peer: u32) -> Payload {
        self.wait("a message", |heard| {
            let at = heard.arrived.iter().position(|(from, _)| from.0 == peer)?;
            Some(heard.arrived.remove(at).1)
        })
    }
}

impl Handler for Ear {
    fn arrived(&self, from: ProcessId, _: Header, payload: Payload) {
        self.note(|heard| heard.arrived.push((from, payload)));
    }

    fn done(&self, ticket: Ticket, result: Result<(), TransportError>) {
        self.note(|heard| heard.done.push((ticket, result)));
    }

    fn peer_down(&self, peer: ProcessId, why: TransportError) {
        self.note(|heard| heard.down.push((peer, why)));
    }
}

/// Returns the configuration of process `process` in a job with the addresses `peers`.
pub(super) fn config(process: u32, peers: &[&str]) -> ShmConfig {
    let peers = peers.iter().map(|peer| Some((*peer).to_owned())).collect();
    ShmConfig {
        process: ProcessId(process),
        peers,
        token: [7; 32],
        epoch: 1,
        peer_timeout: TIME_LIMIT,
    }
}

pub(super) fn later<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    std::thread::spawn(work)
}
