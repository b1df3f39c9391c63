//! The state of the engine, on which its parts work: `meeting.rs`, `traffic.rs`, `roll_call.rs` and
//! `leaving.rs`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use mpmd_base::block::{PollGap, SpinPolicy};

use super::UcxConfig;
use super::queue::{CommandQueue, ConnectedPeers};
use super::result::SendProtocol;
use super::safe::{Descriptor, EndpointId, OpId, UcxWorker};
use crate::party::Party;
use crate::transport::{FetchDone, Handler, Payload, Ticket, TransportError};
use mpmd_handshake::Handshake;
use mpmd_proto::wire::{Header, ProcessId};

/// Ids of the kinds of messages.
pub(super) mod id {
    /// Id of a part of a handshake, which is the payload. The header is the id that the sender
    /// claims.
    pub(in super::super) const MEET: u32 = 1;
    /// Id of a message for the handler. The header is the sender's id, the pass that the receiver
    /// expects and a `Header` of this library; the payload is that header's.
    pub(in super::super) const MESSAGE: u32 = 2;
    /// Id of a goodbye: the sender neither receives nor sends messages any more. The header is the
    /// sender's id and the pass that the receiver expects.
    pub(in super::super) const BYE: u32 = 3;
    /// Id of the answer to a goodbye: the sender no longer reads the memory of the leaving process.
    /// Header as for `BYE`.
    pub(in super::super) const HEARD: u32 = 4;
    /// Id of a ping, which asks for an answer. Header as for `BYE`.
    pub(in super::super) const PING: u32 = 5;
    /// Id of the answer to a ping. Header as for `BYE`.
    pub(in super::super) const PONG: u32 = 6;
    pub(in super::super) const ALL: [u32; 6] = [MEET, MESSAGE, BYE, HEARD, PING, PONG];
}

/// A peer and the state of its connection.
pub(super) struct UcxPeer {
    pub(super) endpoint: Option<EndpointId>,
    /// True if the peer's UCX can move memory of CUDA devices.
    pub(super) moves_cuda: bool,
    /// This process's end of the handshake with the peer.
    pub(super) handshake: Option<Handshake>,
    /// The pass (a secret number) that the peer must send with each message; known from the
    /// handshake.
    pub(super) expected: Option<u32>,
    /// The pass that the peer expects with each message.
    pub(super) pass: Option<u32>,
    /// The reason why the peer is gone; `None` until then.
    pub(super) down: Option<TransportError>,
    /// Number of messages in flight to the peer.
    pub(super) sending: usize,
    /// Number of payloads being fetched from the peer.
    pub(super) fetching: usize,
    /// True once the peer has said goodbye.
    pub(super) heard_bye: bool,
    /// True once this process has answered the peer's goodbye.
    pub(super) answered: bool,
    /// True once the peer has answered this process's goodbye.
    pub(super) has_heard: bool,
    /// True if the peer has answered since the last death of another peer, or if no peer has died.
    pub(super) in_reach: bool,
}

/// The state of the engine's thread, which owns every object of UCX.
pub(super) struct UcxEngine {
    pub(super) worker: UcxWorker,
    /// True if UCX of this process can move memory of CUDA devices.
    pub(super) moves_cuda: bool,
    pub(super) queue: Arc<CommandQueue>,
    pub(super) me: ProcessId,
    /// The peers by process. This process's own entry is not used.
    pub(super) peers: Vec<UcxPeer>,
    /// The peer process of each endpoint.
    pub(super) processes: HashMap<EndpointId, ProcessId>,
    /// Operations that UCX has not ended yet, by id.
    pub(super) operations: Vec<Option<PendingOperation>>,
    /// Payloads that still lie with their senders, by number.
    pub(super) payloads: HashMap<u64, UnfetchedPayload>,
    pub(super) next_payload: u64,
    pub(super) handler: Option<Arc<dyn Handler>>,
    /// Messages that were posted in this turn and are not sent yet.
    pub(super) stored: Vec<StoredMessage>,
    /// Calls for the handler from before a handler was set.
    pub(super) early: Vec<HandlerCall>,
    pub(super) leaving: Option<UcxLeaving>,
    pub(super) roll_call: Option<RollCall>,
    pub(super) meeting: Option<UcxMeeting>,
    /// Hellos that arrived before this process started to connect.
    pub(super) hellos: Vec<EarlyHello>,
    pub(super) policy: SpinPolicy,
    /// The time since the last work, if the last poll found nothing.
    pub(super) gap: Option<PollGap>,
}

/// A received payload that lies with its sender.
pub(super) struct UnfetchedPayload {
    pub(super) from: ProcessId,
    pub(super) descriptor: Descriptor,
    /// Length of the payload in bytes.
    pub(super) bytes: usize,
}

/// A hello that arrived before this process started to connect.
pub(super) struct EarlyHello {
    pub(super) from: ProcessId,
    pub(super) bytes: Vec<u8>,
}

/// The purpose of an operation of UCX.
pub(super) enum PendingOperation {
    Send {
        to: ProcessId,
        ticket: Option<Ticket>,
    },
    Fetch {
        from: ProcessId,
        then: Option<FetchDone>,
    },
}

impl PendingOperation {
    /// Takes the callback of a fetch; `None` for a send, or if it was taken before.
    pub(super) fn take_fetch(&mut self) -> Option<FetchDone> {
        match self {
            Self::Fetch { then, .. } => then.take(),
            Self::Send { .. } => None,
        }
    }
}

/// A posted message that is stored and not sent yet.
pub(super) struct StoredMessage {
    pub(super) to: ProcessId,
    pub(super) op: OpId,
    pub(super) way: SendProtocol,
    pub(super) ticket: Ticket,
}

/// A call to the handler.
pub(super) enum HandlerCall {
    Arrived(ProcessId, Header, Payload),
    Done(Ticket, Result<(), TransportError>),
    Down(ProcessId, TransportError),
}

/// The state of connecting, until the handshakes with all peers are done.
pub(super) struct UcxMeeting {
    pub(super) config: UcxConfig,
    pub(super) party: Party,
    pub(super) reply: Sender<Result<ConnectedPeers, TransportError>>,
    pub(super) until: Instant,
    pub(super) failed: Option<TransportError>,
}

/// A roll call in progress, after the death of the peer `dead`.
pub(super) struct RollCall {
    pub(super) dead: ProcessId,
    pub(super) until: Instant,
}

/// The progress of a shutdown.
pub(super) struct UcxLeaving {
    /// Deadline for pending operations.
    pub(super) until: Instant,
    /// Deadline for the answers of peers; set once goodbye was sent.
    pub(super) goodbye: Option<Instant>,
    /// Deadline for closing the endpoints; set once they are being closed.
    pub(super) closing: Option<Instant>,
    pub(super) closed: Option<Sender<()>>,
}
