//! The arrays of a trainer and their names in a checkpoint.

use std::collections::HashSet;

use mpmd_core::tree::Tree;
use mpmd_core::{MpmdArray, Result};

use super::Trainer;
use crate::checkpoint::CheckpointContents;

/// Name of a parameter with an empty path, which is the only parameter of its stage.
const WHOLE: &str = "param";

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Returns the arrays of a checkpoint, and the training's position. If two stages have
    /// parameters of the same path, all names begin with the stage, as in `stage.1.`. If
    /// `trained_only` is true, leaves out the parameters that are not trained.
    pub(super) fn contents(&self, trained_only: bool) -> CheckpointContents {
        let pipeline = &self.pipeline;
        let optimizer = &self.optimizer;
        let stages = pipeline.stages();
        let whole = |path: &str| {
            if path.is_empty() {
                WHOLE.to_owned()
            } else {
                path.to_owned()
            }
        };
        let params = (0..stages).flat_map(|stage| {
            let named = pipeline
                .params(stage)
                .into_iter()
                .zip(pipeline.trainable(stage));
            let named = named.filter(move |(_, trained)| *trained || !trained_only);
            named.map(move |((path, array), _)| (stage, whole(&path), array))
        });
        let states = (0..stages).flat_map(|stage| {
            let named = optimizer.state(stage).into_iter();
            named.map(move |(name, array)| {
                let (kind, path) = name.split_once('/').unwrap_or((&name, ""));
                (stage, format!("optimizer/{kind}/{}", whole(path)), array)
            })
        });
        let all: Vec<(usize, String, MpmdArray)> = params.chain(states).collect();
        let mut seen = HashSet::new();
        let by_stage = !all.iter().all(|(_, name, _)| seen.insert(name));
        let name = |(stage, name, array): &(usize, String, MpmdArray)| {
            let stage = if by_stage {
                format!("stage.{stage}.")
            } else {
                String::new()
            };
            (stage + name, array.clone())
        };
        let arrays = all.iter().map(name).collect();
        CheckpointContents {
            step: self.steps(),
            seed: self.seed,
            best: self.best,
            stages,
            by_stage,
            arrays,
        }
    }

    /// Replaces the arrays of [`Trainer::contents`] by `arrays`, in the same order.
    pub(super) fn set_arrays(&mut self, arrays: Vec<MpmdArray>, trained_only: bool) -> Result<()> {
        let mut arrays = arrays.into_iter();
        for stage in 0..self.pipeline.stages() {
            let own = self
                .pipeline
                .params(stage)
                .into_iter()
                .zip(self.pipeline.trainable(stage));
            let one = |((_, array), trained)| match trained || !trained_only {
                true => arrays.next().unwrap_or(array),
                false => array,
            };
            let params = own.map(one).collect();
            self.pipeline.set_params(stage, params)?;
        }
        for stage in 0..self.pipeline.stages() {
            let names = self
                .optimizer
                .state(stage)
                .into_iter()
                .map(|(name, _)| name);
            let state = names.zip(arrays.by_ref()).collect();
            self.optimizer.set_state(stage, state)?;
        }
        Ok(())
    }
}
