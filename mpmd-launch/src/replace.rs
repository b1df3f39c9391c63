//! Decides when lost processes are replaced, in jobs that recover.

use std::time::{Duration, Instant};

use super::cause::ExitKind;
use super::spawn::Launch;

/// Interval at which the launcher looks for places that nobody takes.
pub(super) const LOOK: Duration = Duration::from_millis(200);

/// Time for a new process to join. A place that is free for longer wants one more.
const JOIN_WITHIN: Duration = Duration::from_secs(5);

/// The processes that a job may lose and start.
pub(super) struct Replacing {
    recovers: bool,
    processes: usize,
    /// Number of processes that may still be started.
    left: usize,
    /// Number of processes that have ended with code 0.
    done: usize,
    /// When a place was first seen free.
    free_since: Option<Instant>,
    chaos: Option<Chaos>,
}

impl Replacing {
    pub(super) fn new(launch: &Launch) -> Self {
        Self {
            recovers: launch.recovers(),
            processes: launch.processes,
            left: launch.restarts,
            done: 0,
            free_since: None,
            chaos: launch.chaos.map(Chaos::new),
        }
    }

    /// True if the launcher must look at the job after each [`LOOK`].
    pub(super) fn must_look(&self) -> bool {
        self.recovers || self.chaos.is_some()
    }

    /// True if the job goes on after a process has ended in this way: it was killed, and the job
    /// recovers.
    pub(super) fn bears(&self, how: ExitKind) -> bool {
        self.recovers && matches!(how, ExitKind::Signal(_))
    }

    /// Takes one of the processes that may be started. Returns false if none is left.
    pub(super) fn take_one(&mut self) -> bool {
        let has_one = self.left > 0;
        self.left -= usize::from(has_one);
        has_one
    }

    /// Counts a process that has ended well. Returns true if so many have that the job is over.
    pub(super) fn is_over(&mut self) -> bool {
        self.done += 1;
        self.recovers && self.done >= self.processes
    }

    /// Returns true if `wanted` places were free for some time: that of a process that is stopped,
    /// or that has ended well before another was lost.
    pub(super) fn wants_one(&mut self, wanted: usize) -> bool {
        let now = Instant::now();
        if wanted == 0 {
            self.free_since = None;
            return false;
        }
        let is_long = now.duration_since(*self.free_since.get_or_insert(now)) >= JOIN_WITHIN;
        if is_long {
            self.free_since = None;
        }
        is_long
    }

    /// Returns the process of `alive` that is to be killed now, if it is time for that and a new
    /// process can take its place.
    pub(super) fn victim(&mut self, alive: &[usize]) -> Option<usize> {
        if self.left == 0 {
            return None;
        }
        self.chaos.as_mut()?.victim(Instant::now(), alive)
    }
}

/// Kills processes at random times.
struct Chaos {
    every: Duration,
    next: Instant,
    random: fastrand::Rng,
}

impl Chaos {
    fn new(every: Duration) -> Self {
        let mut random = fastrand::Rng::new();
        let next = Instant::now() + every.mul_f64(2.0 * random.f64());
        Self { every, next, random }
    }

    /// Returns the process to be killed, if it is time. Times are 0 to 2 intervals apart.
    fn victim(&mut self, now: Instant, alive: &[usize]) -> Option<usize> {
        if now < self.next {
            return None;
        }
        self.next = now + self.every.mul_f64(2.0 * self.random.f64());
        self.random.choice(alive).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn killed_processes_are_replaced_as_often_as_allowed() {
        let mut replacing = Replacing::new(&Launch::new(2, "true").restarts(1));
        assert!(replacing.bears(ExitKind::Signal(9)) && !replacing.bears(ExitKind::Exit(1)));
        assert_eq!([replacing.take_one(), replacing.take_one()], [true, false]);
        assert_eq!([replacing.is_over(), replacing.is_over()], [false, true]);
        assert!(!replacing.wants_one(1), "the place has just become free");
        let usual = Replacing::new(&Launch::new(2, "true"));
        assert!(!usual.bears(ExitKind::Signal(9)) && !usual.must_look());
    }

    #[test]
    fn chaos_kills_one_of_the_living_in_each_interval() {
        let mut chaos = Chaos::new(Duration::from_secs(1));
        let begin = Instant::now();
        let at = |tenths: u64| begin + Duration::from_millis(100 * tenths);
        let killed: Vec<_> = (0..1000).filter_map(|i| chaos.victim(at(i), &[3, 5])).collect();
        assert!((60..=150).contains(&killed.len()), "{}", killed.len());
        assert!(killed.contains(&3) && killed.contains(&5));
        assert_eq!(chaos.victim(at(5000), &[]), None);
    }
}
