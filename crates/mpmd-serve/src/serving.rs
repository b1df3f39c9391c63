//! The loop of all processes: each issues the steps that process 0 decides.

use mpmd::{Error, ProcessId, Program, Result};
use mpmd_models::{Choices, Inference};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::engine::{Engine, ServerStep};
use crate::scheduler::Decision;

/// Runs a server inside the loop of a program.
///
/// Every process calls [`turn`](Self::turn) in a loop. Between two calls the program may issue
/// other work, the same on all processes. [`ServingTurn::Other`] tells all processes which work.
pub struct Serving<'a> {
    inference: &'a mut Inference,
    engine: Option<&'a mut Engine>,
    /// The choices of each lane's last pass. `None` before the first one.
    last: Vec<Option<Choices>>,
}

/// The result of a turn, equal on all processes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ServingTurn<T> {
    /// The next step of the server was issued. The step may have been to do nothing.
    Served,
    /// The work that `other` returned on process 0.
    Other(T),
    /// The server has ended. Do not call [`Serving::turn`] again.
    Ended,
}

/// The decision that process 0 broadcasts.
#[derive(Deserialize, Serialize)]
enum NextStep<T> {
    Step(ServerStep),
    Other(T),
}

impl<'a> Serving<'a> {
    /// Warms up the inference with passes of each size, and then takes requests. Every process must
    /// call it. `engine` is `Some` on process 0 only. `lanes` is the number of stages.
    ///
    /// # Errors
    ///
    /// If the weights cannot be read, or another process is lost. If [`Inference::owner`] is not
    /// process 0.
    pub fn start(
        p: &mut Program,
        inference: &'a mut Inference,
        lanes: usize,
        mut engine: Option<&'a mut Engine>,
    ) -> Result<Self> {
        if inference.owner() != ProcessId(0) {
            return Err(Error::kernel(
                "choices are not read on process 0, which takes the requests",
            ));
        }

        let mut cost = None;
        inference.warm_up(p, |tokens, time| {
            engine
                .as_deref_mut()
                .is_none_or(|engine| engine.is_enough(tokens, time, &mut cost))
        })?;
        if let Some(engine) = &mut engine {
            engine.restart(p.epoch(), inference.versions());
        }
        Ok(Self {
            inference,
            engine,
            last: vec![None; lanes],
        })
    }

    /// Returns the inference that computes the requests.
    pub fn inference(&mut self) -> &mut Inference {
        self.inference
    }

    /// Issues the next step of the server. Every process must call it.
    ///
    /// Process 0 first calls `other`. If it returns work, the turn issues no step and returns this
    /// work on every process. A program that always has work must leave some turns to the server.
    ///
    /// Process 0 blocks while there is neither work nor a step, for a second at most. A
    /// [`Waker`](crate::Waker) ends that wait at once. The other processes block until process 0
    /// has decided.
    ///
    /// # Errors
    ///
    /// If another process is lost. A failed pass is no error: its requests are computed again, each
    /// alone. A request whose pass fails alone is ended.
    pub fn turn<T: Serialize + DeserializeOwned>(
        &mut self,
        p: &mut Program,
        other: impl FnOnce() -> Option<T>,
    ) -> Result<ServingTurn<T>> {
        let turned = self.take_turn(p, other);
        if turned.is_err()
            && let Some(engine) = &self.engine
        {
            engine.lose_stages();
        }
        turned
    }

    fn take_turn<T: Serialize + DeserializeOwned>(
        &mut self,
        p: &mut Program,
        other: impl FnOnce() -> Option<T>,
    ) -> Result<ServingTurn<T>> {
        let inference = &*self.inference;
        let engine = &mut self.engine;
        let decide = || {
            let Some(engine) = engine else {
                return Ok(NextStep::Step(ServerStep::End));
            };
            match other() {
                Some(work) => Ok(NextStep::Other(work)),
                None => engine.step(inference).map(NextStep::Step),
            }
        };
        let end = NextStep::Step(ServerStep::End);

        match p.broadcast_value(ProcessId(0), end, decide)? {
            NextStep::Other(work) => Ok(ServingTurn::Other(work)),
            NextStep::Step(ServerStep::End) => Ok(ServingTurn::Ended),
            NextStep::Step(step) => {
                self.issue(p, step)?;
                Ok(ServingTurn::Served)
            }
        }
    }

    /// Issues a step. On process 0 the engine gets the pending results.
    fn issue(&mut self, p: &mut Program, step: ServerStep) -> Result<()> {
        let inference = &mut *self.inference;
        match step {
            ServerStep::Pass(Decision { lane, pass }) => {
                let last = &mut self.last[lane as usize];
                let choices = inference.pass(p, &pass, last.as_ref())?;
                if let Some(engine) = &mut self.engine {
                    engine.pass_issued(choices.clone());
                }
                *last = Some(choices);
            }
            ServerStep::Renew => {
                self.last.fill(None);
                inference.renew(p)?;
            }
            ServerStep::Times => {
                let times = inference.times(p)?;
                if let Some(engine) = &mut self.engine {
                    engine.times_issued(times);
                }
            }
            ServerStep::Retire(version) => inference.retire(version),
            ServerStep::Load(path, version) => inference.load_weights(p, path.as_ref(), version),
            ServerStep::Poll => inference.poll(p)?,
            ServerStep::Idle | ServerStep::End => {}
        }
        Ok(())
    }
}

/// Answers requests until the server has ended. Every process must call it. `engine` is `Some` on
/// process 0 only. `lanes` is the number of stages.
///
/// # Errors
///
/// As for [`Serving::start`] and [`Serving::turn`].
pub fn run(
    p: &mut Program,
    inference: &mut Inference,
    lanes: usize,
    engine: Option<&mut Engine>,
) -> Result<()> {
    let mut serving = Serving::start(p, inference, lanes, engine)?;
    while serving.turn(p, || None::<()>)? != ServingTurn::Ended {}
    Ok(())
}
