//! Captures the runs of a pipeline and replays them: [`Pipeline::replay`](super::Pipeline::replay).

use std::collections::{BTreeMap, VecDeque};

use super::erased_tree::ErasedTree;
use super::graph::StageGraph;
use super::microbatch::ErasedMicrobatch;
use super::prepare::Freshness;
use super::run::StepOutput;
use super::stage::Loss;
use crate::api::program::Program;
use crate::api::replay::Captured;
use crate::error::Result;
use crate::exec::array::MpmdArray;
use mpmd_layout::tree::{Structure, Tree as _};
use mpmd_schedule::Schedule;

/// Maximum number of captures in a list. A further capture replaces the least recently used one,
/// first among captures that were never replayed.
const MOST_KEPT: usize = 16;

/// Number of replays after which a step is captured again in a job with `check_replay`. A replay
/// always recomputes the calls that were chosen at capture; a new capture chooses others.
const REPLAYS_CHECKED: u32 = 16;

/// The captured runs of a pipeline.
#[derive(Default)]
pub(super) struct Captures {
    /// Captured training steps. The most recently used one is last.
    steps: Vec<CapturedRun<StepOutput>>,
    /// Captured runs of forward passes only. The most recently used one is last.
    forwards: Vec<CapturedRun<Vec<ErasedTree>>>,
}

/// A captured run, with the schedule and the layout of inputs for which it can be replayed.
pub(super) struct CapturedRun<R: RunResults> {
    /// The schedule of the run; `None` for the forward pass of a single microbatch.
    schedule: Option<Schedule>,
    form: RunShape,
    captured: Captured<Vec<MpmdArray>, Vec<MpmdArray>>,
    layout: R::Layout,
    replays: u32,
}

/// The results of a run, which can be split into arrays and a layout and rebuilt from both.
pub(super) trait RunResults: Sized {
    /// The structure of the results without their arrays.
    type Layout: Default;

    fn take_apart(self) -> TakenApart<Self::Layout>;

    /// Rebuilds the results from `layout` and the arrays of the run or of a replay.
    fn put_together(layout: &Self::Layout, arrays: Vec<MpmdArray>) -> Self;
}

/// The inputs or results of a run, split into their arrays and a layout of type `L`.
pub(super) struct TakenApart<L> {
    layout: L,
    arrays: Vec<MpmdArray>,
}

/// The layout of a run's inputs. Their arrays are the stored parameters of each stage, then the
/// microbatches, each with its random keys.
#[derive(Eq, PartialEq)]
struct RunShape {
    /// The number of parameters that each stage stores.
    params: Vec<usize>,
    /// For each stage, true if the run updates the working form of its parameters.
    stale: Vec<bool>,
    microbatches: Vec<MicrobatchShape>,
}

#[derive(Eq, PartialEq)]
struct MicrobatchShape {
    x: Structure,
    /// The structure of each stage's side inputs, by stage index.
    side: BTreeMap<usize, Structure>,
    /// The indices of the stages for which the microbatch has a random key.
    keys: Vec<usize>,
}

/// The captures of a pipeline, together with a function that selects the list for runs with results
/// `R`.
pub(super) struct CaptureList<'a, R: RunResults> {
    all: &'a mut Captures,
    list: fn(&mut Captures) -> &mut Vec<CapturedRun<R>>,
}

impl Captures {
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn steps(&mut self) -> CaptureList<'_, StepOutput> {
        CaptureList {
            all: self,
            list: |all| &mut all.steps,
        }
    }

    pub(super) fn forwards(&mut self) -> CaptureList<'_, Vec<ErasedTree>> {
        CaptureList {
            all: self,
            list: |all| &mut all.forwards,
        }
    }
}

