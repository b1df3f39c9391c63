//! The [`Transport`] trait: moves messages between processes.
//!
//! A transport carries headers with payloads and reports arrived messages. It does not match
//! messages, does not order them and waits for nothing: two messages to one peer may overtake each
//! other. The [router](mpmd_proto::router) does all of that.

use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::Instant;

use mpmd_memory::{Arena, DeviceSharing, OwnedBuffer, SharedBuffer};
use mpmd_proto::wire::{Header, MAX_CONTROL_BYTES, MessageKind, ProcessId};

// invariant: transport-knows-bytes
/// Moves messages between this process and its peers.
///
/// Any thread may call these methods. None of them blocks except
/// [`share_devices`](Self::share_devices), [`drive`](Self::drive), [`park`](Self::park) and
/// [`shutdown`](Self::shutdown).
pub trait Transport: Send + Sync {
    /// Returns the transport's name in options and environment variables, such as `tcp`.
    fn name(&self) -> &'static str;

    /// Returns this process's id.
    fn process(&self) -> ProcessId;

    /// Returns the number of processes in the job.
    fn processes(&self) -> usize;

    /// Returns true if a payload between this process and `peer` stays in the sender's memory: a
    /// zero-copy transfer, [`Payload::Lent`]. Both processes get the same answer.
    ///
    /// A lent payload takes no memory of the receiver, so a message of any size can be sent at
    /// once. Its ticket ends when the receiver has dropped the payload, which may never happen. If
    /// the payload is not this process's memory, the ticket ends earlier. [`Transport::shutdown`]
    /// does not wait for lent payloads. A payload that is the receiver's own memory arrives as
    /// [`Payload::Inline`].
    fn zero_copy(&self, peer: ProcessId) -> bool {
        let _ = peer;
        false
    }

    /// Returns true if zero-copy transfers with `peer` also work for memory of
    /// [devices](mpmd_memory::DevicePlace). Both processes must have such devices. The payload is
    /// then a [`Payload::Lent`] with a [`SharedBuffer::device`]. It may be sent before the device
    /// work that writes it has finished ([`SharedBuffer::ready`]).
    ///
    /// Both processes get the same answer, which is known once [`Transport::share_devices`] has
    /// returned. True only if [`zero_copy`](Self::zero_copy) is true.
    fn carries_device_memory(&self, peer: ProcessId) -> bool {
        let _ = peer;
        false
    }

    /// Finds out with which peers this process can share device memory. Every process that has
    /// devices calls this at most once, before [`Transport::start`]. `with` is true for each
    /// process that has devices. Blocks until these processes have called it too, for at most
    /// `peer_timeout`.
    ///
    /// # Errors
    ///
    /// If a peer does not answer in time. A peer that cannot share device memory is no error: its
    /// payloads are copied through host memory.
    fn share_devices(
        &self,
        sharing: Arc<dyn DeviceSharing>,
        with: &[bool],
        peer_timeout: Duration,
    ) -> Result<(), TransportError> {
        let _ = (sharing, with, peer_timeout);
        Ok(())
    }

    /// Returns the arena from which buffers must be allocated to be sent without a copy. `None` if
    /// the transport can send any memory so. Call it before the first buffer is created.
    fn arena(&self) -> Option<Arena> {
        None
    }

    /// Returns the number of bytes that `peer` has borrowed from this process. 0 for transports
    /// that lend no memory.
    fn lent_to(&self, peer: ProcessId) -> u64 {
        let _ = peer;
        0
    }

    /// Returns the number of bytes that this process has borrowed from `peer`. 0 for transports
    /// that lend no memory.
    fn borrowed_from(&self, peer: ProcessId) -> u64 {
        let _ = peer;
        0
    }

    /// Starts deliveries to `handler`, beginning with the messages that have already arrived.
    ///
    /// # Panics
    ///
    /// If called twice.
    fn start(&self, handler: Arc<dyn Handler>);

