//! Everything that depends on time: heartbeats, probes of slow senders, and reports of long waits.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::failure::cut;
use super::peer::Suspicion;
use super::{Body, Cargo, Failure, FailureKind, Router, RouterAction};
use crate::control;
use crate::wire::{Header, MessageKind, ProcessId};

/// Time after which a process that waits for a piece sends a probe to the piece's sender.
pub(super) const PROBE_AFTER: Duration = Duration::from_millis(100);

/// Longest time between two probes for the same wait.
const PROBE_AT_MOST: Duration = Duration::from_secs(5);

/// Largest number of lines of a chain of waits that are sent or stored.
const CHAIN: usize = 16;

/// Largest length in bytes of each stored line of a peer's answer to a probe.
const LONGEST_LINE: usize = 4 << 10;

/// A process's description of its own state, sent to a peer that waits for it.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct ProbeAnswer {
    /// Number of operations that the process has issued.
    pub count: u64,
    /// A description of the current activity of the process's program and devices.
    pub doing: String,
    /// The chain of waits, one per line: the wait of this process, then that of the process that it
    /// waits for, and so on to the root cause.
    pub chain: Vec<String>,
}

impl<C: Cargo> Router<C> {
    /// Handles the time `now`: sends heartbeats and probes, finds lost peers, and reports long
    /// waits. The driver calls it a few times a second.
    pub fn tick(&mut self, now: Duration) {
        if now.saturating_sub(self.ticked) > self.config.peer_timeout / 2 {
            self.forget_stop(now - self.ticked, now);
        }

        self.ticked = now;
        for process in self.others() {
            self.compare_end(process, now);
        }
        self.expire_disputes(now);
        self.judge_suspects(now);

        if now >= self.next_heartbeat {
            self.next_heartbeat = now.saturating_add(self.config.heartbeat);
            self.send_heartbeats();
            self.find_silent_peers(now);
        }

        for process in self.others() {
            self.watch_waits_for(process, now);
            self.tell_taken(process);
        }
    }

    /// Answers a probe of `to`, after [`RouterAction::Answer`]. `doing` describes this process's
    /// activity. `running` is the lowest operation in progress on this process that waits for no
    /// lower one. Does nothing if `to` is gone.
    pub fn answer(
        &mut self,
        to: ProcessId,
        op: u64,
        piece: u64,
        doing: String,
        running: Option<u64>,
    ) {
        if !self.peers[to.index()].is_reachable() {
            return;
        }

        let answer = ProbeAnswer {
            count: self.history.count(),
            doing,
            chain: self.chain(running),
        };
        let body = control::encode(&answer).unwrap_or_default();

        let header = Header {
            op,
            piece,
            bytes: body.len() as u64,
            ..self.header(MessageKind::Answer)
        };
        self.actions.push(RouterAction::Post {
            to,
            header,
            body: Body::Control(body),
        });
    }

    /// Describes an operation for users. `None` if this process no longer stores it.
    pub fn describe(&self, op: u64) -> Option<String> {
        self.history.describe(op)
    }

    /// Sends a probe to every peer that has not left, and drops its earlier answer.
    /// [`Router::last_words`] returns the new answers.
    pub fn ask_all(&mut self) {
        let op = self.history.count();
        let hash = self.history.hash();
        for to in self.still_here() {
            // Its earlier answer may be long outdated.
            self.peers[to.index()].answer = None;
            let header = Header {
                op,
                hash,
                ..self.header(MessageKind::Probe)
            };
            self.actions.push(RouterAction::Post {
                to,
                header,
                body: Body::Empty,
            });
        }
    }

    /// Returns the latest answers of the peers that have not left, in at most 16 lines: their
    /// activity and their own waits. Peers that have not answered get a line too.
    pub fn last_words(&self) -> Vec<String> {
        let said = |process: ProcessId| {
            let answer = self.peers[process.index()].answer.as_ref();
            let silent = || vec![format!("process {process} has not said what it is doing")];
            answer.map_or_else(
                silent,
                |ProbeAnswer {
                     count,
                     doing,
                     chain,
                 }| {
                    let first =
                        format!("process {process} has issued {count} operations and {doing}");
                    [vec![first], chain.clone()].concat()
                },
            )
        };

        let mut lines: Vec<String> = Vec::new();
        for line in self.still_here().into_iter().flat_map(said) {
            // Chains of several processes end in one root.
            if lines.len() < CHAIN && !lines.contains(&line) {
                lines.push(line);
            }
        }
        lines
    }

