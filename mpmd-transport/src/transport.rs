//! What moves messages between processes: the [`Transport`] trait.
//!
//! A transport carries headers with payloads and reports what arrived. It matches nothing, orders
//! nothing and waits for nothing: two messages to one peer may overtake each other. All of that is
//! the [router](crate::router)'s work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::memory::{Arena, DeviceSharing, OwnedBuffer, SharedBuffer};
use crate::wire::{Header, Kind, MAX_CONTROL_BYTES, ProcessId};

/// Moves messages between this process and its peers.
///
/// Implementations are driven from any thread; no method blocks but [`Transport::shutdown`].
pub trait Transport: Send + Sync {
    /// The transport's name as the user writes it (`tcp`, `inproc`).
    fn name(&self) -> &'static str;

    /// Who this process is.
    fn process(&self) -> ProcessId;

    /// Number of processes in the job.
    fn processes(&self) -> usize;

    /// Whether payloads go to `peer`, and come from it, as memory that stays where it is
    /// ([`Payload::Lent`]): the same on both sides. Then a message costs its receiver no memory,
    /// whatever its size, and need not wait until the receiver has room. Its ticket ends when the
    /// receiver has dropped it, which may be never; [`Transport::shutdown`] does not wait for that.
    fn hands_over(&self, peer: ProcessId) -> bool {
        let _ = peer;
        false
    }

    /// Returns true if only a stand-in is behind this transport, for measurements of one process:
    /// then the hashes of its pieces are not compared.
    fn is_stand_in(&self) -> bool {
        false
    }

    /// Whether memory of [devices](crate::memory::DevicePlace) goes to `peer`, and comes from it,
    /// in this way too, where both processes have such devices ([`SharedBuffer::device`] of a
    /// [`Payload::Lent`]), also before the work that makes it is over ([`SharedBuffer::ready`]):
    /// the same on both sides, and known once [`Transport::share_devices`] has returned. Only where
    /// [`hands_over`](Self::hands_over) is true.
    fn carries_device_memory(&self, peer: ProcessId) -> bool {
        let _ = peer;
        false
    }

    /// Finds out with which peers memory of devices can be shared; to be called at most once,
    /// before [`Transport::start`], by all processes that have devices, each of which says by
    /// process who has some. Waits for those to do the same, for `patience` at most.
    ///
    /// # Errors
    ///
    /// Where a peer is not heard of in time. That devices cannot be shared is none: payloads take
    /// another way then.
    fn share_devices(
        &self,
        sharing: Arc<dyn DeviceSharing>,
        with: &[bool],
        patience: Duration,
    ) -> Result<(), TransportError> {
        let _ = (sharing, with, patience);
        Ok(())
    }

    /// Where buffers must come from so that they need not be copied to be handed over: to be asked
    /// before the first is made.
    fn arena(&self) -> Option<Arena> {
        None
    }

    /// Bytes of this process's memory that `peer` holds, where payloads are handed over.
    fn lent_to(&self, peer: ProcessId) -> u64 {
        let _ = peer;
        0
    }

    /// Bytes of `peer`'s memory that this process holds, where payloads are handed over.
    fn borrowed_from(&self, peer: ProcessId) -> u64 {
        let _ = peer;
        0
    }

    /// Starts deliveries to `handler`. What arrived before is kept and delivered first.
    ///
    /// # Panics
    ///
    /// Where it was called before.
    fn start(&self, handler: Arc<dyn Handler>);

    /// Queues a message to `to`. Never blocks, and never calls the handler from within.
    ///
    /// `payload` must have exactly [`Header::payload_bytes`] bytes; the transport holds on to it
    /// until [`Handler::done`], which is called exactly once for every ticket but [`Ticket::NONE`],
    /// also where the peer is gone. [`Kind::Data`] never delays other kinds. What is posted once
    /// [`Transport::shutdown`] has returned is dropped without a word.
    ///
    /// # Panics
    ///
    /// Where `to` is this process or none of the job, where `payload` has another length than the
    /// header says, or where a kind other than `Data` carries more than
    /// [`MAX_CONTROL_BYTES`].
    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket);

    /// Lets the calling thread drive the transport for a moment; true where that did anything. The
    /// handler is called from within.
    ///
    /// Where waiters can drive ([`Transport::parking`]) a thread that waits for a message calls
    /// this again and again, and hears of it without being woken by another thread. Else there is
    /// nothing to do here.
    fn progress(&self) -> bool {
        false
    }

    /// Lets the calling thread drive the transport for as long as `again` says that it should,
    /// which it asks before each [`progress`](Self::progress). Meanwhile peers need not wake
    /// anybody here: what came while the last of them was asked is let in before this returns.
    fn drive(&self, again: &mut dyn FnMut() -> bool) {
        while again() {
            self.progress();
        }
    }

    /// Where a thread that waits can drive the transport also while it sleeps: what to give to
    /// [`Transport::park`], taken before the last look at what is waited for.
    fn parking(&self) -> Option<Parking> {
        None
    }

    /// Sleeps until a message arrives, [`Transport::wake`] is called, or `deadline` has come; then
    /// drives the transport for a moment. Returns at once where one of them happened since
    /// `parking` was taken. May return early.
    fn park(&self, parking: Parking, deadline: Instant) {
        let _ = (parking, deadline);
    }

    /// Ends every [`Transport::park`] of this process. Cheap where there is none.
    fn wake(&self) {}

    /// Somebody knows that `peer` is gone, as a transport may find out late or never: it need not
    /// wait for it any more. Does not block, and changes nothing of what the handler is promised.
    ///
    /// Transports that would find out as soon do nothing.
    fn give_up(&self, peer: ProcessId, why: &str) {
        let _ = (peer, why);
    }

    /// Sends what was posted, then closes; waits at most `deadline`. Peers see an orderly end.
    ///
    /// Messages go on arriving meanwhile; what is posted meanwhile ends with
    /// [`TransportError::Closed`], as does what the deadline cut off. After it no more calls reach
    /// the handler, and every open ticket has ended. A second call does nothing. Not to be called
    /// by the handler, which it waits for.
    fn shutdown(&self, deadline: Duration);
}

