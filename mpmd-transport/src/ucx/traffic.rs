//! Sends and receives messages, and ends the operations with a peer that is gone.

use std::sync::Arc;

use super::queue::RemotePayload;
use super::result::{SendProtocol, UcxError};
use super::safe::{MessageBody, OpId, OperationMemory, SendOutcome};
use super::state::{HandlerCall, PendingOperation, StoredMessage, UcxEngine, UnfetchedPayload, id};
use crate::transport::{FetchDone, Handler, Payload, Ticket, TransportError};
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::wire::{HEADER_BYTES, Header, MessageKind, ProcessId, WireError};

/// Smallest data payload, in bytes, that stays in the sender's memory until the receiver fetches
/// it. For a smaller payload, the extra round trip costs more than a copy.
const RENDEZVOUS_BYTES: usize = 8 << 10;

/// Length in bytes of the prefix of a message's header: the sender's id and the pass.
pub(super) const PREFIX_BYTES: usize = 8;

/// The fault of a message that contradicts its header. The peer that sent it is at fault.
#[derive(Debug, thiserror::Error)]
enum HeaderFault {
    #[error("a header of {bytes} bytes")]
    Length { bytes: usize },
    #[error(transparent)]
    Header(#[from] WireError),
    #[error("a header that announces {announced} bytes with {bytes}")]
    Payload { announced: u64, bytes: u64 },
}

impl UcxEngine {
    /// Sets the handler, and makes the calls that were waiting for it.
    pub(super) fn start_handler(&mut self, handler: Arc<dyn Handler>) {
        self.handler = Some(handler);
        for said in std::mem::take(&mut self.early) {
            self.say(said);
        }
    }

    /// Makes a call to the handler, or keeps the call until a handler is set.
    fn say(&mut self, said: HandlerCall) {
        let Some(handler) = &self.handler else {
            self.early.push(said);
            return;
        };
        match said {
            HandlerCall::Arrived(from, header, payload) => handler.arrived(from, header, payload),
            HandlerCall::Done(ticket, result) => handler.done(ticket, result),
            HandlerCall::Down(peer, why) => handler.peer_down(peer, why),
        }
    }

    fn done(&mut self, ticket: Ticket, result: Result<(), TransportError>) {
        if ticket != Ticket::NONE {
            self.say(HandlerCall::Done(ticket, result));
        }
    }

    /// Stores a message, to be sent by the next [`UcxEngine::send_stored`].
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
        let bulk = header.kind == MessageKind::Data
            && payload
                .as_ref()
                .is_some_and(|payload| payload.len() >= RENDEZVOUS_BYTES);
        let way = if bulk {
            SendProtocol::Rendezvous
        } else {
            SendProtocol::Eager
        };

        match peer.endpoint {
            Some(endpoint) => {
                let op = self.worker.store(endpoint, &bytes, payload);
                self.stored.push(StoredMessage {
                    to,
                    op,
                    way,
                    ticket,
                });
            }
            None => self.done(ticket, Err(TransportError::Closed)),
        }
    }

    /// Sends the stored messages one right after the other, then reports those that are sent
    /// already.
    ///
    /// The receiver's core reads the memory that a send writes, so such a write takes long to
    /// complete. The processor hides that time only if nothing reads recently written memory in
    /// between. So headers are stored before the first send, and payloads are dropped after the
    /// last.
    pub(super) fn send_stored(&mut self) {
        if self.stored.is_empty() {
            return;
        }

        let mut stored = std::mem::take(&mut self.stored);
        stored.retain(|message| {
            match self.worker.send(message.op, id::MESSAGE, message.way) {
                SendOutcome::Gone => return true,
                SendOutcome::UnderWay => {
                    self.note_send(message.to, message.op, Some(message.ticket));
                }
                SendOutcome::Closed => {
                    drop(self.worker.take_back(message.op));
                    self.done(message.ticket, Err(TransportError::Closed));
                }
            }
            false
        });

        for StoredMessage { op, ticket, .. } in stored.drain(..) {
            // The payload is dropped before the handler hears of the end.
            drop(self.worker.take_back(op));
            self.done(ticket, Ok(()));
        }
        self.stored = stored;
    }

