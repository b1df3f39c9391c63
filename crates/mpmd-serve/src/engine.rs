//! The engine: process 0 decides on the steps that every process issues (`serving.rs`).
//!
//! A decision is broadcast before its pass is issued, so all processes issue the same operations.
//! Process 0 decides on passes before earlier ones have ended; the others wait for decisions alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use mpmd::{Error, FailureKind, Result};
use mpmd_base::block::{Instant, now, since};
use mpmd_models::{
    Choices, Inference, PendingTimes, VersionsState, WeightVersions, next_of_folder, version_number,
};
use serde::{Deserialize, Serialize};

use crate::log_target::LOG_TARGET;
use crate::metrics::{EngineFigures, StageFigures};
use crate::queue::{Awaited, Denied, EngineNews, PauseMode, ReplySender, RequestArrivals, Waker};
use crate::request::{REASON_IN_LOG, ReplyEvent, TextRequest, reason};
use crate::scheduler::{Decision, Scheduler, SchedulerSizes};

/// Longest time between two steps. Shorter than any peer timeout, so that processes do not take an
/// idle server for one that hangs.
const IDLE: Duration = Duration::from_secs(1);
/// Time between two requests for the times of the stages.
const TIMES: Duration = Duration::from_secs(1);
/// Time between two checks whether all processes have read new weights.
const POLL: Duration = Duration::from_millis(50);
/// Largest cost per token of a pass, relative to the next smaller pass, at which the larger size
/// still pays off.
const WORTH: f64 = 0.9;

/// The next step, which all processes issue.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum ServerStep {
    Pass(Decision),
    /// Replace the caches by empty ones, since a pass has failed.
    Renew,
    /// Send the times of the stages to process 0.
    Times,
    /// Free the weights of a version.
    Retire(u64),
    /// Read the weights of the folder at this path as this version.
    Load(String, u64),
    /// Tell process 0 whether all processes have read the folder's weights.
    Poll,
    /// Do nothing, since there are no requests.
    Idle,
    End,
}

/// The engine of a server, on process 0: takes requests, decides steps, and answers clients.
pub struct Engine {
    scheduler: Scheduler,
    arrivals: RequestArrivals,
    clients: BTreeMap<u64, ReplySender>,
    /// The id of the next request.
    next: u64,
    /// The choices of the passes that have not ended, the oldest first.
    open: VecDeque<Choices>,
    sizes: SchedulerSizes,
    /// True once the number of tokens in a pass is known, and need not be measured.
    has_chunk: bool,
    passes: PassCounts,
    /// Number of lost processes that the job has replaced.
    recoveries: u64,
    stages: StageTotals,
    times: TimesRequest,
    pause: Option<PauseMode>,
    weights: WeightChanges,
    /// The reason why the program has failed.
    failed: Option<Arc<str>>,
}

/// Counts of passes since the start.
#[derive(Clone, Copy, Default)]
struct PassCounts {
    issued: u64,
    failed: u64,
}

/// Totals of the stages' times since the start of the server.
struct StageTotals {
    /// The last known figures of the present stages, since these were created.
    present: Vec<StageFigures>,
    /// The sums of the figures of all earlier stages, before recoveries and failed passes.
    earlier: Vec<StageFigures>,
}

/// The last request for the times of the stages.
struct TimesRequest {
    asked: Instant,
    /// The times that will arrive. `None` once they were read.
    answer: Option<PendingTimes>,
}

/// The state of changes from one version of the weights to the next.
struct WeightChanges {
    /// Time for which requests continue with an older version.
    grace: Duration,
    /// The time when the newest version began to compute requests.
    begun: Instant,
    /// The last value that was passed to [`WeightVersions::set_room`].
    has_room: bool,
    load: Option<FolderLoad>,
    polled: Instant,
    /// Number of versions that have begun to compute requests.
    versions: u64,
    /// Number of requests that were moved to a newer version and computed again.
    upgrades: u64,
}

/// The loading of a folder's weights for a client.
enum FolderLoad {
    Asked(String),
    /// All processes read the weights as this version.
    Reading(u64),
}

