//! The engine: every process issues the passes that process 0 decides.
//!
//! A decision is broadcast before its pass is issued, so all processes issue the same operations.
//! Process 0 decides on passes before earlier ones have ended; the others wait for decisions alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use mpmd::{Error, FailureKind, ProcessId, Program, Result};
use mpmd_base::block::{Instant, now, since};
use mpmd_models::{Choices, Inference, Times};
use serde::{Deserialize, Serialize};

use crate::metrics::{Figures, StageFigures};
use crate::queue::{Arrivals, Sender};
use crate::request::Event;
use crate::scheduler::{Decision, Scheduler, Sizes};

/// Longest time between two steps: shorter than any peer timeout, so that a server without requests
/// is not taken for one that hangs.
const IDLE: Duration = Duration::from_secs(1);
/// Time between two questions for the times of the stages.
const TIMES: Duration = Duration::from_secs(1);
/// A larger pass is worth its time if a token costs at most this share of what it costs in the next
/// smaller one.
const WORTH: f64 = 0.9;

/// The next step of all processes.
#[derive(Debug, Deserialize, Serialize)]
enum Step {
    Pass(Decision),
    /// New caches, since a pass has failed.
    Renew,
    /// Send the times of the stages.
    Times,
    /// Nothing, since there are no requests.
    Idle,
    End,
}

/// The requests of a server, on process 0.
pub struct Engine {
    scheduler: Scheduler,
    arrivals: Arrivals,
    clients: BTreeMap<u64, Sender>,
    /// The number of the next request.
    next: u64,
    /// The choices of passes that have not ended.
    open: VecDeque<Choices>,
    sizes: Sizes,
    /// False if the size of a pass is yet to be measured.
    has_chunk: bool,
    /// Number of passes so far, and of those that failed.
    passes: [u64; 2],
    /// Number of lost processes that were replaced.
    recoveries: u64,
    /// The times of the stages since they were made, as far as they are known, and before.
    stages: [Vec<StageFigures>; 2],
    /// The time of the last question for them, and the answer unless it was read.
    asked: (Instant, Option<Times>),
    /// Why the last call of [`run`] failed.
    pub(crate) failed: Option<Arc<str>>,
}

impl Engine {
    /// Creates an engine without requests.
    ///
    /// # Panics
    ///
    /// As [`Scheduler::new`].
    pub fn new(sizes: Sizes, arrivals: Arrivals) -> Self {
        Self {
            scheduler: Scheduler::new(sizes),
            arrivals,
            clients: BTreeMap::new(),
            next: 0,
            open: VecDeque::new(),
            sizes,
            has_chunk: true,
            passes: [0; 2],
            recoveries: 0,
            stages: [Vec::new(), Vec::new()],
            asked: (now(), None),
            failed: None,
        }
    }

    /// Has the number of tokens of a pass measured at the start, in place of that of the sizes: the
    /// smallest with which a token costs hardly more than with larger ones.
    #[must_use]
    pub fn measure_chunk(mut self) -> Self {
        self.has_chunk = false;
        self
    }

    /// Fails the open requests, if there are any, with the reason for which the job has ended.
    pub(crate) fn end(mut self) {
        let why = self.failed.clone().unwrap_or_else(|| "the server has ended".into());
        let waiting = self.arrivals.take().into_iter().map(|arrival| arrival.sender);
        let open = std::mem::take(&mut self.clients).into_values();
        open.chain(waiting).for_each(|mut sender| sender.send(Event::Failed(why.clone())));
    }

    /// Returns the next step of all processes. Blocks while there is nothing to do, and while
    /// enough passes are open.
    fn step(&mut self, inference: &Inference) -> Result<Step> {
        loop {
            self.take_arrivals();
            // One more than there are stages: none waits for a decision.
            if self.scheduler.open() <= self.sizes.lanes
                && let Some(decision) = self.scheduler.decide()
            {
                let started = |id: &u64| self.scheduler.version(*id).is_some();
                self.clients
                    .iter_mut()
                    .filter(|(id, _)| started(id))
                    .for_each(|(_, sender)| sender.start());
                self.passes[0] += 1;
                return Ok(Step::Pass(decision));
            }
            if let Some(choices) = self.open.pop_front() {
                let choices = match inference.read(&choices) {
                    Ok(choices) => choices.unwrap_or_default(),
                    Err(why) if concerns_one_pass(&why) => {
                        self.fail(&why);
                        return Ok(Step::Renew);
                    }
                    Err(why) => return Err(why),
                };
                for (id, event) in self.scheduler.end(&choices) {
                    let is_last = !matches!(event, Event::Token(_));
                    if let Some(sender) = self.clients.get_mut(&id) {
                        sender.send(event);
                    }
                    if is_last {
                        self.clients.remove(&id);
                    }
                }
                self.read_times(inference)?;
                self.report();
                if since(self.asked.0) > TIMES {
                    return Ok(Step::Times);
                }
            } else if self.clients.is_empty() && self.arrivals.is_over() {
                return Ok(Step::End);
            } else if !self.arrivals.wait(IDLE) {
                return Ok(Step::Idle);
            }
        }
    }

