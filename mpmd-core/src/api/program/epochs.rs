//! The end of an epoch: of the whole job, or because a process was lost.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_base::block::Mutex;
use mpmd_proto::router::{Failure, FailureKind};

use super::Program;
use super::membership::Returning;
use crate::error::Error;
use crate::exec::recovery_store::RecoveryStore;

/// The outcome of an epoch on this process.
pub(crate) enum EpochEnd<T, E> {
    /// The whole job is over.
    Over(Result<T, E>),
    /// A process was lost, or the job changes its processes. This process may return in the next
    /// epoch.
    Lost {
        failure: Arc<Failure>,
        returning: Box<Returning>,
    },
}

/// A change of the job's processes that all processes of an epoch have agreed on.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct JobChange {
    /// The processes that leave the job.
    pub(crate) leave: Vec<ProcessId>,
    /// The reasons why processes leave or join, as text. [`Error::EpochOver`] holds the same `Arc`.
    pub(crate) why: Arc<str>,
}

impl JobChange {
    /// True if `process` leaves the job.
    pub(crate) fn is_end_of(&self, process: ProcessId) -> bool {
        self.leave.contains(&process)
    }

    /// True if `error`, returned by a program, contains the [`Error::EpochOver`] of this change, as
    /// an error or as text. Nothing else in the program has that error.
    fn is_passed_on_by(&self, error: &impl fmt::Display) -> bool {
        Arc::strong_count(&self.why) > 1 || format!("{error:#}").contains(&*self.why)
    }
}

impl Program {
    /// Returns the number of the job's current epoch, from 1. A new epoch begins when a process was
    /// lost or the job's processes change.
    pub fn epoch(&self) -> u64 {
        self.runtime.config.epoch
    }

    /// Returns the random id of the job's run. It is the same in all epochs and on all processes; 0
    /// for a job without a rendezvous.
    pub fn run_id(&self) -> u128 {
        self.membership
            .as_ref()
            .and_then(|membership| membership.identity.run)
            .unwrap_or(0)
    }

    /// Makes [`Program::commit`] store its copies in `kept`. With `may_change`, copies are stored
    /// even while the job has one process.
    pub(crate) fn keep_commits(&mut self, kept: &Arc<Mutex<RecoveryStore>>, may_change: bool) {
        kept.lock().begin_epoch(self.run_id());
        self.kept = Some(kept.clone());
        self.may_change = may_change && self.membership.is_some();
        kept.lock().may_change = self.may_change;
    }

    /// True if a commit of an earlier epoch was whole on all processes of that epoch.
    pub(crate) fn had_whole_commit(&self) -> bool {
        self.membership
            .as_ref()
            .is_some_and(|membership| membership.standing.whole.is_some())
    }

