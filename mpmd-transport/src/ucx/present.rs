//! The transport as the rest of the program sees it: hands to the engine what is asked.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::leaving::LAST_CALL;
use super::queue::{Command, Queue};
use super::{NAME, UcxConfig, engine};
use crate::memory::SharedBuffer;
use crate::transport::{Handler, Ticket, Transport, TransportError, check_post};
use crate::wire::{Header, ProcessId};

/// How long a shutdown waits, beyond its deadline and the engine's own last wait, for a handler
/// call that is under way.
const HANDLER_CALL: Duration = Duration::from_secs(1);

/// UCX, opened but not connected: it has an address for others.
///
/// Dropped without [`Opened::connect`] it closes at once.
pub struct Opened {
    address: String,
    /// Taken by `connect`.
    queue: Option<Arc<Queue>>,
}

impl Opened {
    /// Opens UCX on this machine for a job of so many processes, and starts its thread. UCX goes by
    /// their number where a network has ways that suit few peers and others that suit many.
    ///
    /// # Errors
    ///
    /// Where there is no library, or an old one, or UCX finds nothing that it can use.
    pub fn open(processes: usize) -> Result<Self, TransportError> {
        let (address, queue) = engine::start(processes)?;
        Ok(Self { address, queue: Some(queue) })
    }

    /// What peers need to know to reach this process: some hundred characters.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connects to all peers, and hears from each over its connection.
    ///
    /// # Errors
    ///
    /// Where a peer runs another version of UCX or of this library, belongs to another epoch,
    /// cannot be reached, or is not heard of within the patience; which, is said.
    pub fn connect(mut self, config: UcxConfig) -> Result<Arc<Ucx>, TransportError> {
        let Some(queue) = self.queue.take() else { return Err(TransportError::Closed) };
        let (process, processes) = (config.process, config.peers.len());
        let (reply, outcome) = mpsc::channel();
        // Dropped where this fails, which ends the engine.
        let started = AtomicBool::new(false);
        let mut ucx =
            Ucx { queue, process, processes, lanes: Vec::new(), moves_cuda: Vec::new(), started };
        if ucx.queue.push(Command::Connect(Box::new(config), reply)).is_err() {
            return Err(TransportError::Closed);
        }
        match outcome.recv().unwrap_or(Err(TransportError::Closed)) {
            Ok(met) => {
                (ucx.lanes, ucx.moves_cuda) = (met.lanes, met.moves_cuda);
                Ok(Arc::new(ucx))
            }
            Err(error) => {
                // The engine says goodbye, and is better gone when the program ends for this error.
                ucx.shutdown(Duration::ZERO);
                Err(error)
            }
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(queue) = &self.queue {
            let _ = queue.push(Command::Abandon);
        }
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opened(an address of {} characters)", self.address.len())
    }
}

/// The transport over UCX; made by [`Opened::connect`].
///
/// Dropped without [`Transport::shutdown`] it says goodbye at once, which peers see as its death;
/// open tickets end with [`Closed`](TransportError::Closed), on the engine's thread.
pub struct Ucx {
    queue: Arc<Queue>,
    process: ProcessId,
    processes: usize,
    lanes: Vec<String>,
    /// By process.
    moves_cuda: Vec<bool>,
    started: AtomicBool,
}

impl Ucx {
    /// What carries messages to `peer`, in UCX's own words; nothing for this process itself.
    ///
    /// # Panics
    ///
    /// Where the job has no such process.
    pub fn lanes(&self, peer: ProcessId) -> &str {
        &self.lanes[peer.index()]
    }

    /// Whether memory of CUDA devices goes to `peer`, and comes from it, as it is: where UCX has
    /// CUDA on both sides.
    ///
    /// # Panics
    ///
    /// Where the job has no such process.
    pub fn moves_cuda(&self, peer: ProcessId) -> bool {
        self.moves_cuda[peer.index()]
    }
}

impl Transport for Ucx {
    fn name(&self) -> &'static str {
        NAME
    }

    fn process(&self) -> ProcessId {
        self.process
    }

    fn processes(&self) -> usize {
        self.processes
    }

    fn start(&self, handler: Arc<dyn Handler>) {
        assert!(!self.started.swap(true, Ordering::Relaxed), "start is called once");
        // After the end nothing arrives.
        let _ = self.queue.push(Command::Start(handler));
    }

    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket) {
        check_post(self, to, &header, payload.as_ref());
        // After the end nobody listens to tickets.
        let _ = self.queue.push(Command::Post { to, header, payload, ticket });
    }

    fn give_up(&self, peer: ProcessId, why: &str) {
        let _ = self.queue.push(Command::GiveUp { peer, why: why.to_owned() });
    }

    fn shutdown(&self, deadline: Duration) {
        let (closed, wait) = mpsc::channel();
        if self.queue.push(Command::Close(deadline, closed)).is_ok() {
            // The engine keeps the deadline itself.
            let _ = wait.recv_timeout(deadline.saturating_add(2 * LAST_CALL + HANDLER_CALL));
        }
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        let _ = self.queue.push(Command::Abandon);
    }
}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ucx(process {} of {})", self.process, self.processes)
    }
}
