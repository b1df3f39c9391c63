//! Simulated processes that can be killed, and the network between them.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Instant, Mutex, now};
use mpmd_proto::router::{Failure, FailureKind};
use mpmd_rendezvous::{LocalLink, LocalServer};
use mpmd_transport::inproc::{Fabric, FabricFaults};
use mpmd_transport::{Transport, TransportError};

use super::meeting::{MeetingGuest, Meetings};
use crate::error::{Error, Result};
use crate::exec::Runtime;

/// The simulated transports of a job, one for each epoch. Clones share the network.
#[derive(Clone)]
pub(super) struct EpochNetwork {
    faults: FabricFaults,
    fabrics: Arc<Mutex<BTreeMap<u64, Fabric>>>,
    meetings: Meetings,
}

impl EpochNetwork {
    pub(super) fn new(faults: FabricFaults) -> Self {
        Self {
            faults,
            fabrics: Arc::default(),
            meetings: Meetings::default(),
        }
    }

    pub(super) fn of_epoch(&self, epoch: u64, processes: usize) -> Fabric {
        let new = || {
            let seed = self.faults.seed.wrapping_add(epoch - 1);
            Fabric::new(
                processes,
                FabricFaults {
                    seed,
                    ..self.faults.clone()
                },
            )
        };
        self.fabrics.lock().entry(epoch).or_insert_with(new).clone()
    }

    /// Holds back messages from one process to another for `time`, in the newest epoch.
    pub(super) fn hold(&self, from: ProcessId, to: ProcessId, time: Duration) {
        let newest = self.fabrics.lock().values().next_back().cloned();
        newest.iter().for_each(|fabric| fabric.hold(from, to, time));
    }

    pub(super) fn under_way(&self) -> usize {
        self.fabrics.lock().values().map(Fabric::under_way).sum()
    }
}

/// The state of a simulated process over the epochs of its job: running, killed or ended.
#[derive(Default)]
pub(super) struct ProcessLife(Mutex<LifeState>);

#[derive(Default)]
struct LifeState {
    is_dead: bool,
    /// The time at which the process was killed; `None` if it ended by itself or still runs.
    killed: Option<Instant>,
    /// The time at which the process's thread ended; `None` before.
    ended: Option<Instant>,
    rendezvous: Option<RendezvousLink>,
    /// The process's place in the network of the current epoch.
    place: Option<NetworkPlace>,
    runtime: Weak<Runtime>,
}

/// The connection of a simulated process to the rendezvous.
struct RendezvousLink {
    server: Weak<LocalServer>,
    link: LocalLink,
}

/// A simulated process's number in an epoch, with the network.
#[derive(Clone)]
pub(super) struct NetworkPlace {
    pub(super) network: EpochNetwork,
    pub(super) epoch: u64,
    /// Number of processes in the epoch.
    pub(super) processes: usize,
    pub(super) process: ProcessId,
}

impl NetworkPlace {
    fn fabric(&self) -> Fabric {
        self.network.of_epoch(self.epoch, self.processes)
    }

    /// Connects the process to the others of its epoch. Blocks until all have arrived, at most for
    /// the peer timeout.
    ///
    /// # Errors
    ///
    /// If another process does not arrive.
    pub(super) fn connect(&self, peer_timeout: Duration) -> Result<(), TransportError> {
        let faults = &self.network.faults;
        self.network.meetings.connect(&MeetingGuest {
            epoch: self.epoch,
            process: self.process,
            processes: self.processes,
            peer_timeout,
            seed: faults.seed,
            delay: faults.delay.clone(),
        })
    }

    /// Removes the process, which was killed.
    fn kill(&self) {
        self.network.meetings.loses(self.epoch, self.process);
        self.fabric().kill(self.process);
    }
}

/// The times at which a simulated process was killed and at which its thread ended.
pub(super) struct LifeTimes {
    /// The time at which the process was killed; `None` if it ended by itself or still runs.
    pub(super) killed: Option<Instant>,
    /// The time at which the process's thread ended; `None` before.
    pub(super) ended: Option<Instant>,
}

impl ProcessLife {
    /// Records the process's connection to the rendezvous.
    ///
    /// # Errors
    ///
    /// If the process was killed.
    pub(super) fn meets(&self, server: &Arc<LocalServer>, link: LocalLink) -> Result<()> {
        let mut state = self.0.lock();
        state.rendezvous = Some(RendezvousLink {
            server: Arc::downgrade(server),
            link,
        });
        match state.is_dead {
            true => {
                drop(state);
                server.cut(link);
                Err(killed())
            }
            false => Ok(()),
        }
    }

    /// Gives the process a place in the network of an epoch, and returns its transport. From then
    /// on others can connect to it.
    ///
    /// # Errors
    ///
    /// If the process was killed.
    pub(super) fn takes(&self, place: &NetworkPlace) -> Result<Arc<dyn Transport>> {
        let mut state = self.0.lock();
        state.runtime = Weak::new();
        state.place = Some(place.clone());
        if state.is_dead {
            drop(state);
            place.kill();
            return Err(killed());
        }
        place.network.meetings.arrives(place.epoch, place.process);
        Ok(place.fabric().endpoint(place.process))
    }

    /// Records the runtime of the process in the current epoch.
    pub(super) fn runs(&self, runtime: &Arc<Runtime>) {
        let mut state = self.0.lock();
        state.runtime = Arc::downgrade(runtime);
        if state.is_dead {
            drop(state);
            vanish(runtime);
        }
    }

    /// Records that the process has ended.
    pub(super) fn ends(&self) {
        self.0.lock().ended = Some(now());
    }

    /// Returns the times at which the process was killed and its thread ended.
    pub(super) fn times(&self) -> LifeTimes {
        let state = self.0.lock();
        LifeTimes {
            killed: state.killed,
            ended: state.ended,
        }
    }

    /// Kills the process: its operations fail, and the others receive no more messages from it.
    pub(super) fn kill(&self) {
        let mut state = self.0.lock();
        state.is_dead = true;
        if state.ended.is_none() {
            state.killed.get_or_insert_with(now);
        }
        let rendezvous = state.rendezvous.take();
        let place = state.place.take();
        let runtime = state.runtime.upgrade();
        drop(state);

        place.iter().for_each(NetworkPlace::kill);
        if let Some(RendezvousLink { server, link }) = rendezvous
            && let Some(server) = server.upgrade()
        {
            server.cut(link);
        }
        runtime.iter().for_each(vanish);
    }
}

/// Returns the error of a process that was killed.
fn killed() -> Error {
    Error::Environment("this process was killed in simulation".to_owned())
}

/// Fails all operations of a process that was killed.
fn vanish(runtime: &Arc<Runtime>) {
    let me = runtime.me;
    let op = runtime.router.lock().count();
    let message = format!("process {me} was lost in simulation at operation {op}");
    runtime.fail_job(Arc::new(Failure::new(
        FailureKind::PeerLost,
        me,
        op,
        message,
    )));
}
