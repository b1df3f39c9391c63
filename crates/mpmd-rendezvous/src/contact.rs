//! The rule that decides if a process may run its job's service after the service was lost.
//!
//! An address that refuses connections has two possible causes: the service's process has died, or
//! the whole job has ended. The job cannot have ended while this process was in contact with the
//! service, since the others go on without a process only after the peer timeout. So a process runs
//! the service itself only if it was in contact until the service's process died:
//!
//! - It had heard from the service within the peer timeout when its connection was closed, and was
//!   not stopped for longer than that.
//! - The service had given it a place, and had not given it up.
//! - The service's address refused connections at that time. If it did not, only this process's
//!   connection was cut. A process that was stopped just then cannot know it.
//!
//! So no process and no file keeps a record of a job's end: where one could be needed, nobody goes
//! on.
//!
//! While the process that comes first in the list of heirs lives, no other one goes on with the
//! service. The others of the list must come within the peer timeout of that contact, since one
//! before them may have gone on, and ended the job without them.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the time since the system started, including time in which the system was suspended.
pub(super) fn system_time() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = Duration::from_secs(time.tv_sec.try_into().unwrap_or(0));
    seconds + Duration::from_nanos(time.tv_nsec.try_into().unwrap_or(0))
}

/// Longest time until a running process notices that its connection has ended: it checks at least
/// once a second.
const SEEN_WITHIN: Duration = Duration::from_secs(2);

/// A process's contact with the rendezvous service over one connection. Times are those of
/// [`system_time`].
#[derive(Clone, Debug)]
pub(super) struct ServiceContact {
    peer_timeout: Duration,
    /// Time at which this process last recorded that it runs.
    ran: Duration,
    /// Time at which this process last resumed after a stop that was longer than [`SEEN_WITHIN`].
    woke: Option<Duration>,
    heard: Duration,
    /// True once the service has given this process a place in an epoch. Before that, an answer of
    /// the service does not show if the job still runs.
    has_place: bool,
    service_died: bool,
    /// True if only this process's connection was closed: the service still accepted others.
    is_cut_off: bool,
    /// True once the processes have agreed that the process of the service leaves the job. A closed
    /// connection to it is then expected.
    is_handed_over: bool,
    /// The reason why the other processes may have continued or ended the job without this one.
    doubt: Option<ContactDoubt>,
}

/// The reason why the other processes may have ended the job without this one. In the messages,
/// `it` is this process.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum ContactDoubt {
    #[error("it was stopped for {stopped:.1?}")]
    Stopped { stopped: Duration },
    #[error("the job has given it up: {why}")]
    GivenUp { why: String },
    #[error("it was stopped when its connection was closed")]
    StoppedAtEnd,
    /// The service had been silent when the connection was closed.
    #[error("it had heard nothing of the job for {silent:.1?}")]
    SilentAtEnd { silent: Duration },
    #[error("its connection was cut while the service was there")]
    CutOff,
    #[error("it has heard nothing of the job for {silent:.1?}")]
    Silent { silent: Duration },
    #[error("it has not been in contact with it")]
    NoContact,
}

/// A record of how a process's contact with the rendezvous service ended.
#[derive(Clone, Debug)]
pub struct ServiceParting(ServiceContact);

impl ServiceContact {
    pub(super) fn new(peer_timeout: Duration, now: Duration) -> Self {
        Self {
            peer_timeout,
            ran: now,
            woke: None,
            heard: now,
            has_place: false,
            service_died: false,
            is_cut_off: false,
            is_handed_over: false,
            doubt: None,
        }
    }

    /// Records that this process runs. Must be called several times in each peer timeout.
    pub(super) fn runs(&mut self, now: Duration) {
        let stopped = now.saturating_sub(self.ran);
        self.ran = now;
        if stopped > SEEN_WITHIN {
            self.woke = Some(now);
        }
        if stopped > self.peer_timeout {
            self.doubts(ContactDoubt::Stopped { stopped });
        }
    }

    /// Records a sign of life of the service.
    pub(super) fn hears(&mut self, now: Duration) {
        self.runs(now);
        self.heard = now;
    }

    /// Records that the service has given this process a place in an epoch.
    pub(super) fn has_place(&mut self) {
        self.has_place = true;
    }

    /// Records that the service has given this process up, for the reason `why`.
    pub(super) fn is_given_up(&mut self, why: &str) {
        self.doubts(ContactDoubt::GivenUp {
            why: why.to_owned(),
        });
    }

    /// Records that the connection was closed before the job has ended. `is_refused` is true if no
    /// process listens at the service's address any more.
    pub(super) fn is_cut(&mut self, now: Duration, is_refused: bool) {
        self.runs(now);
        let silent = now.saturating_sub(self.heard);

        if self
            .woke
            .is_some_and(|woke| now.saturating_sub(woke) <= SEEN_WITHIN)
        {
            self.doubts(ContactDoubt::StoppedAtEnd);
        } else if silent > self.peer_timeout {
            self.doubts(ContactDoubt::SilentAtEnd { silent });
        } else if !is_refused {
            self.is_cut_off = true;
        }

        self.service_died = true;
    }

    fn doubts(&mut self, doubt: ContactDoubt) {
        self.doubt.get_or_insert(doubt);
    }
}

