//! Where the time of kernels goes, by what they compute.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a kernel is at.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pass {
    /// A stage's forward pass.
    Forward,
    /// A stage's input gradient.
    BackwardInput,
    /// A stage's weight gradient.
    BackwardWeight,
    /// The optimiser.
    Update,
    /// All-reduces, waiting for the other devices included. Also counted with the pass that they are in.
    AllReduce,
}

impl Pass {
    /// All of them, in the order of [`Clock::times`].
    pub const ALL: [Self; 5] =
        [Self::Forward, Self::BackwardInput, Self::BackwardWeight, Self::Update, Self::AllReduce];
}

/// Time in kernels, added up over the devices of one process. Clones count together.
///
/// It is time on the clock: where there are fewer cores than devices, waiting for a core counts as
/// whatever a device was at.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    nanos: Arc<[AtomicU64; 5]>,
}

/// Counts from its creation until it is dropped.
#[derive(Debug)]
pub struct Timer<'a> {
    total: &'a AtomicU64,
    start: Instant,
}

impl Clock {
    /// Starts to count; the time is added when the timer is dropped.
    pub fn start(&self, pass: Pass) -> Timer<'_> {
        Timer { total: &self.nanos[pass as usize], start: Instant::now() }
    }

    /// The time so far of each of [`Pass::ALL`].
    pub fn times(&self) -> [Duration; 5] {
        std::array::from_fn(|pass| Duration::from_nanos(self.nanos[pass].load(Ordering::Relaxed)))
    }

    /// The time so far in the kernels' own arithmetic: all but the all-reduces.
    pub fn computing(&self) -> Duration {
        let [forward, input, weight, update, all_reduce] = self.times();
        (forward + input + weight + update).saturating_sub(all_reduce)
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        let nanos = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.total.fetch_add(nanos, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_count_together_and_all_reduces_are_no_computing() {
        let clock = Clock::default();
        let start = Instant::now();
        {
            let clone = clock.clone();
            let _forward = clone.start(Pass::Forward);
            let _reduce = clone.start(Pass::AllReduce);
            std::thread::sleep(Duration::from_millis(2));
        }
        let [forward, .., all_reduce] = clock.times();
        assert!(forward >= all_reduce && all_reduce >= Duration::from_millis(2));
        assert_eq!(clock.computing(), forward - all_reduce);
        assert!(forward <= start.elapsed());
    }
}
