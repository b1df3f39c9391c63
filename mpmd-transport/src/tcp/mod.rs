//! The transport over TCP sockets between every pair of processes.
//!
//! Each pair has two connections, *control* and *bulk*:
//! [`MessageKind::Data`](mpmd_proto::MessageKind::Data) goes over bulk and everything else over
//! control. So a grant or a heartbeat never queues behind payload. Bulk payloads are read from the
//! socket straight into the buffer they are fetched into. While nobody fetches a payload, it waits
//! in the sockets and delays only later data of the same peer.
//!
//! One named thread drives all sockets and calls the handler, with a tokio runtime of its own.
//! There is one exception: [`Transport::post`] writes a small control message itself if the socket
//! takes it without waiting. That saves a wake-up of the thread.
//!
//! # The end of a connection
//!
//! A peer is down when one of its connections has ended and the other has ended too, or stands
//! still for a second. So everything that a dying or closing peer has sent before is still
//! delivered. A payload that nobody fetches in that second is lost. Messages queued to a peer that
//! closed in order are still sent as long as the peer takes them.

mod connect;
mod connection;
mod drive;
mod read;
mod state;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::transport::{Handler, Ticket, Transport, check_post};
use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::wire::{Header, ProcessId};

pub use connect::PeerListener;
use drive::CloseRequest;
use state::TcpState;

/// The parameters of [`PeerListener::connect`].
#[derive(Clone)]
pub struct TcpConfig {
    /// The id of this process.
    pub process: ProcessId,
    /// Each process's listening address, by process. This process's own element is ignored.
    pub peers: Vec<SocketAddr>,
    /// The job's secret token. A connection whose other end cannot prove that it knows the token is
    /// refused.
    pub token: [u8; 32],
    /// The epoch of the job: the number of the incarnation, the same on every process.
    pub epoch: u64,
    /// Time limit for connecting to all peers together.
    pub peer_timeout: Duration,
    /// The pool that supplies buffers for received control payloads.
    pub pool: Pool,
}

impl fmt::Debug for TcpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is secret.
        f.debug_struct("TcpConfig")
            .field("process", &self.process)
            .field("peers", &self.peers)
            .field("epoch", &self.epoch)
            .field("peer_timeout", &self.peer_timeout)
            .finish_non_exhaustive()
    }
}

/// The transport over TCP sockets, created by [`PeerListener::connect`].
///
/// If dropped without [`Transport::shutdown`], it closes its sockets at once, and peers treat the
/// process as dead. The transport's thread then ends open tickets with
/// [`Closed`](crate::TransportError::Closed).
pub struct Tcp {
    shared: Arc<TcpState>,
    /// Sends the handler to the transport's thread; `None` once `start` was called.
    start: Mutex<Option<oneshot::Sender<Arc<dyn Handler>>>>,
    /// Asks the transport's thread to close; `None` once `shutdown` was called. If dropped unused,
    /// the thread closes everything at once.
    close: Mutex<Option<oneshot::Sender<CloseRequest>>>,
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn process(&self) -> ProcessId {
        self.shared.process
    }

    fn processes(&self) -> usize {
        self.shared.processes()
    }

    fn start(&self, handler: Arc<dyn Handler>) {
        let start = self.start.lock().take();
        let start = start.expect("start is called once");
        // An error means that the thread has ended, after a shutdown: nothing will arrive.
        let _ = start.send(handler);
    }

    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket) {
        check_post(self, to, &header, payload.as_ref());
        self.shared.post(to, header, payload, ticket);
    }

    fn shutdown(&self, deadline: Duration) {
        let Some(close) = self.close.lock().take() else {
            return;
        };
        let (closed, wait) = std::sync::mpsc::channel();
        if close.send(CloseRequest { deadline, closed }).is_ok() {
            // The thread keeps the deadline itself; the extra time is for a handler call in
            // progress.
            let _ = wait.recv_timeout(deadline.saturating_add(drive::LAST_CALL));
        }
    }
}

impl fmt::Debug for Tcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tcp(process {} of {})", self.process(), self.processes())
    }
}
