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

/// Largest size in bytes of a piece that may be sent without a grant (an eager piece).
pub const EAGER_BYTES: u64 = 16 << 10;

/// Limit in bytes on the eager pieces that a sender may have in flight to one receiver: those which
/// the receiver has not consumed yet. Each piece counts 64 bytes more than its size.
pub const EAGER_CREDIT: u64 = 1 << 20;

/// Number of zero-copy pieces from one sender after which their receiver reports them at once.
/// Fewer pieces are reported by [`Router::tick`], unless the sender asks.
const TOLD_AT_ONCE: u32 = 16;

/// Number of bytes counted for an eager piece beyond its size.
const EAGER_OVERHEAD: u64 = 64;

/// The types of the driver's values that a router passes on.
pub trait Cargo {
    /// The bytes of a piece to send, with everything that must live until they are sent.
    type Outgoing;
    /// The payload of a message that arrived.
    type Incoming;
    /// The object that receives a piece, or the error if the piece never arrives.
    type Waiter;
}

/// The configuration of a [`Router`].
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// This process's id.
    pub process: ProcessId,
    /// Number of processes in the job.
    pub processes: usize,
    /// The epoch of the job; messages of another epoch are ignored.
    pub epoch: u64,
    /// The peer timeout. A peer that is silent for longer is treated as lost, and a wait that lasts
    /// longer is reported to the user.
    pub peer_timeout: Duration,
    /// Time between heartbeats.
    pub heartbeat: Duration,
    /// True for each process with which pieces are exchanged by zero-copy transfer
    /// (`Transport::zero_copy`). Missing elements count as false.
    pub zero_copy: Vec<bool>,
}

/// A task that the driver must carry out.
pub enum RouterAction<C: Cargo> {
    /// Sends a message.
    Post {
        /// The process to send the message to.
        to: ProcessId,
        /// The complete header of the message.
        header: Header,
        /// The payload of the message.
        body: Body<C::Outgoing>,
    },
    /// Gives a waiter its piece, or the reason why the piece will never arrive.
    Deliver {
        /// The waiter that was registered for the piece.
        waiter: C::Waiter,
        /// The piece, or the reason why it will never arrive.
        result: Result<C::Incoming, Arc<Failure>>,
    },
    /// Requests a call of [`Router::answer`] with a description of this process's activity.
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
        /// The peer that has taken the pieces.
        by: ProcessId,
        /// Number of the last of these operations; `u64::MAX` for all operations.
        op: u64,
    },
    /// A peer takes no more zero-copy pieces. [`Router::why_never`] gives the reason.
    NeverTaken {
        /// The peer that takes no more pieces.
        by: ProcessId,
    },
    /// Drops this cargo, because its receiver will not take it. [`Router::why_never`] gives the
    /// reason.
    Discard {
        /// The process that will not take the cargo.
        to: ProcessId,
        /// The cargo to drop.
        cargo: C::Outgoing,
    },
    /// Shows this text to the user: a wait has lasted longer than the peer timeout.
    HangReport(String),
    /// Reports that a peer is gone. Later operations that need the peer fail with this failure.
    PeerLost(Arc<Failure>),
    /// Requests that the transport gives a peer up, which is silent for too long or has broken the
    /// protocol. The peer's connections may still be open, so transfers with it would not end.
    GiveUp {
        /// The peer to give up.
        peer: ProcessId,
        /// The reason for giving the peer up.
        why: String,
    },
    /// Reports that the whole job has failed. Every waiter has already been told.
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

/// A message that arrived before this process expected its piece. If its operation was still
/// stored, its hash has been compared.
enum EarlyMessage<C: Cargo> {
    /// The piece, with the header of its message.
    Cargo(Header, C::Incoming),
    /// An offer of a piece, with the sender's rolling hash at the operation.
    Offered(u128),
    /// The reason why the piece will never arrive.
    Poison(Arc<Failure>),
}

/// A message about an operation that this process has not issued yet.
struct ParkedMessage<C: Cargo> {
    from: ProcessId,
    header: Header,
    incoming: C::Incoming,
}

/// The possible sizes of a piece in bytes, for a receiver that does not know the exact size.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PieceSize {
    /// The most likely size.
    pub likely: u64,
    /// The largest allowed size.
    pub most: u64,
}

/// The state by which one process matches messages to operations. See the [module](self).
pub struct Router<C: Cargo> {
    config: RouterConfig,
    history: OpHistory,
    peers: Vec<PeerState<C>>,
    /// Messages for operations that this process has not issued yet, by operation number.
    parked: BTreeMap<u64, Vec<ParkedMessage<C>>>,
    /// Messages that arrived before this process expected their pieces, by sender and piece.
    early: BTreeMap<(ProcessId, PieceKey), EarlyMessage<C>>,
    failed: Option<Arc<Failure>>,
    /// The failure of the first peer that was lost.
    first_loss: Option<Arc<Failure>>,
    next_heartbeat: Duration,
    /// The time of the last [`Router::tick`], on the driver's clock.
    ticked: Duration,
    /// The lowest operation at which a peer's hash must be compared; `u64::MAX` if there is none.
    next_check: u64,
    /// True once this process has said goodbye to its peers.
    left: bool,
    actions: Vec<RouterAction<C>>,
    /// Senders of zero-copy pieces to which this process must report the taken pieces when the
    /// current call ends.
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

