//! Who owns what of UCX: a [`Worker`] owns its context, its endpoints, and the memory of all
//! operations under way.
//!
//! A worker lives on one thread and dies there; only its [`Signal`] goes elsewhere. Memory that is
//! given to an operation comes back with its end, but where that was no good end: then UCX may
//! still write late, so the memory stays in quarantine until the worker is destroyed. Even that
//! does not keep a peer out that reads and writes memory of this process by itself, as processes of
//! one host do, and that was stopped meanwhile: what it was told of is never given back, unless it
//! has [said](Worker::is_done_with) that it is done.

mod inbox;
mod slots;

use std::ffi::c_void;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::result::{self, Bytes, Started, UcxError, Way};
use super::sys::Status;
use crate::memory::{DevicePlace, OwnedBuffer, Pool, SharedBuffer};

use inbox::{Happened, Inbox};
use slots::Slots;

pub(super) use inbox::{Body, Descriptor};
pub(super) use slots::{Held, OpId};

/// The longest header of a message, in bytes.
pub(super) const HEADER_MAX: usize = 80;

/// A large message over sockets takes many steps of UCX's; this many are taken at a time.
const STEPS: usize = 32;

/// How often a worker that is dropped gives UCX a chance to finish what it has closed.
const LAST_TURNS: usize = 1000;

/// What peers may still reach for, for as long as this process lives.
static KEPT: Mutex<Vec<Held>> = Mutex::new(Vec::new());

/// UCX's context; ends when dropped.
struct Context(NonNull<result::Context>);

impl Context {
    /// A context for so many processes, with these settings beside those of the user's variables.
    fn new(processes: usize, settings: &[(&str, &str)]) -> Result<Self, UcxError> {
        // SAFETY: `Worker::new`, the only caller, has loaded the library; `drop` ends the context.
        unsafe { result::init(processes, settings) }.map(Self)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: a worker destroys itself before its context is dropped, and there is none without
        // one.
        unsafe { result::cleanup(self.0) };
    }
}

/// Names an endpoint of a worker.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct EndpointId(usize);

struct Endpoint {
    /// `None` once it is closed.
    raw: Option<NonNull<result::Endpoint>>,
    /// The peer reaches for no memory of ours any more: it has said so, or is dead.
    done: bool,
}

/// What a worker reports, in the order in which it happened.
pub(super) enum Event {
    /// A message arrived.
    Message {
        /// Its number, as given to [`Worker::send`].
        id: u32,
        /// Its header, and how much of it there is.
        header: ([u8; HEADER_MAX], usize),
        /// Its bytes.
        body: Body,
    },
    /// An operation is over. Its memory comes back where it has ended well.
    Ended(OpId, Result<(), UcxError>, Held),
    /// An endpoint has failed: it has to be closed by force.
    Failed(EndpointId, UcxError),
}

/// One end of everything: receives messages, sends them over its endpoints.
pub(super) struct Worker {
    raw: NonNull<result::Worker>,
    signal: Signal,
    inbox: Box<Inbox>,
    slots: Slots,
    endpoints: Vec<Endpoint>,
    /// Closing under way.
    closing: Vec<NonNull<c_void>>,
    quarantine: Vec<(EndpointId, Held)>,
    // After the worker.
    context: Context,
    /// Stays on its thread, which is what UCX is told.
    _here: PhantomData<*mut ()>,
}

impl Worker {
    /// A worker on this thread that receives messages of these numbers.
    pub(super) fn new(
        processes: usize,
        settings: &[(&str, &str)],
        ids: impl IntoIterator<Item = u32>,
    ) -> Result<Self, UcxError> {
        let context = Context::new(processes, settings)?;
        // SAFETY: the context lives in the worker made below, which is dropped before it.
        let raw = unsafe { result::worker_create(context.0) }?;
        let worker = Self {
            raw,
            signal: Signal(Arc::new(Mutex::new(Some(Awake(raw))))),
            inbox: Inbox::new(),
            slots: Slots::default(),
            endpoints: Vec::new(),
            closing: Vec::new(),
            quarantine: Vec::new(),
            context,
            _here: PhantomData,
        };
        for id in ids {
            // SAFETY: the worker was made here, on this thread. The callback needs nothing but what
            // `Inbox::during` sets, around every call that calls back.
            unsafe { result::worker_on_message(worker.raw, id, inbox::arrived) }?;
        }
        Ok(worker)
    }

