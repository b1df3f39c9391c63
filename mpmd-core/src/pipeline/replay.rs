//! Records a training step once and replays it: [`Pipeline::replay`](super::Pipeline::replay).

use super::bundle::Bundle;
use super::graph::StageGraph;
use super::microbatch::Parts;
use super::prepare::Freshness;
use super::run::{self, StepOutput};
use super::stage::Loss;
use crate::api::program::Program;
use crate::api::replay::Recorded;
use crate::error::Result;
use crate::exec::array::MpmdArray;
use mpmd_layout::tree::Structure;
use mpmd_schedule::Schedule;

/// The maximum number of recordings that a pipeline keeps. Another one replaces that which was not
/// used for longest.
const MOST_KEPT: usize = 16;

/// A recorded step, with the schedule and the layout of inputs that it is valid for.
pub(super) struct Kept {
    schedule: Schedule,
    form: StepShape,
    recorded: Recorded<Vec<MpmdArray>, Vec<MpmdArray>>,
    given: Given,
}

/// The layout of a step's inputs: the parameters that each stage stores, then the microbatches,
/// each with its random keys.
#[derive(Eq, PartialEq)]
struct StepShape {
    /// The number of parameters of each stage.
    params: Vec<usize>,
    /// For each stage, true if the step updates the working form of its parameters.
    stale: Vec<bool>,
    microbatches: Vec<MicrobatchShape>,
}

#[derive(Eq, PartialEq)]
struct MicrobatchShape {
    x: Structure,
    /// (stage, structure) of the side inputs, in order of stages.
    side: Vec<(usize, Structure)>,
    /// The stages that have a random key.
    keys: Vec<usize>,
}

/// The layout of a step's results: the total loss, the losses of the microbatches, then the
/// gradients of each stage.
struct Given {
    losses: usize,
    paths: Vec<Vec<String>>,
}

/// Replays a kept step that fits these arguments. If there is none, records this step and keeps the
/// recording, unless the step makes an object that stays: a replay would make it again.
pub(super) fn train_step(
    kept: &mut Vec<Kept>,
    graph: &mut StageGraph,
    program: &mut Program,
    schedule: &Schedule,
    microbatches: Vec<Parts>,
) -> Result<StepOutput> {
    if graph.stages.iter().any(|stage| stage.freshness() == Freshness::Missing) {
        // Recordings may contain the object that the new one replaces.
        kept.clear();
        return run::train_step(graph, program, schedule, microbatches);
    }
    let (form, inputs) = StepShape::take_apart(graph, microbatches);
    let fits = |kept: &Kept| {
        kept.schedule == *schedule && kept.form == form && kept.recorded.fits(program, &inputs)
    };
    if let Some(index) = kept.iter().position(fits) {
        let Kept { recorded, given, .. } = &kept[index];
        let results = recorded.replay(program, inputs)?;
        graph.stages.iter_mut().for_each(|stage| stage.set_stale(false));
        let output = given.put_together(results);
        // The step that was used last is at the end.
        kept[index..].rotate_left(1);
        return Ok(output);
    }
    let mut given = Given { losses: 0, paths: Vec::new() };
    let (results, recorded) = program.record(inputs, |program, inputs| {
        let microbatches = form.put_together(graph, inputs)?;
        let output = run::train_step(graph, program, schedule, microbatches)?;
        let results;
        (given, results) = Given::take_apart(output);
        Ok(results)
    })?;
    let output = given.put_together(results);
    if kept.len() == MOST_KEPT {
        kept.remove(0);
    }
    kept.push(Kept { schedule: schedule.clone(), form, recorded, given });
    Ok(output)
}

impl StepShape {
    fn take_apart(graph: &StageGraph, microbatches: Vec<Parts>) -> (Self, Vec<MpmdArray>) {
        let mut all = Vec::new();
        let mut params = Vec::with_capacity(graph.stages.len());
        for stage in &graph.stages {
            let own = stage.params();
            params.push(own.len());
            all.extend(own);
        }
        let stages = graph.stages.iter();
        let stale = stages.map(|stage| stage.freshness() == Freshness::Stale).collect();
        let mut take = |Bundle { structure, leaves }: Bundle| {
            all.extend(leaves);
            structure
        };
        let one = |Parts { x, side, keys, .. }: Parts| {
            let x = take(x);
            let mut side: Vec<(usize, Bundle)> = side.into_iter().collect();
            side.sort_unstable_by_key(|(stage, _)| *stage);
            let side = side.into_iter().map(|(stage, side)| (stage, take(side))).collect();
            let (stages, keys): (Vec<usize>, Vec<MpmdArray>) = keys.into_iter().unzip();
            take(Bundle::of(keys));
            MicrobatchShape { x, side, keys: stages }
        };
        let microbatches = microbatches.into_iter().map(one).collect();
        (Self { params, stale, microbatches }, all)
    }

    /// Sets the parameters of all stages to the first of the arrays. Returns the microbatches, made
    /// of the other arrays.
    fn put_together(&self, graph: &mut StageGraph, all: Vec<MpmdArray>) -> Result<Vec<Parts>> {
        let mut all = all.into_iter();
        for (stage, own) in graph.stages.iter_mut().zip(&self.params) {
            stage.set_params(all.by_ref().take(*own).collect())?;
        }
        // These are the same values as before.
        for (stage, stale) in graph.stages.iter_mut().zip(&self.stale) {
            stage.set_stale(*stale);
        }
        let mut one = |MicrobatchShape { x, side, keys }: &MicrobatchShape| {
            let mut bundle = |structure: &Structure| {
                let leaves = all.by_ref().take(structure.leaves()).collect();
                Bundle { structure: structure.clone(), leaves }
            };
            let x = bundle(x);
            let side = side.iter().map(|(stage, side)| (*stage, bundle(side))).collect();
            Parts { x, side, key: None, keys: keys.iter().copied().zip(all.by_ref()).collect() }
        };
        Ok(self.microbatches.iter().map(&mut one).collect())
    }
}

impl Given {
    fn take_apart(output: StepOutput) -> (Self, Vec<MpmdArray>) {
        let StepOutput { loss, losses, gradients } = output;
        let given = losses.len();
        let mut all = Vec::new();
        for Loss { sum, weight } in std::iter::once(loss).chain(losses) {
            all.extend([sum, weight]);
        }
        let mut paths = Vec::with_capacity(gradients.len());
        for stage in gradients {
            let (names, arrays): (Vec<String>, Vec<MpmdArray>) = stage.into_iter().unzip();
            paths.push(names);
            all.extend(arrays);
        }
        (Self { losses: given, paths }, all)
    }

    /// Rebuilds the output of a step from the arrays that `take_apart` returned, or from those of a
    /// replay. Panics if there are fewer.
    fn put_together(&self, all: Vec<MpmdArray>) -> StepOutput {
        let mut all = all.into_iter();
        let mut next = || all.next().expect("a step gives as many arrays as when it was recorded");
        let mut loss = || {
            let sum = next();
            Loss { sum, weight: next() }
        };
        let whole = loss();
        let losses = (0..self.losses).map(|_| loss()).collect();
        let gradients = self
            .paths
            .iter()
            .map(|stage| stage.iter().map(|path| (path.clone(), next())).collect())
            .collect();
        StepOutput { loss: whole, losses, gradients }
    }
}
