//! The main process: starts workers, and counts their reports.

use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::Arguments;
use crate::child::run_worker;
use crate::shrink::shrink;
use crate::worker::Line;
use crate::worker::job_of;

/// Interval between two lines about the progress.
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

/// Runs the jobs of all seeds, and prints those that fail. The result is a failure if any fails.
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
        ends.into_iter()
            .try_for_each(|end| end.join().expect("a worker thread does not panic"))
    })?;
    let found = found.into_inner().expect("no worker thread panicked");
    let mut red = found.red;
    red.sort_unstable();
    for seed in &red {
        match arguments.shrink {
            true => shrink(arguments, *seed)?,
            false => {
                let kind = arguments.kind();
                println!("again: cargo xtask explore --from {seed} --seeds 1 --shrink{kind}");
            }
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
    Ok(if red.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs a range of seeds in a worker process. Starts another worker when one dies.
fn run_range(
    arguments: &Arguments,
    core: usize,
    seeds: std::ops::Range<u64>,
    found: &Mutex<Found>,
    stopped: &AtomicBool,
) -> anyhow::Result<()> {
    let mut next = seeds.start;
    while next < seeds.end && !stopped.load(Ordering::Relaxed) {
        let range = Arguments {
            from: next,
            seeds: seeds.end - next,
            ..arguments.clone()
        };
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