    /// Where bytes that come with their message are copied into.
    pub(super) fn copy_into(&self, pool: Pool) {
        *self.inbox.pool.borrow_mut() = Some(pool);
    }

    /// Whether memory of CUDA devices may be sent and fetched into.
    pub(super) fn moves_cuda(&self) -> bool {
        // SAFETY: the context lives as long as its worker.
        let found = unsafe { result::context_moves_cuda(self.context.0) };
        found
            .inspect_err(|error| tracing::debug!(%error, "asking UCX for kinds of memory"))
            .unwrap_or(false)
    }

    /// What others need to reach this worker.
    pub(super) fn address(&self) -> Result<Vec<u8>, UcxError> {
        // SAFETY: the worker is alive.
        unsafe { result::worker_address(self.raw) }
    }

    /// Wakes this worker from other threads.
    pub(super) fn signal(&self) -> Signal {
        self.signal.clone()
    }

    /// The descriptor that becomes readable when the worker was armed and has something to do.
    pub(super) fn descriptor(&self) -> Result<BorrowedFd<'_>, UcxError> {
        // SAFETY: the worker is alive.
        let descriptor = unsafe { result::worker_descriptor(self.raw) }?;
        // SAFETY: the descriptor is open as long as the worker lives, which the borrow outlasts
        // not.
        Ok(unsafe { BorrowedFd::borrow_raw(descriptor) })
    }

    /// Prepares for sleep; false where there is something to do first.
    pub(super) fn arm(&self) -> Result<bool, UcxError> {
        // SAFETY: the worker is alive and, being bound to its thread, used by no other.
        self.inbox.during(|| unsafe { result::worker_arm(self.raw) })
    }

    /// Lets UCX work for a moment, or until something has happened; true where it did anything.
    pub(super) fn progress(&mut self) -> bool {
        self.inbox.during(|| {
            (0..STEPS)
                .take_while(|_| {
                    // SAFETY: the worker is alive and used by no other thread; a callback has no
                    // worker, so none is on the stack.
                    let worked = unsafe { result::worker_progress(self.raw) };
                    worked && self.inbox.happened.borrow().is_empty()
                })
                .count()
                > 0
        }) || !self.inbox.happened.borrow().is_empty()
    }

    /// Moves what happened since the last time to the end of `events`. Whoever calls has dealt with
    /// the events of the last time: from here on their operations' names are used again.
    pub(super) fn collect(&mut self, events: &mut Vec<Event>) {
        self.slots.recycle();
        let happened = self.inbox.happened.take();
        events.reserve(happened.len());
        for happened in happened {
            match happened {
                Happened::Message { id, header, body } => {
                    events.push(Event::Message { id, header, body })
                }
                Happened::Failed(endpoint, status) => {
                    events.push(Event::Failed(
                        EndpointId(endpoint),
                        UcxError::new("the endpoint", status),
                    ));
                }
                Happened::Ended(number, status) => {
                    let Some((endpoint, held)) = self.slots.remove(number) else { continue };
                    let result = match status {
                        Status::OK => Ok(()),
                        status => Err(UcxError::new("the operation", status)),
                    };
                    let held = self.give_back(endpoint, result.is_ok(), held);
                    events.push(Event::Ended(OpId(number), result, held));
                }
            }
        }
    }

    fn give_back(&mut self, endpoint: EndpointId, ended_well: bool, held: Held) -> Held {
        if ended_well || matches!(held, Held::Nothing) {
            return held;
        }
        self.quarantine.push((endpoint, held));
        Held::Nothing
    }

    /// The peer at this endpoint reaches for no memory of this process any more.
    pub(super) fn is_done_with(&mut self, endpoint: EndpointId) {
        self.endpoints[endpoint.0].done = true;
    }

    /// Connects to the worker with this address.
    pub(super) fn connect(&mut self, address: &[u8]) -> Result<EndpointId, UcxError> {
        let number = self.endpoints.len();
        // SAFETY: the worker is alive and used by no other thread. `Address::parse`, where
        // addresses come from, takes none but those that `address` has given to a process of the
        // same job, whole and of this version. The callback needs only what `during` sets.
        let raw = self.inbox.during(|| unsafe {
            result::endpoint_create(self.raw, address, inbox::failed, number)
        })?;
        self.endpoints.push(Endpoint { raw: Some(raw), done: false });
        Ok(EndpointId(number))
    }

    /// Sends a message; its end is an event. `None` where the endpoint is closed.
    ///
    /// # Panics
    ///
    /// Where the header is longer than [`HEADER_MAX`].
    pub(super) fn send(
        &mut self,
        endpoint: EndpointId,
        id: u32,
        header: &[u8],
        payload: Option<SharedBuffer>,
        way: Way,
    ) -> Option<OpId> {
        let raw = self.endpoints[endpoint.0].raw?;
        let held = payload.map_or(Held::Nothing, Held::Sent);
        let op = self.slots.insert(endpoint, header, held);
        let slot = self.slots.get(op);
        let payload = match &slot.held {
            Held::Sent(payload) => {
                place(payload.device(), || (payload.as_ptr().cast_mut(), payload.len()))
            }
            _ => place(None, || (std::ptr::null_mut(), 0)),
        };
        if let Held::Sent(payload) = &slot.held {
            prepare(payload.bind());
        }
        let header = &slot.header[..header.len()];
        // SAFETY: the endpoint is open, and its worker used by no other thread. The slot is boxed
        // and its payload shared, so both stay where they are, unchanged, until `collect` ends the
        // slot, after the callback or just below.
        let started = self.inbox.during(|| unsafe {
            result::message_send(raw, id, header, payload, way, inbox::sent, op.0)
        });
        self.note(op, started);
        Some(op)
    }

    /// Fetches bytes that lie with the sender into a buffer of that length; its end is an event.
    ///
    /// # Panics
    ///
    /// Where the buffer has another length than the body said.
    pub(super) fn fetch(
        &mut self,
        endpoint: EndpointId,
        descriptor: Descriptor,
        bytes: usize,
        into: OwnedBuffer,
    ) -> OpId {
        assert_eq!(into.len(), bytes, "the place for a payload has its length");
        let op = self.slots.insert(endpoint, &[], Held::Fetched(into));
        let slot = self.slots.get(op);
        let place = match &mut slot.held {
            Held::Fetched(into) => {
                prepare(into.bind());
                place(into.device(), || (into.as_mut_ptr(), into.len()))
            }
            _ => place(None, || (std::ptr::null_mut(), 0)),
        };
        // SAFETY: the worker is alive and used by no other thread. The descriptor came from its
        // inbox and is consumed here. The buffer is the slot's alone until `collect` ends it.
        let started = self.inbox.during(|| unsafe {
            result::message_fetch(self.raw, descriptor.0, place, inbox::fetched, op.0)
        });
        self.note(op, started);
        op
    }

    fn note(&self, op: OpId, started: Started) {
        // The request of what is under way is freed by its callback.
        if let Started::Over(status) = started {
            self.inbox.happened.borrow_mut().push(Happened::Ended(op.0, status));
        }
    }

    /// Gives up bytes that lie with the sender, which hears that they are not needed.
    pub(super) fn discard(&mut self, descriptor: Descriptor) {
        // SAFETY: the worker is alive and used by no other thread; the descriptor came from its
        // inbox and is consumed here.
        self.inbox.during(|| unsafe { result::message_discard(self.raw, descriptor.0) });
    }

    /// Closes an endpoint: in order, after what was sent has left, or by force, which ends its
    /// operations.
    pub(super) fn close(&mut self, endpoint: EndpointId, by_force: bool) {
        let Some(raw) = self.endpoints[endpoint.0].raw.take() else { return };
        // SAFETY: the endpoint was open, its worker is used by no other thread, and nobody finds it
        // any more.
        match self.inbox.during(|| unsafe { result::endpoint_close(raw, by_force) }) {
            Started::UnderWay(request) => self.closing.push(request),
            Started::Over(Status::OK | Status::CANCELLED) => {}
            Started::Over(status) => {
                tracing::debug!(status = result::describe(status), "closing an endpoint");
            }
        }
    }

    /// Whether endpoints are still being closed.
    pub(super) fn is_closing(&mut self) -> bool {
        self.closing.retain(|request| {
            // SAFETY: the request came from UCX, and is freed below at the latest.
            if unsafe { result::request_status(*request) } == Status::IN_PROGRESS {
                return true;
            }
            // SAFETY: it is over and leaves the list.
            unsafe { result::request_free(*request) };
            false
        });
        !self.closing.is_empty()
    }

    /// What UCX has found on this machine, in its own words.
    pub(super) fn resources(&self) -> String {
        // SAFETY: the context lives as long as its worker, and only this thread uses it.
        unsafe { result::context_info(self.context.0) }
    }

    /// What an endpoint uses, in UCX's own words; nothing where it is closed.
    pub(super) fn lanes(&self, endpoint: EndpointId) -> String {
        // SAFETY: the endpoint is open, and its worker used by no other thread.
        self.endpoints[endpoint.0]
            .raw
            .map_or_else(String::new, |raw| unsafe { result::endpoint_info(raw) })
    }
}

