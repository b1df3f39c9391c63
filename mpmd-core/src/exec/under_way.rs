//! What the transport is moving, and what becomes of it when the other side falls silent.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use mpmd_ids::ProcessId;
use mpmd_transport::transport::{Fetch, FetchDone};
use mpmd_transport::{OwnedBuffer, Ticket, TransportError};

use super::{OnLoan, OpGuard, Runtime};

/// Payloads that a transport is moving.
///
/// A transport ends each of them when it is done, or when it knows that the peer is gone. Where a
/// peer is merely silent it may never know: its connections stand. Then who waits is told all the
/// same; the bytes stay with the transport until it is done with them (invariant
/// *memory-outlives-operation*).
#[derive(Default)]
pub(super) struct UnderWay {
    /// Operations whose bytes are on their way out, by ticket.
    sending: HashMap<u64, (ProcessId, OpGuard)>,
    /// Memory that peers have been handed over, and of which operation, by ticket.
    lent: HashMap<u64, (ProcessId, u64, OnLoan)>,
    /// Operations of which a peer has not taken yet what it was handed over, with the ticket. Only
    /// so long are they in flight: what was taken may be kept for ever.
    untaken: BTreeMap<(ProcessId, u64, u64), OpGuard>,
    /// The operation up to which a peer has taken all that it was handed over.
    taken: BTreeMap<ProcessId, u64>,
    /// Who waits for bytes that come.
    receiving: HashMap<u64, (ProcessId, FetchDone)>,
    /// Peers from which nothing is awaited any more, and why.
    given_up: BTreeMap<ProcessId, String>,
    next: u64,
}

impl UnderWay {
    /// Bytes are about to be given to the transport; `operation` is in flight until they have left.
    /// It comes back where that is not worth a try.
    pub(super) fn send(&mut self, to: ProcessId, operation: OpGuard) -> Result<Ticket, OpGuard> {
        if self.given_up.contains_key(&to) {
            return Err(operation);
        }
        let number = self.number();
        self.sending.insert(number, (to, operation));
        Ok(Ticket(number))
    }

    /// As [`send`](Self::send), for bytes that `to` reads where they are. Also returns the
    /// operation where it need not be in flight for them.
    pub(super) fn hand_over(
        &mut self,
        to: ProcessId,
        op: u64,
        loan: OnLoan,
        operation: OpGuard,
    ) -> Result<(Ticket, Option<OpGuard>), (OnLoan, OpGuard)> {
        if self.given_up.contains_key(&to) {
            return Err((loan, operation));
        }
        let number = self.number();
        self.lent.insert(number, (to, op, loan));
        if self.taken.get(&to).is_some_and(|taken| op <= *taken) {
            return Ok((Ticket(number), Some(operation)));
        }
        self.untaken.insert((to, op, number), operation);
        Ok((Ticket(number), None))
    }

    /// A peer has taken all that it was handed over up to operation `op`: what need not be in
    /// flight for it any more.
    pub(super) fn taken(&mut self, by: ProcessId, op: u64) -> Vec<OpGuard> {
        let taken = self.taken.entry(by).or_default();
        *taken = op.max(*taken);
        let keys: Vec<_> =
            self.untaken.range((by, 0, 0)..=(by, op, u64::MAX)).map(|(key, _)| *key).collect();
        keys.iter().filter_map(|key| self.untaken.remove(key)).collect()
    }

    /// The bytes have left, and those that were lent have come back; or never will.
    pub(super) fn sent(&mut self, ticket: Ticket) -> (Option<OnLoan>, Option<OpGuard>) {
        match self.lent.remove(&ticket.0) {
            Some((to, op, loan)) => (Some(loan), self.untaken.remove(&(to, op, ticket.0))),
            None => (None, self.sending.remove(&ticket.0).map(|(_, operation)| operation)),
        }
    }

