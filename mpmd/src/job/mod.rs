//! Runs a program as a job, by its arguments: as one process, as threads, as processes that it
//! starts itself, or as one process of a job that a launcher has started.
//!
//! A program without options of its own has [`main`]. One with options flattens [`JobArgs`] into
//! them, and calls [`run`]:
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use clap::Parser;
//! use mpmd::job::JobArgs;
//!
//! #[derive(Parser)]
//! struct Args {
//!     #[command(flatten)]
//!     job: JobArgs,
//! }
//!
//! fn main() -> anyhow::Result<ExitCode> {
//!     mpmd::job::run(&Args::parse().job, 4, 8, |p| {
//!         println!("process {} of {}", p.process(), p.processes());
//!         anyhow::Ok(())
//!     })
//! }
//! ```

mod inputs;
mod numbers;

use std::fmt;
use std::io::{IsTerminal, Write, stderr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use crate::launch::{JobEnv, Launch, LaunchError, OutputMode, device_kinds, variables};
use crate::topology::DeviceKind;
use crate::{
    Builder, Commits, Error, Fact, FailureKind, OnLoss, ProcessId, Program, testing::Simulation,
};
use anyhow::Context;
use clap::{Parser, ValueEnum};
use mpmd_base::counted;
use mpmd_launch::{end_with_stdout, process_counts};
use signal_hook::consts::SIGXFSZ;

pub use inputs::{ComparedOptions, JobInputs};
pub use mpmd_base::{bytes_text, open_output, parse_bytes};
pub use mpmd_launch::printable;
pub use numbers::{NumberError, at_least, not_negative, positive};

/// Time limit for the processes to exit after Ctrl-C, or after one has failed: enough for a last
/// step, a checkpoint and the final messages.
const GRACE: Duration = Duration::from_secs(60);

/// Display order of these options in a program's help: after the program's own options.
const LAST: usize = 1000;

/// Arguments that every program takes: how to run the job.
///
/// If a launcher (`mpmd run`, Slurm, …) has started the program, the launcher decides, and these
/// arguments are ignored.
///
/// The processes of a job compare all other options of the program when they join. Those that
/// differ are named in the error, with both values. It must be the first field of a program's
/// arguments: `clap` takes the options of a field away from those that follow it.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct JobArgs {
    /// The options of the whole program.
    #[command(flatten)]
    pub options: ComparedOptions,
    /// Number of processes of the job
    #[arg(long, value_name = "N", display_order = LAST)]
    pub processes: Option<usize>,
    /// Transport between the processes; `inproc` runs them as threads of this process. By default
    /// that of MPMD_TRANSPORT, else `auto`
    #[arg(long, value_enum, display_order = LAST)]
    pub transport: Option<JobTransport>,
    /// Kind of the devices: `cpu`, `cuda`, or a list with one kind for each process, such as
    /// `cpu,cuda,cuda`; further processes use the last kind
    #[arg(long, value_name = "KIND,…", value_parser = devices, display_order = LAST)]
    pub device: Option<DeviceKindList>,
    /// Folder in which each process records its operations, for `mpmd trace`
    #[arg(long, value_name = "DIR", display_order = LAST)]
    pub trace: Option<PathBuf>,
    /// Ids of options that may differ from process to process.
    #[arg(skip)]
    pub may_differ: Vec<String>,
    /// The inputs of the program.
    #[arg(skip)]
    pub inputs: JobInputs,
}

/// Kinds of devices, by process number. Processes beyond the end of the list use its last kind.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DeviceKindList(Vec<DeviceKind>);

fn devices(text: &str) -> Result<DeviceKindList, LaunchError> {
    device_kinds(text).map(DeviceKindList)
}

impl DeviceKindList {
    /// True if all devices are CPU devices. Their memory is memory of the host.
    pub fn is_cpu(&self) -> bool {
        self.0.iter().all(|kind| *kind == DeviceKind::Cpu)
    }

    /// Returns the kind of each of `processes` processes. Returns a longer list whole.
    fn of(&self, processes: usize) -> Vec<DeviceKind> {
        let mut kinds = self.0.clone();
        let last = kinds.last().copied().unwrap_or(DeviceKind::Cpu);
        kinds.resize(processes.max(kinds.len()), last);
        kinds
    }
}

