//! The policy for polling and sleeping: how long a thread without work polls before it sleeps.
//!
//! A poll costs a fraction of a microsecond; falling asleep and waking cost some tens. But a
//! polling thread takes a core from threads that have work. So a thread polls only if the
//! [`CoreBudget`] allows it, never for long, and less after it has polled in vain.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::{Instant, is_simulated, now, thread};

/// Shortest polling time. If the policy computes a shorter time, the thread does not poll.
const SHORTEST: Duration = Duration::from_micros(1);

/// The user's setting of how long a thread without work polls for messages before it sleeps.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Spin {
    /// Polls about as long as recent gaps without work lasted, if they were short. A waiting thread
    /// polls for at most 2 milliseconds. Does not poll if this host has fewer cores than the job
    /// has processes on it.
    #[default]
    Auto,
    /// Does not poll: the thread sleeps as soon as it has no work.
    Never,
    /// Polls for up to this time in every gap without work, even if other threads then lack the
    /// core.
    For(Duration),
}

/// The core budget: the number of a process's threads that may poll at the same time without taking
/// a core from threads that have work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CoreBudget {
    /// No thread may poll: the job has more processes on this host than the host has cores.
    None,
    /// One thread of each process may poll: there is a core for each process.
    One,
    /// All threads may poll: there is a core for every busy thread of the job on this host.
    All,
}

impl CoreBudget {
    /// Computes the core budget of a process. The host has `cores` cores. The job has `processes`
    /// processes on this host, and `threads` busy threads in them.
    pub fn of(processes: usize, threads: usize, cores: usize) -> Self {
        if threads <= cores {
            Self::All
        } else if processes <= cores {
            Self::One
        } else {
            Self::None
        }
    }

    /// Returns this core budget, or the one that the user's setting implies instead.
    pub fn under(self, setting: Spin) -> Self {
        match setting {
            Spin::Auto => self,
            Spin::Never => Self::None,
            Spin::For(_) => Self::All,
        }
    }
}

/// The constants of a [`SpinPolicy`].
#[derive(Clone, Copy, Debug)]
pub struct SpinPace {
    /// Polling time at first with [`Spin::Auto`]. It is also the least time after a gap that was
    /// worth polling for.
    pub first: Duration,
    /// Longest polling time with [`Spin::Auto`].
    pub longest: Duration,
    /// Longest gap that is worth polling for, even if the thread slept in it.
    pub worth: Duration,
    /// Number of polls between two reads of the clock.
    pub looks: u32,
    /// Number of polls between two calls that yield the core: a multiple of `looks`.
    pub yields: u32,
    /// Time that a thread polls before it begins to yield its core.
    pub alone: Duration,
    /// Largest number of gaps that a thread does not poll in after polling without success.
    pub most_skipped: u32,
}

/// The next action of a thread without work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Idle {
    /// Poll again.
    Look,
    /// Yield the core to other threads, then poll again.
    Yield,
    /// Sleep until there may be work.
    Sleep,
}

/// Decides how long a thread polls before it sleeps. Several threads that wait for the same kind of
/// work may share one. Takes no lock.
#[derive(Debug)]
pub struct SpinPolicy {
    pace: SpinPace,
    setting: Spin,
    /// Present polling time with [`Spin::Auto`], in nanoseconds.
    window: AtomicU64,
    /// Number of coming gaps in which the thread sleeps without polling.
    skip: AtomicU32,
    /// Value that `skip` was last set to.
    penalty: AtomicU32,
}

/// A gap: the time in which a thread has no work.
#[derive(Debug)]
pub struct PollGap {
    pace: SpinPace,
    window: Duration,
    start: Instant,
    looks: u32,
}

impl SpinPolicy {
    /// Creates a policy with the constants `pace` and the user's setting.
    pub const fn new(pace: SpinPace, setting: Spin) -> Self {
        Self {
            pace,
            setting,
            window: AtomicU64::new(pace.first.as_nanos() as u64),
            skip: AtomicU32::new(0),
            penalty: AtomicU32::new(0),
        }
    }

    /// Begins a gap at `now`.
    pub fn begin(&self, now: Instant) -> PollGap {
        self.begin_as(self.setting, now)
    }

    /// Same as [`begin`](Self::begin), with `setting` instead of the policy's own.
    pub fn begin_as(&self, setting: Spin, now: Instant) -> PollGap {
        let window = match setting {
            _ if is_simulated() => Duration::ZERO,
            Spin::Auto if self.is_due() => {
                Duration::from_nanos(self.window.load(Ordering::Relaxed))
            }
            Spin::Auto | Spin::Never => Duration::ZERO,
            Spin::For(window) => window,
        };

        let window = if window < SHORTEST {
            Duration::ZERO
        } else {
            window
        };
        PollGap {
            pace: self.pace,
            window,
            start: now,
            looks: 0,
        }
    }

