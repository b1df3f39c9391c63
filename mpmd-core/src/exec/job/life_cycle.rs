//! The life cycle of the job on this process: loss of peers, failures, and the end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{mpsc, now, since};
use mpmd_base::deadline::after;
use mpmd_proto::router::{Failure, FailureKind, Router};
use mpmd_rendezvous::FailureReport;

use crate::error::Error;
use crate::exec::job::start::TICK;
use crate::exec::{Doing, Runtime};

/// Time limit for the transport to flush when it closes after a failure. Without a failure the
/// limit is the peer timeout: a peer that misses the goodbye counts this process as lost.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// Time limit for NCCL communicators to close.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// The first failures that this process has seen.
#[derive(Default)]
pub(crate) struct Trouble {
    /// The first failure of an operation on this process, or of the job.
    pub(crate) first: Option<Arc<Failure>>,
    /// The first peer that was lost before it had left the job.
    pub(crate) lost: Option<Arc<Failure>>,
    /// Operation number. Failures of kernels and of memory in earlier operations are ignored.
    forgiven: u64,
}

impl Trouble {
    fn forgives(&self, failure: &Failure) -> bool {
        let is_local = matches!(failure.kind, FailureKind::Kernel | FailureKind::Memory);
        is_local && failure.op < self.forgiven
    }
}

impl Runtime {
    /// Handles the certain end of a peer process, which the transport may not notice. Tells the
    /// router, and ends all transfers to and from the peer.
    pub(crate) fn peer_ended(self: &Arc<Self>, peer: ProcessId, why: &str) {
        self.with_router(|router| router.peer_down(peer, why));
        self.give_up(peer, why);
        self.changed.notify_all();
    }

    /// Tells the router that the rendezvous has lost a peer. The peer counts as lost unless
    /// messages still come from it within a few heartbeats.
    pub(crate) fn suspect(self: &Arc<Self>, peer: ProcessId, why: &str) {
        self.with_router(|router| router.suspect(peer, why, self.now()));
    }

    /// Handles the end of the job's epoch, which process `by` has left in order to join the next
    /// one. Ends every wait: the other processes leave the epoch too.
    pub(crate) fn epoch_over(self: &Arc<Self>, by: ProcessId) {
        self.with_router(|router| router.epoch_over(by));
        let peers = (0..self.topology.processes() as u32).map(ProcessId);
        for peer in peers.filter(|peer| *peer != self.me) {
            self.end_transfers(peer, "the epoch is over");
        }
        self.changed.notify_all();
    }

    /// Stores the failure of an operation on this process, if it is the first. Wakes threads that
    /// wait for the job's end.
    pub(crate) fn remember(&self, failure: &Arc<Failure>) {
        let mut trouble = self.trouble.lock();
        if !trouble.forgives(failure) {
            trouble.first.get_or_insert_with(|| failure.clone());
        }
        self.changed.notify_all();
    }

    /// Ignores failures of kernels and of memory in operations before number `before`: past and
    /// future ones.
    pub(crate) fn forgive(&self, before: u64) {
        let mut trouble = self.trouble.lock();
        trouble.forgiven = before;
        if trouble
            .first
            .as_ref()
            .is_some_and(|first| trouble.forgives(first))
        {
            trouble.first = None;
        }
    }

    /// Returns the first failure of an operation or of the job, or else the loss of a peer. `None`
    /// without either.
    pub(crate) fn trouble(&self) -> Option<Arc<Failure>> {
        let trouble = self.trouble.lock();
        trouble.first.clone().or_else(|| trouble.lost.clone())
    }

    /// Returns the failure behind an error that the program has got. Also asks the router, since
    /// `trouble` may get the failure a little later.
    pub(crate) fn cause(self: &Arc<Self>) -> Option<Arc<Failure>> {
        self.trouble()
            .or_else(|| self.with_router(|router| router.trouble()))
    }

    /// Fails the job with `failure` and tells every process that is still reachable. Does nothing
    /// if the job has failed already.
    pub(crate) fn fail_job(self: &Arc<Self>, failure: Arc<Failure>) {
        self.with_router(|router| router.fail(failure));
    }

    /// Blocks until every peer has left the job too. Reports a hang after the peer timeout, then at
    /// growing intervals. Fails if an operation has failed or a peer is lost.
    pub(crate) fn wait_for_peers(self: &Arc<Self>) -> Result<(), Arc<Failure>> {
        let _doing = self.status.enter(Doing::Finishing);
        let mut begin = now();
        let mut asked = false;
        loop {
            if let Some(failure) = self.trouble() {
                return Err(failure);
            }

            let waited = since(begin);
            if !asked && waited >= self.config.peer_timeout / 2 {
                self.with_router(Router::ask_all);
                asked = true;
            }
            if waited >= self.config.peer_timeout {
                let said = self.with_router(|router| router.last_words()).join("\n  ");
                self.report_hang(&format!(
                    "process {} has ended, and waits for others:\n  {said}",
                    self.me
                ));
                begin = now();
                asked = false;
            }

            // Both under one lock: `trouble` may not have the router's failure yet.
            let (all_left, trouble) =
                self.with_router(|router| (router.still_here().is_empty(), router.trouble()));
            if all_left {
                return self.trouble().or(trouble).map_or(Ok(()), Err);
            }
            // The ticker detects silent peers, so this ends. The timeout covers a change between
            // the check above and the wait.
            self.changed
                .wait_for(&mut self.trouble.lock(), Duration::from_millis(20));
        }
    }

