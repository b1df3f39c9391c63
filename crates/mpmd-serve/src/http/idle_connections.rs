//! Connections without a request: one ends when a new one needs its place, first of all one that
//! has sent no request yet.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use mpmd_base::block::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use super::request_log::RequestRecord;

/// Time limit for the last bytes of a reply on a connection that is closed to make room.
pub(super) const LAST_BYTES: Duration = Duration::from_millis(200);

/// The open connections that have no request at the moment.
#[derive(Debug, Default)]
pub(super) struct IdleConnections {
    waiting: Mutex<IdleTickets>,
    /// Wakes the listener when a connection becomes idle.
    became_idle: Notify,
}

#[derive(Debug, Default)]
struct IdleTickets {
    /// Number of times that a connection has become idle: the number of the last ticket.
    tickets: u64,
    /// The idle connections, with the signal that closes each. Those that end first come first.
    connections: BTreeMap<IdleTicket, Arc<Notify>>,
}

/// The place of an idle connection in the order in which they end.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct IdleTicket {
    /// True if the connection has had a request.
    was_used: bool,
    number: u64,
}

impl IdleConnections {
    /// Waits for a permit for a newly accepted connection. Meanwhile closes idle connections, one
    /// at a time: first those without a request so far, then the others, the longest idle first.
    /// `None` if the semaphore is closed.
    pub(super) async fn make_room(&self, permits: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(permit) = permits.clone().try_acquire_owned() {
                return Some(permit);
            }
            let ends = self.end_first();
            let next_try = async {
                match ends {
                    true => sleep(2 * LAST_BYTES).await,
                    false => self.became_idle.notified().await,
                }
            };
            tokio::select! {
                permit = permits.clone().acquire_owned() => return permit.ok(),
                () = next_try => {}
            }
        }
    }

    /// Signals one idle connection to close. Returns false if no connection is idle.
    fn end_first(&self) -> bool {
        let first = self.waiting.lock().connections.pop_first();
        first.is_some_and(|(_, signal)| {
            signal.notify_one();
            true
        })
    }
}

/// Tracks whether a connection has a request or is idle.
#[derive(Debug)]
pub(super) struct ConnectionUse {
    idle: Arc<IdleConnections>,
    /// The signal that closes the connection.
    end: Arc<Notify>,
    state: Mutex<ConnectionUseState>,
}

#[derive(Debug, Default)]
struct ConnectionUseState {
    /// The ticket of an idle connection in [`IdleTickets`]. The listener may have removed it from
    /// there.
    ticket: Option<IdleTicket>,
    has_request: bool,
    /// True if the connection has had a request.
    was_used: bool,
    /// True from the start of a request until the last byte of its reply is flushed.
    has_unflushed: bool,
}

impl ConnectionUse {
    /// Creates the state of a new connection, which is idle.
    pub(super) fn new(idle: Arc<IdleConnections>) -> Arc<Self> {
        let new = Self {
            idle,
            end: Arc::default(),
            state: Mutex::default(),
        };
        new.set_idle();
        Arc::new(new)
    }

    /// Marks the connection as busy with a request until the returned guard is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> RequestGuard {
        let mut state = self.state.lock();
        state.has_request = true;
        state.was_used = true;
        state.has_unflushed = true;
        if let Some(ticket) = state.ticket.take() {
            self.idle.waiting.lock().connections.remove(&ticket);
        }
        drop(state);
        RequestGuard(self.clone())
    }

    pub(super) fn has_request(&self) -> bool {
        self.state.lock().has_request
    }

    /// Records that all bytes of replies so far have been written.
    pub(super) fn flush(&self) {
        let mut state = self.state.lock();
        state.has_unflushed = state.has_request;
    }

    /// True if a request is open, or bytes of its reply may be unwritten.
    pub(super) fn has_unflushed(&self) -> bool {
        self.state.lock().has_unflushed
    }

    /// Waits for the signal that closes the connection.
    pub(super) async fn end(&self) {
        self.end.notified().await;
    }

    fn set_idle(&self) {
        let mut state = self.state.lock();
        let mut waiting = self.idle.waiting.lock();
        waiting.tickets += 1;
        let ticket = IdleTicket {
            was_used: state.was_used,
            number: waiting.tickets,
        };
        waiting.connections.insert(ticket, self.end.clone());
        state.ticket = Some(ticket);
        state.has_request = false;
        drop((waiting, state));
        self.idle.became_idle.notify_one();
    }
}

impl Drop for ConnectionUse {
    fn drop(&mut self) {
        if let Some(ticket) = self.state.lock().ticket.take() {
            self.idle.waiting.lock().connections.remove(&ticket);
        }
    }
}

/// Marks a connection as busy. Dropped at the end of the reply.
#[derive(Debug)]
pub(super) struct RequestGuard(Arc<ConnectionUse>);

impl RequestGuard {
    /// Moves this guard and the request's record into the reply's body. They are dropped with the
    /// body.
    pub(super) fn until_end_of(self, reply: Response, record: Arc<RequestRecord>) -> Response {
        let guarded = |body| GuardedBody {
            body,
            _guard: self,
            _record: record,
        };
        reply.map(|body| Body::new(guarded(body)))
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.set_idle();
    }
}

/// The body of a reply, which owns the guard and the record of its request.
struct GuardedBody {
    body: Body,
    _guard: RequestGuard,
    _record: Arc<RequestRecord>,
}

impl HttpBody for GuardedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
