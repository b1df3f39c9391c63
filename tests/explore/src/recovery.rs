//! The job of a seed that loses processes and goes on: a training with commits, and the deaths and
//! stops that hit it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use mpmd_base::block::{Mutex, thread};
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Commits, Committed, ProcessId, Simulation, SimulationReport};

use crate::case::{Job, LONGEST, ORDERS, PEER_TIMEOUT, check_end, check_shards, processes_of};
use crate::execute::{Shards, bound, made, shards_of};
use crate::kernels::{Op, Work};
use crate::program::{ROWS, shardings};

/// A random training that recovers from faults, derived from `seed`.
#[derive(Debug)]
pub(crate) struct Recovery {
    seed: u64,
    devices: usize,
    processes: usize,
    hosts: Vec<usize>,
    zero_copy: Vec<usize>,
    training: Training,
    faults: Vec<Fault>,
    /// The times at which spare processes start.
    spares: Vec<Duration>,
    elastic: Option<Elastic>,
}

/// Settings of a job that may have more or fewer processes in a later epoch.
#[derive(Clone, Debug)]
struct Elastic {
    /// A number of processes with which the program refuses to go on.
    refused: Option<usize>,
    /// A process that asks to leave, as (process, epoch, step).
    leaver: Option<(ProcessId, u64, u64)>,
    /// True if the number of devices stays the same, false if the number of devices per process
    /// does.
    keeps_devices: bool,
}

/// The program: its steps, commits and arrays.
#[derive(Debug)]
struct Training {
    steps: u64,
    /// Number of steps from one commit to the next.
    every: u64,
    commits: At,
    columns: usize,
    arrays: Vec<Trained>,
    elastic: Option<Elastic>,
}

/// The points in a step at which the program commits.
#[derive(Clone, Copy, Debug)]
enum At {
    Never,
    /// Before the work of the step. The first commit of an epoch then repeats the restored one.
    Start,
    End,
    /// After each half of the step's work. Each half counts as one step of commits.
    Halves,
}

/// The state of a training.
struct State {
    arrays: Vec<MpmdArray>,
    /// True if the first half of the current step is done.
    is_half: bool,
}

impl Committed for State {
    fn arrays(&self) -> Vec<MpmdArray> {
        self.arrays.clone()
    }

    fn values(&self) -> Vec<u8> {
        vec![u8::from(self.is_half)]
    }

    fn restore(&mut self, arrays: Vec<MpmdArray>, values: &[u8]) -> Result<()> {
        (self.arrays, self.is_half) = (arrays, values == [1]);
        Ok(())
    }
}

/// Number of commits that each process has issued in each epoch, by (epoch, process).
type Issued = Mutex<BTreeMap<(u64, ProcessId), u64>>;

/// Number of commits in an epoch after which at least one is whole on every process, because at
/// most two may be unconfirmed.
const SURELY_WHOLE: u64 = 3;

/// An array of the training's state.
#[derive(Debug)]
struct Trained {
    key: u64,
    /// The shardings of the array, by the number of devices of the job.
    on: BTreeMap<usize, Shardings>,
    is_donated: bool,
}

/// The shardings of an array on a number of devices.
#[derive(Debug)]
struct Shardings {
    /// The sharding between steps: one for each epoch, in turns. All are on meshes.
    homes: Vec<Sharding>,
    /// The shardings to which the steps move the array, in turns.
    ways: Vec<Sharding>,
}

#[derive(Clone, Debug)]
enum Fault {
    /// The process dies when it issues an operation, as (process, epoch, operation).
    LoseAt(ProcessId, u64, u64),
    /// The process dies at this time.
    LoseAfter(ProcessId, Duration),
    /// The process stops: at the first time, for the second.
    Stop(ProcessId, Duration, Duration),
}

impl Training {
    /// Returns the training of a seed on `devices` devices. In an elastic job, it may later run on
    /// any number of devices in `others`.
    fn of(seed: u64, devices: usize, others: &[usize], elastic: Option<Elastic>) -> Self {
        let mut random = Rng::with_seed(seed);
        let columns = [8, 1024][usize::from(seed % 8 == 7)];
        let array = |random: &mut Rng| {
            let fork = random.fork();
            let count = random.usize(1..4);
            let on = |devices: usize, fork: Rng| {
                let any = shardings(fork, devices, columns, 20);
                let (homes, ways): (Vec<_>, Vec<_>) = any
                    .into_iter()
                    .partition(|sharding| sharding.mesh().is_some());
                // Few devices have few meshes.
                let homes = homes[..count.min(homes.len())].to_vec();
                (
                    devices,
                    Shardings {
                        ways: [ways, homes.clone()].concat(),
                        homes,
                    },
                )
            };
            let others = others.iter().map(|devices| on(*devices, fork.clone()));
            let on = others.chain([on(devices, fork.clone())]).collect();
            Trained {
                key: random.u64(..1000),
                on,
                is_donated: random.bool(),
            }
        };
        let arrays = (0..random.usize(1..4))
            .map(|_| array(&mut random))
            .collect();
        let (steps, every) = (random.u64(3..9), random.u64(1..4));
        let commits = [At::End, At::Start, At::Halves, At::Never][random.usize(..4)];
        Self {
            steps,
            every,
            commits,
            columns,
            arrays,
            elastic,
        }
    }

