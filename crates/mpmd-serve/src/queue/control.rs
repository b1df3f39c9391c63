//! The control of a running server: pauses, and the versions of the weights.

use std::collections::BTreeMap;
use std::sync::Arc;

use mpmd_models::{PublisherState, WeightVersions, version_number};
use thiserror::Error;
use tokio::sync::{oneshot, watch};

use crate::log_target::LOG_TARGET;

use super::{
    QueueShared, QueueState, Refused, RequestArrival, RequestArrivals, RequestQueue, ServerPhase,
};

/// The treatment of open requests by a pause.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PauseMode {
    /// All open requests end at once, with the tokens that clients already have.
    Abort,
    /// Requests that have begun are answered to their end. The pause is in force afterwards.
    Wait,
    /// All requests keep their state, and continue after the pause.
    Keep,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum PauseState {
    #[default]
    None,
    Asked(PauseMode),
    InForce(PauseMode),
}

/// Error: the server refuses a pause or a change of weights.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum Denied {
    /// The server is starting or shutting down.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The pause was ended before it was in force.
    #[error("the pause has ended before it was in force")]
    Resumed,
    /// Weights of another folder are being loaded.
    #[error("other weights are being loaded: try again later")]
    Busy,
    /// The weights were refused, with the reason.
    #[error("{0}")]
    Weights(String),
}

/// The versions of the weights that the server uses.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightInfo {
    /// The version number that new requests use.
    pub version: u64,
    /// The label of [`WeightInfo::version`].
    pub label: Arc<str>,
    /// An older version that some requests still use, and its label.
    pub old: Option<(u64, Arc<str>)>,
    /// Number of requests that use [`WeightInfo::version`], and number that use
    /// [`WeightInfo::old`].
    pub requests: [usize; 2],
    /// The reason why the last version was refused. `None` after a later version has been received.
    pub failure: Option<String>,
    /// The state of the connection to a publisher. `None` without a subscription.
    pub publisher: Option<PublisherState>,
}

/// The queue's state of the weights: versions in use, labels, and a load under way.
#[derive(Default)]
pub(super) struct ServedWeights {
    newest: u64,
    old: Option<u64>,
    /// Labels that clients have set, by version.
    labels: BTreeMap<u64, Arc<str>>,
    /// The inference's state of its versions, for the last failure and the publisher.
    versions: WeightVersions,
    load: Option<PendingLoad>,
}

/// The loading of a folder's weights that a client has requested.
struct PendingLoad {
    /// The path of the folder. `None` once the engine has taken it.
    path: Option<String>,
    reply: oneshot::Sender<Result<u64, Denied>>,
}

impl ServedWeights {
    /// Returns the label of the newest version.
    pub(super) fn label(&self) -> Arc<str> {
        self.label_of(self.newest)
    }

    fn label_of(&self, version: u64) -> Arc<str> {
        match self.labels.get(&version) {
            Some(label) => label.clone(),
            None if version == 0 => "default".into(),
            None => version_number(version).to_string().into(),
        }
    }

    /// Ends the current load, if there is one, and sends `result` to its client.
    pub(super) fn loaded(&mut self, result: Result<u64, Denied>) {
        if let Some(load) = self.load.take() {
            // An error says that the client has left.
            _ = load.reply.send(result);
        }
    }
}

/// The news since the engine last asked for them.
pub(crate) struct EngineNews {
    /// The new requests, in the order of arrival.
    pub(crate) arrived: Vec<RequestArrival>,
    /// True if all requests that the engine already has must end at once.
    pub(crate) aborts: bool,
    /// The pause that is requested or in force. `None` if there is none.
    pub(crate) pause: Option<PauseMode>,
    /// The path of a folder whose weights should be loaded.
    pub(crate) load: Option<String>,
}

/// A handle that wakes an idle engine, so that it looks for other work of its program. Clones wake
/// the same engine.
#[derive(Clone)]
pub struct Waker(Arc<QueueShared>);

impl Waker {
    /// Wakes the engine. Can be called from any thread. Does not block.
    pub fn wake(&self) {
        self.0.change(|state| state.is_woken = true);
    }
}

impl RequestQueue {
    /// Pauses the server, and waits until the pause is in force. Meanwhile new requests still enter
    /// the queue. If the future is dropped before the end, the server pauses nevertheless.
    ///
    /// # Errors
    ///
    /// If the server is starting or shutting down, or if [`resume`](Self::resume) is called
    /// meanwhile.
    pub async fn pause(&self, mode: PauseMode) -> Result<(), Denied> {
        let mut pause = self.ask_for_pause(mode)?;
        let known = pause
            .wait_for(|pause| !matches!(pause, PauseState::Asked(_)))
            .await;
        match known.as_deref() {
            Ok(PauseState::InForce(_)) => Ok(()),
            _ => Err(Denied::Resumed),
        }
    }

    fn ask_for_pause(&self, mode: PauseMode) -> Result<watch::Receiver<PauseState>, Denied> {
        let mut state = self.0.state.lock();
        refuse_unless_ready(&state)?;
        self.0.pause.send_replace(PauseState::Asked(mode));

        let mut aborted = Vec::new();
        if mode == PauseMode::Abort {
            state.aborts = true;
            aborted = std::mem::take(&mut state.arrived);
        }
        state.has_news = true;
        drop(state);

        self.0.changed.notify_all();
        for arrival in aborted {
            arrival.sender.abort();
        }
        Ok(self.0.pause.subscribe())
    }

