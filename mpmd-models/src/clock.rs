//! The times of a stage's passes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mpmd_base::block::{Instant, now, since};

/// Sums over the passes of a stage, on its first device.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StageTimes {
    /// Time for which the stage has computed.
    pub busy: Duration,
    /// Number of bytes that it has handed to the next stage.
    pub handed_bytes: u64,
    /// The starts and the ends of its passes, in nanoseconds of Unix, modulo 2^64.
    sums: [u64; 2],
}

/// Number of words that the times take in an array.
pub(crate) const TIMES: usize = 8;

impl StageTimes {
    /// Returns the time from the ends of this stage's passes to their starts on the next stage. It
    /// is exact where both have the same clock.
    pub fn until(&self, next: &Self) -> Duration {
        let time = next.sums[0].wrapping_sub(self.sums[1]);
        // Clocks of two hosts differ.
        Duration::from_nanos(if time > u64::MAX / 2 { 0 } else { time })
    }

    /// Reads [`TIMES`] words.
    pub(crate) fn read(words: &[u32]) -> Self {
        let mut numbers = words.chunks_exact(2).map(|w| u64::from(w[0]) | u64::from(w[1]) << 32);
        let mut next = || numbers.next().unwrap_or(0);
        let busy = Duration::from_nanos(next());
        Self { busy, handed_bytes: next(), sums: [next(), next()] }
    }
}

/// Counts the times of a stage.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    busy: AtomicU64,
    bytes: AtomicU64,
    sums: [AtomicU64; 2],
}

/// A pass that has started.
pub(crate) struct Started(Instant);

impl Clock {
    pub(crate) fn start(&self) -> Started {
        self.sums[0].fetch_add(unix_nanos(), Ordering::Relaxed);
        Started(now())
    }

    /// Counts a pass that hands over so many bytes.
    pub(crate) fn end(&self, Started(start): Started, bytes: usize) {
        self.busy.fetch_add(since(start).as_nanos() as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.sums[1].fetch_add(unix_nanos(), Ordering::Relaxed);
    }

    /// Writes [`TIMES`] words.
    pub(crate) fn write(&self, to: &mut [u32]) {
        let numbers = [&self.busy, &self.bytes, &self.sums[0], &self.sums[1]];
        for (number, to) in numbers.into_iter().zip(to.chunks_exact_mut(2)) {
            let number = number.load(Ordering::Relaxed);
            to.copy_from_slice(&[number as u32, (number >> 32) as u32]);
        }
    }
}

fn unix_nanos() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_were_written() {
        let (first, second) = (Clock::default(), Clock::default());
        for bytes in [12, 30] {
            let started = first.start();
            std::thread::sleep(Duration::from_millis(2));
            first.end(started, bytes);
            std::thread::sleep(Duration::from_millis(3));
            second.end(second.start(), 0);
        }
        let [first, second] = [first, second].map(|clock| {
            let mut words = [9; TIMES];
            clock.write(&mut words);
            StageTimes::read(&words)
        });
        assert_eq!((first.handed_bytes, second.handed_bytes), (42, 0));
        assert!(first.busy >= Duration::from_millis(4) && second.busy < first.busy);
        assert!(first.until(&second) >= Duration::from_millis(6));
        assert_eq!(second.until(&first), Duration::ZERO, "another clock");
    }
}