    /// Runs the training in one epoch. Returns the shards of this process at the end.
    fn run(&self, p: &mut Program, commits: &Commits, issued: &Issued) -> Result<Shards> {
        let devices = p.topology().device_ids().len();
        let home = |trained: &Trained, epoch: u64| {
            let homes = &trained.on[&devices].homes;
            homes[(epoch - 1) as usize % homes.len()].clone()
        };
        let mut state = State {
            arrays: Vec::new(),
            is_half: false,
        };
        for trained in &self.arrays {
            let shape = [ROWS, self.columns];
            state
                .arrays
                .push(made(p, shape, &home(trained, p.epoch()), trained.key)?);
        }
        let first = match (self.restore(p, commits, &mut state, issued)?, self.commits) {
            (halves, At::Halves) => halves / 2,
            (first, _) => first,
        };
        for step in first..self.steps {
            let leaver = self.elastic.as_ref().and_then(|elastic| elastic.leaver);
            if leaver == Some((p.process(), p.epoch(), step)) {
                commits.ask_to_leave();
            }
            if matches!(self.commits, At::Start) {
                self.commit(p, step, &state, issued)?;
            }
            if matches!(self.commits, At::Halves) && !state.is_half {
                self.work(p, &mut state, step)?;
                state.is_half = true;
                self.commit(p, 2 * step + 1, &state, issued)?;
            }
            self.work(p, &mut state, step)?;
            state.is_half = false;
            p.step_end()?;
            match self.commits {
                At::End => self.commit(p, step + 1, &state, issued)?,
                At::Halves => self.commit(p, 2 * (step + 1), &state, issued)?,
                At::Never | At::Start => {}
            }
            // Deaths come in all parts of a step.
            thread::sleep(Duration::from_micros(500));
            if step % 3 == 0 {
                state.arrays[0].block_until_ready()?;
            }
        }
        if self.elastic.is_some() {
            return self.whole(p, &state.arrays);
        }
        // At the end all epochs have the same shardings.
        let homes: Vec<Sharding> = self.arrays.iter().map(|trained| home(trained, 1)).collect();
        let state = p.device_put(&state.arrays, homes)?;
        shards_of(state.iter().map(Some))
    }

    /// Returns all elements of each array, as a shard of device 0.
    fn whole(&self, p: &mut Program, arrays: &[MpmdArray]) -> Result<Shards> {
        let devices = p.topology().device_ids().len();
        let everywhere = p.mesh(&[("x", devices)])?.replicated();
        let whole = p.device_put(&arrays.to_vec(), everywhere)?;
        let of = |(i, array): (usize, &MpmdArray)| {
            let bytes = array.to_host()?.map(|host| host.bytes().to_vec());
            Ok(((i, DeviceId(0)), bytes.unwrap_or_default()))
        };
        whole.iter().enumerate().map(of).collect()
    }

    /// Restores the newest commit. Returns a different error if commits are lost that cannot be
    /// lost: at least one was whole everywhere, and only one process was lost.
    fn restore(
        &self,
        p: &mut Program,
        commits: &Commits,
        state: &mut State,
        issued: &Issued,
    ) -> Result<u64> {
        let restored = commits.restore(p, state);
        let lost = commits.last_recovery().map_or(0, |recovery| {
            let (before, now) = recovery.processes;
            (before + recovery.new.len()).saturating_sub(now)
        });
        let before = p.epoch() - 1;
        let most = |issued: &BTreeMap<(u64, ProcessId), u64>| {
            let of_epoch = issued.iter().filter(|((epoch, _), _)| *epoch == before);
            of_epoch.map(|(_, count)| *count).max().unwrap_or(0)
        };
        match restored {
            Err(Error::CommitsLost { lost: commits })
                if lost == 1 && most(&issued.lock()) >= SURELY_WHOLE =>
            {
                Err(Error::kernel(format!(
                    "one loss took all commits: {commits:?}"
                )))
            }
            restored => restored,
        }
    }

    fn commit(&self, p: &mut Program, step: u64, state: &State, issued: &Issued) -> Result<()> {
        p.commit(step, state)?;
        if step.is_multiple_of(self.every) {
            *issued.lock().entry((p.epoch(), p.process())).or_default() += 1;
        }
        Ok(())
    }

