//! The public transport over shared memory, and its thread.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open, setrlimit};

use super::address::ShmAddress;
use super::futex::SystemFutex;
use super::meeting::{OwnDoor, meet};
use super::socket::LocalListener;
use super::state::ShmState;
use super::{NAME, ShmConfig, environment};
use crate::transport::{Handler, Parking, Ticket, Transport, TransportError, check_post};
use mpmd_base::deadline::after;
use mpmd_memory::{Arena, DeviceSharing, SharedBuffer};
use mpmd_proto::wire::{Header, ProcessId};

/// Interval at which the engine looks for dead peers and returned loans.
const ROUND: Duration = Duration::from_millis(50);
/// Interval at which a shutdown checks if all messages have been sent.
const FLUSH_LOOK: Duration = Duration::from_micros(200);
/// Time that a shutdown waits at its end for borrowed device memory to be closed.
const MOST_CLOSING: Duration = Duration::from_secs(1);

/// Shared memory that works on this process but is not connected to peers yet.
#[derive(Debug)]
pub struct OpenedShm {
    address: ShmAddress,
    listener: LocalListener,
    door: OwnDoor,
    arena: Arena,
}

impl OpenedShm {
    /// Tests if this process can share memory: creates shared memory, a listening socket and a
    /// pidfd.
    ///
    /// Raises this process's limit on open descriptors as far as allowed. Each segment takes one
    /// descriptor in this process, and one in every process to which it is lent.
    ///
    /// # Errors
    ///
    /// [`TransportError::Unavailable`] with the operation that the system does not support or
    /// allow.
    pub fn open() -> Result<Self, TransportError> {
        const MAKING: &str = "making memory that others can map (memfd_create)";
        let arena = Arena::shared().map_err(|error| unavailable(MAKING, &error))?;
        let door = OwnDoor::new().map_err(|error| unavailable(MAKING, &error))?;

        let address = ShmAddress::of_this_process()
            .map_err(|error| unavailable("finding out where this process runs", &error))?;
        let listener = LocalListener::bind(&address.socket_name())
            .map_err(|error| unavailable("listening on a local socket", &error))?;

        // Only a pidfd proves that a peer has exited.
        pidfd_open(getpid(), PidfdFlags::empty())
            .map_err(|error| unavailable("watching a process (pidfd_open)", &error.into()))?;

        let mut limit = getrlimit(Resource::Nofile);
        if limit.current.is_some() && limit.current != limit.maximum {
            limit.current = limit.maximum;
            // If it fails, there is room for fewer segments.
            let _ = setrlimit(Resource::Nofile, limit);
        }

        Ok(Self {
            address,
            listener,
            door,
            arena,
        })
    }

    /// Returns the address that peers need to reach this process.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Connects to all peers in the configuration and starts the transport's thread. Blocks until
    /// all are connected; fails after the configuration's `peer_timeout`.
    ///
    /// # Errors
    ///
    /// If a peer does not connect in time, or belongs to another job, user or build. The error
    /// names the peer.
    ///
    /// # Panics
    ///
    /// If `config.peers` has no element for `config.process`.
    pub fn connect(self, config: &ShmConfig) -> Result<Arc<Shm>, TransportError> {
        assert!(
            config.process.index() < config.peers.len(),
            "no process {}",
            config.process
        );
        let peers = meet(&self.listener, &self.door, config)?;
        let shared = ShmState::new(config.process, peers, self.door.door, self.arena.clone());

        // The arena outlives the transport, so its callbacks hold only weak references.
        let weak = Arc::downgrade(&shared);
        self.arena.on_shortage(move || {
            if let Some(shared) = weak.upgrade() {
                shared.reclaim();
            }
        });
        let weak = Arc::downgrade(&shared);
        self.arena.on_segment(move |segment| {
            if let Some(shared) = weak.upgrade() {
                shared.announce(segment);
            }
        });

        let stop = Arc::new(AtomicBool::new(false));
        let engine_shared = shared.clone();
        let engine_stop = stop.clone();
        let engine = std::thread::Builder::new()
            .name(format!("mpmd-shm-{}", config.process))
            .spawn(move || run(&engine_shared, &engine_stop))
            .map_err(|error| environment("starting the transport's thread".to_owned(), &error))?;

        Ok(Arc::new(Shm {
            shared,
            arena: self.arena,
            stop,
            engine: Mutex::new(Some(engine)),
        }))
    }
}

/// Returns the error of an `operation` that the system does not support or allow.
fn unavailable(operation: &str, error: &std::io::Error) -> TransportError {
    TransportError::Unavailable {
        transport: NAME,
        why: format!("{operation} failed: {error}"),
    }
}

