//! How processes leave, in order or not, and what becomes of what waits for them.

use std::sync::Arc;
use std::time::Duration;

use super::breach::KEPT_OVERHEAD;
use super::peer::{Goodbye, Peer};
use super::{Action, Body, Cargo, Failure, FailureKind, Router};
use crate::control;
use crate::wire::{Header, Kind, ProcessId};

impl<C: Cargo> Router<C> {
    /// The rendezvous has lost a peer, whose process may have died, or only its connection there.
    /// It counts as lost unless more comes from it within a few heartbeats.
    pub fn suspect(&mut self, process: ProcessId, why: &str, now: Duration) {
        let Some(peer) = self.peers.get_mut(process.index()) else { return };
        // It sends nothing more after its goodbye.
        if peer.has_left() {
            self.lose(process, why.to_owned());
        } else {
            peer.suspected.get_or_insert_with(|| (now, why.to_owned()));
        }
    }

    /// A peer's connection ended, so it is gone.
    pub fn peer_down(&mut self, process: ProcessId, why: &str) {
        let Some(peer) = self.peers.get_mut(process.index()) else { return };
        if peer.down.is_some() {
            return;
        }
        peer.down = Some(why.to_owned());
        if peer.hands_over {
            self.actions.push(Action::Taken { by: process, op: u64::MAX });
        }
        let in_order = peer.goodbye.as_ref().is_some_and(|goodbye| goodbye.failure.is_none());
        let expected = std::mem::take(&mut peer.expected);
        let ready: Vec<_> = peer.ready.drain().collect();
        let granted = std::mem::take(&mut peer.granted);
        peer.kept -= granted.len() as u64 * KEPT_OVERHEAD;
        let first_ready = ready.iter().map(|((op, _), _)| *op).min();
        self.actions.extend(ready.into_iter().map(|(_, ready)| Action::Discard(ready.cargo)));
        for ((op, _), expected) in expected {
            let failure = self.lost(process, op);
            self.actions.push(Action::Deliver { waiter: expected.waiter, result: Err(failure) });
        }
        if !in_order {
            // Seen by a program none of whose waits was for it: what it was at says more than
            // nothing.
            let op = first_ready.unwrap_or(self.history.count());
            let at = match first_ready {
                Some(op) => format!("; {} waited for it to take its part", self.name(op)),
                None if op > 0 => {
                    format!("; process {} had issued {}", self.config.process, self.name(op))
                }
                None => String::new(),
            };
            let message = format!("process {process} is gone ({why}) before the program ended{at}");
            let failure = Failure::new(FailureKind::PeerLost, process, op, message);
            self.actions.push(Action::PeerLost(Arc::new(failure)));
        }
    }

    /// The job has failed here: tells every wait and every peer.
    pub fn fail(&mut self, failure: Arc<Failure>) {
        if self.failed.is_some() {
            return;
        }
        let body = encode_failure(&failure);
        for process in self.reachable() {
            let header =
                Header { bytes: body.len() as u64, op: failure.op, ..self.header(Kind::Failure) };
            self.actions.push(Action::Post {
                to: process,
                header,
                body: Body::Control(body.clone()),
            });
        }
        self.fail_quietly(failure);
    }

