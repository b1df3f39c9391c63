//! Ownership of UCX's objects: a [`UcxWorker`] owns its context, its endpoints, and the memory of
//! all operations in flight.
//!
//! A worker lives on one thread and is dropped there; only its [`Signal`] goes to other threads.
//! Memory that is given to an operation comes back when the operation ends well. After a failure
//! UCX may still write late, so the memory stays in quarantine until the worker is destroyed.
//!
//! Even that is not enough for peers that read and write this process's memory directly, as
//! processes of one host do. Such a peer may have been stopped and go on later. So memory that it
//! knows of is never freed, unless the peer is [known to be done](UcxWorker::is_done_with).

mod inbox;
mod slots;

use std::ffi::c_void;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::result::{self, OperationBytes, SendProtocol, StartedOperation, UcxError};
use super::sys::UcxStatus;
use mpmd_memory::{DevicePlace, OwnedBuffer, Pool, SharedBuffer};

use inbox::{CallbackBytes, HeaderBytes, Inbox, RecordedEvent};
use slots::{EndedSlot, OperationSlots};

pub(super) use inbox::{Descriptor, MessageBody};
pub(super) use slots::{OpId, OperationMemory};

/// Largest length of a message's header in bytes.
pub(super) const HEADER_MAX: usize = 80;

/// Largest number of UCX progress calls in one [`UcxWorker::progress`]. Over sockets, a large
/// message takes many calls.
const STEPS: usize = 32;

/// Largest number of UCX progress calls when a worker is dropped, in which UCX closes its
/// endpoints.
const LAST_TURNS: usize = 1000;

/// Memory that peers may still access after their worker is gone. It is never freed.
static KEPT: Mutex<Vec<OperationMemory>> = Mutex::new(Vec::new());

/// A UCX context, which is ended when this is dropped.
struct OwnedContext(NonNull<result::Context>);

impl OwnedContext {
    /// Creates a context for `processes` processes. `settings` are pairs of name and value, applied
    /// in addition to the user's environment variables.
    fn new(processes: usize, settings: &[(&str, &str)]) -> Result<Self, UcxError> {
        // SAFETY: `UcxWorker::new`, the only caller, has loaded the library; `drop` ends the
        // context.
        unsafe { result::init(processes, settings) }.map(Self)
    }
}

impl Drop for OwnedContext {
    fn drop(&mut self) {
        // SAFETY: a context belongs to a worker, and the worker destroys itself before its context
        // is dropped.
        unsafe { result::cleanup(self.0) };
    }
}

/// Identifies an endpoint of a worker.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct EndpointId(usize);

struct Endpoint {
    /// UCX's endpoint; `None` once it is closed.
    raw: Option<NonNull<result::Endpoint>>,
    /// True if the peer no longer accesses this process's memory: it has said so, or has died.
    done: bool,
}

/// An event of a worker. Events are reported in the order in which they happened.
pub(super) enum WorkerEvent {
    /// A message arrived.
    Message {
        /// The message's id, as given to [`UcxWorker::send`].
        id: u32,
        /// The message's header.
        header: HeaderBytes,
        /// The payload.
        body: MessageBody,
    },
    /// An operation has ended, with this result. The memory is returned only after success;
    /// otherwise it is [`OperationMemory::Nothing`].
    Ended(OpId, Result<(), UcxError>, OperationMemory),
    /// An endpoint has failed with this error. The caller must close it by force.
    Failed(EndpointId, UcxError),
}

/// The state of a message right after [`UcxWorker::send`].
pub(super) enum SendOutcome {
    /// The message has been sent.
    Gone,
    /// The message is being sent. A [`WorkerEvent::Ended`] will follow.
    UnderWay,
    /// The endpoint is closed.
    Closed,
}

