//! Sends and receives messages, and ends the operations with a peer that is gone.

use std::sync::Arc;

use super::queue::Waiting;
use super::result::{UcxError, Way};
use super::safe::{Body, Held, OpId, Sent};
use super::state::{Engine, Operation, Said, Stored, id};
use crate::transport::{FetchDone, Handler, Payload, Ticket, TransportError};
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::wire::{HEADER_BYTES, Header, Kind, ProcessId};

/// Data payloads of at least this many bytes stay with the sender until the receiver fetches them.
/// For smaller ones a round trip does not pay.
const RENDEZVOUS_BYTES: usize = 8 << 10;

/// Number of bytes of the sender's id and the pass, in front of the header.
pub(super) const PREFIX_BYTES: usize = 8;

impl Engine {
    pub(super) fn start_handler(&mut self, handler: Arc<dyn Handler>) {
        self.handler = Some(handler);
        for said in std::mem::take(&mut self.early) {
            self.say(said);
        }
    }

    fn say(&mut self, said: Said) {
        let Some(handler) = &self.handler else {
            self.early.push(said);
            return;
        };
        match said {
            Said::Arrived(from, header, payload) => handler.arrived(from, header, payload),
            Said::Done(ticket, result) => handler.done(ticket, result),
            Said::Down(peer, why) => handler.peer_down(peer, why),
        }
    }

    fn done(&mut self, ticket: Ticket, result: Result<(), TransportError>) {
        if ticket != Ticket::NONE {
            self.say(Said::Done(ticket, result));
        }
    }

    /// Stores a message, which [`Engine::send_stored`] sends.
    pub(super) fn post(
        &mut self,
        to: ProcessId,
        header: &Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
    ) {
        let peer = &self.peers[to.index()];
        let refused = match &peer.down {
            Some(why) => Some(gone(to, why)),
            None => self.leaving.is_some().then_some(TransportError::Closed),
        };
        if let Some(error) = refused {
            drop(payload);
            return self.done(ticket, Err(error));
        }
        let mut bytes = [0; PREFIX_BYTES + HEADER_BYTES];
        bytes[..PREFIX_BYTES].copy_from_slice(&prefix(self.me, peer.pass));
        bytes[PREFIX_BYTES..].copy_from_slice(&header.encode());
        let payload = payload.filter(|payload| !payload.is_empty());
        let bulk = header.kind == Kind::Data
            && payload
                .as_ref()
                .is_some_and(|payload| payload.len() >= RENDEZVOUS_BYTES);
        let way = if bulk { Way::Rendezvous } else { Way::Eager };
        match peer.endpoint {
            Some(endpoint) => {
                let op = self.worker.store(endpoint, &bytes, payload);
                self.stored.push(Stored {
                    to,
                    op,
                    way,
                    ticket,
                });
            }
            None => self.done(ticket, Err(TransportError::Closed)),
        }
    }

    /// Sends the stored messages back to back, then reports those that have left at once.
    ///
    /// The receiver's core reads the memory that a send writes, so a write takes long to complete.
    /// The processor hides that time only if nothing reads fresh writes in between. So headers are
    /// stored before, and payloads are dropped after all sends.
    pub(super) fn send_stored(&mut self) {
        if self.stored.is_empty() {
            return;
        }
        let mut stored = std::mem::take(&mut self.stored);
        stored.retain(
            |Stored {
                 to,
                 op,
                 way,
                 ticket,
             }| {
                match self.worker.send(*op, id::MESSAGE, *way) {
                    Sent::Gone => return true,
                    Sent::UnderWay => self.note_send(*to, *op, Some(*ticket)),
                    Sent::Closed => {
                        drop(self.worker.take_back(*op));
                        self.done(*ticket, Err(TransportError::Closed));
                    }
                }
                false
            },
        );
        for Stored { op, ticket, .. } in stored.drain(..) {
            // The payload is dropped before the handler hears of the end.
            drop(self.worker.take_back(op));
            self.done(ticket, Ok(()));
        }
        self.stored = stored;
    }

    /// Sends a message of the engine's own, without a payload.
    pub(super) fn send(&mut self, to: ProcessId, id: u32, header: &[u8]) {
        self.send_with(to, id, header, None);
    }

    /// Sends a message of the engine's own. The payload is small.
    pub(super) fn send_with(
        &mut self,
        to: ProcessId,
        id: u32,
        header: &[u8],
        payload: Option<SharedBuffer>,
    ) {
        let Some(endpoint) = self.peers[to.index()].endpoint else {
            return;
        };
        let op = self.worker.store(endpoint, header, payload);
        match self.worker.send(op, id, Way::Eager) {
            Sent::UnderWay => self.note_send(to, op, None),
            Sent::Gone | Sent::Closed => drop(self.worker.take_back(op)),
        }
    }

    fn note_send(&mut self, to: ProcessId, op: OpId, ticket: Option<Ticket>) {
        self.peers[to.index()].sending += 1;
        self.note(op, Operation::Send { to, ticket });
    }