impl Engine {
    /// Creates an engine without requests, which takes them from `arrivals`.
    ///
    /// # Panics
    ///
    /// As [`Scheduler::new`].
    pub fn new(sizes: SchedulerSizes, arrivals: RequestArrivals) -> Self {
        let engine = Self {
            scheduler: Scheduler::new(sizes),
            arrivals,
            clients: BTreeMap::new(),
            next: 0,
            open: VecDeque::new(),
            sizes,
            has_chunk: true,
            passes: PassCounts::default(),
            recoveries: 0,
            stages: StageTotals {
                present: Vec::new(),
                earlier: vec![StageFigures::default(); sizes.lanes],
            },
            times: TimesRequest {
                asked: now(),
                answer: None,
            },
            pause: None,
            weights: WeightChanges {
                grace: Duration::MAX,
                begun: now(),
                has_room: false,
                load: None,
                polled: now(),
                versions: 0,
                upgrades: 0,
            },
            failed: None,
        };
        // The counters of the stages begin at 0.
        engine.report();
        engine
    }

    /// Sets that the number of tokens in a pass is measured at the start, instead of taken from the
    /// sizes. The engine takes the smallest size at which a token costs hardly more than at larger
    /// ones.
    #[must_use]
    pub fn measure_chunk(mut self) -> Self {
        self.has_chunk = false;
        self
    }

    /// Sets the time for which requests continue with an older version of the weights. Afterwards
    /// they are computed again on the newest version, from their tokens so far. By default there is
    /// no limit.
    #[must_use]
    pub fn grace(mut self, time: Duration) -> Self {
        self.weights.grace = time;
        self
    }

    /// Returns a handle that wakes the engine from any thread, so that it runs other work of the
    /// program: see [`Serving::turn`](crate::Serving::turn).
    pub fn waker(&self) -> Waker {
        self.arrivals.waker()
    }

    /// Records the reason why the program has failed. [`Engine::end`] tells it to clients, unless
    /// the engine works again in a later epoch.
    pub fn fail_with(&mut self, why: &Error) {
        self.failed = Some(format!("the server has failed: {}", reason(why)).into());
    }

    /// Fails all open requests, with the reason given to [`Engine::fail_with`] if there is one, and
    /// refuses new ones. Does nothing if the server is drained.
    pub fn end(self) {
        if self.arrivals.is_over() {
            return;
        }
        let unknown = || format!("the server has failed: {REASON_IN_LOG}").into();
        self.arrivals.fail(&self.failed.unwrap_or_else(unknown));
    }

    /// Returns the next step of all processes. Blocks while there is nothing to compute, and while
    /// enough passes are open.
    pub(crate) fn step(&mut self, inference: &Inference) -> Result<ServerStep> {
        loop {
            self.take_news(inference);
            if let Some(step) = self.change_weights(inference.versions()) {
                return Ok(step);
            }
            if let Some(decision) = self.decide() {
                self.passes.issued += 1;
                return Ok(ServerStep::Pass(decision));
            }

            if let Some(choices) = self.open.pop_front() {
                if let Some(step) = self.end_pass(&choices, inference)? {
                    return Ok(step);
                }
            } else if self.clients.is_empty() && self.arrivals.is_over() {
                return Ok(ServerStep::End);
            } else if !self.wait(inference.versions()) {
                self.read_times(inference)?;
                // So it is known without requests, too, that the stages answer.
                return Ok(if self.must_ask() {
                    ServerStep::Times
                } else {
                    ServerStep::Idle
                });
            }
        }
    }

    /// Waits for the oldest open pass, and sends its tokens to the clients. Returns the step that
    /// must follow, if any.
    fn end_pass(&mut self, choices: &Choices, inference: &Inference) -> Result<Option<ServerStep>> {
        self.arrivals.wait_for(Awaited::Choices);
        let read = inference.read(choices);
        self.arrivals.answered(Awaited::Choices);
        let choices = match read {
            Ok(choices) => choices.unwrap_or_default(),
            Err(why) if concerns_one_pass(&why) => {
                self.fail(&why, inference);
                return Ok(Some(ServerStep::Renew));
            }
            Err(why) => return Err(why),
        };

        for (id, event) in self.scheduler.end(&choices) {
            let is_last = !matches!(event, ReplyEvent::Token(_));
            if let Some(sender) = self.clients.get_mut(&id) {
                sender.send(event);
            }
            if is_last {
                self.clients.remove(&id);
            }
        }
        self.read_times(inference)?;
        self.report();
        Ok(self.must_ask().then_some(ServerStep::Times))
    }

