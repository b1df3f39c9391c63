//! Epochs: the program runs again after the loss of a process.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mpmd_base::block::Mutex;
use mpmd_launch::LaunchError;
use mpmd_rendezvous::RendezvousError;

use super::Recovery;
use crate::api::program::{
    Builder, EnvironmentJob, EpochEnd, EpochStart, LayoutFn, Program, Returning, devices_of_size,
};
use crate::error::{Error, Result};
use crate::exec::process_paces::ProcessPaces;
use crate::exec::recovery_store::RecoveryStore;

/// Settings of a program that survives lost processes: see [`Builder::spares`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it runs a program"]
pub struct RecoveringBuilder {
    builder: Builder,
    spares: usize,
    every: u64,
    on_loss: OnLoss,
    layout: Option<GivenLayout>,
    slow: Option<f64>,
}

/// The settings of a recovering program that apply in each epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EpochRules {
    /// The interval of commits: only steps that are multiples of it are committed.
    pub(crate) every: u64,
    /// True if later epochs may have another number of processes.
    pub(crate) may_change: bool,
    /// The factor of [`RecoveringBuilder::drop_slow`].
    pub(crate) slow: Option<f64>,
}

/// The way in which a job continues if no spare can replace a lost process.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum OnLoss {
    /// The job waits for a new process, at most for the peer timeout, and then ends with an error.
    #[default]
    Wait,
    /// The job continues with the remaining processes, and takes in others that come later.
    ///
    /// The program is called with another number of [processes](Program::processes). They are
    /// renumbered in the same order, and new processes get the numbers after them. The devices
    /// stay, but are divided anew over the processes, as evenly as possible. So a process may have
    /// several. A program that depends only on the devices computes the same bits as before.
    /// [`RecoveringBuilder::layout`] sets another number of devices. [`Commits::restore`] moves the
    /// state to the new shardings.
    ///
    /// The job first waits for processes that it knows of: spares, and those that `mpmd run
    /// --restart` may start. Later, a waiting process is taken in after one of the next commits,
    /// without the loss of a step: there [`Program::commit`] returns [`Error::EpochOver`]. The job
    /// grows to at most its number of processes at the start, plus one for each that `mpmd run
    /// --add` has added.
    Shrink,
}

/// The function given to [`RecoveringBuilder::layout`].
#[derive(Clone)]
struct GivenLayout(Arc<LayoutFn>);

impl fmt::Debug for GivenLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GivenLayout(..)")
    }
}

/// Access to the commits of a job, of which this process has copies in its memory.
///
/// [`Program::commit`] adds a commit. After the loss of a process, [`Commits::restore`] continues
/// from the newest whole commit.
#[derive(Clone, Debug)]
pub struct Commits {
    pub(super) kept: Arc<Mutex<RecoveryStore>>,
    pub(super) recovery: Arc<Mutex<Option<Recovery>>>,
}

impl Builder {
    /// Makes the program survive lost processes. When a process is lost, another one takes its
    /// place and [`RecoveringBuilder::run`] calls the program again.
    ///
    /// `spares` is the number of started processes that wait as spares. It applies under launchers
    /// without spares, such as Slurm and `mpirun`. Under `mpmd run`, the option `--spares` sets the
    /// number.
    pub fn spares(self, spares: usize) -> RecoveringBuilder {
        let on_loss = OnLoss::default();
        RecoveringBuilder {
            builder: self,
            spares,
            every: 1,
            on_loss,
            layout: None,
            slow: None,
        }
    }
}

impl RecoveringBuilder {
    /// Sets the interval of commits. At steps that are no multiple of `steps`, [`Program::commit`]
    /// does nothing. The default is 1; 0 counts as 1.
    pub fn every(mut self, steps: u64) -> Self {
        self.every = steps.max(1);
        self
    }

    /// Sets how the job continues if no spare can replace a lost process. The default is to
    /// [wait](OnLoss::Wait).
    pub fn on_loss(mut self, on_loss: OnLoss) -> Self {
        self.on_loss = on_loss;
        self
    }

