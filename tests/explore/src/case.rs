//! The job of a seed: its program, its processes, and the faults that hit it.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fastrand::Rng;
use mpmd_core::{ProcessId, Simulation, SimulationReport};

use crate::execute::{Shards, Wrongs, execute};
use crate::kernels::{Failing, INJECTED};
use crate::program::{STEPS, Step, program};

/// Number of consecutive seeds that share a program. Their jobs differ in processes, order and
/// faults.
pub(crate) const ORDERS: u64 = 16;

/// Interval of the seeds whose jobs have faults.
const FAULTY: u64 = 10;

/// The time without a message after which a process counts as lost. This is the default.
pub(crate) const PEER_TIMEOUT: Duration = Duration::from_secs(60);

/// The time that a failed process has to send its last messages.
const FLUSH: Duration = Duration::from_secs(2);

/// The simulated time within which every job with faults must end.
pub(crate) const LONGEST: Duration = Duration::from_secs(600);

/// The simulated time within which every job without faults must end, since none of its waits runs
/// into a time limit.
const USUAL: Duration = Duration::from_secs(10);

/// A random job that is derived from a seed. Its text shows its processes and faults.
pub(crate) trait Job: fmt::Display {
    /// Number of faults.
    fn faults(&self) -> usize;

    /// Removes all faults except those with numbers for which `keeps` returns true.
    fn keep_faults(&mut self, keeps: &dyn Fn(usize) -> bool);

    /// Runs the program on one process without faults. Returns the shards of all devices.
    fn run_alone(&self) -> Result<Shards, String>;

    /// Runs the job, and compares its shards with `alone`, those of the run on one process. Returns
    /// the report, and the errors found.
    fn run(&self, alone: &Shards, log: bool) -> (SimulationReport, Result<(), String>);
}

/// A random job, derived from `seed`.
#[derive(Debug)]
pub(crate) struct Case {
    seed: u64,
    devices: usize,
    processes: usize,
    /// The host number of each process.
    hosts: Vec<usize>,
    /// The group of each process. Transfers within a group are zero-copy; if this is empty, none
    /// are.
    zero_copy: Vec<usize>,
    /// True if the program may run ahead by 3 operations only.
    is_short: bool,
    pub(crate) steps: Vec<Step>,
    faults: Vec<Fault>,
    /// Numbers of the steps that are left out, to make the job smaller.
    pub(crate) removed: BTreeSet<usize>,
}

/// A fault that is injected into a job.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The process dies when it issues the operation with this number.
    LoseAt(ProcessId, u64),
    /// The process dies at this time.
    LoseAfter(ProcessId, Duration),
    /// The process stops: at the first time, for the second.
    Stop(ProcessId, Duration, Duration),
    /// All processes stop: at the first time, for the second.
    StopAll(Duration, Duration),
    /// Messages from the first process to the second are held back: from the first time on, for the
    /// second.
    Hold(ProcessId, ProcessId, Duration, Duration),
    /// Each device has only this number of bytes of memory.
    Memory(u64),
    /// The kernel or method of the step with this number fails.
    Kernel(usize, Failing),
    /// The process leaves out the step with this number.
    Diverge(ProcessId, usize),
}