    /// Handles a peer's probe. Tells the driver to answer it. If the two programs have issued
    /// different operations, opens a dispute instead.
    pub(super) fn probed(&mut self, from: ProcessId, header: Header, now: Duration) {
        if header.op <= self.history.count() {
            if self
                .hash_of(from, (header.op, header.piece))
                .is_some_and(|mine| mine != header.hash)
            {
                self.dispute(from, header.op, now);
                return;
            }
        } else if self.left {
            // The peer waits for an operation that this process never issued before its end.
            self.dispute(from, header.op, now);
            return;
        }

        self.actions.push(RouterAction::Answer {
            to: from,
            op: header.op,
            piece: header.piece,
        });
    }

    /// Stores a peer's answer to a probe, cut to the limits.
    pub(super) fn answered(&mut self, from: ProcessId, control: &[u8]) {
        if let Ok(mut answer) = control::decode::<ProbeAnswer>(control) {
            answer.chain.truncate(CHAIN);
            answer.chain.shrink_to_fit();
            answer
                .chain
                .iter_mut()
                .chain([&mut answer.doing])
                .for_each(|line| cut(line, LONGEST_LINE));
            self.peers[from.index()].answer = Some(answer);
        }
    }

    /// Sends a heartbeat to all peers, unless the job has failed.
    fn send_heartbeats(&mut self) {
        if self.failed.is_some() {
            return;
        }
        for process in self.reachable() {
            let header = Header {
                hash: self.history.hash(),
                ..self.header(MessageKind::Heartbeat)
            };
            self.actions.push(RouterAction::Post {
                to: process,
                header,
                body: Body::Empty,
            });
        }
    }

    /// Excludes the time `stopped`, in which this process and perhaps its peers were stopped, from
    /// all waits. Messages from that time have not been read yet.
    fn forget_stop(&mut self, stopped: Duration, now: Duration) {
        for peer in &mut self.peers {
            if peer.heard.is_zero() {
                // It still has the rest of its time to start.
                peer.starts_within = peer.starts_within.saturating_add(stopped).max(now);
            } else {
                peer.heard = now;
            }
            if let Some(suspicion) = &mut peer.suspected {
                suspicion.since = now;
            }
            for expected in peer.expected.values_mut() {
                expected.since += stopped;
                expected.report_at = expected.report_at.saturating_add(stopped);
            }
        }
    }

    /// Treats a peer as lost if the rendezvous has lost it and no message has arrived from it
    /// since.
    fn judge_suspects(&mut self, now: Duration) {
        let heartbeat = self.config.heartbeat;
        for process in self.others() {
            let peer = &mut self.peers[process.index()];
            let is_due = |suspicion: &mut Suspicion| now >= suspicion.since + 3 * heartbeat;
            let Some(suspicion) = peer.suspected.take_if(is_due) else {
                continue;
            };

            // Messages that it sent before its death may arrive shortly after the news of it.
            if peer.heard <= suspicion.since + heartbeat {
                self.lose(process, suspicion.why);
            }
        }
    }

    /// Treats a peer as lost if no message has arrived from it for the peer timeout.
    ///
    /// If all of several peers go silent within a heartbeat, this process may be the one that
    /// cannot receive. The queues of UCX's shared memory can be blocked by a process that was
    /// stopped while it wrote to one; the other processes find that process meanwhile. Two
    /// heartbeats later, this process fails with an error that names all peers. After two more it
    /// gives them up.
    fn find_silent_peers(&mut self, now: Duration) {
        let timeout = self.config.peer_timeout;
        let heartbeat = self.config.heartbeat;
        let here: Vec<_> = self
            .others()
            .filter(|process| !self.peers[process.index()].has_left())
            .collect();

        let silent_for = |limit: Duration| {
            let silence = |process: &ProcessId| {
                let peer = &self.peers[process.index()];
                let is_new = peer.heard.is_zero();
                now.saturating_sub(if is_new {
                    peer.starts_within
                } else {
                    peer.heard
                })
            };
            here.iter()
                .copied()
                .filter(|process| silence(process) > limit)
                .collect::<Vec<_>>()
        };

        let silent = silent_for(timeout);
        if silent.len() < silent_for(timeout.saturating_sub(heartbeat)).len() {
            return;
        }

        let why = format!("no sign of life for {} s", timeout.as_secs_f32());
        if silent.len() > 1 && silent.len() == here.len() {
            let all_for =
                |beats| silent_for(timeout.saturating_add(beats * heartbeat)).len() == here.len();
            let gives_up = all_for(4);
            if all_for(2) {
                self.fail(self.all_silent(&silent, &why));
            }
            // Later: those that are well must get the failure first.
            if !gives_up {
                return;
            }
        }
        for process in silent {
            self.lose(process, why.clone());
        }
    }

