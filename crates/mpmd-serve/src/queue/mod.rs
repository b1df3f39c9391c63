//! The waiting line between the clients, which tokio's threads serve, and the engine, which has a
//! thread of its own.

mod answers;
mod control;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use mpmd_base::block::{Condvar, Instant, Mutex, now, since};
use thiserror::Error;
use tokio::sync::{mpsc, watch};

use crate::log_target::LOG_TARGET;
use crate::metrics::{EngineFigures, KeyCounters, ServerMetrics};
use crate::request::{Finish, ReplyEvent, TextRequest};
use answers::Answers;
pub(crate) use answers::Awaited;
pub(crate) use control::EngineNews;
pub use control::{Denied, PauseMode, Waker, WeightInfo};
use control::{PauseState, ServedWeights};

/// Number of most recently ended requests from which the rate of ends is estimated.
const ENDS: usize = 64;
/// Shortest and longest time after which a refused client is told to try again.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// Limits on the queue of waiting requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QueueLimits {
    /// Largest number of waiting requests.
    pub requests: usize,
    /// Largest number of tokens in the prompts of waiting requests. A request that would wait alone
    /// may have more, with all of its prompts.
    pub tokens: usize,
}

impl Default for QueueLimits {
    fn default() -> Self {
        Self {
            requests: 256,
            tokens: 1 << 18,
        }
    }
}

/// Error: a request was not taken into the queue.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum Refused {
    /// The queue has too many requests.
    #[error("{waiting} requests are waiting, the most that this server allows")]
    Requests {
        /// Number of waiting requests.
        waiting: usize,
        /// The time after which there will probably be room.
        retry: Duration,
    },
    /// The prompts in the queue have too many tokens.
    #[error("the waiting prompts have {waiting} tokens, near the most that this server allows")]
    Tokens {
        /// Number of tokens in the prompts of waiting requests.
        waiting: usize,
        /// The time after which there will probably be room.
        retry: Duration,
    },
    /// The server is starting, and takes no requests yet.
    #[error("the server is starting")]
    Starting,
    /// The server is shutting down, and takes no requests any more.
    #[error("the server is shutting down")]
    Draining,
    /// The server has failed, and ends.
    #[error("the server has failed, and ends")]
    Failed,
}

impl Refused {
    /// Returns the label of this refusal in metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Requests { .. } => "requests",
            Self::Tokens { .. } => "tokens",
            Self::Starting => "starting",
            Self::Draining => "draining",
            Self::Failed => "failed",
        }
    }
}

/// The state of a server: which requests it takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ServerPhase {
    /// No request is taken yet, since the engine has not started.
    Starting,
    /// Requests are taken.
    Ready,
    /// No new request is taken. Requests taken before are still answered.
    Draining,
    /// The engine has ended before the server was drained. All requests fail.
    Failed,
}

struct QueueShared {
    limits: QueueLimits,
    metrics: ServerMetrics,
    state: Mutex<QueueState>,
    /// Notified when `has_news` is set.
    changed: Condvar,
    /// The reason for which all open requests fail. `None` until then.
    cut: watch::Sender<Option<Arc<str>>>,
    /// The state of the pause. Set only while `state` is locked.
    pause: watch::Sender<PauseState>,
    answers: Mutex<Answers>,
}

struct QueueState {
    phase: ServerPhase,
    /// Requests that the engine has not taken yet.
    arrived: Vec<RequestArrival>,
    waiting: WaitingCounts,
    /// Number of requests that the engine is answering.
    running: usize,
    /// Number of clients that hold a [`ReplyStream`].
    open: usize,
    has_news: bool,
    /// True if a [`Waker`] was called.
    is_woken: bool,
    /// True if the requests that the engine has must end at once.
    aborts: bool,
    weights: ServedWeights,
    /// Times at which the most recently ended requests ended.
    ends: VecDeque<Instant>,
}

/// Counts of the requests that have not begun.
#[derive(Clone, Copy, Default)]
struct WaitingCounts {
    requests: usize,
    /// Number of tokens in their prompts.
    tokens: usize,
}

impl QueueShared {
    /// Changes the state with `change`, and wakes the engine.
    fn change(&self, change: impl FnOnce(&mut QueueState)) {
        let mut state = self.state.lock();
        change(&mut state);
        state.has_news = true;
        drop(state);
        self.changed.notify_all();
    }
}