/// Runs a schedule: replays a fitting capture if there is one, else calls `issue` and keeps its
/// capture.
///
/// Without `captures`, inside another capture, and in a dry run, it only calls `issue`. The same
/// holds for a run that makes a working form, since a replay would make it again. If a replay
/// refuses an input, `issue` is called so that the error names the pass.
pub(super) fn run<R: RunResults>(
    captures: Option<CaptureList<'_, R>>,
    graph: &mut StageGraph,
    program: &mut Program,
    schedule: Option<&Schedule>,
    microbatches: Vec<ErasedMicrobatch>,
    issue: impl FnOnce(&mut StageGraph, &mut Program, Vec<ErasedMicrobatch>) -> Result<R>,
) -> Result<R> {
    let only_issues = program.capture.is_some() || program.is_dry_run();
    let Some(captures) = captures.filter(|_| !only_issues) else {
        return issue(graph, program, microbatches);
    };

    if graph
        .stages
        .iter()
        .any(|stage| stage.freshness() == Freshness::Missing)
    {
        // Captures may contain the object that the new one replaces.
        captures.all.clear();
        return issue(graph, program, microbatches);
    }

    let kept = (captures.list)(captures.all);
    let TakenApart {
        layout: form,
        arrays: inputs,
    } = RunShape::take_apart(graph, microbatches);
    if let Some(found) = find_fitting(kept, program, schedule, &form, &inputs) {
        found.replays = found.replays.saturating_add(1);
        let results = found.captured.replay_fitting(program, &inputs)?;
        graph
            .stages
            .iter_mut()
            .for_each(|stage| stage.set_stale(false));
        return Ok(R::put_together(&found.layout, results));
    }

    let usable = |x: &MpmdArray| x.check_usable("").is_ok() && program.check_own("", x).is_ok();
    if !inputs.iter().all(usable) {
        let microbatches = form.put_together(graph, inputs)?;
        return issue(graph, program, microbatches);
    }

    let mut layout = R::Layout::default();
    let (results, captured) = program.capture(inputs, |program, inputs| {
        let microbatches = form.put_together(graph, inputs)?;
        let issued = issue(graph, program, microbatches)?.take_apart();
        layout = issued.layout;
        Ok(issued.arrays)
    })?;
    let output = R::put_together(&layout, results);
    let run = CapturedRun {
        schedule: schedule.cloned(),
        form,
        captured,
        layout,
        replays: 0,
    };
    keep(kept, run);
    Ok(output)
}

/// Finds the newest capture that fits these arguments, and moves it to the end of the list. Drops
/// it instead after [`REPLAYS_CHECKED`] replays in a job that recomputes calls.
fn find_fitting<'a, R: RunResults>(
    kept: &'a mut Vec<CapturedRun<R>>,
    program: &Program,
    schedule: Option<&Schedule>,
    form: &RunShape,
    inputs: &Vec<MpmdArray>,
) -> Option<&'a mut CapturedRun<R>> {
    let index = kept.iter().rposition(|kept| {
        kept.schedule.as_ref() == schedule
            && kept.form == *form
            && kept.captured.fits(program, inputs)
    })?;
    if program.runtime.config.check_replay > 0 && kept[index].replays >= REPLAYS_CHECKED {
        kept.remove(index);
        return None;
    }

    // The run that was used last is at the end.
    kept[index..].rotate_left(1);
    kept.last_mut()
}

/// Adds a capture to the list. If the list is full, drops an old capture first.
fn keep<R: RunResults>(kept: &mut Vec<CapturedRun<R>>, run: CapturedRun<R>) {
    if kept.len() == MOST_KEPT {
        let unused = kept.iter().position(|kept| kept.replays == 0);
        kept.remove(unused.unwrap_or_default());
    }
    kept.push(run);
}

impl RunShape {
    /// Splits the inputs of a run into their layout and one list of arrays.
    fn take_apart(graph: &StageGraph, microbatches: Vec<ErasedMicrobatch>) -> TakenApart<Self> {
        let mut all = Vec::new();
        let mut params = Vec::with_capacity(graph.stages.len());
        for stage in &graph.stages {
            let before = all.len();
            all.extend(stage.params());
            params.push(all.len() - before);
        }

        let stages = graph.stages.iter();
        let stale = stages
            .map(|stage| stage.freshness() == Freshness::Stale)
            .collect();

        let mut take = |ErasedTree { structure, leaves }: ErasedTree| {
            all.extend(leaves);
            structure
        };
        let mut shapes = Vec::with_capacity(microbatches.len());
        for ErasedMicrobatch { x, side, keys, .. } in microbatches {
            let x = take(x);
            let side: BTreeMap<usize, ErasedTree> = side.into_iter().collect();
            let side = side.into_iter();
            let side = side.map(|(stage, side)| (stage, take(side))).collect();
            let (stages, keys): (Vec<usize>, Vec<MpmdArray>) = keys.into_iter().unzip();
            take(ErasedTree::of(keys));
            shapes.push(MicrobatchShape {
                x,
                side,
                keys: stages,
            });
        }
        let layout = Self {
            params,
            stale,
            microbatches: shapes,
        };
        TakenApart {
            layout,
            arrays: all,
        }
    }

