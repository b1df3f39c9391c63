//! Connects the router with the transport: carries out the actions that the router asks for.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mpmd_ids::ProcessId;
use mpmd_ids::block::{Instant, mpsc};
use mpmd_transport::deadline::after;
use mpmd_transport::rendezvous::Report;
use mpmd_transport::router::{Action, Body, Failure, FailureKind, OpRecord, Router, Span};
use mpmd_transport::{Handler, Header, Kind, Payload, Ticket, TransportError};

use super::{Doing, InProcess, Outgoing, Runtime, Waiter};
use crate::trace::{PieceStep, What};
use crate::warning::warn_user;

/// Time limit for the transport to flush when it closes.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// Time limit for NCCL communicators to close.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// The handler that the transport calls. Holds the runtime weakly, because a transport may outlive
/// it.
pub(super) struct TransportHandler(pub(super) Weak<Runtime>);

impl Handler for TransportHandler {
    fn arrived(&self, from: ProcessId, header: Header, payload: Payload) {
        let Some(runtime) = self.0.upgrade() else { return };
        if matches!(header.kind, Kind::Eager | Kind::Data) {
            runtime.trace_piece(PieceStep::Arrived, (header.op, header.piece), from, header.bytes);
        }
        let (now, announced, found) = (runtime.now(), header.payload_bytes(), payload.bytes());
        runtime.with_router(|router| match payload {
            _ if found != announced => {
                let what = format!("a {:?} message of {found} bytes", header.kind);
                router.broken(from, &format!("it sent {what}, and announced {announced}"));
            }
            // Pieces keep their payload, even a small one that is already here. Control messages
            // are read here.
            payload if matches!(header.kind, Kind::Eager | Kind::Data) => {
                router.arrived(from, header, payload, &[], now);
            }
            Payload::Inline(bytes) | Payload::Lent(bytes) if bytes.device().is_none() => {
                router.arrived(from, header, Payload::Empty, &bytes, now);
            }
            _ => router.arrived(from, header, Payload::Empty, &[], now),
        });
    }

    fn done(&self, ticket: Ticket, _: Result<(), TransportError>) {
        // A failed send needs no handling here: the loss of its peer is reported separately.
        if let Some(runtime) = self.0.upgrade() {
            runtime.trace.note(|| What::Left { ticket: ticket.0 });
            let ended = runtime.under_way.lock().sent(ticket);
            drop(ended);
        }
    }

    fn peer_down(&self, peer: ProcessId, why: TransportError) {
        // The transport also reports the end of each transfer that was under way.
        if let Some(runtime) = self.0.upgrade() {
            runtime.with_router(|router| router.peer_down(peer, &reason(&why)));
        }
    }
}

impl Runtime {
    /// Calls the router, then carries out its actions after releasing its lock.
    pub(crate) fn with_router<R>(
        self: &Arc<Self>,
        call: impl FnOnce(&mut Router<InProcess>) -> R,
    ) -> R {
        let mut router = self.router.lock();
        let result = call(&mut router);
        if router.has_actions() {
            let actions = router.take_actions();
            drop(router);
            self.act(actions);
        }
        result
    }

    /// Records an operation that this process issues.
    pub(crate) fn record(self: &Arc<Self>, record: OpRecord) {
        self.with_router(|router| router.issue(record, || self.now()));
    }

    /// Records all operations of a replayed step up to `op`, which this process issues.
    pub(crate) fn record_span(self: &Arc<Self>, op: u64, span: &Arc<dyn Span>) {
        self.with_router(|router| router.issue_span(op, span, || self.now()));
    }

    /// Handles the end of a peer's process, which the transport may not notice.
    pub(crate) fn peer_ended(self: &Arc<Self>, peer: ProcessId, why: &str) {
        self.with_router(|router| router.peer_down(peer, why));
        self.give_up(peer, why);
        self.changed.notify_all();
    }

    /// Handles the loss of a peer by the rendezvous. The peer may be gone, and the transport may
    /// not notice.
    pub(crate) fn suspect(self: &Arc<Self>, peer: ProcessId, why: &str) {
        self.with_router(|router| router.suspect(peer, why, self.now()));
    }