    /// From 1 on: no ticket has the number 0.
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

impl Runtime {
    /// Reads a payload of `from` into a buffer; then calls `then` once, also where `from` falls
    /// silent.
    pub(super) fn fetch(
        self: &Arc<Self>,
        from: ProcessId,
        fetch: Box<dyn Fetch>,
        into: OwnedBuffer,
        then: FetchDone,
    ) {
        let number = {
            let mut under_way = self.under_way.lock();
            if let Some(why) = under_way.given_up.get(&from) {
                let error = TransportError::PeerGone { peer: from, why: why.clone() };
                drop(under_way);
                // The memory goes before the operation that it belongs to.
                drop((fetch, into));
                return then(Err(error));
            }
            let number = under_way.number();
            under_way.receiving.insert(number, (from, then));
            number
        };
        let runtime = self.clone();
        fetch.fetch(
            into,
            Box::new(move |result| {
                let waiting = runtime.under_way.lock().receiving.remove(&number);
                // Nobody waits where the sender was given up.
                if let Some((_, then)) = waiting {
                    then(result);
                }
            }),
        );
    }

    /// Awaits nothing more of a peer, and nothing that it was to take.
    pub(super) fn give_up(&self, peer: ProcessId, why: &str) {
        if let Some(transport) = &self.transport {
            transport.give_up(peer, why);
        }
        let mut under_way = self.under_way.lock();
        under_way.given_up.entry(peer).or_insert_with(|| why.to_owned());
        let sending: Vec<_> = under_way.sending.extract_if(|_, (to, _)| *to == peer).collect();
        let lent: Vec<_> = under_way.lent.extract_if(|_, (to, ..)| *to == peer).collect();
        let untaken = under_way.taken(peer, u64::MAX);
        let mut receiving: Vec<_> =
            under_way.receiving.extract_if(|_, (from, _)| *from == peer).collect();
        // Both call on the rest of the runtime.
        drop(under_way);
        drop(lent);
        drop((sending, untaken));
        receiving.sort_unstable_by_key(|(number, _)| *number);
        for (_, (_, then)) in receiving {
            then(Err(TransportError::PeerGone { peer, why: why.to_owned() }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::InFlight;

    #[test]
    fn an_operation_is_in_flight_until_what_it_handed_over_is_taken_and_its_loan_until_it_is_back()
    {
        let (in_flight, mut under_way) = (Arc::new(InFlight::default()), UnderWay::default());
        let (near, far) = (ProcessId(1), ProcessId(2));
        let mut tickets = Vec::new();
        for (to, op) in [(near, 1), (near, 2), (near, 3), (far, 1)] {
            let (loan, operation) = (in_flight.lend(10), in_flight.begin(10 * op, 0, 0));
            let Ok((ticket, None)) = under_way.hand_over(to, op, loan, operation) else {
                panic!("in flight")
            };
            tickets.push(ticket);
        }
        let found = |in_flight: &InFlight| (in_flight.counts().ops, in_flight.counts().lent);
        assert_eq!(found(&in_flight), (4, 40));
        assert_eq!(under_way.taken(near, 2).len(), 2);
        assert_eq!(found(&in_flight), (2, 40), "what was taken may be kept");
        // Back before anybody said that it was taken.
        drop(under_way.sent(tickets[2]));
        drop(under_way.sent(tickets[0]));
        assert_eq!(found(&in_flight), (1, 20));
        // Of an operation that the peer is through with.
        let (loan, operation) = (in_flight.lend(1), in_flight.begin(50, 0, 0));
        let Ok((late, Some(ended))) = under_way.hand_over(near, 2, loan, operation) else {
            panic!("ended")
        };
        drop(ended);
        assert_eq!(found(&in_flight), (1, 21));
        assert!(under_way.taken(near, 1).is_empty(), "old news");
        drop((under_way.sent(late), under_way.sent(tickets[1]), under_way.sent(tickets[3])));
        assert_eq!(found(&in_flight), (0, 0));
        under_way.given_up.insert(far, "silent".to_owned());
        let refused = under_way.hand_over(far, 9, in_flight.lend(1), in_flight.begin(90, 0, 0));
        assert!(refused.is_err());
        drop(refused);
        assert_eq!(found(&in_flight), (0, 0));
    }
}