    /// True if the times of the stages should be requested now.
    fn must_ask(&self) -> bool {
        self.times.answer.is_none() && since(self.times.asked) > TIMES
    }

    /// Records that a pass was issued. `choices` are its results.
    pub(crate) fn pass_issued(&mut self, choices: Choices) {
        self.open.push_back(choices);
    }

    /// Records that the times of the stages were requested.
    pub(crate) fn times_issued(&mut self, times: PendingTimes) {
        self.times = TimesRequest {
            asked: now(),
            answer: Some(times),
        };
        self.arrivals.wait_for(Awaited::Times);
    }

    /// Returns the next pass. `None` if enough passes are open, requests are paused, or nothing can
    /// be computed.
    fn decide(&mut self) -> Option<Decision> {
        let is_frozen = matches!(self.pause, Some(PauseMode::Abort | PauseMode::Keep));
        // One more than there are stages: none waits for a decision.
        if is_frozen || self.scheduler.open() > self.sizes.lanes {
            return None;
        }

        let decision = self.scheduler.decide();
        let has_begun = |id: &u64| self.scheduler.version(*id).is_some();
        let begun = self.clients.iter_mut().filter(|(id, _)| has_begun(id));
        begun.for_each(|(_, sender)| sender.start());
        decision
    }

    /// Blocks until the queue has news or a time limit is over. Returns false after the time limit,
    /// or if only a [`Waker`] was called.
    fn wait(&mut self, versions: &WeightVersions) -> bool {
        self.report();
        if let Some(mode) = self.pause {
            self.arrivals.paused(mode);
        }
        let has_news = self
            .arrivals
            .wait(if versions.is_loading() { POLL } else { IDLE });
        has_news && !self.arrivals.is_woken()
    }

    /// Starts a newly arrived version of the weights, and retires an older one. Returns the step
    /// for all processes that this needs, if any.
    fn change_weights(&mut self, versions: &WeightVersions) -> Option<ServerStep> {
        let state = versions.state();
        if self.scheduler.old().is_none() && state.newest != self.scheduler.newest() {
            self.scheduler.begin(state.newest);
            self.weights.begun = now();
            self.weights.versions += 1;
            self.set_room(versions, false);
            self.tell_weights();
            let version = version_number(state.newest);
            tracing::info!(
                target: LOG_TARGET,
                "version {version} of the weights computes new requests"
            );
        }

        let is_late = since(self.weights.begun) >= self.weights.grace;
        if is_late && self.scheduler.old().is_some() {
            for id in self.scheduler.upgrade() {
                self.weights.upgrades += 1;
                if let Some(sender) = self.clients.get(&id) {
                    sender.tell_version();
                }
            }
        }
        if let Some(version) = self.scheduler.retired() {
            self.tell_weights();
            return Some(ServerStep::Retire(version));
        }

        if let Some(step) = self.change_load(versions, &state) {
            return Some(step);
        }
        let is_reading = matches!(self.weights.load, Some(FolderLoad::Reading(_)));
        self.set_room(versions, self.scheduler.old().is_none() && !is_reading);
        if state.is_loading && since(self.weights.polled) >= POLL {
            self.weights.polled = now();
            return Some(ServerStep::Poll);
        }
        None
    }

    /// Starts to load a folder's weights for a client, or reports the result to the client. Returns
    /// the step for all processes that this needs, if any.
    fn change_load(
        &mut self,
        versions: &WeightVersions,
        state: &VersionsState,
    ) -> Option<ServerStep> {
        match self.weights.load.take() {
            Some(FolderLoad::Asked(path)) if self.scheduler.old().is_none() => {
                self.set_room(versions, false);
                let version = next_of_folder(state.newest);
                self.weights.load = Some(FolderLoad::Reading(version));
                return Some(ServerStep::Load(path, version));
            }
            Some(FolderLoad::Reading(version)) if self.scheduler.newest() == version => {
                self.arrivals.loaded(Ok(version));
            }
            Some(FolderLoad::Reading(version)) if !state.is_loading && state.newest != version => {
                let why = state.failure.clone();
                let why = why.unwrap_or_else(|| "the weights could not be read".to_owned());
                self.arrivals.loaded(Err(Denied::Weights(why)));
                // Some processes may have read them in full.
                return Some(ServerStep::Retire(version));
            }
            load => self.weights.load = load,
        }
        None
    }

