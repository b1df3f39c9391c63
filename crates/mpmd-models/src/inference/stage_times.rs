//! The times of a stage's passes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mpmd_base::block::{Instant, now, since};

/// Sums of times and bytes over a stage's passes, measured on its first device.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StageTimes {
    /// Total time in which the stage computed.
    pub busy: Duration,
    /// Number of bytes that the stage has given to the next stage.
    pub handed_bytes: u64,
    /// Number of passes that have ended.
    passes: u64,
    /// Sum of the passes' starts, and sum of their ends, in nanoseconds since 1970, modulo 2^64.
    sums: [u64; 2],
}

/// Number of 32-bit words that encode a [`StageTimes`].
pub(crate) const TIMES: usize = 10;

impl StageTimes {
    /// Returns the total time from the end of each pass on this stage to its start on `next`. Exact
    /// if both stages have the same clock; zero if a pass has failed on one of them.
    pub fn until(&self, next: &Self) -> Duration {
        let time = next.sums[0].wrapping_sub(self.sums[1]);
        // Clocks of two hosts differ.
        let is_valid = self.passes == next.passes && time <= u64::MAX / 2;
        Duration::from_nanos(if is_valid { time } else { 0 })
    }

    /// Reads the times from [`TIMES`] words.
    pub(crate) fn read(words: &[u32]) -> Self {
        let mut numbers = words
            .chunks_exact(2)
            .map(|w| u64::from(w[0]) | u64::from(w[1]) << 32);
        let mut next = || numbers.next().unwrap_or(0);
        let busy = Duration::from_nanos(next());
        Self {
            busy,
            handed_bytes: next(),
            passes: next(),
            sums: [next(), next()],
        }
    }
}

/// Accumulates the [`StageTimes`] of a stage.
#[derive(Debug, Default)]
pub(crate) struct StageClock {
    busy: AtomicU64,
    bytes: AtomicU64,
    passes: AtomicU64,
    sums: [AtomicU64; 2],
}

/// The start of a pass: now, and as nanoseconds since 1970. A pass that fails never ends, and is
/// not counted.
pub(crate) struct PassStart(Instant, u64);

impl StageClock {
    /// Sets all sums to zero.
    pub(crate) fn reset(&self) {
        self.numbers()
            .into_iter()
            .for_each(|number| number.store(0, Ordering::Relaxed));
    }

    pub(crate) fn start(&self) -> PassStart {
        PassStart(now(), unix_nanos())
    }

    /// Counts a pass that ends now and gives `bytes` bytes to the next stage.
    pub(crate) fn end(&self, PassStart(start, unix): PassStart, bytes: usize) {
        let busy = since(start).as_nanos() as u64;
        let more = [busy, bytes as u64, 1, unix, unix_nanos()];
        for (number, more) in self.numbers().into_iter().zip(more) {
            number.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Writes the times as [`TIMES`] words.
    pub(crate) fn write(&self, to: &mut [u32]) {
        for (number, to) in self.numbers().into_iter().zip(to.chunks_exact_mut(2)) {
            let number = number.load(Ordering::Relaxed);
            to.copy_from_slice(&[number as u32, (number >> 32) as u32]);
        }
    }

    fn numbers(&self) -> [&AtomicU64; 5] {
        [
            &self.busy,
            &self.bytes,
            &self.passes,
            &self.sums[0],
            &self.sums[1],
        ]
    }
}

fn unix_nanos() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_were_written() {
        let (first, second) = (StageClock::default(), StageClock::default());
        for bytes in [12, 30] {
            let started = first.start();
            std::thread::sleep(Duration::from_millis(2));
            first.end(started, bytes);
            std::thread::sleep(Duration::from_millis(3));
            second.end(second.start(), 0);
        }
        let read = |clock: &StageClock| {
            let mut words = [9; TIMES];
            clock.write(&mut words);
            StageTimes::read(&words)
        };
        let clocks = [first, second];
        let [first, second] = clocks.each_ref().map(read);
        assert_eq!((first.handed_bytes, second.handed_bytes), (42, 0));
        assert!(first.busy >= Duration::from_millis(4) && second.busy < first.busy);
        assert!(first.until(&second) >= Duration::from_millis(6));
        assert_eq!(second.until(&first), Duration::ZERO, "another clock");
        // A pass fails on the second stage.
        clocks[0].end(clocks[0].start(), 1);
        clocks[1].start();
        assert_eq!(read(&clocks[1]), second, "it is not counted");
        assert_eq!(read(&clocks[0]).until(&second), Duration::ZERO);
        clocks.iter().for_each(StageClock::reset);
        assert_eq!(clocks.each_ref().map(read), [StageTimes::default(); 2]);
    }
}
