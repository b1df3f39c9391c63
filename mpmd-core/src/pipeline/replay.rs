//! Records a training step once and replays it: [`Pipeline::replay`](super::Pipeline::replay).

use super::bundle::Bundle;
use super::graph::StageGraph;
use super::run::{self, Parts, StepOutput};
use super::stage::Loss;
use crate::api::program::Program;
use crate::api::replay::Recorded;
use crate::error::Result;
use crate::exec::array::MpmdArray;
use mpmd_layout::tree::Structure;
use mpmd_schedule::Schedule;

/// The last recorded step, with the schedule and the layout of inputs that it is valid for.
pub(super) struct Kept {
    schedule: Schedule,
    form: StepShape,
    recorded: Recorded<Vec<MpmdArray>, Vec<MpmdArray>>,
    given: Given,
}

/// The layout of a step's inputs: the parameters that each stage stores, then the microbatches.
/// `params` has the number of parameters of each stage.
#[derive(Eq, PartialEq)]
struct StepShape {
    params: Vec<usize>,
    /// (structure of the input, side inputs as (stage, structure) in order of stages)
    microbatches: Vec<(Structure, Vec<(usize, Structure)>)>,
}

/// The layout of a step's results: the total loss, the losses of the microbatches, then the
/// gradients of each stage.
struct Given {
    losses: usize,
    paths: Vec<Vec<String>>,
}

/// Replays the kept step if it fits these arguments; otherwise records this step and keeps the
/// recording.
pub(super) fn train_step(
    kept: &mut Option<Kept>,
    graph: &mut StageGraph,
    program: &mut Program,
    schedule: &Schedule,
    microbatches: Vec<Parts>,
) -> Result<StepOutput> {
    let (form, inputs) = StepShape::take_apart(graph, microbatches);
    if let Some(Kept { schedule: known, form: of, recorded, given }) = kept
        && *known == *schedule
        && *of == form
        && recorded.fits(program, &inputs)
    {
        return recorded.replay(program, inputs).map(|results| given.put_together(results));
    }
    *kept = None;
    let mut given = Given { losses: 0, paths: Vec::new() };
    let (results, recorded) = program.record(inputs, |program, inputs| {
        let microbatches = form.put_together(graph, inputs)?;
        let output = run::train_step(graph, program, schedule, microbatches)?;
        let results;
        (given, results) = Given::take_apart(output);
        Ok(results)
    })?;
    let output = given.put_together(results);
    *kept = Some(Kept { schedule: schedule.clone(), form, recorded, given });
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
        let mut take = |Bundle { structure, leaves }: Bundle| {
            all.extend(leaves);
            structure
        };
        let one = |Parts { x, side }: Parts| {
            let x = take(x);
            let mut side: Vec<(usize, Bundle)> = side.into_iter().collect();
            side.sort_unstable_by_key(|(stage, _)| *stage);
            (x, side.into_iter().map(|(stage, side)| (stage, take(side))).collect())
        };
        let microbatches = microbatches.into_iter().map(one).collect();
        (Self { params, microbatches }, all)
    }

    /// Sets the parameters of all stages to the first of the arrays. Returns the microbatches, made
    /// of the other arrays.
    fn put_together(&self, graph: &mut StageGraph, all: Vec<MpmdArray>) -> Result<Vec<Parts>> {
        let mut all = all.into_iter();
        for (stage, own) in graph.stages.iter_mut().zip(&self.params) {
            stage.set_params(all.by_ref().take(*own).collect())?;
        }
        let mut bundle = |structure: &Structure| {
            let leaves = all.by_ref().take(structure.leaves()).collect();
            Bundle { structure: structure.clone(), leaves }
        };
        let one = |(x, side): &(Structure, Vec<(usize, Structure)>)| Parts {
            x: bundle(x),
            side: side.iter().map(|(stage, structure)| (*stage, bundle(structure))).collect(),
        };
        Ok(self.microbatches.iter().map(one).collect())
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
