//! Payloads that the transport is moving, and their end when the peer falls silent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_memory::OwnedBuffer;
use mpmd_transport::transport::{Fetch, FetchDone};
use mpmd_transport::{Ticket, TransportError};

use crate::exec::{LeftBehind, OnLoan, OpGuard, Runtime};

/// Payloads that a transport is moving.
///
/// A transport ends each transfer when it is done, or when it knows that the peer is gone. If a
/// peer is only silent, its connections stay and the transport may never know. Then the waiters get
/// a failure anyway. The bytes stay with the transport until it releases them (invariant
/// *memory-outlives-operation*).
#[derive(Default)]
pub(crate) struct UnderWay {
    /// Bytes that are being sent, by ticket number.
    sending: BTreeMap<u64, Sending>,
    /// Memory lent by zero-copy transfer, by ticket number.
    lent: BTreeMap<u64, LentPayload>,
    /// Guards of operations whose zero-copy payloads a peer has not taken yet. Once a payload is
    /// taken its operation may end, because the peer may keep the payload forever.
    untaken: BTreeMap<PayloadKey, OpGuard>,
    /// Zero-copy payloads that the transport has released but the peer has not taken. Small
    /// payloads, for example, are copied to the peer's memory at once.
    left: BTreeMap<PayloadKey, LeftBehind>,
    /// The last operation up to which each peer has taken all zero-copy payloads.
    taken: BTreeMap<ProcessId, u64>,
    /// Peers that will take no more zero-copy payloads.
    gone: BTreeSet<ProcessId>,
    /// Operations whose sends the program waits for, and some that have ended.
    awaited: BTreeSet<u64>,
    /// Incoming bytes that are being read, by ticket number.
    receiving: BTreeMap<u64, Receiving>,
    /// Tickets of the pieces of a batch, by the batch's ticket number.
    bundles: BTreeMap<u64, Vec<Ticket>>,
    /// Peers to and from which all transfers were ended, and the reason.
    given_up: BTreeMap<ProcessId, String>,
    next: u64,
}

/// Bytes that are being sent to a peer.
pub(crate) struct Sending {
    pub(crate) to: ProcessId,
    /// The guard that keeps the operation in flight until the bytes have left.
    pub(crate) operation: OpGuard,
}

/// Memory that is lent to a peer by zero-copy transfer.
struct LentPayload {
    to: ProcessId,
    op: u64,
    loan: OnLoan,
}

/// Bytes from a peer that are being read.
struct Receiving {
    from: ProcessId,
    then: FetchDone,
}

/// Identifies a zero-copy payload to a peer. Ordered by peer, then by operation.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct PayloadKey {
    to: ProcessId,
    op: u64,
    ticket: u64,
}

/// The ticket and the state of a zero-copy payload that was just registered.
pub(crate) struct LentTicket {
    pub(crate) ticket: Ticket,
    pub(crate) state: HandedOver,
}

/// The loan and the guard of a payload that was refused, since the peer takes no more.
pub(crate) struct RefusedLoan {
    pub(crate) loan: OnLoan,
    pub(crate) operation: OpGuard,
}

/// The parts of a send that has ended. `None` for a part that the send did not have.
pub(crate) struct EndedSend {
    /// The loan, to be dropped.
    pub(crate) loan: Option<OnLoan>,
    pub(crate) sending: Option<Sending>,
}

/// The state of a zero-copy payload right after it was registered.
pub(crate) enum HandedOver {
    /// The peer has not taken the payload. The operation stays in flight until it has.
    Untaken,
    /// As [`Untaken`](Self::Untaken), and the program waits for the payload: the peer must be asked
    /// to report.
    Awaited,
    /// The peer has already taken all payloads of the operation.
    Taken(OpGuard),
}

