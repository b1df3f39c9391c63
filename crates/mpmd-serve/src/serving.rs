//! The loop of all processes: each issues the steps that process 0 decides.

use mpmd::{Error, ProcessId, Program, Result};
use mpmd_models::{Choices, Inference};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::engine::{Engine, ServerStep};
use crate::scheduler::Decision;

/// A server in a loop of its program.
///
/// Every process calls [`turn`](Self::turn) again and again. Between two calls the program may
/// issue other work, if all processes issue the same: they agree on it by
/// [`ServingTurn::Other`].
pub struct Serving<'a> {
    inference: &'a mut Inference,
    engine: Option<&'a mut Engine>,
    /// The choices of each lane's last pass.
    last: Vec<Option<Choices>>,
}

/// The result of a turn, on all processes the same.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ServingTurn<T> {
    /// A step of the server was issued, or there was none.
    Served,
    /// The work that process 0 gave.
    Other(T),
    /// The server has ended. Nothing follows.
    Ended,
}

/// The decision of process 0.
#[derive(Deserialize, Serialize)]
enum NextStep<T> {
    Step(ServerStep),
    Other(T),
}

impl<'a> Serving<'a> {
    /// Computes passes of each form, and takes requests from now on. Every process must call it,
    /// process 0 with the engine. `lanes` is the number of stages.
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

    /// Returns the model.
    pub fn inference(&mut self) -> &mut Inference {
        self.inference
    }

    /// Issues the next step of the server. Every process must call it.
    ///
    /// Process 0 first asks `other` for other work of the program. If there is some, it comes back
    /// on every process in place of a step: a program that always has work must leave turns to the
    /// server. Process 0 blocks while there is neither a step nor other
    /// work, for a second at most: a [`Waker`](crate::Waker) ends that at once. The other
    /// processes block until process 0 has decided.
    ///
    /// # Errors
    ///
    /// If another process is lost. A pass that fails is no error: its requests are computed again,
    /// each alone, and one that fails alone ends.
    pub fn turn<T: Serialize + DeserializeOwned>(
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

    /// Issues a step. On process 0 the engine gets its results.
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

/// Answers requests until the server has ended. Every process must call it, process 0 with the
/// engine. `lanes` is the number of stages.
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
