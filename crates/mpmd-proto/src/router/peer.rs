//! The router's state for one peer.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::history::ShownOperations;
use super::{Cargo, EAGER_CREDIT, Failure, ProbeAnswer};

/// Identifies a piece: (number of the operation, number of the piece within it).
pub(super) type PieceKey = (u64, u64);

/// A piece that this process waits for.
pub(super) struct ExpectedPiece<C: Cargo> {
    pub(super) waiter: C::Waiter,
    /// The rolling hash at the piece's operation.
    pub(super) hash: u128,
    /// Lengths that the piece may have, in bytes.
    pub(super) bytes: RangeInclusive<u64>,
    pub(super) since: Duration,
    /// Time at which the piece's sender is probed next.
    pub(super) probe_at: Duration,
    /// Time at which the wait is next reported to the user.
    pub(super) report_at: Duration,
    /// True if this process has granted the piece.
    pub(super) granted: bool,
}

/// A piece that this process can send and that waits for the peer's grant.
pub(super) struct ReadyPiece<C: Cargo> {
    pub(super) cargo: C::Outgoing,
    pub(super) hash: u128,
    pub(super) bytes: u64,
}

/// The content of a peer's goodbye.
pub(super) struct Goodbye {
    pub(super) count: u64,
    pub(super) failure: Option<Arc<Failure>>,
}

/// A report of the rendezvous that a peer is lost. It is kept until messages from the peer refute
/// it or the peer counts as gone.
pub(super) struct Suspicion {
    /// The time at which the rendezvous reported the loss.
    pub(super) since: Duration,
    pub(super) why: String,
}

/// A dispute with a peer that has issued other operations than this process.
#[derive(Clone, Copy)]
pub(super) struct OpenDispute {
    pub(super) since: Duration,
    /// The operation at which the two processes disagree; the first difference may be at an earlier
    /// one.
    pub(super) op: u64,
}

/// A peer's rolling hash after `count` operations. It is compared once this process has issued as
/// many operations.
#[derive(Clone, Copy)]
pub(super) struct PendingCheck {
    pub(super) count: u64,
    pub(super) hash: u128,
}

/// The state of one peer of this process.
pub(super) struct PeerState<C: Cargo> {
    /// The reason why the peer is gone; `None` while it is not.
    pub(super) down: Option<String>,
    /// True if the peer broke the protocol. Its later messages are ignored.
    pub(super) broken: bool,
    pub(super) goodbye: Option<Goodbye>,
    /// True if pieces are exchanged with the peer by zero-copy transfer: the receiver reads them in
    /// the sender's memory.
    pub(super) zero_copy: bool,
    /// The last operation of which this process took a zero-copy piece from the peer.
    pub(super) last_taken: u64,
    /// The last operation up to which this process has told the peer that all its zero-copy pieces
    /// were taken.
    pub(super) told: u64,
    /// Number of zero-copy pieces taken from the peer since the last report to it.
    pub(super) untold: u32,
    /// The highest operation for which the peer has asked to be told when all pieces up to it are
    /// taken.
    pub(super) asked: u64,
    pub(super) heard: Duration,
    /// The time beyond the peer timeout for which the peer may be silent before its first message.
    pub(super) starts_within: Duration,
    /// The rendezvous's report that the peer is lost, if there is one.
    pub(super) suspected: Option<Suspicion>,
    /// Number of bytes of eager pieces (sent without a grant) that may still be sent to the peer.
    pub(super) credit: u64,
    /// Number of bytes of consumed eager pieces for which this process has not returned credit to
    /// the peer.
    pub(super) owed: u64,
    /// Number of bytes of arrived eager pieces for which this process has not returned credit. A
    /// peer that exceeds [`EAGER_CREDIT`] is treated as lost.
    pub(super) unclaimed: u64,
    /// Number of bytes of the peer's messages that are kept for later. A peer that exceeds
    /// [`MOST_KEPT`](super::breach::MOST_KEPT) is treated as lost.
    pub(super) kept: u64,
    /// The pieces that this process waits for from the peer. They are sorted, so that failures and
    /// probes are handled in operation order.
    pub(super) expected: BTreeMap<PieceKey, ExpectedPiece<C>>,
    /// The pieces that this process can send and that wait for the peer's grant.
    pub(super) ready: BTreeMap<PieceKey, ReadyPiece<C>>,
    /// The peer's grants of pieces that this process cannot send yet, with the peer's rolling hash
    /// at the operation.
    pub(super) granted: BTreeMap<PieceKey, u128>,
    /// The peer's latest answer to a probe.
    pub(super) answer: Option<ProbeAnswer>,
    /// The operations that the peer has sent in a dispute, if it has.
    pub(super) shown: Option<ShownOperations>,
    /// The open dispute with the peer, if there is one.
    pub(super) disputed: Option<OpenDispute>,
    /// The next hash of the peer to compare, if there is one.
    pub(super) check: Option<PendingCheck>,
}

impl<C: Cargo> Default for PeerState<C> {
    fn default() -> Self {
        Self {
            down: None,
            broken: false,
            goodbye: None,
            zero_copy: false,
            last_taken: 0,
            told: 0,
            untold: 0,
            asked: 0,
            heard: Duration::ZERO,
            starts_within: Duration::ZERO,
            suspected: None,
            credit: EAGER_CREDIT,
            owed: 0,
            unclaimed: 0,
            kept: 0,
            expected: BTreeMap::new(),
            ready: BTreeMap::new(),
            granted: BTreeMap::new(),
            answer: None,
            shown: None,
            disputed: None,
            check: None,
        }
    }
}

impl<C: Cargo> PeerState<C> {
    /// Returns true if messages can be sent to the peer: it is not gone.
    pub(super) fn is_reachable(&self) -> bool {
        self.down.is_none()
    }

    /// Returns true if the peer may still take pieces: it is not gone, and has not said goodbye
    /// with a failure.
    pub(super) fn takes_pieces(&self) -> bool {
        self.is_reachable()
            && self
                .goodbye
                .as_ref()
                .is_none_or(|goodbye| goodbye.failure.is_none())
    }

    /// Returns true if the peer has left the job, in order or not.
    pub(super) fn has_left(&self) -> bool {
        self.down.is_some() || self.goodbye.is_some()
    }
}