impl Case {
    /// Returns the job of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        let of_program = seed / ORDERS;
        let devices: usize = [4, 6, 8, 4, 6, 8, 8, 5, 7, 3][of_program as usize % 10];
        let mut random = Rng::with_seed(seed);
        let (processes, hosts, zero_copy) = processes_of(&mut random, devices);
        let is_short = random.u8(..4) == 0;
        let steps = program(of_program, devices);
        let faults = match seed.is_multiple_of(FAULTY) {
            true => (0..random.usize(1..3))
                .map(|_| Fault::random(&mut random, processes))
                .collect(),
            false => Vec::new(),
        };
        let removed = BTreeSet::new();
        Self {
            seed,
            devices,
            processes,
            hosts,
            zero_copy,
            is_short,
            steps,
            faults,
            removed,
        }
    }

    /// Checks the results of a run, and that no object is left after it.
    fn check(
        &self,
        results: Vec<mpmd_core::Result<Shards>>,
        alone: &Shards,
        report: &SimulationReport,
        objects: usize,
    ) -> Result<(), String> {
        let mut found = Vec::new();
        let (mut errors, mut is_explained) = (Vec::new(), true);
        for (process, result) in (0..).map(ProcessId).zip(results) {
            match result {
                Ok(shards) => found.push(shards),
                Err(error) => {
                    let error = error.to_string();
                    // A process that has failed does not wait long for its peers.
                    let patience = match self.faults.len() {
                        1 => PEER_TIMEOUT,
                        _ => FLUSH,
                    };
                    let explains = |fault: &Fault| fault.explains(process, &error, patience);
                    is_explained &= self.faults.iter().any(explains);
                    errors.push(format!("process {process}: {error}"));
                }
            }
        }
        if !is_explained {
            return Err(errors.join("\n  "));
        }
        if self.faults.iter().all(Fault::is_heard_of) && !errors.is_empty() && !found.is_empty() {
            let (good, bad) = (found.len(), errors.join("\n  "));
            return Err(format!("{good} processes have heard of no error:\n  {bad}"));
        }
        let is_whole = found.len() == self.processes;
        check_shards(found, alone, is_whole)?;
        let longest = if self.faults.is_empty() {
            USUAL
        } else {
            LONGEST
        };
        check_end(report, longest)?;
        match objects {
            0 => Ok(()),
            _ => Err(format!("{objects} objects are left")),
        }
    }

    fn simulation(&self) -> Simulation {
        let mut simulation = Simulation::new(self.processes, self.devices)
            .zero_copy(&self.zero_copy)
            .settings(|settings| settings.hosts(&self.hosts))
            .seed(self.seed);
        if self.is_short {
            simulation = simulation.settings(|settings| settings.run_ahead(3, 1 << 10));
        }
        for fault in &self.faults {
            simulation = match *fault {
                Fault::LoseAt(process, op) => simulation.lose(process, op),
                Fault::LoseAfter(process, after) => simulation.lose_after(process, after),
                Fault::Stop(process, after, time) => simulation.stop_after(process, after, time),
                Fault::StopAll(after, time) => (0..self.processes as u32)
                    .fold(simulation, |all, i| {
                        all.stop_after(ProcessId(i), after, time)
                    }),
                Fault::Hold(from, to, after, time) => simulation.hold_after(from, to, after, time),
                Fault::Memory(bytes) => simulation.settings(|s| s.device_memory(bytes)),
                Fault::Kernel(..) | Fault::Diverge(..) => simulation,
            };
        }
        simulation
    }

    fn wrongs(&self) -> Wrongs {
        let mut wrongs = Wrongs::default();
        for fault in &self.faults {
            match *fault {
                Fault::Kernel(step, failing) => wrongs.fails = Some((step, failing)),
                Fault::Diverge(process, step) => wrongs.leaves_out = Some((process, step)),
                _ => {}
            }
        }
        wrongs
    }
}

#[cfg(test)]
mod dry_runs;

impl Job for Case {
    fn faults(&self) -> usize {
        self.faults.len()
    }

    fn keep_faults(&mut self, keeps: &dyn Fn(usize) -> bool) {
        let mut number = 0..;
        self.faults.retain(|_| number.next().is_some_and(keeps));
    }

    fn run_alone(&self) -> Result<Shards, String> {
        let alive = Arc::default();
        let simulation = Simulation::new(1, self.devices).seed(self.seed / ORDERS);
        let (mut results, _) = simulation
            .run_reported(|p| execute(p, &self.steps, &self.removed, &Wrongs::default(), &alive));
        results.remove(0).map_err(|error| format!("alone: {error}"))
    }

    fn run(&self, alone: &Shards, log: bool) -> (SimulationReport, Result<(), String>) {
        let alive = Arc::<AtomicUsize>::default();
        let wrongs = self.wrongs();
        let simulation = self.simulation();
        let simulation = if log { simulation.log() } else { simulation };
        let (results, report) =
            simulation.run_reported(|p| execute(p, &self.steps, &self.removed, &wrongs, &alive));
        let objects = alive.load(Ordering::Relaxed);
        let checked = self.check(results, alone, &report, objects);
        (report, checked)
    }
}

/// Returns (number of processes, host of each process, group of each process for zero-copy
/// transfers). The last list is empty if no transfers are zero-copy.
pub(crate) fn processes_of(random: &mut Rng, devices: usize) -> (usize, Vec<usize>, Vec<usize>) {
    let counts: Vec<usize> = (2..=devices)
        .filter(|n| devices.is_multiple_of(*n))
        .collect();
    let processes = counts[random.usize(..counts.len())];
    // All on one host, in pairs, or each on its own.
    let kind = random.usize(..3);
    let hosts: Vec<usize> = (0..processes).map(|i| [0, i / 2, i][kind]).collect();
    // Some pairs use no zero-copy transfers: those of different hosts, or others.
    let zero_copy = match random.u8(..4) {
        0 | 1 => Vec::new(),
        2 => vec![0; processes],
        _ => hosts.iter().map(|host| host % 3).collect(),
    };
    (processes, hosts, zero_copy)
}

