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

use crate::metrics::{EngineFigures, StageFigures};
use crate::queue::{Awaited, Denied, EngineNews, PauseMode, ReplySender, RequestArrivals, Waker};
use crate::request::{ReplyEvent, TextRequest, reason};
use crate::scheduler::{Decision, Scheduler, SchedulerSizes};

/// Longest time between two steps: shorter than any peer timeout, so that a server without requests
/// is not taken for one that hangs.
const IDLE: Duration = Duration::from_secs(1);
/// Time between two questions for the times of the stages.
const TIMES: Duration = Duration::from_secs(1);
/// Time between two questions whether all processes have read new weights.
const POLL: Duration = Duration::from_millis(50);
/// A larger pass is worth its time if its cost per token is at most this share of the next smaller
/// pass's.
const WORTH: f64 = 0.9;

/// The next step of all processes.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum ServerStep {
    Pass(Decision),
    /// New caches, since a pass has failed.
    Renew,
    /// Send the times of the stages.
    Times,
    /// Forget a version of the weights.
    Retire(u64),
    /// Read the weights of a folder as this version.
    Load(String, u64),
    /// Tell process 0 whether these have been read.
    Poll,
    /// Nothing, since there are no requests.
    Idle,
    End,
}

/// The requests of a server, on process 0.
pub struct Engine {
    scheduler: Scheduler,
    arrivals: RequestArrivals,
    clients: BTreeMap<u64, ReplySender>,
    /// The number of the next request.
    next: u64,
    /// The choices of passes that have not ended.
    open: VecDeque<Choices>,
    sizes: SchedulerSizes,
    /// False if the size of a pass is yet to be measured.
    has_chunk: bool,
    passes: PassCounts,
    /// Number of lost processes that were replaced.
    recoveries: u64,
    stages: StageTotals,
    times: TimesRequest,
    pause: Option<PauseMode>,
    weights: WeightChanges,
    /// Why the last call of [`run`](crate::run) failed.
    failed: Option<Arc<str>>,
}

/// Numbers of passes so far.
#[derive(Clone, Copy, Default)]
struct PassCounts {
    issued: u64,
    failed: u64,
}

/// The times of the stages.
#[derive(Default)]
struct StageTotals {
    /// Since the stages were made, as far as they are known.
    present: Vec<StageFigures>,
    /// Of the stages before those.
    earlier: Vec<StageFigures>,
}

/// The last question for the times of the stages.
struct TimesRequest {
    asked: Instant,
    /// The answer, unless it was read.
    answer: Option<PendingTimes>,
}

/// The changes of the weights.
struct WeightChanges {
    /// Time for which requests go on with an older version.
    grace: Duration,
    /// The time when the newest version began.
    begun: Instant,
    /// The last value of [`WeightVersions::has_room`] that was set.
    has_room: bool,
    load: Option<FolderLoad>,
    polled: Instant,
    /// Number of versions that have begun.
    versions: u64,
    /// Number of requests that were computed again on a newer version.
    upgrades: u64,
}

/// The weights of a folder that a client wants.
enum FolderLoad {
    Asked(String),
    /// They are being read as this version.
    Reading(u64),
}

impl Engine {
    /// Creates an engine without requests.
    ///
    /// # Panics
    ///
    /// As [`Scheduler::new`].
    pub fn new(sizes: SchedulerSizes, arrivals: RequestArrivals) -> Self {
        Self {
            scheduler: Scheduler::new(sizes),
            arrivals,
            clients: BTreeMap::new(),
            next: 0,
            open: VecDeque::new(),
            sizes,
            has_chunk: true,
            passes: PassCounts::default(),
            recoveries: 0,
            stages: StageTotals::default(),
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
        }
    }

    /// Measures the number of tokens of a pass at the start, in place of that of the sizes: the
    /// smallest with which a token costs hardly more than with larger ones.
    #[must_use]
    pub fn measure_chunk(mut self) -> Self {
        self.has_chunk = false;
        self
    }

    /// Sets the time for which requests go on with an older version of the weights. Then they are
    /// computed again on the newest, from their tokens so far. By default there is no end.
    #[must_use]
    pub fn grace(mut self, time: Duration) -> Self {
        self.weights.grace = time;
        self
    }

    /// Returns the way to wake the engine from any thread, for other work of its program: see
    /// [`Serving::turn`](crate::Serving::turn).
    pub fn waker(&self) -> Waker {
        self.arrivals.waker()
    }

    /// Notes the reason for which the last call of [`run`](crate::run) failed.
    pub fn fail_with(&mut self, why: &Error) {
        self.failed = Some(format!("the server has failed: {}", reason(why)).into());
    }