/// Creates an empty queue of requests, and returns its two ends: for clients, and for the engine.
/// The server is in [`ServerPhase::Starting`].
pub fn queue(limits: QueueLimits) -> (RequestQueue, RequestArrivals) {
    let state = QueueState {
        phase: ServerPhase::Starting,
        arrived: Vec::new(),
        waiting: WaitingCounts::default(),
        running: 0,
        open: 0,
        has_news: false,
        is_woken: false,
        aborts: false,
        weights: ServedWeights::default(),
        ends: VecDeque::with_capacity(ENDS),
    };

    let shared = Arc::new(QueueShared {
        limits,
        metrics: ServerMetrics::new(),
        state: Mutex::new(state),
        changed: Condvar::new(),
        cut: watch::channel(None).0,
        pause: watch::Sender::default(),
        answers: Mutex::default(),
    });
    (RequestQueue(shared.clone()), RequestArrivals(shared))
}

/// The clients' end of the queue of requests. Clones share the queue.
#[derive(Clone)]
pub struct RequestQueue(Arc<QueueShared>);

impl RequestQueue {
    /// Appends a request to the queue. Does not block.
    ///
    /// # Errors
    ///
    /// If the queue is full, or the server takes no requests.
    pub fn submit(&self, request: TextRequest) -> Result<ReplyStream, Refused> {
        Ok(self.submit_all(vec![request])?.swap_remove(0))
    }

    /// Appends several requests to the queue, all or none. Does not block.
    ///
    /// # Errors
    ///
    /// If the queue has no room for all of them, or the server takes no requests.
    pub fn submit_all(&self, requests: Vec<TextRequest>) -> Result<Vec<ReplyStream>, Refused> {
        let submitted = now();
        let state = &mut *self.0.state.lock();
        let added = WaitingCounts {
            requests: requests.len(),
            tokens: requests.iter().map(|request| request.prompt.len()).sum(),
        };
        if let Err(refused) = self.admit(state, added) {
            self.0.metrics.refuse(refused.label());
            return Err(refused);
        }

        state.waiting.requests += added.requests;
        state.waiting.tokens += added.tokens;
        state.open += added.requests;
        let append = |request: TextRequest| {
            let (events, received) = mpsc::unbounded_channel();
            let sender = ReplySender {
                shared: self.0.clone(),
                events,
                tokens: request.prompt.len(),
                submitted,
                last: None,
                is_waiting: true,
                has_left: false,
            };
            state.arrived.push(RequestArrival { request, sender });
            ReplyStream {
                shared: self.0.clone(),
                events: received,
                cut: self.0.cut.subscribe(),
                end: None,
                versions: Vec::new(),
            }
        };
        let streams = requests.into_iter().map(append).collect();
        state.has_news = true;
        self.0.changed.notify_all();
        Ok(streams)
    }

    /// Returns an error if the queue has no room for further requests.
    fn admit(&self, state: &QueueState, added: WaitingCounts) -> Result<(), Refused> {
        let waiting = state.waiting;
        let limits = self.0.limits;
        match state.phase {
            ServerPhase::Starting => Err(Refused::Starting),
            ServerPhase::Draining => Err(Refused::Draining),
            ServerPhase::Failed => Err(Refused::Failed),
            ServerPhase::Ready if waiting.requests + added.requests > limits.requests => {
                Err(Refused::Requests {
                    waiting: waiting.requests,
                    retry: retry(state),
                })
            }
            ServerPhase::Ready
                if waiting.requests > 0 && waiting.tokens + added.tokens > limits.tokens =>
            {
                Err(Refused::Tokens {
                    waiting: waiting.tokens,
                    retry: retry(state),
                })
            }
            ServerPhase::Ready => Ok(()),
        }
    }

    /// Returns the state of the server.
    pub fn phase(&self) -> ServerPhase {
        self.0.state.lock().phase
    }

    /// True if the stages take far longer to answer than usual, as when a process is suspended, or
    /// if a process was lost and the next epoch does not begin.
    pub fn is_stalled(&self) -> bool {
        self.0.answers.lock().are_late(now())
    }

    /// Refuses new requests from now on. Ends a pause. Does nothing if the server has failed.
    pub fn drain(&self) {
        self.0.change(|state| {
            if state.phase == ServerPhase::Failed {
                return;
            }
            state.phase = ServerPhase::Draining;
            self.0.pause.send_replace(PauseState::None);
            state.weights.loaded(Err(Refused::Draining.into()));
        });
    }

    /// Ends all open and all later requests with [`ReplyEvent::Failed`] and this reason.
    pub fn fail(&self, why: &str) {
        self.0.cut.send_replace(Some(why.into()));
    }

    /// Returns the limits on waiting requests.
    pub(crate) fn limits(&self) -> QueueLimits {
        self.0.limits
    }

    /// Returns the number of clients whose requests are waiting or being answered.
    pub fn open(&self) -> usize {
        self.0.state.lock().open
    }

    /// Counts a request that was refused before it was submitted. `reason` is the label in metrics.
    pub(crate) fn refuse(&self, reason: &'static str) {
        self.0.metrics.refuse(reason);
    }