    /// Sets a function that returns the number of devices for each number of processes, in a job
    /// that [shrinks](OnLoss::Shrink). By default the devices of the start stay, for any number of
    /// processes up to the number of devices. Devices are divided as evenly as possible.
    ///
    /// Each process needs a device. The program does not continue with a number of processes for
    /// which the function returns fewer devices. An added process then waits until another one is
    /// lost. Before the job begins, the function is called for each number of processes up to a
    /// limit. The limit is 256 or four times the number at the start, whichever is larger. The job
    /// does not grow further.
    ///
    /// An error of the function is the reason why the program cannot continue with that number,
    /// such as missing memory. The job then waits for processes, at most for the peer timeout, and
    /// ends with that reason. The function must return the same on every process. It does not
    /// change the devices of the first epoch.
    ///
    /// The program may use fewer processes and devices than there are. Each process holds a part of
    /// the state, so a job never turns away a remaining process.
    pub fn layout<F>(mut self, layout: F) -> Self
    where
        F: Fn(usize) -> Result<usize, String> + Send + Sync + 'static,
    {
        self.layout = Some(GivenLayout(Arc::new(layout)));
        self
    }

    /// Drops a process that has become slower by more than `factor`, at least 1.5. A spare takes
    /// its place, or the job [shrinks](OnLoss::Shrink). Off by default; used only in a job that
    /// shrinks.
    ///
    /// The measured time lies between two commits: the time in which the process's kernels run on
    /// CPU devices, or in which the system has stopped the process. The median of the last twelve
    /// times is compared with the median of the first twelve of the epoch. The same change on the
    /// other processes is discounted. Process 0 prints a line with the process and its times. On
    /// the dropped process, [`RecoveringBuilder::run`] returns `None`.
    pub fn drop_slow(mut self, factor: f64) -> Self {
        self.slow = Some(factor.max(1.5));
        self
    }

    /// Joins the job that this process was started for, runs `program` and finishes, as
    /// [`Builder::run`] does. Returns the value of `program`. Returns `None` on an unused spare,
    /// and on a process that has [asked to leave](Commits::ask_to_leave).
    ///
    /// If a process is lost, the others leave the job's epoch. They meet again in the next one,
    /// with a spare or a new process in the free place. Then `program` is called again. It issues
    /// everything anew, and starts from [`Commits::restore`]. Arrays and other handles of the
    /// earlier epoch must not be used. A job of one process runs `program` once.
    ///
    /// # Errors
    ///
    /// The errors of [`Builder::run`], except for the loss of another process. If no process takes
    /// the free place within the peer timeout. If a job that shrinks has devices of several kinds.
    #[track_caller]
    pub fn run<T, E>(
        self,
        program: impl Fn(&mut Program, &Commits) -> Result<T, E>,
    ) -> Result<Option<T>, E>
    where
        E: From<Error> + fmt::Display,
    {
        let layout = self.layout.as_ref().map(|given| &*given.0);
        let mut job = EnvironmentJob::of_environment(self.builder, self.spares)?;
        let may_change = self.on_loss == OnLoss::Shrink;
        if may_change {
            job.set_sizes(layout)?;
        }

        let join = |returning| {
            let started = job.join(returning);
            started.map_err(|error| with_reason(error, layout))
        };
        let rules = EpochRules {
            every: self.every,
            may_change,
            slow: self.slow,
        };
        run_epochs(rules, join, program)
    }
}

/// Extends the error of a job that lacks processes by the reason why the job cannot continue with
/// the remaining ones.
fn with_reason(error: Error, layout: Option<&LayoutFn>) -> Error {
    let Error::Launch(LaunchError::Rendezvous(RendezvousError::Missing {
        ref missing,
        processes,
        ..
    })) = error
    else {
        return error;
    };

    let left = processes.saturating_sub(missing.len());
    match layout
        .filter(|_| left > 0)
        .and_then(|layout| devices_of_size(layout, left).err())
    {
        Some(why) => Error::Environment(format!(
            "{error}. The program does not go on with the {left} that are left: {why}"
        )),
        None => error,
    }
}

