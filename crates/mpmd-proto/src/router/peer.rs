//! The router's state for one peer.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::history::ShownOperations;
use super::{Cargo, EAGER_CREDIT, Failure, ProbeAnswer};

/// A piece of an operation: `(operation, piece)`.
pub(super) type PieceKey = (u64, u64);

/// A piece that this process waits for.
pub(super) struct ExpectedPiece<C: Cargo> {
    pub(super) waiter: C::Waiter,
    /// The rolling hash at the operation.
    pub(super) hash: u128,
    /// Lengths that the piece may have, in bytes.
    pub(super) bytes: RangeInclusive<u64>,
    pub(super) since: Duration,
    /// Time of the next probe of the sender.
    pub(super) probe_at: Duration,
    /// Time of the next hang report.
    pub(super) report_at: Duration,
    /// True if a grant was sent.
    pub(super) granted: bool,
}

/// A piece that is ready here and waits for the peer's grant.
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

/// The rendezvous's report that a peer is lost, until it is clear if the peer is gone.
pub(super) struct Suspicion {
    /// The time of the report.
    pub(super) since: Duration,
    pub(super) why: String,
}

/// An open dispute with a peer.
#[derive(Clone, Copy)]
pub(super) struct OpenDispute {
    pub(super) since: Duration,
    /// The operation at which the two processes disagree, or an earlier one.
    pub(super) op: u64,
}

/// A peer's rolling hash after `count` operations. This process compares it once it has issued as
/// many.
#[derive(Clone, Copy)]
pub(super) struct PendingCheck {
    pub(super) count: u64,
    pub(super) hash: u128,
}

/// The state of one peer.
pub(super) struct PeerState<C: Cargo> {
    /// The reason why the peer is gone; `None` until then.
    pub(super) down: Option<String>,
    /// True if the peer broke the protocol. Its later messages are ignored.
    pub(super) broken: bool,
    pub(super) goodbye: Option<Goodbye>,
    /// True if pieces go to and from the peer by zero-copy transfer: the memory stays in place.
    pub(super) zero_copy: bool,
    /// Number of the last operation of which this process took a zero-copy piece from the peer.
    pub(super) last_taken: u64,
    /// Number of the last operation up to which the peer knows that all its pieces were taken.
    pub(super) told: u64,
    /// Number of zero-copy pieces taken since the last report to the peer.
    pub(super) untold: u32,
    /// The highest operation for which a program of the peer waits until its pieces are taken.
    pub(super) asked: u64,
    pub(super) heard: Duration,
    /// The time that the peer may be silent at the start, in addition to the peer timeout.
    pub(super) starts_within: Duration,
    /// The rendezvous's report that the peer is lost.
    pub(super) suspected: Option<Suspicion>,
    /// Bytes of eager pieces (sent without a grant) that may still be sent to the peer.
    pub(super) credit: u64,
    /// Bytes of eager pieces consumed here for which the peer has not got its credit back yet.
    pub(super) owed: u64,
    /// Bytes of eager pieces that arrived and for which no credit was returned. Above
    /// [`EAGER_CREDIT`] the peer is lost.
    pub(super) unclaimed: u64,
    /// Bytes of the peer's messages that are kept for later. Above
    /// [`MOST_KEPT`](super::breach::MOST_KEPT) the peer is lost.
    pub(super) kept: u64,
    /// The pieces that this process expects from the peer, sorted, so that failures and probes come
    /// in operation order.
    pub(super) expected: BTreeMap<PieceKey, ExpectedPiece<C>>,
    /// The pieces that are ready here and wait for the peer's grant.
    pub(super) ready: BTreeMap<PieceKey, ReadyPiece<C>>,
    /// The peer's grants of pieces that are not ready, with its rolling hash at the operation.
    pub(super) granted: BTreeMap<PieceKey, u128>,
    /// The peer's latest answer to a probe.
    pub(super) answer: Option<ProbeAnswer>,
    /// The peer's recent operations, if it disagreed and has sent them.
    pub(super) shown: Option<ShownOperations>,
    /// The dispute with the peer, if there is one.
    pub(super) disputed: Option<OpenDispute>,
    /// The peer's hash that is to be compared next.
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

    /// Returns true if the peer may still ask for pieces: it is not gone, and has not said goodbye
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