    /// Returns the failure of a process that receives no messages from any of its peers.
    fn all_silent(&self, silent: &[ProcessId], why: &str) -> Arc<Failure> {
        let waits = self
            .peers
            .iter()
            .filter_map(|peer| peer.expected.keys().next());
        let op = waits
            .map(|(op, _)| *op)
            .min()
            .unwrap_or(self.history.count());

        let gone: Vec<_> = silent
            .iter()
            .map(|process| format!("process {process} is gone"))
            .collect();
        let message = format!(
            "{} (from all of them {why}, perhaps since one was stopped while it wrote to this \
             process); {} waited",
            gone.join(", or "),
            self.name(op)
        );
        Arc::new(Failure::new(FailureKind::PeerLost, silent[0], op, message))
    }

    /// Sends a peer a probe for the oldest wait for it, and reports the wait to the user if it is
    /// long.
    fn watch_waits_for(&mut self, process: ProcessId, now: Duration) {
        let peer_timeout = self.config.peer_timeout;
        let mut probe = None;
        let mut report = None;

        // The lowest operation stands for those behind it.
        if let Some((key, expected)) = self.peers[process.index()].expected.iter_mut().next() {
            if now >= expected.probe_at {
                probe = Some((*key, expected.hash));
                let waited = now.saturating_sub(expected.since);
                expected.probe_at = now + waited.clamp(PROBE_AFTER, PROBE_AT_MOST);
            }
            if now >= expected.report_at {
                report = Some((*key, now.saturating_sub(expected.since)));
                expected.report_at = now.saturating_add(peer_timeout);
            }
        }

        if let Some(((op, piece), hash)) = probe
            && self.peers[process.index()].is_reachable()
        {
            let header = Header {
                op,
                piece,
                hash,
                ..self.header(MessageKind::Probe)
            };
            self.actions.push(RouterAction::Post {
                to: process,
                header,
                body: Body::Empty,
            });
        }

        if let Some(((op, piece), waited)) = report {
            let mut text = self.wait_line(process, op, piece, waited.as_secs_f32());
            match &self.peers[process.index()].answer {
                Some(answer) => {
                    text.push_str(&format!(
                        "\n  process {process} has issued {} operations and {}",
                        answer.count, answer.doing
                    ));
                    answer
                        .chain
                        .iter()
                        .for_each(|line| text.push_str(&format!("\n  {line}")));
                }
                None => text.push_str(&format!("\n  process {process} has not answered")),
            }
            self.actions.push(RouterAction::HangReport(text));
        }
    }

    /// Returns the chain of waits from this process's wait for the lowest operation to the root
    /// cause, one line per wait. Empty if this process waits for nothing. Also empty if an
    /// operation below that one is `running` on this process: then that operation is the root
    /// cause, or the peers have their own.
    pub fn chain(&self, running: Option<u64>) -> Vec<String> {
        let oldest = self
            .others()
            .filter_map(|process| {
                Some((
                    process,
                    *self.peers[process.index()].expected.keys().next()?,
                ))
            })
            .min_by_key(|(_, key)| *key);
        let Some((process, (op, piece))) = oldest else {
            return Vec::new();
        };
        if running.is_some_and(|running| running < op) {
            return Vec::new();
        }

        let line = format!(
            "process {} waits in {} for piece {piece} from process {process}",
            self.config.process,
            self.name(op)
        );
        let mut chain = vec![line];
        if let Some(answer) = &self.peers[process.index()].answer {
            chain.push(format!(
                "process {process} has issued {} operations and {}",
                answer.count, answer.doing
            ));
            chain.extend(answer.chain.iter().cloned());
        }

        chain.truncate(CHAIN);
        chain
    }

    /// Describes a wait of this process for users.
    fn wait_line(&self, process: ProcessId, op: u64, piece: u64, seconds: f32) -> String {
        format!(
            "process {}: {} has waited {seconds:.1} s for piece {piece} from process {process}",
            self.config.process,
            self.name(op)
        )
    }
}