impl ServiceParting {
    pub(super) fn new(contact: ServiceContact) -> Self {
        Self(contact)
    }

    /// Combines this record with `before`, the record of an earlier connection.
    pub(super) fn after(self, before: Option<Self>) -> Self {
        match before {
            Some(Self(before)) if !self.0.has_place => {
                let is_cut_off = before.is_cut_off || self.0.is_cut_off;
                let doubt = before.doubt.or(self.0.doubt);
                Self(ServiceContact {
                    is_cut_off,
                    doubt,
                    ..before
                })
            }
            _ => self,
        }
    }

    /// Records that all processes have agreed that the process of the service leaves the job.
    #[must_use]
    pub(super) fn handed_over(self) -> Self {
        Self(ServiceContact {
            is_handed_over: true,
            service_died: true,
            ..self.0
        })
    }

    /// Checks that the other processes cannot have ended the job without this one. `is_first` is
    /// true on the process that comes first among those that can take over the service.
    ///
    /// # Errors
    ///
    /// The reason why they may have ended it.
    pub(super) fn check(&self, is_first: bool, now: Duration) -> Result<(), ContactDoubt> {
        // invariant: one-end
        let contact = &self.0;
        if let Some(doubt) = &contact.doubt {
            return Err(doubt.clone());
        }

        if contact.is_cut_off && !contact.is_handed_over {
            return Err(ContactDoubt::CutOff);
        }

        let silent = now.saturating_sub(contact.heard);
        match (is_first && contact.service_died) || silent <= contact.peer_timeout {
            true => Ok(()),
            false => Err(ContactDoubt::Silent { silent }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(1000 + seconds)
    }

    /// Returns a contact that was heard of once in each second until this one.
    fn heard_until(seconds: u64) -> ServiceContact {
        let mut contact = ServiceContact::new(TIMEOUT, at(0));
        contact.has_place();
        (0..=seconds).for_each(|second| contact.hears(at(second)));
        contact
    }

    fn is_allowed(contact: &ServiceContact, is_first: bool, now: Duration) -> bool {
        ServiceParting::new(contact.clone())
            .check(is_first, now)
            .is_ok()
    }

    #[test]
    fn first_heir_goes_on_at_any_time_after_it_saw_the_death() {
        let mut contact = heard_until(5);
        contact.is_cut(at(6), true);
        assert!(is_allowed(&contact, true, at(6)));
        assert!(
            is_allowed(&contact, true, at(6000)),
            "the others wait for it"
        );
        assert!(is_allowed(&contact, false, at(15)));
        assert!(
            !is_allowed(&contact, false, at(16)),
            "the first one may have gone on"
        );
    }

    #[test]
    fn service_that_gave_no_place_says_nothing_of_the_job() {
        let mut cut = heard_until(5);
        cut.is_cut(at(6), false);
        let mut other = ServiceContact::new(TIMEOUT, at(7));
        other.is_cut(at(8), true);
        let parting =
            ServiceParting::new(other.clone()).after(Some(ServiceParting::new(cut.clone())));
        assert!(
            parting.check(true, at(9)).is_err(),
            "its place may have been another's"
        );
        other.has_place();
        let parting = ServiceParting::new(other).after(Some(ServiceParting::new(cut)));
        assert!(parting.check(true, at(9)).is_ok());
    }

    #[test]
    fn closed_connection_to_a_service_that_is_handed_over_says_nothing() {
        let mut contact = heard_until(5);
        contact.is_cut(at(6), false);
        let parting = ServiceParting::new(contact.clone());
        assert!(parting.clone().check(true, at(6)).is_err());
        let parting = parting.handed_over();
        assert!(parting.check(true, at(6)).is_ok() && parting.check(false, at(7)).is_ok());
        assert!(
            parting.check(false, at(16)).is_err(),
            "the first one may have gone on"
        );
        // It has asked at the old service once more.
        let mut again = ServiceContact::new(TIMEOUT, at(7));
        again.is_cut(at(8), false);
        assert!(
            ServiceParting::new(again)
                .after(Some(parting))
                .check(true, at(8))
                .is_ok()
        );
    }

    #[test]
    fn process_that_left_an_epoch_comes_within_the_peer_timeout() {
        let contact = heard_until(5);
        assert!(is_allowed(&contact, true, at(15)));
        assert!(!is_allowed(&contact, true, at(16)));
    }

    #[test]
    fn process_that_was_stopped_or_given_up_never_goes_on() {
        let mut slept = heard_until(5);
        // Data that the system has kept for it is no sign of life.
        slept.hears(at(16));
        slept.is_cut(at(16), true);
        let mut is_given_up = heard_until(5);
        is_given_up.is_given_up("it has been silent");
        is_given_up.is_cut(at(6), true);
        let mut silent = heard_until(5);
        (6..17).for_each(|second| silent.runs(at(second)));
        silent.is_cut(at(17), true);
        let mut is_cut = heard_until(5);
        is_cut.is_cut(at(6), false);
        let mut stopped_at_the_end = heard_until(5);
        // The system has kept words of the service from before the end.
        stopped_at_the_end.hears(at(8));
        stopped_at_the_end.is_cut(at(8), true);
        for contact in [slept, is_given_up, silent, is_cut, stopped_at_the_end] {
            assert!(!is_allowed(&contact, true, at(17)), "{contact:?}");
        }
    }
}
