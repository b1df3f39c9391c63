//! The callbacks for UCX, and the inbox that they write to.
//!
//! UCX calls back from within its own functions, on the worker's thread. A callback only records
//! the event; everything else is done after UCX has returned.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;

use super::super::result;
use super::super::sys::{UcxStatus, ucp_am_recv_attr_t, ucp_am_recv_param_t, ucp_ep_h};
use super::HEADER_MAX;
use mpmd_memory::{ALIGNMENT, OwnedBuffer, Pool, SharedBuffer};

/// An event that a callback of UCX has recorded.
pub(super) enum RecordedEvent {
    Message {
        id: u32,
        header: HeaderBytes,
        bytes: CallbackBytes,
    },
    /// The operation with this number has ended with this status.
    Ended(usize, UcxStatus),
    /// The endpoint with this number has failed with this status.
    Failed(usize, UcxStatus),
}

/// A copy of the header of a received message.
pub(in super::super) struct HeaderBytes {
    bytes: [u8; HEADER_MAX],
    /// Number of bytes of the header in `bytes`.
    used: usize,
}

impl HeaderBytes {
    /// Returns the bytes of the header.
    pub(in super::super) fn used(&self) -> &[u8] {
        &self.bytes[..self.used]
    }
}

/// A message's payload, as the callback for its arrival has stored it.
pub(super) enum CallbackBytes {
    Body(MessageBody),
    /// The byte range of a small payload in [`Inbox::small`].
    Small(Range<usize>),
}

/// The payload of a received message.
pub(in super::super) enum MessageBody {
    Empty,
    Here(SharedBuffer),
    /// The payload is still in the sender's memory: its descriptor, and its length in bytes.
    There(Descriptor, usize),
}

/// Identifies a payload that is still in the sender's memory. Pass it back to the worker to fetch
/// or discard the payload.
pub(in super::super) struct Descriptor(pub(super) NonNull<c_void>);

/// Collects the events that callbacks report during a call to UCX.
pub(super) struct Inbox {
    pub(super) happened: RefCell<Vec<RecordedEvent>>,
    /// The pool that supplies buffers for payloads that arrived with their message.
    pub(super) pool: RefCell<Option<Pool>>,
    /// The small payloads that have arrived since the last [`Inbox::take_small`], each aligned.
    small: RefCell<Vec<u8>>,
}

/// Largest payload, in bytes, that shares a buffer with others that arrive in the same call.
/// Allocating a separate buffer would take longer than copying it.
const SMALL: usize = 256;

thread_local! {
    /// The inbox of the call to UCX that this thread is in; null outside such calls.
    static CURRENT: Cell<*const Inbox> = const { Cell::new(std::ptr::null()) };
}

impl Inbox {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self {
            happened: RefCell::new(Vec::new()),
            pool: RefCell::new(None),
            small: RefCell::new(Vec::new()),
        })
    }

    /// Calls `call`, during which UCX's callbacks write into this inbox.
    pub(super) fn during<T>(&self, call: impl FnOnce() -> T) -> T {
        struct RestoreInbox(*const Inbox);
        impl Drop for RestoreInbox {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _restore = RestoreInbox(CURRENT.replace(self));
        call()
    }
}

/// Calls `write` with the inbox of the call to UCX that this thread is in.
fn with_current(write: impl FnOnce(&Inbox)) {
    let inbox = CURRENT.get();
    if inbox.is_null() {
        // Every call that can call back runs inside `during`.
        debug_assert!(false, "UCX calls back outside any call");
        return;
    }
    // SAFETY: `during` sets the pointer from a reference that lives while its call is on this
    // thread's stack. It restores the old pointer before it returns. All access through it is
    // shared.
    write(unsafe { &*inbox });
}

/// Records the end of a send, and frees its request.
///
/// # Safety
///
/// Called only by UCX.
pub(super) unsafe extern "C" fn sent(request: *mut c_void, status: UcxStatus, number: *mut c_void) {
    with_current(|inbox| {
        inbox
            .happened
            .borrow_mut()
            .push(RecordedEvent::Ended(number as usize, status))
    });
    free(request);
}

/// Records the end of a fetch, and frees its request.
///
/// # Safety
///
/// Called only by UCX.
pub(super) unsafe extern "C" fn fetched(
    request: *mut c_void,
    status: UcxStatus,
    _: usize,
    number: *mut c_void,
) {
    with_current(|inbox| {
        inbox
            .happened
            .borrow_mut()
            .push(RecordedEvent::Ended(number as usize, status))
    });
    free(request);
}

/// Records the failure of an endpoint.
///
/// # Safety
///
/// Called only by UCX.
pub(super) unsafe extern "C" fn failed(number: *mut c_void, _: ucp_ep_h, status: UcxStatus) {
    with_current(|inbox| {
        inbox
            .happened
            .borrow_mut()
            .push(RecordedEvent::Failed(number as usize, status))
    });
}

