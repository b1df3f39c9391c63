//! How long a thread without work looks for it before it sleeps.
//!
//! To fall asleep and be woken costs some microseconds on both sides, more than an empty kernel.
//! But who looks takes a core from whoever has work. So a thread looks only where there is [`Room`]
//! for it, never for long, and less where it has lately been in vain.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mpmd_ids::ProcessId;

use mpmd_layout::topology::Topology;

/// The longest a thread looks.
const LONGEST: Duration = Duration::from_micros(20);
/// Of so many gaps that were not worth looking through at most one is looked through all the same.
const MOST_SKIPPED: u32 = 64;
/// Looks between two glances at the clock.
const LOOKS: u32 = 32;

/// Whether one thread, or those that wait for the same kind of thing, look for work. Clones
/// nothing, holds no lock: what it remembers only decides how long a wait is awake.
#[derive(Debug)]
pub(crate) struct Spin {
    allowed: bool,
    /// Gaps to sleep through at once.
    skip: AtomicU32,
    /// What `skip` was set to last.
    penalty: AtomicU32,
}

impl Spin {
    pub(crate) fn new(allowed: bool) -> Self {
        Self { allowed, skip: AtomicU32::new(0), penalty: AtomicU32::new(0) }
    }

    /// Looks until `found` finds something, for a bounded time. `None` means that it is time to
    /// sleep.
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

    /// Whether this gap is one to look through: after one in vain, only every so many.
    fn is_due(&self) -> bool {
        let skip = self.skip.load(Ordering::Relaxed);
        if skip > 0 {
            self.skip.store(skip - 1, Ordering::Relaxed);
        }
        skip == 0
    }
}

/// How many threads of a process may look for work at a time, so that who has work finds a core.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Room {
    /// The job has more processes on this host than the host has cores.
    None,
    /// Each process has a core.
    One,
    /// The threads of the job on this host, the programs' and the devices', have a core each.
    All,
}

impl Room {
    /// Of a process on a host with so many cores.
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
    fn what_is_there_is_found_at_once_whoever_may_look() {
        for allowed in [false, true] {
            assert_eq!(Spin::new(allowed).look(|| Some(1)), Some(1));
        }
    }

    #[test]
    fn who_may_not_look_looks_once() {
        let mut looks = 0;
        let found: Option<()> = Spin::new(false).look(|| {
            looks += 1;
            None
        });
        assert_eq!((found, looks), (None, 1));
    }

    #[test]
    fn looking_in_vain_makes_it_rare_and_finding_makes_it_usual_again() {
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
    fn as_many_threads_look_as_there_are_cores_for() {
        let topology = Topology::even(2, 1);
        let me = ProcessId(0);
        let rooms = |topology: &Topology| [1, 2, 3, 4].map(|cores| Room::of(me, topology, cores));
        assert_eq!(
            rooms(&topology),
            [Room::None, Room::One, Room::One, Room::All],
            "two programs, two devices"
        );
        let apart = topology.on_hosts(&["a", "b"]).unwrap();
        assert_eq!(rooms(&apart), [Room::One, Room::All, Room::All, Room::All]);
    }
}
