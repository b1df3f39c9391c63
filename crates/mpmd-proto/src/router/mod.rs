//! The pure state machine between operations and messages.
//!
//! Every process issues the same operations in the same order. So a *piece* of data that moves is
//! named by its operation's number and its own number within the operation, never by arrival order.
//! The [`Router`] of a process:
//!
//! - matches arriving messages with the pieces that its operations expect;
//! - lets large payloads move only after the receiver's grant;
//! - compares rolling hashes, so that diverged programs get an error instead of each other's data;
//! - probes a sender when a piece is late;
//! - fails the operations that wait for a failed or departed peer.
//!
//! It does no I/O, starts no thread and reads no clock. Its driver calls it with events and the
//! time, and carries out the [`RouterAction`]s that it collects. It relies on no ordering of
//! messages.
//!
//! A piece moves from S to R as operation `k` like this:
//!
//! | size | S, when the data is ready | R, when it issues `k` |
//! |---|---|---|
//! | up to [`EAGER_BYTES`], within credit | `Eager` with payload | delivered; credit returned |
//! | up to [`EAGER_BYTES`], no credit left | `Offer` | `Grant`; then `Data` |
//! | more | waits for the grant | `Grant`; then `Data` |
//! | any, with [zero-copy transfer](RouterConfig::zero_copy) | `Data` | delivered |
//!
//! A peer breaks the protocol if it sends a message that no correct process sends. It then counts
//! as lost, with a message that says so ([`Router::broken`]).
//!
//! A process sends a grant only after it has issued the operation and reserved its memory. So a
//! higher operation never holds memory that a lower one needs. A zero-copy piece costs its receiver
//! no memory, so it needs no grant; the memory stays the sender's. From time to time the receiver
//! reports up to which operation it has taken such pieces. So a sender knows how far it is ahead.
//! If the sender's program waits for this report, the sender [asks](Router::ask_taken) for it and
//! gets it at once.

mod breach;
mod dispute;
mod ends;
mod failure;
mod history;
mod peer;
mod watch;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

pub use failure::{Failure, FailureKind};
pub use history::{OpNote, OpRecord, OpSpan, ValueHashes};
pub use watch::ProbeAnswer;

use crate::wire::{Header, MessageKind, ProcessId};
use breach::KEPT_OVERHEAD;
use ends::encode_failure;
use history::OpHistory;
use peer::{ExpectedPiece, PeerState, PieceKey, ReadyPiece};

/// Pieces up to this size may travel without a grant, in bytes.
pub const EAGER_BYTES: u64 = 16 << 10;

/// Limit in bytes on the eager pieces (sent without a grant) of one sender that one receiver has
/// not consumed yet. Each piece counts with 64 bytes more.
pub const EAGER_CREDIT: u64 = 1 << 20;

/// Number of zero-copy pieces taken from a sender after which the sender is told at once, even if
/// it has not asked. Otherwise [`Router::tick`] tells it.
const TOLD_AT_ONCE: u32 = 16;

/// Cost in bytes of an eager piece in addition to its bytes.
const EAGER_OVERHEAD: u64 = 64;

/// The driver's types that pass through a router.
pub trait Cargo {
    /// The bytes of a piece to send, with everything that must live until they have left.
    type Outgoing;
    /// The payload of a message that arrived.
    type Incoming;
    /// The receiver of a piece, or of the error if the piece never arrives.
    type Waiter;
}

/// Settings of a [`Router`].
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// This process's id.
    pub process: ProcessId,
    /// Number of processes in the job.
    pub processes: usize,
    /// The incarnation of the job; messages of another incarnation are ignored.
    pub epoch: u64,
    /// The peer timeout: a peer that is silent for longer counts as lost. A wait that lasts longer
    /// is reported.
    pub peer_timeout: Duration,
    /// Time between heartbeats.
    pub heartbeat: Duration,
    /// True, by process, if pieces go to and from that process by zero-copy transfer
    /// (`Transport::zero_copy`). Missing entries count as false.
    pub zero_copy: Vec<bool>,
}

