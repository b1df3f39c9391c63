//! Simulated processes that can be killed, and the network between them.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Instant, Mutex, now};
use mpmd_proto::router::{Failure, FailureKind};
use mpmd_rendezvous::{LocalLink, LocalServer};
use mpmd_transport::Transport;
use mpmd_transport::inproc::{Fabric, FabricFaults};

use crate::error::{Error, Result};
use crate::exec::Runtime;

/// The transports of a job: one for each epoch. Clones are the same network.
#[derive(Clone)]
pub(super) struct EpochNetwork {
    faults: FabricFaults,
    fabrics: Arc<Mutex<BTreeMap<u64, Fabric>>>,
}

impl EpochNetwork {
    pub(super) fn new(faults: FabricFaults) -> Self {
        Self {
            faults,
            fabrics: Arc::default(),
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

    /// Holds back messages between two processes in the newest epoch.
    pub(super) fn hold(&self, from: ProcessId, to: ProcessId, time: Duration) {
        let newest = self.fabrics.lock().values().next_back().cloned();
        newest.iter().for_each(|fabric| fabric.hold(from, to, time));
    }

    pub(super) fn under_way(&self) -> usize {
        self.fabrics.lock().values().map(Fabric::under_way).sum()
    }
}

/// The life of a simulated process, over the epochs of its job.
#[derive(Default)]
pub(super) struct ProcessLife(Mutex<LifeState>);

#[derive(Default)]
struct LifeState {
    is_dead: bool,
    /// The time at which it was killed, if that was before its end.
    killed: Option<Instant>,
    /// The time at which its thread has ended.
    ended: Option<Instant>,
    rendezvous: Option<RendezvousLink>,
    /// Its place in the running epoch.
    place: Option<FabricPlace>,
    runtime: Weak<Runtime>,
}

/// The connection of a simulated process to the rendezvous.
struct RendezvousLink {
    server: Weak<LocalServer>,
    link: LocalLink,
}

/// The place of a simulated process in the network of an epoch.
struct FabricPlace {
    fabric: Fabric,
    process: ProcessId,
}

/// The times of the two ends of a simulated process.
pub(super) struct LifeTimes {
    /// The time at which it was killed, if that was before its end.
    pub(super) killed: Option<Instant>,
    /// The time at which its thread has ended.
    pub(super) ended: Option<Instant>,
}

impl ProcessLife {
    /// Notes the connection to the rendezvous.
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

    /// Returns the transport of a place.
    ///
    /// # Errors
    ///
    /// If the process was killed.
    pub(super) fn takes(&self, fabric: Fabric, place: ProcessId) -> Result<Arc<dyn Transport>> {
        let mut state = self.0.lock();
        state.runtime = Weak::new();
        state.place = Some(FabricPlace {
            fabric: fabric.clone(),
            process: place,
        });
        match state.is_dead {
            true => {
                drop(state);
                fabric.kill(place);
                Err(killed())
            }
            false => Ok(fabric.endpoint(place)),
        }
    }

    /// Notes the runtime in the place that was taken.
    pub(super) fn runs(&self, runtime: &Arc<Runtime>) {
        let mut state = self.0.lock();
        state.runtime = Arc::downgrade(runtime);
        if state.is_dead {
            drop(state);
            vanish(runtime);
        }
    }

    /// Notes that the process has come to its end.
    pub(super) fn ends(&self) {
        self.0.lock().ended = Some(now());
    }

    /// Returns the times at which the process was killed and has ended, if it was and has.
    pub(super) fn times(&self) -> LifeTimes {
        let state = self.0.lock();
        LifeTimes {
            killed: state.killed,
            ended: state.ended,
        }
    }

    /// Kills the process: its operations fail, and the others hear nothing more from it.
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

        if let Some(FabricPlace { fabric, process }) = place {
            fabric.kill(process);
        }
        if let Some(RendezvousLink { server, link }) = rendezvous
            && let Some(server) = server.upgrade()
        {
            server.cut(link);
        }
        runtime.iter().for_each(vanish);
    }
}

/// The error of a process that was killed.
fn killed() -> Error {
    Error::Environment("this process was killed in simulation".to_owned())
}

/// Fails the operations of a process that was killed.
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
