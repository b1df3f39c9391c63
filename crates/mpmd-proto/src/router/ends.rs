//! Departures of processes, in order or not, and the failure of operations that wait for them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::breach::KEPT_OVERHEAD;
use super::peer::{Goodbye, PieceKey, ReadyPiece, Suspicion};
use super::{Body, Cargo, Failure, FailureKind, Router, RouterAction};
use crate::control;
use crate::wire::{Header, MessageKind, ProcessId};

/// The words between the text of a failure and the text of the first loss in one message.
const BEFORE: &str = "; before that: ";

impl<C: Cargo> Router<C> {
    /// Records that the rendezvous has lost a peer: the process may have died, or only its
    /// connection to the rendezvous. The peer is treated as lost unless messages arrive from it
    /// within a few heartbeats.
    pub fn suspect(&mut self, process: ProcessId, why: &str, now: Duration) {
        let Some(peer) = self.peers.get_mut(process.index()) else {
            return;
        };

        // A peer sends nothing more after its goodbye.
        if peer.has_left() {
            self.lose(process, why.to_owned());
        } else {
            peer.suspected.get_or_insert_with(|| Suspicion {
                since: now,
                why: why.to_owned(),
            });
        }
    }

    /// Handles the end of the job's epoch: process `by` has left it in order to join the next one.
    /// Fails all waits. The peers hear it from the rendezvous, so this router does not tell them.
    ///
    /// The reason is the loss of a peer that this router knows of, or that the rendezvous suspects.
    pub fn epoch_over(&mut self, by: ProcessId) {
        for process in self.others() {
            if let Some(suspicion) = self.peers[process.index()].suspected.take() {
                self.lose(process, suspicion.why);
            }
        }
        let left = || {
            let message = format!("process {by} has left the epoch, which is over");
            Arc::new(Failure::new(
                FailureKind::PeerLost,
                by,
                self.history.count(),
                message,
            ))
        };
        let failure = self.first_loss.clone().unwrap_or_else(left);
        self.fail_quietly(failure);
    }

    /// Handles the end of a peer's connection, after which the peer is gone. Fails the waits for
    /// the peer's pieces. Reports the loss unless the peer has said goodbye without a failure.
    pub fn peer_down(&mut self, process: ProcessId, why: &str) {
        let Some(peer) = self.peers.get_mut(process.index()) else {
            return;
        };
        if peer.down.is_some() {
            return;
        }
        peer.down = Some(why.to_owned());
        if peer.zero_copy {
            self.actions.push(RouterAction::NeverTaken { by: process });
        }

        let in_order = peer
            .goodbye
            .as_ref()
            .is_some_and(|goodbye| goodbye.failure.is_none());
        let expected = std::mem::take(&mut peer.expected);
        let ready = std::mem::take(&mut peer.ready);
        let granted = std::mem::take(&mut peer.granted);
        peer.kept -= granted.len() as u64 * KEPT_OVERHEAD;
        let first_ready = ready.keys().next().map(|(op, _)| *op);
        self.discard(process, ready);

        for ((op, _), expected) in expected {
            let failure = self.lost(process, op);
            self.actions.push(RouterAction::Deliver {
                waiter: expected.waiter,
                result: Err(failure),
            });
        }

        if !in_order {
            // No wait was for the peer, so the message says at least which operation the program
            // was at.
            let op = first_ready.unwrap_or(self.history.count());
            let at = match first_ready {
                Some(op) => format!("; {} waited for it to take its part", self.name(op)),
                None if op > 0 => {
                    format!(
                        "; process {} had issued {}",
                        self.config.process,
                        self.name(op)
                    )
                }
                None => String::new(),
            };
            let message = format!("process {process} is gone ({why}) before the program ended{at}");
            self.tell_loss(Arc::new(Failure::new(
                FailureKind::PeerLost,
                process,
                op,
                message,
            )));
        }
    }

    /// Fails the job: tells every waiter and every peer. Does nothing if the job has failed
    /// already.
    pub fn fail(&mut self, failure: Arc<Failure>) {
        if self.failed.is_some() {
            return;
        }
        let body = encode_failure(&failure);
        for process in self.reachable() {
            let header = Header {
                bytes: body.len() as u64,
                op: failure.op,
                ..self.header(MessageKind::Failure)
            };
            self.actions.push(RouterAction::Post {
                to: process,
                header,
                body: Body::Control(body.clone()),
            });
        }
        self.fail_quietly(failure);
    }

