//! How much is moved for one sample, and how many samples are taken: enough to mean something, and
//! no more than a person waits for.

use std::time::Duration;

/// How long one sample takes, about, where a single round or message is not longer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Pace {
    /// Samples of each case of small messages.
    pub(super) repeats: usize,
    /// The length of a sample.
    pub(super) sample: Duration,
}

/// Bytes in flight at most, where that is more than [`SMALLEST_WINDOW`] messages.
const IN_FLIGHT: usize = 64 << 20;
const SMALLEST_WINDOW: usize = 2;
const LARGEST_WINDOW: usize = 32;

/// Rounds and messages of one sample at most.
const MOST: u64 = 1_000_000;

impl Pace {
    /// Samples of a case at this size.
    pub(super) fn repeats_at(&self, bytes: usize) -> usize {
        let most = match bytes {
            0..=0xf_ffff => usize::MAX,
            0x10_0000..=0xff_ffff => 10,
            0x100_0000..=0xfff_ffff => 5,
            _ => 3,
        };
        self.repeats.clamp(1, most)
    }

    /// Warms up by `run`, which takes the number of rounds, or messages, and says how many there
    /// were and how long they took; the time of one.
    pub(super) fn warm<E>(
        bytes: usize,
        at_least: usize,
        mut run: impl FnMut(u64) -> Result<(u64, Duration), E>,
    ) -> Result<Duration, E> {
        let rounds = warm_up(bytes).max(at_least as u64);
        let mut quickest = Duration::MAX;
        for _ in 0..warm_ups(bytes) {
            let (rounds, time) = run(rounds)?;
            quickest = quickest.min(time / rounds.max(1) as u32);
        }
        Ok(quickest)
    }

    /// Rounds, or messages, of one sample, where one takes this long.
    pub(super) fn rounds(&self, one: Duration) -> u64 {
        let rounds = self.sample.as_nanos() / one.as_nanos().max(1);
        u64::try_from(rounds).unwrap_or(MOST).clamp(1, MOST)
    }
}

/// Messages of a stream that are under way at a time.
pub(super) fn window(bytes: usize) -> usize {
    (IN_FLIGHT / bytes).clamp(SMALLEST_WINDOW, LARGEST_WINDOW)
}

/// Rounds before the first sample, which also say how long one takes.
pub(super) fn warm_up(bytes: usize) -> u64 {
    ((1 << 20) / bytes as u64).clamp(2, 200)
}

/// How often that is done: the quickest counts, or a disturbance would make every sample a short
/// one.
pub(super) fn warm_ups(bytes: usize) -> usize {
    if bytes < 1 << 20 { 3 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_sizes_are_measured_less_often_with_fewer_in_flight() {
        let pace = Pace { repeats: 30, sample: Duration::from_millis(10) };
        let at = |bytes| (pace.repeats_at(bytes), window(bytes), warm_up(bytes), warm_ups(bytes));
        assert_eq!(at(8), (30, 32, 200, 3));
        assert_eq!(at(1 << 20), (10, 32, 2, 1));
        assert_eq!(at(16 << 20), (5, 4, 2, 1));
        assert_eq!(at(256 << 20), (3, 2, 2, 1));
        assert_eq!(Pace { repeats: 0, ..pace }.repeats_at(8), 1);
    }

    #[test]
    fn the_quickest_warm_up_counts() {
        let mut times = [9, 4, 7].map(|tenths| Duration::from_micros(tenths * 20)).into_iter();
        let one = Pace::warm(8, 2, |rounds| {
            assert_eq!(rounds, 200);
            times.next().map(|time| (rounds, time)).ok_or("a fourth")
        });
        assert_eq!(one, Ok(Duration::from_nanos(400)));
        let one = Pace::warm(16 << 20, 4, |rounds| {
            assert_eq!(rounds, 4);
            // It took too long for more than half of them.
            Ok::<_, ()>((2, Duration::from_millis(4)))
        });
        assert_eq!(one, Ok(Duration::from_millis(2)));
    }

    #[test]
    fn a_sample_has_as_many_rounds_as_fit() {
        let pace = Pace { repeats: 1, sample: Duration::from_millis(10) };
        assert_eq!(pace.rounds(Duration::from_micros(10)), 1000);
        assert_eq!(pace.rounds(Duration::from_secs(1)), 1);
        assert_eq!(pace.rounds(Duration::ZERO), MOST);
    }
}
