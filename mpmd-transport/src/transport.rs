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
    /// Returns the transport's name as the user writes it (`tcp`, `inproc`).
    fn name(&self) -> &'static str;

    /// This process's id.
    fn process(&self) -> ProcessId;

    /// Returns the number of processes in the job.
    fn processes(&self) -> usize;

    /// Returns true if payloads between this process and `peer` stay where they are (zero-copy
    /// transfer, [`Payload::Lent`]). Both sides give the same answer.
    ///
    /// Such a message costs its receiver no memory at any size, and need not wait until the
    /// receiver has room. Its ticket ends when the receiver has dropped the payload, which may
    /// never happen, or earlier if the payload is not this process's memory.
    /// [`Transport::shutdown`] does not wait for that. A payload that is the receiver's own memory
    /// arrives as [`Payload::Inline`].
    fn zero_copy(&self, peer: ProcessId) -> bool {
        let _ = peer;
        false
    }

    /// Returns true if zero-copy transfers with `peer` also work for memory of
    /// [devices](mpmd_memory::DevicePlace). Both processes must have such devices; the payload is
    /// then a [`Payload::Lent`] with a [`SharedBuffer::device`]. It may be sent before the work
    /// that fills it has finished ([`SharedBuffer::ready`]).
    ///
    /// Both sides give the same answer, which is known once [`Transport::share_devices`] has
    /// returned. True only if [`zero_copy`](Self::zero_copy) is true.
    fn carries_device_memory(&self, peer: ProcessId) -> bool {
        let _ = peer;
        false
    }

    /// Finds out with which peers device memory can be shared. Every process that has devices calls
    /// this at most once, before [`Transport::start`]. `with` says for each process if it has
    /// devices. Blocks until those processes have called it too, for at most `peer_timeout`.
    ///
    /// # Errors
    ///
    /// If a peer does not answer in time. It is no error that devices cannot be shared: payloads
    /// then take another way.
    fn share_devices(
        &self,
        sharing: Arc<dyn DeviceSharing>,
        with: &[bool],
        peer_timeout: Duration,
    ) -> Result<(), TransportError> {
        let _ = (sharing, with, peer_timeout);
        Ok(())
    }

    /// Returns the arena that buffers must come from so that they can be sent without a copy. Must
    /// be asked for before the first buffer is created. `None` if any memory will do.
    fn arena(&self) -> Option<Arena> {
        None
    }

    /// Returns the number of bytes of this process's memory that `peer` has borrowed. 0 without
    /// zero-copy transfers.
    fn lent_to(&self, peer: ProcessId) -> u64 {
        let _ = peer;
        0
    }

    /// Returns the number of bytes of `peer`'s memory that this process has borrowed. 0 without
    /// zero-copy transfers.
    fn borrowed_from(&self, peer: ProcessId) -> u64 {
        let _ = peer;
        0
    }

    /// Starts deliveries to `handler`. Messages that arrived before are delivered first.
    ///
    /// # Panics
    ///
    /// If it was called before.
    fn start(&self, handler: Arc<dyn Handler>);

    /// Queues a message to `to`. Never blocks, and never calls the handler itself.
    ///
    /// `payload` must have exactly [`Header::payload_bytes`] bytes. The transport keeps it until it
    /// calls [`Handler::done`]: exactly once for every ticket except [`Ticket::NONE`], even if the
    /// peer is gone. [`MessageKind::Data`] never delays other kinds. After [`Transport::shutdown`]
    /// has returned, messages are dropped silently.
    ///
    /// # Panics
    ///
    /// If `to` is this process or not a process of the job, or if `payload`'s length differs from
    /// the header's. Also if a kind other than `Data` carries more than [`MAX_CONTROL_BYTES`].
    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket);

    /// Drives the transport for a moment on the calling thread, and may call the handler. Returns
    /// true if it did any work.
    ///
    /// If waiting threads can drive the transport ([`Transport::parking`]), they call this
    /// repeatedly and see a message without being woken by another thread. Other transports do
    /// nothing here.
    fn progress(&self) -> bool {
        false
    }

    /// Drives the transport on the calling thread while `again` returns true. `again` is called
    /// before each [`progress`](Self::progress). Meanwhile peers need not wake a thread of this
    /// process. A message that arrives during the last call of `again` is still taken in before
    /// this returns.
    fn drive(&self, again: &mut dyn FnMut() -> bool) {
        while again() {
            self.progress();
        }
    }

    /// Returns the value to pass to [`Transport::park`], or `None` if a waiting thread cannot drive
    /// the transport while it sleeps. The caller takes it before it checks its condition for the
    /// last time.
    fn parking(&self) -> Option<Parking> {
        None
    }

    /// Sleeps until a message arrives, [`Transport::wake`] is called, or `deadline` has come; then
    /// drives the transport for a moment. Returns at once if a message or wake came after `parking`
    /// was taken. May return early.
    fn park(&self, parking: Parking, deadline: Instant) {
        let _ = (parking, deadline);
    }

    /// Ends every [`Transport::park`] with a `parking` from before this call. Cheap if no thread is
    /// parked.
    fn wake(&self) {}

    /// Tells the transport that `peer` is gone, so that it need not wait for it any more. Does not
    /// block. The promises to the handler stay the same.
    ///
    /// Transports that detect a lost peer quickly by themselves do nothing.
    fn give_up(&self, peer: ProcessId, why: &str) {
        let _ = (peer, why);
    }

    /// Sends the posted messages, then closes. Blocks for `deadline` at most, but a little longer
    /// if peers are slow to close or while a handler call is in progress. Peers see an orderly end.
    ///
    /// Messages continue to arrive meanwhile. Messages posted meanwhile, or cut off by the
    /// deadline, end with [`TransportError::Closed`]. After it returns, every open ticket has ended
    /// and the handler is not called again. A second call does nothing. The handler must not call
    /// it: it would wait for itself.
    fn shutdown(&self, deadline: Duration);
}

