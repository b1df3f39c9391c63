//! Measures the minimum effective task granularity: the length of tasks at which half of the
//! machine's peak rate is kept (METG(50%) of Slaughter et al., "Task Bench", SC 2020).
//!
//! Graphs of small tasks run as programs of the framework, and over MPI where that is installed.
//! Each sample of a graph takes turns: the peak rate, then a sweep of each. The peak is the highest
//! rate of long tasks without dependencies, of the framework or of MPI.

mod graph;
mod mpi;
mod ours;
mod sweep;
mod task;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use mpmd_core::ProcessId;
use mpmd_core::prelude::{Error, Program};
use mpmd_launch::{Bind, JobEnv};

use crate::case::{Case, show};
use crate::job::{check_transport, run_as_job};
use crate::options::{Carrier, Size};
use graph::{Graph, Pattern};
use mpi::Mpi;
use ours::Ours;
use sweep::{Measured, sweep};

/// The iterations of a long task, which takes a few tenths of a millisecond.
const LONG: u64 = 1 << 14;
/// The maximum number of rows with long tasks that measure the peak rate.
const LONG_ROWS: usize = 20;
/// The limit on the rounds of a run.
const MOST_ROUNDS: f64 = 1e5;

#[derive(Args, Clone, Debug)]
pub(crate) struct MetgArgs {
    /// Print one line of JSON for each case instead of a table.
    #[arg(long)]
    json: bool,
    /// Number of sweeps of each graph.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// The transport of the messages.
    #[arg(long, value_enum, default_value = "shm")]
    transport: Carrier,
    /// Numbers of processes, each with one device.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    processes: Vec<u16>,
    /// Points of each process: tasks of a row that run one after another on its device.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=128))]
    points: u16,
    /// Rows of a graph.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    steps: u16,
    /// Bytes of a task's output, a multiple of 16.
    #[arg(long, default_value = "16")]
    bytes: Size,
    /// The graphs; by default all.
    #[arg(long, value_enum, value_delimiter = ',')]
    graph: Vec<Pattern>,
    /// The least length of a run in milliseconds.
    #[arg(long, default_value_t = 1.0)]
    sample_ms: f64,
    /// Runs of each task length. The fastest counts, so short runs on a busy machine find the
    /// moments in which all cores are free.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,
}

/// The ways to run a graph.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    /// By the framework: recorded once, then replayed.
    Replayed,
    /// By the framework, call by call.
    Issued,
    /// Over MPI.
    Mpi,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Replayed => "replayed",
            Self::Issued => "issued",
            Self::Mpi => "MPI",
        }
    }
}