    fn set_room(&mut self, versions: &WeightVersions, has_room: bool) {
        // A version that is on its way takes the room: only a change is told.
        if std::mem::replace(&mut self.weights.has_room, has_room) != has_room {
            versions.set_room(has_room);
        }
    }

    /// Publishes the versions in use to the queue, for clients and metrics.
    fn tell_weights(&self) {
        self.arrivals
            .set_weights(self.scheduler.newest(), self.scheduler.old());
        self.report();
    }

    /// Handles the failure of the oldest open pass. If the pass had a single request, that request
    /// fails. All other requests are computed again.
    fn fail(&mut self, why: &Error, inference: &Inference) {
        // No version may retire before the passes that compute by it have ended. Their choices are
        // forgotten.
        for choices in &self.open {
            _ = inference.read(choices);
        }
        tracing::error!("a pass has failed: {why}");

        let ended = self.scheduler.fail();
        if let Some(mut sender) = ended.and_then(|id| self.clients.remove(&id)) {
            sender.send(ReplyEvent::Failed(
                format!("the model has failed: {}", reason(why)).into(),
            ));
        }
        self.passes.failed += 1;
        self.forget();
    }

    /// Reads the times of the stages, if they have arrived.
    fn read_times(&mut self, inference: &Inference) -> Result<()> {
        let Some(answer) = &self.times.answer else {
            return Ok(());
        };
        let Some(times) = inference.read_times(answer)? else {
            return Ok(());
        };
        self.times.answer = None;
        self.arrivals.answered(Awaited::Times);

        let figures = times.iter().enumerate().map(|(stage, own)| StageFigures {
            busy: own.busy,
            handed_bytes: own.handed_bytes,
            handed: times
                .get(stage + 1)
                .map_or(Duration::ZERO, |next| own.until(next)),
        });
        self.stages.present = figures.collect();
        Ok(())
    }

    /// Records that the stages are lost. Until [`Engine::restart`] process 0 waits for those of the
    /// next epoch.
    pub(crate) fn lose_stages(&self) {
        self.arrivals.wait_for(Awaited::Stages);
    }

    /// Starts an epoch of the job. All sequences are computed again, since its stages have empty
    /// caches.
    pub(crate) fn restart(&mut self, epoch: u64, versions: &WeightVersions) {
        self.arrivals.set_versions(versions.clone());
        self.weights.has_room = versions.has_room();
        if self.weights.load.take().is_some() {
            let why = "a process was lost".to_owned();
            self.arrivals.loaded(Err(Denied::Weights(why)));
        }

        self.failed = None;
        self.has_chunk = true;
        self.scheduler.set_chunk(self.sizes.chunk);
        self.scheduler.restart();
        self.recoveries = epoch.saturating_sub(1);
        self.forget();
        if epoch > 1 {
            let open = self.clients.len();
            tracing::info!(
                target: LOG_TARGET,
                "epoch {epoch} of the job begins after the loss of a process: {open} open requests \
                 are computed again"
            );
        }
        self.arrivals.open();
    }

    /// Forgets open passes, and adds the figures of the stages to those of earlier stages.
    fn forget(&mut self) {
        self.open.clear();
        self.stages.earlier = self.stages.sums();
        self.stages.present.clear();
        self.times.answer = None;
        self.arrivals.forget_answers();
        self.report();
    }