/// A task for the driver.
pub enum RouterAction<C: Cargo> {
    /// Send a message.
    Post {
        /// The receiver.
        to: ProcessId,
        /// The complete header.
        header: Header,
        /// The payload.
        body: Body<C::Outgoing>,
    },
    /// Give a waiter its piece, or the reason why it will never come.
    Deliver {
        /// The waiter.
        waiter: C::Waiter,
        /// The piece, or the failure.
        result: Result<C::Incoming, Arc<Failure>>,
    },
    /// Call [`Router::answer`] with a description of this process's activity.
    Answer {
        /// The process that asked.
        to: ProcessId,
        /// Number of the operation that the asking process waits for.
        op: u64,
        /// Number of the awaited piece within the operation.
        piece: u64,
    },
    /// A peer has taken all zero-copy pieces up to this operation.
    Taken {
        /// The peer.
        by: ProcessId,
        /// Number of the last of the operations; `u64::MAX` for all.
        op: u64,
    },
    /// A peer takes no more zero-copy pieces. [`Router::why_never`] gives the reason.
    NeverTaken {
        /// The peer.
        by: ProcessId,
    },
    /// Drop this cargo: its receiver will not take it. [`Router::why_never`] gives the reason.
    Discard {
        /// The receiver.
        to: ProcessId,
        /// The cargo.
        cargo: C::Outgoing,
    },
    /// A wait has lasted longer than the peer timeout; show this text to the user.
    HangReport(String),
    /// A peer is gone; later operations that need it will fail with this.
    PeerLost(Arc<Failure>),
    /// A peer is silent for too long, or has broken the protocol. Its connections may still stand,
    /// so transfers with it do not end by themselves: make the transport give it up.
    GiveUp {
        /// The peer.
        peer: ProcessId,
        /// The reason.
        why: String,
    },
    /// The job as a whole has failed; every waiter has been told.
    Failed(Arc<Failure>),
}

/// The payload of a message to send.
pub enum Body<O> {
    /// No payload.
    Empty,
    /// A control payload.
    Control(Vec<u8>),
    /// The bytes of a piece.
    Cargo(O),
}

/// A message that arrived before this process expected its piece. Its hash was compared if the
/// operation was remembered.
enum EarlyMessage<C: Cargo> {
    /// The piece.
    Cargo(Header, C::Incoming),
    /// An offer of a piece, with the sender's rolling hash at the operation.
    Offered(u128),
    /// The piece will never come, for this reason.
    Poison(Arc<Failure>),
}

/// A message for an operation that this process has not issued yet.
struct ParkedMessage<C: Cargo> {
    from: ProcessId,
    header: Header,
    incoming: C::Incoming,
}

/// The size of a piece that the receiver does not know, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PieceSize {
    /// The expected size.
    pub likely: u64,
    /// The largest allowed size.
    pub most: u64,
}

/// Matches operations and messages of one process. See the [module](self).
pub struct Router<C: Cargo> {
    config: RouterConfig,
    history: OpHistory,
    peers: Vec<PeerState<C>>,
    /// Messages for operations that this process has not issued yet, by operation number.
    parked: BTreeMap<u64, Vec<ParkedMessage<C>>>,
    /// Messages that arrived before this process expected their pieces, by sender and piece.
    early: BTreeMap<(ProcessId, PieceKey), EarlyMessage<C>>,
    failed: Option<Arc<Failure>>,
    /// The first loss of a peer.
    first_loss: Option<Arc<Failure>>,
    next_heartbeat: Duration,
    /// The time of the last [`Router::tick`], on the driver's clock.
    ticked: Duration,
    /// The lowest operation at which a peer's hash is to be compared; `u64::MAX` for none.
    next_check: u64,
    /// True once this process has said goodbye.
    left: bool,
    actions: Vec<RouterAction<C>>,
    /// Senders of zero-copy pieces to report the taken pieces to, once the current call of this
    /// router has ended.
    to_tell: Vec<ProcessId>,
}

