//! Disputes: two processes have found that they run different programs.
//!
//! The process that notices it sends its recent operations to the other, which sends its own in
//! return. With both lists, each process finds the first difference. The job then fails with it on
//! every process.

use std::sync::Arc;
use std::time::Duration;

use super::history::{HistoryDifference, ShownOperations, first_difference};
use super::peer::{OpenDispute, PendingCheck};
use super::{Body, Cargo, Failure, FailureKind, Router, RouterAction};
use crate::control;
use crate::wire::{Header, MessageKind, ProcessId};

/// Time within which a peer must send its operations in a dispute. After that, the failure is
/// reported without them.
const SHOW_WITHIN: Duration = Duration::from_secs(2);

impl<C: Cargo> Router<C> {
    /// Compares a peer's rolling hash after `count` operations with this process's hash. If this
    /// process has not issued `count` operations yet, compares once it has. Opens a dispute if the
    /// hashes differ.
    pub(super) fn compare(&mut self, from: ProcessId, count: u64, hash: u128, now: Duration) {
        if count > self.history.count() {
            let peer = &mut self.peers[from.index()];
            if self.left {
                // This process will never get there.
                self.dispute(from, count, now);
            } else if peer.check.is_none_or(|known| count < known.count) {
                // Keep the lowest count: one that this process never reaches must not hide others.
                peer.check = Some(PendingCheck { count, hash });
                self.next_check = self.next_check.min(count);
            }
        } else if self.history.hash_at(count).is_some_and(|mine| mine != hash) {
            self.dispute(from, count, now);
        }
    }

    /// Opens a dispute with the peer `with`: the two processes issued different operations at `op`
    /// or before. Sends this process's recent operations to the peer. Does nothing if the job has
    /// failed or a dispute with the peer is open.
    pub(super) fn dispute(&mut self, with: ProcessId, op: u64, now: Duration) {
        if self.failed.is_some() || self.peers[with.index()].disputed.is_some() {
            return;
        }

        self.peers[with.index()].disputed = Some(OpenDispute { since: now, op });
        if self.peers[with.index()].is_reachable() {
            let body = control::encode(&self.history.show(op)).unwrap_or_default();
            let header = Header {
                op,
                bytes: body.len() as u64,
                ..self.header(MessageKind::Records)
            };
            self.actions.push(RouterAction::Post {
                to: with,
                header,
                body: Body::Control(body),
            });
        }

        if self.peers[with.index()].shown.is_some() {
            self.conclude(with, op);
        }
    }

    /// Handles the operations that a peer has sent in a dispute. Fails the job with the first
    /// difference, or opens a dispute if this process has none with the peer.
    pub(super) fn shown(&mut self, from: ProcessId, control: &[u8], now: Duration) {
        if self.failed.is_some() {
            return;
        }

        let shown = match control::decode::<ShownOperations>(control) {
            Ok(shown) if shown.is_sound() => shown,
            _ => return self.broken(from, "its list of operations is not valid"),
        };

        let last = shown.records.last().map_or(shown.count, |record| record.op);
        self.peers[from.index()].shown = Some(shown);
        match self.peers[from.index()].disputed {
            Some(dispute) => self.conclude(from, dispute.op),
            None => self.dispute(from, last, now),
        }
    }

    /// Opens a dispute with a peer that has left after fewer operations than this process has
    /// issued, or after more than it will ever issue.
    pub(super) fn compare_end(&mut self, with: ProcessId, now: Duration) {
        let count = self.history.count();
        let Some(goodbye) = &self.peers[with.index()].goodbye else {
            return;
        };
        let theirs = goodbye.count;
        if goodbye.failure.is_none() && (theirs < count || (self.left && theirs > count)) {
            self.dispute(with, theirs.min(count) + 1, now);
        }
    }

    /// Ends disputes in which the peer has not sent its operations in time. Fails the job for each.
    pub(super) fn expire_disputes(&mut self, now: Duration) {
        for process in self.others() {
            if let Some(dispute) = self.peers[process.index()].disputed
                && now >= dispute.since + SHOW_WITHIN
            {
                self.conclude(process, dispute.op);
            }
        }
    }

    /// Ends a dispute. Fails the job with the first difference, if it is known.
    fn conclude(&mut self, with: ProcessId, op: u64) {
        if self.failed.is_some() {
            return;
        }

        let me = self.config.process;
        let difference = match &self.peers[with.index()].shown {
            Some(theirs) => first_difference(me, &self.history.show(op), with, theirs),
            None => {
                let what = self.name(op);
                HistoryDifference {
                    op,
                    text: format!(
                        "the programs diverged: processes {me} and {with} differ at {what} or \
                         before it; process {with} has not said in time what it has issued"
                    ),
                }
            }
        };

        let failure = Failure::new(FailureKind::Diverged, me, difference.op, difference.text);
        self.fail(Arc::new(Failure {
            other: Some(with),
            ..failure
        }));
    }
}