/// Runs the program in each epoch of a job. `join` joins the next epoch; its argument is this
/// process's state from the epoch before, `None` in the first.
#[track_caller]
pub(crate) fn run_epochs<T, E>(
    rules: EpochRules,
    mut join: impl FnMut(Option<Returning>) -> Result<EpochStart>,
    program: impl Fn(&mut Program, &Commits) -> Result<T, E>,
) -> Result<Option<T>, E>
where
    E: From<Error> + fmt::Display,
{
    let EpochRules {
        every,
        may_change,
        slow,
    } = rules;
    let commits = Commits {
        kept: Arc::new(Mutex::new(RecoveryStore::new(every))),
        recovery: Arc::default(),
    };

    let mut returns = None;
    loop {
        let (failure, returning) = match join(returns.take())? {
            EpochStart::NoPlace => return Ok(None),
            EpochStart::Lost { failure, returning } => (failure, returning),
            EpochStart::Program(mut p) => {
                let run = format!("{:032x}", p.run_id());
                tracing::info!(run, epoch = p.epoch(), "an epoch of the job begins");
                p.keep_commits(&commits.kept, may_change);
                commits.kept.lock().paces = slow.map(ProcessPaces::new);
                if slow.is_some() {
                    p.runtime.times_kernels.store(true, Ordering::Relaxed);
                    p.runtime.watch_stalls();
                }

                let result = program(&mut p, &commits);
                let processes = p.processes();
                match p.end_epoch(result) {
                    EpochEnd::Over(result) => return result.map(Some),
                    EpochEnd::Lost { failure, returning } => {
                        commits.kept.lock().processes = processes;
                        (failure, returning)
                    }
                }
            }
        };
        tracing::info!(%failure, "an epoch of the job has ended");
        commits.kept.lock().end_epoch(failure);
        returns = Some(*returning);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mpmd_base::ProcessId;
    use mpmd_base::block::thread;
    use mpmd_layout::aval::f32s;
    use mpmd_layout::spec;

    use super::*;
    use crate::exec::array::MpmdArray;
    use crate::{Simulation, SimulationReport};

    const STEPS: u64 = 100;

    /// The number of processes of an epoch, and the step with which it began.
    type Epochs = Vec<(usize, u64)>;

    /// Adds 1 to each of twelve numbers in each step. They are sharded over all processes. Returns
    /// them, and the epochs in which this process was.
    fn count(
        p: &mut Program,
        commits: &Commits,
        epochs: &Mutex<Epochs>,
    ) -> Result<(Vec<f32>, Epochs)> {
        let devices = p.topology().device_ids().len();
        let mesh = p.mesh(&[("x", devices)])?;
        let here = mesh.sharding(spec!["x"]);
        let mut x = p.array_from_fn(f32s([12]), &here, |region, mut values| {
            for (value, at) in values
                .as_mut_slice::<f32>()?
                .iter_mut()
                .zip(region.range(0))
            {
                *value = at as f32;
            }
            Ok(())
        })?;
        let add = crate::kernel::elementwise(|x: f32| x + 1.0);
        let add = p.jit(add).on(&mesh).outputs(&here).build()?;
        let step = commits.restore(p, &mut x)?;
        epochs.lock().push((p.processes(), step));
        for step in step..STEPS {
            x = add.call(p, x)?;
            p.step_end()?;
            p.commit(step + 1, &x)?;
            if commits.all_ask_to_leave() {
                break;
            }
            x.block_until_ready()?;
            thread::sleep(Duration::from_millis(5));
        }
        let all = p.mesh(&[("x", devices)])?.replicated();
        let values = p.device_put(&x, all)?.to_host()?;
        let values = values.expect("every process has it").to_vec::<f32>()?;
        Ok((values, epochs.lock().clone()))
    }

    type Ends = Vec<Result<Option<(Vec<f32>, Epochs)>>>;

    fn run(job: &Simulation, every: u64) -> (Ends, SimulationReport) {
        // Of all processes together, since a thread does not know its number here.
        let epochs = Mutex::default();
        job.run_recovering(every, |p, commits| count(p, commits, &epochs))
    }

    /// Checks the values, and returns the sizes of the epochs that began.
    fn sizes_of(ends: &Ends, steps: u64) -> Vec<usize> {
        let mut sizes = Vec::new();
        let values = ends.iter().filter_map(|end| end.as_ref().ok()?.as_ref());
        for (values, epochs) in values {
            let expected: Vec<f32> = (0..12).map(|at| (at + steps) as f32).collect();
            assert_eq!(*values, expected);
            sizes = epochs.iter().map(|(size, _)| *size).collect();
        }
        sizes.dedup();
        sizes
    }

    /// Each process has a device.
    fn any(size: usize) -> Result<usize, String> {
        Ok(size)
    }

    #[test]
    fn job_shrinks_by_losses_and_goes_on_alone() {
        for seed in 0..10 {
            let job = Simulation::new(4, 4).seed(seed).shrink(any);
            let job = job.lose_after(ProcessId(0), Duration::from_millis(100));
            let job = job.lose_after(ProcessId(2), Duration::from_millis(300));
            let job = job.lose_after(ProcessId(3), Duration::from_millis(500));
            let (ends, report) = run(&job, 1);
            assert_eq!(report.left, [""; 0]);
            assert_eq!(sizes_of(&ends, STEPS), [4, 3, 2, 1], "seed {seed}");
            assert_eq!(
                ends.iter().map(Result::is_ok).collect::<Vec<_>>(),
                [false, true, false, false]
            );
        }
    }

    #[test]
    fn process_that_comes_later_is_taken_in_without_a_lost_step() {
        for (seed, every) in (0..10).zip([1, 3].into_iter().cycle()) {
            let job = Simulation::new(3, 6).seed(seed).shrink(any);
            let job = job.lose_after(ProcessId(1), Duration::from_millis(80));
            let job = job.spare_after(Duration::from_millis(200));
            let (ends, _) = run(&job, every);
            assert_eq!(sizes_of(&ends, STEPS), [3, 2, 3], "seed {seed}");
            let (_, epochs) = ends[0].as_ref().unwrap().as_ref().unwrap();
            let began: Vec<u64> = epochs.iter().map(|(_, step)| *step).collect();
            assert!(began.iter().all(|step| step % every == 0), "{began:?}");
            assert!(ends[3].as_ref().unwrap().is_some(), "the spare has a place");
        }
    }

    #[test]
    fn devices_stay_as_processes_go_and_come() {
        // Of two processes one has more than half of three devices.
        for (seed, devices) in (0..12).zip([3, 4, 12].into_iter().cycle()) {
            let processes = devices.min(3 + devices % 3);
            let mut job = Simulation::new(processes, devices)
                .seed(seed)
                .shrink(move |_| Ok(devices));
            for (process, millis) in (0..processes as u32 - 1).zip([60, 200, 340]) {
                job = job.lose_after(ProcessId(process), Duration::from_millis(millis));
            }
            let job = job.spare_after(Duration::from_millis(480));
            let epochs = Mutex::default();
            let (ends, report) = job.run_recovering(1, |p, commits| {
                assert_eq!(p.topology().devices().len(), devices);
                count(p, commits, &epochs)
            });
            assert_eq!(report.left, [""; 0]);
            let expected: Vec<usize> = (1..=processes).rev().chain([2]).collect();
            assert_eq!(sizes_of(&ends, STEPS), expected, "seed {seed}");
        }
    }

    /// The program of the guide cannot divide its twelve numbers over five devices.
    #[test]
    fn added_process_waits_while_there_is_no_device_for_it() {
        for seed in 0..200 {
            let random = &mut fastrand::Rng::with_seed(seed);
            let processes = random.usize(2..5);
            let mut job = Simulation::new(processes, processes).seed(seed);
            job = match random.bool() {
                true => job.shrink_devices_stay(),
                false => job.shrink(move |_| Ok(processes)),
            };
            let loses = random.bool();
            if loses {
                let process = ProcessId(random.u32(..processes as u32));
                job = job.lose_after(process, Duration::from_millis(random.u64(10..150)));
            }
            let added = random.usize(1..4);
            for _ in 0..added {
                job = job.add_after(Duration::from_millis(random.u64(..300)));
            }
            let (ends, report) = run(&job, 1);
            assert_eq!(report.left, [""; 0], "seed {seed}");
            let sizes = sizes_of(&ends, STEPS);
            assert!(
                sizes.iter().all(|size| *size <= processes),
                "seed {seed}: {sizes:?}"
            );
            let ended = ends.iter().filter(|end| matches!(end, Ok(Some(_)))).count();
            assert_eq!(ended, processes, "seed {seed}: {ends:?}");
            let waited = ends.iter().filter(|end| matches!(end, Ok(None))).count();
            assert_eq!(waited, added - usize::from(loses), "seed {seed}: {ends:?}");
        }
    }

    #[test]
    fn added_processes_are_taken_in_as_far_as_there_are_devices() {
        for seed in 0..20 {
            let mut job = Simulation::new(2, 4).seed(seed).shrink_devices_stay();
            for millis in [40, 120, 200] {
                job = job.add_after(Duration::from_millis(millis));
            }
            let (ends, _) = run(&job, 1);
            assert_eq!(sizes_of(&ends, STEPS), [2, 3, 4], "seed {seed}");
            let waited = ends.iter().filter(|end| matches!(end, Ok(None))).count();
            assert_eq!(waited, 1, "seed {seed}: {ends:?}");
        }
    }

    #[test]
    fn layout_with_too_few_devices_is_a_reason() {
        let missing = RendezvousError::Missing {
            missing: vec![ProcessId(2)],
            processes: 3,
            peer_timeout: Duration::from_secs(1),
        };
        let said = with_reason(
            Error::Launch(LaunchError::Rendezvous(missing)),
            Some(&|_| Ok(1)),
        );
        let said = said.to_string();
        let why = "its layout has 1 device for 2 processes, and each process needs one";
        assert!(said.ends_with(why), "{said}");
    }

    #[test]
    fn process_without_a_device_has_no_copies() {
        let job = Simulation::new(2, 2).seed(1);
        let job = job.settings(|settings| settings.devices_by_process(&[2, 0]));
        let (ends, _) = job.run_recovering(1, |p, _| {
            let x = p.device_put(
                &MpmdArray::scalar(1.0f32),
                p.mesh(&[("x", 2)])?.replicated(),
            )?;
            p.commit(1, &x)
        });
        for end in ends {
            let said = end.expect_err("there is no second copy").to_string();
            assert!(said.contains("a device on each process"), "{said}");
        }
    }

    #[test]
    fn job_of_one_grows() {
        let job = Simulation::new(2, 2).seed(3).shrink(any);
        let job = job.lose_after(ProcessId(0), Duration::from_millis(50));
        let job = job.spare_after(Duration::from_millis(120));
        assert_eq!(sizes_of(&run(&job, 1).0, STEPS), [2, 1, 2]);
    }

    #[test]
    fn sizes_that_the_layout_refuses_are_not_taken() {
        let even = |size: usize| {
            if size.is_multiple_of(2) {
                Ok(4)
            } else {
                Err("odd".to_owned())
            }
        };
        let job = Simulation::new(4, 4).seed(5).shrink(even);
        let lost = Duration::from_millis(50);
        let job = job
            .lose_after(ProcessId(0), lost)
            .lose_after(ProcessId(2), lost);
        let job = job.spare_after(Duration::from_millis(100));
        assert_eq!(
            sizes_of(&run(&job, 1).0, STEPS),
            [4, 2],
            "the spare waits in vain"
        );
        let job = Simulation::new(4, 4)
            .seed(5)
            .shrink(even)
            .lose_after(ProcessId(0), lost);
        let (ends, _) = run(&job, 1);
        let said = ends[1].as_ref().unwrap_err().to_string();
        assert!(said.contains("process 0"), "{said}");
    }

    #[test]
    fn process_that_asks_leaves_and_the_others_lose_no_step() {
        for seed in 0..10 {
            let job = Simulation::new(3, 3).seed(seed).shrink(any);
            let epochs = Mutex::default();
            let (ends, report) = job.run_recovering(1, |p, commits| {
                if (p.processes(), p.process()) == (3, ProcessId(1)) {
                    commits.ask_to_leave();
                }
                count(p, commits, &epochs)
            });
            assert_eq!(report.left, [""; 0]);
            assert!(ends[1].as_ref().unwrap().is_none(), "it has left");
            assert_eq!(sizes_of(&ends, STEPS), [3, 2]);
            let (_, epochs) = ends[0].as_ref().unwrap().as_ref().unwrap();
            assert!(epochs.contains(&(2, 3)), "{epochs:?}: two commits later");
        }
    }

    /// Runs a program that commits a number until an epoch ends by a change. `last` is issued
    /// before the last commit, and `end` makes the program's result of its error.
    fn until_a_change(
        last: impl Fn(&mut Program) -> Result<()> + Sync,
        end: impl Fn(Error) -> Result<u64> + Sync,
    ) -> Vec<Result<Option<u64>>> {
        let job = Simulation::new(3, 3).seed(4).shrink(any);
        let program = |p: &mut Program, commits: &Commits| {
            if p.process() == ProcessId(1) {
                commits.ask_to_leave();
            }
            let everywhere = p.mesh(&[("x", 3)])?.replicated();
            let x = p.device_put(&MpmdArray::scalar(1.0f32), everywhere)?;
            for step in 1..=3 {
                if step == 3 {
                    last(p)?;
                }
                if let Err(error) = p.commit(step, &x) {
                    return end(error);
                }
            }
            Ok(0)
        };
        job.run_recovering(1, program).0
    }

    #[test]
    fn program_that_ends_instead_of_a_change_has_its_value() {
        let ends = until_a_change(
            |_| Ok(()),
            |error| match error {
                Error::EpochOver { why } if &*why == "process 1 has asked to leave" => Ok(7),
                error => Err(error),
            },
        );
        assert!(
            ends.iter().all(|end| matches!(end, Ok(Some(7)))),
            "{ends:?}"
        );
    }

    #[test]
    fn other_error_of_a_program_at_a_change_ends_the_job() {
        for end in until_a_change(|_| Ok(()), |_| Err(Error::kernel("its file is full"))) {
            let said = end.expect_err("no process goes on").to_string();
            assert!(said.contains("its file is full"), "{said}");
        }
        let ends = until_a_change(
            |_| Ok(()),
            |error| Err(Error::kernel(format!("at 3: {error}"))),
        );
        // The next epoch has two processes, for which the program has no mesh.
        let is_next = |end: &Result<Option<u64>>| match end {
            Ok(end) => end.is_none(),
            Err(error) => error.to_string().contains("a mesh {x:3} takes 3 devices"),
        };
        assert!(ends.iter().all(is_next), "{ends:?}");
    }

    #[test]
    fn kernel_that_fails_before_a_change_ends_the_job() {
        let fails = |p: &mut Program| {
            let everywhere = p.mesh(&[("x", 3)])?.replicated();
            let made = p.array_from_fn(f32s([1]), &everywhere, |_, _| {
                thread::sleep(Duration::from_millis(50));
                Err(Error::kernel("it cannot divide"))
            });
            made.map(drop)
        };
        for end in until_a_change(fails, Err) {
            let said = end.expect_err("no process goes on").to_string();
            assert!(said.contains("it cannot divide"), "{said}");
        }
    }

    #[test]
    fn all_that_ask_to_leave_end_together() {
        let epochs = Mutex::default();
        let (ends, _) =
            Simulation::new(3, 3)
                .seed(1)
                .shrink(any)
                .run_recovering(1, |p, commits| {
                    commits.ask_to_leave();
                    count(p, commits, &epochs)
                });
        assert_eq!(sizes_of(&ends, 3), [3]);
        assert!(ends.iter().all(|end| end.as_ref().unwrap().is_some()));
    }

    #[test]
    fn lack_of_processes_has_the_reason_of_the_layout() {
        let missing = RendezvousError::Missing {
            missing: vec![ProcessId(2)],
            processes: 3,
            peer_timeout: Duration::from_secs(1),
        };
        let layout = |size| Err(format!("{size} processes need 9 GiB each"));
        let said = with_reason(
            Error::Launch(LaunchError::Rendezvous(missing)),
            Some(&layout),
        );
        let said = said.to_string();
        assert!(
            said.ends_with("that are left: 2 processes need 9 GiB each"),
            "{said}"
        );
    }

    /// The layout of a program that does not go on with two processes.
    fn not_two(size: usize) -> Result<usize, String> {
        match size {
            2 => Err("two do not fit".to_owned()),
            size => Ok(size),
        }
    }

    #[test]
    fn process_stays_that_the_layout_needs() {
        for (seed, spares) in (0..10).zip([0, 1].into_iter().cycle()) {
            let mut job = Simulation::new(3, 3).seed(seed).shrink(not_two);
            for _ in 0..spares {
                job = job.spare_after(Duration::from_millis(1));
            }
            let epochs = Mutex::default();
            let (ends, report) = job.run_recovering(1, |p, commits| {
                if p.epoch() == 1 && p.process() == ProcessId(1) {
                    commits.ask_to_leave();
                }
                count(p, commits, &epochs)
            });

            assert_eq!(report.left, [""; 0]);
            assert!(ends.iter().all(Result::is_ok), "seed {seed}: {ends:?}");
            let last_epoch = ends[0]
                .as_ref()
                .unwrap()
                .as_ref()
                .unwrap()
                .1
                .last()
                .copied();
            assert_eq!(last_epoch.map(|(size, _)| size), Some(3), "seed {seed}");
            let has_left = ends[1].as_ref().unwrap().is_none();
            assert_eq!(has_left, spares == 1, "seed {seed}: a spare has its place");
        }
    }

    #[test]
    fn two_leave_together_where_one_alone_may_not() {
        let even = |size: usize| match size {
            3 => Err("odd".to_owned()),
            size => Ok(size),
        };
        let epochs = Mutex::default();
        let job = Simulation::new(4, 4).seed(2).shrink(even);
        let (ends, _) = job.run_recovering(1, |p, commits| {
            if p.epoch() == 1 && p.process().0 % 2 == 1 {
                commits.ask_to_leave();
            }
            count(p, commits, &epochs)
        });
        assert_eq!(sizes_of(&ends, STEPS), [4, 2]);
    }

    /// Runs 60 steps on three processes, each of which calls `before` and then commits. Process 1
    /// is slow from step 30 on. Returns a result for each process: the number of processes at the
    /// end, or `None` if the process was dropped.
    fn with_slow_process(
        layout: fn(usize) -> Result<usize, String>,
        before: impl Fn(&mut Program, u64) + Sync,
    ) -> Vec<Result<Option<usize>>> {
        let job = Simulation::new(3, 3).seed(4).shrink(layout);
        let program = |p: &mut Program, commits: &Commits| {
            commits.kept.lock().paces = Some(ProcessPaces::new(2.0));
            let everywhere = p.mesh(&[("x", p.processes())])?.replicated();
            let mut x = p.device_put(&MpmdArray::scalar(1.0f32), everywhere)?;
            let mut nanos = 0;
            for step in commits.restore(p, &mut x)?..60 {
                let is_slow = step >= 30 && (p.epoch(), p.process()) == (1, ProcessId(1));
                nanos += if is_slow { 30_000_000 } else { 3_000_000 };
                p.runtime.kernel_nanos.store(nanos, Ordering::Relaxed);
                before(p, step);
                p.commit(step + 1, &x)?;
            }
            Ok(p.processes())
        };

        job.run_recovering(1, program).0
    }

    #[test]
    fn slow_process_is_not_dropped_where_the_layout_needs_it() {
        let ends = with_slow_process(not_two, |_, _| {});
        let goes_on = |end: &Result<Option<usize>>| matches!(end, Ok(Some(3)));
        assert!(ends.iter().all(goes_on), "{ends:?}");
        let ends = with_slow_process(any, |_, _| {});
        assert!(matches!(ends[1], Ok(None)), "{ends:?}");
    }

    #[test]
    fn wrong_process_that_the_layout_needs_ends_the_job() {
        let accuse = |p: &mut Program, step| {
            if step == 5 {
                p.accuse(ProcessId(1));
            }
        };
        for end in with_slow_process(not_two, accuse) {
            let said = end.expect_err("no process goes on").to_string();
            assert!(said.starts_with("process 1 computes wrong bits"), "{said}");
            let why = "does not go on with 2 processes: two do not fit";
            assert!(said.ends_with(why), "{said}");
        }

        let ends = with_slow_process(any, accuse);
        assert!(
            matches!(ends[..], [Ok(Some(2)), Ok(None), Ok(Some(2))]),
            "{ends:?}"
        );
    }
}
