//! The connecting of simulated processes at the start of an epoch.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Condvar, Mutex, now, thread};
use mpmd_base::deadline::after;
use mpmd_transport::TransportError;

/// The processes that can be connected to, by epoch. Clones share them.
///
/// A process connects to the others one after the other. So one may be connected to all while
/// another still waits for a process that was lost meanwhile, as with real transports.
#[derive(Clone, Default)]
pub(super) struct Meetings(Arc<(Mutex<BTreeMap<u64, Meeting>>, Condvar)>);

#[derive(Default)]
struct Meeting {
    here: BTreeSet<ProcessId>,
    /// True for a meeting that every process has left or will leave.
    is_over: bool,
}

/// The part of a process in a meeting.
pub(super) struct MeetingGuest {
    pub(super) epoch: u64,
    pub(super) process: ProcessId,
    pub(super) processes: usize,
    pub(super) peer_timeout: Duration,
    /// The seed of the order in which processes connect, and of the times.
    pub(super) seed: u64,
    /// The time that each connection takes; `None` for no time.
    pub(super) delay: Option<RangeInclusive<Duration>>,
}

impl MeetingGuest {
    /// Returns a random number for the connection to `other`.
    fn random(&self, other: ProcessId) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, self.epoch, self.process, other).hash(&mut hasher);
        hasher.finish()
    }
}

impl Meetings {
    /// Lets others connect to a process. Meetings of earlier epochs are over.
    pub(super) fn arrives(&self, epoch: u64, process: ProcessId) {
        let mut meetings = self.0.0.lock();
        meetings
            .range_mut(..epoch)
            .for_each(|(_, meeting)| meeting.is_over = true);
        meetings.entry(epoch).or_default().here.insert(process);
        self.0.1.notify_all();
    }

    /// Removes a process that was killed. Others that have not connected to it never will.
    pub(super) fn loses(&self, epoch: u64, process: ProcessId) {
        let mut meetings = self.0.0.lock();
        meetings.entry(epoch).or_default().here.remove(&process);
        self.0.1.notify_all();
    }

    /// Connects a process to all others, in an order of its own.
    ///
    /// # Errors
    ///
    /// If another does not arrive within the peer timeout, or the epoch is over.
    pub(super) fn connect(&self, guest: &MeetingGuest) -> Result<(), TransportError> {
        let others = (0..guest.processes as u32).map(ProcessId);
        let others = others.filter(|other| *other != guest.process);
        let mut others: Vec<_> = others.map(|other| (guest.random(other), other)).collect();
        others.sort_unstable();

        for (random, other) in others {
            if let Some(delay) = &guest.delay {
                // From the least time to the longest in 1024 steps.
                let more = delay.end().saturating_sub(*delay.start());
                thread::sleep(*delay.start() + more * (random % 1025) as u32 / 1024);
            }
            self.wait_for(guest, other)?;
        }
        Ok(())
    }

    fn wait_for(&self, guest: &MeetingGuest, other: ProcessId) -> Result<(), TransportError> {
        let until = after(now(), guest.peer_timeout);
        let mut meetings = self.0.0.lock();
        loop {
            let meeting = meetings.entry(guest.epoch).or_default();
            if meeting.here.contains(&other) {
                return Ok(());
            }
            if meeting.is_over || self.0.1.wait_until(&mut meetings, until).timed_out() {
                return Err(TransportError::PeerGone {
                    peer: other,
                    why: "it has not connected".to_owned(),
                });
            }
        }
    }
}