    /// Returns the metrics of the client key with this name.
    pub(crate) fn key_counters(&self, name: &str) -> KeyCounters {
        self.0.metrics.key(name)
    }

    /// Counts an answer of the server by its HTTP status.
    pub(crate) fn count_answer(&self, status: StatusCode) {
        self.0.metrics.count_answer(status.as_u16());
    }

    /// Returns all metrics in Prometheus' text format.
    pub fn metrics(&self) -> String {
        let state = self.0.state.lock();
        let waiting = state.waiting.requests;
        let running = state.running;
        drop(state);
        self.0
            .metrics
            .text([waiting, running, self.is_paused().into()])
    }
}

/// Returns the time after which half of the waiting requests have probably left, estimated from the
/// recent ends.
fn retry(state: &QueueState) -> Duration {
    let rate = match (state.ends.front(), state.ends.len()) {
        (Some(first), count @ 2..) => count as f64 / since(*first).as_secs_f64().max(1e-3),
        _ => 1.0,
    };
    let seconds = state.waiting.requests as f64 / 2.0 / rate;
    Duration::from_secs_f64(seconds.ceil().min(RETRY[1].as_secs_f64())).clamp(RETRY[0], RETRY[1])
}

/// The events of a request's reply. If it is dropped before the last event, the request is
/// cancelled.
pub struct ReplyStream {
    shared: Arc<QueueShared>,
    events: mpsc::UnboundedReceiver<StreamMessage>,
    cut: watch::Receiver<Option<Arc<str>>>,
    /// The label for metrics of how the request ended. `None` until its last event.
    end: Option<&'static str>,
    versions: Vec<Arc<str>>,
}

/// A message from the engine to a client.
enum StreamMessage {
    /// The label of the weight version that computes the tokens from now on.
    Version(Arc<str>),
    Event(ReplyEvent),
}

impl ReplyStream {
    /// Waits for the next event. `None` after the last one. Cancel safe.
    pub async fn next(&mut self) -> Option<ReplyEvent> {
        if self.end.is_some() {
            return None;
        }
        let event = loop {
            let sent = tokio::select! {
                biased;
                sent = self.events.recv() => sent,
                Ok(why) = self.cut.wait_for(Option::is_some) => {
                    why.clone().map(|why| StreamMessage::Event(ReplyEvent::Failed(why)))
                }
            };
            match sent {
                Some(StreamMessage::Version(label)) => self.versions.push(label),
                Some(StreamMessage::Event(event)) => break Some(event),
                None => break None,
            }
        };

        let event = event.unwrap_or_else(|| {
            let why = self.cut.borrow().clone();
            ReplyEvent::Failed(why.unwrap_or_else(|| "the engine has ended".into()))
        });
        self.end = match event {
            ReplyEvent::Token(_) => None,
            ReplyEvent::End(Finish::Stop) => Some("stop"),
            ReplyEvent::End(Finish::Length) => Some("length"),
            ReplyEvent::End(Finish::Abort) => Some("abort"),
            ReplyEvent::Failed(_) => Some("failed"),
        };
        Some(event)
    }

    /// Returns the labels of the weight versions that have computed the tokens so far. The first is
    /// the one with which the request began; each further one computed it again.
    pub fn versions(&self) -> &[Arc<str>] {
        &self.versions
    }

    /// Ends the request, since a stop text occurred in its reply.
    pub fn stop(mut self) {
        self.end.get_or_insert("stop");
    }
}

impl Drop for ReplyStream {
    fn drop(&mut self) {
        // The engine finds it closed.
        self.events.close();
        self.shared.metrics.end(self.end.unwrap_or("left"));
        self.shared.change(|state| state.open -= 1);
    }
}

/// The engine's end of the queue of requests.
pub struct RequestArrivals(Arc<QueueShared>);

/// A request as the engine gets it from the queue.
pub struct RequestArrival {
    /// The request.
    pub request: TextRequest,
    /// Sends the reply to the client.
    pub sender: ReplySender,
}

impl RequestArrivals {
    /// Takes requests from now on. Does nothing if the server is shutting down.
    pub fn open(&self) {
        let mut is_new = false;
        self.0.change(|state| {
            is_new = state.phase == ServerPhase::Starting;
            if is_new {
                state.phase = ServerPhase::Ready;
            }
        });
        if is_new {
            tracing::info!(target: LOG_TARGET, "ready: requests are taken");
        }
    }

