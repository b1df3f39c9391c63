//! Labels: the part of an operation in a pipeline. Messages, plans and traces show them.

use std::fmt;

use mpmd_proto::router::OpNote;
use serde::{Deserialize, Serialize};

/// The role of an operation in a pipeline step, with its stage and microbatch.
///
/// It has no effect on the computation. Processes may give the same operation different labels.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Label {
    /// The stage, from 0. For a move, the source stage.
    pub stage: u32,
    /// The microbatch, from 0. `None` if the operation is for all microbatches.
    pub microbatch: Option<u32>,
    /// The purpose of the operation in the pipeline.
    pub role: Role,
}

/// The purpose of an operation of a pipeline.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Role {
    /// Computes a forward pass.
    Forward,
    /// Computes the gradient of a stage's inputs.
    BackwardInput,
    /// Computes the gradient of a stage's parameters.
    BackwardWeight,
    /// Moves a stage's outputs to a later stage.
    SendForward,
    /// Moves the gradient of a stage's inputs to an earlier stage.
    SendBackward,
    /// Moves parameters to the shardings that kernels compute with.
    Gather,
    /// Adds up finished gradients, or moves them to the shardings that parameters are stored in.
    Reduce,
    /// Loads the inputs of a microbatch.
    Load,
    /// Computes the loss of a step.
    Loss,
    /// Updates the parameters.
    Update,
    /// Repeats a forward pass to recover the residuals that the first pass did not keep.
    Recompute,
    /// Computes or updates the form of its parameters that a stage's kernels work with.
    Prepare,
    /// Computes both gradients of a stage in one pass.
    Backward,
}

impl Role {
    const ALL: [Self; 13] = [
        Self::Forward,
        Self::BackwardInput,
        Self::BackwardWeight,
        Self::SendForward,
        Self::SendBackward,
        Self::Gather,
        Self::Reduce,
        Self::Load,
        Self::Loss,
        Self::Update,
        Self::Recompute,
        Self::Prepare,
        Self::Backward,
    ];

    /// Returns the role as text for messages, such as `input gradient`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::BackwardInput => "input gradient",
            Self::BackwardWeight => "weight gradient",
            Self::SendForward => "outputs on their way",
            Self::SendBackward => "input gradient on its way",
            Self::Gather => "parameters gathered",
            Self::Reduce => "gradients reduced",
            Self::Load => "input",
            Self::Loss => "loss",
            Self::Update => "update",
            Self::Recompute => "forward again",
            Self::Prepare => "parameters prepared",
            Self::Backward => "backward",
        }
    }
}

/// Bit positions in the 64-bit form of a label. It holds role, stage, and microbatch plus one.
const STAGE: u32 = 32;
const ROLE: u32 = 56;

impl Label {
    /// Packs the label into 64 bits. Keeps only the low 24 bits of the stage.
    #[doc(hidden)]
    pub fn word(self) -> u64 {
        let role = Role::ALL
            .iter()
            .position(|role| *role == self.role)
            .unwrap_or_default() as u64;
        let microbatch = self
            .microbatch
            .map_or(0, |microbatch| microbatch.wrapping_add(1));
        role << ROLE | u64::from(self.stage & 0xff_ffff) << STAGE | u64::from(microbatch)
    }

    /// Unpacks a label from its 64-bit form.
    #[doc(hidden)]
    pub fn of_word(word: u64) -> Self {
        let role = Role::ALL
            .get((word >> ROLE) as usize)
            .copied()
            .unwrap_or(Role::Forward);
        Self {
            stage: (word >> STAGE) as u32 & 0xff_ffff,
            microbatch: (word as u32).checked_sub(1),
            role,
        }
    }

    /// Converts the label to a note, which the router adds to its messages about the operation.
    #[doc(hidden)]
    pub fn note(self) -> OpNote {
        OpNote {
            word: self.word(),
            show: |word, f| write!(f, "{}", Self::of_word(word)),
        }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {}", self.stage)?;
        if let Some(microbatch) = self.microbatch {
            write!(f, ", microbatch {microbatch}")?;
        }
        write!(f, ", {}", self.role.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_survives_packing_into_a_word() {
        for role in Role::ALL {
            for (stage, microbatch) in [(0, None), (7, Some(0)), (1023, Some(4095))] {
                let label = Label {
                    stage,
                    microbatch,
                    role,
                };
                assert_eq!(Label::of_word(label.word()), label);
            }
        }
        let label = Label {
            stage: 3,
            microbatch: Some(7),
            role: Role::BackwardInput,
        };
        assert_eq!(label.to_string(), "stage 3, microbatch 7, input gradient");
        assert_eq!(
            Label {
                microbatch: None,
                role: Role::Reduce,
                ..label
            }
            .to_string(),
            "stage 3, gradients reduced"
        );
    }
}
