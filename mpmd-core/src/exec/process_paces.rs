//! Finds processes that have become slow, by the times from commit to commit in which their kernels
//! run, or they cannot run at all.
//!
//! The stages of a pipeline have unequal work, so a process is compared with its own past, and the
//! change with that of the others: on a machine with other load all become slower. Others that
//! become faster make no process slow. Pure: all processes come to the same result from the same
//! times.

use std::collections::VecDeque;

/// Number of commits in a window. The times of an early window are compared with those of the
/// latest window.
const WINDOW: usize = 12;

/// Number of commits at the start of an epoch whose times are ignored.
const WARM_UP: usize = 3;

/// Number of successive commits at which a process must be too slow.
const STREAK: usize = 3;

/// Minimum kernel time from commit to commit that is compared, in microseconds.
const SHORTEST: f64 = 200.0;

/// The times of all processes in an epoch, for the search for slow ones.
#[derive(Debug)]
pub(crate) struct ProcessPaces {
    /// The factor by which a process must have become slower than the others.
    factor: f64,
    /// Total time of each process so far, in microseconds.
    totals: Vec<u64>,
    /// The times and changes of each process.
    windows: Vec<PaceWindow>,
    commits: usize,
    streak: SlowStreak,
}

/// The times of one process, early and late in the epoch.
#[derive(Clone, Debug, Default)]
struct PaceWindow {
    /// The times of the first commits after the warm-up, in microseconds.
    first: Vec<f64>,
    /// The changes at the last commits: the time as a multiple of the early time, divided by the
    /// common change of the other processes.
    last: VecDeque<f64>,
}

/// The process that was too slow at the last commits, and the number of these commits.
#[derive(Clone, Copy, Debug, Default)]
struct SlowStreak {
    process: usize,
    commits: usize,
}

/// A process that has become slow.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SlowProcess {
    pub(crate) process: usize,
    pub(crate) why: String,
}

impl ProcessPaces {
    pub(crate) fn new(factor: f64) -> Self {
        Self {
            factor,
            totals: Vec::new(),
            windows: Vec::new(),
            commits: 0,
            streak: SlowStreak::default(),
        }
    }

    /// Takes the total times of all processes at a commit, in microseconds. Returns the process
    /// that has become slowest, if it counts as slow.
    pub(crate) fn at_commit(&mut self, totals: &[u64]) -> Option<SlowProcess> {
        if self.totals.len() != totals.len() {
            self.windows = vec![PaceWindow::default(); totals.len()];
            self.totals = totals.to_vec();
            self.commits = 0;
            return None;
        }
        let before = std::mem::replace(&mut self.totals, totals.to_vec());
        self.commits += 1;
        if self.commits <= WARM_UP {
            return None;
        }

        let times = totals
            .iter()
            .zip(before)
            .map(|(now, before)| now.saturating_sub(before) as f64);
        let times: Vec<f64> = times.collect();
        if self.commits <= WARM_UP + WINDOW {
            for (window, time) in self.windows.iter_mut().zip(times) {
                window.first.push(time);
            }
            return None;
        }

        let usual: Vec<f64> = self
            .windows
            .iter()
            .map(|window| median(&mut window.first.clone()).max(1.0))
            .collect();
        let changes: Vec<f64> = times
            .iter()
            .zip(&usual)
            .map(|(time, first)| time / first)
            .collect();
        self.add_changes(&changes);

        let slower = self.windows.iter().map(PaceWindow::slower);
        let (process, slower) = slower
            .enumerate()
            .max_by(|(_, one), (_, other)| one.total_cmp(other))?;
        if slower <= self.factor || usual[process] < SHORTEST {
            self.streak = SlowStreak {
                process,
                commits: 0,
            };
            return None;
        }
        let before = if self.streak.process == process {
            self.streak.commits
        } else {
            0
        };
        self.streak = SlowStreak {
            process,
            commits: before + 1,
        };
        (self.streak.commits >= STREAK).then(|| {
            let first = usual[process] / 1000.0;
            let last = times[process] / 1000.0;
            let why = format!(
                "process {process} has become slow: from commit to commit it computed or was held \
                 up for {first:.1} ms at first, and for {last:.1} ms at the last one; in the \
                 median of {WINDOW} commits {slower:.1} times as long, beyond the change of the \
                 others"
            );
            SlowProcess { process, why }
        })
    }