    /// Sends a message without a payload that the engine itself makes, such as a ping.
    pub(super) fn send(&mut self, to: ProcessId, id: u32, header: &[u8]) {
        self.send_with(to, id, header, None);
    }

    /// Sends a message with a small payload that the engine itself makes, such as a handshake
    /// message.
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
        match self.worker.send(op, id, SendProtocol::Eager) {
            SendOutcome::UnderWay => self.note_send(to, op, None),
            SendOutcome::Gone | SendOutcome::Closed => drop(self.worker.take_back(op)),
        }
    }

    fn note_send(&mut self, to: ProcessId, op: OpId, ticket: Option<Ticket>) {
        self.peers[to.index()].sending += 1;
        self.note(op, PendingOperation::Send { to, ticket });
    }

    /// Records the purpose of an operation that has been started.
    fn note(&mut self, op: OpId, operation: PendingOperation) {
        let number = op.index();
        if self.operations.len() <= number {
            self.operations.resize_with(number + 1, || None);
        }
        self.operations[number] = Some(operation);
    }

    /// Handles a received message other than a handshake message. Drops a message with a wrong
    /// pass.
    pub(super) fn arrived(&mut self, id: u32, header: &[u8], body: MessageBody) {
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

    /// Returns the sender of a message. Returns `None` unless the sender is a connected peer and
    /// the message contains the peer's pass (a secret number).
    fn sender(&self, header: &[u8]) -> Option<ProcessId> {
        let from = u32::from_le_bytes(header.get(..4)?.try_into().ok()?);
        let pass = u32::from_le_bytes(header.get(4..PREFIX_BYTES)?.try_into().ok()?);
        let peer = self.peers.get(from as usize)?;
        (peer.endpoint.is_some() && peer.expected == Some(pass)).then_some(ProcessId(from))
    }

    /// Passes a message from the peer `from` to the handler.
    fn deliver(&mut self, from: ProcessId, header: &[u8], body: MessageBody) {
        if self.peers[from.index()].down.is_some()
            || self.leaving.as_ref().is_some_and(|l| l.is_deaf())
        {
            return self.throw_away(body);
        }

        let header = match self.read(header, &body) {
            Ok(header) => header,
            Err(why) => {
                self.throw_away(body);
                let why = why.to_string();
                return self.shut_out(from, TransportError::Protocol { peer: from, why });
            }
        };

        let payload = match body {
            body if header.payload_bytes() == 0 => {
                self.throw_away(body);
                Payload::Empty
            }
            MessageBody::Empty => Payload::Empty,
            MessageBody::Here(bytes) => Payload::Inline(bytes),
            MessageBody::There(descriptor, bytes) => {
                let payload = self.next_payload;
                self.next_payload += 1;
                self.payloads.insert(
                    payload,
                    UnfetchedPayload {
                        from,
                        descriptor,
                        bytes,
                    },
                );
                Payload::Waiting(Box::new(RemotePayload {
                    queue: self.queue.clone(),
                    payload,
                    from,
                    bytes: bytes as u64,
                    taken: false,
                }))
            }
        };
        self.say(HandlerCall::Arrived(from, header, payload));
    }

    /// Decodes a header, and checks that it fits the payload.
    fn read(&self, header: &[u8], body: &MessageBody) -> Result<Header, HeaderFault> {
        let header: &[u8; HEADER_BYTES] = header.try_into().map_err(|_| HeaderFault::Length {
            bytes: header.len(),
        })?;
        let header = Header::decode(header)?;

        let bytes = match body {
            MessageBody::Empty => 0,
            MessageBody::Here(bytes) => bytes.len() as u64,
            MessageBody::There(_, bytes) => *bytes as u64,
        };
        if bytes != header.payload_bytes() {
            return Err(HeaderFault::Payload {
                announced: header.payload_bytes(),
                bytes,
            });
        }
        Ok(header)
    }

    /// Discards a payload.
    pub(super) fn throw_away(&mut self, body: MessageBody) {
        if let MessageBody::There(descriptor, _) = body {
            self.worker.discard(descriptor);
        }
    }

    /// Fetches a payload from its sender's memory into the buffer `into`. `then` gets the result.
    pub(super) fn fetch(
        &mut self,
        payload: u64,
        from: ProcessId,
        into: OwnedBuffer,
        then: FetchDone,
    ) {
        let peer = &mut self.peers[from.index()];

        match (self.payloads.remove(&payload), peer.endpoint) {
            (Some(payload), Some(endpoint)) => {
                peer.fetching += 1;
                let op = self
                    .worker
                    .fetch(endpoint, payload.descriptor, payload.bytes, into);
                self.note(
                    op,
                    PendingOperation::Fetch {
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
        if let Some(payload) = self.payloads.remove(&payload) {
            self.worker.discard(payload.descriptor);
        }
    }

    /// Handles the end of an operation that UCX has reported.
    pub(super) fn ended(&mut self, op: OpId, result: Result<(), UcxError>, held: OperationMemory) {
        let Some(operation) = self.operations.get_mut(op.index()).and_then(Option::take) else {
            return;
        };

        match operation {
            PendingOperation::Send { to, ticket } => {
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
            PendingOperation::Fetch { from, then } => {
                self.peers[from.index()].fetching -= 1;
                self.answer_goodbye(from);
                let Some(then) = then else { return };
                match (result, held) {
                    (Ok(()), OperationMemory::Fetched(buffer)) => then(Ok(buffer)),
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

    /// Returns the error of an operation with `peer` that UCX has ended with `error`.
    fn gone_for(&self, peer: ProcessId, error: &UcxError) -> TransportError {
        match &self.peers[peer.index()].down {
            Some(why) => gone(peer, why),
            None => TransportError::PeerGone {
                peer,
                why: format!("UCX says {error}"),
            },
        }
    }

    /// Marks a peer that may still be alive as gone, and sends it a goodbye. Does not wait until
    /// the goodbye arrives.
    pub(super) fn shut_out(&mut self, peer: ProcessId, why: TransportError) {
        if self.peers[peer.index()].down.is_none() {
            let header = prefix(self.me, self.peers[peer.index()].pass);
            self.send(peer, id::BYE, &header);
        }
        self.down(peer, why, true);
    }

    /// Marks a peer as gone after UCX has lost it: the peer has died or cannot be reached.
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
    /// closes its endpoint at once. Later calls for the same peer do nothing.
    pub(super) fn down(&mut self, peer: ProcessId, why: TransportError, by_force: bool) {
        if by_force && let Some(endpoint) = self.peers[peer.index()].endpoint {
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
            .filter(|(_, payload)| payload.from == peer)
            .map(|(id, _)| *id);
        for payload in of_peer.collect::<Vec<_>>() {
            self.discard(payload);
        }
        self.end_operations(|whose| whose == peer, &gone(peer, &why));

        if self.leaving.is_none() {
            self.say(HandlerCall::Down(peer, why));
            if by_force {
                self.begin_roll_call(peer);
            }
        }
    }

    /// Fails all operations with the peers for which `of` returns true. UCX keeps the memory of
    /// these operations until it has ended them too.
    pub(super) fn end_operations(
        &mut self,
        of: impl Fn(ProcessId) -> bool,
        error: &TransportError,
    ) {
        let mut tickets = Vec::new();
        let mut fetches = Vec::new();
        for operation in self.operations.iter_mut().flatten() {
            match operation {
                PendingOperation::Send { to, ticket } if of(*to) => tickets.extend(ticket.take()),
                PendingOperation::Fetch { from, then } if of(*from) => fetches.extend(then.take()),
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

/// Returns the prefix of every message's header after the handshake: the sender's id and the pass.
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