/// A point in time for [`Transport::park`], which does not sleep if an event came after it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Parking(pub u32);

/// Identifies a [`Transport::post`] in its [`Handler::done`]. Chosen by the caller.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The ticket of messages that need no [`Handler::done`].
    pub const NONE: Self = Self(0);
}

/// Receives the events of a transport. Called on the transport's threads, and on threads that drive
/// the transport: it must not block.
pub trait Handler: Send + Sync {
    /// A message arrived.
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload);

    /// The transport no longer uses the payload of a posted message: the message has been sent, or
    /// it never will be.
    fn done(&self, ticket: Ticket, result: Result<(), TransportError>);

    /// A peer is gone. It may have died or shut down in order: a transport cannot always tell the
    /// two apart. A goodbye message that arrived before shows if the end was in order.
    ///
    /// Called at most once for each peer, after everything that arrived from it. Nothing more comes
    /// from the peer. Its payloads that still wait end with [`TransportError::PeerGone`].
    fn peer_down(&self, peer: ProcessId, why: TransportError);
}

/// The payload of a message that arrived. Dropping it discards the bytes.
pub enum Payload {
    /// The message has no payload.
    Empty,
    /// The bytes are in memory of this process.
    Inline(SharedBuffer),
    /// The bytes are in the sender's memory and are read there. Dropping this gives them back to
    /// the sender.
    Lent(SharedBuffer),
    /// The bytes have not been received: they wait for a buffer.
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

/// Payload bytes of a received message that wait for a buffer. Dropping this discards the bytes.
pub trait Fetch: Send {
    /// Returns the number of bytes.
    fn bytes(&self) -> u64;

    /// Reads the payload into `into`, which must have exactly [`bytes`](Self::bytes) bytes. Then
    /// calls `then` once, on any thread: perhaps on this one, before this returns. Does not wait
    /// for the peer.
    fn fetch(self: Box<Self>, into: OwnedBuffer, then: FetchDone);
}

/// Payload bytes in memory that this process can read. They are copied when they are fetched, and
/// freed at once.
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

/// Called with the filled buffer, or with the error that prevented filling it.
pub type FetchDone = Box<dyn FnOnce(Result<OwnedBuffer, TransportError>) + Send>;

/// The reason why a message could not be moved.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The peer's connection ended, or was never established.
    #[error("process {peer} is gone: {why}")]
    PeerGone {
        /// The peer.
        peer: ProcessId,
        /// The connection's error.
        why: String,
    },
    /// The peer sent bytes that are not a valid message. The connection is closed.
    #[error("process {peer} sent something that is no message: {why}")]
    Protocol {
        /// The peer.
        peer: ProcessId,
        /// The fault.
        why: String,
    },
    /// This process could not do its part (sockets, addresses, limits).
    #[error("{doing} failed: {why}")]
    Environment {
        /// The failed operation.
        doing: String,
        /// The system's error.
        why: String,
    },
    /// Something did not happen within the peer timeout.
    #[error("{event} took longer than {peer_timeout:?}")]
    TimedOut {
        /// The awaited event.
        event: String,
        /// The timeout.
        peer_timeout: Duration,
    },
    /// The transport cannot be used in this program, or on this machine.
    #[error("the transport {transport} is not available: {why}")]
    Unavailable {
        /// The transport's name.
        transport: &'static str,
        /// The missing thing, and how to get it.
        why: String,
    },
    /// The transport is shut down.
    #[error("the transport is shut down")]
    Closed,
}

/// Checks the conditions of [`Transport::post`]; panics if the caller breaks one.
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
