//! The arrays of a trainer and their names in a checkpoint.

use std::collections::HashSet;

use mpmd_core::tree::Tree;
use mpmd_core::{MpmdArray, Result};

use super::Trainer;
use crate::checkpoint::Contents;

/// Name of a parameter without a path: one that is all parameters of its stage.
const WHOLE: &str = "param";

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Returns the arrays that a checkpoint has, and the position. If two stages have parameters of
    /// one path, all names begin with the stage, as in `stage.1.`.
    pub(super) fn contents(&self) -> Contents {
        let (pipeline, optimizer) = (&self.pipeline, &self.optimizer);
        let stages = pipeline.stages();
        let whole = |path: &str| if path.is_empty() { WHOLE.to_owned() } else { path.to_owned() };
        let params = (0..stages).flat_map(|stage| {
            let named = pipeline.params(stage).into_iter();
            named.map(move |(path, array)| (stage, whole(&path), array))
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
            let stage = if by_stage { format!("stage.{stage}.") } else { String::new() };
            (stage + name, array.clone())
        };
        let arrays = all.iter().map(name).collect();
        Contents { step: self.steps(), seed: self.seed, stages, by_stage, arrays }
    }

    /// Replaces all arrays by `arrays`, which are in the order of [`Trainer::contents`].
    pub(super) fn set_arrays(&mut self, arrays: Vec<MpmdArray>) -> Result<()> {
        let mut arrays = arrays.into_iter();
        for stage in 0..self.pipeline.stages() {
            let count = self.pipeline.params(stage).len();
            self.pipeline.set_params(stage, arrays.by_ref().take(count).collect())?;
        }
        for stage in 0..self.pipeline.stages() {
            let names = self.optimizer.state(stage).into_iter().map(|(name, _)| name);
            let state = names.zip(arrays.by_ref()).collect();
            self.optimizer.set_state(stage, state)?;
        }
        Ok(())
    }
}