    /// Returns a function that reports to the rendezvous service that a commit of this epoch is
    /// whole on all processes. `None` without a service.
    pub(crate) fn whole_teller(&self) -> Option<impl FnOnce() + Send + 'static> {
        let rendezvous = Arc::downgrade(&self.membership.as_ref()?.rendezvous);
        Some(move || {
            let told = rendezvous
                .upgrade()
                .map(|rendezvous| rendezvous.commit_is_whole());
            if let Some(Err(error)) = told {
                tracing::debug!(%error, "telling the service of a whole commit");
            }
        })
    }

    /// Returns the number of processes that the next epoch could have, from what this process knows
    /// now.
    pub(crate) fn could_have(&self) -> usize {
        self.membership
            .as_ref()
            .map_or(0, |membership| membership.rendezvous.could_have())
    }

    /// Returns the number of processes that could replace leaving ones, from what this process
    /// knows now.
    pub(crate) fn replacements(&self) -> usize {
        self.membership
            .as_ref()
            .map_or(0, |membership| membership.rendezvous.replacements())
    }

    /// Returns the reason why the job cannot continue with `size` processes, or `None` if it can.
    /// The same on every process.
    pub(crate) fn why_not(&self, size: usize) -> Option<String> {
        self.membership.as_ref()?.why_not(size)
    }

    /// Ends this process's part in an epoch, after the program has returned `result`. If the
    /// program returned a value, finishes it, which blocks. If a process was lost, leaves the epoch
    /// and waits for running kernels, at most for the peer timeout.
    #[track_caller]
    pub(crate) fn end_epoch<T, E>(mut self, result: Result<T, E>) -> EpochEnd<T, E>
    where
        E: From<Error> + fmt::Display,
    {
        let at = Location::caller();
        // A program that has returned a value is over, also if the others go on. An error of its
        // own ends the job.
        let is_passed_on = |change: &JobChange| {
            result
                .as_ref()
                .is_err_and(|error| change.is_passed_on_by(error))
        };

        if let Some(change) = self.change.take().filter(is_passed_on) {
            let is_over = self.wait_for_end(at).and_then(|()| self.wait_for_all());
            return match is_over {
                // A failure of a kernel ends the job also here.
                Err(failure) if failure.kind != FailureKind::PeerLost => {
                    EpochEnd::Over(self.conclude(Err(Error::failed(failure).into())))
                }
                is_over => self.end_by_change(&change, is_over.err()),
            };
        }

        let (result, failure) = match result {
            Ok(value) if self.is_dry_run() => return EpochEnd::Over(self.conclude(Ok(value))),
            Ok(value) => match self.wait_for_end(at).and_then(|()| self.wait_for_all()) {
                Ok(()) => {
                    let left = self.leave_at_end(Ok(()));
                    return EpochEnd::Over(left.map(|()| value).map_err(E::from));
                }
                Err(failure) => (Err(Error::failed(failure.clone()).into()), Some(failure)),
            },
            Err(error) => (Err(error), self.runtime.cause()),
        };

        let loss = failure.filter(|failure| failure.kind == FailureKind::PeerLost);
        let (Some(failure), true) = (loss, self.membership.is_some()) else {
            return EpochEnd::Over(self.conclude(result));
        };
        self.runtime.leave(Some(&failure));
        self.return_later(failure)
    }

    /// Ends an epoch whose processes have agreed on a change after a commit. `failure` is the
    /// failure of a process that was lost meanwhile. A leaving process also returns to the
    /// rendezvous service and stays until released: the others may need its copies.
    fn end_by_change<T, E: From<Error>>(
        self,
        change: &JobChange,
        failure: Option<Arc<Failure>>,
    ) -> EpochEnd<T, E> {
        let me = self.process();
        self.runtime.leave(failure.as_deref());

        let host = self
            .membership
            .as_ref()
            .and_then(|membership| membership.service_of(me));
        let why = Failure::new(FailureKind::PeerLost, me, 0, change.why.to_string());

        let mut end = self.return_later(failure.unwrap_or_else(|| Arc::new(why)));
        if let EpochEnd::Lost { returning, .. } = &mut end {
            returning.lack = None;
            returning.leaves = change.is_end_of(me);
            returning.service_leaves = host.is_some_and(|host| change.is_end_of(host));
        }
        end
    }

    /// Leaves an epoch that is over, in order to join the next one.
    fn return_later<T, E: From<Error>>(mut self, failure: Arc<Failure>) -> EpochEnd<T, E> {
        self.ended = true;
        self.runtime.trace.close();
        let membership = self.membership.take().expect("only a member returns");
        match self.runtime.wait_for_kernels() {
            Ok(()) => {
                let lack = membership.lack_of(&failure);
                let mut returning = membership.return_later(self.process(), self.epoch());
                returning.lack = lack;
                EpochEnd::Lost {
                    failure,
                    returning: Box::new(returning),
                }
            }
            // The service hears that this process is gone, and gives its place to another.
            Err(error) => EpochEnd::Over(Err(error.into())),
        }
    }

    /// Waits until every process has reached the end of the epoch. Fails if a process was lost
    /// before that. All others then return in the next epoch, which may need every one of them.
    fn wait_for_all(&self) -> Result<(), Arc<Failure>> {
        let lost = self
            .membership
            .as_ref()
            .and_then(|membership| membership.wait_for_all(self.process(), self.epoch()));
        lost.map_or(Ok(()), Err)
    }
}