    /// Queues a message to `to`. Never blocks, and never calls the handler itself.
    ///
    /// `payload` must have exactly [`Header::payload_bytes`] bytes. The transport keeps it until it
    /// calls [`Handler::done`]. It does so exactly once for every ticket except [`Ticket::NONE`],
    /// even if the peer is gone. [`MessageKind::Data`] never delays other kinds. After
    /// [`Transport::shutdown`] has returned, messages are dropped silently.
    ///
    /// # Panics
    ///
    /// If `to` is this process or not a process of the job, or if `payload`'s length differs from
    /// the header's. Also if a kind other than `Data` carries more than [`MAX_CONTROL_BYTES`].
    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket);

    /// Moves messages on the calling thread without waiting, and may call the handler. Returns true
    /// if it did any work.
    ///
    /// A waiting thread calls this repeatedly if the transport supports it (see
    /// [`Transport::parking`]). It then sees a message without being woken by another thread. Other
    /// transports do nothing here.
    fn progress(&self) -> bool {
        false
    }

    /// Calls [`progress`](Self::progress) on the calling thread as long as `again` returns true.
    /// `again` is called before each `progress`. Meanwhile peers need not wake a thread of this
    /// process. A message that arrives during the last call of `again` is still delivered before
    /// this returns.
    fn drive(&self, again: &mut dyn FnMut() -> bool) {
        while again() {
            self.progress();
        }
    }

    /// Returns the value to pass to [`Transport::park`]. Call it before the last check of the
    /// condition that the thread waits for. `None` if this transport cannot be driven by a waiting
    /// thread.
    fn parking(&self) -> Option<Parking> {
        None
    }

    /// Sleeps until a message arrives, [`Transport::wake`] is called, or `deadline` is reached.
    /// Then moves messages without waiting. Returns at once if a message arrived or `wake` was
    /// called since `parking` was taken. May return early.
    fn park(&self, parking: Parking, deadline: Instant) {
        let _ = (parking, deadline);
    }

    /// Ends every [`Transport::park`] whose `parking` value was taken before this call. Cheap if no
    /// thread is parked.
    fn wake(&self) {}

    /// Tells the transport that `peer` is gone, so that it stops waiting for the peer. Does not
    /// block. All guarantees to the handler still hold.
    ///
    /// A transport that itself detects a lost peer quickly does nothing.
    fn give_up(&self, peer: ProcessId, why: &str) {
        let _ = (peer, why);
    }

    /// Sends the posted messages, then closes the transport. Blocks for at most `deadline`, or a
    /// little longer if peers close slowly or a handler call has not returned. Peers see an orderly
    /// end.
    ///
    /// Messages from peers continue to arrive meanwhile. Messages that are posted meanwhile, or are
    /// not sent by the deadline, end with [`TransportError::Closed`]. When this returns, every
    /// ticket has ended and the handler is not called again. A second call does nothing. The
    /// handler must not call this: it would wait for itself.
    fn shutdown(&self, deadline: Duration);
}

/// A number from [`Transport::parking`]. [`Transport::park`] does not sleep if an event came after
/// the number was taken.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Parking(pub u32);

/// Identifies a message from [`Transport::post`] to [`Handler::done`]. The caller chooses it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The ticket of a message whose end is not reported to [`Handler::done`].
    pub const NONE: Self = Self(0);
}

/// Receives the events of a transport. The transport's threads call it, and so do threads in
/// [`Transport::progress`]. It must not block.
pub trait Handler: Send + Sync {
    /// Handles a message that arrived.
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload);

    /// Handles the end of a posted message: it has been sent, or will never be. The transport no
    /// longer uses its payload.
    fn done(&self, ticket: Ticket, result: Result<(), TransportError>);

    /// Handles the loss of a peer, which has died or shut down in order. A transport cannot always
    /// tell the two apart. A goodbye message that arrived before shows that the end was in order.
    ///
    /// Called at most once for each peer, after all its messages have been delivered. Nothing more
    /// arrives from the peer. Its payloads that are not fetched yet end with
    /// [`TransportError::PeerGone`].
    fn peer_down(&self, peer: ProcessId, why: TransportError);
}

