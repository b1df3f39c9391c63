//! The public face of the transport: passes requests to the engine.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::leaving::LAST_CALL;
use super::queue::{CommandQueue, EngineCommand};
use super::{NAME, UcxConfig, engine};
use crate::transport::{Handler, Ticket, Transport, TransportError, check_post};
use mpmd_memory::SharedBuffer;
use mpmd_proto::wire::{Header, ProcessId};

/// Time that a shutdown waits for a handler call that has not returned, beyond its deadline and the
/// engine's last wait.
const HANDLER_CALL: Duration = Duration::from_secs(1);

/// UCX, opened but not connected. It has an address for peers.
///
/// Dropping this without [`OpenedUcx::connect`] closes UCX at once.
pub struct OpenedUcx {
    address: String,
    /// The queue of commands to the engine; `None` once `connect` has taken it.
    queue: Option<Arc<CommandQueue>>,
}

impl OpenedUcx {
    /// Opens UCX on this machine for a job of `processes` processes, and starts its thread. Blocks
    /// until UCX is open. UCX needs the number of processes to choose between network methods for
    /// few and for many peers.
    ///
    /// # Errors
    ///
    /// If there is no library, if it is too old, or if UCX finds nothing that it can use.
    pub fn open(processes: usize) -> Result<Self, TransportError> {
        let engine = engine::start(processes)?;
        Ok(Self {
            address: engine.address,
            queue: Some(engine.queue),
        })
    }

    /// Returns the address by which peers reach this process: a text of some hundred characters.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connects to all peers. Blocks until a message from each peer has arrived over its
    /// connection, and fails after the peer timeout.
    ///
    /// # Errors
    ///
    /// If a peer has another version of UCX or of this library, or another epoch. Also if a peer
    /// cannot be reached, or sends nothing within the peer timeout. The error names the peer.
    pub fn connect(mut self, config: UcxConfig) -> Result<Arc<Ucx>, TransportError> {
        let Some(queue) = self.queue.take() else {
            return Err(TransportError::Closed);
        };

        // If this fails, the drop ends the engine.
        let mut ucx = Ucx {
            queue,
            process: config.process,
            processes: config.peers.len(),
            lanes: Vec::new(),
            moves_cuda: Vec::new(),
            started: AtomicBool::new(false),
        };
        let (reply, outcome) = mpsc::channel();
        if ucx
            .queue
            .push(EngineCommand::Connect(Box::new(config), reply))
            .is_err()
        {
            return Err(TransportError::Closed);
        }

        match outcome.recv().unwrap_or(Err(TransportError::Closed)) {
            Ok(met) => {
                ucx.lanes = met.lanes;
                ucx.moves_cuda = met.moves_cuda;
                Ok(Arc::new(ucx))
            }
            Err(error) => {
                // The engine says goodbye. Wait for its end: the program may end because of this
                // error.
                ucx.shutdown(Duration::ZERO);
                Err(error)
            }
        }
    }
}

impl Drop for OpenedUcx {
    fn drop(&mut self) {
        if let Some(queue) = &self.queue {
            let _ = queue.push(EngineCommand::Abandon);
        }
    }
}

impl fmt::Debug for OpenedUcx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opened(an address of {} characters)", self.address.len())
    }
}

/// The transport over UCX, created by [`OpenedUcx::connect`].
///
/// If dropped without [`Transport::shutdown`], it says goodbye at once, and peers treat the process
/// as dead. Open tickets then end with [`Closed`](TransportError::Closed), on the engine's thread.
pub struct Ucx {
    queue: Arc<CommandQueue>,
    process: ProcessId,
    processes: usize,
    lanes: Vec<String>,
    /// True for each process with which memory of CUDA devices is exchanged without a copy through
    /// the host.
    moves_cuda: Vec<bool>,
    started: AtomicBool,
}

impl Ucx {
    /// Returns UCX's own description of the connections (lanes) to `peer`; empty for this process
    /// itself.
    ///
    /// # Panics
    ///
    /// If the job has no such process.
    pub fn lanes(&self, peer: ProcessId) -> &str {
        &self.lanes[peer.index()]
    }

    /// Returns true if memory of CUDA devices is exchanged with `peer` without a copy through the
    /// host. UCX must support CUDA on both processes.
    ///
    /// # Panics
    ///
    /// If the job has no such process.
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
        assert!(
            !self.started.swap(true, Ordering::Relaxed),
            "start is called once"
        );
        // After the engine's end nothing arrives.
        let _ = self.queue.push(EngineCommand::Start(handler));
    }

    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket) {
        check_post(self, to, &header, payload.as_ref());
        // After the engine's end no ticket is waited for.
        let _ = self.queue.push(EngineCommand::Post {
            to,
            header,
            payload,
            ticket,
        });
    }

    fn give_up(&self, peer: ProcessId, why: &str) {
        let _ = self.queue.push(EngineCommand::GiveUp {
            peer,
            why: why.to_owned(),
        });
    }

    fn shutdown(&self, deadline: Duration) {
        let (closed, wait) = mpsc::channel();
        if self
            .queue
            .push(EngineCommand::Close(deadline, closed))
            .is_ok()
        {
            // The engine keeps the deadline itself.
            let _ = wait.recv_timeout(deadline.saturating_add(2 * LAST_CALL + HANDLER_CALL));
        }
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        let _ = self.queue.push(EngineCommand::Abandon);
    }
}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ucx(process {} of {})", self.process, self.processes)
    }
}