/// A UCX worker: receives messages, and sends them over its endpoints.
pub(super) struct UcxWorker {
    raw: NonNull<result::Worker>,
    signal: Signal,
    inbox: Box<Inbox>,
    /// An empty list that is swapped with the inbox's list while events are collected.
    spare: Vec<RecordedEvent>,
    slots: OperationSlots,
    endpoints: Vec<Endpoint>,
    /// UCX requests of endpoints that are being closed.
    closing: Vec<NonNull<c_void>>,
    /// Memory that UCX may still write even though its operation has failed.
    quarantine: Vec<EndedSlot>,
    // Declared last: dropped after the worker.
    context: OwnedContext,
    /// Makes the type neither `Send` nor `Sync`: UCX requires that one thread uses the worker.
    _here: PhantomData<*mut ()>,
}

impl UcxWorker {
    /// Creates a worker on this thread that receives messages with the given `ids`. `processes` and
    /// `settings` are passed to its context.
    pub(super) fn new(
        processes: usize,
        settings: &[(&str, &str)],
        ids: impl IntoIterator<Item = u32>,
    ) -> Result<Self, UcxError> {
        let context = OwnedContext::new(processes, settings)?;
        // SAFETY: the context lives in the worker created below, and the worker is destroyed before
        // it.
        let raw = unsafe { result::worker_create(context.0) }?;
        let worker = Self {
            raw,
            signal: Signal(Arc::new(Mutex::new(Some(Awake(raw))))),
            inbox: Inbox::new(),
            spare: Vec::new(),
            slots: OperationSlots::default(),
            endpoints: Vec::new(),
            closing: Vec::new(),
            quarantine: Vec::new(),
            context,
            _here: PhantomData,
        };

        for id in ids {
            // SAFETY: the worker was created here, on this thread. The callback needs nothing but
            // the pointer that `Inbox::during` sets around every call that calls back.
            unsafe { result::worker_on_message(worker.raw, id, inbox::arrived) }?;
        }
        Ok(worker)
    }

    /// Sets the pool that supplies buffers for payloads that arrive with their message.
    pub(super) fn copy_into(&self, pool: Pool) {
        *self.inbox.pool.borrow_mut() = Some(pool);
    }

    /// Returns true if memory of CUDA devices can be sent, and fetched into, without a copy.
    pub(super) fn moves_cuda(&self) -> bool {
        // SAFETY: the context lives as long as its worker.
        let found = unsafe { result::context_moves_cuda(self.context.0) };
        found
            .inspect_err(|error| tracing::debug!(%error, "asking UCX for kinds of memory"))
            .unwrap_or(false)
    }

    /// Returns the address by which other workers connect to this one.
    pub(super) fn address(&self) -> Result<Vec<u8>, UcxError> {
        // SAFETY: the worker is alive.
        unsafe { result::worker_address(self.raw) }
    }

    /// Returns a handle that wakes this worker from other threads.
    pub(super) fn signal(&self) -> Signal {
        self.signal.clone()
    }