    /// This process issues nothing more; `failure` says why, where that is not the program's end.
    pub fn goodbye(&mut self, failure: Option<&Failure>, now: Duration) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        let body = failure.map(encode_failure).unwrap_or_default();
        for process in self.reachable() {
            let header = Header {
                bytes: body.len() as u64,
                hash: self.history.hash(),
                ..self.header(Kind::Goodbye)
            };
            let body = if body.is_empty() { Body::Empty } else { Body::Control(body.clone()) };
            self.actions.push(Action::Post { to: process, header, body });
        }
        if let Some(failure) = failure {
            // From here on this process compares nothing: it is known to have ended elsewhere.
            self.fail_quietly(Arc::new(failure.clone()));
            return;
        }
        for process in self.others() {
            let ahead = self.peers[process.index()].check.take().map(|(count, _)| count);
            if let Some(count) = ahead.filter(|count| *count > self.history.count()) {
                // The peer got further than this process ever will.
                self.dispute(process, count, now);
            }
            self.compare_end(process, now);
        }
    }

    /// The peers that have neither said goodbye nor gone, or with whom it is not settled yet
    /// whether they ran the same program.
    pub fn still_here(&self) -> Vec<ProcessId> {
        let is_open = |process: &ProcessId| {
            let peer = &self.peers[process.index()];
            !peer.has_left() || (peer.disputed.is_some() && self.failed.is_none())
        };
        self.others().filter(is_open).collect()
    }

    /// Why the job cannot end well, where that is known: it has failed, or a peer left otherwise
    /// than in order.
    ///
    /// What [`Action::Failed`] and [`Action::PeerLost`] say, from the moment on at which they are
    /// collected.
    pub fn trouble(&self) -> Option<Arc<Failure>> {
        let of_peer = |process: ProcessId| match &self.peers[process.index()] {
            Peer { goodbye: Some(goodbye), .. } => goodbye.failure.clone(),
            Peer { down: Some(why), .. } => Some(gone(process, why)),
            _ => None,
        };
        self.failed.clone().or_else(|| self.others().find_map(of_peer))
    }

    /// The failure of an operation whose piece broke off because its sender went away.
    pub fn lost_while(&self, process: ProcessId, op: u64, why: &str) -> Arc<Failure> {
        let what = self.name(op);
        let message = format!("process {process} is gone ({why}); {what} waited for it");
        Arc::new(Failure::new(FailureKind::PeerLost, process, op, message))
    }

    pub(super) fn peer_left(
        &mut self,
        from: ProcessId,
        header: Header,
        control: &[u8],
        now: Duration,
    ) {
        let failure = (!control.is_empty()).then(|| Arc::new(decode_failure(from, 0, control)));
        let peer = &mut self.peers[from.index()];
        if peer.goodbye.is_some() {
            // It is said once: the first is what has been told.
            return;
        }
        peer.goodbye = Some(Goodbye { count: header.count, failure: failure.clone() });
        if peer.hands_over {
            // Whoever has left in order has taken everything.
            self.actions.push(Action::Taken { by: from, op: u64::MAX });
        }
        if let Some(failure) = failure {
            for (_, expected) in std::mem::take(&mut peer.expected) {
                self.actions.push(Action::Deliver {
                    waiter: expected.waiter,
                    result: Err(failure.clone()),
                });
            }
            // It grants nothing any more, however long its connection stays.
            let ready: Vec<_> = peer.ready.drain().collect();
            self.actions.extend(ready.into_iter().map(|(_, ready)| Action::Discard(ready.cargo)));
            self.actions.push(Action::PeerLost(failure));
            return;
        }
        self.compare(from, header.count, header.hash, now);
        // Expected pieces belong to operations issued here, so the counts also show a peer that
        // sends none.
        self.compare_end(from, now);
    }

    /// Why a piece of `op` will never come from `from`, where that is known already.
    pub(super) fn why_never(&self, from: ProcessId, op: u64) -> Option<Arc<Failure>> {
        if let Some(failure) = &self.failed {
            return Some(failure.clone());
        }
        let peer = &self.peers[from.index()];
        if let Some(failure) = peer.goodbye.as_ref().and_then(|goodbye| goodbye.failure.clone()) {
            return Some(failure);
        }
        peer.down.is_some().then(|| self.lost(from, op))
    }

    pub(super) fn lost(&self, process: ProcessId, op: u64) -> Arc<Failure> {
        let why = self.peers[process.index()].down.as_deref().unwrap_or("unknown");
        self.lost_while(process, op, why)
    }

    pub(super) fn fail_quietly(&mut self, failure: Arc<Failure>) {
        if self.failed.is_some() {
            return;
        }
        self.failed = Some(failure.clone());
        for (process, peer) in self.peers.iter_mut().enumerate() {
            if peer.hands_over {
                self.actions.push(Action::Taken { by: ProcessId(process as u32), op: u64::MAX });
            }
            for (_, expected) in std::mem::take(&mut peer.expected) {
                self.actions.push(Action::Deliver {
                    waiter: expected.waiter,
                    result: Err(failure.clone()),
                });
            }
            let ready: Vec<_> = peer.ready.drain().collect();
            self.actions.extend(ready.into_iter().map(|(_, ready)| Action::Discard(ready.cargo)));
        }
        self.early.clear();
        self.parked.clear();
        for peer in &mut self.peers {
            peer.granted.clear();
            peer.kept = 0;
        }
        self.actions.push(Action::Failed(failure));
    }
}

fn gone(process: ProcessId, why: &str) -> Arc<Failure> {
    let message = format!("process {process} is gone ({why}) before the program ended");
    Arc::new(Failure::new(FailureKind::PeerLost, process, 0, message))
}

pub(super) fn encode_failure(failure: &Failure) -> Vec<u8> {
    control::encode(&failure.clone().shortened()).unwrap_or_default()
}

pub(super) fn decode_failure(from: ProcessId, op: u64, bytes: &[u8]) -> Failure {
    let failure: Failure = control::decode(bytes).unwrap_or_else(|why| {
        Failure::new(FailureKind::Transport, from, op, format!("process {from} failed, and {why}"))
    });
    failure.shortened()
}
