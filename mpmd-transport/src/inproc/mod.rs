//! Processes of one job inside one OS process, for tests and simulation.
//!
//! A [`Fabric`] connects a number of [`Inproc`] endpoints. Each endpoint has one delivery thread,
//! on which its handler is called; the fabric can [kill](Fabric::kill) an endpoint and, by
//! [`Faults`], delay messages by a seed so that they overtake each other.
//!
//! Control payloads, and data of up to 16 KiB, arrive [inline](crate::Payload::Inline): as the very
//! buffer that was posted. Larger data [waits](crate::Payload::Waiting) with its sender and is
//! copied when it is fetched. Between processes that [hand over](Faults::hosts) all data is
//! [lent](crate::Payload::Lent) instead, as over shared memory.

mod delivery;
mod fabric;

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use crate::memory::SharedBuffer;
use crate::transport::{Handler, Ticket, Transport, check_post};
use crate::wire::{Header, ProcessId};

use fabric::Core;

/// Connects the endpoints of a job within one OS process. Clones are the same fabric.
///
/// Endpoints live as long as the fabric or a handle of their own; what is dropped without
/// [`Transport::shutdown`] vanishes as if [killed](Fabric::kill).
#[derive(Clone)]
pub struct Fabric {
    endpoints: Arc<[Arc<Inproc>]>,
}

impl Fabric {
    /// A fabric of `processes` endpoints, all alive.
    ///
    /// # Panics
    ///
    /// Where `processes` does not fit a [`ProcessId`].
    pub fn new(processes: usize, faults: Faults) -> Self {
        let count = u32::try_from(processes).expect("the number of processes fits a process id");
        let core = Arc::new(Core::new(processes, faults));
        let endpoint =
            |process| Arc::new(Inproc { core: core.clone(), process: ProcessId(process) });
        Self { endpoints: (0..count).map(endpoint).collect() }
    }

    /// The endpoint of one process; always the same.
    ///
    /// # Panics
    ///
    /// Where the job has no such process.
    pub fn endpoint(&self, process: ProcessId) -> Arc<Inproc> {
        self.endpoints[process.index()].clone()
    }

    /// Makes a process vanish without a goodbye. A second call does nothing.
    ///
    /// What is still under way from it is lost. Every open ticket towards it, and every ticket of
    /// its own, ends with [`PeerGone`](crate::TransportError::PeerGone); every other handler hears
    /// [`Handler::peer_down`] once. Its own handler hears of nothing but its tickets from then on.
    ///
    /// # Panics
    ///
    /// Where the job has no such process.
    pub fn kill(&self, process: ProcessId) {
        assert!(process.index() < self.endpoints.len(), "no process {process} to kill");
        if let Some(endpoint) = self.endpoints.first() {
            endpoint.core.kill(process);
        }
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fabric({} processes)", self.endpoints.len())
    }
}

/// What a [`Fabric`] does to messages. By default nothing: no delay, and messages of one sender to
/// one receiver keep their order.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Chooses the delays.
    pub seed: u64,
    /// Each message waits for a time from this range before it arrives; chosen by seed, sender,
    /// receiver and the number of the message between the two, and by nothing else.
    pub delay: Option<RangeInclusive<Duration>>,
    /// Processes with the same number hand data over to each other, by process; those beyond its
    /// end do not.
    pub hosts: Vec<usize>,
}

/// One process's end of a [`Fabric`].
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

    fn hands_over(&self, peer: ProcessId) -> bool {
        self.core.hands_over(self.process, peer)
    }

    /// These processes have one address space, and one of each device.
    fn carries_device_memory(&self, peer: ProcessId) -> bool {
        self.hands_over(peer)
    }

    fn lent_to(&self, peer: ProcessId) -> u64 {
        self.core.lent(self.process, peer)
    }

    fn borrowed_from(&self, peer: ProcessId) -> u64 {
        self.core.lent(peer, self.process)
    }

    /// # Panics
    ///
    /// Where it was called before, or after [`Transport::shutdown`], and where the system gives no
    /// thread.
    fn start(&self, handler: Arc<dyn Handler>) {
        delivery::start(&self.core, self.process, handler);
    }

    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket) {
        check_post(self, to, &header, payload.as_ref());
        // The wire format is exercised here too, although nothing is encoded.
        debug_assert_eq!(Header::decode(&header.encode()), Ok(header));
        self.core.post(self.process, to, header, payload, ticket);
    }

    /// Waits until receivers have taken what was posted; what they have been lent they may keep.
    /// Where the deadline comes first, what they have not taken is lost.
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
        write!(f, "Inproc(process {} of {})", self.process, self.processes())
    }
}