    /// Fails the requests of the oldest open pass. The others are computed again.
    fn fail(&mut self, why: &Error) {
        tracing::error!("a pass has failed, and its requests with it: {why}");
        let why: Arc<str> = format!("the model has failed: {why}").into();
        for id in self.scheduler.fail() {
            if let Some(mut sender) = self.clients.remove(&id) {
                sender.send(Event::Failed(why.clone()));
            }
        }
        self.passes[1] += 1;
        self.forget();
    }

    /// Reads the times of the stages, if they have come.
    fn read_times(&mut self, inference: &Inference) -> Result<()> {
        let Some(asked) = &self.asked.1 else { return Ok(()) };
        let Some(times) = inference.read_times(asked)? else { return Ok(()) };
        self.asked.1 = None;
        let figures = times.iter().enumerate().map(|(stage, own)| StageFigures {
            busy: own.busy,
            handed_bytes: own.handed_bytes,
            handed: times.get(stage + 1).map_or(Duration::ZERO, |next| own.until(next)),
        });
        self.stages[0] = figures.collect();
        Ok(())
    }

    /// Begins an epoch, whose stages know nothing.
    fn restart(&mut self, epoch: u64) {
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
        self.stages[1] = self.stages();
        self.stages[0].clear();
        self.asked.1 = None;
        self.report();
    }

    /// Takes the time of a pass of so many tokens, the smallest first. Returns true if larger ones
    /// are not worth their time.
    fn is_enough(&mut self, tokens: usize, time: Duration, smaller: &mut Option<f64>) -> bool {
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

    /// Returns the times of the stages since the start of the server.
    fn stages(&self) -> Vec<StageFigures> {
        let [now, before] = &self.stages;
        let of = |stages: &[StageFigures], at: usize| stages.get(at).copied().unwrap_or_default();
        (0..now.len().max(before.len())).map(|at| of(now, at) + of(before, at)).collect()
    }

    /// Takes new requests, and forgets those of clients that have left.
    fn take_arrivals(&mut self) {
        let gone = self.clients.iter().filter(|(_, sender)| sender.is_gone());
        let gone: Vec<u64> = gone.map(|(id, _)| *id).collect();
        for id in gone {
            self.scheduler.leave(id);
            self.clients.remove(&id);
        }
        for arrival in self.arrivals.take() {
            let (request, mut sender) = (arrival.request, arrival.sender);
            let (tokens, most) = (request.prompt.len(), self.sizes.positions);
            if tokens == 0 || tokens >= most || request.max_tokens == 0 {
                let why = format!("a prompt of {tokens} tokens: from 1 to {} have room", most - 1);
                sender.send(Event::Failed(why.into()));
                continue;
            }
            self.scheduler.arrive(self.next, request);
            self.clients.insert(self.next, sender);
            self.next += 1;
        }
    }

    fn report(&self) {
        let counts = self.scheduler.counts();
        self.arrivals.report(Figures {
            chunk: self.sizes.chunk,
            blocks: self.sizes.blocks,
            blocks_used: counts.blocks_used,
            prefix_tokens: counts.known_tokens,
            preemptions: counts.preemptions,
            passes: self.passes[0],
            failed_passes: self.passes[1],
            surplus_rows: counts.surplus_tokens,
            in_flight: self.scheduler.open(),
            recoveries: self.recoveries,
            stages: self.stages(),
        });
    }
}

/// True if a pass failed by its own inputs: the processes and the connections are as they were.
fn concerns_one_pass(why: &Error) -> bool {
    let kind = why.failure().map(|failure| failure.kind);
    matches!(kind, Some(FailureKind::Kernel | FailureKind::Memory))
}

/// Answers requests until the server has ended. Every process must call it, process 0 with the
/// engine. `lanes` is the number of stages.
///
/// # Errors
///
/// If the weights cannot be read, or another process is lost. If [`Inference::owner`] is not
/// process 0. A pass that fails ends its own requests alone.
pub fn run(
    p: &mut Program,
    inference: &mut Inference,
    lanes: usize,
    mut engine: Option<&mut Engine>,
) -> Result<()> {
    if inference.owner() != ProcessId(0) {
        return Err(Error::kernel("choices are not read on process 0, which takes the requests"));
    }
    let mut cost = None;
    inference.warm_up(p, |tokens, time| {
        engine.as_deref_mut().is_none_or(|engine| engine.is_enough(tokens, time, &mut cost))
    })?;
    // The choices of each lane's last pass.
    let mut last: Vec<Option<Choices>> = vec![None; lanes];
    if let Some(engine) = &mut engine {
        engine.restart(p.epoch());
    }
    loop {
        let decide = || match &mut engine {
            Some(engine) => engine.step(inference),
            None => Ok(Step::End),
        };
        match p.broadcast_value(ProcessId(0), Step::End, decide)? {
            Step::Pass(Decision { lane, pass }) => {
                let last = &mut last[lane as usize];
                let choices = inference.pass(p, &pass, last.as_ref())?;
                if let Some(engine) = &mut engine {
                    engine.open.push_back(choices.clone());
                }
                *last = Some(choices);
            }
            Step::Renew => {
                last.fill(None);
                inference.renew(p)?;
            }
            Step::Times => {
                let times = inference.times(p)?;
                if let Some(engine) = &mut engine {
                    engine.asked = (now(), Some(times));
                }
            }
            Step::Idle => {}
            Step::End => return Ok(()),
        }
    }
}
