//! The time of kernels by kind of work, and the idle time before them.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The kind of work that a kernel does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pass {
    /// A stage's forward pass.
    Forward,
    /// The computation of a stage's input gradient.
    BackwardInput,
    /// The computation of a stage's weight gradient.
    BackwardWeight,
    /// The optimiser's update.
    Update,
    /// An all-reduce, including the wait for the other devices. Its time is also counted in the
    /// kind of work around it.
    AllReduce,
}

impl Pass {
    /// All kinds, in the order of [`Clock::times`].
    pub const ALL: [Self; 5] =
        [Self::Forward, Self::BackwardInput, Self::BackwardWeight, Self::Update, Self::AllReduce];
}

/// The time spent in kernels, summed over the devices of one process. Clones share their counters.
///
/// It is wall-clock time: with fewer cores than devices, the wait for a core counts too.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    totals: Arc<Totals>,
}

#[derive(Debug)]
struct Totals {
    /// Number that distinguishes this clock from others on the same thread.
    id: u64,
    nanos: [AtomicU64; 5],
    idle: [AtomicU64; 5],
}

thread_local! {
    /// (id of the clock, end) of the last kernel that a clock measured on this thread. Each device
    /// has its own thread.
    static LAST_END: Cell<Option<(u64, Instant)>> = const { Cell::new(None) };
}

/// Measures the time from its creation until it is dropped, and then adds it to its [`Clock`].
#[derive(Debug)]
pub struct Timer<'a> {
    totals: &'a Totals,
    pass: Pass,
    start: Instant,
}

impl Clock {
    /// Starts a timer for one kernel or all-reduce. The time is added when the timer is dropped,
    /// which must be on the same thread.
    ///
    /// Except for an all-reduce, also counts the time since the end of this thread's last kernel as
    /// idle.
    pub fn start(&self, pass: Pass) -> Timer<'_> {
        let start = Instant::now();
        if pass != Pass::AllReduce
            && let Some((id, end)) = LAST_END.get()
            && id == self.totals.id
        {
            add(&self.totals.idle[pass as usize], start.saturating_duration_since(end));
        }
        Timer { totals: &self.totals, pass, start }
    }

    /// Returns the time so far for each of [`Pass::ALL`], in that order, summed over the devices.
    pub fn times(&self) -> [Duration; 5] {
        self.totals.nanos.each_ref().map(read)
    }

    /// Returns the idle time so far between the end of a kernel and the start of the next one, for
    /// each of [`Pass::ALL`]. The next kernel's kind counts.
    ///
    /// A device runs its kernels in the order of their issue. It is therefore idle until the inputs
    /// of the next kernel are computed and moved. The time before a device's first kernel is not
    /// counted.
    pub fn idle(&self) -> [Duration; 5] {
        self.totals.idle.each_ref().map(read)
    }

    /// Returns the time so far in the kernels' own arithmetic, without the all-reduces.
    pub fn computing(&self) -> Duration {
        let [forward, input, weight, update, all_reduce] = self.times();
        (forward + input + weight + update).saturating_sub(all_reduce)
    }
}

impl Default for Totals {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, nanos: Default::default(), idle: Default::default() }
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        let end = Instant::now();
        add(&self.totals.nanos[self.pass as usize], end.saturating_duration_since(self.start));
        if self.pass != Pass::AllReduce {
            LAST_END.set(Some((self.totals.id, end)));
        }
    }
}

fn add(total: &AtomicU64, time: Duration) {
    total.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

fn read(total: &AtomicU64) -> Duration {
    Duration::from_nanos(total.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(2);

    #[test]
    fn clones_share_times_and_computing_excludes_all_reduces() {
        let clock = Clock::default();
        let start = Instant::now();
        {
            let clone = clock.clone();
            let _forward = clone.start(Pass::Forward);
            let _reduce = clone.start(Pass::AllReduce);
            std::thread::sleep(SHORT);
        }
        let [forward, .., all_reduce] = clock.times();
        assert!(forward >= all_reduce && all_reduce >= SHORT);
        assert_eq!(clock.computing(), forward - all_reduce);
        assert!(forward <= start.elapsed());
    }

    #[test]
    fn idle_time_counts_for_the_next_pass() {
        let (clock, other) = (Clock::default(), Clock::default());
        drop(clock.start(Pass::Forward));
        assert_eq!(clock.idle(), [Duration::ZERO; 5], "nothing before the first");
        std::thread::sleep(SHORT);
        {
            let _backward = clock.start(Pass::BackwardInput);
            std::thread::sleep(SHORT);
            drop(clock.start(Pass::AllReduce));
        }
        let [forward, input, weight, update, all_reduce] = clock.idle();
        assert!(input >= SHORT, "{input:?}");
        assert_eq!([forward, weight, update, all_reduce], [Duration::ZERO; 4]);
        drop(other.start(Pass::Update));
        assert_eq!(other.idle(), [Duration::ZERO; 5], "the pause was another clock's");
        // Another thread counts as another device.
        std::thread::scope(|scope| scope.spawn(|| drop(clock.start(Pass::Update))).join()).unwrap();
        assert_eq!(clock.idle()[3], Duration::ZERO);
    }
}