    /// Returns the descriptor that becomes readable when an armed worker has work.
    pub(super) fn descriptor(&self) -> Result<BorrowedFd<'_>, UcxError> {
        // SAFETY: the worker is alive.
        let descriptor = unsafe { result::worker_descriptor(self.raw) }?;
        // SAFETY: the descriptor is open as long as the worker lives, and the borrow ends before
        // the worker.
        Ok(unsafe { BorrowedFd::borrow_raw(descriptor) })
    }

    /// Arms the worker: its descriptor becomes readable at the next work. Returns false if there is
    /// work to do first.
    pub(super) fn arm(&self) -> Result<bool, UcxError> {
        // SAFETY: the worker is alive and, being bound to its thread, used by no other.
        self.inbox
            .during(|| unsafe { result::worker_arm(self.raw) })
    }

    /// Lets UCX make progress for at most 32 calls, or until an event is recorded. Returns true if
    /// there was any work or event.
    pub(super) fn progress(&mut self) -> bool {
        self.inbox.during(|| {
            (0..STEPS)
                .take_while(|_| {
                    // SAFETY: the worker is alive and used by no other thread. A callback has no
                    // worker, so no other progress call is on the stack.
                    let worked = unsafe { result::worker_progress(self.raw) };
                    worked && self.inbox.happened.borrow().is_empty()
                })
                .count()
                > 0
        }) || !self.inbox.happened.borrow().is_empty()
    }

    /// Appends the events since the last call to `events`. The caller must have handled all earlier
    /// events, because their operation ids are reused from now on.
    pub(super) fn collect(&mut self, events: &mut Vec<WorkerEvent>) {
        self.slots.recycle();
        let mut happened = self.inbox.happened.replace(std::mem::take(&mut self.spare));
        let small = self.inbox.take_small();

        for happened in happened.drain(..) {
            match happened {
                RecordedEvent::Message { id, header, bytes } => {
                    let body = match bytes {
                        CallbackBytes::Body(body) => body,
                        CallbackBytes::Small(range) => {
                            small.as_ref().map_or(MessageBody::Empty, |small| {
                                MessageBody::Here(small.slice(range))
                            })
                        }
                    };
                    events.push(WorkerEvent::Message { id, header, body })
                }
                RecordedEvent::Failed(endpoint, status) => {
                    events.push(WorkerEvent::Failed(
                        EndpointId(endpoint),
                        UcxError::new("the endpoint", status),
                    ));
                }
                RecordedEvent::Ended(number, status) => {
                    let Some(EndedSlot { endpoint, held }) = self.slots.remove(number) else {
                        continue;
                    };
                    let result = match status {
                        UcxStatus::OK => Ok(()),
                        status => Err(UcxError::new("the operation", status)),
                    };
                    let held = self.give_back(endpoint, result.is_ok(), held);
                    events.push(WorkerEvent::Ended(OpId(number), result, held));
                }
            }
        }

        self.spare = happened;
    }

    /// Returns the memory of an ended operation. If the operation failed, keeps the memory in
    /// quarantine instead.
    fn give_back(
        &mut self,
        endpoint: EndpointId,
        ended_well: bool,
        held: OperationMemory,
    ) -> OperationMemory {
        if ended_well || matches!(held, OperationMemory::Nothing) {
            return held;
        }
        self.quarantine.push(EndedSlot { endpoint, held });
        OperationMemory::Nothing
    }

    /// Records that the peer at this endpoint no longer accesses this process's memory.
    pub(super) fn is_done_with(&mut self, endpoint: EndpointId) {
        self.endpoints[endpoint.0].done = true;
    }

    /// Connects to the worker with this address, and returns the new endpoint.
    pub(super) fn connect(&mut self, address: &[u8]) -> Result<EndpointId, UcxError> {
        let number = self.endpoints.len();
        // SAFETY: the worker is alive and used by no other thread. Addresses come from
        // `UcxAddress::parse`, which accepts only complete addresses that `address` has given to a
        // process of the same job and version. The callback needs only the pointer that `during`
        // sets.
        let raw = self.inbox.during(|| unsafe {
            result::endpoint_create(self.raw, address, inbox::failed, number)
        })?;
        self.endpoints.push(Endpoint {
            raw: Some(raw),
            done: false,
        });
        Ok(EndpointId(number))
    }

    /// Stores a message's header and payload. [`UcxWorker::send`] then sends it.
    ///
    /// # Panics
    ///
    /// If the header is longer than [`HEADER_MAX`].
    pub(super) fn store(
        &mut self,
        endpoint: EndpointId,
        header: &[u8],
        payload: Option<SharedBuffer>,
    ) -> OpId {
        self.slots.insert(
            endpoint,
            header,
            payload.map_or(OperationMemory::Nothing, OperationMemory::Sent),
        )
    }

    /// Sends a stored message. Unless the result is [`SendOutcome::UnderWay`], the caller must take
    /// the message's memory back with [`UcxWorker::take_back`].
    ///
    /// # Panics
    ///
    /// If the message is already being sent.
    pub(super) fn send(&mut self, op: OpId, id: u32, way: SendProtocol) -> SendOutcome {
        let slot = self.slots.get(op);
        assert!(!slot.under_way, "a message is sent once");
        let Some(raw) = self.endpoints[slot.endpoint.0].raw else {
            return SendOutcome::Closed;
        };

        let payload = match &slot.held {
            OperationMemory::Sent(payload) => {
                prepare(payload.bind());
                place(payload.device(), || {
                    (payload.as_ptr().cast_mut(), payload.len())
                })
            }
            _ => place(None, || (std::ptr::null_mut(), 0)),
        };

        slot.under_way = true;
        let header = &slot.header[..slot.header_bytes];
        // SAFETY: the endpoint is open, and no other thread uses its worker. The slot is boxed and
        // its payload shared. So both stay in place, unchanged, while the slot is under way: until
        // the line below if the message has left, else until `collect` ends it after the callback
        // or an error noted below. `take_back` refuses a slot under way.
        let started = self.inbox.during(|| unsafe {
            result::message_send(raw, id, header, payload, way, inbox::sent, op.0)
        });

        if let StartedOperation::Over(UcxStatus::OK) = started {
            self.slots.get(op).under_way = false;
            return SendOutcome::Gone;
        }
        self.note(op, started);
        SendOutcome::UnderWay
    }

    /// Removes a stored message that is not being sent, and returns its memory.
    ///
    /// # Panics
    ///
    /// If the message is being sent.
    pub(super) fn take_back(&mut self, op: OpId) -> OperationMemory {
        self.slots.take_back(op)
    }

    /// Fetches a payload of `bytes` bytes from the sender's memory into `into`. A
    /// [`WorkerEvent::Ended`] follows at the end.
    ///
    /// # Panics
    ///
    /// If `into` does not have `bytes` bytes.
    pub(super) fn fetch(
        &mut self,
        endpoint: EndpointId,
        descriptor: Descriptor,
        bytes: usize,
        into: OwnedBuffer,
    ) -> OpId {
        assert_eq!(into.len(), bytes, "the place for a payload has its length");
        let op = self
            .slots
            .insert(endpoint, &[], OperationMemory::Fetched(into));
        let slot = self.slots.get(op);
        slot.under_way = true;

        let place = match &mut slot.held {
            OperationMemory::Fetched(into) => {
                prepare(into.bind());
                place(into.device(), || (into.as_mut_ptr(), into.len()))
            }
            _ => place(None, || (std::ptr::null_mut(), 0)),
        };
        // SAFETY: the worker is alive and used by no other thread. The descriptor came from its
        // inbox and is consumed here. Only the slot has the buffer until `collect` ends it.
        let started = self.inbox.during(|| unsafe {
            result::message_fetch(self.raw, descriptor.0, place, inbox::fetched, op.0)
        });
        self.note(op, started);
        op
    }

    /// Records the end of an operation that ended as soon as it was started.
    fn note(&self, op: OpId, started: StartedOperation) {
        // The callback frees the request of an operation in flight.
        if let StartedOperation::Over(status) = started {
            self.inbox
                .happened
                .borrow_mut()
                .push(RecordedEvent::Ended(op.0, status));
        }
    }

    /// Discards a payload that is still in the sender's memory. The sender learns that it is not
    /// needed.
    pub(super) fn discard(&mut self, descriptor: Descriptor) {
        // SAFETY: the worker is alive and used by no other thread; the descriptor came from its
        // inbox and is consumed here.
        self.inbox
            .during(|| unsafe { result::message_discard(self.raw, descriptor.0) });
    }

    /// Closes an endpoint. By force, its operations fail at once; otherwise it closes after
    /// everything sent has left. Does not wait. Does nothing if the endpoint is closed already.
    pub(super) fn close(&mut self, endpoint: EndpointId, by_force: bool) {
        let Some(raw) = self.endpoints[endpoint.0].raw.take() else {
            return;
        };
        // SAFETY: the endpoint was open, and no other thread uses its worker. It was taken out
        // above, so nothing uses it again.
        let close = || unsafe { result::endpoint_close(raw, by_force) };
        match self.inbox.during(close) {
            StartedOperation::UnderWay(request) => self.closing.push(request),
            StartedOperation::Over(UcxStatus::OK | UcxStatus::CANCELLED) => {}
            StartedOperation::Over(status) => {
                tracing::debug!(status = result::describe(status), "closing an endpoint");
            }
        }
    }

    /// Returns true if endpoints are still being closed.
    pub(super) fn is_closing(&mut self) -> bool {
        self.closing.retain(|request| {
            // SAFETY: the request came from UCX and has not been freed: the lines below free it and
            // remove it from the list.
            if unsafe { result::request_status(*request) } == UcxStatus::IN_PROGRESS {
                return true;
            }
            // SAFETY: the request is over and leaves the list.
            unsafe { result::request_free(*request) };
            false
        });
        !self.closing.is_empty()
    }

    /// Returns UCX's description of the connections (lanes) of an endpoint; empty if it is closed.
    pub(super) fn lanes(&self, endpoint: EndpointId) -> String {
        // SAFETY: the endpoint is open, and no other thread uses its worker.
        self.endpoints[endpoint.0]
            .raw
            .map_or_else(String::new, |raw| unsafe { result::endpoint_info(raw) })
    }
}