/// The payload of a message that arrived. Dropping it discards the bytes.
pub enum Payload {
    /// The message has no payload.
    Empty,
    /// The bytes are in memory of this process.
    Inline(SharedBuffer),
    /// The bytes are in the sender's memory and are read from there. Dropping this returns them to
    /// the sender.
    Lent(SharedBuffer),
    /// The bytes have not been received yet: they wait until [`Fetch::fetch`] supplies a buffer.
    Waiting(Box<dyn Fetch>),
}

impl Payload {
    /// Returns the payload's length in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Inline(bytes) | Self::Lent(bytes) => bytes.len() as u64,
            Self::Waiting(fetch) => fetch.bytes(),
        }
    }
}

/// A payload whose bytes have not been received because they need a buffer. Dropping this discards
/// them.
pub trait Fetch: Send {
    /// Returns the payload's length in bytes.
    fn bytes(&self) -> u64;

    /// Reads the payload into `into`, which must have exactly [`bytes`](Self::bytes) bytes. Then
    /// calls `then` once, on any thread, perhaps on this one before this returns. Does not wait for
    /// the peer.
    fn fetch(self: Box<Self>, into: OwnedBuffer, then: FetchDone);
}

/// A payload in memory that this process can read. A fetch copies the bytes and frees that memory
/// at once.
pub(crate) struct CopyOut(pub(crate) SharedBuffer);

impl Fetch for CopyOut {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn fetch(self: Box<Self>, mut into: OwnedBuffer, then: FetchDone) {
        into.copy_from_slice(&self.0);
        drop(self);
        then(Ok(into));
    }
}

/// A callback for a fetch. It gets the filled buffer, or the error that prevented filling it.
pub type FetchDone = Box<dyn FnOnce(Result<OwnedBuffer, TransportError>) + Send>;

/// The reason why a message could not be sent or received.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The peer's connection ended, or was never established.
    #[error("process {peer} is gone: {why}")]
    PeerGone {
        /// The peer.
        peer: ProcessId,
        /// The reason for the end of the connection.
        why: String,
    },
    /// The peer sent bytes that are not a valid message. The connection is closed.
    #[error("process {peer} sent something that is no message: {why}")]
    Protocol {
        /// The peer.
        peer: ProcessId,
        /// The fault of the bytes, for messages.
        why: String,
    },
    /// An operation of this process failed because of its environment, such as a lack of sockets.
    #[error("{doing} failed: {why}")]
    Environment {
        /// The operation that failed, for messages.
        doing: String,
        /// The system's error.
        why: String,
    },
    /// An event did not happen within the peer timeout.
    #[error("{event} took longer than {peer_timeout:?}")]
    TimedOut {
        /// The event that did not happen, for messages.
        event: String,
        /// The peer timeout that was exceeded.
        peer_timeout: Duration,
    },
    /// The transport is not compiled into this program, or does not work on this machine.
    #[error("the transport {transport} is not available: {why}")]
    Unavailable {
        /// The transport's name.
        transport: &'static str,
        /// The reason, with the missing thing and how to get it.
        why: String,
    },
    /// The operation was ended because this process's transport was shut down.
    #[error("the transport is shut down")]
    Closed,
}

/// Checks that the arguments of [`Transport::post`] are valid; panics if they are not.
pub(crate) fn check_post(
    transport: &dyn Transport,
    to: ProcessId,
    header: &Header,
    payload: Option<&SharedBuffer>,
) {
    assert_ne!(to, transport.process(), "process {to} posts to itself");
    assert!(
        to.index() < transport.processes(),
        "no process {to} among {}",
        transport.processes()
    );

    let given = payload.map_or(0, |bytes| bytes.len() as u64);
    assert_eq!(
        given,
        header.payload_bytes(),
        "payload of a {:?} message",
        header.kind
    );
    assert!(
        header.kind == MessageKind::Data || given <= MAX_CONTROL_BYTES,
        "a {:?} message of {given} bytes",
        header.kind
    );
}