impl fmt::Display for DeviceKindList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(|kind| kind.name()).collect();
        f.write_str(&names.join(","))
    }
}

/// The transport between the processes of an example.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum JobTransport {
    /// Separate processes, over shared memory if possible.
    Auto,
    /// Separate processes, over shared memory.
    Shm,
    /// Separate processes, over TCP on the loopback interface.
    Tcp,
    /// Separate processes, over the transport that UCX selects. Needs the feature `ucx`.
    Ucx,
    /// Threads of this process.
    Inproc,
}

impl JobArgs {
    /// Adds an input, such as the content of a file, that must be equal on all processes. `find`
    /// returns the facts to compare. Each process calls it before it joins the job, and again if it
    /// waited as a spare and gets a place.
    #[must_use]
    pub fn input(mut self, find: impl Fn() -> Vec<Fact> + Send + Sync + 'static) -> Self {
        self.inputs.add(find);
        self
    }

    /// Allows options of the program to differ between processes. `ids` are option ids, such as
    /// `save_every`.
    #[must_use]
    pub fn may_differ(mut self, ids: impl IntoIterator<Item: Into<String>>) -> Self {
        self.may_differ.extend(ids.into_iter().map(Into::into));
        self
    }

    /// Returns a builder with a check that options and inputs are equal on all processes.
    fn compared(&self) -> Builder {
        let options = self.options.clone();
        let may_differ = self.may_differ.clone();
        let inputs = self.inputs.clone();
        Program::builder().facts(move || {
            options
                .facts(&may_differ)
                .into_iter()
                .chain(inputs.facts())
                .collect()
        })
    }

    /// Returns the device kinds of the job's processes, by process number. Further processes have
    /// the last kind.
    ///
    /// The launcher's setting counts if a launcher has started the program. Otherwise `--device`
    /// counts, then `MPMD_DEVICE`. Returns `None` if no kind is set: all devices are then CPUs.
    ///
    /// # Errors
    ///
    /// If the environment variables of the job are invalid.
    pub fn device_kinds(&self) -> anyhow::Result<Option<Vec<DeviceKind>>> {
        if let Some(env) = JobEnv::from_env()? {
            return Ok(env.device_kinds);
        }
        if let Some(DeviceKindList(kinds)) = &self.device {
            return Ok(Some(kinds.clone()));
        }
        let inherited = std::env::var(variables::DEVICE).unwrap_or_default();
        let inherited = Some(inherited.trim()).filter(|text| !text.is_empty());
        Ok(inherited.map(device_kinds).transpose()?)
    }

    /// Checks that all devices are CPUs, for programs without kernels for other devices. `program`
    /// is the name in the error.
    ///
    /// # Errors
    ///
    /// If the job has a device of another kind, or if [`device_kinds`](Self::device_kinds) fails.
    pub fn only_on_cpus(&self, program: &str) -> anyhow::Result<()> {
        let kinds = self.device_kinds()?.unwrap_or_default();
        let all_cpus = kinds.iter().all(|kind| *kind == DeviceKind::Cpu);
        anyhow::ensure!(
            all_cpus,
            "{program} computes only on devices of kind cpu: leave --device out"
        );
        Ok(())
    }
}

impl JobTransport {
    /// Returns the transport's name as launchers spell it.
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
            Self::Inproc => "inproc",
        }
    }
}

/// The role of a process in a job.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum JobPart {
    /// Starts the processes of the job, and is not one of them.
    Parent,
    /// Process 0.
    First,
    /// A process with another number, or a dry run.
    Other,
}

/// The error of a program that ran to its end with a result that is not good enough. The job's exit
/// code is 1.
///
/// Every process must return this error, or the others wait for a process that has ended. Only
/// process 0 prints it.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct Rejected(pub String);

/// The number of devices of a job, and the groups that must stay together.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum DevicePlacement {
    /// This number of devices, spread evenly over all processes.
    Even(usize),
    /// Groups of devices, by size. Each process gets equally many whole groups, in order. If that
    /// is impossible, each process gets equally many devices.
    Groups(Vec<usize>),
}