impl UnderWay {
    /// Registers bytes that are about to be sent and returns their ticket. `operation` stays in
    /// flight until the bytes have left. If the peer was given up, returns `operation` as the
    /// error.
    pub(crate) fn send(&mut self, to: ProcessId, operation: OpGuard) -> Result<Ticket, OpGuard> {
        if self.given_up.contains_key(&to) {
            return Err(operation);
        }
        let number = self.number();
        self.sending.insert(number, Sending { to, operation });
        Ok(Ticket(number))
    }

    /// Registers memory that is about to be lent to a peer. If the peer takes no more payloads,
    /// returns the loan and the guard as the error.
    pub(crate) fn hand_over(
        &mut self,
        to: ProcessId,
        op: u64,
        loan: OnLoan,
        operation: OpGuard,
    ) -> Result<LentTicket, RefusedLoan> {
        if self.given_up.contains_key(&to) || self.gone.contains(&to) {
            return Err(RefusedLoan { loan, operation });
        }

        let number = self.number();
        self.lent.insert(number, LentPayload { to, op, loan });
        let state = if self.taken.get(&to).is_some_and(|taken| op <= *taken) {
            HandedOver::Taken(operation)
        } else {
            let key = PayloadKey {
                to,
                op,
                ticket: number,
            };
            self.untaken.insert(key, operation);
            if self.awaited.contains(&op) {
                HandedOver::Awaited
            } else {
                HandedOver::Untaken
            }
        };
        Ok(LentTicket {
            ticket: Ticket(number),
            state,
        })
    }

    /// Notes that the program waits for the sends of operation `op`. Returns the peers that have
    /// not taken a payload of it, to be asked. Empty if the wait was noted before. Forgets
    /// operations before `first_open`, which have ended.
    fn wait_for(&mut self, op: u64, first_open: u64) -> Vec<ProcessId> {
        if !self.awaited.insert(op) {
            return Vec::new();
        }
        self.awaited = self.awaited.split_off(&first_open.min(op));
        let keys = self.untaken.keys().filter(|key| key.op == op);
        let mut peers: Vec<_> = keys.map(|key| key.to).collect();
        peers.dedup();
        peers
    }

    /// Notes that a peer has taken all zero-copy payloads up to operation `op`. Returns the guards
    /// that kept these operations in flight for this peer.
    pub(crate) fn taken(&mut self, by: ProcessId, op: u64) -> Vec<OpGuard> {
        let taken = self.taken.entry(by).or_default();
        *taken = op.max(*taken);
        take_range(&mut self.left, by, op);
        take_range(&mut self.untaken, by, op)
    }

    /// Returns each peer with payloads that have left but are not taken, and the first operation of
    /// such a payload.
    fn first_left(&self) -> BTreeMap<ProcessId, u64> {
        self.left.keys().rev().map(|key| (key.to, key.op)).collect()
    }

    /// Notes that a peer takes no more zero-copy payloads. Returns the guards of the operations
    /// whose payloads it has not taken.
    pub(crate) fn never_taken(&mut self, by: ProcessId) -> Vec<OpGuard> {
        self.gone.insert(by);
        self.taken(by, u64::MAX)
    }

    /// Notes that the transport has released a ticket: sent bytes have left, lent bytes were
    /// returned, or the transfer failed.
    pub(crate) fn sent(&mut self, ticket: Ticket) -> EndedSend {
        let Some(LentPayload { to, op, loan }) = self.lent.remove(&ticket.0) else {
            return EndedSend {
                loan: None,
                sending: self.sending.remove(&ticket.0),
            };
        };

        let key = PayloadKey {
            to,
            op,
            ticket: ticket.0,
        };
        let operation = self.untaken.remove(&key);
        if operation.is_some() {
            self.left.insert(key, loan.left_behind());
        }
        EndedSend {
            loan: Some(loan),
            sending: operation.map(|operation| Sending { to, operation }),
        }
    }

    /// Creates and returns the ticket of a batch whose pieces have these tickets.
    pub(crate) fn bundle(&mut self, tickets: Vec<Ticket>) -> Ticket {
        let number = self.number();
        self.bundles.insert(number, tickets);
        Ticket(number)
    }

