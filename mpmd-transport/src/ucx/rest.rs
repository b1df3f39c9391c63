//! Decides how long the engine polls for work before it sleeps.
//!
//! A poll costs a fraction of a microsecond; falling asleep and waking cost some tens of
//! microseconds. But polling takes a core from threads that have work. So polling goes on while
//! recent gaps between works were short, and the time for it is halved after every long gap.

use std::time::{Duration, Instant};

use super::Spin;

/// The longest time for which [`Spin::Auto`] polls.
const LONGEST: Duration = Duration::from_micros(50);
/// A gap up to this length counts as short, even if the engine slept through part of it.
const WORTH: Duration = Duration::from_micros(100);
/// Number of polls between two calls that yield the core.
const LOOKS: u32 = 16;

/// The next action of an engine without work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Idle {
    /// Poll again.
    Look,
    /// Yield the core to other threads, then poll again.
    Yield,
    Sleep,
}

/// The policy that decides how the engine spends gaps between works.
#[derive(Debug)]
pub(super) struct Rest {
    spin: Spin,
    /// Time for which `Auto` polls at present.
    window: Duration,
    /// The end of the last work, and the number of polls since.
    gap: Option<(Instant, u32)>,
}

impl Rest {
    /// Creates a `Rest` for `neighbours` processes of the job on this host, which has `cores`
    /// cores.
    pub(super) fn new(spin: Spin, neighbours: usize, cores: usize) -> Self {
        let spin = if spin == Spin::Auto && neighbours > cores { Spin::Never } else { spin };
        Self { spin, window: LONGEST, gap: None }
    }

    /// Returns true if the last poll found nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.gap.is_some()
    }

    /// Notes that there was work at `now`, and adapts the time for polling.
    pub(super) fn worked(&mut self, now: Instant) {
        let Some((since, _)) = self.gap.take() else { return };
        let gap = now.saturating_duration_since(since);
        self.window = if gap <= WORTH { LONGEST } else { self.window / 2 };
    }

    /// Notes that a poll found nothing; returns the next action.
    pub(super) fn idle(&mut self, now: Instant) -> Idle {
        let window = match self.spin {
            Spin::Auto => self.window,
            Spin::Never => Duration::ZERO,
            Spin::For(window) => window,
        };
        let (since, looks) = self.gap.get_or_insert((now, 0));
        *looks = looks.wrapping_add(1);
        if now.saturating_duration_since(*since) >= window {
            Idle::Sleep
        } else if looks.is_multiple_of(LOOKS) {
            Idle::Yield
        } else {
            Idle::Look
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    /// Returns the number of polls, one per microsecond, in a gap that begins at `now`; at most
    /// 1000.
    fn looks(rest: &mut Rest, now: Instant) -> u32 {
        (0..1000).find(|i| rest.idle(now + *i * MICRO) == Idle::Sleep).unwrap_or(1000)
    }

    #[test]
    fn auto_polling_time_halves_after_each_long_gap() {
        let mut rest = Rest::new(Spin::Auto, 2, 2);
        let now = Instant::now();
        assert_eq!(looks(&mut rest, now), 50);
        rest.worked(now + 90 * MICRO);
        assert_eq!(looks(&mut rest, now), 50, "a little more would have been enough");
        for expected in [25, 12, 6, 3] {
            rest.worked(now + 10_000 * MICRO);
            assert!(looks(&mut rest, now).abs_diff(expected) <= 1);
        }
        rest.worked(now + 20 * MICRO);
        assert_eq!(looks(&mut rest, now), 50, "one gap that was worth it is enough");
    }

    #[test]
    fn auto_never_polls_with_more_processes_than_cores() {
        let now = Instant::now();
        assert_eq!(looks(&mut Rest::new(Spin::Auto, 3, 2), now), 0);
        assert_eq!(looks(&mut Rest::new(Spin::Never, 1, 64), now), 0);
        assert_eq!(looks(&mut Rest::new(Spin::For(70 * MICRO), 3, 2), now), 70);
        assert_eq!(looks(&mut Rest::new(Spin::For(Duration::MAX), 3, 2), now), 1000);
    }

    #[test]
    fn core_is_yielded_every_16_polls() {
        let mut rest = Rest::new(Spin::For(Duration::MAX), 1, 1);
        let now = Instant::now();
        let offers = (0..160).filter(|_| rest.idle(now) == Idle::Yield).count();
        assert_eq!(offers, 10);
    }
}
