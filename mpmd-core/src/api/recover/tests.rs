//! Jobs that processes leave while others are lost, and states that are committed or restored
//! twice.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use fastrand::Rng;
use mpmd_base::ProcessId;
use mpmd_base::block::{Mutex, thread};
use mpmd_layout::aval::f32s;
use mpmd_layout::spec;

use super::Commits;
use crate::api::program::{Program, Simulation};
use crate::error::Result;
use crate::exec::array::MpmdArray;
use crate::kernel::elementwise;

const STEPS: u64 = 40;

/// A job that processes leave.
#[derive(Debug)]
struct Leaving {
    seed: u64,
    processes: usize,
    /// The number of processes that wait for a place. Without any the job shrinks.
    spares: usize,
    /// The steps of the first epoch at which processes ask to leave, by process.
    asks: Vec<(ProcessId, u64)>,
    /// Deaths, with the times in microseconds.
    deaths: Vec<(ProcessId, u64)>,
    /// The time in milliseconds for which a program runs code of its own at the end of an epoch.
    pause: u64,
}

impl Leaving {
    /// Returns a job of a seed that one process, or two, leave, and of which one is lost.
    fn of(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let processes = random.usize(2..6);
        let mut order: Vec<ProcessId> = (0..processes as u32).map(ProcessId).collect();
        random.shuffle(&mut order);
        let count = random.usize(1..=1.max(processes / 3));
        let first = random.u64(..4);
        let asks: Vec<_> = order[..count]
            .iter()
            .map(|process| (*process, first + random.u64(..2)))
            .collect();
        // About one step takes a millisecond, and a process leaves at the third commit.
        let death = 1000 * (first + 2) + random.u64(..30_000);
        let deaths = vec![(order[random.usize(..processes)], death)];
        let spares = random.usize(..3);
        Self {
            seed,
            processes,
            spares,
            asks,
            deaths,
            pause: random.u64(..3) * 10,
        }
    }

    fn simulation(&self) -> Simulation {
        let processes = self.processes;
        let mut job = Simulation::new(processes, processes).seed(self.seed);
        job = job.shrink(move |_| Ok(processes));
        for spare in 0..self.spares {
            job = job.spare_after(Duration::from_millis(spare as u64));
        }
        for (process, after) in &self.deaths {
            job = job.lose_after(*process, Duration::from_micros(*after));
        }
        job
    }

    /// Adds 1 to each of twelve numbers in each step. Returns their sum.
    fn count(&self, p: &mut Program, commits: &Commits) -> Result<f32> {
        let mesh = p.mesh(&[("x", -1)])?;
        let here = mesh.sharding(spec!["x"]);
        let add = p
            .jit(elementwise(|x: f32| x + 1.0))
            .on(&mesh)
            .outputs(&here)
            .build()?;
        let mut x = p.array_from_fn(f32s([60]), &here, |_, mut values| Ok(values.fill(0f32)?))?;
        let first = commits.restore(p, &mut x)?;
        for step in first..STEPS {
            x = add.call(p, x)?;
            p.step_end()?;
            let is_mine = |(process, at): &&(ProcessId, u64)| {
                (*process, *at, p.epoch()) == (p.process(), step, 1)
            };
            if self.asks.iter().any(|ask| is_mine(&ask)) {
                commits.ask_to_leave();
            }
            if let Err(error) = p.commit(step + 1, &x) {
                thread::sleep(Duration::from_millis(self.pause));
                return Err(error);
            }
            x.block_until_ready()?;
            thread::sleep(Duration::from_millis(1));
        }
        let all = p.device_put(&x, mesh.replicated())?.to_host()?;
        Ok(all
            .expect("every process has it")
            .to_vec::<f32>()?
            .iter()
            .sum())
    }

    /// Runs the job. Returns the number of values, and the errors of processes that were not
    /// killed.
    /// `None` if a process was lost before the first epoch had begun.
    fn run(&self) -> Option<(usize, Vec<String>)> {
        let has_begun = AtomicBool::new(false);
        let (ends, report) = self.simulation().run_recovering(1, |p, c| {
            has_begun.store(true, Ordering::Relaxed);
            self.count(p, c)
        });
        assert_eq!(report.left, [""; 0], "{self:?}");
        let mut values = 0;
        let mut errors = Vec::new();
        for (process, end) in (0..).map(ProcessId).zip(ends) {
            let is_killed = self.deaths.iter().any(|(killed, _)| *killed == process);
            match end {
                Ok(Some(sum)) => {
                    assert_eq!(sum, 60.0 * STEPS as f32, "{self:?}");
                    values += 1;
                }
                Err(error) if !is_killed => errors.push(format!("process {process}: {error}")),
                Ok(None) | Err(_) => {}
            }
        }
        has_begun.into_inner().then_some((values, errors))
    }
}

#[test]
fn leavers_keep_copies_until_others_have_them() {
    for seed in seeds(200) {
        let job = Leaving::of(seed);
        let Some((values, errors)) = job.run() else {
            continue;
        };
        assert!(errors.is_empty(), "{job:?}: {errors:?}");
        // The last process may die after all others have left.
        let is_leaver = |process| job.asks.iter().any(|(leaver, _)| *leaver == process);
        let lost = job
            .deaths
            .iter()
            .filter(|(process, _)| !is_leaver(*process))
            .count();
        let stays = job.processes + job.spares - job.asks.len() - lost;
        assert!(values > 0 || stays == 0, "{job:?}");
    }
}