    /// Removes a batch that the transport has released, and returns the tickets of its pieces.
    /// `None` if the ticket belongs to no batch.
    pub(crate) fn take_bundle(&mut self, ticket: Ticket) -> Option<Vec<Ticket>> {
        self.bundles.remove(&ticket.0)
    }

    /// Returns the next ticket number. It is never 0.
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

impl Runtime {
    /// Starts to read a payload of `from` into a buffer. Later calls `then` exactly once with the
    /// buffer or an error, even if `from` becomes silent.
    pub(crate) fn fetch(
        self: &Arc<Self>,
        from: ProcessId,
        fetch: Box<dyn Fetch>,
        into: OwnedBuffer,
        then: FetchDone,
    ) {
        let number = {
            let mut under_way = self.under_way.lock();
            if let Some(why) = under_way.given_up.get(&from) {
                let error = TransportError::PeerGone {
                    peer: from,
                    why: why.clone(),
                };
                drop(under_way);
                // The memory is dropped before its operation.
                drop((fetch, into));
                return then(Err(error));
            }
            let number = under_way.number();
            under_way.receiving.insert(number, Receiving { from, then });
            number
        };

        let runtime = self.clone();
        fetch.fetch(
            into,
            Box::new(move |result| {
                let waiting = runtime.under_way.lock().receiving.remove(&number);
                // No entry is left if the sender was given up.
                if let Some(Receiving { then, .. }) = waiting {
                    then(result);
                }
            }),
        );
    }

    /// Notes that a thread of the program waits for the sends of operation `op`. Asks the peers
    /// that hold its zero-copy payloads to report as soon as they have taken them. Does not block.
    /// Sends nothing if the same wait was noted before.
    pub(crate) fn ask_taken(self: &Arc<Self>, op: u64) {
        let first_open = self.in_flight.first_open().unwrap_or(op);
        let peers = self.under_way.lock().wait_for(op, first_open);
        if !peers.is_empty() {
            self.with_router(|router| peers.iter().for_each(|peer| router.ask_taken(*peer, op)));
        }
    }

    /// Asks each peer to report when it has taken the oldest payload left with it. Does not block.
    pub(crate) fn ask_for_left(self: &Arc<Self>) {
        let first = self.under_way.lock().first_left();
        if !first.is_empty() {
            self.with_router(|router| {
                first
                    .into_iter()
                    .for_each(|(peer, op)| router.ask_taken(peer, op));
            });
        }
    }

    /// Fails the sends of an operation and drops its guard, because process `to` will not take a
    /// piece.
    pub(crate) fn never_taken(&self, to: ProcessId, operation: OpGuard) {
        let router = self.router.lock();
        let failure = router
            .why_never(to, operation.op())
            .unwrap_or_else(|| router.lost_while(to, operation.op(), "it was given up"));
        drop(router);
        operation.fail_sends(&failure);
    }

    /// Gives up a peer: ends all transfers to and from it, and refuses later ones. `why` is the
    /// reason in their errors.
    pub(crate) fn give_up(&self, peer: ProcessId, why: &str) {
        if let Some(transport) = &self.transport {
            transport.give_up(peer, why);
        }
        self.end_transfers(peer, why);
    }