    /// Lets a peer be silent for the time `within` beyond the peer timeout before its first
    /// message.
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

    /// Returns the rolling hash at operation `op`. `None` if this process has not issued the
    /// operation or no longer stores it.
    pub fn hash_at(&self, op: u64) -> Option<u128> {
        self.history.hash_at(op)
    }

    /// Returns the failure of the whole job; `None` if it has not failed.
    pub fn failed(&self) -> Option<&Arc<Failure>> {
        self.failed.as_ref()
    }

    /// Issues an operation, which gets the next number, and handles messages that waited for it.
    /// `clock` returns the time. It is called only if needed, because most operations of a large
    /// job do not concern this process.
    pub fn issue(&mut self, record: OpRecord, clock: impl Fn() -> Duration) {
        let op = record.op;
        self.history.push(record);
        self.issued(op, clock);
    }

    /// Issues all operations up to `op`, as parts of `span`. The driver calls this for each
    /// operation in which this process takes part. The call includes the operations before it.
    pub fn issue_span(&mut self, op: u64, span: &Arc<dyn OpSpan>, clock: impl Fn() -> Duration) {
        self.history.extend(op, span);
        self.issued(op, clock);
    }

    /// Handles the messages and the hashes that waited until operation `op` was issued.
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
    /// block: [`RouterAction::Deliver`] later gives the waiter the piece or a failure. `key` is
    /// (operation, piece). `hash` is the rolling hash at the operation, which this router may no
    /// longer store.
    ///
    /// The caller must have reserved the memory for the piece: a large piece is granted at once,
    /// unless it comes by zero-copy transfer.
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

    /// Registers `waiter` for a piece whose length in bytes is in the range `bytes`.
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

    /// Registers `waiter`, as [`Router::expect`] does, for a piece whose size only the sender
    /// knows. The sender [announces](Self::announce) it. A piece of more than `size.most` bytes
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

    /// Registers `waiter` for a piece of any size that an issued operation no longer needs. Grants
    /// the piece, so that its sender can finish.
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
    /// size. Sends or keeps the piece as [`Router::offer`] does. If the piece is large, also asks
    /// `to` to grant it. `key` is (operation, piece).
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

    /// Offers a piece of `bytes` bytes of an issued operation to `to`. Sends the piece at once if
    /// it goes by zero-copy transfer, if it is already granted, or if it is small and within
    /// credit. Otherwise keeps it until the grant. Discards `cargo` once `to` is gone or the job
    /// has failed.
    ///
    /// The tuple is (operation, piece). `hash` is the rolling hash at the operation, which this
    /// router may no longer store.
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

    /// Asks `to` to report when it has taken all zero-copy pieces of this process up to operation
    /// `op`. [`RouterAction::Taken`] follows. Does nothing without zero-copy transfer to `to`, if
    /// `to` is gone, or if the job has failed.
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

    /// Tells `to`, because of `failure`, that it will never get a piece for which it waits. Does
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

    /// Handles a message that arrived. `control` is its payload if its kind has a control payload.
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
    /// compares it with its own.
    ///
    /// Each process is thus compared with the next one, and so all processes with each other.
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

    /// Returns the number of pieces, grants and messages that this router still keeps. It is 0 when
    /// all processes have ended in order. Offers are not counted: an offer that arrives after its
    /// piece stays here, which happens over transports that change the order of messages.
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

    /// Drops messages and grants for operation `op`, which has ended on this process.
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

    /// Handles a message about a piece of an operation that this process has already issued.
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

    /// Delivers a piece to its waiter, and counts it for the sender's credit or for the next
    /// report.
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

    /// Reports to a peer up to which operation this process has taken all its zero-copy pieces, if
    /// that has changed.
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

    /// Tells the waiter of a piece why the piece will never arrive.
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

    /// Returns the description of an operation for messages. Returns only its number if it is no
    /// longer stored.
    fn name(&self, op: u64) -> String {
        self.history
            .describe(op)
            .unwrap_or_else(|| format!("operation {op}"))
    }

    /// Sends a grant to the sender of a piece, which may then send the piece.
    fn grant(&mut self, to: ProcessId, key: PieceKey, bytes: u64) {
        let Some(expected) = self.peers[to.index()].expected.get_mut(&key) else {
            return;
        };
        expected.granted = true;
        let hash = expected.hash;
        self.post_piece(MessageKind::Grant, to, key, hash, bytes, Body::Empty);
    }

    /// Returns the rolling hash at a piece's operation. If the operation is no longer stored, the
    /// hash is known only while the piece waits in this router; otherwise returns `None`.
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

    /// Creates a header with this process's epoch and its number of issued operations.
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
