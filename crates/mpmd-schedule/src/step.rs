//! One step of a rank, as torch's text writes it.

use std::fmt;

use super::schedule::{Action, ActionKind};

/// One step of a rank: a computation, a send or a receive.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Step {
    /// The stage, from 0: the stage computed, the sender's for a send, the receiver's for a
    /// receive.
    pub stage: u32,
    /// The kind of step.
    pub kind: StepKind,
    /// The microbatch, from 0.
    pub microbatch: u32,
}

/// The kind of a step.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum StepKind {
    /// A computation of the schedule.
    Compute(ActionKind),
    /// Sends a stage's outputs to the next stage.
    SendForward,
    /// Receives the outputs of the previous stage.
    ReceiveForward,
    /// Sends the gradient of a stage's inputs to the previous stage.
    SendBackward,
    /// Receives the gradient of a stage's outputs from the next stage.
    ReceiveBackward,
}

impl Step {
    /// Converts an action of the schedule to a step.
    ///
    /// # Panics
    ///
    /// If the stage or the microbatch is 2^32 or above.
    pub fn of_action(action: Action) -> Self {
        let small =
            |number: usize| u32::try_from(number).expect("stages and microbatches below 2^32");
        Self {
            stage: small(action.stage),
            kind: StepKind::Compute(action.kind),
            microbatch: small(action.microbatch),
        }
    }

    /// Returns the action of the schedule that this step computes; `None` for a transfer.
    pub fn action(self) -> Option<Action> {
        let StepKind::Compute(kind) = self.kind else {
            return None;
        };
        Some(Action {
            stage: self.stage as usize,
            kind,
            microbatch: self.microbatch as usize,
        })
    }
}

impl fmt::Display for Step {
    /// Formats the step as in torch's text format: `2F0`, `2SEND_F0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = match self.kind {
            StepKind::Compute(_) => {
                return self.action().map_or(Ok(()), |action| write!(f, "{action}"));
            }
            StepKind::SendForward => "SEND_F",
            StepKind::ReceiveForward => "RECV_F",
            StepKind::SendBackward => "SEND_B",
            StepKind::ReceiveBackward => "RECV_B",
        };
        write!(f, "{}{letters}{}", self.stage, self.microbatch)
    }
}