    /// Records the purpose of an operation in flight, until the operation ends.
    fn note(&mut self, op: OpId, operation: Operation) {
        let number = op.index();
        if self.operations.len() <= number {
            self.operations.resize_with(number + 1, || None);
        }
        self.operations[number] = Some(operation);
    }

    /// Handles a received message that is no part of a handshake. A message with a wrong pass is
    /// dropped.
    pub(super) fn arrived(&mut self, id: u32, header: &[u8], body: Body) {
        let from = self.sender(header);
        if let (Some(from), id::MESSAGE) = (from, id) {
            return self.deliver(from, &header[PREFIX_BYTES..], body);
        }
        self.throw_away(body);
        match (from, id) {
            (Some(from), id::BYE) => self.goodbye(from),
            (Some(from), id::PING) => self.answer_roll_call(from),
            (Some(from), id::PONG) => self.peers[from.index()].in_reach = true,
            (Some(from), id::HEARD) => {
                let peer = &mut self.peers[from.index()];
                peer.has_heard = true;
                if let Some(endpoint) = peer.endpoint {
                    self.worker.is_done_with(endpoint);
                }
            }
            _ => tracing::warn!("UCX's engine discarded a message of an unknown sender"),
        }
    }

    /// Returns the sender of a message, or `None` if it is not from a connected peer with its pass.
    fn sender(&self, header: &[u8]) -> Option<ProcessId> {
        let from = u32::from_le_bytes(header.get(..4)?.try_into().ok()?);
        let pass = u32::from_le_bytes(header.get(4..PREFIX_BYTES)?.try_into().ok()?);
        let peer = self.peers.get(from as usize)?;
        (peer.endpoint.is_some() && peer.expected == Some(pass)).then_some(ProcessId(from))
    }

    fn deliver(&mut self, from: ProcessId, header: &[u8], body: Body) {
        if self.peers[from.index()].down.is_some()
            || self.leaving.as_ref().is_some_and(|l| l.is_deaf())
        {
            return self.throw_away(body);
        }
        let header = match self.read(header, &body) {
            Ok(header) => header,
            Err(why) => {
                self.throw_away(body);
                return self.shut_out(from, TransportError::Protocol { peer: from, why });
            }
        };
        let payload = match body {
            body if header.payload_bytes() == 0 => {
                self.throw_away(body);
                Payload::Empty
            }
            Body::Empty => Payload::Empty,
            Body::Here(bytes) => Payload::Inline(bytes),
            Body::There(descriptor, bytes) => {
                let payload = self.next_payload;
                self.next_payload += 1;
                self.payloads.insert(payload, (from, descriptor, bytes));
                let queue = self.queue.clone();
                let bytes = bytes as u64;
                Payload::Waiting(Box::new(Waiting {
                    queue,
                    payload,
                    from,
                    bytes,
                    taken: false,
                }))
            }
        };
        self.say(Said::Arrived(from, header, payload));
    }

    fn read(&self, header: &[u8], body: &Body) -> Result<Header, String> {
        let header: &[u8; HEADER_BYTES] = header
            .try_into()
            .map_err(|_| format!("a header of {} bytes", header.len()))?;
        let header = Header::decode(header).map_err(|error| error.to_string())?;
        let bytes = match body {
            Body::Empty => 0,
            Body::Here(bytes) => bytes.len() as u64,
            Body::There(_, bytes) => *bytes as u64,
        };
        if bytes != header.payload_bytes() {
            return Err(format!(
                "a header that announces {} bytes with {bytes}",
                header.payload_bytes()
            ));
        }
        Ok(header)
    }

    pub(super) fn throw_away(&mut self, body: Body) {
        if let Body::There(descriptor, _) = body {
            self.worker.discard(descriptor);
        }
    }

    pub(super) fn fetch(
        &mut self,
        payload: u64,
        from: ProcessId,
        into: OwnedBuffer,
        then: FetchDone,
    ) {
        let peer = &mut self.peers[from.index()];
        match (self.payloads.remove(&payload), peer.endpoint) {
            (Some((_, descriptor, bytes)), Some(endpoint)) => {
                peer.fetching += 1;
                let op = self.worker.fetch(endpoint, descriptor, bytes, into);
                self.note(
                    op,
                    Operation::Fetch {
                        from,
                        then: Some(then),
                    },
                );
            }
            _ => {
                let error = peer
                    .down
                    .as_ref()
                    .map_or(TransportError::Closed, |why| gone(from, why));
                then(Err(error));
            }
        }
    }

    pub(super) fn discard(&mut self, payload: u64) {
        if let Some((_, descriptor, _)) = self.payloads.remove(&payload) {
            self.worker.discard(descriptor);
        }
    }