impl From<usize> for DevicePlacement {
    fn from(devices: usize) -> Self {
        Self::Even(devices)
    }
}

impl From<Vec<usize>> for DevicePlacement {
    fn from(groups: Vec<usize>) -> Self {
        Self::Groups(groups)
    }
}

impl DevicePlacement {
    fn devices(&self) -> usize {
        match self {
            Self::Even(devices) => *devices,
            Self::Groups(groups) => groups.iter().sum(),
        }
    }

    /// Returns the numbers of processes over which the devices can be spread, as a text: `1, 2, 4`.
    fn process_counts(&self) -> String {
        match self {
            Self::Even(devices) => process_counts(*devices),
            Self::Groups(_) => {
                let fits = |count: &usize| self.by_process(*count).is_some();
                let counts = (1..=self.devices())
                    .filter(fits)
                    .map(|count| count.to_string());
                counts.collect::<Vec<_>>().join(", ")
            }
        }
    }

    /// Returns the number of devices of each of `processes` processes. `None` if the devices cannot
    /// be spread over them.
    fn by_process(&self, processes: usize) -> Option<Vec<usize>> {
        match self {
            Self::Groups(groups) if processes > 0 && groups.len().is_multiple_of(processes) => {
                let each = groups.len() / processes;
                Some(
                    groups
                        .chunks(each.max(1))
                        .map(|groups| groups.iter().sum())
                        .collect(),
                )
            }
            _ if processes > 0 && self.devices().is_multiple_of(processes) => {
                Some(vec![self.devices() / processes; processes])
            }
            _ => None,
        }
    }
}

/// Runs `program` as a job on `devices`. `args` and the environment decide how:
///
/// - as one process of a launcher's job, if a launcher has started this process;
/// - as a job of this process alone, if the number of processes is one;
/// - as threads of this process, with `--transport inproc`;
/// - otherwise as child processes, which run this executable with the same arguments.
///
/// `default_processes` is the largest number of processes without `--processes`. Fewer start if the
/// devices cannot be spread evenly over that number. Each process finishes the program as
/// [`Program::run`] does. Prints the program's error, and returns the job's exit code. If a signal
/// has [stopped](Program::stopped_by) the work early, that is 128 plus its number: 130 after
/// Ctrl-C. Blocks until the job has ended.
///
/// # Errors
///
/// If the job could not be started.
pub fn run<E: Into<anyhow::Error>>(
    args: &JobArgs,
    default_processes: usize,
    devices: impl Into<DevicePlacement>,
    program: impl Fn(&mut Program) -> Result<(), E> + Sync,
) -> anyhow::Result<ExitCode> {
    let devices = devices.into();
    Program::log_to_stderr();
    end_with_stdout();
    fail_writes_to_full_files()?;

    let program = |p: &mut Program| {
        let verdict = verdict(program(p).map_err(Into::into))?;
        Ok(match (verdict, p.stopped_by()) {
            (Verdict::Good, Some(signal)) => Verdict::Stopped(signal),
            (verdict, _) => verdict,
        })
    };
    let processes = args.processes_for(default_processes, &devices);
    // A number of processes that does not fit is the builder's error.
    let on = |builder: Builder, processes| match devices.by_process(processes) {
        Some(counts) if counts.iter().any(|count| *count != counts[0]) => {
            builder.devices_by_process(&counts)
        }
        _ => builder.devices(devices.devices()),
    };

    if let Some(env) = JobEnv::from_env()? {
        let process = env.process.index();
        let builder = args.compared();
        return Ok(report(process, on(builder, env.processes).run(program)));
    }

    if let Some(code) = args.refused(processes, &devices)? {
        return Ok(code);
    }

    if args.transport != Some(JobTransport::Inproc) && processes == 1 {
        let mut builder = on(Program::builder(), 1);
        if let Some(kinds) = &args.device {
            builder = builder.device_kinds(&kinds.of(1));
        }
        if let Some(folder) = &args.trace {
            builder = builder.trace(folder);
        }
        return Ok(report(0, builder.run(program)));
    }

    if args.transport == Some(JobTransport::Inproc) {
        let mut simulation = Simulation::new(processes, devices.devices());
        simulation = simulation.settings(|settings| on(settings, processes));
        // A simulation reads no variables.
        if let Some(kinds) = args.device_kinds()? {
            let kinds = DeviceKindList(kinds).of(processes);
            simulation = simulation.settings(|settings| settings.device_kinds(&kinds));
        }
        if let Some(folder) = &args.trace {
            simulation = simulation.settings(|settings| settings.trace(folder));
        }
        let ProcessResult { process, result } = threads(&simulation, program);
        Ok(report(process, result))
    } else {
        start(args.launch(processes)?)
    }
}