impl<C: Cargo> Router<C> {
    /// Creates a router that has issued no operations.
    pub fn new(config: RouterConfig) -> Self {
        Self {
            peers: (0..config.processes)
                .map(|process| PeerState {
                    zero_copy: config.zero_copy.get(process).copied().unwrap_or(false),
                    ..PeerState::default()
                })
                .collect(),
            config,
            history: OpHistory::default(),
            parked: BTreeMap::new(),
            early: BTreeMap::new(),
            failed: None,
            first_loss: None,
            next_heartbeat: Duration::ZERO,
            ticked: Duration::ZERO,
            next_check: u64::MAX,
            left: false,
            actions: Vec::new(),
            to_tell: Vec::new(),
        }
    }

    /// Allows a peer, before its first message, to be silent for `within` in addition to the peer
    /// timeout.
    pub fn allow_start(&mut self, peer: ProcessId, within: Duration) {
        if let Some(peer) = self.peers.get_mut(peer.index()) {
            peer.starts_within = within;
        }
    }

    /// Returns and removes the driver's tasks, in order. Call it after every other call.
    pub fn take_actions(&mut self) -> Vec<RouterAction<C>> {
        std::mem::take(&mut self.to_tell)
            .into_iter()
            .for_each(|peer| self.tell_taken(peer));
        std::mem::take(&mut self.actions)
    }

