//! Connects the router with the transport: carries out the actions that the router asks for.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use mpmd_base::ProcessId;
use mpmd_memory::SharedBuffer;
use mpmd_proto::router::{Body, OpRecord, OpSpan, Router, RouterAction};
use mpmd_proto::{Header, MessageKind};
use mpmd_transport::{Handler, Payload, Ticket, TransportError};

use crate::exec::waits::under_way::{EndedSend, HandedOver, Sending};
use crate::exec::{InProcess, OpGuard, Outgoing, Runtime};
use mpmd_record::trace::{PieceStep, TraceEventKind};

/// The handler that the transport calls. Holds the runtime weakly, because a transport may outlive
/// the runtime.
pub(crate) struct TransportHandler(pub(crate) Weak<Runtime>);

// invariant: one-way-in
impl Handler for TransportHandler {
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload) {
        let Some(runtime) = self.0.upgrade() else {
            return;
        };
        let now = runtime.now();
        let announced = header.payload_bytes();
        let found = payload.bytes();
        if found != announced {
            let sent = format!("a {:?} message of {found} bytes", header.kind);
            let why = format!("it sent {sent}, and announced {announced}");
            return runtime.with_router(|router| router.broken(from, &why));
        }

        match header.kind {
            MessageKind::Batch => return runtime.take_batch(from, &payload),
            MessageKind::Eager | MessageKind::Data => {
                return runtime.take_pieces(from, [(header, payload)]);
            }
            _ => {}
        }
        // Control messages are read here.
        runtime.with_router(|router| match payload {
            Payload::Inline(bytes) | Payload::Lent(bytes) if bytes.device().is_none() => {
                router.arrived(from, header, Payload::Empty, &bytes, now);
            }
            _ => router.arrived(from, header, Payload::Empty, &[], now),
        });
    }

    fn done(&self, ticket: Ticket, result: Result<(), TransportError>) {
        let Some(runtime) = self.0.upgrade() else {
            return;
        };
        let bundle = runtime.under_way.lock().take_bundle(ticket);
        match bundle {
            Some(tickets) => tickets
                .into_iter()
                .for_each(|ticket| runtime.done(ticket, &result)),
            None => runtime.done(ticket, &result),
        }
    }

    fn peer_down(&self, peer: ProcessId, why: TransportError) {
        // The transport also reports the end of each transfer that was under way.
        if let Some(runtime) = self.0.upgrade() {
            runtime.with_router(|router| router.peer_down(peer, &reason(&why)));
        }
    }
}

impl Runtime {
    /// Passes pieces from a peer to the router. All payloads are passed as they are, also small
    /// ones that are already in memory.
    pub(crate) fn take_pieces(
        self: &Arc<Self>,
        from: ProcessId,
        pieces: impl IntoIterator<Item = (Header, Payload)>,
    ) {
        let now = self.now();
        self.with_router(|router| {
            for (header, payload) in pieces {
                let Header {
                    op, piece, bytes, ..
                } = header;
                self.trace_piece(PieceStep::Arrived, (op, piece), from, bytes);
                router.arrived(from, header, payload, &[], now);
            }
        });
    }

    /// Ends the send of a piece: the transport no longer uses its bytes.
    fn done(self: &Arc<Self>, ticket: Ticket, result: &Result<(), TransportError>) {
        self.trace
            .note(|| TraceEventKind::Left { ticket: ticket.0 });
        let EndedSend { loan, sending } = self.under_way.lock().sent(ticket);
        drop(loan);
        match (sending, result) {
            (None, _) => {}
            (Some(Sending { operation, .. }), Ok(())) => operation.sent(),
            // The loss of the peer is reported separately.
            (Some(Sending { to, operation }), Err(error)) => {
                operation.fail_sends(&self.broken_off(to, operation.op(), error));
            }
        }
    }

    /// Locks the router and runs `call` on it. Then, without the lock, carries out the actions that
    /// the router requests. Returns the result of `call`.
    pub(crate) fn with_router<R>(
        self: &Arc<Self>,
        call: impl FnOnce(&mut Router<InProcess>) -> R,
    ) -> R {
        let mut router = self.router.lock();
        let result = call(&mut router);
        if router.has_actions() {
            let actions = router.take_actions();
            drop(router);
            self.act(actions);
        }
        result
    }

    /// Tells the router of an operation that this process issues.
    pub(crate) fn issue(self: &Arc<Self>, record: OpRecord) {
        self.with_router(|router| router.issue(record, || self.now()));
    }

    /// Tells the router of all operations of a replayed step up to `op`, which this process issues.
    pub(crate) fn issue_span(self: &Arc<Self>, op: u64, span: &Arc<dyn OpSpan>) {
        self.with_router(|router| router.issue_span(op, span, || self.now()));
    }