/// Runs this program as a job of several processes
#[derive(Parser)]
struct OnlyJobArgs {
    #[command(flatten)]
    job: JobArgs,
}

/// Runs `program` as [`run`] does, with the options of [`JobArgs`] from the command line. Prints an
/// error and ends the process if an option is wrong. Blocks until the job has ended, and returns
/// its exit code.
///
/// ```no_run
/// fn main() -> std::process::ExitCode {
///     mpmd::job::main(4, 8, |p| {
///         println!("process {} of {}", p.process(), p.processes());
///         Ok(())
///     })
/// }
/// ```
pub fn main(
    default_processes: usize,
    devices: impl Into<DevicePlacement>,
    program: impl Fn(&mut Program) -> crate::Result<()> + Sync,
) -> ExitCode {
    let args = OnlyJobArgs::parse();
    run(&args.job, default_processes, devices, program).unwrap_or_else(|error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

/// Prints the `line` of every process on process 0, in the order of process numbers: `process 0:
/// LINE`. Blocks until all lines have arrived. In a [dry run](Program::is_dry_run) it prints
/// nothing.
///
/// If each process prints its own line instead, the lines come in any order.
///
/// # Errors
///
/// As for [`Program::gather_value`].
pub fn print_in_order(p: &mut Program, line: impl fmt::Display) -> crate::Result<()> {
    let lines = p.gather_value(String::new(), || Ok(line.to_string()))?;
    if p.process() == ProcessId(0) && !p.is_dry_run() {
        for (process, line) in lines.iter().enumerate() {
            println!("process {process}: {}", printable(line));
        }
    }
    Ok(())
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`) fail with an error. By default,
/// SIGXFSZ would end the process.
fn fail_writes_to_full_files() -> anyhow::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default())
        .context("listening for SIGXFSZ")
        .map(drop)
}

/// A function from a number of processes to the number of devices with which the program goes on
/// there: see [`RecoveringBuilder::layout`](crate::RecoveringBuilder::layout).
pub type Layout = Box<dyn Fn(usize) -> Result<usize, String> + Send + Sync>;

/// Settings of a job that goes on when it loses processes.
#[derive(Default)]
pub struct Elastic {
    /// Chooses the number of devices when no spare is left and the program goes on with fewer
    /// processes: see [`OnLoss::Shrink`]. With `None`, the program waits for a new process.
    pub layout: Option<Layout>,
    /// The factor of [`RecoveringBuilder::drop_slow`](crate::RecoveringBuilder::drop_slow). With
    /// `None`, slow processes are not dropped.
    pub drop_slow: Option<f64>,
}

/// Runs `program` as [`run`] does, in a job that goes on when it loses processes: see
/// [`Builder::spares`](crate::Builder::spares). If no launcher has started the program, the job has
/// one spare and replaces lost processes.
///
/// # Errors
///
/// If the job could not be started.
pub fn run_recovering<E: Into<anyhow::Error>>(
    args: &JobArgs,
    default_processes: usize,
    devices: usize,
    elastic: Elastic,
    program: impl Fn(&mut Program, &Commits) -> Result<(), E>,
) -> anyhow::Result<ExitCode> {
    Program::log_to_stderr();
    end_with_stdout();
    fail_writes_to_full_files()?;

    let placement = DevicePlacement::Even(devices);
    let processes = args.processes_for(default_processes, &placement);

    if let Some(env) = JobEnv::from_env()? {
        let program =
            |p: &mut Program, commits: &Commits| verdict(program(p, commits).map_err(Into::into));
        let mut builder = args.compared().devices(devices).spares(1);
        if let Some(layout) = elastic.layout {
            builder = builder.on_loss(OnLoss::Shrink).layout(layout);
        }
        if let Some(factor) = elastic.drop_slow {
            builder = builder.drop_slow(factor);
        }
        let result = builder.run(program);
        return Ok(report(
            env.process.index(),
            result.map(Option::unwrap_or_default),
        ));
    }

    args.check_recovering(processes, devices)?;
    match args.refused(processes, &placement)? {
        Some(code) => Ok(code),
        None => start(args.launch(processes)?.spares(1).restarts(MOST_RESTARTS)),
    }
}

/// Maximum number of lost processes that are replaced in a job that starts its own processes.
const MOST_RESTARTS: usize = 100;

impl JobArgs {
    /// Returns the value of `--processes`. Without it, returns the largest number up to `most` over
    /// which the devices can be spread.
    fn processes_for(&self, most: usize, devices: &DevicePlacement) -> usize {
        let fits = |processes: &usize| devices.by_process(*processes).is_some();
        self.processes
            .unwrap_or_else(|| (1..=most).rev().find(fits).unwrap_or(most))
    }

    /// Checks that a job that recovers has several processes. Checks nothing in a process that was
    /// started as part of a job.
    ///
    /// # Errors
    ///
    /// If the job has only one process, or if its processes are threads.
    pub fn check_recovering(&self, processes: usize, devices: usize) -> anyhow::Result<()> {
        if JobEnv::from_env()?.is_some() {
            return Ok(());
        }
        anyhow::ensure!(
            self.transport != Some(JobTransport::Inproc),
            "a job that recovers has several processes, not threads: leave --transport inproc out"
        );
        anyhow::ensure!(
            self.processes.unwrap_or(processes) > 1,
            "a job that recovers has several processes, not one: --processes may be {}, but for 1",
            process_counts(devices)
        );
        Ok(())
    }

    /// Returns the role of this process in a job that [`run`] starts with the same arguments.
    ///
    /// # Errors
    ///
    /// If the environment variables of the job are invalid.
    pub fn part(
        &self,
        default_processes: usize,
        devices: impl Into<DevicePlacement>,
    ) -> anyhow::Result<JobPart> {
        Ok(match JobEnv::from_env()? {
            Some(env) if env.dry_run.is_some() || env.is_added => JobPart::Other,
            Some(env) if env.process.index() == 0 => JobPart::First,
            Some(_) => JobPart::Other,
            None => {
                let processes = self.processes_for(default_processes, &devices.into());
                let runs_itself = self.transport == Some(JobTransport::Inproc) || processes == 1;
                if runs_itself {
                    JobPart::First
                } else {
                    JobPart::Parent
                }
            }
        })
    }

    /// Prints an error and returns an exit code if the devices cannot be spread over `processes`
    /// processes, or if there are more device kinds than processes.
    fn refused(&self, processes: usize, on: &DevicePlacement) -> anyhow::Result<Option<ExitCode>> {
        let devices = on.devices();
        // One message instead of one from each process.
        let kinds = self.device_kinds()?.map_or(0, |kinds| kinds.len());

        if on.by_process(processes).is_none() {
            say(&format!(
                "error: {} cannot be spread evenly over {}; --processes may be {}",
                counted(devices, "device"),
                counted(processes, "process"),
                on.process_counts()
            ));
        } else if kinds > processes {
            let counts = on.process_counts();
            let processes = counted(processes, "process");
            let problem = format!("{kinds} kinds of devices for {processes}");
            anyhow::ensure!(
                self.device.is_some(),
                "{} has {problem}; --processes may be {counts}",
                variables::DEVICE
            );
            say(&format!("error: {problem}; --processes may be {counts}"));
        } else {
            return Ok(None);
        }
        Ok(Some(ExitCode::from(2)))
    }

    /// Returns a [`Launch`] that starts this program as `processes` processes.
    fn launch(&self, processes: usize) -> Result<Launch, LaunchError> {
        let mut launch = Launch::this_program_again(processes)?
            .transport(self.transport.map(|transport| transport.name().to_owned()))
            .device(self.device.as_ref().map(DeviceKindList::to_string));
        if let Some(folder) = &self.trace {
            launch = launch.env(variables::TRACE, folder);
        }
        Ok(launch.output(OutputMode::Quiet0).grace(GRACE))
    }
}

/// Starts the processes of a job and waits for them. Returns the job's exit code.
fn start(launch: Launch) -> anyhow::Result<ExitCode> {
    let outcome = launch.run().context("starting the processes of the job")?;
    if let Some(failure) = &outcome.first_failure {
        say(&failure.to_string());
    }
    Ok(ExitCode::from(u8::try_from(outcome.code()).unwrap_or(1)))
}

/// The end of a program that has not failed.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
enum Verdict {
    #[default]
    Good,
    /// The program rejected its own result.
    Rejected(Rejected),
    /// The signal with this number stopped the program's work early.
    Stopped(i32),
}

/// Converts a program's result. A [`Rejected`] error becomes a [`Verdict`], any other error a
/// failure.
fn verdict(result: anyhow::Result<()>) -> crate::Result<Verdict> {
    let Err(error) = result else {
        return Ok(Verdict::Good);
    };
    match error.downcast::<Rejected>() {
        Ok(rejected) => Ok(Verdict::Rejected(rejected)),
        Err(error) => Err(error
            .downcast::<Error>()
            .unwrap_or_else(|e| Error::kernel(format!("{e:#}")))),
    }
}

/// The result of the program on one process.
struct ProcessResult {
    process: usize,
    result: crate::Result<Verdict>,
}

/// Runs `program` on threads and waits for all of them. Returns the most telling result: a cause of
/// a failure takes precedence over its effects on other processes.
fn threads(
    simulation: &Simulation,
    program: impl Fn(&mut Program) -> crate::Result<Verdict> + Sync,
) -> ProcessResult {
    let mut results: Vec<_> = simulation.run(program).into_iter().enumerate().collect();
    // The sort is stable: among equal errors, the first process is reported.
    results.sort_by_key(|(_, result)| match result {
        Err(error) if !error.is_peer_failure() => 0,
        Err(_) => 1,
        Ok(_) => 2,
    });
    let (process, result) = results.into_iter().next().unwrap_or((0, Ok(Verdict::Good)));
    ProcessResult { process, result }
}

fn report(process: usize, result: crate::Result<Verdict>) -> ExitCode {
    match result {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        // Exit codes are one byte.
        Ok(Verdict::Stopped(signal)) => ExitCode::from((128 + signal).to_le_bytes()[0]),
        Ok(Verdict::Rejected(rejected)) => {
            if process == 0 {
                say(&rejected.to_string());
            }
            ExitCode::FAILURE
        }
        Err(error) => {
            // On a terminal the launcher cannot see that this process has said the same.
            let is_said = launcher_says(&error)
                && std::env::var_os(variables::LAUNCHER_PID).is_some()
                && stderr().is_terminal();
            if !is_said {
                say(&format!("process {process}: error: {error}"));
            }
            ExitCode::FAILURE
        }
    }
}

/// True if the launcher prints this failure when the job ends. Of a lost process it prints only how
/// the process ended.
fn launcher_says(error: &Error) -> bool {
    error
        .failure()
        .is_some_and(|failure| failure.kind != FailureKind::PeerLost)
}

/// Prints a line to standard error in one write, with control characters escaped. Ignores a closed
/// pipe and other errors of the write.
///
/// `eprintln!` would panic on a closed pipe, before the program has saved its results. It also
/// writes in pieces, between which another process could write to the same stream.
pub fn say(line: &str) {
    let _ = stderr().write_all(format!("{}\n", printable(line)).as_bytes());
}

#[cfg(test)]
mod tests {
    use crate::{Failure, ProcessId};

    use super::*;

    fn failing(p: &mut Program) -> crate::Result<Verdict> {
        p.broadcast_value(ProcessId(0), 0u32, || Ok(7))?;
        if p.process() == ProcessId(1) {
            return Err(Error::kernel("out of paper"));
        }
        p.broadcast_value(ProcessId(1), 0u32, || Ok(7))?;
        Ok(Verdict::Good)
    }

    #[test]
    fn cause_of_a_failure_is_reported_not_its_effects() {
        let ProcessResult { process, result } = threads(&Simulation::new(3, 3), failing);
        assert_eq!(process, 1);
        assert!(result.unwrap_err().to_string().contains("out of paper"));
    }

    #[test]
    fn stopped_program_has_the_exit_code_of_its_signal() {
        let ends = |result: fn() -> anyhow::Result<()>, signal: Option<i32>| {
            let args = JobArgs {
                transport: Some(JobTransport::Inproc),
                ..JobArgs::default()
            };
            let code = run(&args, 2, 2, |p| {
                if let Some(signal) = signal {
                    p.set_stopped_by(signal);
                }
                result()
            });
            format!("{:?}", code.unwrap())
        };
        let code = |code: u8| format!("{:?}", ExitCode::from(code));
        assert_eq!(ends(|| Ok(()), None), code(0));
        assert_eq!(ends(|| Ok(()), Some(2)), code(130));
        assert_eq!(ends(|| Ok(()), Some(15)), code(143));
        assert_eq!(ends(|| anyhow::bail!("no disk"), Some(2)), code(1));
    }

    #[test]
    fn process_of_a_job_of_one_is_its_first() {
        let part = |transport, processes| {
            let args = JobArgs {
                transport,
                processes,
                ..JobArgs::default()
            };
            args.part(2, vec![1, 1]).unwrap()
        };
        assert_eq!(part(None, Some(1)), JobPart::First);
        assert_eq!(part(Some(JobTransport::Inproc), None), JobPart::First);
        assert_eq!(part(None, None), JobPart::Parent);
        assert_eq!(part(Some(JobTransport::Tcp), Some(2)), JobPart::Parent);
    }

    #[test]
    fn further_processes_use_the_last_device_kind() {
        let kinds = |text: &str| devices(text).unwrap().of(3);
        assert_eq!(kinds("cuda"), [DeviceKind::Cuda; 3]);
        assert_eq!(
            kinds("cpu,cuda"),
            [DeviceKind::Cpu, DeviceKind::Cuda, DeviceKind::Cuda]
        );
        assert_eq!(kinds("cpu,cpu,cpu,cuda").len(), 4, "too many are not lost");
        assert_eq!(devices("cpu, cuda").unwrap().to_string(), "cpu,cuda");
        assert!(
            devices("gpu")
                .unwrap_err()
                .to_string()
                .contains("cpu or cuda")
        );
    }

    #[test]
    fn groups_of_devices_stay_together_or_are_spread_evenly() {
        let groups = DevicePlacement::from(vec![2, 1, 1, 2]);
        assert_eq!(groups.by_process(4), Some(vec![2, 1, 1, 2]));
        assert_eq!(groups.by_process(2), Some(vec![3, 3]));
        assert_eq!(groups.by_process(6), Some(vec![1; 6]));
        assert_eq!(groups.by_process(5), None);
        assert_eq!(groups.by_process(0), None);
        assert_eq!(groups.process_counts(), "1, 2, 3, 4, 6");
        assert_eq!(DevicePlacement::from(6).by_process(4), None);
    }

    #[test]
    fn loss_of_a_process_is_said_by_the_others_only() {
        let failed =
            |kind| Error::Failed(Arc::new(Failure::new(kind, ProcessId(1), 3, "it is gone")));
        assert!(launcher_says(&failed(FailureKind::Kernel)));
        assert!(!launcher_says(&failed(FailureKind::PeerLost)));
        assert!(!launcher_says(&Error::kernel("out of paper")));
    }

    #[test]
    fn rejected_result_is_not_a_program_failure() {
        let rejected = Rejected("3.2 instead of 3.1".to_owned());
        let one = |_: &mut Program| verdict(Err(rejected.clone().into()));
        assert_eq!(
            threads(&Simulation::new(2, 2), one).result.unwrap(),
            Verdict::Rejected(rejected.clone())
        );
        let error = verdict(Err(anyhow::anyhow!("no file").context("reading"))).unwrap_err();
        assert_eq!(error.to_string(), "reading: no file");
    }
}
