//! The length and number of samples: enough for a meaningful figure, and no longer than a person
//! waits.

use std::time::Duration;

/// The number and approximate length of samples. A sample of a single round may take longer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct SamplePace {
    /// Number of samples of each case with arrays below 1 MiB. Cases with larger arrays have fewer.
    pub(super) repeats: usize,
    /// The approximate length of a sample.
    pub(super) sample: Duration,
}

/// Limit on a stream's bytes in flight. A stream may have [`SMALLEST_WINDOW`] arrays in flight even
/// if they have more bytes.
const IN_FLIGHT: usize = 64 << 20;
const SMALLEST_WINDOW: usize = 2;
const LARGEST_WINDOW: usize = 32;

/// The maximum number of rounds or arrays of one sample.
const MOST: u64 = 1_000_000;

impl SamplePace {
    /// Returns the number of samples of a case with arrays of `bytes` bytes.
    pub(super) fn repeats_at(&self, bytes: usize) -> usize {
        let most = match bytes {
            0..=0xf_ffff => usize::MAX,
            0x10_0000..=0xff_ffff => 10,
            0x100_0000..=0xfff_ffff => 5,
            _ => 3,
        };
        self.repeats.clamp(1, most)
    }

    /// Warms up with arrays of `bytes` bytes. `run` gets a number of rounds or arrays, and returns
    /// (number that ran, total time). Returns the time of one round in the quickest run.
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

    /// Returns the number of rounds or arrays in one sample. `one` is the time of one.
    pub(super) fn rounds(&self, one: Duration) -> u64 {
        let rounds = self.sample.as_nanos() / one.as_nanos().max(1);
        u64::try_from(rounds).unwrap_or(MOST).clamp(1, MOST)
    }
}

/// Returns the maximum number of arrays of `bytes` bytes that a stream has in flight.
pub(super) fn window(bytes: usize) -> usize {
    (IN_FLIGHT / bytes).clamp(SMALLEST_WINDOW, LARGEST_WINDOW)
}

/// Returns the number of rounds of a warm-up with arrays of `bytes` bytes.
pub(super) fn warm_up(bytes: usize) -> u64 {
    ((1 << 20) / bytes as u64).clamp(2, 200)
}

/// Returns the number of warm-ups with arrays of `bytes` bytes. The quickest one counts, because a
/// disturbed one would make every sample too short.
pub(super) fn warm_ups(bytes: usize) -> usize {
    if bytes < 1 << 20 { 3 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_sizes_are_measured_less_often_with_fewer_in_flight() {
        let pace = SamplePace {
            repeats: 30,
            sample: Duration::from_millis(10),
        };
        let at = |bytes| {
            (
                pace.repeats_at(bytes),
                window(bytes),
                warm_up(bytes),
                warm_ups(bytes),
            )
        };
        assert_eq!(at(8), (30, 32, 200, 3));
        assert_eq!(at(1 << 20), (10, 32, 2, 1));
        assert_eq!(at(16 << 20), (5, 4, 2, 1));
        assert_eq!(at(256 << 20), (3, 2, 2, 1));
        assert_eq!(SamplePace { repeats: 0, ..pace }.repeats_at(8), 1);
    }

    #[test]
    fn the_quickest_warm_up_counts() {
        let mut times = [9, 4, 7]
            .map(|tenths| Duration::from_micros(tenths * 20))
            .into_iter();
        let one = SamplePace::warm(8, 2, |rounds| {
            assert_eq!(rounds, 200);
            times.next().map(|time| (rounds, time)).ok_or("a fourth")
        });
        assert_eq!(one, Ok(Duration::from_nanos(400)));
        let one = SamplePace::warm(16 << 20, 4, |rounds| {
            assert_eq!(rounds, 4);
            // The time limit ended it after two of four rounds.
            Ok::<_, ()>((2, Duration::from_millis(4)))
        });
        assert_eq!(one, Ok(Duration::from_millis(2)));
    }

    #[test]
    fn a_sample_has_as_many_rounds_as_fit() {
        let pace = SamplePace {
            repeats: 1,
            sample: Duration::from_millis(10),
        };
        assert_eq!(pace.rounds(Duration::from_micros(10)), 1000);
        assert_eq!(pace.rounds(Duration::from_secs(1)), 1);
        assert_eq!(pace.rounds(Duration::ZERO), MOST);
    }
}