/// Where bytes are: on a device, or else, looked up only then, on the host.
fn place(device: Option<DevicePlace>, host: impl FnOnce() -> (*mut u8, usize)) -> Bytes {
    match device {
        Some(DevicePlace { address, bytes, .. }) => {
            Bytes { start: std::ptr::without_provenance_mut(address as usize), bytes, cuda: true }
        }
        None => {
            let (start, bytes) = host();
            Bytes { start: start.cast(), bytes, cuda: false }
        }
    }
}

/// UCX takes a device to be the thread's own; what it makes of a device that cannot be used it says
/// itself.
fn prepare(bound: std::io::Result<()>) {
    if let Err(error) = bound {
        tracing::debug!(%error, "preparing UCX's thread for memory of a device");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        for endpoint in 0..self.endpoints.len() {
            self.close(EndpointId(endpoint), true);
        }
        for _ in 0..LAST_TURNS {
            let worked = self.progress();
            if !self.is_closing() && !worked {
                break;
            }
        }
        // From here on nobody else reaches the worker.
        self.signal.0.lock().take();
        for request in self.closing.drain(..) {
            // SAFETY: the request came from UCX and is used no more.
            unsafe { result::request_free(request) };
        }
        // Descriptors that nobody has given back.
        for happened in self.inbox.happened.take() {
            if let Happened::Message { body: Body::There(descriptor, _), .. } = happened {
                self.discard(descriptor);
            }
        }
        // SAFETY: the worker is alive, this is its thread, and the signal has lost it. All memory
        // of operations is dropped after this: slots, quarantine, inbox.
        self.inbox.during(|| unsafe { result::worker_destroy(self.raw) });
        let cut_off = self.quarantine.drain(..).chain(self.slots.drain());
        let kept = cut_off.filter(|(endpoint, held)| {
            !self.endpoints[endpoint.0].done && !matches!(held, Held::Nothing)
        });
        KEPT.lock().extend(kept.map(|(_, held)| held));
    }
}

/// Wakes a worker from any thread, as long as there is one.
#[derive(Clone)]
pub(super) struct Signal(Arc<Mutex<Option<Awake>>>);

struct Awake(NonNull<result::Worker>);

// SAFETY: the pointer is used for `ucp_worker_signal` alone, which any thread may call.
unsafe impl Send for Awake {}

impl Signal {
    /// Makes the worker's descriptor readable.
    pub(super) fn wake(&self) {
        let worker = self.0.lock();
        if let Some(Awake(raw)) = &*worker {
            // SAFETY: a worker takes itself out of here, under this lock, before it is destroyed.
            if let Err(error) = unsafe { result::worker_signal(*raw) } {
                tracing::debug!(%error, "waking the engine of UCX");
            }
        }
    }
}