    /// Sets the parameters of all stages to the first of the arrays. Returns the microbatches,
    /// rebuilt from the other arrays.
    fn put_together(
        &self,
        graph: &mut StageGraph,
        all: Vec<MpmdArray>,
    ) -> Result<Vec<ErasedMicrobatch>> {
        let mut all = all.into_iter();
        for (stage, own) in graph.stages.iter_mut().zip(&self.params) {
            stage.set_params(all.by_ref().take(*own).collect())?;
        }

        // These are the same values as before.
        for (stage, stale) in graph.stages.iter_mut().zip(&self.stale) {
            stage.set_stale(*stale);
        }

        let mut microbatches = Vec::with_capacity(self.microbatches.len());
        for MicrobatchShape { x, side, keys } in &self.microbatches {
            let x = next_tree(x, &mut all);
            let side = side
                .iter()
                .map(|(stage, side)| (*stage, next_tree(side, &mut all)))
                .collect();
            microbatches.push(ErasedMicrobatch {
                x,
                side,
                key: None,
                keys: keys.iter().copied().zip(all.by_ref()).collect(),
            });
        }
        Ok(microbatches)
    }
}

/// Builds a tree of this structure from the next items of `arrays`.
fn next_tree(structure: &Structure, arrays: &mut impl Iterator<Item = MpmdArray>) -> ErasedTree {
    ErasedTree {
        structure: structure.clone(),
        leaves: arrays.take(structure.leaves()).collect(),
    }
}

/// The layout of a training step's results. Their arrays are the total loss, the losses of the
/// microbatches, then the gradients of each stage.
#[derive(Default)]
pub(super) struct StepLayout {
    losses: Vec<Structure>,
    paths: Vec<Vec<String>>,
}

impl RunResults for StepOutput {
    type Layout = StepLayout;

    fn take_apart(self) -> TakenApart<StepLayout> {
        let Self {
            loss,
            losses,
            gradients,
        } = self;
        let mut all = Vec::new();
        let mut structures = Vec::with_capacity(1 + losses.len());
        for loss in std::iter::once(loss).chain(losses) {
            structures.push(loss.structure());
            all.extend(loss.into_leaves());
        }

        let mut paths = Vec::with_capacity(gradients.len());
        for stage in gradients {
            let (names, arrays): (Vec<String>, Vec<MpmdArray>) = stage.into_iter().unzip();
            paths.push(names);
            all.extend(arrays);
        }

        TakenApart {
            layout: StepLayout {
                losses: structures,
                paths,
            },
            arrays: all,
        }
    }

    /// Rebuilds the results. Panics if there are fewer arrays than `layout` needs.
    fn put_together(layout: &StepLayout, arrays: Vec<MpmdArray>) -> Self {
        let mut all = arrays.into_iter();
        let mut next = || {
            all.next()
                .expect("a step gives as many arrays as when it was captured")
        };
        let loss = |structure: &Structure| {
            let leaves = (0..structure.leaves()).map(|_| next());
            Loss::from_leaves(structure, leaves).expect("it is as when it was captured")
        };

        let mut losses = layout.losses.iter().map(loss).collect::<VecDeque<_>>();
        let whole = losses.pop_front().expect("a step has a loss");
        let losses = losses.into();
        let gradients = layout
            .paths
            .iter()
            .map(|stage| stage.iter().map(|path| (path.clone(), next())).collect())
            .collect();
        Self {
            loss: whole,
            losses,
            gradients,
        }
    }
}

impl RunResults for Vec<ErasedTree> {
    /// The structure of the outputs of each microbatch, in order.
    type Layout = Vec<Structure>;

    fn take_apart(self) -> TakenApart<Vec<Structure>> {
        let mut layout = Vec::with_capacity(self.len());
        let mut arrays = Vec::new();
        for ErasedTree { structure, leaves } in self {
            layout.push(structure);
            arrays.extend(leaves);
        }
        TakenApart { layout, arrays }
    }

    fn put_together(layout: &Vec<Structure>, arrays: Vec<MpmdArray>) -> Self {
        let mut all = arrays.into_iter();
        layout
            .iter()
            .map(|structure| next_tree(structure, &mut all))
            .collect()
    }
}
