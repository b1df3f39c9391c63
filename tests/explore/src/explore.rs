//! The main process: starts workers, and counts what they report.

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::Arguments;
use crate::shrink::shrink;
use crate::worker::Line;
use crate::worker::job_of;

/// The time limit for a job, in real time: a job that takes this long spins.
const LIMIT: Duration = Duration::from_secs(60);

/// Time between two lines about the progress.
const PROGRESS: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Found {
    seeds: u64,
    histories: HashSet<u64>,
    switches: u64,
    simulated: Duration,
    red: Vec<u64>,
}

impl Found {
    fn add_red(&mut self, seed: u64, why: &str) {
        println!("seed {seed} is red: {why}");
        self.red.push(seed);
    }
}

/// Runs the jobs of all seeds, and prints the red ones. Fails if there are any.
pub(crate) fn explore(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let workers = std::thread::available_parallelism()?.get() as u64;
    let each = arguments.seeds.div_ceil(workers);
    let (found, stopped) = (Mutex::new(Found::default()), AtomicBool::new(false));
    let begin = Instant::now();
    let share = |worker: u64| {
        let from = arguments.from + (worker * each).min(arguments.seeds);
        let to = arguments.from + ((worker + 1) * each).min(arguments.seeds);
        (worker as usize, from, to)
    };
    std::thread::scope(|scope| {
        let ends: Vec<_> = (0..workers)
            .map(|worker| {
                let (core, from, to) = share(worker);
                let (found, stopped) = (&found, &stopped);
                scope.spawn(move || run_range(arguments, core, from..to, found, stopped))
            })
            .collect();
        let mut said = Instant::now();
        while ends.iter().any(|end| !end.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
            if said.elapsed() >= PROGRESS {
                said = Instant::now();
                let found = found.lock().expect("no worker thread panicked");
                eprintln!("{} seeds, {} red", found.seeds, found.red.len());
            }
        }
        ends.into_iter().try_for_each(|end| end.join().expect("a worker thread does not panic"))
    })?;
    let found = found.into_inner().expect("no worker thread panicked");
    let mut red = found.red;
    red.sort_unstable();
    for seed in &red {
        match arguments.shrink {
            true => shrink(arguments, *seed)?,
            false => println!("again: cargo xtask explore --from {seed} --seeds 1 --shrink"),
        }
    }
    if arguments.seeds == 1 && !arguments.shrink {
        println!("{}", job_of(arguments, arguments.from));
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "{} seeds, {} red; {:.0} a second, {:.2} simulated hours, {} distinct interleavings, {} \
         changes of threads",
        found.seeds,
        red.len(),
        found.seeds as f64 / seconds,
        found.simulated.as_secs_f64() / 3600.0,
        found.histories.len(),
        found.switches,
    );
    Ok(if red.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a range of seeds in a worker, and in further ones when it dies.
fn run_range(
    arguments: &Arguments,
    core: usize,
    seeds: std::ops::Range<u64>,
    found: &Mutex<Found>,
    stopped: &AtomicBool,
) -> anyhow::Result<()> {
    let mut next = seeds.start;
    while next < seeds.end && !stopped.load(Ordering::Relaxed) {
        let range = Arguments { from: next, seeds: seeds.end - next, ..arguments.clone() };
        let died = run_worker(&range, core, |line| {
            let mut found = found.lock().expect("no worker thread panicked");
            match line {
                Line::Start(seed) => next = seed + 1,
                Line::Done(_, (history, switches, nanos)) => {
                    found.seeds += 1;
                    found.histories.insert(history);
                    found.switches += switches;
                    found.simulated += Duration::from_nanos(nanos);
                }
                Line::Red(seed, why) => {
                    found.seeds += 1;
                    found.add_red(seed, &why);
                    stopped.fetch_or(arguments.first, Ordering::Relaxed);
                }
            }
            !stopped.load(Ordering::Relaxed)
        })?;
        if let Some(why) = died {
            let mut found = found.lock().expect("no worker thread panicked");
            found.seeds += 1;
            found.add_red(next - 1, &why);
            stopped.fetch_or(arguments.first, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Runs a worker until it ends, until a job takes too long, or until `on_line` returns false.
/// Returns why its last job has killed it, if it has.
pub(crate) fn run_worker(
    arguments: &Arguments,
    core: usize,
    mut on_line: impl FnMut(Line) -> bool,
) -> anyhow::Result<Option<String>> {
    let mut child = Worker::start(arguments, core)?;
    let (lines, received) = channel();
    let stdout = BufReader::new(child.0.stdout.take().context("a pipe")?);
    let mut stderr = child.0.stderr.take().context("a pipe")?;
    let reader = std::thread::spawn(move || {
        let lines = |text: String| Line::parse(&text).is_none_or(|line| lines.send(line).is_ok());
        stdout.lines().map_while(Result::ok).all(lines)
    });
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).map(|_| text)
    });
    let mut is_done = true;
    let why = loop {
        match received.recv_timeout(LIMIT) {
            Ok(line) => {
                is_done = !matches!(line, Line::Start(_));
                if !on_line(line) {
                    break None;
                }
            }
            Err(RecvTimeoutError::Timeout) => break Some(format!("it ran for {LIMIT:?}")),
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.0.wait()?;
                break (!is_done || !status.success()).then(|| status.to_string());
            }
        }
    };
    drop(child);
    _ = reader.join();
    let errors = errors.join().ok().and_then(Result::ok).unwrap_or_default();
    Ok(why.map(|why| format!("{why}\n{}", errors.trim_end())))
}

/// A worker process, which ends with this.
struct Worker(Child);

impl Worker {
    fn start(arguments: &Arguments, core: usize) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let joined =
            |numbers: &[usize]| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        command.arg(format!("--worker={core}"));
        command.arg(format!("--from={}", arguments.from));
        command.arg(format!("--seeds={}", arguments.seeds));
        if arguments.twice {
            command.arg("--twice");
        }
        if let Some(file) = &arguments.log {
            command.arg("--log").arg(file);
        }
        for (name, numbers) in
            [("without", &arguments.without), ("without-faults", &arguments.without_faults)]
        {
            if !numbers.is_empty() {
                command.arg(format!("--{name}={}", joined(numbers)));
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Self(command.spawn().context("cannot start a worker")?))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}