    /// Ends the pause, if there is one.
    pub fn resume(&self) {
        let mut before = PauseState::None;
        self.0
            .change(|_| before = self.0.pause.send_replace(PauseState::None));
        if before != PauseState::None {
            tracing::info!(target: LOG_TARGET, "resumed: requests are answered again");
        }
    }

    /// True if a pause is in force.
    pub fn is_paused(&self) -> bool {
        matches!(*self.0.pause.borrow(), PauseState::InForce(_))
    }

    /// Returns the versions in use. The numbers of requests are as of the last pass.
    pub fn weights(&self) -> WeightInfo {
        let requests = self.0.metrics.requests_by_version();
        let weights = &self.0.state.lock().weights;
        let versions = weights.versions.state();
        WeightInfo {
            version: version_number(weights.newest),
            label: weights.label(),
            old: weights
                .old
                .map(|old| (version_number(old), weights.label_of(old))),
            requests,
            failure: versions.failure,
            publisher: versions.publisher,
        }
    }

    /// Sets the label of the newest version. Requests that have begun keep the label that they had.
    pub fn set_label(&self, label: &str) {
        let weights = &mut self.0.state.lock().weights;
        weights.labels.insert(weights.newest, label.into());
    }

    /// Loads the weights of the folder at `path` as the next version, waits until requests use it,
    /// and returns its number. If the future is dropped before the end, the weights are loaded
    /// nevertheless.
    ///
    /// # Errors
    ///
    /// If the server is starting or shutting down, other weights are being loaded, or these cannot
    /// be loaded.
    pub async fn load(&self, path: String) -> Result<u64, Denied> {
        let (reply, answer) = oneshot::channel();
        {
            let mut state = self.0.state.lock();
            refuse_unless_ready(&state)?;
            if state.weights.load.is_some() {
                return Err(Denied::Busy);
            }
            state.weights.load = Some(PendingLoad {
                path: Some(path),
                reply,
            });
            state.has_news = true;
        }

        self.0.changed.notify_all();
        answer
            .await
            .unwrap_or(Err(Denied::Refused(Refused::Draining)))
    }
}

fn refuse_unless_ready(state: &QueueState) -> Result<(), Refused> {
    match state.phase {
        ServerPhase::Ready => Ok(()),
        ServerPhase::Starting => Err(Refused::Starting),
        ServerPhase::Draining => Err(Refused::Draining),
        ServerPhase::Failed => Err(Refused::Failed),
    }
}

impl RequestArrivals {
    /// Returns all news since the last call. Does not block.
    pub(crate) fn news(&self) -> EngineNews {
        let state = &mut *self.0.state.lock();
        let pause = match *self.0.pause.borrow() {
            PauseState::None => None,
            PauseState::Asked(mode) | PauseState::InForce(mode) => Some(mode),
        };
        EngineNews {
            arrived: std::mem::take(&mut state.arrived),
            aborts: std::mem::take(&mut state.aborts),
            pause,
            load: state
                .weights
                .load
                .as_mut()
                .and_then(|load| load.path.take()),
        }
    }

    /// Records that a pause is in force, unless another one was requested since. `mode` is the mode
    /// of the pause.
    pub(crate) fn paused(&self, mode: PauseMode) {
        let state = self.0.state.lock();
        let is_paused = self.0.pause.send_if_modified(|pause| {
            let is_new = *pause == PauseState::Asked(mode) && !state.aborts;
            if is_new {
                *pause = PauseState::InForce(mode);
            }
            is_new
        });
        drop(state);
        if is_paused {
            tracing::info!(target: LOG_TARGET, "paused, in the mode {mode:?}: requests wait");
        }
    }

    /// Sets the state of the inference's versions, for [`RequestQueue::weights`].
    pub(crate) fn set_versions(&self, versions: WeightVersions) {
        self.0.state.lock().weights.versions = versions;
    }

    /// Sets the versions in use. Requests that begin from now on use `newest`.
    pub(crate) fn set_weights(&self, newest: u64, old: Option<u64>) {
        let weights = &mut self.0.state.lock().weights;
        weights.newest = newest;
        weights.old = old;
        weights
            .labels
            .retain(|version, _| *version == newest || Some(*version) == old);
    }

    /// Ends the current load of weights, with the new version or the reason for its failure.
    pub(crate) fn loaded(&self, result: Result<u64, Denied>) {
        let number = result.map(version_number);
        self.0.state.lock().weights.loaded(number);
    }

    /// Returns a handle that wakes the engine.
    pub(crate) fn waker(&self) -> Waker {
        Waker(self.0.clone())
    }

    /// True if a [`Waker`] was called since the last call of this function.
    pub(crate) fn is_woken(&self) -> bool {
        std::mem::take(&mut self.0.state.lock().is_woken)
    }
}

impl Drop for RequestArrivals {
    fn drop(&mut self) {
        self.0
            .state
            .lock()
            .weights
            .loaded(Err(Refused::Draining.into()));
        self.0.pause.send_replace(PauseState::None);
    }
}
