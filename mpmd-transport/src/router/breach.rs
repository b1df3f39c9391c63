//! Limits on the messages of a peer. A peer beyond them has broken the protocol and is lost.
//!
//! A correct process stays within the limits whatever its program does. They bound the memory that
//! a faulty peer can take here.

use super::peer::PieceKey;
use super::{Action, Cargo, EAGER_BYTES, EAGER_CREDIT, EAGER_OVERHEAD, Early, Router};
use crate::wire::{Header, Kind, ProcessId};

/// Cost of a message that is kept, beyond its text: its header and its place in a list.
pub(super) const KEPT_OVERHEAD: u64 = 128;

/// Bytes of one peer's messages that are kept until this process asks for them, without eager
/// payloads. Each such message of a correct process stands for memory of its own, of which it has
/// less.
pub(super) const MOST_KEPT: u64 = 128 << 20;

impl<C: Cargo> Early<C> {
    pub(super) fn cost(&self) -> u64 {
        match self {
            Self::Cargo(..) | Self::Offered(_) => KEPT_OVERHEAD,
            Self::Poison(failure) => KEPT_OVERHEAD + failure.message.len() as u64,
        }
    }
}

impl<C: Cargo> Router<C> {
    /// Loses a peer that broke the protocol. Drops its messages, those that came and those still to
    /// come.
    pub fn broken(&mut self, process: ProcessId, why: &str) {
        let Some(peer) = self.peers.get_mut(process.index()).filter(|peer| !peer.broken) else {
            return;
        };
        peer.broken = true;
        self.lose(process, format!("it broke the protocol: {why}"));
        self.early.retain(|(from, _), _| *from != process);
        self.parked.retain(|_, messages| {
            messages.retain(|(from, ..)| *from != process);
            !messages.is_empty()
        });
        let peer = &mut self.peers[process.index()];
        peer.granted.clear();
        peer.kept = 0;
    }

    /// Counts a peer as gone though its connections may stand.
    pub(super) fn lose(&mut self, process: ProcessId, why: String) {
        self.peer_down(process, &why);
        self.actions.push(Action::GiveUp { peer: process, why });
    }

    /// Returns true if its sender may send this message about a piece. Else loses the sender.
    pub(super) fn is_allowed(&mut self, from: ProcessId, header: &Header) -> bool {
        let peer = &mut self.peers[from.index()];
        let Header { bytes, op, piece, .. } = *header;
        match header.kind {
            Kind::Eager if bytes > EAGER_BYTES => {
                let why = format!(
                    "it sent piece {piece} of operation {op}, of {bytes} bytes, without a grant"
                );
                self.broken(from, &why);
                false
            }
            Kind::Eager => {
                peer.unclaimed += bytes + EAGER_OVERHEAD;
                let unclaimed = peer.unclaimed;
                if unclaimed > EAGER_CREDIT {
                    let why = format!(
                        "small pieces of it are {unclaimed} bytes, beyond its credit of \
                         {EAGER_CREDIT}"
                    );
                    self.broken(from, &why);
                }
                unclaimed <= EAGER_CREDIT
            }
            // Grants are only for operations that this process has issued.
            Kind::Data if op > self.history.count() && !peer.hands_over => {
                self.not_granted(from, header);
                false
            }
            _ => true,
        }
    }

    /// Loses a peer that sent a piece without a grant. One that has left already is left alone:
    /// what waited for it has been told, and a piece that was granted before may still come.
    pub(super) fn not_granted(&mut self, from: ProcessId, header: &Header) {
        if self.peers[from.index()].has_left() {
            return;
        }
        let why =
            format!("it sent piece {} of operation {} without a grant", header.piece, header.op);
        self.broken(from, &why);
    }

    /// Keeps what came for a piece until this process expects it. Of two messages the later one
    /// stays.
    pub(super) fn keep_early(&mut self, from: ProcessId, key: PieceKey, early: Early<C>) {
        let cost = early.cost();
        if let Some(before) = self.early.insert((from, key), early) {
            self.peers[from.index()].kept -= before.cost();
        }
        self.count_kept(from, cost);
    }

    /// Takes what came for a piece before it was expected.
    pub(super) fn take_early(&mut self, from: ProcessId, key: PieceKey) -> Option<Early<C>> {
        let early = self.early.remove(&(from, key))?;
        self.peers[from.index()].kept -= early.cost();
        Some(early)
    }

    /// Keeps a grant, and the hash at its operation, until the piece is offered.
    pub(super) fn keep_grant(&mut self, from: ProcessId, key: PieceKey, hash: u128) {
        if self.peers[from.index()].granted.insert(key, hash).is_none() {
            self.count_kept(from, KEPT_OVERHEAD);
        }
    }

    /// Counts `bytes` of messages that are kept; a peer with more than [`MOST_KEPT`] is lost.
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