    /// Fails the open requests, if there are any, with the reason for which the job has ended.
    pub fn end(mut self) {
        let why = self
            .failed
            .clone()
            .unwrap_or_else(|| "the server has ended".into());
        let waiting = self
            .arrivals
            .take()
            .into_iter()
            .map(|arrival| arrival.sender);
        let open = std::mem::take(&mut self.clients).into_values();

        for mut sender in open.chain(waiting) {
            sender.send(ReplyEvent::Failed(why.clone()));
        }
    }

    /// Returns the next step of all processes. Blocks while there is nothing to do, and while
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
    /// has to follow.
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

    /// True if it is time to ask for the times of the stages.
    fn must_ask(&self) -> bool {
        self.times.answer.is_none() && since(self.times.asked) > TIMES
    }

    /// Notes that a pass was issued.
    pub(crate) fn pass_issued(&mut self, choices: Choices) {
        self.open.push_back(choices);
    }

    /// Notes that the times of the stages have been asked for.
    pub(crate) fn times_issued(&mut self, times: PendingTimes) {
        self.times = TimesRequest {
            asked: now(),
            answer: Some(times),
        };
        self.arrivals.wait_for(Awaited::Times);
    }

    /// Decides on the next pass, unless enough are open or the requests are paused.
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

    /// Blocks until there are news or a time limit is over, since there is nothing to compute.
    /// Returns false if there are no news for the engine.
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

    /// Begins a version of the weights that has come, and ends an older one. Returns the step that
    /// it takes.
    fn change_weights(&mut self, versions: &WeightVersions) -> Option<ServerStep> {
        let state = versions.state();
        if self.scheduler.old().is_none() && state.newest != self.scheduler.newest() {
            self.scheduler.begin(state.newest);
            self.weights.begun = now();
            self.weights.versions += 1;
            self.set_room(versions, false);
            self.tell_weights();
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

    /// Begins to load the weights of a folder that a client wants, or ends the loading. Returns the
    /// step that it takes.
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

    /// Tells the clients the versions in use.
    fn tell_weights(&self) {
        self.arrivals
            .set_weights(self.scheduler.newest(), self.scheduler.old());
        self.report();
    }

    /// Takes the failure of the oldest open pass. A request that was alone in it fails. All others
    /// are computed again.
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

    /// Reads the times of the stages, if they have come.
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

    /// Begins an epoch. Its stages know no sequence.
    pub(crate) fn restart(&mut self, epoch: u64, versions: &WeightVersions) {
        self.arrivals.set_versions(versions.clone());
        self.weights.has_room = versions.has_room();
        if self.weights.load.take().is_some() {
            let why = "a process was lost".to_owned();
            self.arrivals.loaded(Err(Denied::Weights(why)));
        }

        self.has_chunk = true;
        self.scheduler.set_chunk(self.sizes.chunk);
        self.scheduler.restart();
        self.recoveries = epoch.saturating_sub(1);
        self.forget();
        self.arrivals.open();
    }

    /// Forgets open passes. The times of stages that are made anew begin at zero.
    fn forget(&mut self) {
        self.open.clear();
        self.stages.earlier = self.stages.sums();
        self.stages.present.clear();
        self.times.answer = None;
        self.arrivals.forget_answers();
        self.report();
    }

    /// Takes the time of a pass of so many tokens, the smallest first. Returns true if larger ones
    /// are not worth their time.
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

    /// Takes new requests, forgets those of clients that have left, and ends those that a pause
    /// aborts.
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

    /// Checks all conditions of a request on which a pass with it could fail.
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
    /// Returns the times of the stages since the start of the server.
    fn sums(&self) -> Vec<StageFigures> {
        let of = |stages: &[StageFigures], at: usize| stages.get(at).copied().unwrap_or_default();
        (0..self.present.len().max(self.earlier.len()))
            .map(|at| of(&self.present, at) + of(&self.earlier, at))
            .collect()
    }
}

/// A reason why a pass with a request could fail.
#[derive(Debug, thiserror::Error)]
enum RequestFault {
    #[error("a prompt of {tokens} tokens: from 1 to {limit} have room")]
    PromptLength { tokens: usize, limit: usize },
    #[error(transparent)]
    Tokens(#[from] Error),
}

/// True if a pass failed by its own inputs: the processes and the connections are as they were.
fn concerns_one_pass(why: &Error) -> bool {
    let kind = why.failure().map(|failure| failure.kind);
    matches!(kind, Some(FailureKind::Kernel | FailureKind::Memory))
}
