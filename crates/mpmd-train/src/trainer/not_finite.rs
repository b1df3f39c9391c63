//! Errors of steps and evaluations with figures that are not finite.

use mpmd_core::tree::Tree;
use mpmd_core::{Error, MpmdArray, Program, Result};

use super::Trainer;
use crate::optimizer::Optimizer;

/// Facts about a step or evaluation that has a figure that is not finite.
pub(super) struct NotFinite {
    /// (stage, path) of a trained parameter with a value that is not finite.
    pub(super) trained: Option<(usize, String)>,
    /// (stage, path) of a frozen parameter with a value that is not finite.
    pub(super) frozen: Option<(usize, String)>,
    /// The last stage whose gradients are not finite, if the loss is finite.
    pub(super) gradients: Option<usize>,
    pub(super) weight: f64,
}

/// A [`NotFinite`] without known facts, for a figure whose weight is not 0.
pub(super) const UNKNOWN: NotFinite = NotFinite {
    trained: None,
    frozen: None,
    gradients: None,
    weight: 1.0,
};

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Returns (stage, path) of the first trained parameter with a value that is not finite. Blocks
    /// until every process has the result.
    pub(super) fn spoiled(&self, p: &mut Program) -> Result<Option<(usize, String)>> {
        self.optimizer
            .not_finite(p, &self.pipeline, &self.reporter.everywhere())
    }

    /// Creates the error of a step or evaluation with a figure that is not finite. `what` names the
    /// figure and the step. Searches the parameters for the cause. Blocks until every process has
    /// the result.
    pub(super) fn not_finite(
        &self,
        p: &mut Program,
        what: &str,
        mut figure: NotFinite,
    ) -> Result<Error> {
        if figure.trained.is_none() {
            figure.trained = self.spoiled(p)?;
        }
        if figure.trained.is_none() {
            let everywhere = self.reporter.everywhere();
            figure.frozen = Optimizer::frozen_not_finite(p, &self.pipeline, &everywhere)?;
        }
        let last = self.pipeline.stages() - 1;
        Ok(Error::kernel(format!("{what}: {}", figure.why(last))))
    }
}

impl NotFinite {
    /// Describes the cause, its stage and the remedy. `last` is the index of the last stage.
    fn why(&self, last: usize) -> String {
        match self {
            Self {
                trained: Some((stage, path)),
                ..
            } => format!(
                "a value of parameter {path:?} of stage {stage} is not finite: lower the learning \
                 rate, clip the gradients, or look at the weights that the training began with"
            ),
            Self {
                frozen: Some((stage, path)),
                ..
            } => format!(
                "a value of parameter {path:?} of stage {stage} is not finite, and it is not \
                 trained: look at the weights that the training began with"
            ),
            Self { weight: 0.0, .. } => format!(
                "its weight is 0, so it has padding alone: leave it out, or make the loss of stage \
                 {last} 0 where the weight is 0"
            ),
            Self {
                gradients: Some(stage),
                ..
            } => format!(
                "the gradients of stage {stage} are not finite, though its parameters are: look at \
                 its backward pass, lower the learning rate, or clip the gradients"
            ),
            _ => format!(
                "the parameters of all stages are finite, so a value overflows on the way to the \
                 loss of stage {last}, or the data are not finite: lower the learning rate, clip \
                 the gradients, or look at the data"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_name_the_stage_and_fit_the_cause() {
        let at = Some((1, "w".to_owned()));
        let why = NotFinite {
            trained: at.clone(),
            ..UNKNOWN
        }
        .why(3);
        assert!(
            why.starts_with("a value of parameter \"w\" of stage 1 is not"),
            "{why}"
        );
        let why = NotFinite {
            frozen: at,
            weight: 0.0,
            ..UNKNOWN
        }
        .why(3);
        assert!(
            why.starts_with("a value of parameter \"w\" of stage 1 is not"),
            "{why}"
        );
        assert!(
            why.contains("not trained") && !why.contains("rate"),
            "{why}"
        );
        let why = NotFinite {
            weight: 0.0,
            ..UNKNOWN
        }
        .why(3);
        assert!(
            why.contains("padding alone") && why.contains("the loss of stage 3"),
            "{why}"
        );
        assert!(!why.contains("rate"), "{why}");
        let why = NotFinite {
            gradients: Some(2),
            ..UNKNOWN
        }
        .why(3);
        assert!(
            why.starts_with("the gradients of stage 2 are not finite"),
            "{why}"
        );
        let why = UNKNOWN.why(3);
        assert!(why.contains("on the way to the loss of stage 3"), "{why}");
    }
}
