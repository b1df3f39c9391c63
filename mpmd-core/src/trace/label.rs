//! What an operation is for, in a pipeline: said in messages, plans and traces.

use std::fmt;

use mpmd_transport::router::Note;
use serde::{Deserialize, Serialize};

/// Which part of a pipeline step an operation belongs to: stage, microbatch, and what for.
///
/// Says nothing about what is computed, and is not compared between processes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Label {
    /// The stage, from 0. Of a move the stage that gives.
    pub stage: u32,
    /// The microbatch, from 0; `None` where it is for all of them.
    pub microbatch: Option<u32>,
    /// What for.
    pub role: Role,
}

/// What an operation of a pipeline is for.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Role {
    /// A forward pass.
    Forward,
    /// The gradient of a stage's inputs.
    BackwardInput,
    /// The gradient of a stage's parameters.
    BackwardWeight,
    /// A stage's outputs go to a later stage.
    SendForward,
    /// The gradient of a stage's inputs goes to an earlier stage.
    SendBackward,
    /// Parameters are put to the shardings that kernels compute with.
    Gather,
    /// Finished gradients are put to the shardings that parameters are stored in, or added up.
    Reduce,
    /// What a microbatch brings comes in.
    Load,
    /// The loss of a step.
    Loss,
    /// Parameters are updated.
    Update,
    /// A forward pass once more, for the residuals that the first one did not keep.
    Recompute,
}

impl Role {
    const ALL: [Self; 11] = [
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
    ];

    /// In words.
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
        }
    }
}

/// Bits of a label as one word: role, stage, microbatch plus one.
const STAGE: u32 = 32;
const ROLE: u32 = 56;

impl Label {
    /// As one word, for what keeps many. Stages from 2^24 on are cut off.
    pub(crate) fn word(self) -> u64 {
        let role = Role::ALL.iter().position(|role| *role == self.role).unwrap_or_default() as u64;
        let microbatch = self.microbatch.map_or(0, |microbatch| microbatch.wrapping_add(1));
        role << ROLE | u64::from(self.stage & 0xff_ffff) << STAGE | u64::from(microbatch)
    }

    /// The label of a word.
    pub(crate) fn of_word(word: u64) -> Self {
        let role = Role::ALL.get((word >> ROLE) as usize).copied().unwrap_or(Role::Forward);
        Self {
            stage: (word >> STAGE) as u32 & 0xff_ffff,
            microbatch: (word as u32).checked_sub(1),
            role,
        }
    }

    /// For messages of the router's.
    pub(crate) fn note(self) -> Note {
        Note { word: self.word(), show: |word, f| write!(f, "{}", Self::of_word(word)) }
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
    fn words_are_labels_and_labels_words() {
        for role in Role::ALL {
            for (stage, microbatch) in [(0, None), (7, Some(0)), (1023, Some(4095))] {
                let label = Label { stage, microbatch, role };
                assert_eq!(Label::of_word(label.word()), label);
            }
        }
        let label = Label { stage: 3, microbatch: Some(7), role: Role::BackwardInput };
        assert_eq!(label.to_string(), "stage 3, microbatch 7, input gradient");
        assert_eq!(
            Label { microbatch: None, role: Role::Reduce, ..label }.to_string(),
            "stage 3, gradients reduced"
        );
    }
}
