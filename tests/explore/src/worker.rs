//! A worker: runs the jobs of a range of seeds, and reports each to the main process.

use std::fmt;
use std::io::Write as _;
use std::panic::PanicHookInfo;
use std::process::ExitCode;
use std::sync::Mutex;

use anyhow::Context as _;
use mpmd_core::SimulationReport;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Arguments;
use crate::case::{Case, Job, ORDERS};
use crate::execute::Shards;
use crate::kernels::INJECTED;
use crate::recovery::Recovery;

/// A line from a worker to the main process.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Line {
    Start(u64),
    /// The result of a seed, as (seed, (hash of the history, switches between threads, simulated
    /// nanoseconds)).
    Done(u64, (u64, u64, u64)),
    Red(u64, String),
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(seed) => write!(f, "start {seed}"),
            Self::Done(seed, (history, switches, nanos)) => {
                write!(f, "done {seed} {history} {switches} {nanos}")
            }
            Self::Red(seed, why) => write!(f, "red {seed} {}", why.replace('\n', "\t")),
        }
    }
}

impl Line {
    /// Parses a line as `Display` writes it. `None` for any other text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (kind, rest) = text.split_once(' ')?;
        let (seed, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let seed = seed.parse().ok()?;
        match kind {
            "start" => Some(Self::Start(seed)),
            "done" => {
                let mut numbers = rest.split(' ').map(str::parse);
                let mut next = || numbers.next()?.ok();
                Some(Self::Done(seed, (next()?, next()?, next()?)))
            }
            "red" => Some(Self::Red(seed, rest.replace('\t', "\n"))),
            _ => None,
        }
    }
}

/// Messages of the panics since the last job that were not injected.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn on_panic(info: &PanicHookInfo<'_>) {
    let text = info.to_string();
    if !text.contains(INJECTED) {
        // The job may hang from here on.
        eprintln!("{text}");
    }
    if !text.contains(INJECTED)
        && let Ok(mut panics) = PANICS.lock()
    {
        panics.push(text);
    }
}

/// Runs the jobs of a range of seeds, with this process bound to the core `core`.
pub(crate) fn work(arguments: &Arguments, core: usize) -> anyhow::Result<ExitCode> {
    // A change of threads on the same core takes half the time.
    let cores = sched_getaffinity(None)?;
    let of_worker = (0..CpuSet::MAX_CPU)
        .filter(|core| cores.is_set(*core))
        .cycle()
        .nth(core);
    let mut own = CpuSet::new();
    own.set(of_worker.context("this process has a core")?);
    sched_setaffinity(None, &own)?;
    std::panic::set_hook(Box::new(on_panic));
    let mut alone: Option<(u64, Result<Shards, String>)> = None;
    for seed in arguments.from..arguments.from + arguments.seeds {
        say(&Line::Start(seed))?;
        let case = job_of(arguments, seed);
        if alone
            .as_ref()
            .is_none_or(|(program, _)| *program != seed / ORDERS)
        {
            alone = Some((seed / ORDERS, case.run_alone()));
        }
        let of_one = alone
            .as_ref()
            .map(|(_, shards)| shards.as_ref())
            .expect("it was set");
        let ran = of_one
            .map_err(Clone::clone)
            .and_then(|shards| run(&*case, shards, arguments));
        say(&match ran {
            Ok(report) => {
                let nanos = u64::try_from(report.time.as_nanos())?;
                Line::Done(seed, (report.history, report.switches, nanos))
            }
            Err(why) => Line::Red(seed, why),
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the job of a seed, without the steps and faults that the arguments leave out.
pub(crate) fn job_of(arguments: &Arguments, seed: u64) -> Box<dyn Job> {
    let mut job: Box<dyn Job> = match !arguments.kind().is_empty() {
        true if arguments.elastic => Box::new(Recovery::elastic(seed)),
        true => Box::new(Recovery::new(seed)),
        false => {
            let mut case = Case::new(seed);
            case.removed.extend(&arguments.without);
            Box::new(case)
        }
    };
    job.keep_faults(&|fault| !arguments.without_faults.contains(&fault));
    job
}

fn run(case: &dyn Job, alone: &Shards, arguments: &Arguments) -> Result<SimulationReport, String> {
    let log = arguments.twice || arguments.log.is_some();
    let (report, checked) = case.run(alone, log);
    if let Some(file) = &arguments.log {
        std::fs::write(file, &report.log).map_err(|error| error.to_string())?;
    }
    let panics = std::mem::take(&mut *PANICS.lock().unwrap_or_else(|e| e.into_inner()));
    if !panics.is_empty() {
        return Err(panics.join("\n"));
    }
    checked?;
    if arguments.twice {
        let again = case.run(alone, true).0;
        if again != report {
            let same = report
                .log
                .lines()
                .zip(again.log.lines())
                .take_while(|(a, b)| a == b);
            return Err(format!("two runs differ from event {} on", same.count()));
        }
    }
    Ok(report)
}

/// Writes a line to the main process at once, because this process may hang later.
fn say(line: &Line) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