    /// Says goodbye to all peers: this process issues no more operations. `failure` is the reason,
    /// or `None` if the program has ended.
    pub fn goodbye(&mut self, failure: Option<&Failure>, now: Duration) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }

        let body = failure.map(encode_failure).unwrap_or_default();
        for process in self.reachable() {
            let header = Header {
                bytes: body.len() as u64,
                hash: self.history.hash(),
                ..self.header(MessageKind::Goodbye)
            };
            let body = if body.is_empty() {
                Body::Empty
            } else {
                Body::Control(body.clone())
            };
            self.actions.push(RouterAction::Post {
                to: process,
                header,
                body,
            });
        }

        if let Some(failure) = failure {
            // From here on this process compares nothing: its peers know that it failed.
            self.fail_quietly(Arc::new(failure.clone()));
            return;
        }

        for process in self.others() {
            let ahead = self.peers[process.index()]
                .check
                .take()
                .map(|check| check.count);
            if let Some(count) = ahead.filter(|count| *count > self.history.count()) {
                // The peer got further than this process ever will.
                self.dispute(process, count, now);
            }
            self.compare_end(process, now);
        }
    }

    /// Returns the peers that have neither said goodbye nor gone. Includes peers with an open
    /// dispute.
    pub fn still_here(&self) -> Vec<ProcessId> {
        let is_open = |process: &ProcessId| {
            let peer = &self.peers[process.index()];
            !peer.has_left() || (peer.disputed.is_some() && self.failed.is_none())
        };
        self.others().filter(is_open).collect()
    }

    /// Returns the reason why the job cannot end well, if it is known: the job has failed, or a
    /// peer has not left in order.
    ///
    /// The reason is that of [`RouterAction::Failed`] or [`RouterAction::PeerLost`], and is known
    /// once that action has been queued.
    pub fn trouble(&self) -> Option<Arc<Failure>> {
        self.failed.clone().or_else(|| self.first_loss.clone())
    }

    /// Returns the failure of operation `op`, which waited for a piece from `process`. `process` is
    /// gone, for the reason `why`.
    pub fn lost_while(&self, process: ProcessId, op: u64, why: &str) -> Arc<Failure> {
        let what = self.name(op);
        let message = format!("process {process} is gone ({why}); {what} waited for it");
        self.after_first(Failure::new(FailureKind::PeerLost, process, op, message))
    }

    /// Decodes a failure that the peer `from` has sent, of operation `op` or of the whole job.
    pub(super) fn heard(&self, from: ProcessId, op: u64, bytes: &[u8]) -> Arc<Failure> {
        let failure: Failure = control::decode(bytes).unwrap_or_else(|why| {
            let message = format!("process {from} failed, and {why}");
            Failure::new(FailureKind::Transport, from, op, message)
        });
        self.after_first(failure.shortened())
    }

    /// Adds the first loss of a peer to a failure caused by another peer, because that loss may be
    /// the cause. The goodbye of a process that leaves because of it may not arrive.
    fn after_first(&self, mut failure: Failure) -> Arc<Failure> {
        let is_other = |first: &&Arc<Failure>| first.process != failure.process;
        if let Some(first) = self.first_loss.as_ref().filter(is_other)
            && failure.is_peer_failure()
        {
            // Each may have such an addition already, of the process that it comes from.
            let [failed, first] = [&failure.message, &first.message]
                .map(|message| message.split(BEFORE).next().unwrap_or_default());
            failure.message = format!("{failed}{BEFORE}{first}");
        }
        Arc::new(failure)
    }

    /// Reports the loss of a peer to the driver, and stores it if it is the first.
    fn tell_loss(&mut self, failure: Arc<Failure>) {
        self.first_loss.get_or_insert_with(|| failure.clone());
        self.actions.push(RouterAction::PeerLost(failure));
    }

    /// Handles the goodbye of a peer.
    pub(super) fn peer_left(
        &mut self,
        from: ProcessId,
        header: Header,
        control: &[u8],
        now: Duration,
    ) {
        let failure = (!control.is_empty()).then(|| self.heard(from, 0, control));
        let peer = &mut self.peers[from.index()];
        if peer.goodbye.is_some() {
            // Only the first goodbye counts: it has been reported.
            return;
        }

        peer.goodbye = Some(Goodbye {
            count: header.count,
            failure: failure.clone(),
        });
        if peer.zero_copy {
            // A peer that has left in order has taken everything.
            self.actions.push(match failure {
                None => RouterAction::Taken {
                    by: from,
                    op: u64::MAX,
                },
                Some(_) => RouterAction::NeverTaken { by: from },
            });
        }

        if let Some(failure) = failure {
            for (_, expected) in std::mem::take(&mut peer.expected) {
                self.actions.push(RouterAction::Deliver {
                    waiter: expected.waiter,
                    result: Err(failure.clone()),
                });
            }
            // It sends no more grants, however long its connection stays.
            let ready = std::mem::take(&mut peer.ready);
            self.discard(from, ready);
            self.tell_loss(failure);
            return;
        }

        self.compare(from, header.count, header.hash, now);
        // Expected pieces belong to operations issued here. So the counts also reveal a peer that
        // sends none.
        self.compare_end(from, now);
    }

    /// Returns the reason why `process` will never send a piece of operation `op`, or never take
    /// one. `None` if it still may.
    pub fn why_never(&self, process: ProcessId, op: u64) -> Option<Arc<Failure>> {
        if let Some(failure) = &self.failed {
            return Some(failure.clone());
        }
        let peer = &self.peers[process.index()];
        if let Some(failure) = peer
            .goodbye
            .as_ref()
            .and_then(|goodbye| goodbye.failure.clone())
        {
            return Some(failure);
        }
        peer.down.is_some().then(|| self.lost(process, op))
    }

    /// Discards the pieces that wait for a grant from a peer which will not take them.
    fn discard(&mut self, to: ProcessId, ready: BTreeMap<PieceKey, ReadyPiece<C>>) {
        let cargos = ready.into_values().map(|ready| ready.cargo);
        self.actions
            .extend(cargos.map(|cargo| RouterAction::Discard { to, cargo }));
    }

    /// Returns the failure of operation `op`, which needs a peer that is gone. A peer that has left
    /// in order completed all its operations before, so it never issued this one.
    pub(super) fn lost(&self, process: ProcessId, op: u64) -> Arc<Failure> {
        let peer = &self.peers[process.index()];

        if let Some(Goodbye {
            count,
            failure: None,
        }) = &peer.goodbye
        {
            let what = self.name(op);
            let message = format!(
                "the programs diverged: process {process} has ended its program, of {count} \
                 operations; {what} waited for it"
            );
            let me = self.config.process;
            let failure = Failure::new(FailureKind::Diverged, me, op, message);
            return Arc::new(Failure {
                other: Some(process),
                ..failure
            });
        }
        self.lost_while(process, op, peer.down.as_deref().unwrap_or("unknown"))
    }

    /// Fails the job without sending the failure to the peers.
    pub(super) fn fail_quietly(&mut self, failure: Arc<Failure>) {
        if self.failed.is_some() {
            return;
        }
        self.failed = Some(failure.clone());
        for (process, peer) in self.peers.iter_mut().enumerate() {
            let process = ProcessId(process as u32);
            if peer.zero_copy {
                self.actions.push(RouterAction::NeverTaken { by: process });
            }
            for (_, expected) in std::mem::take(&mut peer.expected) {
                self.actions.push(RouterAction::Deliver {
                    waiter: expected.waiter,
                    result: Err(failure.clone()),
                });
            }
            let ready = std::mem::take(&mut peer.ready);
            let cargos = ready.into_values().map(|ready| ready.cargo);
            self.actions
                .extend(cargos.map(|cargo| RouterAction::Discard { to: process, cargo }));
        }

        self.early.clear();
        self.parked.clear();
        for peer in &mut self.peers {
            peer.granted.clear();
            peer.kept = 0;
        }
        self.actions.push(RouterAction::Failed(failure));
    }
}

/// Encodes a failure for a control message. Cuts its text if it is too long.
pub(super) fn encode_failure(failure: &Failure) -> Vec<u8> {
    control::encode(&failure.clone().shortened()).unwrap_or_default()
}
