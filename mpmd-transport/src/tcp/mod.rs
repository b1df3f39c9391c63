//! Sockets between every pair of processes.
//!
//! Each pair has two connections, *control* and *bulk*: [`Kind::Data`](crate::Kind::Data) goes over
//! bulk and everything else over control, so that a grant or a heartbeat never queues behind
//! payload. Bulk payloads are read from the socket straight into the buffer they are fetched into;
//! while nobody fetches one, it waits in the sockets and holds up nothing but later data of the
//! same peer.
//!
//! One named thread drives all sockets and calls the handler; its tokio runtime is nobody else's
//! business. The exception is a small control message: [`Transport::post`] writes it at once, where
//! the socket takes it without waiting, which saves a wake-up of that thread.
//!
//! # The end of a connection
//!
//! A peer is down when one of its connections has ended and the other has ended too or stands still
//! for a second: what a dying or closing peer has sent before is thus still delivered. A payload
//! that nobody fetches in that second is lost. What was queued to a peer that closed in order is
//! still sent as long as the peer takes it.

mod connect;
mod drive;
mod line;
mod preamble;
mod read;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::memory::{Pool, SharedBuffer};
use crate::transport::{Handler, Ticket, Transport, check_post};
use crate::wire::{Header, ProcessId};

pub use connect::Listener;
use drive::{Close, Shared};

/// What [`Listener::connect`] needs to know of the job.
#[derive(Clone)]
pub struct TcpConfig {
    /// Who this process is.
    pub process: ProcessId,
    /// Where each process listens, by process; this process's own entry is not looked at.
    pub peers: Vec<SocketAddr>,
    /// The job's secret: who does not know it is no peer.
    pub token: [u8; 32],
    /// The incarnation of the job, the same on every process.
    pub epoch: u64,
    /// How long all peers together may take to connect.
    pub patience: Duration,
    /// Where control payloads are read into.
    pub pool: Pool,
}

impl fmt::Debug for TcpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token stays secret.
        f.debug_struct("TcpConfig")
            .field("process", &self.process)
            .field("peers", &self.peers)
            .field("epoch", &self.epoch)
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}

/// The transport over sockets; made by [`Listener::connect`].
///
/// Dropped without [`Transport::shutdown`] it closes its sockets at once, which peers see as its
/// death; open tickets end with [`Closed`](crate::TransportError::Closed), on the transport's
/// thread.
pub struct Tcp {
    shared: Arc<Shared>,
    /// Taken by `start`.
    start: Mutex<Option<oneshot::Sender<Arc<dyn Handler>>>>,
    /// Taken by `shutdown`; dropped unused, the thread closes everything at once.
    close: Mutex<Option<oneshot::Sender<Close>>>,
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
        let Some(close) = self.close.lock().take() else { return };
        let (closed, wait) = std::sync::mpsc::channel();
        if close.send(Close { deadline, closed }).is_ok() {
            // The thread keeps the deadline itself; the rest is for a handler call that is under
            // way.
            let _ = wait.recv_timeout(deadline.saturating_add(drive::LAST_CALL));
        }
    }
}

impl fmt::Debug for Tcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tcp(process {} of {})", self.process(), self.processes())
    }
}