/// Measures all graphs for each number of processes and prints the results. Starts the jobs, or
/// works as a process of one.
pub(super) fn metg(args: &MetgArgs) -> Result<ExitCode> {
    ensure!(args.transport != Carrier::Inproc, "every process has its own device and its tasks");
    ensure!(args.bytes.0.is_multiple_of(16), "--bytes is a multiple of 16, not {}", args.bytes);
    ensure!((0.01..=10_000.0).contains(&args.sample_ms), "a run of {} ms", args.sample_ms);
    if let Some(env) = JobEnv::from_env()? {
        let mut p = Program::builder().devices(env.processes).from_env()?;
        check_transport(&p, args.transport.name())?;
        let cases = Bench::new(&mut p, args)?.cases()?;
        let is_first = p.process() == ProcessId(0);
        p.finish()?;
        if is_first {
            show(&cases, args.json);
        }
        return Ok(ExitCode::SUCCESS);
    }
    for processes in &args.processes {
        let code = run_as_job(usize::from(*processes), args.transport.name(), Bind::None)?;
        if code != 0 {
            return Ok(ExitCode::from(code));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The measurement of one job. All processes run it together, and all know every time.
struct Bench<'a> {
    p: &'a mut Program,
    args: &'a MetgArgs,
    /// The MPI program, on process 0 if there is one.
    mpi: Option<Mpi>,
    ways: Vec<Way>,
    /// The cores that the job can use.
    cores: usize,
}

impl<'a> Bench<'a> {
    fn new(p: &'a mut Program, args: &'a MetgArgs) -> Result<Self> {
        let (processes, points) = (p.processes(), usize::from(args.points));
        let mut mpi = None;
        let has_mpi = on_first(p, || {
            match Mpi::start(processes, points, args.bytes.0)? {
                Ok(started) => mpi = Some(started),
                Err(why) => eprintln!("MPI is not measured: {why}"),
            }
            Ok(mpi.is_some())
        })?;
        let ways = [Way::Replayed, Way::Issued].into_iter().chain(has_mpi.then_some(Way::Mpi));
        let ways = ways.collect();
        let cores = on_first(p, || Ok(std::thread::available_parallelism()?.get()))?;
        Ok(Self { p, args, mpi, ways, cores: cores.min(processes) })
    }

    fn cases(mut self) -> Result<Vec<Case>> {
        let patterns = match &self.args.graph[..] {
            [] => Pattern::value_variants(),
            patterns => patterns,
        };
        // Of each way: the lengths of long tasks; of each graph and way: the samples of METG.
        let mut tasks = vec![Vec::new(); self.ways.len()];
        let mut found = vec![vec![Vec::new(); self.ways.len()]; patterns.len()];
        let mut starts = vec![vec![LONG; self.ways.len()]; patterns.len()];
        for _ in 0..self.args.repeats.max(1) {
            for (i, pattern) in patterns.iter().enumerate() {
                let peak = self.peak(&mut tasks)?;
                let graph = self.graph(*pattern);
                for (j, way) in self.ways.clone().into_iter().enumerate() {
                    let sweep = sweep(starts[i][j], |iterations| {
                        self.measure(way, graph, iterations, peak)
                    })?;
                    starts[i][j] = sweep.start;
                    found[i][j].push(sweep.granularity);
                }
            }
        }
        let job = format!("{} processes", self.p.processes());
        let mut cases = self.beside("task", &format!("{LONG} iterations, {job}"), tasks);
        for (pattern, found) in patterns.iter().zip(found) {
            cases.extend(self.beside("metg", &format!("{}, {job}", pattern.name()), found));
        }
        Ok(cases)
    }

    /// Creates a case for each way, with its ratio to MPI if that was measured.
    fn beside(&self, name: &'static str, parameters: &str, samples: Vec<Vec<f64>>) -> Vec<Case> {
        let case = |(way, samples): (&Way, _)| {
            let parameters = format!("{parameters}, {}", way.name());
            Case { name, parameters, unit: "us", samples, beside: None }
        };
        let mut cases: Vec<Case> = self.ways.iter().zip(samples).map(case).collect();
        if self.ways.last() == Some(&Way::Mpi)
            && let Some(mpi) = cases.pop()
        {
            cases = cases.into_iter().map(|case| case.ratio_to("mpi", &mpi)).collect();
            cases.push(mpi);
        }
        cases
    }

    fn graph(&self, pattern: Pattern) -> Graph {
        let width = self.p.processes() * usize::from(self.args.points);
        Graph { pattern, width, rows: self.args.steps.into() }
    }

    /// Measures long tasks without dependencies in each way. Adds their lengths to `tasks`, and
    /// returns the highest rate: iterations per microsecond and core.
    fn peak(&mut self, tasks: &mut [Vec<f64>]) -> Result<f64> {
        let graph = self.graph(Pattern::Trivial);
        let graph = Graph { rows: graph.rows.min(LONG_ROWS), ..graph };
        let mut peak = 0.0f64;
        for (way, tasks) in self.ways.clone().into_iter().zip(tasks) {
            // The rate is not known yet: the rounds are those of one iteration per nanosecond.
            let granularity = self.granularity(way, graph, LONG, 1e3)?;
            tasks.push(granularity);
            peak = peak.max(LONG as f64 / granularity);
        }
        Ok(peak)
    }

    /// Measures tasks of `iterations` iterations. `peak` is the peak rate.
    fn measure(&mut self, way: Way, graph: Graph, iterations: u64, peak: f64) -> Result<Measured> {
        let granularity = self.granularity(way, graph, iterations, peak)?;
        Ok(Measured { granularity, efficiency: iterations as f64 / granularity / peak })
    }

    /// Returns the time per task and core in microseconds, in the fastest of several runs. At the
    /// rate `peak`, a run would last as long as the options say.
    fn granularity(&mut self, way: Way, graph: Graph, iterations: u64, peak: f64) -> Result<f64> {
        let tasks = graph.tasks(&(0..graph.width)) as f64 / self.cores as f64;
        let rounds = self.args.sample_ms * 1e3 / (tasks * iterations as f64 / peak);
        let rounds = rounds.ceil().clamp(1.0, MOST_ROUNDS) as u64;
        let fastest = match way {
            Way::Mpi => self.run_mpi(graph, iterations, rounds)?,
            Way::Replayed | Way::Issued => self.run_ours(way, graph, iterations, rounds)?,
        };
        Ok(fastest.as_secs_f64() * 1e6 / rounds as f64 / tasks)
    }

    fn run_ours(
        &mut self,
        way: Way,
        graph: Graph,
        iterations: u64,
        rounds: u64,
    ) -> mpmd_core::Result<Duration> {
        let (points, bytes) = (self.args.points.into(), self.args.bytes.0);
        let ours = Ours::new(self.p, graph, points, bytes, iterations)?;
        // Recording is the first run, which makes all plans.
        let step = ours.record(self.p)?;
        let step = (way == Way::Replayed).then_some(&step);
        let run = |_| ours.run(self.p, step, rounds);
        let times = (0..self.args.runs).map(run).collect::<mpmd_core::Result<Vec<_>>>()?;
        Ok(times.into_iter().min().unwrap_or_default())
    }

    /// Runs the MPI program while the other processes sleep.
    fn run_mpi(
        &mut self,
        graph: Graph,
        iterations: u64,
        rounds: u64,
    ) -> mpmd_core::Result<Duration> {
        let (mpi, runs) = (&mut self.mpi, self.args.runs);
        on_first(self.p, || {
            let mpi = mpi.as_mut().context("process 0 has started no MPI program")?;
            let run = |_| mpi.run(graph, iterations, rounds);
            let times = (0..runs).map(run).collect::<Result<Vec<_>>>()?;
            Ok(times.into_iter().min().unwrap_or_default())
        })
    }
}

/// Runs `f` on process 0 and returns its value on every process.
fn on_first<T>(p: &mut Program, f: impl FnOnce() -> Result<T>) -> mpmd_core::Result<T>
where
    T: Default + serde::Serialize + serde::de::DeserializeOwned,
{
    let f = || f().map_err(|error| Error::kernel(format!("{error:#}")));
    p.broadcast_value(ProcessId(0), T::default(), f)
}
