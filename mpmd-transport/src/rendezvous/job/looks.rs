//! Looks of observers at a job: the status of each process.

use std::collections::BTreeSet;
use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::RendezvousError;
use super::super::protocol::{Answer, MAX_KEY_BYTES, MAX_VALUE_BYTES, ProcessStatus, Reply};
use super::places::Seat;
use super::{Action, Job, Link, Phase, after, processes};
use mpmd_proto::wire::ProcessId;

/// A look at the job for which the status of some processes is still missing.
pub(super) struct Look {
    pub(super) number: u64,
    pub(super) link: Link,
    pub(super) ask: u64,
    pub(super) missing: BTreeSet<ProcessId>,
    pub(super) until: Instant,
}

/// The longest time that an observer waits for the status of a process.
pub(super) const LOOK_WITHIN: Duration = Duration::from_secs(1);

impl Job {
    /// Asks every process of a running job for its status, for the client of `link`. Of others it
    /// says at once why they have none.
    pub(super) fn look(
        &mut self,
        link: Link,
        ask: u64,
        now: Instant,
    ) -> Result<(), RendezvousError> {
        if let Phase::Failed(error) = &self.phase {
            return Err(error.clone());
        }
        if self.looks.iter().any(|look| look.link == link) {
            let (what, when) = ("looking at the job".into(), "once at a time".into());
            return Err(RendezvousError::OutOfTurn { what, when });
        }
        if let Some(client) = self.links.get_mut(&link) {
            // It may look for as long as the job runs and need not join.
            client.join_by = after(now, Duration::MAX);
        }
        self.looked += 1;
        let mut missing = BTreeSet::new();
        for (process, seat) in processes(self.seats.len()).zip(&self.seats) {
            let why = match seat {
                None if self.is_busy(process) => {
                    "it runs code of its own, in an epoch that has ended".to_owned()
                }
                None => "it has not joined yet".to_owned(),
                Some(Seat { ended: Some(end), .. }) => end.why.clone(),
                Some(_) if self.phase == Phase::Gathering => "it waits for others to join".into(),
                Some(seat) => {
                    missing.insert(process);
                    self.actions.push(Action::Say(seat.link, Reply::Look { look: self.looked }));
                    continue;
                }
            };
            self.actions.push(Action::Say(link, Reply::Status { ask, process, status: Err(why) }));
        }
        match missing.is_empty() {
            true => self.answer(link, ask, Ok(Answer::Done)),
            false => {
                let until = after(now, LOOK_WITHIN);
                self.looks.push(Look { number: self.looked, link, ask, missing, until });
            }
        }
        Ok(())
    }

    /// Passes on the status of `process` to the looks that miss it and for which `is_for` returns
    /// true, and ends those that miss no other.
    pub(super) fn seen(
        &mut self,
        process: ProcessId,
        status: &ProcessStatus,
        is_for: impl Fn(&Look) -> bool,
    ) {
        for look in &mut self.looks {
            if is_for(look) && look.missing.remove(&process) {
                let (ask, status) = (look.ask, status.clone());
                self.actions.push(Action::Say(look.link, Reply::Status { ask, process, status }));
            }
        }
        let (complete, open) =
            self.looks.drain(..).partition(|look: &Look| look.missing.is_empty());
        self.looks = open;
        for Look { link, ask, .. } in complete {
            self.answer(link, ask, Ok(Answer::Done));
        }
    }
}

/// Returns a status that fits a message.
pub(super) fn passed_on(status: ProcessStatus) -> ProcessStatus {
    let (bytes, most) = match &status {
        Ok(status) => (status.len(), MAX_VALUE_BYTES),
        Err(why) => (why.len(), MAX_KEY_BYTES),
    };
    if bytes <= most { status } else { Err(format!("its status has {bytes} bytes")) }
}
