//! The delivery thread of an endpoint, which calls its handler.

use std::sync::Arc;

use mpmd_base::block::{note, thread};

use crate::transport::{Fetch, FetchDone, Handler, Payload, TransportError};
use mpmd_memory::{DevicePlace, Loan, OwnedBuffer, SharedBuffer};
use mpmd_proto::wire::{Header, MessageKind, ProcessId};

use super::fabric::{Core, DeliveryEvent};

/// Largest data payload, in bytes, that is delivered inline, as control payloads are. A larger
/// payload stays with the sender until the receiver fetches it.
const INLINE_BYTES: u64 = 16 << 10;

/// Starts the delivery thread of `process`, which calls `handler`. Panics if the thread was started
/// before, or if the process was shut down.
pub(super) fn start(core: &Arc<Core>, process: ProcessId, handler: Arc<dyn Handler>) {
    assert!(
        core.begin(process),
        "process {process} is started a second time, or after its shutdown"
    );
    let core = core.clone();
    thread::Builder::new()
        .name(format!("mpmd-inproc-{process}"))
        .spawn(move || {
            DeliveryLoop {
                core,
                process,
                handler: Some(handler),
            }
            .run()
        })
        .expect("the system gives a thread for deliveries");
}

/// The state of a running delivery thread.
struct DeliveryLoop {
    core: Arc<Core>,
    process: ProcessId,
    /// The handler that the thread calls; `None` only while the thread ends.
    handler: Option<Arc<dyn Handler>>,
}

impl DeliveryLoop {
    /// Calls the handler for each event until the thread must stop.
    fn run(self) {
        self.core.introduce(self.process);
        while let (Some(handler), Some(event)) = (&self.handler, self.core.next(self.process)) {
            match event {
                DeliveryEvent::Arrival {
                    from,
                    message,
                    header,
                } => {
                    let me = self.process;
                    let Header {
                        kind, op, piece, ..
                    } = header;
                    note(format_args!(
                        "{me} gets from {from}: {kind:?} {op}, piece {piece}"
                    ));
                    self.arrival(handler.as_ref(), from, message, header)
                }
                DeliveryEvent::Copy {
                    from,
                    message,
                    into,
                    then,
                } => copy(&self.core, from, message, into, then),
                DeliveryEvent::Done(ticket, result) => handler.done(ticket, result),
                DeliveryEvent::Down(peer, why) => handler.peer_down(peer, why),
            }
        }
    }

    /// Passes a message that has arrived to the handler.
    fn arrival(&self, handler: &dyn Handler, from: ProcessId, message: u64, header: Header) {
        if header.kind == MessageKind::Data && self.core.zero_copy(from, self.process) {
            return self.lend(handler, from, message, header);
        }

        if header.kind == MessageKind::Data && header.bytes > INLINE_BYTES {
            let waiting = UncopiedPayload {
                core: self.core.clone(),
                on: self.process,
                from,
                message: Some(message),
                bytes: header.bytes,
            };
            handler.arrived(from, header, Payload::Waiting(Box::new(waiting)));
            return;
        }

        // An error means that the sender was killed just now: its message is lost.
        let Ok(payload) = self.core.deliver(from, message) else {
            return;
        };

        let payload = payload
            .filter(|bytes| !bytes.is_empty())
            .map_or(Payload::Empty, Payload::Inline);
        handler.arrived(from, header, payload);
        self.core.end(from, message);
    }

    /// Passes a message to the handler. Its payload stays in the sender's memory, on loan.
    fn lend(&self, handler: &dyn Handler, from: ProcessId, message: u64, header: Header) {
        let Ok(payload) = self.core.deliver(from, message) else {
            return;
        };
        let is_empty = payload.as_ref().is_none_or(SharedBuffer::is_empty);

        // The fences are shared with the sender, since all are in one process.
        let ready = payload
            .as_ref()
            .map(|payload| payload.ready().clone())
            .unwrap_or_default();
        let verdict = payload.as_ref().and_then(SharedBuffer::verdict);

        let loan = InprocLoan {
            core: self.core.clone(),
            from,
            message,
            payload,
        };

        let payload = SharedBuffer::lent_later(Box::new(loan), ready);
        let payload = match verdict {
            Some(verdict) => payload.with_verdict(verdict),
            None => payload,
        };
        // An empty payload is not lent: the message ends here.
        handler.arrived(
            from,
            header,
            if is_empty {
                Payload::Empty
            } else {
                Payload::Lent(payload)
            },
        );
        self.core.kept(from, message);
    }
}

impl Drop for DeliveryLoop {
    fn drop(&mut self) {
        if thread::panicking() {
            // The handler panicked: for the others this process has vanished.
            self.core.kill(self.process);
        }
        // The handler is dropped first: a thread that sees this one end must find the handler
        // dropped.
        self.handler = None;
        self.core.ended(self.process);
    }
}

/// A payload lent to the receiver: its bytes stay in the sender's memory. Dropping this returns the
/// loan, and reports to the sender that the message was sent.
struct InprocLoan {
    core: Arc<Core>,
    from: ProcessId,
    message: u64,
    /// The sender's payload. This second reference keeps the memory valid even if the sender is
    /// gone.
    payload: Option<SharedBuffer>,
}

impl Loan for InprocLoan {
    fn bytes(&self) -> &[u8] {
        self.payload
            .as_ref()
            .filter(|payload| payload.device().is_none())
            .map_or(&[], |payload| payload)
    }

    fn device(&self) -> Option<DevicePlace> {
        self.payload.as_ref()?.device()
    }
}

impl Drop for InprocLoan {
    fn drop(&mut self) {
        // The payload is dropped first: a sender that hears of the end may rely on being the only
        // holder.
        self.payload = None;
        self.core.end(self.from, self.message);
    }
}

/// A payload that has not been copied from its sender's memory yet. Dropping this without a fetch
/// discards the payload, and reports to the sender that the message was sent.
struct UncopiedPayload {
    core: Arc<Core>,
    on: ProcessId,
    from: ProcessId,
    /// The message's number; `None` once the payload is fetched.
    message: Option<u64>,
    bytes: u64,
}

impl Fetch for UncopiedPayload {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fetch(mut self: Box<Self>, into: OwnedBuffer, then: FetchDone) {
        assert_eq!(
            into.len() as u64,
            self.bytes,
            "a payload is fetched into a buffer of its length"
        );
        let Some(message) = self.message.take() else {
            return;
        };

        let event = DeliveryEvent::Copy {
            from: self.from,
            message,
            into,
            then,
        };
        if let Err(DeliveryEvent::Copy { then, .. }) = self.core.copy_later(self.on, event) {
            // The delivery thread has ended, so the callback runs here.
            self.core.end(self.from, message);
            then(Err(TransportError::Closed));
        }
    }
}

impl Drop for UncopiedPayload {
    fn drop(&mut self) {
        if let Some(message) = self.message {
            self.core.end(self.from, message);
        }
    }
}

/// Copies a payload into the buffer `into`, ends its message, and calls `then` with the result.
fn copy(core: &Core, from: ProcessId, message: u64, mut into: OwnedBuffer, then: FetchDone) {
    let copied = core.payload_of(from, message).map(|payload| {
        if let Some(payload) = payload {
            into.copy_from_slice(&payload);
        }
        into
    });
    core.end(from, message);
    then(copied);
}