    /// Records that a gap ended with work at `now`, and adapts the polling time to twice the gap.
    /// The time falls only slowly after shorter gaps. It halves after a gap that was not worth
    /// polling for.
    pub fn end(&self, gap: &PollGap, now: Instant) {
        let lasted = now.saturating_duration_since(gap.start);
        let window = self.window.load(Ordering::Relaxed);

        let window = if lasted <= self.pace.worth {
            let [first, longest] =
                [self.pace.first, self.pace.longest].map(|time| time.as_nanos() as u64);
            (2 * lasted.as_nanos() as u64)
                .max(window / 8 * 7)
                .clamp(first, longest)
        } else {
            window / 2
        };

        self.window.store(window, Ordering::Relaxed);
    }

    /// Polls `found` for a limited time. Returns `None` if the caller should sleep. After polling
    /// without success, the next calls poll only once.
    pub fn look<T>(&self, mut found: impl FnMut() -> Option<T>) -> Option<T> {
        if let Some(found) = found() {
            return Some(found);
        }

        let mut gap = self.begin(now());
        if !gap.polls() {
            return None;
        }
        while gap.wait() {
            if let Some(found) = found() {
                self.penalty.store(0, Ordering::Relaxed);
                return Some(found);
            }
        }

        let penalty = 2 * self.penalty.load(Ordering::Relaxed) + 1;
        let penalty = penalty.min(self.pace.most_skipped);
        self.penalty.store(penalty, Ordering::Relaxed);
        self.skip.store(penalty, Ordering::Relaxed);
        None
    }

    /// Returns true if the thread should poll in this gap. After polling without success, it skips
    /// gaps.
    fn is_due(&self) -> bool {
        let skip = self.skip.load(Ordering::Relaxed);
        if skip > 0 {
            self.skip.store(skip - 1, Ordering::Relaxed);
        }
        skip == 0
    }
}

impl PollGap {
    /// Limits the polling of this gap to the time before `deadline`.
    pub fn poll_until(&mut self, deadline: Instant) {
        self.window = self
            .window
            .min(deadline.saturating_duration_since(self.start));
    }

    /// Returns true if the thread should poll in this gap.
    pub fn polls(&self) -> bool {
        !self.window.is_zero()
    }

    /// Records a poll that found no work, and returns the thread's next action.
    pub fn idle(&mut self, now: impl FnOnce() -> Instant) -> Idle {
        if !self.polls() {
            return Idle::Sleep;
        }
        self.looks = self.looks.wrapping_add(1);
        if !self.looks.is_multiple_of(self.pace.looks) {
            return Idle::Look;
        }

        let waited = now().saturating_duration_since(self.start);
        if waited >= self.window {
            Idle::Sleep
        } else if waited >= self.pace.alone && self.looks.is_multiple_of(self.pace.yields) {
            Idle::Yield
        } else {
            Idle::Look
        }
    }

