//! Runs the other processes of a job as dry runs, and compares these with that of process 0.

use std::fmt;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use mpmd_base::deadline::after;
use mpmd_record::dry_run::{DryRun, RunParting};

/// Maximum number of listed differences from process 0.
const MOST_PARTINGS: usize = 8;

/// The processes of a job, grouped by whether they issue the same operations as process 0.
pub(crate) struct OtherProcesses {
    /// The processes that issue the same operations as process 0, which is one of them.
    same: Vec<u32>,
    /// The first differences from process 0, each with the processes that differ there.
    parted: Vec<(RunParting, Vec<u32>)>,
    /// Processes without a dry run, because the time limit had passed.
    left: Vec<u32>,
    within: Duration,
}

impl OtherProcesses {
    /// Gets the dry run of every process except 0 from `dry_run_of`, on a thread per core. Compares
    /// each with `first`, the dry run of process 0. Blocks until all have ended. Starts no further
    /// dry run after the time `within`.
    ///
    /// # Errors
    ///
    /// The error of `dry_run_of` for the lowest process that failed. After an error no further dry
    /// run is started.
    pub(crate) fn compare(
        first: &DryRun,
        within: Duration,
        dry_run_of: impl Fn(u32) -> anyhow::Result<DryRun> + Sync,
    ) -> anyhow::Result<Self> {
        let count = first.processes;
        // The last process comes early: programs often treat it specially, like the first.
        let order: Vec<u32> = (count.saturating_sub(1).max(1)..count)
            .chain(1..count.saturating_sub(1))
            .collect();

        let next = AtomicUsize::new(0);
        let has_failed = AtomicBool::new(false);
        let deadline = after(Instant::now(), within);
        let work = || {
            let mut done = Vec::new();
            while Instant::now() < deadline && !has_failed.load(Ordering::Relaxed) {
                let Some(process) = order.get(next.fetch_add(1, Ordering::Relaxed)) else {
                    break;
                };
                let found = dry_run_of(*process).map(|dry_run| first.parting(&dry_run));
                has_failed.fetch_or(found.is_err(), Ordering::Relaxed);
                done.push((*process, found));
            }
            done
        };

        let cores = thread::available_parallelism().map_or(1, usize::from);
        let mut done: Vec<(u32, anyhow::Result<Option<RunParting>>)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..cores.min(order.len()))
                .map(|_| scope.spawn(work))
                .collect();
            let joined = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            joined.flatten().collect()
        });

        done.sort_unstable_by_key(|(process, _)| *process);
        let left = (1..count)
            .filter(|process| done.iter().all(|(done, _)| done != process))
            .collect();

        let mut same = vec![0];
        let mut parted = Vec::<(RunParting, Vec<u32>)>::new();
        for (process, found) in done {
            match found? {
                None => same.push(process),
                Some(parting) => match parted.iter_mut().find(|(known, _)| *known == parting) {
                    Some((_, processes)) => processes.push(process),
                    None => parted.push((parting, vec![process])),
                },
            }
        }

        parted.sort_by_key(|(parting, _)| parting.operation);
        Ok(Self {
            same,
            parted,
            left,
            within,
        })
    }

    /// True if no process is known to issue other operations than process 0.
    pub(crate) fn issue_the_same(&self) -> bool {
        self.parted.is_empty()
    }
}

impl fmt::Display for OtherProcesses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            same,
            parted,
            left,
            within,
        } = self;

        match (&same[..], &parted[..], &left[..]) {
            ([_], ..) => {}
            (_, [], []) => writeln!(
                f,
                "issue    all {} processes issue the same operations",
                same.len()
            )?,
            _ => writeln!(
                f,
                "issue    {} issue the same operations",
                ProcessNumbers(same)
            )?,
        }

        for (
            RunParting {
                operation,
                issued: [first, other],
                why,
                ..
            },
            processes,
        ) in parted.iter().take(MOST_PARTINGS)
        {
            let verb = if processes.len() == 1 {
                "parts"
            } else {
                "part"
            };
            let numbers = ProcessNumbers(processes);
            writeln!(
                f,
                "issue    {numbers} {verb} from process 0 at operation {operation}"
            )?;
            writeln!(f, "           process 0: {first}")?;
            writeln!(f, "           {numbers}: {other}")?;
            if let Some(why) = why {
                writeln!(f, "           they differ: {why}")?;
            }
        }

        if let rest @ 1.. = parted.len().saturating_sub(MOST_PARTINGS) {
            writeln!(f, "issue    and processes part at {rest} more places")?;
        }
        if !left.is_empty() {
            let numbers = ProcessNumbers(left);
            writeln!(
                f,
                "issue    not checked: {numbers}; the time limit of {within:?} had passed \
                 (--peer-timeout)"
            )?;
        }
        Ok(())
    }
}

/// Formats process numbers, as `process 3` or `processes 0 to 3, 7`.
struct ProcessNumbers<'a>(&'a [u32]);

impl fmt::Display for ProcessNumbers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 {
            "process"
        } else {
            "processes"
        })?;

        let runs = self.0.chunk_by(|one, next| one + 1 == *next);
        for (place, run) in runs.enumerate() {
            f.write_str(if place == 0 { " " } else { ", " })?;
            match run {
                [first, .., last] => write!(f, "{first} to {last}")?,
                _ => write!(f, "{}", run[0])?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Returns a dry run of 8 processes without operations.
    fn dry_run() -> DryRun {
        let mut dry_run = DryRun::default();
        dry_run.processes = 8;
        dry_run
    }

    #[test]
    fn all_processes_are_run_once() {
        let asked = Mutex::new(Vec::new());
        let others = OtherProcesses::compare(&dry_run(), Duration::from_secs(60), |process| {
            asked.lock().unwrap().push(process);
            Ok(dry_run())
        });
        let mut asked = asked.into_inner().unwrap();
        asked.sort_unstable();
        assert_eq!(asked, [1, 2, 3, 4, 5, 6, 7]);
        let others = others.unwrap();
        assert!(others.issue_the_same());
        assert_eq!(
            others.to_string(),
            "issue    all 8 processes issue the same operations\n"
        );
    }

    #[test]
    fn single_process_has_nothing_to_compare() {
        let mut alone = dry_run();
        alone.processes = 1;
        let others =
            OtherProcesses::compare(&alone, Duration::from_secs(60), |_| unreachable!()).unwrap();
        assert_eq!(
            (others.to_string(), others.issue_the_same()),
            (String::new(), true)
        );
    }

    #[test]
    fn processes_without_time_are_named() {
        let others =
            OtherProcesses::compare(&dry_run(), Duration::ZERO, |_| unreachable!()).unwrap();
        let left = "issue    not checked: processes 1 to 7; the time limit of 0ns had passed \
            (--peer-timeout)\n";
        assert_eq!(others.to_string(), left);
    }

    #[test]
    fn a_process_without_a_dry_run_is_an_error() {
        let failing = |process| {
            if process == 7 {
                anyhow::bail!("out of paper")
            } else {
                Ok(dry_run())
            }
        };
        let error = OtherProcesses::compare(&dry_run(), Duration::from_secs(60), failing)
            .err()
            .unwrap();
        assert_eq!(error.to_string(), "out of paper");
    }

    #[test]
    fn consecutive_numbers_are_shown_as_ranges() {
        let shown = |numbers: &[u32]| ProcessNumbers(numbers).to_string();
        assert_eq!(shown(&[3]), "process 3");
        assert_eq!(shown(&[0, 1]), "processes 0 to 1");
        assert_eq!(shown(&[0, 2, 3, 4, 9]), "processes 0, 2 to 4, 9");
    }
}
