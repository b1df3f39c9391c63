//! Processes of one job inside one OS process, for tests and simulation.
//!
//! A [`Fabric`] connects a number of [`Inproc`] endpoints. Each endpoint has one delivery thread,
//! which calls its handler. The fabric can [kill](Fabric::kill) an endpoint. With [`FabricFaults`]
//! it also delays messages, by a seed, so that they overtake each other.
//!
//! Control payloads, and data of up to 16 KiB, arrive [inline](crate::Payload::Inline), as the very
//! buffer that was posted. Larger data [waits](crate::Payload::Waiting) with its sender and is
//! copied when it is fetched. Between processes of one [host](FabricFaults::hosts) all data is
//! [lent](crate::Payload::Lent) instead, as over shared memory.

mod delivery;
mod fabric;

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use crate::transport::{Handler, Ticket, Transport, check_post};
use mpmd_memory::SharedBuffer;
use mpmd_proto::wire::{Header, ProcessId};

use fabric::Core;

/// Connects the endpoints of a job whose processes are all simulated in one OS process. A clone
/// refers to the same fabric.
///
/// An endpoint lives until the fabric and all handles to the endpoint are dropped. An endpoint
/// dropped without [`Transport::shutdown`] vanishes as if [killed](Fabric::kill).
#[derive(Clone)]
pub struct Fabric {
    endpoints: Arc<[Arc<Inproc>]>,
}

impl Fabric {
    /// Creates a fabric of `processes` endpoints, all alive.
    ///
    /// # Panics
    ///
    /// If `processes` does not fit a [`ProcessId`].
    pub fn new(processes: usize, faults: FabricFaults) -> Self {
        let count = u32::try_from(processes).expect("the number of processes fits a process id");
        let core = Arc::new(Core::new(processes, faults));
        let endpoint = |process| {
            Arc::new(Inproc {
                core: core.clone(),
                process: ProcessId(process),
            })
        };
        Self {
            endpoints: (0..count).map(endpoint).collect(),
        }
    }

    /// Returns the endpoint of `process`: the same one at every call.
    ///
    /// # Panics
    ///
    /// If the job has no such process.
    pub fn endpoint(&self, process: ProcessId) -> Arc<Inproc> {
        self.endpoints[process.index()].clone()
    }

    /// Makes a process vanish without a goodbye. A second call does nothing.
    ///
    /// Messages from the process that have not arrived are lost. Every open ticket of a message to
    /// or from the process ends with [`PeerGone`](crate::TransportError::PeerGone). The handler of
    /// every other process gets [`Handler::peer_down`] once. The handler of the killed process gets
    /// nothing more than the ends of its tickets.
    ///
    /// # Panics
    ///
    /// If the job has no such process.
    pub fn kill(&self, process: ProcessId) {
        assert!(
            process.index() < self.endpoints.len(),
            "no process {process} to kill"
        );
        if let Some(endpoint) = self.endpoints.first() {
            endpoint.core.kill(process);
        }
    }
}

impl Fabric {
    /// Delays the messages that `from` posts to `to` during the next `time`. They are delivered at
    /// its end.
    ///
    /// # Panics
    ///
    /// If the job has no such processes.
    pub fn hold(&self, from: ProcessId, to: ProcessId, time: Duration) {
        self.endpoints[from.index()].core.hold(from, to, time);
    }

    /// Returns the number of posted messages of all processes that have not ended.
    pub fn under_way(&self) -> usize {
        self.endpoints
            .first()
            .map_or(0, |endpoint| endpoint.core.under_way())
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fabric({} processes)", self.endpoints.len())
    }
}

/// The faults that a [`Fabric`] injects. The default is no delay, with messages from one sender to
/// one receiver delivered in order.
#[derive(Clone, Debug, Default)]
pub struct FabricFaults {
    /// Seed of the random delays.
    pub seed: u64,
    /// Range of the time that each message is delayed. The delay depends only on seed, sender,
    /// receiver and the number of the message between the two.
    pub delay: Option<RangeInclusive<Duration>>,
    /// Host number of each process, by index. Processes with the same number lend each other
    /// payloads instead of copying them. Processes beyond the end of the list always copy.
    pub hosts: Vec<usize>,
}

/// One process's endpoint of a [`Fabric`].
pub struct Inproc {
    core: Arc<Core>,
    process: ProcessId,
}

impl Transport for Inproc {
    fn name(&self) -> &'static str {
        "inproc"
    }

    fn process(&self) -> ProcessId {
        self.process
    }

    fn processes(&self) -> usize {
        self.core.processes()
    }

    fn zero_copy(&self, peer: ProcessId) -> bool {
        self.core.zero_copy(self.process, peer)
    }

    /// Returns true for peers on the same [host](FabricFaults::hosts): all such processes are one
    /// OS process, with one address space and the same devices.
    fn carries_device_memory(&self, peer: ProcessId) -> bool {
        self.zero_copy(peer)
    }

    fn lent_to(&self, peer: ProcessId) -> u64 {
        self.core.lent(self.process, peer)
    }

    fn borrowed_from(&self, peer: ProcessId) -> u64 {
        self.core.lent(peer, self.process)
    }

    /// Starts the delivery thread, which calls `handler`.
    ///
    /// # Panics
    ///
    /// If called twice, if called after [`Transport::shutdown`], or if the system cannot start a
    /// thread.
    fn start(&self, handler: Arc<dyn Handler>) {
        delivery::start(&self.core, self.process, handler);
    }

    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket) {
        check_post(self, to, &header, payload.as_ref());
        // Tests the wire format too, although no header is sent in encoded form.
        debug_assert_eq!(Header::decode(&header.encode()), Ok(header));
        self.core.post(self.process, to, header, payload, ticket);
    }

    /// Waits until receivers have taken the posted messages; receivers may still hold lent
    /// payloads. Messages that are not taken within `deadline` are lost. Then waits up to a second
    /// for a handler call that has not returned.
    fn shutdown(&self, deadline: Duration) {
        self.core.shutdown(self.process, deadline);
    }
}

impl Drop for Inproc {
    fn drop(&mut self) {
        self.core.abandon(self.process);
    }
}

impl fmt::Debug for Inproc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Inproc(process {} of {})",
            self.process,
            self.processes()
        )
    }
}