/// Returns the address range of a buffer: on `device`, or in host memory, as `host` returns it, if
/// `device` is `None`.
fn place(device: Option<DevicePlace>, host: impl FnOnce() -> (*mut u8, usize)) -> OperationBytes {
    match device {
        Some(DevicePlace { address, bytes, .. }) => OperationBytes {
            start: std::ptr::without_provenance_mut(address as usize),
            bytes,
            cuda: true,
        },
        None => {
            let (start, bytes) = host();
            OperationBytes {
                start: start.cast(),
                bytes,
                cuda: false,
            }
        }
    }
}

/// Logs the error of binding this thread to a CUDA device, which UCX expects before it uses the
/// device's memory. UCX itself reports devices that it cannot use.
fn prepare(bound: std::io::Result<()>) {
    if let Err(error) = bound {
        tracing::debug!(%error, "preparing UCX's thread for memory of a device");
    }
}

impl Drop for UcxWorker {
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

        // From here on no other thread reaches the worker.
        self.signal.0.lock().take();
        for request in self.closing.drain(..) {
            // SAFETY: the request came from UCX and is not used again.
            unsafe { result::request_free(request) };
        }

        // Descriptors that were never given back.
        for happened in self.inbox.happened.take() {
            if let RecordedEvent::Message {
                bytes: CallbackBytes::Body(MessageBody::There(descriptor, _)),
                ..
            } = happened
            {
                self.discard(descriptor);
            }
        }
        // SAFETY: the worker is alive, this is its thread, and the signal no longer has it. All
        // memory of operations is dropped after this: slots, quarantine and inbox.
        self.inbox
            .during(|| unsafe { result::worker_destroy(self.raw) });

        let cut_off = self.quarantine.drain(..).chain(self.slots.drain());
        let kept = cut_off.filter(|ended| {
            !self.endpoints[ended.endpoint.0].done
                && !matches!(ended.held, OperationMemory::Nothing)
        });
        KEPT.lock().extend(kept.map(|ended| ended.held));
    }
}

/// Wakes a worker from any thread, as long as the worker exists. The default value wakes no worker.
#[derive(Clone, Default)]
pub(super) struct Signal(Arc<Mutex<Option<Awake>>>);

struct Awake(NonNull<result::Worker>);

// SAFETY: the pointer is used for `ucp_worker_signal` only, which any thread may call.
unsafe impl Send for Awake {}

impl Signal {
    /// Makes the worker's descriptor readable, if the worker still exists.
    pub(super) fn wake(&self) {
        let worker = self.0.lock();
        if let Some(Awake(raw)) = &*worker {
            // SAFETY: before a worker is destroyed, it removes itself from here under this lock.
            if let Err(error) = unsafe { result::worker_signal(*raw) } {
                tracing::debug!(%error, "waking the engine of UCX");
            }
        }
    }
}