    /// Ends all open requests with [`ReplyEvent::Failed`] and this reason, and refuses new ones.
    pub(crate) fn fail(&self, why: &Arc<str>) {
        let mut open = 0;
        self.0.change(|state| {
            state.phase = ServerPhase::Failed;
            open = state.open;
        });
        self.0.cut.send_replace(Some(why.clone()));
        tracing::error!(
            target: LOG_TARGET,
            "{why}; no request is taken, and {open} end with this error"
        );
    }

    /// Returns the new requests, in the order of arrival. Does not block.
    pub fn take(&self) -> Vec<RequestArrival> {
        std::mem::take(&mut self.0.state.lock().arrived)
    }

    /// Blocks until there are news since the last call, for `timeout` at most. News are requests,
    /// clients that left, pauses, changes of phase, and calls of a [`Waker`]. Returns false if
    /// there are none.
    pub fn wait(&self, timeout: Duration) -> bool {
        let start = now();
        let mut state = self.0.state.lock();
        while !state.has_news {
            let left = timeout.saturating_sub(since(start));
            if self.0.changed.wait_for(&mut state, left).timed_out() {
                break;
            }
        }
        std::mem::take(&mut state.has_news)
    }

    /// True once the server is shutting down and no client is left.
    pub fn is_over(&self) -> bool {
        let state = self.0.state.lock();
        state.phase == ServerPhase::Draining && state.open == 0
    }

    /// Sets the engine's figures for `/metrics`.
    pub fn report(&self, figures: EngineFigures) {
        self.0.metrics.set(figures);
    }

    /// Records that process 0 waits for an answer from the stages.
    pub(crate) fn wait_for(&self, awaited: Awaited) {
        self.0.answers.lock().wait(awaited, now());
    }

    /// Records that an awaited answer from the stages has arrived.
    pub(crate) fn answered(&self, awaited: Awaited) {
        self.0.answers.lock().come(awaited, now());
    }

    /// Records that no awaited answer will arrive, since the stages are created anew.
    pub(crate) fn forget_answers(&self) {
        self.0.answers.lock().forget();
    }
}

/// Sends the events of a reply to the client. If it is dropped before the last event, the request
/// fails.
pub struct ReplySender {
    shared: Arc<QueueShared>,
    events: mpsc::UnboundedSender<StreamMessage>,
    /// Number of tokens in the prompt.
    tokens: usize,
    submitted: Instant,
    /// Time at which the last token was sent. `None` before the first one.
    last: Option<Instant>,
    is_waiting: bool,
    /// True once the request counts as ended.
    has_left: bool,
}

impl ReplySender {
    /// Records that the request begins, and no longer waits. Calling it again does nothing.
    pub fn start(&mut self) {
        if std::mem::take(&mut self.is_waiting) {
            self.shared
                .metrics
                .start(self.tokens, since(self.submitted));
            self.leave_line(&mut self.shared.state.lock());
            self.tell_version();
        }
    }

    /// Tells the client that the newest weight version computes its request from now on.
    pub(crate) fn tell_version(&self) {
        let label = self.shared.state.lock().weights.label();
        // An error says that the client has left.
        _ = self.events.send(StreamMessage::Version(label));
    }

    /// Ends the request with the tokens that the client already has.
    pub(crate) fn abort(mut self) {
        if self.is_waiting {
            self.tell_version();
        }
        self.send(ReplyEvent::End(Finish::Abort));
    }

    fn leave_line(&self, state: &mut QueueState) {
        state.waiting.requests -= 1;
        state.waiting.tokens -= self.tokens;
        state.running += 1;
    }

    /// Sends an event to the client. Does not block, and does nothing if the client has left. For a
    /// client that does not read, at most `max_tokens` tokens are buffered.
    pub fn send(&mut self, event: ReplyEvent) {
        if let ReplyEvent::Token(_) = event {
            let time = now();
            let before = self.last.replace(time);
            let since = time.saturating_duration_since(before.unwrap_or(self.submitted));
            self.shared.metrics.token(before.is_none(), since);
        }
        if let ReplyEvent::End(_) | ReplyEvent::Failed(_) = event {
            // Leaves before it sends: a client with the whole reply finds the request ended in the
            // metrics.
            self.leave();
        }
        // An error says that the client has left.
        _ = self.events.send(StreamMessage::Event(event));
    }

    /// Counts the request as ended. Calling it again does nothing.
    fn leave(&mut self) {
        if std::mem::replace(&mut self.has_left, true) {
            return;
        }
        let was_waiting = std::mem::take(&mut self.is_waiting);
        let mut state = self.shared.state.lock();
        if was_waiting {
            self.leave_line(&mut state);
        }

        state.running -= 1;
        if state.ends.len() == ENDS {
            state.ends.pop_front();
        }
        state.ends.push_back(now());
    }

    /// True if the client has left.
    pub fn is_gone(&self) -> bool {
        self.events.is_closed()
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        self.leave();
    }
}