    /// Returns true if [`Router::take_actions`] would return anything.
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty() || !self.to_tell.is_empty()
    }

    /// Returns the number of operations that this process has issued.
    pub fn count(&self) -> u64 {
        self.history.count()
    }

    /// Returns the rolling hash at operation `op`, or `None` if this process has not issued it or
    /// has forgotten it.
    pub fn hash_at(&self, op: u64) -> Option<u128> {
        self.history.hash_at(op)
    }

    /// Returns the failure of the whole job, if it has failed.
    pub fn failed(&self) -> Option<&Arc<Failure>> {
        self.failed.as_ref()
    }

    /// Issues an operation, which has the next number, and handles messages that waited for it.
    /// Calls `clock`, which returns the time, only if needed: most operations of a large job
    /// concern other processes.
    pub fn issue(&mut self, record: OpRecord, clock: impl Fn() -> Duration) {
        let op = record.op;
        self.history.push(record);
        self.issued(op, clock);
    }

    /// Issues all operations up to `op`, as parts of `span`. The driver calls it once for each
    /// operation in which this process takes part; that includes all operations before it.
    pub fn issue_span(&mut self, op: u64, span: &Arc<dyn OpSpan>, clock: impl Fn() -> Duration) {
        self.history.extend(op, span);
        self.issued(op, clock);
    }

    /// Handles the messages and the hashes that waited for operation `op` to be issued.
    fn issued(&mut self, op: u64, clock: impl Fn() -> Duration) {
        if self.next_check > op
            && self
                .parked
                .first_key_value()
                .is_none_or(|(first, _)| *first > op)
        {
            return;
        }

        let now = clock();
        while let Some(entry) = self.parked.first_entry() {
            if *entry.key() > op {
                break;
            }
            let messages = entry.remove();
            for message in &messages {
                self.peers[message.from.index()].kept -= KEPT_OVERHEAD;
            }
            for message in messages {
                if !self.peers[message.from.index()].broken {
                    self.piece_message(message.from, message.header, message.incoming, now);
                }
            }
        }

        if self.next_check > op {
            return;
        }
        self.next_check = u64::MAX;
        for index in 0..self.peers.len() {
            if let Some(check) = self.peers[index].check.take() {
                self.compare(ProcessId(index as u32), check.count, check.hash, now);
            }
        }
    }

    /// Registers `waiter` for a piece of `bytes` bytes from `from` in an issued operation. Does not
    /// block: the waiter gets the piece or a failure by [`RouterAction::Deliver`]. `key` is
    /// (operation, piece). `hash` is the rolling hash at the operation, which this router may have
    /// forgotten.
    ///
    /// The memory for the piece must be reserved: a large piece is granted now, unless it comes by
    /// zero-copy transfer.
    pub fn expect(
        &mut self,
        from: ProcessId,
        key: (u64, u64),
        hash: u128,
        bytes: u64,
        waiter: C::Waiter,
        now: Duration,
    ) {
        self.expect_within(from, key, hash, bytes..=bytes, waiter, now);
    }

    /// Registers `waiter` for a piece with one of the lengths `bytes`.
    fn expect_within(
        &mut self,
        from: ProcessId,
        (op, piece): (u64, u64),
        hash: u128,
        bytes: RangeInclusive<u64>,
        waiter: C::Waiter,
        now: Duration,
    ) {
        debug_assert!(op <= self.history.count(), "operation {op} was not issued");
        let key = (op, piece);

        // A piece that has arrived is taken, even if its sender has gone since.
        let here = matches!(
            self.early.get(&(from, key)),
            Some(EarlyMessage::Cargo(..) | EarlyMessage::Poison(_))
        );
        let never = if here {
            self.failed.clone()
        } else {
            self.why_never(from, op)
        };
        if let Some(failure) = never {
            self.actions.push(RouterAction::Deliver {
                waiter,
                result: Err(failure),
            });
            return;
        }

        let least = *bytes.start();
        let most = *bytes.end();
        let expected = ExpectedPiece {
            waiter,
            hash,
            bytes,
            since: now,
            probe_at: now + watch::PROBE_AFTER,
            report_at: now.saturating_add(self.config.peer_timeout),
            granted: false,
        };
        self.peers[from.index()].expected.insert(key, expected);

        match self.take_early(from, key) {
            Some(
                EarlyMessage::Cargo(Header { hash: theirs, .. }, _) | EarlyMessage::Offered(theirs),
            ) if theirs != hash => {
                self.dispute(from, op, now);
            }
            Some(EarlyMessage::Cargo(header, incoming)) => self.deliver(from, header, incoming),
            Some(EarlyMessage::Poison(failure)) => self.poisoned(from, key, failure),
            Some(EarlyMessage::Offered(_)) => self.grant(from, key, most),
            None if least > EAGER_BYTES && !self.peers[from.index()].zero_copy => {
                self.grant(from, key, most);
            }
            None => {}
        }

        let beyond = self.peers[from.index()]
            .goodbye
            .as_ref()
            .is_some_and(|goodbye| op > goodbye.count);
        if beyond {
            self.dispute(from, op, now);
        }
    }

    /// Registers `waiter`, as [`Router::expect`] does, for a piece of which only the sender knows
    /// the size. The sender [announces](Self::announce) it. A piece of more than `size.most` bytes
    /// breaks the protocol.
    ///
    /// If the likely size is large, the piece is granted at once, which saves a round trip.
    pub fn expect_any_size(
        &mut self,
        from: ProcessId,
        key: (u64, u64),
        hash: u128,
        size: PieceSize,
        waiter: C::Waiter,
        now: Duration,
    ) {
        self.expect_within(from, key, hash, 0..=size.most, waiter, now);
        let peer = &self.peers[from.index()];
        if size.likely > EAGER_BYTES
            && !peer.zero_copy
            && peer
                .expected
                .get(&key)
                .is_some_and(|expected| !expected.granted)
        {
            self.grant(from, key, size.likely);
        }
    }

    /// Registers `waiter` for a piece of any size that an issued operation no longer needs, and
    /// grants it, so that its sender can finish.
    pub fn decline(
        &mut self,
        from: ProcessId,
        key: (u64, u64),
        hash: u128,
        waiter: C::Waiter,
        now: Duration,
    ) {
        // If the piece is large, its sender may wait for a grant. Granting takes no memory here.
        let size = PieceSize {
            likely: u64::MAX,
            most: u64::MAX,
        };
        self.expect_any_size(from, key, hash, size, waiter, now);
    }

    /// Offers a piece of `bytes` bytes of an issued operation to `to`, which does not know its
    /// size. Sends or keeps the piece as [`Router::offer`] does. Also tells `to` of a large piece,
    /// which asks for its grant. `key` is (operation, piece).
    pub fn announce(
        &mut self,
        to: ProcessId,
        key: (u64, u64),
        hash: u128,
        bytes: u64,
        cargo: C::Outgoing,
    ) {
        self.offer(to, key, hash, bytes, cargo);
        if bytes > EAGER_BYTES && self.peers[to.index()].ready.contains_key(&key) {
            self.post_piece(MessageKind::Offer, to, key, hash, bytes, Body::Empty);
        }
    }

    /// Offers a piece of `bytes` bytes of an issued operation to `to`. Sends the piece now if it
    /// goes by zero-copy transfer, if it is granted already, or if it is small and within credit.
    /// Otherwise keeps it until the grant. Discards `cargo` once `to` is gone or the job has
    /// failed.
    ///
    /// The tuple is (operation, piece). `hash` is the rolling hash at the operation, which this
    /// router may have forgotten.
    pub fn offer(
        &mut self,
        to: ProcessId,
        (op, piece): (u64, u64),
        hash: u128,
        bytes: u64,
        cargo: C::Outgoing,
    ) {
        let key = (op, piece);
        let peer = &mut self.peers[to.index()];
        if self.failed.is_some() || !peer.takes_pieces() {
            self.actions.push(RouterAction::Discard { to, cargo });
            return;
        }

        let granted = peer.granted.remove(&key);
        peer.kept -= granted.map_or(0, |_| KEPT_OVERHEAD);
        if granted.is_some_and(|theirs| theirs != hash) {
            // Kept until the dispute has failed the job.
            peer.ready.insert(key, ReadyPiece { cargo, hash, bytes });
            self.dispute(to, op, self.ticked);
            return;
        }

        if peer.zero_copy || granted.is_some() {
            self.post_piece(MessageKind::Data, to, key, hash, bytes, Body::Cargo(cargo));
            return;
        }

        if bytes > EAGER_BYTES {
            peer.ready.insert(key, ReadyPiece { cargo, hash, bytes });
        } else if let Some(credit) = peer.credit.checked_sub(bytes + EAGER_OVERHEAD) {
            peer.credit = credit;
            self.post_piece(MessageKind::Eager, to, key, hash, bytes, Body::Cargo(cargo));
        } else {
            peer.ready.insert(key, ReadyPiece { cargo, hash, bytes });
            self.post_piece(MessageKind::Offer, to, key, hash, bytes, Body::Empty);
        }
    }

    /// Asks `to` to tell as soon as it has taken all zero-copy pieces of this process up to
    /// operation `op`. Then [`RouterAction::Taken`] follows. Does nothing without zero-copy
    /// transfer to `to`, if `to` is gone, or if the job has failed.
    pub fn ask_taken(&mut self, to: ProcessId, op: u64) {
        let peer = &self.peers[to.index()];
        if peer.zero_copy && !peer.has_left() && self.failed.is_none() {
            let header = Header {
                op,
                ..self.header(MessageKind::AskTaken)
            };
            self.actions.push(RouterAction::Post {
                to,
                header,
                body: Body::Empty,
            });
        }
    }

    /// Tells `to` that a piece for which it waits will never come, because of `failure`. Does
    /// nothing if `to` is gone or the job has failed.
    pub fn poison(&mut self, to: ProcessId, op: u64, piece: u64, failure: &Failure) {
        let body = encode_failure(failure);
        let bytes = body.len() as u64;
        if self.failed.is_none() && self.peers[to.index()].is_reachable() {
            // The receiver believes a poison with any hash.
            let hash = self.history.hash_at(op).unwrap_or_default();
            self.post_piece(
                MessageKind::Poison,
                to,
                (op, piece),
                hash,
                bytes,
                Body::Control(body),
            );
        }
    }

    /// Handles a message that arrived. `control` holds its payload if the kind carries a control
    /// payload.
    pub fn arrived(
        &mut self,
        from: ProcessId,
        header: Header,
        incoming: C::Incoming,
        control: &[u8],
        now: Duration,
    ) {
        let is_read = self
            .peers
            .get(from.index())
            .is_some_and(|peer| !peer.broken);
        if header.epoch != self.config.epoch || !is_read {
            return;
        }

        self.peers[from.index()].heard = now;
        match header.kind {
            MessageKind::Eager | MessageKind::Offer | MessageKind::Grant | MessageKind::Data => {
                // After a peer's loss nothing waits for its pieces any more.
                let is_late = self.failed.is_some() || self.peers[from.index()].down.is_some();
                if is_late || !self.is_allowed(from, &header) {
                    return;
                }
                if header.op > self.history.count() {
                    self.parked
                        .entry(header.op)
                        .or_default()
                        .push(ParkedMessage {
                            from,
                            header,
                            incoming,
                        });
                    self.count_kept(from, KEPT_OVERHEAD);
                } else {
                    self.piece_message(from, header, incoming, now);
                }
            }
            // A poison is believed without a comparison of hashes, even ahead of time: a process
            // that failed stops comparing.
            MessageKind::Poison => {
                let failure = self.heard(from, header.op, control);
                self.poisoned(from, (header.op, header.piece), failure);
            }
            MessageKind::Credit => {
                let peer = &mut self.peers[from.index()];
                if peer.zero_copy && header.op > self.history.count() {
                    let why = format!(
                        "it took a piece of operation {}, which was not issued",
                        header.op
                    );
                    self.broken(from, &why);
                } else if peer.zero_copy {
                    self.actions.push(RouterAction::Taken {
                        by: from,
                        op: header.op,
                    });
                } else {
                    peer.credit = peer.credit.saturating_add(header.count).min(EAGER_CREDIT);
                }
            }
            MessageKind::AskTaken => self.asked_taken(from, header.op),
            // The driver passes on the messages in it instead.
            MessageKind::Batch => {}
            MessageKind::Probe => self.probed(from, header, now),
            MessageKind::Answer => self.answered(from, control),
            MessageKind::Heartbeat | MessageKind::Step => {
                self.compare(from, header.count, header.hash, now)
            }
            MessageKind::Goodbye => self.peer_left(from, header, control, now),
            MessageKind::Records => self.shown(from, control, now),
            MessageKind::Failure => {
                let failure = self.heard(from, header.op, control);
                self.fail_quietly(failure);
            }
        }
    }

    /// Ends step number `step`: sends the rolling hash to the process with the next number, which
    /// compares it.
    ///
    /// Thus each process is compared with the next one, and all together.
    pub fn step_end(&mut self, step: u64) {
        self.history.step_ended();
        let next = ProcessId((self.config.process.0 + 1) % self.config.processes as u32);
        if next != self.config.process
            && !self.peers[next.index()].has_left()
            && self.failed.is_none()
        {
            let header = Header {
                op: step,
                hash: self.history.hash(),
                ..self.header(MessageKind::Step)
            };
            self.actions.push(RouterAction::Post {
                to: next,
                header,
                body: Body::Empty,
            });
        }
    }

    /// Returns the number of pieces, grants and messages that this router still keeps. None are
    /// left when all processes have ended in order. Does not count offers: one that its piece has
    /// overtaken stays, which happens over transports that change the order of messages.
    pub fn kept(&self) -> usize {
        let of_peers = self
            .peers
            .iter()
            .map(|peer| peer.expected.len() + peer.ready.len() + peer.granted.len());
        let early = self
            .early
            .values()
            .filter(|early| !matches!(early, EarlyMessage::Offered(_)));

        early.count() + self.parked.len() + of_peers.sum::<usize>()
    }

    /// Forgets messages and grants that arrived for operation `op`, which has ended here.
    pub fn forget(&mut self, op: u64) {
        let ended: Vec<_> = self
            .early
            .keys()
            .filter(|(_, key)| key.0 == op)
            .copied()
            .collect();
        for (from, early) in ended
            .into_iter()
            .filter_map(|key| Some((key.0, self.early.remove(&key)?)))
        {
            self.peers[from.index()].kept -= early.cost();
            self.to_tell.push(from);
        }

        for peer in &mut self.peers {
            let before = peer.granted.len();
            peer.granted.retain(|key, _| key.0 != op);
            peer.kept -= (before - peer.granted.len()) as u64 * KEPT_OVERHEAD;
        }
    }

    /// Handles a message about a piece of an operation that this process has issued.
    fn piece_message(
        &mut self,
        from: ProcessId,
        header: Header,
        incoming: C::Incoming,
        now: Duration,
    ) {
        let key = (header.op, header.piece);
        let differs = self
            .hash_of(from, key)
            .is_some_and(|mine| mine != header.hash);
        if differs {
            self.dispute(from, header.op, now);
            return;
        }
        if self.failed.is_some() {
            return;
        }

        let peer = &mut self.peers[from.index()];
        match header.kind {
            MessageKind::Grant => match peer.ready.remove(&key) {
                Some(ReadyPiece { cargo, hash, bytes }) => {
                    self.post_piece(
                        MessageKind::Data,
                        from,
                        key,
                        hash,
                        bytes,
                        Body::Cargo(cargo),
                    );
                }
                None => self.keep_grant(from, key, header.hash),
            },
            MessageKind::Offer => match peer.expected.get(&key) {
                Some(expected) if expected.granted => {}
                Some(expected) => {
                    let most = *expected.bytes.end();
                    self.grant(from, key, most);
                }
                None => self.keep_early(from, key, EarlyMessage::Offered(header.hash)),
            },
            MessageKind::Data if !peer.zero_copy => match peer.expected.get(&key) {
                Some(expected) if expected.granted => self.deliver(from, header, incoming),
                _ => self.not_granted(from, &header),
            },
            _ if peer.expected.contains_key(&key) => self.deliver(from, header, incoming),
            _ => self.keep_early(from, key, EarlyMessage::Cargo(header, incoming)),
        }
    }

    /// Delivers a piece to its waiter, and counts it for its sender's credit or report.
    fn deliver(&mut self, from: ProcessId, header: Header, incoming: C::Incoming) {
        let key = (header.op, header.piece);
        let peer = &mut self.peers[from.index()];
        let Some(expected) = peer.expected.remove(&key) else {
            return;
        };

        if header.kind == MessageKind::Eager {
            peer.owed += header.bytes + EAGER_OVERHEAD;
            if peer.owed >= EAGER_CREDIT / 4 {
                let count = std::mem::take(&mut peer.owed);
                peer.unclaimed -= count;
                let header = Header {
                    count,
                    ..self.header(MessageKind::Credit)
                };
                self.actions.push(RouterAction::Post {
                    to: from,
                    header,
                    body: Body::Empty,
                });
            }
        } else if peer.zero_copy {
            peer.last_taken = peer.last_taken.max(header.op);
            peer.untold += 1;
            if peer.untold >= TOLD_AT_ONCE || peer.asked > peer.told {
                // Later, because the operation may be about to expect more pieces from the peer.
                self.to_tell.push(from);
            }
        }

        if expected.bytes.contains(&header.bytes) {
            self.actions.push(RouterAction::Deliver {
                waiter: expected.waiter,
                result: Ok(incoming),
            });
        } else {
            let most = expected.bytes.end();
            let what = self.name(header.op);
            let piece = format!(
                "{} bytes for piece {} of {what}",
                header.bytes, header.piece
            );
            let message = format!("process {from} sent {piece}, which has {most}");
            let failure = Arc::new(Failure::new(
                FailureKind::Transport,
                from,
                header.op,
                message,
            ));
            self.actions.push(RouterAction::Deliver {
                waiter: expected.waiter,
                result: Err(failure),
            });
            // The hashes were equal, which means equal shapes: so the peer is at fault.
            self.broken(from, &format!("it sent {piece}, which has {most}"));
        }
    }

    /// Tells a peer up to which operation all its zero-copy pieces were taken, if that has changed.
    pub(super) fn tell_taken(&mut self, to: ProcessId) {
        let peer = &self.peers[to.index()];
        if peer.last_taken <= peer.told || !peer.is_reachable() {
            return;
        }

        let awaited = peer.expected.keys().next().map(|key| key.0);
        let here = |((from, key), early): (&(ProcessId, PieceKey), &EarlyMessage<C>)| {
            (*from == to && matches!(early, EarlyMessage::Cargo(..))).then_some(key.0)
        };
        let early = self.early.iter().filter_map(here).min();
        let first = awaited.into_iter().chain(early).min();
        let op = first.map_or(peer.last_taken, |first| {
            peer.last_taken.min(first.saturating_sub(1))
        });

        let news = op > peer.told;
        let peer = &mut self.peers[to.index()];
        peer.untold = 0;
        if news {
            peer.told = op;
            let header = Header {
                op,
                ..self.header(MessageKind::Credit)
            };
            self.actions.push(RouterAction::Post {
                to,
                header,
                body: Body::Empty,
            });
        }
    }

    /// Gives the waiter of a piece the reason why the piece will never come.
    fn poisoned(&mut self, from: ProcessId, key: PieceKey, failure: Arc<Failure>) {
        if self.failed.is_some() {
            return;
        }
        match self.peers[from.index()].expected.remove(&key) {
            Some(expected) => {
                self.actions.push(RouterAction::Deliver {
                    waiter: expected.waiter,
                    result: Err(failure),
                });
                // The piece may be the last that kept others from being reported as taken.
                self.to_tell.push(from);
            }
            None => self.keep_early(from, key, EarlyMessage::Poison(failure)),
        }
    }

    /// Returns the description of an operation for messages, or just its number if it is forgotten.
    fn name(&self, op: u64) -> String {
        self.history
            .describe(op)
            .unwrap_or_else(|| format!("operation {op}"))
    }

    /// Grants a piece to its sender.
    fn grant(&mut self, to: ProcessId, key: PieceKey, bytes: u64) {
        let Some(expected) = self.peers[to.index()].expected.get_mut(&key) else {
            return;
        };
        expected.granted = true;
        let hash = expected.hash;
        self.post_piece(MessageKind::Grant, to, key, hash, bytes, Body::Empty);
    }

    /// Returns the rolling hash at a piece's operation. A forgotten operation still has one while
    /// the piece waits here; otherwise returns `None`.
    pub(super) fn hash_of(&self, peer: ProcessId, key: PieceKey) -> Option<u128> {
        let peer = &self.peers[peer.index()];
        let expected = || peer.expected.get(&key).map(|expected| expected.hash);
        let ready = || peer.ready.get(&key).map(|ready| ready.hash);
        self.history.hash_at(key.0).or_else(expected).or_else(ready)
    }

    /// Posts a message about a piece.
    fn post_piece(
        &mut self,
        kind: MessageKind,
        to: ProcessId,
        key: PieceKey,
        hash: u128,
        bytes: u64,
        body: Body<C::Outgoing>,
    ) {
        let header = Header {
            op: key.0,
            piece: key.1,
            bytes,
            hash,
            ..self.header(kind)
        };
        self.actions.push(RouterAction::Post { to, header, body });
    }

    /// Returns a header of this process, with its epoch and its number of operations.
    fn header(&self, kind: MessageKind) -> Header {
        Header {
            epoch: self.config.epoch,
            count: self.history.count(),
            ..Header::new(kind)
        }
    }

    /// Returns the other processes of the job.
    fn others(&self) -> impl Iterator<Item = ProcessId> + use<C> {
        let me = self.config.process;
        (0..self.config.processes as u32)
            .map(ProcessId)
            .filter(move |process| *process != me)
    }

    /// Returns the peers that are not gone.
    fn reachable(&self) -> Vec<ProcessId> {
        self.others()
            .filter(|process| self.peers[process.index()].is_reachable())
            .collect()
    }
}

#[cfg(test)]
mod tests;