    /// Records a poll that found no work, and pauses for a moment. Returns false if the thread
    /// should sleep instead of polling again.
    pub fn wait(&mut self) -> bool {
        match self.idle(now) {
            Idle::Look => std::hint::spin_loop(),
            Idle::Yield => thread::yield_now(),
            Idle::Sleep => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);
    /// Adapts the polling time.
    const ADAPTS: SpinPace = SpinPace {
        first: Duration::from_micros(50),
        longest: Duration::from_micros(50),
        worth: Duration::from_micros(100),
        looks: 1,
        yields: 16,
        alone: Duration::ZERO,
        most_skipped: 0,
    };
    /// Skips gaps after polls in vain.
    const SKIPS: SpinPace = SpinPace {
        first: Duration::from_micros(20),
        longest: Duration::from_micros(20),
        looks: 32,
        yields: 32,
        alone: Duration::MAX,
        most_skipped: 64,
        ..ADAPTS
    };

    /// Returns the number of polls, one per microsecond, in a gap that begins at `now`; at most
    /// 1000.
    fn looks(policy: &SpinPolicy, now: Instant) -> u32 {
        let mut gap = policy.begin(now);
        (0..1000)
            .find(|i| gap.idle(|| now + *i * MICRO) == Idle::Sleep)
            .unwrap_or(1000)
    }

    #[test]
    fn auto_polling_time_halves_after_each_long_gap() {
        let policy = SpinPolicy::new(ADAPTS, Spin::Auto);
        let now = Instant::now();
        let ended = |after: u32| policy.end(&policy.begin(now), now + after * MICRO);
        assert_eq!(looks(&policy, now), 50);
        ended(90);
        assert_eq!(
            looks(&policy, now),
            50,
            "a little more would have been enough"
        );
        for expected in [25, 12, 6, 3] {
            ended(10_000);
            assert!(looks(&policy, now).abs_diff(expected) <= 1);
        }
        ended(20);
        assert_eq!(
            looks(&policy, now),
            50,
            "one gap that was worth it is enough"
        );
    }

    #[test]
    fn auto_polling_time_follows_the_gaps() {
        let (longest, worth) = (2000 * MICRO, 2000 * MICRO);
        let policy = SpinPolicy::new(
            SpinPace {
                longest,
                worth,
                ..ADAPTS
            },
            Spin::Auto,
        );
        let now = Instant::now();
        let after = |gap: u32| {
            policy.end(&policy.begin(now), now + gap * MICRO);
            policy.begin(now).window
        };
        assert_eq!(policy.begin(now).window, 50 * MICRO);
        assert_eq!([after(10), after(400)], [50 * MICRO, 800 * MICRO]);
        assert_eq!(
            [after(10), after(10)],
            [700 * MICRO, Duration::from_nanos(612_500)]
        );
        assert_eq!([after(1900), after(2001)], [longest, longest / 2]);
        (0..100).for_each(|_| assert!(after(10) <= longest));
        assert_eq!(after(10), 50 * MICRO);
        (0..100).for_each(|_| assert!(after(5000) <= longest));
        assert_eq!(after(5000), Duration::ZERO);
    }

    #[test]
    fn setting_decides_the_polling_time() {
        let now = Instant::now();
        let looks = |spin| looks(&SpinPolicy::new(ADAPTS, spin), now);
        assert_eq!(looks(Spin::Never), 0);
        assert_eq!(looks(Spin::For(70 * MICRO)), 70);
        assert_eq!(looks(Spin::For(Duration::MAX)), 1000);
    }

    #[test]
    fn setting_overrides_the_core_budget() {
        let under = |setting| CoreBudget::of(3, 3, 2).under(setting);
        let settings = [Spin::Auto, Spin::Never, Spin::For(MICRO)];
        assert_eq!(
            settings.map(under),
            [CoreBudget::None, CoreBudget::None, CoreBudget::All]
        );
        assert_eq!(CoreBudget::of(2, 4, 2), CoreBudget::One);
        assert_eq!(CoreBudget::of(2, 2, 2).under(Spin::Auto), CoreBudget::All);
    }

    #[test]
    fn core_is_yielded_every_16_polls() {
        let now = Instant::now();
        let mut gap = SpinPolicy::new(ADAPTS, Spin::For(Duration::MAX)).begin(now);
        assert_eq!(
            (0..160).filter(|_| gap.idle(|| now) == Idle::Yield).count(),
            10
        );
        let pace = SpinPace {
            alone: MICRO,
            ..ADAPTS
        };
        let mut gap = SpinPolicy::new(pace, Spin::For(Duration::MAX)).begin(now);
        assert!(
            (0..160).all(|_| gap.idle(|| now) == Idle::Look),
            "not before `alone`"
        );
    }

    #[test]
    fn polling_ends_at_its_deadline() {
        let now = Instant::now();
        let policy = SpinPolicy::new(ADAPTS, Spin::For(Duration::MAX));
        let mut gap = policy.begin(now);
        gap.poll_until(now + 5 * MICRO);
        assert_eq!(gap.idle(|| now + 4 * MICRO), Idle::Look);
        assert_eq!(gap.idle(|| now + 5 * MICRO), Idle::Sleep);
    }

    #[test]
    fn ready_work_is_found_at_once_with_and_without_spinning() {
        for setting in [Spin::Never, Spin::Auto] {
            assert_eq!(SpinPolicy::new(SKIPS, setting).look(|| Some(1)), Some(1));
        }
    }

    #[test]
    fn without_permission_look_polls_once() {
        let mut looks = 0;
        let found: Option<()> = SpinPolicy::new(SKIPS, Spin::Never).look(|| {
            looks += 1;
            None
        });
        assert_eq!((found, looks), (None, 1));
    }

    #[test]
    fn spin_is_rare_after_misses_and_usual_again_after_a_hit() {
        let policy = SpinPolicy::new(SKIPS, Spin::Auto);
        let spins = |find: bool| {
            let mut looks = 0;
            let _ = policy.look(|| {
                looks += 1;
                (find && looks > 1).then_some(())
            });
            looks > 1
        };
        let in_vain = (0..1000).filter(|_| spins(false)).count();
        assert!((10..=25).contains(&in_vain), "{in_vain} of 1000");
        let until_found = (0..1000)
            .position(|_| spins(true))
            .expect("it looks again some time");
        assert!(until_found <= SKIPS.most_skipped as usize);
        assert!((0..100).all(|_| spins(true)));
    }
}