/// A moment at the transport's door: what comes after it is not slept through.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Parking(pub u32);

/// Names a [`Transport::post`] in its [`Handler::done`]. Chosen by the caller.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(pub u64);

impl Ticket {
    /// For messages whose end nobody wants to hear of.
    pub const NONE: Self = Self(0);
}

/// Receives what a transport has to say. Called on the transport's threads: it must not block.
pub trait Handler: Send + Sync {
    /// A message arrived.
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload);

    /// A posted message has left, and the transport no longer uses its payload; or it never will
    /// leave.
    fn done(&self, ticket: Ticket, result: Result<(), TransportError>);

    /// A peer is gone, whether it died or shut down in order: a transport cannot always tell, and
    /// who hears a goodbye before knows. Said at most once for each peer, after everything that
    /// arrived from it; nothing more comes from it, and payloads of it that still wait end with
    /// [`TransportError::PeerGone`].
    fn peer_down(&self, peer: ProcessId, why: TransportError);
}

/// The payload of a message that arrived. Dropping it discards the bytes.
pub enum Payload {
    /// The message has none.
    Empty,
    /// The bytes are here.
    Inline(SharedBuffer),
    /// The bytes are the sender's memory, to be read where they are. It has them back when this is
    /// dropped.
    Lent(SharedBuffer),
    /// The bytes wait for a place.
    Waiting(Box<dyn Fetch>),
}

impl Payload {
    /// How many bytes there are.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Inline(bytes) | Self::Lent(bytes) => bytes.len() as u64,
            Self::Waiting(fetch) => fetch.bytes(),
        }
    }
}

/// Payload bytes that wait for a place; dropped, they are read and thrown away.
pub trait Fetch: Send {
    /// How many bytes there are.
    fn bytes(&self) -> u64;

    /// Reads them into `into`, which must have exactly that many bytes, then calls `then` once, on
    /// a thread of the transport. Does not block.
    fn fetch(self: Box<Self>, into: OwnedBuffer, then: FetchDone);
}

/// Called with the filled buffer, or with why it could not be filled.
pub type FetchDone = Box<dyn FnOnce(Result<OwnedBuffer, TransportError>) + Send>;

/// Why a message could not be moved.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The peer's connection ended, or was never there.
    #[error("process {peer} is gone: {why}")]
    PeerGone {
        /// The peer.
        peer: ProcessId,
        /// What the connection said.
        why: String,
    },
    /// The peer sent something that is not a message of ours. The connection is closed.
    #[error("process {peer} sent something that is no message: {why}")]
    Protocol {
        /// The peer.
        peer: ProcessId,
        /// What was wrong.
        why: String,
    },
    /// This process could not do its part (sockets, addresses, limits).
    #[error("{doing} failed: {why}")]
    Environment {
        /// What was being done.
        doing: String,
        /// The system's word on it.
        why: String,
    },
    /// Something did not happen within its patience.
    #[error("{what} took longer than {patience:?}")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// For how long.
        patience: Duration,
    },
    /// The transport cannot be used in this program, or on this machine.
    #[error("the transport {transport} is not available: {why}")]
    Unavailable {
        /// The transport's name.
        transport: &'static str,
        /// What is missing, and how to get it.
        why: String,
    },
    /// The transport is shut down.
    #[error("the transport is shut down")]
    Closed,
}

/// What every [`Transport::post`] asks of its caller.
pub(crate) fn check_post(
    transport: &dyn Transport,
    to: ProcessId,
    header: &Header,
    payload: Option<&SharedBuffer>,
) {
    assert_ne!(to, transport.process(), "process {to} posts to itself");
    assert!(to.index() < transport.processes(), "no process {to} among {}", transport.processes());
    let given = payload.map_or(0, |bytes| bytes.len() as u64);
    assert_eq!(given, header.payload_bytes(), "payload of a {:?} message", header.kind);
    assert!(
        header.kind == Kind::Data || given <= MAX_CONTROL_BYTES,
        "a {:?} message of {given} bytes",
        header.kind
    );
}