    /// Warns the user that this process has lost the rendezvous service. The job goes on.
    pub(crate) fn rendezvous_lost(&self, why: &str) {
        warn_user(&format!(
            "process {} has lost the rendezvous service of the job ({why}). The job goes on; a \
             process that dies \
             without closing its connections is noticed only after {:?}",
            self.me, self.config.peer_timeout
        ));
    }

    /// Remembers the first failure of an operation on this process.
    pub(crate) fn remember(&self, failure: &Arc<Failure>) {
        let mut trouble = self.trouble.lock();
        trouble.first.get_or_insert_with(|| failure.clone());
        self.changed.notify_all();
    }

    /// Returns the failure that ends the job for this process, if there is one.
    pub(crate) fn trouble(&self) -> Option<Arc<Failure>> {
        let trouble = self.trouble.lock();
        trouble.first.clone().or_else(|| trouble.lost.clone())
    }

    /// Fails the job and tells every process.
    pub(crate) fn fail_job(self: &Arc<Self>, failure: Arc<Failure>) {
        self.with_router(|router| router.fail(failure));
    }

    /// Blocks until every peer has left too. Reports a hang each time the peer timeout expires.
    /// Fails if an operation has failed or a peer is lost.
    pub(crate) fn wait_for_peers(self: &Arc<Self>) -> Result<(), Arc<Failure>> {
        let _doing = self.status.enter(Doing::Finishing);
        let (mut since, mut asked) = (Instant::now(), false);
        loop {
            if let Some(failure) = self.trouble() {
                return Err(failure);
            }
            let waited = since.elapsed();
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
                (since, asked) = (Instant::now(), false);
            }
            // Both under one lock: `trouble` may not have the router's failure yet.
            let (all_left, trouble) =
                self.with_router(|router| (router.still_here().is_empty(), router.trouble()));
            if all_left {
                return self.trouble().or(trouble).map_or(Ok(()), Err);
            }
            // The ticker detects silent peers, so this ends. The timeout covers a change between
            // the check above and the wait.
            self.changed.wait_for(&mut self.trouble.lock(), Duration::from_millis(20));
        }
    }

    /// Returns the report of a failure for the launcher. `has_ended` is true if the program ran to
    /// its end, false if it broke off.
    pub(crate) fn report_of(&self, failure: &Failure, has_ended: bool) -> Report {
        let router = self.router.lock();
        let hash = match failure.op > router.count() {
            true => has_ended.then_some(0),
            false => router.hash_at(failure.op),
        };
        Report { failure: failure.clone().shortened(), hash }
    }

    /// Says goodbye and closes the transport.
    pub(crate) fn leave(self: &Arc<Self>, failure: Option<&Failure>) {
        self.with_router(|router| router.goodbye(failure, self.now()));
        if let Some(failure) = failure {
            // The other processes will not join this one's open NCCL calls.
            self.communicators.give_up(&Arc::new(failure.clone()));
        }
        self.communicators.close(CLOSE_WITHIN);
        if let Some(transport) = &self.transport {
            transport.shutdown(FLUSH_WITHIN);
        }
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Blocks until every operation and read of this process has ended. Reports a hang each time
    /// the peer timeout expires.
    pub(crate) fn wait_idle(self: &Arc<Self>) {
        let _doing = self.status.enter(Doing::Finishing);
        let half = self.config.peer_timeout / 2;
        let wait = || {
            self.in_flight.wait_until(after(Instant::now(), half), |counts| {
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
            let (counts, first) = (self.in_flight.counts(), self.in_flight.first_open());
            let first =
                first.map(|op| format!(", the first is operation {op}")).unwrap_or_default();
            let (me, doing) = (self.me, self.doing_and_why());
            self.report_hang(&format!(
                "process {me}: finish waits for {} operations{first}; {doing}",
                counts.ops
            ));
        }
    }

    /// Waits until every operation and user closure of this process has ended or an operation has
    /// failed, for at most `within`.
    pub(crate) fn wait_briefly(&self, within: Duration) {
        let until = Instant::now() + within;
        let left = || until.saturating_duration_since(Instant::now());
        // In short waits: a failure need not end an operation.
        let look = || Instant::now() + left().min(super::start::TICK);
        let is_idle =
            || self.in_flight.wait_until(look(), |counts| counts.ops == 0 && counts.reads == 0);
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

    /// Blocks until every user closure that waited for an operation has run. Reports a hang each
    /// time the peer timeout expires.
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

    /// Describes in one line the current work of this process.
    pub(crate) fn doing(&self) -> String {
        self.status.describe(|op| self.router.lock().describe(op))
    }

    /// Describes the current work, then the chain of processes that this one waits for, down to the
    /// root: one line per link.
    pub(crate) fn doing_and_why(&self) -> String {
        let (doing, running) = (self.doing(), self.status.lowest());
        let mut chain = self.router.lock().chain(running);
        if chain.is_empty() && running.is_none() {
            // This process waits for others to take its pieces.
            chain = self.router.lock().last_words();
        }
        chain.into_iter().fold(doing, |text, line| format!("{text}\n  {line}"))
    }

    /// Writes to the log and to stderr that something has waited longer than the peer timeout.
    pub(crate) fn report_hang(&self, text: &str) {
        tracing::warn!(target: "mpmd::hang", "{text}");
        let message =
            format!("mpmd: still waiting after {:?}\n  {text}\n", self.config.peer_timeout);
        // In one write: other processes of the job may write to the same terminal.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), message.as_bytes());
    }

    fn act(self: &Arc<Self>, actions: Vec<Action<InProcess>>) {
        for action in actions {
            match action {
                Action::Post { to, header, body } => self.post(to, header, body),
                Action::Deliver { waiter, result } => self.deliver(waiter, result),
                Action::Answer { to, op, piece } => {
                    let (doing, running) = (self.doing(), self.status.lowest());
                    self.with_router(|router| router.answer(to, op, piece, doing, running));
                }
                Action::Taken { by, op } => {
                    let ended = self.under_way.lock().taken(by, op);
                    drop(ended);
                }
                Action::Discard(outgoing) => drop(outgoing),
                // The wait may depend on a device of this very process, by way of others.
                Action::HangReport(text) => {
                    self.report_hang(&format!("{text}\n  process {}: {}", self.me, self.doing()));
                }
                Action::PeerLost(failure) => {
                    // Devices that wait for the peer's devices would wait forever.
                    self.communicators.give_up(&failure);
                    self.trouble.lock().lost.get_or_insert(failure);
                    self.changed.notify_all();
                }
                Action::GiveUp { peer, why } => self.give_up(peer, &why),
                Action::Failed(failure) => {
                    self.communicators.give_up(&failure);
                    self.remember(&failure);
                }
            }
        }
        self.changed.notify_all();
    }

    fn post(&self, to: ProcessId, header: Header, body: Body<Outgoing>) {
        let Some(transport) = &self.transport else { return };
        let posted = |bytes: u64, ticket: Ticket| {
            let (op, piece, peer) = (header.op, header.piece, to.0);
            let (step, ticket) = (PieceStep::Posted, ticket.0);
            self.trace.note(|| What::Piece { step, op, piece, peer, bytes, ticket });
        };
        match body {
            Body::Empty => transport.post(to, header, None, Ticket::NONE),
            Body::Control(bytes) => transport.post(to, header, Some(bytes.into()), Ticket::NONE),
            Body::Cargo(Outgoing { buffer, bytes, guard }) if self.hands_over(to) => {
                let loan = self.in_flight.lend(buffer.len() as u64);
                let sending = self.under_way.lock().hand_over(to, header.op, loan, guard);
                let (ticket, ended) = match sending {
                    Ok(sending) => sending,
                    Err(ended) => return drop((buffer, ended)),
                };
                self.bytes_sent[to.index()].fetch_add(bytes, Ordering::Relaxed);
                posted(bytes, ticket);
                let payload = (!buffer.is_empty()).then_some(buffer);
                transport.post(to, header, payload, ticket);
                drop(ended);
            }
            Body::Cargo(Outgoing { buffer, bytes, guard }) => {
                let sending = self.under_way.lock().send(to, guard);
                // If nothing is sent, the memory is dropped first: threads that wait for memory
                // check it when operations end.
                let ticket = match sending {
                    Ok(ticket) => ticket,
                    Err(guard) => return drop((buffer, guard)),
                };
                self.bytes_sent[to.index()].fetch_add(bytes, Ordering::Relaxed);
                posted(bytes, ticket);
                let payload = (!buffer.is_empty()).then_some(buffer);
                transport.post(to, header, payload, ticket);
            }
        }
    }

    fn deliver(self: &Arc<Self>, waiter: Waiter, result: Result<Payload, Arc<Failure>>) {
        match waiter {
            Waiter::Piece(receive) => self.pass(receive, result),
            Waiter::Bytes { resolver, from, op, piece } => {
                self.deliver_bytes(resolver, from, (op, piece), result);
            }
            Waiter::Nobody(_) => drop(result),
        }
    }

    fn deliver_bytes(
        self: &Arc<Self>,
        resolver: super::Resolver,
        from: ProcessId,
        key: (u64, u64),
        result: Result<Payload, Arc<Failure>>,
    ) {
        let op = key.0;
        match result {
            Err(failure) => resolver.keep(Err(failure)),
            Ok(Payload::Empty) => resolver.keep(Ok(Vec::new().into())),
            Ok(Payload::Inline(bytes) | Payload::Lent(bytes)) if bytes.device().is_some() => {
                // Collectives send each other host memory.
                let message =
                    format!("operation {op}: process {from} sent device memory to a collective");
                resolver.keep(Err(Arc::new(Failure::new(
                    FailureKind::Transport,
                    from,
                    op,
                    message,
                ))));
            }
            Ok(Payload::Inline(bytes) | Payload::Lent(bytes)) => {
                self.trace_piece(PieceStep::Taken, key, from, bytes.len() as u64);
                resolver.keep(Ok(bytes));
            }
            // The router has checked that this piece may have this length.
            Ok(Payload::Waiting(fetch)) => match self.staging.allocate(in_memory(fetch.bytes())) {
                Ok(buffer) => {
                    let runtime = self.clone();
                    self.fetch(
                        from,
                        fetch,
                        buffer,
                        Box::new(move |result| {
                            resolver.keep(match result {
                                Ok(buffer) => {
                                    runtime.trace_piece(
                                        PieceStep::Taken,
                                        key,
                                        from,
                                        buffer.len() as u64,
                                    );
                                    Ok(buffer.freeze())
                                }
                                Err(error) => Err(runtime.fetch_failed(from, op, &error)),
                            });
                        }),
                    );
                }
                Err(error) => {
                    let message = format!("{error}, for a piece of operation {op}");
                    resolver.keep(Err(Arc::new(Failure::new(
                        FailureKind::Memory,
                        self.me,
                        op,
                        message,
                    ))));
                }
            },
        }
    }

    /// Returns the failure of operation `op` after a piece broke off in transit.
    pub(super) fn fetch_failed(
        &self,
        from: ProcessId,
        op: u64,
        error: &TransportError,
    ) -> Arc<Failure> {
        if let TransportError::Environment { .. } = error {
            let message = format!("operation {op} waited for process {from}: {error}");
            return Arc::new(Failure::new(FailureKind::Transport, from, op, message));
        }
        self.router.lock().lost_while(from, op, &reason(error))
    }
}

/// Converts a length in bytes to `usize`. A length that does not fit becomes `usize::MAX`, which
/// pools refuse.
pub(super) fn in_memory(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Returns the text of a transport error without the process's name, which the router adds.
fn reason(error: &TransportError) -> String {
    match error {
        TransportError::PeerGone { why, .. } => why.clone(),
        other => other.to_string(),
    }
}