impl Fault {
    fn random(random: &mut Rng, processes: usize) -> Self {
        let process = ProcessId(random.u32(..processes as u32));
        let op = random.u64(1..2 * STEPS as u64);
        let step = random.usize(..STEPS);
        // Mostly while the program runs, which takes some tens of milliseconds.
        let after = Duration::from_micros(1 << random.u32(4..17)).mul_f64(1.0 + random.f64());
        let time = match random.u8(..4) {
            0 => PEER_TIMEOUT * 2,
            _ => Duration::from_micros(1 << random.u32(4..24)),
        };
        match random.u8(..9) {
            0 | 1 => Self::LoseAt(process, op),
            2 => Self::LoseAfter(process, after),
            3 => Self::Stop(process, after, time),
            4 => {
                let to = (process.0 + random.u32(1..processes as u32)) % processes as u32;
                Self::Hold(process, ProcessId(to), after, time)
            }
            5 => Self::Memory(1 << random.u32(9..20)),
            6 => {
                let failing = if random.bool() {
                    Failing::Error
                } else {
                    Failing::Panic
                };
                Self::Kernel(step, failing)
            }
            7 => Self::Diverge(process, step),
            _ => Self::StopAll(after, time),
        }
    }

    /// True if an error of this fault must reach all processes.
    fn is_heard_of(&self) -> bool {
        matches!(
            self,
            Self::Memory(_) | Self::Kernel(..) | Self::Diverge(..) | Self::StopAll(..)
        )
    }

    /// True if this fault may be the cause of an error on process `on`. A job survives stops and
    /// held links that are shorter than `patience`.
    fn explains(&self, on: ProcessId, error: &str, patience: Duration) -> bool {
        let names = |process: ProcessId| error.contains(&format!("process {process}"));
        match *self {
            Self::LoseAt(lost, _) | Self::LoseAfter(lost, _) => on == lost || names(lost),
            Self::Stop(process, _, time) => time >= patience && (on == process || names(process)),
            Self::StopAll(..) => false,
            Self::Hold(from, to, _, time) => time >= patience && (names(from) || names(to)),
            Self::Memory(_) => error.contains("out of memory"),
            Self::Kernel(..) => error.contains(INJECTED),
            Self::Diverge(..) => error.contains("diverged"),
        }
    }
}

/// Fails if a job has left something behind, or took longer than `longest` in simulated time.
pub(crate) fn check_end(report: &SimulationReport, longest: Duration) -> Result<(), String> {
    match &report.left[..] {
        [] if report.time > longest => Err(format!("it took {:?}", report.time)),
        [] => Ok(()),
        left => Err(format!("left: {}", left.join("; "))),
    }
}

/// Fails unless all shards in `found` have the same bits as in `alone`, and each is on one process
/// only. With `is_whole`, no shard may be missing.
pub(crate) fn check_shards(
    found: Vec<Shards>,
    alone: &Shards,
    is_whole: bool,
) -> Result<(), String> {
    let mut seen = HashSet::new();
    for (key, bytes) in found.into_iter().flatten() {
        if !seen.insert(key) {
            return Err(format!(
                "array {} has two owners of device {}",
                key.0, key.1
            ));
        }
        if alone.get(&key) != Some(&bytes) {
            return Err(format!(
                "array {} has other bits on device {}",
                key.0, key.1
            ));
        }
    }
    match is_whole && seen.len() != alone.len() {
        true => Err(format!("{} shards of {}", seen.len(), alone.len())),
        false => Ok(()),
    }
}

impl fmt::Display for Case {
    /// Writes the job: its processes, its faults, and the steps that are not removed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (processes, devices) = (self.processes, self.devices);
        write!(
            f,
            "{processes} processes with {devices} devices on hosts {:?}",
            self.hosts
        )?;
        write!(f, ", zero-copy {:?}", self.zero_copy)?;
        write!(
            f,
            "{}",
            if self.is_short {
                ", 3 operations ahead"
            } else {
                ""
            }
        )?;
        self.faults
            .iter()
            .try_for_each(|fault| write!(f, "\n  fault: {fault:?}"))?;
        let steps = self
            .steps
            .iter()
            .enumerate()
            .filter(|(i, _)| !self.removed.contains(i));
        let mut steps = steps;
        steps.try_for_each(|(i, step)| write!(f, "\n  step {i}: {step:?}"))
    }
}
