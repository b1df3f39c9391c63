//! Limits on the messages of a peer. A peer that exceeds them has broken the protocol and is lost.
//!
//! A correct process stays within the limits, with any program. They bound the memory that a faulty
//! peer can take here.

use super::peer::PieceKey;
use super::{Cargo, EAGER_BYTES, EAGER_CREDIT, EAGER_OVERHEAD, EarlyMessage, Router, RouterAction};
use crate::wire::{Header, MessageKind, ProcessId};

/// Number of bytes counted for a kept message beyond its text: its header and its place in a list.
pub(super) const KEPT_OVERHEAD: u64 = 128;

/// Limit in bytes on the messages of one peer that are kept until this process needs them; eager
/// payloads are not counted. A peer that exceeds it is treated as lost. A correct process stays
/// below, because each such message stands for memory that it has.
pub(super) const MOST_KEPT: u64 = 128 << 20;

impl<C: Cargo> EarlyMessage<C> {
    /// Returns the number of bytes that are counted for keeping this message.
    pub(super) fn cost(&self) -> u64 {
        match self {
            Self::Cargo(..) | Self::Offered(_) => KEPT_OVERHEAD,
            Self::Poison(failure) => KEPT_OVERHEAD + failure.message.len() as u64,
        }
    }
}

impl<C: Cargo> Router<C> {
    /// Treats a peer as lost because it broke the protocol, for the reason `why`. Drops the peer's
    /// messages that were kept, and ignores later ones. A second call does nothing.
    pub fn broken(&mut self, process: ProcessId, why: &str) {
        let Some(peer) = self
            .peers
            .get_mut(process.index())
            .filter(|peer| !peer.broken)
        else {
            return;
        };

        peer.broken = true;
        self.lose(process, format!("it broke the protocol: {why}"));
        self.early.retain(|(from, _), _| *from != process);
        self.parked.retain(|_, messages| {
            messages.retain(|message| message.from != process);
            !messages.is_empty()
        });

        let peer = &mut self.peers[process.index()];
        peer.granted.clear();
        peer.kept = 0;
    }

    /// Treats a peer as gone although its connections may still be open. Tells the driver to close
    /// them.
    pub(super) fn lose(&mut self, process: ProcessId, why: String) {
        self.peer_down(process, &why);
        self.actions
            .push(RouterAction::GiveUp { peer: process, why });
    }

    /// Checks that the peer `from` may send this message about a piece, and counts an eager piece
    /// against the peer's credit. Otherwise returns false and treats the peer as lost.
    pub(super) fn is_allowed(&mut self, from: ProcessId, header: &Header) -> bool {
        let peer = &mut self.peers[from.index()];
        let Header {
            bytes, op, piece, ..
        } = *header;

        match header.kind {
            MessageKind::Eager if bytes > EAGER_BYTES => {
                let why = format!(
                    "it sent piece {piece} of operation {op}, of {bytes} bytes, without a grant"
                );
                self.broken(from, &why);
                false
            }
            MessageKind::Eager => {
                peer.unclaimed += bytes + EAGER_OVERHEAD;
                let unclaimed = peer.unclaimed;
                if unclaimed > EAGER_CREDIT {
                    let why = format!(
                        "its unclaimed small pieces take {unclaimed} bytes, beyond its credit of \
                         {EAGER_CREDIT}"
                    );
                    self.broken(from, &why);
                }
                unclaimed <= EAGER_CREDIT
            }
            // Grants are only for operations that this process has issued.
            MessageKind::Data if op > self.history.count() && !peer.zero_copy => {
                self.not_granted(from, header);
                false
            }
            _ => true,
        }
    }

    /// Records that a program of the peer waits until this process has taken all its pieces up to
    /// operation `op`. Only the highest `op` is kept. A peer that lends no memory has nothing to
    /// ask for and is treated as lost.
    pub(super) fn asked_taken(&mut self, from: ProcessId, op: u64) {
        let peer = &mut self.peers[from.index()];
        if peer.zero_copy {
            peer.asked = peer.asked.max(op);
            self.to_tell.push(from);
        } else {
            self.broken(
                from,
                "it asked which of its pieces were taken, and lends none",
            );
        }
    }

    /// Treats a peer as lost because it sent a piece without a grant. Ignores the piece of a peer
    /// that has already left: the piece may have been granted before, and its waiter has been told.
    pub(super) fn not_granted(&mut self, from: ProcessId, header: &Header) {
        if self.peers[from.index()].has_left() {
            return;
        }
        let why = format!(
            "it sent piece {} of operation {} without a grant",
            header.piece, header.op
        );
        self.broken(from, &why);
    }

    /// Keeps a message about a piece until this process expects the piece. A second message about
    /// the same piece replaces the first.
    pub(super) fn keep_early(&mut self, from: ProcessId, key: PieceKey, early: EarlyMessage<C>) {
        let cost = early.cost();
        if let Some(before) = self.early.insert((from, key), early) {
            self.peers[from.index()].kept -= before.cost();
        }
        self.count_kept(from, cost);
    }

    /// Removes and returns the message about a piece that arrived before this process expected the
    /// piece.
    pub(super) fn take_early(&mut self, from: ProcessId, key: PieceKey) -> Option<EarlyMessage<C>> {
        let early = self.early.remove(&(from, key))?;
        self.peers[from.index()].kept -= early.cost();
        Some(early)
    }

    /// Keeps a peer's grant of a piece, with the peer's rolling hash at its operation, until this
    /// process offers the piece.
    pub(super) fn keep_grant(&mut self, from: ProcessId, key: PieceKey, hash: u128) {
        if self.peers[from.index()].granted.insert(key, hash).is_none() {
            self.count_kept(from, KEPT_OVERHEAD);
        }
    }

    /// Adds `bytes` to the size of a peer's kept messages. A peer above [`MOST_KEPT`] is treated as
    /// lost.
    pub(super) fn count_kept(&mut self, from: ProcessId, bytes: u64) {
        let peer = &mut self.peers[from.index()];
        peer.kept += bytes;
        if peer.kept > MOST_KEPT {
            let why = format!(
                "it sent more than {MOST_KEPT} bytes of messages that nothing here waits for"
            );
            self.broken(from, &why);
        }
    }
}
