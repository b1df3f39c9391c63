//! The engine: every process issues the passes that process 0 decides.
//!
//! A decision is broadcast before its pass is issued, so all processes issue the same operations.
//! Process 0 decides on passes before earlier ones have ended; the others wait for decisions alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use mpmd::{Error, ProcessId, Program, Result};
use mpmd_models::{Choices, Inference};
use serde::{Deserialize, Serialize};

use crate::metrics::Figures;
use crate::queue::{Arrivals, Sender};
use crate::request::Event;
use crate::scheduler::{Decision, Scheduler, Sizes};

/// Longest time between two steps: shorter than any peer timeout, so that a server without requests
/// is not taken for one that hangs.
const IDLE: Duration = Duration::from_secs(1);

/// The next step of all processes.
#[derive(Debug, Deserialize, Serialize)]
enum Step {
    Pass(Decision),
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
    /// Number of passes so far.
    passes: u64,
    /// Number of lost processes that were replaced.
    recoveries: u64,
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
            passes: 0,
            recoveries: 0,
            failed: None,
        }
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
                let started = |id: &u64| self.scheduler.is_running(*id);
                self.clients
                    .iter_mut()
                    .filter(|(id, _)| started(id))
                    .for_each(|(_, sender)| sender.start());
                self.passes += 1;
                return Ok(Step::Pass(decision));
            }
            if let Some(choices) = self.open.pop_front() {
                let choices = inference.read(&choices)?.unwrap_or_default();
                for (id, event) in self.scheduler.end(&choices) {
                    let is_last = !matches!(event, Event::Token(_));
                    if let Some(sender) = self.clients.get_mut(&id) {
                        sender.send(event);
                    }
                    if is_last {
                        self.clients.remove(&id);
                    }
                }
                self.report();
            } else if self.clients.is_empty() && self.arrivals.is_over() {
                return Ok(Step::End);
            } else if !self.arrivals.wait(IDLE) {
                return Ok(Step::Idle);
            }
        }
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
            blocks: self.sizes.blocks,
            blocks_used: counts.blocks_used,
            prefix_tokens: counts.known_tokens,
            preemptions: counts.preemptions,
            passes: self.passes,
            surplus_rows: counts.surplus_tokens,
            in_flight: self.scheduler.open(),
            recoveries: self.recoveries,
            ..Figures::default()
        });
    }
}

/// Answers requests until the server has ended. Every process must call it, process 0 with the
/// engine. `lanes` is the number of stages.
///
/// # Errors
///
/// If a pass fails, or another process does. If process 0 has no device of the first stage.
pub fn run(
    p: &mut Program,
    inference: &mut Inference,
    lanes: usize,
    mut engine: Option<&mut Engine>,
) -> Result<()> {
    if inference.owner() != ProcessId(0) {
        return Err(Error::kernel("the first stage is not on process 0, which takes the requests"));
    }
    inference.warm_up(p)?;
    // The choices of each lane's last pass.
    let mut last: Vec<Option<Choices>> = vec![None; lanes];
    if let Some(engine) = &mut engine {
        engine.scheduler.restart();
        engine.open.clear();
        engine.recoveries = p.epoch().saturating_sub(1);
        engine.report();
        engine.arrivals.open();
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
            Step::Idle => {}
            Step::End => return Ok(()),
        }
    }
}