/// Runs the transport's thread, the engine. It reads the rings while no other thread does. Returns
/// once `stop` is set.
fn run(shared: &ShmState, stop: &AtomicBool) {
    let stopped = || stop.load(Ordering::Acquire);
    let mut next_round = Instant::now() + ROUND;
    while !stopped() {
        let worked = shared.progress();
        let now = Instant::now();
        if now >= next_round {
            next_round = now + ROUND;
            shared.watch();
            shared.tidy();
        }
        if !worked {
            shared.sleep(next_round.saturating_duration_since(now), stopped);
        }
    }
    shared.finish();
}

/// The transport over shared memory, created by [`OpenedShm::connect`].
///
/// If dropped without [`Transport::shutdown`], it closes all connections at once, and peers treat
/// the process as dead. The transport's thread ends the open tickets.
pub struct Shm {
    pub(super) shared: Arc<ShmState>,
    arena: Arena,
    stop: Arc<AtomicBool>,
    /// The transport's thread; `None` once a shutdown has taken it.
    engine: Mutex<Option<JoinHandle<()>>>,
}

impl Shm {
    /// Returns the number of bytes that a peer has borrowed from this process, as far as known
    /// here. Ends returned loans first.
    pub fn lent_to(&self, peer: ProcessId) -> u64 {
        self.shared.reclaim();
        self.shared.ledger.lock().bytes(peer)
    }

    /// Returns the number of bytes that this process has borrowed from a peer.
    pub fn borrowed_from(&self, peer: ProcessId) -> u64 {
        let peer = self.shared.peers.get(peer.index()).and_then(Option::as_ref);
        peer.map_or(0, |peer| peer.returns.borrowed())
    }
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn process(&self) -> ProcessId {
        self.shared.process
    }

    fn processes(&self) -> usize {
        self.shared.peers.len()
    }

    fn arena(&self) -> Option<Arena> {
        Some(self.arena.clone())
    }

    fn zero_copy(&self, peer: ProcessId) -> bool {
        self.shared
            .peers
            .get(peer.index())
            .is_some_and(Option::is_some)
    }

    fn carries_device_memory(&self, peer: ProcessId) -> bool {
        let peer = self.shared.peers.get(peer.index()).and_then(Option::as_ref);
        peer.is_some_and(|peer| peer.shares_devices())
    }

    fn share_devices(
        &self,
        sharing: Arc<dyn DeviceSharing>,
        with: &[bool],
        peer_timeout: Duration,
    ) -> Result<(), TransportError> {
        self.shared.share_devices(sharing, with, peer_timeout)
    }

    fn lent_to(&self, peer: ProcessId) -> u64 {
        Self::lent_to(self, peer)
    }

    fn borrowed_from(&self, peer: ProcessId) -> u64 {
        Self::borrowed_from(self, peer)
    }

    fn start(&self, handler: Arc<dyn Handler>) {
        self.shared.start(handler);
    }

    fn post(&self, to: ProcessId, header: Header, payload: Option<SharedBuffer>, ticket: Ticket) {
        check_post(self, to, &header, payload.as_ref());
        self.shared.post(to, &header, payload, ticket);
    }

    fn progress(&self) -> bool {
        self.shared.progress()
    }

    fn drive(&self, again: &mut dyn FnMut() -> bool) {
        let driver = self.shared.door.enter();
        while again() {
            self.shared.progress();
        }
        driver.leave(|| self.shared.progress_to_the_end());
    }

    fn parking(&self) -> Option<Parking> {
        Some(Parking(self.shared.door.parking()))
    }

    fn park(&self, parking: Parking, deadline: Instant) {
        // A faulty peer may suppress a wake-up, so the wait is bounded.
        let timeout = deadline
            .saturating_duration_since(Instant::now())
            .min(2 * ROUND);

        let driver = self
            .shared
            .door
            .park(&SystemFutex, parking.0, Some(timeout), || {
                self.shared.has_work()
            });
        driver.leave(|| self.shared.progress_to_the_end());
    }

    fn wake(&self) {
        self.shared.door.wake(&SystemFutex);
    }

    fn shutdown(&self, deadline: Duration) {
        let Some(engine) = self.engine.lock().take() else {
            return;
        };
        let until = after(Instant::now(), deadline);

        self.shared.say_goodbye();
        while !self.shared.is_flushed() && Instant::now() < until {
            self.shared.progress();
            std::thread::sleep(FLUSH_LOOK);
        }

        self.stop.store(true, Ordering::Release);
        self.shared.door.rouse(&SystemFutex);
        // The thread ends as soon as a handler call that is under way returns.
        let _ = engine.join();

        self.shared.devices.reaper.settle(
            until
                .saturating_duration_since(Instant::now())
                .min(MOST_CLOSING),
        );
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.shared.door.rouse(&SystemFutex);
    }
}

impl fmt::Debug for Shm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shm(process {} of {})", self.process(), self.processes())
    }
}

impl fmt::Debug for OwnDoor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnDoor")
    }
}