    /// Adds the changes of all processes at a commit. Each change is divided by the median change
    /// of the other processes if that is above 1: the load of the machine.
    fn add_changes(&mut self, changes: &[f64]) {
        for (process, window) in self.windows.iter_mut().enumerate() {
            let others = changes
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != process);
            let mut others: Vec<f64> = others.map(|(_, change)| *change).collect();
            let load = if others.is_empty() {
                1.0
            } else {
                upper_median(&mut others)
            };

            window.last.push_back(changes[process] / load.max(1.0));
            if window.last.len() > WINDOW {
                window.last.pop_front();
            }
        }
    }
}

impl PaceWindow {
    /// Returns the factor by which the process has become slower; 0 if the window has too few
    /// commits.
    fn slower(&self) -> f64 {
        if self.last.len() < WINDOW {
            return 0.0;
        }
        let mut last: Vec<f64> = self.last.iter().copied().collect();
        median(&mut last)
    }
}

/// Returns the median. Of an even number of values, returns the lower of the two middle ones.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) / 2]
}

/// Returns the median. Of an even number of values, returns the upper of the two middle ones.
fn upper_median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the commit at which one of four processes is found slow, and the process. `time` has
    /// milliseconds by (commit, process).
    fn found(commits: usize, time: impl Fn(usize, usize) -> f64) -> Option<(usize, usize)> {
        found_of(4, commits, time)
    }

    fn found_of(
        processes: usize,
        commits: usize,
        time: impl Fn(usize, usize) -> f64,
    ) -> Option<(usize, usize)> {
        let (mut paces, mut totals) = (ProcessPaces::new(2.0), vec![0; processes]);
        (0..commits).find_map(|commit| {
            for (process, total) in totals.iter_mut().enumerate() {
                *total += (1000.0 * time(commit, process)) as u64;
            }
            paces.at_commit(&totals).map(|slow| (commit, slow.process))
        })
    }

    #[test]
    fn slow_process_is_found_within_twenty_commits() {
        let time = |commit, process| match (commit >= 100, process) {
            (true, 2) => 30.0,
            (_, process) => 10.0 * (1 + process) as f64 / 3.0,
        };
        let (commit, process) = found(200, time).expect("it is slow");
        assert!(
            (process, commit) == (2, commit) && (100..120).contains(&commit),
            "{commit}"
        );
    }

    #[test]
    fn others_that_become_faster_make_no_process_slow() {
        for processes in 2..=5 {
            for faster in 1..processes {
                let time = |commit, process| match process < faster && commit >= 30 {
                    true => 1.0,
                    false => 9.0 + process as f64,
                };
                assert_eq!(
                    found_of(processes, 200, time),
                    None,
                    "{faster} of {processes}"
                );
            }
            let slower = |commit, process| {
                if commit >= 30 && process == 1 {
                    30.0
                } else {
                    9.0
                }
            };
            let found = found_of(processes, 200, slower);
            assert_eq!(found.map(|(_, process)| process), Some(1), "of {processes}");
        }
    }

    #[test]
    fn healthy_processes_on_a_noisy_machine_are_not_found() {
        for seed in 0..100 {
            let mut random = fastrand::Rng::with_seed(seed);
            // Other work comes and goes on the machine, and single steps take long.
            let load: Vec<f64> = (0..40).map(|_| 1.0 + 3.0 * random.f64()).collect();
            let noise: Vec<f64> = (0..4096)
                .map(|_| {
                    if random.u8(..20) == 0 {
                        5.0
                    } else {
                        1.0 + 0.5 * random.f64()
                    }
                })
                .collect();
            let time = |commit: usize, process: usize| {
                (3 + process) as f64 * load[commit / 25] * noise[4 * commit + process]
            };
            assert_eq!(found(1000, time), None, "seed {seed}");
        }
    }

    #[test]
    fn short_times_and_few_commits_show_nothing() {
        assert_eq!(
            found(200, |commit, _| if commit > 100 { 0.15 } else { 0.01 }),
            None
        );
        assert_eq!(
            found(WARM_UP + 2 * WINDOW, |commit, p| (commit * p) as f64),
            None
        );
    }
}
