//! Spin policy: how long an idle thread polls for work before it sleeps.
//!
//! Sleeping and waking cost some microseconds on both sides, more than an empty kernel. But a
//! polling thread takes a core from threads that have work. So a thread polls only if the core
//! budget ([`CoreBudget`]) allows it, never for long, and less often after it has polled in vain.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mpmd_ids::ProcessId;

use mpmd_layout::topology::Topology;

/// Maximum time for which a thread polls.
const LONGEST: Duration = Duration::from_micros(20);
/// After failures to find work, a thread skips at most this many waits before it polls again.
const MOST_SKIPPED: u32 = 64;
/// Number of polls between two reads of the clock.
const LOOKS: u32 = 32;

/// Spin policy of one thread, or of several that wait for the same kind of work. Takes no lock: its
/// state only decides how long a thread polls.
#[derive(Debug)]
pub(crate) struct Spin {
    allowed: bool,
    /// Number of waits to sleep through without polling.
    skip: AtomicU32,
    /// The last value that `skip` was set to.
    penalty: AtomicU32,
}

impl Spin {
    pub(crate) fn new(allowed: bool) -> Self {
        Self { allowed, skip: AtomicU32::new(0), penalty: AtomicU32::new(0) }
    }

    /// Polls `found` for a bounded time. `None` means that the caller should sleep.
    pub(crate) fn look<T>(&self, mut found: impl FnMut() -> Option<T>) -> Option<T> {
        if let Some(found) = found() {
            return Some(found);
        }
        if !self.allowed || !self.is_due() {
            return None;
        }
        let start = Instant::now();
        while start.elapsed() < LONGEST {
            for _ in 0..LOOKS {
                std::hint::spin_loop();
                if let Some(found) = found() {
                    self.penalty.store(0, Ordering::Relaxed);
                    return Some(found);
                }
            }
        }
        let penalty = (2 * self.penalty.load(Ordering::Relaxed) + 1).min(MOST_SKIPPED);
        self.penalty.store(penalty, Ordering::Relaxed);
        self.skip.store(penalty, Ordering::Relaxed);
        None
    }

    /// True if this wait should poll. After a wait without success, only one wait in several does.
    fn is_due(&self) -> bool {
        let skip = self.skip.load(Ordering::Relaxed);
        if skip > 0 {
            self.skip.store(skip - 1, Ordering::Relaxed);
        }
        skip == 0
    }
}

/// The core budget: how many threads of a process may poll at the same time, so that threads with
/// work find a core.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum CoreBudget {
    /// The job has more processes on this host than the host has cores.
    None,
    /// Each process has a core.
    One,
    /// Every program thread and device thread of the job on this host has a core.
    All,
}

impl CoreBudget {
    /// Returns the core budget of process `me` on a host with `cores` cores.
    pub(crate) fn of(me: ProcessId, topology: &Topology, cores: usize) -> Self {
        let host = topology.host_of(me);
        let here = (0..topology.processes()).map(|process| ProcessId(process as u32));
        let here = here.filter(|process| topology.host_of(*process) == host);
        let threads = here.map(|process| 1 + topology.devices_of(process).len());
        let (processes, threads) =
            threads.fold((0, 0), |(all, sum), threads| (all + 1, sum + threads));
        if threads <= cores {
            Self::All
        } else if processes <= cores {
            Self::One
        } else {
            Self::None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_work_is_found_at_once_with_and_without_spinning() {
        for allowed in [false, true] {
            assert_eq!(Spin::new(allowed).look(|| Some(1)), Some(1));
        }
    }

    #[test]
    fn without_permission_look_polls_once() {
        let mut looks = 0;
        let found: Option<()> = Spin::new(false).look(|| {
            looks += 1;
            None
        });
        assert_eq!((found, looks), (None, 1));
    }

    #[test]
    fn spin_is_rare_after_misses_and_usual_again_after_a_hit() {
        let spin = Spin::new(true);
        let spins = |find: bool| {
            let mut looks = 0;
            let _ = spin.look(|| {
                looks += 1;
                (find && looks > 1).then_some(())
            });
            looks > 1
        };
        let in_vain = (0..1000).filter(|_| spins(false)).count();
        assert!((10..=25).contains(&in_vain), "{in_vain} of 1000");
        let until_found = (0..1000).position(|_| spins(true)).expect("it looks again some time");
        assert!(until_found <= MOST_SKIPPED as usize);
        assert!((0..100).all(|_| spins(true)));
    }

    #[test]
    fn core_budget_depends_on_cores_of_the_host() {
        let topology = Topology::even(2, 1);
        let me = ProcessId(0);
        let rooms =
            |topology: &Topology| [1, 2, 3, 4].map(|cores| CoreBudget::of(me, topology, cores));
        assert_eq!(
            rooms(&topology),
            [CoreBudget::None, CoreBudget::One, CoreBudget::One, CoreBudget::All],
            "two programs, two devices"
        );
        let apart = topology.on_hosts(&["a", "b"]).unwrap();
        assert_eq!(
            rooms(&apart),
            [CoreBudget::One, CoreBudget::All, CoreBudget::All, CoreBudget::All]
        );
    }
}
