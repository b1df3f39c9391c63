//! What the router knows of one peer.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::history::Shown;
use super::{Answer, Cargo, EAGER_CREDIT, Failure};

/// A piece of an operation: `(operation, piece)`.
pub(super) type PieceKey = (u64, u64);

/// A piece that this process waits for.
pub(super) struct Expected<C: Cargo> {
    pub(super) waiter: C::Waiter,
    /// The rolling hash at the operation.
    pub(super) hash: u128,
    /// Lengths that the piece may have.
    pub(super) bytes: RangeInclusive<u64>,
    pub(super) since: Duration,
    /// When the sender is asked next.
    pub(super) probe_at: Duration,
    /// When the next hang report is due.
    pub(super) report_at: Duration,
    /// Whether the sender was told to send it.
    pub(super) granted: bool,
}

/// A piece that is ready here and waits for the peer's grant.
pub(super) struct Ready<C: Cargo> {
    pub(super) cargo: C::Outgoing,
    pub(super) hash: u128,
    pub(super) bytes: u64,
}

/// How a peer said goodbye.
pub(super) struct Goodbye {
    pub(super) count: u64,
    pub(super) failure: Option<Arc<Failure>>,
}

pub(super) struct Peer<C: Cargo> {
    /// Why it is gone, where it is.
    pub(super) down: Option<String>,
    /// Whether it broke the protocol. Nothing of it is read any more.
    pub(super) broken: bool,
    pub(super) goodbye: Option<Goodbye>,
    /// Whether pieces go to it, and come from it, as memory that stays where it is.
    pub(super) hands_over: bool,
    /// The last operation of which a piece that it handed over was taken here.
    pub(super) last_taken: u64,
    /// The operation up to which it knows that all was taken.
    pub(super) told: u64,
    /// Pieces taken since it was told last.
    pub(super) untold: u32,
    pub(super) heard: Duration,
    /// When the rendezvous lost it, and the reason given, until it is clear whether it is gone.
    pub(super) suspected: Option<(Duration, String)>,
    /// Eager bytes that may still be sent to it.
    pub(super) credit: u64,
    /// Eager bytes taken out here that it was not yet told of.
    pub(super) owed: u64,
    /// Cost of the eager pieces that came and for which no credit went back: at most
    /// [`EAGER_CREDIT`].
    pub(super) unclaimed: u64,
    /// Bytes of its messages that are kept for later: at most
    /// [`MOST_KEPT`](super::breach::MOST_KEPT).
    pub(super) kept: u64,
    /// Sorted, so that failures and probes come in operation order.
    pub(super) expected: BTreeMap<PieceKey, Expected<C>>,
    pub(super) ready: HashMap<PieceKey, Ready<C>>,
    pub(super) granted: HashMap<PieceKey, u128>,
    /// Its latest word on what it is doing.
    pub(super) answer: Option<Answer>,
    /// Its operations, where it disagreed and has shown them.
    pub(super) shown: Option<Shown>,
    /// Since when, and from which operation, we know that we disagree.
    pub(super) disputed: Option<(Duration, u64)>,
    /// An operation count of its to be compared when this process gets there.
    pub(super) check: Option<(u64, u128)>,
}

impl<C: Cargo> Default for Peer<C> {
    fn default() -> Self {
        Self {
            down: None,
            broken: false,
            goodbye: None,
            hands_over: false,
            last_taken: 0,
            told: 0,
            untold: 0,
            heard: Duration::ZERO,
            suspected: None,
            credit: EAGER_CREDIT,
            owed: 0,
            unclaimed: 0,
            kept: 0,
            expected: BTreeMap::new(),
            ready: HashMap::new(),
            granted: HashMap::new(),
            answer: None,
            shown: None,
            disputed: None,
            check: None,
        }
    }
}

impl<C: Cargo> Peer<C> {
    /// Whether messages to it make sense.
    pub(super) fn is_reachable(&self) -> bool {
        self.down.is_none()
    }

    /// Whether it may still ask for pieces.
    pub(super) fn takes_pieces(&self) -> bool {
        self.is_reachable() && self.goodbye.as_ref().is_none_or(|goodbye| goodbye.failure.is_none())
    }

    /// Whether it has left the job, in order or not.
    pub(super) fn has_left(&self) -> bool {
        self.down.is_some() || self.goodbye.is_some()
    }
}
