//! The waiting line between the clients, which tokio's threads serve, and the engine, which has a
//! thread of its own.

mod answers;
mod control;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::{Condvar, Instant, Mutex, now, since};
use thiserror::Error;
use tokio::sync::{mpsc, watch};

use crate::metrics::{EngineFigures, ServerMetrics};
use crate::request::{Finish, ReplyEvent, TextRequest};
use answers::Answers;
pub(crate) use answers::Awaited;
pub(crate) use control::EngineNews;
pub use control::{Denied, PauseMode, Waker, WeightInfo};
use control::{PauseState, ServedWeights};

/// Number of recent ends from which the rate of ends is estimated.
const ENDS: usize = 64;
/// Limits on the time after which a refused client may come again.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// Limits on the waiting line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QueueLimits {
    /// Largest number of waiting requests.
    pub requests: usize,
    /// Largest number of tokens in the prompts of waiting requests. A single prompt may have more.
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

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum Refused {
    /// There are too many waiting requests.
    #[error("{waiting} requests are waiting, the most that this server allows")]
    Requests {
        /// Number of waiting requests.
        waiting: usize,
        /// The time after which there is probably room.
        retry: Duration,
    },
    /// The waiting prompts have too many tokens.
    #[error("the waiting prompts have {waiting} tokens, near the most that this server allows")]
    Tokens {
        /// Number of tokens of the waiting prompts.
        waiting: usize,
        /// The time after which there is probably room.
        retry: Duration,
    },
    /// The engine does not take requests yet.
    #[error("the server is starting")]
    Starting,
    /// The server ends.
    #[error("the server is shutting down")]
    Draining,
}

impl Refused {
    /// Returns the label of the metric.
    fn label(self) -> &'static str {
        match self {
            Self::Requests { .. } => "requests",
            Self::Tokens { .. } => "tokens",
            Self::Starting => "starting",
            Self::Draining => "draining",
        }
    }
}

/// The state of a server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ServerPhase {
    /// The engine does not take requests yet.
    Starting,
    /// Requests are taken.
    Ready,
    /// No request is taken. Those that were taken go on.
    Draining,
}

struct QueueShared {
    limits: QueueLimits,
    metrics: ServerMetrics,
    state: Mutex<QueueState>,
    /// Told when `has_news` is set.
    changed: Condvar,
    /// The reason for which all open requests fail.
    cut: watch::Sender<Option<Arc<str>>>,
    /// Changes with the state's lock held.
    pause: watch::Sender<PauseState>,
    answers: Mutex<Answers>,
}

struct QueueState {
    phase: ServerPhase,
    /// Requests that the engine has not taken.
    arrived: Vec<RequestArrival>,
    waiting: WaitingCounts,
    /// Number of requests that the engine is answering.
    running: usize,
    /// Number of clients.
    open: usize,
    has_news: bool,
    /// True if a [`Waker`] was called.
    is_woken: bool,
    /// True if the requests that the engine has are to be aborted.
    aborts: bool,
    weights: ServedWeights,
    /// Times of the most recent ends.
    ends: VecDeque<Instant>,
}

/// The requests that wait.
#[derive(Clone, Copy, Default)]
struct WaitingCounts {
    requests: usize,
    /// Number of tokens of their prompts.
    tokens: usize,
}

impl QueueShared {
    /// Changes the state, and wakes the engine.
    fn change(&self, change: impl FnOnce(&mut QueueState)) {
        let mut state = self.state.lock();
        change(&mut state);
        state.has_news = true;
        drop(state);
        self.changed.notify_all();
    }
}

/// Creates an empty waiting line. It is [`ServerPhase::Starting`].
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

/// The clients' end of the waiting line. Clones lead to the same line.
#[derive(Clone)]
pub struct RequestQueue(Arc<QueueShared>);

impl RequestQueue {
    /// Appends a request to the waiting line. Does not block.
    ///
    /// # Errors
    ///
    /// If the line is full, or no requests are taken.
    pub fn submit(&self, request: TextRequest) -> Result<ReplyStream, Refused> {
        let tokens = request.prompt.len();
        let (events, received) = mpsc::unbounded_channel();
        let submitted = now();
        let state = &mut *self.0.state.lock();
        if let Err(refused) = self.admit(state, tokens) {
            self.0.metrics.refuse(refused.label());
            return Err(refused);
        }

        state.waiting.requests += 1;
        state.waiting.tokens += tokens;
        state.open += 1;
        let sender = ReplySender {
            shared: self.0.clone(),
            events,
            tokens,
            submitted,
            last: None,
            is_waiting: true,
            has_left: false,
        };
        state.arrived.push(RequestArrival { request, sender });
        state.has_news = true;
        self.0.changed.notify_all();
        Ok(ReplyStream {
            shared: self.0.clone(),
            events: received,
            cut: self.0.cut.subscribe(),
            end: None,
            versions: Vec::new(),
        })
    }