    /// Returns the report of a failure for the launcher. `has_ended` is true if the program ran to
    /// its end, false if it broke off.
    pub(crate) fn report_of(&self, failure: &Failure, has_ended: bool) -> FailureReport {
        let router = self.router.lock();
        let hash = match failure.op > router.count() {
            true => has_ended.then_some(0),
            false => router.hash_at(failure.op),
        };
        FailureReport {
            failure: failure.clone().shortened(),
            hash,
        }
    }

    /// Leaves the job: says goodbye to the peers, with the failure if there is one, and ends the
    /// ticker. Gives the NCCL communicators 5 seconds to close. Gives the transport the peer
    /// timeout to flush, and 2 seconds after a failure.
    pub(crate) fn leave(self: &Arc<Self>, failure: Option<&Failure>) {
        self.with_router(|router| router.goodbye(failure, self.now()));
        if let Some(failure) = failure {
            // The other processes will not join this one's open NCCL calls.
            self.communicators.give_up(&Arc::new(failure.clone()));
        }
        self.communicators.close(CLOSE_WITHIN);
        if let Some(transport) = &self.transport {
            let without_failure = failure.is_none().then_some(self.config.peer_timeout);
            transport.shutdown(without_failure.unwrap_or(FLUSH_WITHIN));
            // A transport that is shut down reports no ends. Operations may still send.
            let peers = (0..self.topology.processes() as u32).map(ProcessId);
            for peer in peers.filter(|peer| *peer != self.me) {
                self.end_transfers(peer, "this process has left the job");
            }
        }
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Blocks until every operation and read of this process has ended. Reports a hang after the
    /// peer timeout, then at growing intervals.
    pub(crate) fn wait_idle(self: &Arc<Self>) {
        let _doing = self.status.enter(Doing::Finishing);
        let half = self.config.peer_timeout / 2;
        let wait = || {
            self.in_flight.wait_until(after(now(), half), |counts| {
                counts.ops == 0 && counts.reads == 0
            })
        };
        loop {
            if wait() {
                return;
            }
            // No peer was asked yet if this process waits for others to take its pieces.
            self.with_router(Router::ask_all);
            if wait() {
                return;
            }

            let counts = self.in_flight.counts();
            let first = self.in_flight.first_open();
            let first = first
                .map(|op| format!(", the first is operation {op}"))
                .unwrap_or_default();
            let me = self.me;
            let doing = self.doing_and_why();
            self.report_hang(&format!(
                "process {me}: finish waits for {} operations{first}; {doing}",
                counts.ops
            ));
        }
    }

    /// Blocks until every operation of this process has ended, its running kernels included, but at
    /// most for the peer timeout.
    ///
    /// # Errors
    ///
    /// If an operation has not ended within the peer timeout.
    pub(crate) fn wait_for_kernels(&self) -> Result<(), Error> {
        // In short waits: time in which this process was stopped hardly counts.
        let mut left = self.config.peer_timeout;
        while !left.is_zero() {
            let slice = left.min(TICK);
            let until = after(now(), slice);
            if self
                .in_flight
                .wait_until(until, |counts| counts.ops == 0 && counts.reads == 0)
            {
                return Ok(());
            }
            left -= slice;
        }
        Err(Error::Environment(format!(
            "process {}: an operation of the failed epoch has not ended within {:?}; {}",
            self.me,
            self.config.peer_timeout,
            self.doing()
        )))
    }

    /// Blocks until every operation and user closure of this process has ended, but at most for
    /// `within`. Also returns once an operation has failed or a peer is lost.
    pub(crate) fn wait_briefly(&self, within: Duration) {
        let until = after(now(), within);
        let left = || until.saturating_duration_since(now());
        // In short waits: a failure need not end an operation.
        let look = || after(now(), left().min(TICK));
        let is_idle = || {
            self.in_flight
                .wait_until(look(), |counts| counts.ops == 0 && counts.reads == 0)
        };
        loop {
            if self.trouble().is_some() || left().is_zero() {
                return;
            }
            if is_idle() {
                break;
            }
        }

        let (done, all_done) = mpsc::channel::<()>();
        self.call_back(Box::new(move || drop(done)));
        let _ = all_done.recv_timeout(left());
    }

    /// Blocks until every user closure that waited for an operation has run. Reports a hang after
    /// the peer timeout, then at growing intervals.
    pub(crate) fn wait_for_callbacks(&self) {
        let _doing = self.status.enter(Doing::Finishing);
        let (done, all_done) = mpsc::channel::<()>();
        // Runs after the other closures. Dropping the sender is the signal.
        self.call_back(Box::new(move || drop(done)));
        while all_done.recv_timeout(self.config.peer_timeout)
            == Err(mpsc::RecvTimeoutError::Timeout)
        {
            let text = "finish waits for a closure given to `then`";
            self.report_hang(&format!("process {}: {text}; {}", self.me, self.doing()));
        }
    }
}
