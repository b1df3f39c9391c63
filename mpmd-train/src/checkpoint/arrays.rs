//! The arrays of a training and their names in a checkpoint.

use std::collections::HashSet;

use mpmd_core::tree::Tree;
use mpmd_core::{MpmdArray, Result};

use crate::Trainer;

/// The arrays of a training, and its position.
pub(super) struct Contents {
    pub(super) step: u64,
    pub(super) seed: u64,
    pub(super) stages: usize,
    /// True if the names begin with the stage.
    pub(super) by_stage: bool,
    /// The parameters of all stages, then the optimiser's arrays of all stages.
    pub(super) arrays: Vec<(String, MpmdArray)>,
}

/// Name of a parameter without a path: one that is all parameters of its stage.
const WHOLE: &str = "param";

impl Contents {
    /// Returns the contents of a trainer. Two stages may have parameters of one path. Then all
    /// names begin with the stage, as in `stage.1.`.
    pub(super) fn of<In: Tree<Leaf = MpmdArray>>(trainer: &Trainer<In>) -> Self {
        let (pipeline, optimizer) = (trainer.pipeline(), trainer.optimizer());
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
        Self { step: trainer.steps(), seed: trainer.seed, stages, by_stage, arrays }
    }

    /// Replaces the trainer's arrays by `arrays`, which are in the order of [`Contents::of`].
    pub(super) fn set<In: Tree<Leaf = MpmdArray>>(
        trainer: &mut Trainer<In>,
        arrays: Vec<MpmdArray>,
    ) -> Result<()> {
        let mut arrays = arrays.into_iter();
        for stage in 0..trainer.pipeline.stages() {
            let count = trainer.pipeline.params(stage).len();
            trainer.pipeline.set_params(stage, arrays.by_ref().take(count).collect())?;
        }
        for stage in 0..trainer.pipeline.stages() {
            let names = trainer.optimizer.state(stage).into_iter().map(|(name, _)| name);
            let state = names.zip(arrays.by_ref()).collect();
            trainer.optimizer.set_state(stage, state)?;
        }
        Ok(())
    }
}