    /// Handles the end of an operation that UCX has reported.
    pub(super) fn ended(&mut self, op: OpId, result: Result<(), UcxError>, held: Held) {
        let Some(operation) = self.operations.get_mut(op.index()).and_then(Option::take) else {
            return;
        };
        match operation {
            Operation::Send { to, ticket } => {
                self.peers[to.index()].sending -= 1;
                // The payload is dropped before the handler hears of the end.
                drop(held);
                if let Err(error) = &result {
                    self.lost(to, &error.to_string());
                }
                if let Some(ticket) = ticket {
                    let result = result.map_err(|error| self.gone_for(to, &error));
                    self.done(ticket, result);
                }
            }
            Operation::Fetch { from, then } => {
                self.peers[from.index()].fetching -= 1;
                self.answer_goodbye(from);
                let Some(then) = then else { return };
                match (result, held) {
                    (Ok(()), Held::Fetched(buffer)) => then(Ok(buffer)),
                    (Err(error), _) => {
                        let gone = self.gone_for(from, &error);
                        then(Err(gone));
                        self.lost(from, &error.to_string());
                    }
                    // Cannot happen: a successful fetch returns its buffer.
                    (Ok(()), _) => then(Err(TransportError::Closed)),
                }
            }
        }
    }

    fn gone_for(&self, peer: ProcessId, error: &UcxError) -> TransportError {
        match &self.peers[peer.index()].down {
            Some(why) => gone(peer, why),
            None => TransportError::PeerGone {
                peer,
                why: format!("UCX says {error}"),
            },
        }
    }

    /// Treats a peer as gone that may be alive. Sends it a goodbye without waiting for it to
    /// arrive.
    pub(super) fn shut_out(&mut self, peer: ProcessId, why: TransportError) {
        if self.peers[peer.index()].down.is_none() {
            let header = prefix(self.me, self.peers[peer.index()].pass);
            self.send(peer, id::BYE, &header);
        }
        self.down(peer, why, true);
    }

    /// Handles a peer that UCX has lost: marks the peer as gone, because it is dead or cannot be
    /// reached.
    pub(super) fn lost(&mut self, peer: ProcessId, why: &str) {
        if let Some(endpoint) = self.peers[peer.index()].endpoint {
            self.worker.is_done_with(endpoint);
        }
        self.down(
            peer,
            TransportError::PeerGone {
                peer,
                why: format!("UCX says {why}"),
            },
            true,
        );
    }

    /// Marks a peer as gone: fails all operations with it, then tells the handler. With `by_force`,
    /// closes its endpoint at once. Only the first call for a peer counts.
    pub(super) fn down(&mut self, peer: ProcessId, why: TransportError, by_force: bool) {
        let state = &mut self.peers[peer.index()];
        let endpoint = state.endpoint;
        if let (true, Some(endpoint)) = (by_force, endpoint) {
            self.worker.close(endpoint, true);
        }
        let state = &mut self.peers[peer.index()];
        if state.down.is_some() {
            return;
        }
        state.down = Some(why.clone());
        let of_peer = self
            .payloads
            .iter()
            .filter(|(_, (from, ..))| *from == peer)
            .map(|(id, _)| *id);
        for payload in of_peer.collect::<Vec<_>>() {
            self.discard(payload);
        }
        self.end_operations(|whose| whose == peer, &gone(peer, &why));
        if self.leaving.is_none() {
            self.say(Said::Down(peer, why));
            if by_force {
                self.begin_roll_call(peer);
            }
        }
    }

    /// Fails all operations with the peers for which `of` is true. UCX keeps their memory until it
    /// has ended them too.
    pub(super) fn end_operations(
        &mut self,
        of: impl Fn(ProcessId) -> bool,
        error: &TransportError,
    ) {
        let (mut tickets, mut fetches) = (Vec::new(), Vec::new());
        for operation in self.operations.iter_mut().flatten() {
            match operation {
                Operation::Send { to, ticket } if of(*to) => tickets.extend(ticket.take()),
                Operation::Fetch { from, then } if of(*from) => fetches.extend(then.take()),
                _ => {}
            }
        }
        for ticket in tickets {
            self.done(ticket, Err(error.clone()));
        }
        for then in fetches {
            then(Err(error.clone()));
        }
    }
}

/// Returns the sender's id and the pass: the first bytes of every message after the handshake.
pub(super) fn prefix(me: ProcessId, pass: Option<u32>) -> [u8; PREFIX_BYTES] {
    let mut bytes = [0; PREFIX_BYTES];
    bytes[..4].copy_from_slice(&me.0.to_le_bytes());
    bytes[4..].copy_from_slice(&pass.unwrap_or_default().to_le_bytes());
    bytes
}

/// Returns the error for an operation with `peer`, which is gone for the reason `why`.
fn gone(peer: ProcessId, why: &TransportError) -> TransportError {
    match why {
        TransportError::PeerGone { .. } => why.clone(),
        other => TransportError::PeerGone {
            peer,
            why: other.to_string(),
        },
    }
}