    fn admit(&self, state: &QueueState, tokens: usize) -> Result<(), Refused> {
        let waiting = state.waiting;
        let limits = self.0.limits;
        match state.phase {
            ServerPhase::Starting => Err(Refused::Starting),
            ServerPhase::Draining => Err(Refused::Draining),
            ServerPhase::Ready if waiting.requests >= limits.requests => Err(Refused::Requests {
                waiting: waiting.requests,
                retry: retry(state),
            }),
            ServerPhase::Ready
                if waiting.requests > 0 && waiting.tokens + tokens > limits.tokens =>
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

    /// True if the stages take far longer to answer than usual, as when a process is stopped.
    pub fn is_stalled(&self) -> bool {
        self.0.answers.lock().are_late(now())
    }

    /// Takes no further requests. Ends a pause.
    pub fn drain(&self) {
        self.0.change(|state| {
            state.phase = ServerPhase::Draining;
            self.0.pause.send_replace(PauseState::None);
            state.weights.loaded(Err(Refused::Draining.into()));
        });
    }

    /// Ends all open requests with [`ReplyEvent::Failed`] for this reason, and those to come.
    pub fn fail(&self, why: &str) {
        self.0.cut.send_replace(Some(why.into()));
    }

    /// Returns the number of clients whose requests are waiting or being answered.
    pub fn open(&self) -> usize {
        self.0.state.lock().open
    }

    /// Counts a request that was refused for this reason before it was submitted.
    pub(crate) fn refuse(&self, reason: &'static str) {
        self.0.metrics.refuse(reason);
    }

    /// Returns the figures in Prometheus' text format.
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

/// Returns the time until half of the waiting requests have probably left, by the recent ends.
fn retry(state: &QueueState) -> Duration {
    let rate = match (state.ends.front(), state.ends.len()) {
        (Some(first), count @ 2..) => count as f64 / since(*first).as_secs_f64().max(1e-3),
        _ => 1.0,
    };
    let seconds = state.waiting.requests as f64 / 2.0 / rate;
    Duration::from_secs_f64(seconds.ceil().min(RETRY[1].as_secs_f64())).clamp(RETRY[0], RETRY[1])
}

/// The events of a request, for its client. Dropping it before the last one means that the client
/// has left.
pub struct ReplyStream {
    shared: Arc<QueueShared>,
    events: mpsc::UnboundedReceiver<StreamMessage>,
    cut: watch::Receiver<Option<Arc<str>>>,
    /// The label of the metric, if the request has ended.
    end: Option<&'static str>,
    versions: Vec<Arc<str>>,
}

/// A message from the engine to a client.
enum StreamMessage {
    /// The label of the version of the weights that computes the tokens from now on.
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

        let event = event.unwrap_or_else(|| ReplyEvent::Failed("the engine has ended".into()));
        self.end = match event {
            ReplyEvent::Token(_) => None,
            ReplyEvent::End(Finish::Stop) => Some("stop"),
            ReplyEvent::End(Finish::Length) => Some("length"),
            ReplyEvent::End(Finish::Abort) => Some("abort"),
            ReplyEvent::Failed(_) => Some("failed"),
        };
        Some(event)
    }

    /// Returns the labels of the versions of the weights that have computed the tokens so far: that
    /// with which the request has begun, and those on which it was computed again.
    pub fn versions(&self) -> &[Arc<str>] {
        &self.versions
    }

    /// Ends the request, since its reply has a stop text.
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

/// The engine's end of the waiting line.
pub struct RequestArrivals(Arc<QueueShared>);

/// A request of a client.
pub struct RequestArrival {
    /// The request.
    pub request: TextRequest,
    /// The way to the client.
    pub sender: ReplySender,
}

impl RequestArrivals {
    /// Takes requests from now on, unless the server ends.
    pub fn open(&self) {
        self.0.change(|state| {
            if state.phase == ServerPhase::Starting {
                state.phase = ServerPhase::Ready;
            }
        });
    }

    /// Returns the new requests, in their order. Does not block.
    pub fn take(&self) -> Vec<RequestArrival> {
        std::mem::take(&mut self.0.state.lock().arrived)
    }

    /// Blocks until a request has come, a client has left or the phase has changed since the last
    /// call, at most for `timeout`. Returns false if nothing happened.
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

    /// True once no request is taken and all clients have got their last event.
    pub fn is_over(&self) -> bool {
        let state = self.0.state.lock();
        state.phase == ServerPhase::Draining && state.open == 0
    }

    /// Sets the figures that `/metrics` shows.
    pub fn report(&self, figures: EngineFigures) {
        self.0.metrics.set(figures);
    }

    /// Says that process 0 waits for an answer of the stages.
    pub(crate) fn wait_for(&self, awaited: Awaited) {
        self.0.answers.lock().wait(awaited, now());
    }

    /// Says that an answer of the stages has come.
    pub(crate) fn answered(&self, awaited: Awaited) {
        self.0.answers.lock().come(awaited, now());
    }

    /// Says that no earlier answer will come.
    pub(crate) fn forget_answers(&self) {
        self.0.answers.lock().forget();
    }
}

/// The way from the engine to the client of a request. Dropping it before the last event fails the
/// request.
pub struct ReplySender {
    shared: Arc<QueueShared>,
    events: mpsc::UnboundedSender<StreamMessage>,
    /// Number of tokens of the prompt.
    tokens: usize,
    submitted: Instant,
    /// Time of the last token.
    last: Option<Instant>,
    is_waiting: bool,
    /// True once the request no longer counts as one that runs.
    has_left: bool,
}

impl ReplySender {
    /// Notes that the request has left the waiting line. A second call does nothing.
    pub fn start(&mut self) {
        if std::mem::take(&mut self.is_waiting) {
            self.shared
                .metrics
                .start(self.tokens, since(self.submitted));
            self.leave_line(&mut self.shared.state.lock());
            self.tell_version();
        }
    }

    /// Tells the client that the newest version of the weights computes its request from now on.
    pub(crate) fn tell_version(&self) {
        let label = self.shared.state.lock().weights.label();
        // An error says that the client has left.
        _ = self.events.send(StreamMessage::Version(label));
    }

    /// Ends the request with the tokens that the client has got.
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

    /// Sends an event. Does not block, and does nothing if the client has left. At most
    /// `max_tokens` events wait for a client that does not read.
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

    /// Counts the request as ended. A second call does nothing.
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