    fn act(self: &Arc<Self>, actions: Vec<RouterAction<InProcess>>) {
        for action in actions {
            match action {
                RouterAction::Post { to, header, body } => self.post(to, header, body),
                RouterAction::Deliver { waiter, result } => self.deliver(waiter, result),
                RouterAction::Answer { to, op, piece } => {
                    let doing = self.doing();
                    let running = self.status.lowest();
                    self.with_router(|router| router.answer(to, op, piece, doing, running));
                }
                RouterAction::Taken { by, op } => {
                    let ended = self.under_way.lock().taken(by, op);
                    ended.into_iter().for_each(OpGuard::sent);
                }
                RouterAction::NeverTaken { by } => {
                    let ended = self.under_way.lock().never_taken(by);
                    ended
                        .into_iter()
                        .for_each(|operation| self.never_taken(by, operation));
                }
                RouterAction::Discard {
                    to,
                    cargo: Outgoing { buffer, guard, .. },
                } => {
                    drop(buffer);
                    self.never_taken(to, guard);
                }
                // The wait may depend on a device of this very process, by way of others.
                RouterAction::HangReport(text) => {
                    self.report_hang(&format!("{text}\n  process {}: {}", self.me, self.doing()));
                }
                RouterAction::PeerLost(failure) => {
                    // Devices that wait for the peer's devices would wait forever.
                    self.communicators.give_up(&failure);
                    self.trouble.lock().lost.get_or_insert(failure);
                    self.changed.notify_all();
                }
                RouterAction::GiveUp { peer, why } => self.give_up(peer, &why),
                RouterAction::Failed(failure) => {
                    self.communicators.give_up(&failure);
                    self.remember(&failure);
                }
            }
        }
        self.changed.notify_all();
    }

    fn post(self: &Arc<Self>, to: ProcessId, header: Header, body: Body<Outgoing>) {
        let Some(transport) = &self.transport else {
            return;
        };
        match body {
            Body::Empty => transport.post(to, header, None, Ticket::NONE),
            Body::Control(bytes) => transport.post(to, header, Some(bytes.into()), Ticket::NONE),
            Body::Cargo(piece) if self.zero_copy(to) => self.post_lent(to, header, piece),
            Body::Cargo(piece) => self.post_bytes(to, header, piece),
        }
    }

    /// Posts a piece whose memory the peer borrows. The operation stays in flight until the peer
    /// has taken the piece.
    fn post_lent(self: &Arc<Self>, to: ProcessId, header: Header, piece: Outgoing) {
        let Outgoing {
            buffer,
            bytes,
            guard,
        } = piece;
        let loan = self.in_flight.lend(buffer.len() as u64);
        let sending = self.under_way.lock().hand_over(to, header.op, loan, guard);
        let lent = match sending {
            Ok(lent) => lent,
            Err(refused) => {
                drop((buffer, refused.loan));
                return self.never_taken(to, refused.operation);
            }
        };

        self.post_counted(to, header, buffer, bytes, lent.ticket);
        match lent.state {
            HandedOver::Untaken => {}
            HandedOver::Awaited => {
                self.with_router(|router| router.ask_taken(to, header.op));
            }
            HandedOver::Taken(operation) => operation.sent(),
        }
    }

    /// Posts a piece that the transport sends as bytes. The operation stays in flight until the
    /// bytes have left.
    fn post_bytes(self: &Arc<Self>, to: ProcessId, header: Header, piece: Outgoing) {
        let Outgoing {
            buffer,
            bytes,
            guard,
        } = piece;
        let sending = self.under_way.lock().send(to, guard);
        // If nothing is sent, the memory is dropped first: threads that wait for memory check it
        // when operations end.
        let ticket = match sending {
            Ok(ticket) => ticket,
            Err(guard) => {
                drop(buffer);
                return self.never_taken(to, guard);
            }
        };
        self.post_counted(to, header, buffer, bytes, ticket);
    }

    /// Counts a piece as sent, writes it to the trace and the log, and posts it.
    fn post_counted(
        &self,
        to: ProcessId,
        header: Header,
        buffer: SharedBuffer,
        bytes: u64,
        ticket: Ticket,
    ) {
        self.bytes_sent[to.index()].fetch_add(bytes, Ordering::Relaxed);
        let Header { op, piece, .. } = header;
        let step = PieceStep::Posted;
        self.trace.note(|| TraceEventKind::Piece {
            step,
            op,
            piece,
            peer: to.0,
            bytes,
            ticket: ticket.0,
        });
        self.log_piece(step, (op, piece), to, bytes);

        let payload = (!buffer.is_empty()).then_some(buffer);
        self.post_piece(to, header, payload, ticket);
    }
}

/// Returns the text of a transport error without the name of the peer process, which the router
/// adds.
pub(crate) fn reason(error: &TransportError) -> String {
    match error {
        TransportError::PeerGone { why, .. } => why.clone(),
        other => other.to_string(),
    }
}
