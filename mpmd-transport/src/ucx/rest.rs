//! How long the engine looks for work before it sleeps.
//!
//! A look costs a fraction of a microsecond, falling asleep and waking some tens; but who looks
//! takes a core from whoever has work. So looking has to pay: it goes on as long as gaps between
//! works have lately been shorter than it, and stops where they were not.

use std::time::{Duration, Instant};

use super::Spin;

/// The longest that [`Spin::Auto`] looks.
const LONGEST: Duration = Duration::from_micros(50);
/// A gap that ended this soon would have been worth looking through, also where it was slept
/// through.
const WORTH: Duration = Duration::from_micros(100);
/// Looks between two offers of the core to others.
const LOOKS: u32 = 16;

/// What to do without work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Idle {
    /// Look again.
    Look,
    /// Let others have the core, then look again.
    Yield,
    Sleep,
}

/// Decides how the engine spends gaps between works.
#[derive(Debug)]
pub(super) struct Rest {
    spin: Spin,
    /// What `Auto` looks at present.
    window: Duration,
    /// When the last work ended, and looks since.
    gap: Option<(Instant, u32)>,
}

impl Rest {
    /// With so many processes of the job on this host, and so many cores.
    pub(super) fn new(spin: Spin, neighbours: usize, cores: usize) -> Self {
        let spin = if spin == Spin::Auto && neighbours > cores { Spin::Never } else { spin };
        Self { spin, window: LONGEST, gap: None }
    }

    /// Whether the last look found nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.gap.is_some()
    }

    /// There is work again.
    pub(super) fn worked(&mut self, now: Instant) {
        let Some((since, _)) = self.gap.take() else { return };
        let gap = now.saturating_duration_since(since);
        self.window = if gap <= WORTH { LONGEST } else { self.window / 2 };
    }

    /// There was nothing to do.
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

    /// How long it looks, in microseconds, in a gap that begins at `now`; at most 1000.
    fn looks(rest: &mut Rest, now: Instant) -> u32 {
        (0..1000).find(|i| rest.idle(now + *i * MICRO) == Idle::Sleep).unwrap_or(1000)
    }

    #[test]
    fn looking_goes_on_while_it_pays_and_fades_where_it_does_not() {
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
    fn where_processes_outnumber_cores_nobody_looks_unless_told_to() {
        let now = Instant::now();
        assert_eq!(looks(&mut Rest::new(Spin::Auto, 3, 2), now), 0);
        assert_eq!(looks(&mut Rest::new(Spin::Never, 1, 64), now), 0);
        assert_eq!(looks(&mut Rest::new(Spin::For(70 * MICRO), 3, 2), now), 70);
        assert_eq!(looks(&mut Rest::new(Spin::For(Duration::MAX), 3, 2), now), 1000);
    }

    #[test]
    fn the_core_is_offered_now_and_then() {
        let mut rest = Rest::new(Spin::For(Duration::MAX), 1, 1);
        let now = Instant::now();
        let offers = (0..160).filter(|_| rest.idle(now) == Idle::Yield).count();
        assert_eq!(offers, 10);
    }
}
