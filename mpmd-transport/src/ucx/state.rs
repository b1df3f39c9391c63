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

/// The ids by which UCX messages of this transport are told apart.
pub(super) mod id {
    /// Id of a handshake message, which is the payload. The header is the process id that the
    /// sender claims.
    pub(in super::super) const MEET: u32 = 1;
    /// Id of a message for the handler. The header is the sender's id, the pass that the receiver
    /// expects and an encoded [`Header`](mpmd_proto::wire::Header). The payload belongs to that
    /// header.
    pub(in super::super) const MESSAGE: u32 = 2;
    /// Id of a goodbye: the sender stops receiving and sending messages. The header is the sender's
    /// id and the pass that the receiver expects.
    pub(in super::super) const BYE: u32 = 3;
    /// Id of the answer to a goodbye: the sender no longer reads the memory of the process that
    /// leaves. The header is as for `BYE`.
    pub(in super::super) const HEARD: u32 = 4;
    /// Id of a ping, which the receiver must answer. The header is as for `BYE`.
    pub(in super::super) const PING: u32 = 5;
    /// Id of the answer to a ping. The header is as for `BYE`.
    pub(in super::super) const PONG: u32 = 6;
    pub(in super::super) const ALL: [u32; 6] = [MEET, MESSAGE, BYE, HEARD, PING, PONG];
}

/// A peer and the state of its connection.
pub(super) struct UcxPeer {
    pub(super) endpoint: Option<EndpointId>,
    /// True if the peer's UCX can move memory of CUDA devices.
    pub(super) moves_cuda: bool,
    /// This process's state of the handshake with the peer; `None` if there is no handshake.
    pub(super) handshake: Option<Handshake>,
    /// The pass: a secret number that the peer must send with each message. `None` until the
    /// handshake is complete.
    pub(super) expected: Option<u32>,
    /// The pass that this process must send to the peer with each message.
    pub(super) pass: Option<u32>,
    /// The reason why the peer is gone; `None` while it is not.
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
    /// True if this process's UCX can move memory of CUDA devices.
    pub(super) moves_cuda: bool,
    pub(super) queue: Arc<CommandQueue>,
    pub(super) me: ProcessId,
    /// The peers by process. This process's own element is not used.
    pub(super) peers: Vec<UcxPeer>,
    /// The peer process of each endpoint.
    pub(super) processes: HashMap<EndpointId, ProcessId>,
    /// Operations that UCX has not ended yet, by id.
    pub(super) operations: Vec<Option<PendingOperation>>,
    /// Received payloads that are still in their senders' memory, by number.
    pub(super) payloads: HashMap<u64, UnfetchedPayload>,
    pub(super) next_payload: u64,
    pub(super) handler: Option<Arc<dyn Handler>>,
    /// Messages that were posted in this round of the engine's loop and are not sent yet.
    pub(super) stored: Vec<StoredMessage>,
    /// Calls that wait until a handler is set.
    pub(super) early: Vec<HandlerCall>,
    pub(super) leaving: Option<UcxLeaving>,
    pub(super) roll_call: Option<RollCall>,
    pub(super) meeting: Option<UcxMeeting>,
    /// Handshake messages that arrived before this process started to connect.
    pub(super) hellos: Vec<EarlyHello>,
    pub(super) policy: SpinPolicy,
    /// The current gap without work; `None` if the last poll found work.
    pub(super) gap: Option<PollGap>,
}

/// A received payload that is still in its sender's memory.
pub(super) struct UnfetchedPayload {
    pub(super) from: ProcessId,
    pub(super) descriptor: Descriptor,
    /// Length of the payload in bytes.
    pub(super) bytes: usize,
}

/// A handshake message that arrived before this process started to connect.
pub(super) struct EarlyHello {
    pub(super) from: ProcessId,
    pub(super) bytes: Vec<u8>,
}

/// The purpose of a UCX operation in progress: the send or fetch that it belongs to.
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
    /// Removes and returns the callback of a fetch. Returns `None` for a send or if the callback
    /// was removed before.
    pub(super) fn take_fetch(&mut self) -> Option<FetchDone> {
        match self {
            Self::Fetch { then, .. } => then.take(),
            Self::Send { .. } => None,
        }
    }
}

/// A posted message that is not sent yet.
pub(super) struct StoredMessage {
    pub(super) to: ProcessId,
    pub(super) op: OpId,
    pub(super) way: SendProtocol,
    pub(super) ticket: Ticket,
}

/// A call to the handler that waits until a handler is set.
pub(super) enum HandlerCall {
    Arrived(ProcessId, Header, Payload),
    Done(Ticket, Result<(), TransportError>),
    Down(ProcessId, TransportError),
}

/// The state of the handshakes, until all peers are connected.
pub(super) struct UcxMeeting {
    pub(super) config: UcxConfig,
    pub(super) party: Party,
    pub(super) reply: Sender<Result<ConnectedPeers, TransportError>>,
    pub(super) until: Instant,
    pub(super) failed: Option<TransportError>,
}

/// The pings to all peers that follow the death of the peer `dead`, and their deadline.
pub(super) struct RollCall {
    pub(super) dead: ProcessId,
    pub(super) until: Instant,
}

/// The progress of a shutdown.
pub(super) struct UcxLeaving {
    /// Deadline for pending operations.
    pub(super) until: Instant,
    /// Deadline for the peers' answers to the goodbye; `None` until the goodbye was sent.
    pub(super) goodbye: Option<Instant>,
    /// Deadline for closing the endpoints; `None` until closing has begun.
    pub(super) closing: Option<Instant>,
    pub(super) closed: Option<Sender<()>>,
}
