//! Faults of a simulation, and the check for things that a job has left behind.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Condvar, Mutex, note, now, stop_group};
use mpmd_base::deadline::after;
use mpmd_memory::Pool;

use super::super::Program;
use super::life::{EpochNetwork, ProcessLife};
use crate::exec::Runtime;

/// A fault that is injected at a time after the start of the job.
#[derive(Clone, Debug)]
pub(super) struct TimedFault {
    pub(super) after: Duration,
    pub(super) fault: SimulatedFault,
}

#[derive(Clone, Debug)]
pub(super) enum SimulatedFault {
    Lose(ProcessId),
    Stop(ProcessId, Duration),
    Hold(ProcessId, ProcessId, Duration),
}

impl SimulatedFault {
    pub(super) fn inject(&self, parts: &SimulatedParts) {
        note(format_args!("{self:?}"));
        match *self {
            Self::Lose(process) => parts.lives[process.index()].kill(),
            Self::Stop(process, time) => stop_group(process.0, time),
            Self::Hold(from, to, time) => parts.network.hold(from, to, time),
        }
    }
}

/// A flag that is set when a job is over, and that threads can wait for.
#[derive(Clone, Default)]
pub(super) struct JobOver(Arc<(Mutex<bool>, Condvar)>);

impl JobOver {
    pub(super) fn say(&self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }

    /// Calls `then` after `time`, unless the job is over by then.
    pub(super) fn unless_within(&self, time: Duration, then: impl FnOnce()) {
        let until = after(now(), time);
        let mut is_over = self.0.0.lock();
        while !*is_over {
            if self.0.1.wait_until(&mut is_over, until).timed_out() {
                drop(is_over);
                return then();
            }
        }
    }
}

/// The parts of a simulated job that must no longer exist at its end.
pub(super) struct SimulatedParts {
    pub(super) network: EpochNetwork,
    /// The life of each process, indexed by process; includes spares and processes that start
    /// later.
    pub(super) lives: Vec<Arc<ProcessLife>>,
    processes: Mutex<Vec<ProcessParts>>,
    /// Descriptions of messages that were still in the routers of processes which ended in order.
    left_in_routers: Mutex<Vec<String>>,
}

struct ProcessParts {
    me: ProcessId,
    runtime: Weak<Runtime>,
    pools: Vec<NamedPool>,
}

/// A memory pool of a process, with its name for messages.
struct NamedPool {
    name: String,
    pool: Pool,
}

impl SimulatedParts {
    /// Creates the record of a job on `network` with `processes` processes, including spares.
    pub(super) fn new(network: EpochNetwork, processes: usize) -> Self {
        let lives = (0..processes).map(|_| Arc::default()).collect();
        Self {
            network,
            lives,
            processes: Mutex::default(),
            left_in_routers: Mutex::default(),
        }
    }

    pub(super) fn add(&self, p: &Program) {
        let runtime = &p.runtime;
        let of_devices = runtime.devices.iter().map(|device| NamedPool {
            name: format!("device {}", device.id),
            pool: device.pool.clone(),
        });
        let mut pools: Vec<_> = of_devices.collect();
        pools.push(NamedPool {
            name: "host memory".to_owned(),
            pool: runtime.host_memory.clone(),
        });
        pools.push(NamedPool {
            name: "staging".to_owned(),
            pool: runtime.staging.clone(),
        });

        let process = ProcessParts {
            me: runtime.me,
            runtime: Arc::downgrade(runtime),
            pools,
        };
        self.processes.lock().push(process);
    }

    /// Records the number of messages left in the router of a process that has ended in order.
    pub(super) fn ended(&self, runtime: &Runtime) {
        let kept = runtime.router.lock().kept();
        if kept > 0 {
            let me = runtime.me;
            self.left_in_routers.lock().push(format!(
                "process {me}: {kept} pieces or messages in its router"
            ));
        }
    }

    /// Describes everything left of the job, one line each. Call it when all threads of the job
    /// have ended.
    pub(super) fn left(self) -> Vec<String> {
        let mut left = self.left_in_routers.into_inner();
        for ProcessParts { me, runtime, pools } in self.processes.into_inner() {
            if runtime.strong_count() > 0 {
                left.push(format!("process {me}: its runtime"));
            }
            for NamedPool { name, pool } in pools {
                let stats = pool.stats();
                let live = stats.live;
                let reserved = stats.reserved;
                if live + reserved > 0 {
                    left.push(format!(
                        "process {me}, {name}: {live} B in use, {reserved} reserved"
                    ));
                }
            }
        }

        let under_way = self.network.under_way();
        if under_way > 0 {
            left.push(format!("{under_way} messages under way"));
        }
        left
    }
}