/// Returns the seeds of a test: `count`, or as many as `MPMD_SEEDS` says.
pub(super) fn seeds(count: u64) -> std::ops::Range<u64> {
    let asked = std::env::var("MPMD_SEEDS")
        .ok()
        .and_then(|asked| asked.parse().ok());
    0..asked.unwrap_or(count)
}

/// The processes 1 and 2 have both copies of a region.
#[test]
fn both_holders_of_a_region_leave_one_after_the_other() {
    for seed in 0..20 {
        let asks = vec![(ProcessId(1), 2), (ProcessId(2), 2)];
        let (processes, spares) = (4, seed as usize % 3);
        let job = Leaving {
            seed,
            processes,
            spares,
            asks,
            deaths: vec![],
            pause: 0,
        };
        assert_eq!(job.run(), Some((2 + spares, vec![])), "{job:?}");
    }
}

/// A process asks to leave a job that needs all its places, since a spare waits. The spare dies at
/// about the time of the change.
#[test]
fn leaver_stays_if_the_spare_that_replaces_it_dies() {
    let mut called_back = 0;
    for seed in seeds(200) {
        let mut random = Rng::with_seed(seed);
        let processes = random.usize(2..5);
        let job = Leaving {
            seed,
            processes,
            spares: 1,
            asks: vec![(ProcessId(random.u32(..processes as u32)), 1)],
            deaths: vec![(ProcessId(processes as u32), random.u64(1_000..15_000))],
            pause: random.u64(..3) * 10,
        };
        let needs_all = move |size| match size == processes {
            true => Ok(processes),
            false => Err("it needs all of its places".to_owned()),
        };

        let founders = Mutex::new(BTreeSet::new());
        let has_replaced = AtomicBool::new(false);
        let returned = AtomicUsize::new(0);
        let (ends, report) = job
            .simulation()
            .shrink(needs_all)
            .run_recovering(1, |p, commits| {
                // Each process is a thread.
                let me = format!("{:?}", std::thread::current().id());
                if p.epoch() == 1 {
                    founders.lock().insert(me);
                } else if founders.lock().contains(&me) {
                    returned.fetch_add(1, Ordering::Relaxed);
                } else {
                    has_replaced.store(true, Ordering::Relaxed);
                }
                job.count(p, commits)
            });
        // Else it is the loss of a process that has a place, and nothing replaces that.
        if has_replaced.into_inner() {
            continue;
        }
        called_back += usize::from(returned.into_inner() == processes);
        for end in &ends[..processes] {
            let sum = end.as_ref().unwrap_or_else(|why| panic!("{job:?}: {why}"));
            assert_eq!(*sum, Some(60.0 * STEPS as f32), "{job:?}");
        }
        assert!(
            report.time < Duration::from_secs(5),
            "{job:?}: {:?}",
            report.time
        );
    }
    assert!(called_back > 0, "no spare has died in time");
}

/// Runs a program in two processes. Returns the texts of their errors.
fn refused(program: impl Fn(&mut Program, &Commits) -> Result<()> + Sync) -> Vec<String> {
    let (ends, _) = Simulation::new(2, 2).seed(1).run_recovering(1, program);
    ends.into_iter()
        .map(|end| end.expect_err("it is refused").to_string())
        .collect()
}

#[test]
fn second_state_of_a_step_is_refused() {
    let two = |p: &mut Program, is_same: bool| -> Result<()> {
        let here = p.mesh(&[("x", 2)])?.sharding(spec!["x"]);
        let made = |p: &mut Program| {
            p.array_from_fn(f32s([2]), &here, |_, mut values| Ok(values.fill(0f32)?))
        };
        let (first, second) = (made(p)?, made(p)?);
        p.commit(1, &first)?;
        p.commit(1, &first.clone())?;
        p.commit(2, &MpmdArray::scalar(1.0f32))?;
        p.commit(2, &MpmdArray::scalar(1.0f32))?;
        p.commit(3, &first)?;
        let last = if is_same { &first } else { &second };
        // Asking twice helps nobody.
        let again = p.commit(3, last).and_then(|()| p.commit(3, last));
        assert_eq!(again.is_ok(), p.commit(3, last).is_ok());
        again
    };
    for said in refused(|p, _| two(p, false)) {
        assert!(said.contains("step 3 is committed already"), "{said}");
    }
    let (ends, _) = Simulation::new(2, 2)
        .seed(1)
        .run_recovering(1, |p, _| two(p, true));
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
}

#[test]
fn second_restore_of_an_epoch_is_refused() {
    let twice = |p: &mut Program, commits: &Commits| {
        let everywhere = p.mesh(&[("x", 2)])?.replicated();
        let mut x = p.device_put(&MpmdArray::scalar(1.0f32), everywhere)?;
        commits.restore(p, &mut x)?;
        commits.restore(p, &mut x).map(drop)
    };
    for said in refused(twice) {
        assert!(said.contains("restored or committed already"), "{said}");
    }
    let late = |p: &mut Program, commits: &Commits| {
        let everywhere = p.mesh(&[("x", 2)])?.replicated();
        let mut x = p.device_put(&MpmdArray::scalar(1.0f32), everywhere)?;
        p.commit(1, &x)?;
        commits.restore(p, &mut x).map(drop)
    };
    assert!(
        refused(late)
            .iter()
            .all(|said| said.contains("restored or committed already"))
    );
}
