//! The shutdown of a transport.
//!
//! A leaving process first lets its pending operations end, then sends *bye* to every peer: from
//! then on it neither receives nor sends messages. A peer that receives *bye* reports the process
//! as down. It answers *heard* once it no longer reads the memory of the leaving process. The
//! process can end once it has all answers, or goodbyes instead: no peer reads memory that it
//! frees. Each wait has a deadline.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::queue::EngineCommand;
use super::state::{UcxEngine, UcxLeaving, id};
use super::traffic::prefix;
use crate::transport::{Ticket, TransportError};
use mpmd_base::deadline::after;
use mpmd_proto::wire::ProcessId;

/// Time that a shutdown waits beyond its deadline for peers to answer its goodbye.
pub(super) const LAST_CALL: Duration = Duration::from_millis(500);
/// Time limit for closing the endpoints after the goodbyes.
const CLOSE_WITHIN: Duration = Duration::from_millis(200);

/// Number of times that an engine that has ended still answers late commands with an error. Later
/// commands are dropped.
const LAST_ROUNDS: usize = 1000;

impl UcxLeaving {
    /// Returns true once the goodbye was sent. From then on, no messages are delivered.
    pub(super) fn is_deaf(&self) -> bool {
        self.goodbye.is_some()
    }
}

impl UcxEngine {
    /// Begins the shutdown: refuses new messages, and gives pending operations the time `within` to
    /// end. Does not wait. `closed` is notified once the handler is not called any more.
    pub(super) fn begin_to_leave(&mut self, within: Duration, closed: Option<Sender<()>>) {
        match &mut self.leaving {
            // Dropped after a shutdown: nothing to add.
            Some(leaving) => leaving.closed = leaving.closed.take().or(closed),
            None => {
                let until = after(Instant::now(), within);
                self.leaving = Some(UcxLeaving {
                    until,
                    goodbye: None,
                    closing: None,
                    closed,
                });
            }
        }
    }

    /// Handles a peer's goodbye: marks the peer as gone, tells the handler, and answers.
    pub(super) fn goodbye(&mut self, from: ProcessId) {
        let peer = &mut self.peers[from.index()];
        peer.heard_bye = true;
        if let Some(endpoint) = peer.endpoint {
            self.worker.is_done_with(endpoint);
        }
        let why = "it has left, and closed its connections".to_owned();
        self.down(from, TransportError::PeerGone { peer: from, why }, false);
        self.answer_goodbye(from);
    }

    /// Answers the goodbye of the peer `to` once this process fetches nothing from it. Then closes
    /// the endpoint.
    pub(super) fn answer_goodbye(&mut self, to: ProcessId) {
        let peer = &mut self.peers[to.index()];
        if peer.heard_bye && !peer.answered && peer.fetching == 0 {
            peer.answered = true;
            let header = prefix(self.me, peer.pass);
            self.send(to, id::HEARD, &header);
            // Closes the endpoint after the answer was sent.
            if let Some(endpoint) = self.peers[to.index()].endpoint {
                self.worker.close(endpoint, false);
            }
        }
    }

    /// Advances the shutdown by one step without waiting. Returns true once the shutdown is
    /// complete.
    pub(super) fn leave(&mut self) -> bool {
        let now = Instant::now();
        let Some(mut leaving) = self.leaving.take() else {
            return false;
        };

        let mut done = false;
        match (leaving.goodbye, leaving.closing) {
            (None, _) => {
                let busy = self
                    .peers
                    .iter()
                    .any(|p| p.down.is_none() && p.sending + p.fetching > 0);
                if !busy || now >= leaving.until {
                    leaving.goodbye = Some(now.max(leaving.until.min(now + LAST_CALL)) + LAST_CALL);

                    self.leaving = Some(leaving);
                    self.say_goodbye();
                    return false;
                }
            }
            (Some(until), None) => {
                let waits = self.peers.iter().any(|p| {
                    p.endpoint.is_some() && p.down.is_none() && !p.has_heard
                        || p.heard_bye && !p.answered
                });
                if !waits || now >= until {
                    for peer in 0..self.peers.len() {
                        if let Some(endpoint) = self.peers[peer].endpoint {
                            self.worker.close(endpoint, false);
                        }
                    }
                    leaving.closing = Some(now + CLOSE_WITHIN);
                }
            }
            (Some(_), Some(until)) => done = !self.worker.is_closing() || now >= until,
        }
        self.leaving = Some(leaving);
        done
    }

    /// Sends a goodbye to all peers.
    fn say_goodbye(&mut self) {
        // The deadline for pending operations is over.
        self.end_operations(|_| true, &TransportError::Closed);
        for to in (0..self.peers.len() as u32).map(ProcessId) {
            let peer = &self.peers[to.index()];
            if peer.endpoint.is_some() && peer.pass.is_some() && peer.down.is_none() {
                let header = prefix(self.me, peer.pass);
                self.send(to, id::BYE, &header);
            }
        }
        // Discards after the goodbyes: to its sender, a discarded payload looks like a fetched one.
        for payload in self.payloads.keys().copied().collect::<Vec<_>>() {
            self.discard(payload);
        }
    }

    /// Fails all operations and commands that are left, destroys the worker, and notifies the
    /// callers of `shutdown`.
    pub(super) fn end(mut self) {
        self.end_operations(|_| true, &TransportError::Closed);
        for payload in self.payloads.keys().copied().collect::<Vec<_>>() {
            self.discard(payload);
        }

        let closed = self.leaving.take().and_then(|leaving| leaving.closed);
        let queue = self.queue.clone();
        let handler = self.handler.take();
        // Drops the worker first, while commands are still answered. Once the end is reported,
        // nothing touches memory any more, and no command is lost.
        drop(self);

        let mut all_closed = Vec::from_iter(closed);
        // Bounded, because a handler may keep sending commands.
        for _ in 0..LAST_ROUNDS {
            let Some(commands) = queue.take_or_end() else {
                break;
            };
            for command in commands {
                match command {
                    EngineCommand::Post {
                        ticket, payload, ..
                    } => {
                        drop(payload);
                        if let (Some(handler), true) = (&handler, ticket != Ticket::NONE) {
                            handler.done(ticket, Err(TransportError::Closed));
                        }
                    }
                    EngineCommand::Fetch { then, .. } => then(Err(TransportError::Closed)),
                    EngineCommand::Close(_, closed) => all_closed.push(closed),
                    EngineCommand::Connect(..)
                    | EngineCommand::Start(_)
                    | EngineCommand::Discard { .. }
                    | EngineCommand::GiveUp { .. }
                    | EngineCommand::Abandon => {}
                }
            }
        }

        queue.end();
        drop(handler);
        for closed in all_closed {
            // The caller of `shutdown` may have stopped waiting.
            let _ = closed.send(());
        }
    }
}