    /// Changes each array in place, moves it to one of its `ways` shardings, and moves it back.
    fn work(&self, p: &mut Program, state: &mut State, way: u64) -> Result<()> {
        for (x, trained) in state.arrays.iter_mut().zip(&self.arrays) {
            let (mesh, sharding) = bound(x);
            let jit = p
                .jit(Work {
                    op: Op::Update,
                    fails: None,
                })
                .on(&mesh)
                .outputs(&sharding);
            let update = if trained.is_donated {
                jit.donate("0")
            } else {
                jit
            }
            .build()?;
            *x = update.call(p, vec![x.clone()])?.remove(0);
            let ways = &trained.on[&p.topology().device_ids().len()].ways;
            let there = p.device_put(&*x, &ways[way as usize % ways.len()])?;
            *x = p.device_put(&there, sharding)?;
        }
        Ok(())
    }
}

impl Recovery {
    pub(crate) fn new(seed: u64) -> Self {
        Self::of(seed, false)
    }

    /// Returns the training of a seed in a job that shrinks and grows, and that a process may
    /// leave.
    pub(crate) fn elastic(seed: u64) -> Self {
        Self::of(seed, true)
    }

    fn of(seed: u64, is_elastic: bool) -> Self {
        let mut random = Rng::with_seed(!seed);
        let devices = [4, 6, 8, 4, 3][(seed / ORDERS) as usize % 5];
        let (processes, hosts, zero_copy) = processes_of(&mut random, devices);
        let each = devices / processes;
        let elastic = is_elastic.then(|| {
            let mut random = Rng::with_seed(seed);
            let refused = (random.u8(..4) == 0).then(|| random.usize(1..=processes));
            let place = ProcessId(random.u32(..processes as u32));
            let leaver = (random.u8(..3) == 0).then(|| (place, random.u64(1..3), random.u64(..4)));
            Elastic {
                refused,
                leaver,
                keeps_devices: random.bool(),
            }
        });
        let others: Vec<usize> = match &elastic {
            Some(Elastic {
                keeps_devices: false,
                ..
            }) => (1..processes).map(|size| size * each).collect(),
            _ => Vec::new(),
        };
        let training = Training::of(seed / ORDERS, devices, &others, elastic.clone());
        let count = random.usize(1..4);
        let all = (processes + count) as u32;
        let faults = (0..count).map(|_| Fault::random(&mut random, processes as u32, all));
        let faults: Vec<_> = faults.collect();
        // Some come while nobody is lost yet, others let the job wait.
        let spares = (0..count)
            .map(|_| Duration::from_micros(1 << random.u32(4..24)))
            .collect();
        Self {
            seed,
            devices,
            processes,
            hosts,
            zero_copy,
            training,
            faults,
            spares,
            elastic,
        }
    }

    fn simulation(&self, processes: usize) -> Simulation {
        let mut simulation = Simulation::new(processes, self.devices).seed(self.seed);
        if processes > 1 {
            simulation = simulation
                .zero_copy(&self.zero_copy)
                .settings(|settings| settings.hosts(&self.hosts));
            for fault in &self.faults {
                simulation = match *fault {
                    Fault::LoseAt(process, epoch, op) => simulation.lose_in(process, epoch, op),
                    Fault::LoseAfter(process, after) => simulation.lose_after(process, after),
                    Fault::Stop(process, after, time) => {
                        simulation.stop_after(process, after, time)
                    }
                };
            }
            if let Some(Elastic {
                refused,
                keeps_devices,
                ..
            }) = self.elastic
            {
                let (all, each) = (self.devices, self.devices / processes);
                simulation = simulation.shrink(move |size| match size <= processes {
                    true if Some(size) == refused => Err("refused".to_owned()),
                    true if keeps_devices => Ok(all),
                    true => Ok(size * each),
                    false => Err("more than at the start".to_owned()),
                });
            }
            simulation = self
                .spares
                .iter()
                .fold(simulation, |all, after| all.spare_after(*after));
        }
        simulation
    }