/// Records a received message. Copies a payload that came with it; for a rendezvous, keeps the
/// payload's descriptor instead. Drops a message whose header is too long.
///
/// # Safety
///
/// Called only by UCX. The header and the data are valid during the call. For a rendezvous, the
/// descriptor is valid until it is fetched or discarded.
pub(super) unsafe extern "C" fn arrived(
    id: *mut c_void,
    header: *const c_void,
    header_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    param: *const ucp_am_recv_param_t,
) -> UcxStatus {
    if header_bytes > HEADER_MAX {
        // No process of this job sends so long a header; the message is dropped.
        return UcxStatus::OK;
    }

    let mut kept = [0; HEADER_MAX];
    if header_bytes > 0 {
        // SAFETY: UCX guarantees that `header_bytes` bytes are readable there.
        let header = unsafe { std::slice::from_raw_parts(header.cast::<u8>(), header_bytes) };
        kept[..header_bytes].copy_from_slice(header);
    }

    // SAFETY: UCX passes parameters with every message, and always sets their attributes.
    let attributes = unsafe { (*param).recv_attr };
    let rendezvous = attributes & ucp_am_recv_attr_t::UCP_AM_RECV_ATTR_FLAG_RNDV as u64 != 0;

    let (bytes, status) = match NonNull::new(data) {
        Some(descriptor) if rendezvous => {
            let body = MessageBody::There(Descriptor(descriptor), bytes);
            (CallbackBytes::Body(body), UcxStatus::IN_PROGRESS)
        }
        Some(data) if bytes > 0 => {
            // SAFETY: without the flag above, `bytes` bytes are readable there during this call.
            let data = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), bytes) };
            let mut kept = None;
            with_current(|inbox| kept = Some(inbox.keep(data)));
            let outside = || CallbackBytes::Body(MessageBody::Here(data.to_vec().into()));
            (kept.unwrap_or_else(outside), UcxStatus::OK)
        }
        _ => (CallbackBytes::Body(MessageBody::Empty), UcxStatus::OK),
    };

    let id = id as usize as u32;
    let header = HeaderBytes {
        bytes: kept,
        used: header_bytes,
    };
    with_current(|inbox| {
        inbox
            .happened
            .borrow_mut()
            .push(RecordedEvent::Message { id, header, bytes })
    });
    status
}

impl Inbox {
    /// Copies a payload out of UCX's memory.
    fn keep(&self, data: &[u8]) -> CallbackBytes {
        if data.len() > SMALL {
            return CallbackBytes::Body(MessageBody::Here(self.copy(data)));
        }
        let mut small = self.small.borrow_mut();
        let start = small.len().next_multiple_of(ALIGNMENT);
        small.resize(start, 0);
        small.extend_from_slice(data);
        CallbackBytes::Small(start..start + data.len())
    }

    /// Moves the small payloads into one buffer. Returns `None` if there are none.
    pub(super) fn take_small(&self) -> Option<SharedBuffer> {
        let mut small = self.small.borrow_mut();
        let buffer = (!small.is_empty()).then(|| self.copy(&small));
        small.clear();
        buffer
    }

    /// Copies bytes to a buffer of the pool, or outside the pool if it has no memory left.
    fn copy(&self, data: &[u8]) -> SharedBuffer {
        let pooled = self
            .pool
            .borrow()
            .as_ref()
            .and_then(|pool| pool.allocate(data.len()).ok());
        match pooled {
            Some(mut buffer) => {
                buffer.copy_from_slice(data);
                OwnedBuffer::freeze(buffer)
            }
            None => data.to_vec().into(),
        }
    }
}

fn free(request: *mut c_void) {
    if let Some(request) = NonNull::new(request) {
        // SAFETY: UCX passes the request that has ended, and nobody else holds it.
        unsafe { result::request_free(request) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_payloads_share_an_aligned_buffer() {
        let inbox = Inbox::new();
        let pool = Pool::new("test", None);
        *inbox.pool.borrow_mut() = Some(pool.clone());
        let places = [vec![1; 8], vec![2; SMALL], vec![3; 1]].map(|data| match inbox.keep(&data) {
            CallbackBytes::Small(place) => place,
            CallbackBytes::Body(_) => panic!("{} bytes are small", data.len()),
        });
        assert_eq!(pool.stats().live, 0);
        let small = inbox.take_small().unwrap();
        assert_eq!(pool.stats().live, Pool::rounded(small.len()));
        for (place, byte) in places.into_iter().zip(1u8..) {
            let payload = small.slice(place);
            assert!(payload.iter().all(|found| *found == byte));
            assert!((payload.as_ptr() as usize).is_multiple_of(ALIGNMENT));
        }
        assert!(inbox.take_small().is_none(), "they were taken");
        let large = inbox.keep(&[4; SMALL + 1]);
        assert!(
            matches!(large, CallbackBytes::Body(MessageBody::Here(here)) if here.len() == SMALL + 1)
        );
    }
}
