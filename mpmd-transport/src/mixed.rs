//! Two transports at once. Each peer is reached by the better one of those that both sides have.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::transport::{Handler, Parking, Payload, Ticket, Transport, TransportError, check_post};
use mpmd_memory::{Arena, DeviceSharing, SharedBuffer};
use mpmd_proto::wire::{Header, ProcessId};

/// A transport that reaches some peers through one transport (`near`) and all others through
/// another (`far`).
///
/// A thread that waits for messages polls `near`; `far` has threads of its own.
pub struct Mixed {
    name: &'static str,
    near: Arc<dyn Transport>,
    far: Arc<dyn Transport>,
    /// Indexed by process: true if the process is reached by `near`.
    is_near: Arc<[bool]>,
}

impl Mixed {
    /// Creates a transport that uses `near` for each process whose entry in `is_near` is true, and
    /// `far` for the others. Both processes of a pair must use the same transport for each other.
    /// Each of the two transports may also be connected to processes for which it is not used.
    ///
    /// # Panics
    ///
    /// If the two transports belong to different processes or to jobs of different sizes, or if
    /// `is_near` does not have one entry per process.
    pub fn new(
        name: &'static str,
        near: Arc<dyn Transport>,
        far: Arc<dyn Transport>,
        is_near: Vec<bool>,
    ) -> Self {
        let place = |transport: &Arc<dyn Transport>| (transport.process(), transport.processes());
        assert_eq!(
            place(&near),
            place(&far),
            "two transports of different places"
        );
        assert_eq!(is_near.len(), near.processes(), "ways to all processes");

        Self {
            name,
            near,
            far,
            is_near: is_near.into(),
        }
    }

    /// Returns the transport that reaches `peer`.
    fn to(&self, peer: ProcessId) -> &Arc<dyn Transport> {
        if self.is_near.get(peer.index()).is_some_and(|near| *near) {
            &self.near
        } else {
            &self.far
        }
    }
}

/// A [`Handler`] for one of the two transports. It forwards a peer's messages and its loss only if
/// this transport is the one used for the peer. It forwards the completion of every send.
struct SideHandler {
    handler: Arc<dyn Handler>,
    is_near: Arc<[bool]>,
    near: bool,
}

impl SideHandler {
    fn concerns(&self, peer: ProcessId) -> bool {
        self.is_near
            .get(peer.index())
            .is_some_and(|near| *near == self.near)
    }
}

impl Handler for SideHandler {
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload) {
        if self.concerns(from) {
            self.handler.arrived(from, header, payload);
        }
    }

    fn done(&self, ticket: Ticket, result: Result<(), TransportError>) {
        self.handler.done(ticket, result);
    }

    fn peer_down(&self, peer: ProcessId, why: TransportError) {
        if self.concerns(peer) {
            self.handler.peer_down(peer, why);
        }
    }
}

impl Transport for Mixed {
    fn name(&self) -> &'static str {
        self.name
    }

    fn process(&self) -> ProcessId {
        self.near.process()
    }

    fn processes(&self) -> usize {
        self.near.processes()
    }

    fn arena(&self) -> Option<Arena> {
        self.near.arena()
    }

    fn zero_copy(&self, peer: ProcessId) -> bool {
        self.to(peer).zero_copy(peer)
    }

    fn carries_device_memory(&self, peer: ProcessId) -> bool {
        self.to(peer).carries_device_memory(peer)
    }

    fn share_devices(
        &self,
        sharing: Arc<dyn DeviceSharing>,
        with: &[bool],
        peer_timeout: Duration,
    ) -> Result<(), TransportError> {
        for (transport, near) in [(&self.near, true), (&self.far, false)] {
            let with: Vec<bool> = with
                .iter()
                .zip(&*self.is_near)
                .map(|(has, is_near)| *has && *is_near == near)
                .collect();
            transport.share_devices(sharing.clone(), &with, peer_timeout)?;
        }
        Ok(())
    }

    fn lent_to(&self, peer: ProcessId) -> u64 {
        self.to(peer).lent_to(peer)
    }

    fn borrowed_from(&self, peer: ProcessId) -> u64 {
        self.to(peer).borrowed_from(peer)
    }

    fn start(&self, handler: Arc<dyn Handler>) {
        for (transport, near) in [(&self.near, true), (&self.far, false)] {
            transport.start(Arc::new(SideHandler {
                handler: handler.clone(),
                is_near: self.is_near.clone(),
                near,
            }));
        }
    }

    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket) {
        check_post(self, to, &header, payload.as_ref());
        self.to(to).post(to, header, payload, ticket);
    }

    fn progress(&self) -> bool {
        self.near.progress()
    }

    fn drive(&self, again: &mut dyn FnMut() -> bool) {
        self.near.drive(again);
    }

    fn parking(&self) -> Option<Parking> {
        self.near.parking()
    }

    fn park(&self, parking: Parking, deadline: Instant) {
        self.near.park(parking, deadline);
    }

    fn wake(&self) {
        self.near.wake();
    }

    fn give_up(&self, peer: ProcessId, why: &str) {
        self.to(peer).give_up(peer, why);
    }

    fn shutdown(&self, deadline: Duration) {
        std::thread::scope(|scope| {
            scope.spawn(|| self.near.shutdown(deadline));
            self.far.shutdown(deadline);
        });
    }
}

impl fmt::Debug for Mixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Mixed({}, process {} of {})",
            self.name,
            self.process(),
            self.processes()
        )
    }
}