    fn check(
        &self,
        results: Vec<mpmd_core::Result<Option<Shards>>>,
        alone: &Shards,
        report: &SimulationReport,
    ) -> Result<(), String> {
        let (mut found, mut errors) = (Vec::new(), Vec::new());
        let mut dead = 0;
        for (process, result) in (0..).map(ProcessId).zip(results) {
            let is_killed = self.faults.iter().any(|fault| fault.kills(process));
            match result {
                // Nobody hears of the values of a process after its death.
                Ok(Some(_)) | Err(_) if is_killed => dead += 1,
                Ok(Some(shards)) => found.push(shards),
                Ok(None) => {}
                Err(error) => errors.push(format!("process {process}: {error}")),
            }
        }
        // Both processes with copies of a region may be lost, or all of the job.
        let losses = self.faults.iter().filter(|fault| fault.is_loss()).count();
        let leaves = self
            .elastic
            .as_ref()
            .is_some_and(|elastic| elastic.leaver.is_some());
        let refused = self
            .elastic
            .as_ref()
            .is_some_and(|elastic| elastic.refused.is_some());
        let gone = losses + usize::from(leaves);
        let is_explained = |error: &String| {
            gone >= 2 && error.contains("no commit is whole")
                || (gone >= self.processes || refused && gone > 0)
                    && ["not joined after", "of the job are lost"]
                        .iter()
                        .any(|t| error.contains(t))
        };
        if !errors.iter().all(is_explained) {
            return Err(errors.join("\n  "));
        }
        let ended = found.len();
        let is_over = gone >= self.processes;
        if self.elastic.is_some() {
            if errors.is_empty() && ended == 0 && !is_over {
                return Err(format!("no process ended well, and {dead} were lost"));
            }
            if let Some(wrong) = found.iter().find(|shards| *shards != alone) {
                let wrong = wrong
                    .iter()
                    .find(|(key, bytes)| alone.get(key) != Some(bytes));
                return Err(format!(
                    "array {} has other bits",
                    wrong.map_or(0, |(key, _)| key.0)
                ));
            }
            return check_end(report, LONGEST);
        }
        if errors.is_empty() && ended + dead < self.processes && !is_over {
            return Err(format!(
                "{ended} processes ended well, and {dead} were lost"
            ));
        }
        check_shards(found, alone, ended == self.processes)?;
        check_end(report, LONGEST)
    }
}

impl Job for Recovery {
    fn faults(&self) -> usize {
        self.faults.len()
    }

    fn keep_faults(&mut self, keeps: &dyn Fn(usize) -> bool) {
        let mut number = 0..;
        self.faults.retain(|_| number.next().is_some_and(keeps));
    }

    fn run_alone(&self) -> Result<Shards, String> {
        let simulation = self.simulation(1);
        let (mut results, _) = simulation.run_recovering(1, |p, commits| {
            self.training.run(p, commits, &Issued::default())
        });
        let result = results
            .remove(0)
            .map_err(|error| format!("alone: {error}"))?;
        result.ok_or_else(|| "alone: it had no place".to_owned())
    }

    fn run(&self, alone: &Shards, log: bool) -> (SimulationReport, Result<(), String>) {
        let simulation = self.simulation(self.processes);
        let simulation = if log { simulation.log() } else { simulation };
        let issued = Issued::default();
        let (results, report) = simulation.run_recovering(self.training.every, |p, commits| {
            self.training.run(p, commits, &issued)
        });
        let checked = self.check(results, alone, &report);
        (report, checked)
    }
}

impl Fault {
    /// Returns a random fault of one of the first `processes` processes or, less often, of one of
    /// all `all`, including spares.
    fn random(random: &mut Rng, processes: u32, all: u32) -> Self {
        let process = if random.u8(..4) == 0 {
            random.u32(..all)
        } else {
            random.u32(..processes)
        };
        let process = ProcessId(process);
        let after = Duration::from_micros(1 << random.u32(4..17)).mul_f64(1.0 + random.f64());
        match random.u8(..8) {
            0..3 => Self::LoseAt(process, random.u64(1..4), random.u64(..60)),
            3..6 => Self::LoseAfter(process, after),
            6 => Self::Stop(
                process,
                after,
                Duration::from_micros(1 << random.u32(4..24)),
            ),
            _ => Self::Stop(process, after, PEER_TIMEOUT * random.u32(1..4)),
        }
    }

    fn kills(&self, process: ProcessId) -> bool {
        matches!(*self, Self::LoseAt(lost, ..) | Self::LoseAfter(lost, _) if lost == process)
    }

    /// True if the other processes go on without the process of this fault.
    fn is_loss(&self) -> bool {
        !matches!(*self, Self::Stop(_, _, time) if time < PEER_TIMEOUT / 2)
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (processes, devices) = (self.processes, self.devices);
        write!(
            f,
            "{processes} processes with {devices} devices on hosts {:?}",
            self.hosts
        )?;
        write!(
            f,
            ", zero-copy {:?}, spares after {:?}",
            self.zero_copy, self.spares
        )?;
        let Training {
            steps,
            every,
            commits,
            ref arrays,
            ..
        } = self.training;
        write!(
            f,
            "\n  {} arrays, {steps} steps, commits every {every}: {commits:?}",
            arrays.len()
        )?;
        self.elastic
            .iter()
            .try_for_each(|elastic| write!(f, "\n  {elastic:?}"))?;
        self.faults
            .iter()
            .try_for_each(|fault| write!(f, "\n  fault: {fault:?}"))
    }
}