    /// Records the measured time of a pass of `tokens` tokens; smaller passes come first. Returns
    /// true if larger passes need not be measured. `smaller` has the cost per token of the pass
    /// before.
    pub(crate) fn is_enough(
        &mut self,
        tokens: usize,
        time: Duration,
        smaller: &mut Option<f64>,
    ) -> bool {
        if self.has_chunk {
            return tokens >= self.sizes.chunk;
        }

        let cost = time.as_secs_f64() / tokens as f64;
        // With as many tokens of prompts as there can be texts.
        let least = 2 * self.sizes.sequences.div_ceil(self.sizes.lanes);
        let before = smaller.replace(cost);
        if self.sizes.chunk >= least && before.is_some_and(|before| cost > before * WORTH) {
            self.has_chunk = true;
        } else {
            self.sizes.chunk = tokens;
        }
        self.has_chunk
    }

    /// Takes news from the queue. Adds new requests, removes those of clients that have left, and
    /// ends those that a pause aborts.
    fn take_news(&mut self, inference: &Inference) {
        let gone = self.clients.iter().filter(|(_, sender)| sender.is_gone());
        let gone: Vec<u64> = gone.map(|(id, _)| *id).collect();
        for id in gone {
            self.scheduler.leave(id);
            self.clients.remove(&id);
        }

        let EngineNews {
            arrived,
            aborts,
            pause,
            load,
        } = self.arrivals.news();
        if aborts {
            for (id, sender) in std::mem::take(&mut self.clients) {
                self.scheduler.leave(id);
                sender.abort();
            }
        }

        self.pause = pause;
        self.scheduler.close(pause.is_some());
        if let Some(path) = load {
            self.weights.load = Some(FolderLoad::Asked(path));
        }

        for arrival in arrived {
            let request = arrival.request;
            let mut sender = arrival.sender;
            if let Err(why) = self.check(&request, inference) {
                sender.send(ReplyEvent::Failed(why.to_string().into()));
                continue;
            }
            self.scheduler.arrive(self.next, request);
            self.clients.insert(self.next, sender);
            self.next += 1;
        }
    }

    /// Returns an error if a pass could fail because of this request.
    fn check(
        &self,
        request: &TextRequest,
        inference: &Inference,
    ) -> std::result::Result<(), RequestFault> {
        let tokens = request.prompt.len();
        let most = self.sizes.positions;
        if tokens == 0 || tokens >= most || request.max_tokens == 0 {
            return Err(RequestFault::PromptLength {
                tokens,
                limit: most - 1,
            });
        }
        Ok(inference.check_tokens(&request.prompt)?)
    }

    fn report(&self) {
        let counts = self.scheduler.counts();
        let newest = self.scheduler.newest();
        let old = self.scheduler.old();
        let of = |version| self.scheduler.count(version);

        self.arrivals.report(EngineFigures {
            chunk: self.sizes.chunk,
            blocks: self.sizes.blocks,
            blocks_used: counts.blocks_used,
            prefix_tokens: counts.known_tokens,
            preemptions: counts.preemptions,
            passes: self.passes.issued,
            failed_passes: self.passes.failed,
            surplus_rows: counts.surplus_tokens,
            in_flight: self.scheduler.open(),
            recoveries: self.recoveries,
            version: version_number(newest),
            versions: self.weights.versions,
            upgrades: self.weights.upgrades,
            version_requests: [of(newest), old.map_or(0, of)],
            stages: self.stages.sums(),
        });
    }
}

impl StageTotals {
    /// Returns the figures of each stage since the start of the server.
    fn sums(&self) -> Vec<StageFigures> {
        let of = |stages: &[StageFigures], at: usize| stages.get(at).copied().unwrap_or_default();
        (0..self.present.len().max(self.earlier.len()))
            .map(|at| of(&self.present, at) + of(&self.earlier, at))
            .collect()
    }
}

/// Error: a pass with this request could fail.
#[derive(Debug, thiserror::Error)]
enum RequestFault {
    #[error("a prompt of {tokens} tokens: from 1 to {limit} have room")]
    PromptLength { tokens: usize, limit: usize },
    #[error(transparent)]
    Tokens(#[from] Error),
}

/// True if a pass failed by its own inputs, and all processes and connections still work.
fn concerns_one_pass(why: &Error) -> bool {
    let kind = why.failure().map(|failure| failure.kind);
    matches!(kind, Some(FailureKind::Kernel | FailureKind::Memory))
}
