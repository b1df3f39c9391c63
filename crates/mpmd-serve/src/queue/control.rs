//! The control of a running server: pauses, and the versions of the weights.

use std::collections::BTreeMap;
use std::sync::Arc;

use mpmd_models::{PublisherState, WeightVersions, version_number};
use thiserror::Error;
use tokio::sync::{oneshot, watch};

use super::{
    QueueShared, QueueState, Refused, RequestArrival, RequestArrivals, RequestQueue, ServerPhase,
};

/// The requests that a pause stops.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PauseMode {
    /// All open requests end at once with the tokens that they have.
    Abort,
    /// Requests that have begun are answered to their ends.
    Wait,
    /// All requests stay as they are, and go on after the pause.
    Keep,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum PauseState {
    #[default]
    None,
    Asked(PauseMode),
    InForce(PauseMode),
}

/// The reason why the server refuses a pause or a change of weights.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum Denied {
    /// The server starts or ends.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The pause has ended before it was in force.
    #[error("the pause has ended before it was in force")]
    Resumed,
    /// Other weights are being loaded.
    #[error("other weights are being loaded: try again later")]
    Busy,
    /// The weights were not taken, for this reason.
    #[error("{0}")]
    Weights(String),
}

/// The versions of the weights that compute requests.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightInfo {
    /// The version of requests that begin.
    pub version: u64,
    /// The label of this version.
    pub label: Arc<str>,
    /// An older version that requests still have, and its label.
    pub old: Option<(u64, Arc<str>)>,
    /// Number of requests that have the version, and the older one.
    pub requests: [usize; 2],
    /// The reason why the last version was refused.
    pub failure: Option<String>,
    /// The state of the link to a publisher, if the weights are subscribed to.
    pub publisher: Option<PublisherState>,
}

/// The weights of a server.
#[derive(Default)]
pub(super) struct ServedWeights {
    newest: u64,
    old: Option<u64>,
    /// Labels that clients have set.
    labels: BTreeMap<u64, Arc<str>>,
    /// The source of versions.
    versions: WeightVersions,
    load: Option<PendingLoad>,
}

/// Weights of a folder that are being loaded.
struct PendingLoad {
    /// `None` once the engine has taken it.
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

    /// Ends the loading, if there is one.
    pub(super) fn loaded(&mut self, result: Result<u64, Denied>) {
        if let Some(load) = self.load.take() {
            // An error says that the client has left.
            _ = load.reply.send(result);
        }
    }
}

/// The changes since the engine asked last.
pub(crate) struct EngineNews {
    /// The new requests, in their order.
    pub(crate) arrived: Vec<RequestArrival>,
    /// True if all earlier requests are to be aborted.
    pub(crate) aborts: bool,
    /// The present pause.
    pub(crate) pause: Option<PauseMode>,
    /// The folder of weights that are to be loaded.
    pub(crate) load: Option<String>,
}

/// Wakes an idle engine, which then asks for other work of its program. Clones wake the same
/// engine.
#[derive(Clone)]
pub struct Waker(Arc<QueueShared>);

impl Waker {
    /// Wakes the engine. May be called from any thread. Does not block.
    pub fn wake(&self) {
        self.0.change(|state| state.is_woken = true);
    }
}

impl RequestQueue {
    /// Pauses the server, and waits until the pause is in force. If the future is dropped before,
    /// the server pauses nevertheless. Requests are taken into the waiting line meanwhile.
    ///
    /// # Errors
    ///
    /// If the server starts or ends, or [`resume`](Self::resume) was called meanwhile.
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

    /// Ends a pause, if there is one.
    pub fn resume(&self) {
        self.0
            .change(|_| _ = self.0.pause.send_replace(PauseState::None));
    }

    /// True if a pause is in force.
    pub fn is_paused(&self) -> bool {
        matches!(*self.0.pause.borrow(), PauseState::InForce(_))
    }

    /// Returns the versions of the weights. The numbers of requests are those of the last pass.
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

    /// Sets the label of the newest version of the weights. Requests that have begun keep theirs.
    pub fn set_label(&self, label: &str) {
        let weights = &mut self.0.state.lock().weights;
        weights.labels.insert(weights.newest, label.into());
    }

    /// Loads the weights of a folder as the next version, and waits until it is in use.
    /// Returns its number. If the future is dropped before, they are loaded nevertheless.
    ///
    /// # Errors
    ///
    /// If the server starts or ends, other weights are being loaded, or these cannot be.
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
    }
}

impl RequestArrivals {
    /// Returns the requests, aborts, pause and load of weights since the last call. Does not block.
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

    /// Says that a pause is in force, unless another one has been asked for since.
    pub(crate) fn paused(&self, mode: PauseMode) {
        let state = self.0.state.lock();
        self.0.pause.send_if_modified(|pause| {
            let is_new = *pause == PauseState::Asked(mode) && !state.aborts;
            if is_new {
                *pause = PauseState::InForce(mode);
            }
            is_new
        });
    }

    /// Sets the source of versions.
    pub(crate) fn set_versions(&self, versions: WeightVersions) {
        self.0.state.lock().weights.versions = versions;
    }

    /// Sets the versions in use. Requests that start from now on have the newest.
    pub(crate) fn set_weights(&self, newest: u64, old: Option<u64>) {
        let weights = &mut self.0.state.lock().weights;
        weights.newest = newest;
        weights.old = old;
        weights
            .labels
            .retain(|version, _| *version == newest || Some(*version) == old);
    }

    /// Ends the loading of weights, with the version or the reason why there is none.
    pub(crate) fn loaded(&self, result: Result<u64, Denied>) {
        let number = result.map(version_number);
        self.0.state.lock().weights.loaded(number);
    }

    /// Returns the way to wake the engine.
    pub(crate) fn waker(&self) -> Waker {
        Waker(self.0.clone())
    }

    /// True if a [`Waker`] has been called since the last call.
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
