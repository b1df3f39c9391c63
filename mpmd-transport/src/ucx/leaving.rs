//! The end of a transport.
//!
//! Who leaves first lets end what it has under way, then says *bye* to every peer: it takes nothing
//! more and sends nothing more. A peer that hears it reports the leaver as down and answers *heard*
//! once it reads nothing of the leaver's memory any more. With all answers, or other goodbyes, the
//! leaver can go: nobody reaches into memory that it gives up. Each wait has a deadline.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::engine::{Engine, after, id};
use super::queue::Command;
use super::result::Way;
use super::traffic::prefix;
use crate::transport::{Ticket, TransportError};
use crate::wire::ProcessId;

/// How long a leaver waits, beyond its deadline, for peers to hear its goodbye.
pub(super) const LAST_CALL: Duration = Duration::from_millis(500);
/// How long endpoints may take to close in order.
const CLOSE_WITHIN: Duration = Duration::from_millis(200);

/// How often, after the end, what is asked for is refused, before it is not heard any more.
const LAST_ROUNDS: usize = 1000;

/// How far the leaving is.
pub(super) struct Leaving {
    /// When what is under way is given up.
    until: Instant,
    /// When peers are no more waited for; known once goodbye was said.
    goodbye: Option<Instant>,
    /// When endpoints are no more waited for; known once they are being closed.
    closing: Option<Instant>,
    closed: Option<Sender<()>>,
}

impl Leaving {
    /// Whether messages are no more delivered.
    pub(super) fn is_deaf(&self) -> bool {
        self.goodbye.is_some()
    }
}

impl Engine {
    /// Takes no more messages; `closed` is told when nothing more reaches the handler.
    pub(super) fn begin_to_leave(&mut self, within: Duration, closed: Option<Sender<()>>) {
        match &mut self.leaving {
            // Dropped after a shutdown: nothing to add.
            Some(leaving) => leaving.closed = leaving.closed.take().or(closed),
            None => {
                let until = after(within);
                self.leaving = Some(Leaving { until, goodbye: None, closing: None, closed });
            }
        }
    }

    /// A peer has said that it leaves.
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

    /// Answers a goodbye, where nothing is read from the leaver any more.
    pub(super) fn answer_goodbye(&mut self, to: ProcessId) {
        let peer = &mut self.peers[to.index()];
        if peer.heard_bye && !peer.answered && peer.fetching == 0 {
            peer.answered = true;
            let header = prefix(self.me, peer.pass);
            self.send(to, id::HEARD, &header, None, Way::Eager, None);
            // Closed once that has left.
            if let Some(endpoint) = self.peers[to.index()].endpoint {
                self.worker.close(endpoint, false);
            }
        }
    }

    /// Goes on with leaving; true once it is done.
    pub(super) fn leave(&mut self) -> bool {
        let now = Instant::now();
        let Some(mut leaving) = self.leaving.take() else { return false };
        let mut done = false;
        match (leaving.goodbye, leaving.closing) {
            (None, _) => {
                let busy =
                    self.peers.iter().any(|p| p.down.is_none() && p.sending + p.fetching > 0);
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

    fn say_goodbye(&mut self) {
        // What is still under way has had its time.
        self.end_operations(|_| true, &TransportError::Closed);
        for to in (0..self.peers.len() as u32).map(ProcessId) {
            let peer = &self.peers[to.index()];
            if peer.endpoint.is_some() && peer.pass.is_some() && peer.down.is_none() {
                let header = prefix(self.me, peer.pass);
                self.send(to, id::BYE, &header, None, Way::Eager, None);
            }
        }
        // After it: to senders a discarded payload looks like one that was taken.
        for payload in self.payloads.keys().copied().collect::<Vec<_>>() {
            self.discard(payload);
        }
    }

    /// Ends what is left, and says so.
    pub(super) fn end(mut self) {
        self.end_operations(|_| true, &TransportError::Closed);
        for payload in self.payloads.keys().copied().collect::<Vec<_>>() {
            self.discard(payload);
        }
        let closed = self.leaving.take().and_then(|leaving| leaving.closed);
        let (queue, handler) = (self.queue.clone(), self.handler.take());
        // The worker goes first, while what is asked meanwhile is still heard: once the end is said
        // nobody touches memory any more, and nothing was lost.
        drop(self);
        let mut all_closed = Vec::from_iter(closed);
        // Bounded, for a handler may go on asking.
        for _ in 0..LAST_ROUNDS {
            let Some(commands) = queue.take_or_end() else { break };
            for command in commands {
                match command {
                    Command::Post { ticket, payload, .. } => {
                        drop(payload);
                        if let (Some(handler), true) = (&handler, ticket != Ticket::NONE) {
                            handler.done(ticket, Err(TransportError::Closed));
                        }
                    }
                    Command::Fetch { then, .. } => then(Err(TransportError::Closed)),
                    Command::Close(_, closed) => all_closed.push(closed),
                    Command::Connect(..)
                    | Command::Start(_)
                    | Command::Discard { .. }
                    | Command::GiveUp { .. }
                    | Command::Abandon => {}
                }
            }
        }
        queue.end();
        drop(handler);
        for closed in all_closed {
            // Who shuts down may have stopped waiting.
            let _ = closed.send(());
        }
    }
}