    /// Ends all transfers to and from a peer, and refuses later ones. `why` is the reason in their
    /// errors.
    pub(crate) fn end_transfers(&self, peer: ProcessId, why: &str) {
        let mut under_way = self.under_way.lock();
        under_way
            .given_up
            .entry(peer)
            .or_insert_with(|| why.to_owned());
        let sending = take_if(&mut under_way.sending, |sending| sending.to == peer);
        let lent = take_if(&mut under_way.lent, |lent| lent.to == peer);
        let untaken = under_way.never_taken(peer);
        let receiving = take_if(&mut under_way.receiving, |one| one.from == peer);

        // Dropping these guards calls into the rest of the runtime, so the lock is released first.
        drop(under_way);
        drop(lent);
        let sending = sending.into_iter().map(|sending| sending.operation);
        sending
            .chain(untaken)
            .for_each(|operation| self.never_taken(peer, operation));
        for Receiving { then, .. } in receiving {
            then(Err(TransportError::PeerGone {
                peer,
                why: why.to_owned(),
            }));
        }
    }
}

/// Removes the values of a peer's operations up to `op` from a map and returns them.
fn take_range<V>(map: &mut BTreeMap<PayloadKey, V>, by: ProcessId, op: u64) -> Vec<V> {
    let first = PayloadKey {
        to: by,
        op: 0,
        ticket: 0,
    };
    let last = PayloadKey {
        to: by,
        op,
        ticket: u64::MAX,
    };
    let keys = map.range(first..=last).map(|(key, _)| *key);
    let keys: Vec<_> = keys.collect();
    keys.iter().filter_map(|key| map.remove(key)).collect()
}

/// Removes the values for which `is_taken` returns true from a map, and returns them in key order.
fn take_if<V>(map: &mut BTreeMap<u64, V>, is_taken: impl Fn(&V) -> bool) -> Vec<V> {
    let (taken, left) = std::mem::take(map)
        .into_iter()
        .partition(|(_, value)| is_taken(value));
    *map = left;
    let taken: BTreeMap<u64, V> = taken;
    taken.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::InFlight;

    #[test]
    fn op_ends_when_payload_is_taken_loan_when_it_is_returned() {
        let (in_flight, mut under_way) = (Arc::new(InFlight::default()), UnderWay::default());
        let (near, far) = (ProcessId(1), ProcessId(2));
        let mut tickets = Vec::new();
        for (to, op) in [(near, 1), (near, 2), (near, 3), (far, 1)] {
            let (loan, operation) = (in_flight.lend(10), in_flight.begin(10 * op, 0, 0));
            let Ok(LentTicket {
                ticket,
                state: HandedOver::Untaken,
            }) = under_way.hand_over(to, op, loan, operation)
            else {
                panic!("in flight")
            };
            tickets.push(ticket);
        }
        let found = |in_flight: &InFlight| (in_flight.counts().ops, in_flight.counts().lent);
        assert_eq!(found(&in_flight), (4, 40));
        assert_eq!(under_way.taken(near, 2).len(), 2);
        assert_eq!(found(&in_flight), (2, 40), "a taken payload may be kept");
        // Returned before the peer said that it was taken.
        drop(under_way.sent(tickets[2]));
        drop(under_way.sent(tickets[0]));
        assert_eq!(found(&in_flight), (1, 20));
        let ahead = in_flight.counts().ahead();
        assert_eq!(
            (ahead.ops, ahead.bytes),
            (2, 10),
            "it is in the peer's memory"
        );
        assert_eq!(under_way.first_left(), BTreeMap::from([(near, 3)]));
        drop(under_way.taken(near, 3));
        assert_eq!(in_flight.counts().ahead().ops, 1);
        // Of an operation that the peer has already taken.
        let (loan, operation) = (in_flight.lend(1), in_flight.begin(50, 0, 0));
        let Ok(LentTicket {
            ticket: late,
            state: HandedOver::Taken(ended),
        }) = under_way.hand_over(near, 2, loan, operation)
        else {
            panic!("ended")
        };
        drop(ended);
        assert_eq!(found(&in_flight), (1, 21));
        assert!(
            under_way.taken(near, 1).is_empty(),
            "an older operation changes nothing"
        );
        drop((
            under_way.sent(late),
            under_way.sent(tickets[1]),
            under_way.sent(tickets[3]),
        ));
        assert_eq!(found(&in_flight), (0, 0));
        under_way.given_up.insert(far, "silent".to_owned());
        let refused = under_way.hand_over(far, 9, in_flight.lend(1), in_flight.begin(90, 0, 0));
        assert!(refused.is_err());
        drop(refused);
        assert_eq!(found(&in_flight), (0, 0));
    }
}
