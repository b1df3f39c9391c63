//! Captures the runs of a pipeline and replays them: [`Pipeline::replay`](super::Pipeline::replay).

use std::collections::VecDeque;

use super::bundle::Bundle;
use super::graph::StageGraph;
use super::microbatch::Parts;
use super::prepare::Freshness;
use super::run::StepOutput;
use super::stage::Loss;
use crate::api::program::Program;
use crate::api::replay::Captured;
use crate::error::Result;
use crate::exec::array::MpmdArray;
use mpmd_layout::tree::{Structure, Tree as _};
use mpmd_schedule::Schedule;

/// The maximum number of captures in a list. Another one replaces that which was not used for
/// longest, among those that were never replayed if there are such.
const MOST_KEPT: usize = 16;

/// The number of replays after which a step is captured anew in a job that recomputes calls: a
/// replay recomputes the calls that were chosen at its capture.
const REPLAYS_CHECKED: u32 = 16;

/// The captures of a pipeline.
#[derive(Default)]
pub(super) struct Captures {
    /// Training steps. The one used last is at the end.
    steps: Vec<Kept<StepOutput>>,
    /// Forward passes alone, in the same order.
    forwards: Vec<Kept<Vec<Bundle>>>,
}

/// A captured run, with the schedule and the layout of inputs that it is valid for.
pub(super) struct Kept<R: Results> {
    /// `None` for the forward pass of one microbatch without a schedule.
    schedule: Option<Schedule>,
    form: RunShape,
    captured: Captured<Vec<MpmdArray>, Vec<MpmdArray>>,
    layout: R::Layout,
    replays: u32,
}

/// The results of a run, which a replay computes again.
pub(super) trait Results: Sized {
    /// The part of the results beside their arrays.
    type Layout: Default;

    fn take_apart(self) -> (Self::Layout, Vec<MpmdArray>);

    /// Rebuilds the results from the arrays that `take_apart` returned, or from those of a replay.
    fn put_together(layout: &Self::Layout, arrays: Vec<MpmdArray>) -> Self;
}

/// The layout of a run's inputs: the parameters that each stage stores, then the microbatches, each
/// with its random keys.
#[derive(Eq, PartialEq)]
struct RunShape {
    /// The number of parameters of each stage.
    params: Vec<usize>,
    /// For each stage, true if the run updates the working form of its parameters.
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

/// All captures of a pipeline, with the list for runs of one kind.
pub(super) struct Chosen<'a, R: Results> {
    all: &'a mut Captures,
    list: fn(&mut Captures) -> &mut Vec<Kept<R>>,
}

impl Captures {
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn steps(&mut self) -> Chosen<'_, StepOutput> {
        Chosen {
            all: self,
            list: |all| &mut all.steps,
        }
    }

    pub(super) fn forwards(&mut self) -> Chosen<'_, Vec<Bundle>> {
        Chosen {
            all: self,
            list: |all| &mut all.forwards,
        }
    }
}

/// Replays a capture that fits these arguments. If there is none, calls `issue`, captures it and
/// keeps the capture.
///
/// A run is only issued without `captures`, within a larger capture, and in a dry run. A run
/// that makes an object that stays is only issued too: a replay would make it again. If an input is
/// refused, the run is issued so that the error names the pass.
pub(super) fn run<R: Results>(
    captures: Option<Chosen<'_, R>>,
    (graph, program): (&mut StageGraph, &mut Program),
    schedule: Option<&Schedule>,
    microbatches: Vec<Parts>,
    issue: impl FnOnce(&mut StageGraph, &mut Program, Vec<Parts>) -> Result<R>,
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
    let (form, inputs) = RunShape::take_apart(graph, microbatches);
    let fits = |kept: &Kept<R>| {
        kept.schedule.as_ref() == schedule
            && kept.form == form
            && kept.captured.fits(program, &inputs)
    };
    let mut found = kept.iter().rposition(fits);
    if program.runtime.config.check_replay > 0
        && let Some(index) = found.take_if(|index| kept[*index].replays >= REPLAYS_CHECKED)
    {
        kept.remove(index);
    }
    if let Some(index) = found {
        // The run that was used last is at the end.
        kept[index..].rotate_left(1);
        let last = kept.len() - 1;
        let Kept {
            captured,
            layout,
            replays,
            ..
        } = &mut kept[last];
        *replays = replays.saturating_add(1);
        let results = captured.replay_fitting(program, &inputs)?;
        graph
            .stages
            .iter_mut()
            .for_each(|stage| stage.set_stale(false));
        return Ok(R::put_together(layout, results));
    }
    let usable = |x: &MpmdArray| x.check_usable("").is_ok() && program.check_own("", x).is_ok();
    if !inputs.iter().all(usable) {
        let microbatches = form.put_together(graph, inputs)?;
        return issue(graph, program, microbatches);
    }
    let mut layout = R::Layout::default();
    let (results, captured) = program.capture(inputs, |program, inputs| {
        let microbatches = form.put_together(graph, inputs)?;
        let arrays;
        (layout, arrays) = issue(graph, program, microbatches)?.take_apart();
        Ok(arrays)
    })?;
    let output = R::put_together(&layout, results);
    if kept.len() == MOST_KEPT {
        kept.remove(
            kept.iter()
                .position(|kept| kept.replays == 0)
                .unwrap_or_default(),
        );
    }
    let schedule = schedule.cloned();
    kept.push(Kept {
        schedule,
        form,
        captured,
        layout,
        replays: 0,
    });
    Ok(output)
}

impl RunShape {
    fn take_apart(graph: &StageGraph, microbatches: Vec<Parts>) -> (Self, Vec<MpmdArray>) {
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
        let mut take = |Bundle { structure, leaves }: Bundle| {
            all.extend(leaves);
            structure
        };
        let one = |Parts { x, side, keys, .. }: Parts| {
            let x = take(x);
            let mut side: Vec<(usize, Bundle)> = side.into_iter().collect();
            side.sort_unstable_by_key(|(stage, _)| *stage);
            let side = side
                .into_iter()
                .map(|(stage, side)| (stage, take(side)))
                .collect();
            let (stages, keys): (Vec<usize>, Vec<MpmdArray>) = keys.into_iter().unzip();
            take(Bundle::of(keys));
            MicrobatchShape {
                x,
                side,
                keys: stages,
            }
        };
        let microbatches = microbatches.into_iter().map(one).collect();
        (
            Self {
                params,
                stale,
                microbatches,
            },
            all,
        )
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
                Bundle {
                    structure: structure.clone(),
                    leaves,
                }
            };
            let x = bundle(x);
            let side = side
                .iter()
                .map(|(stage, side)| (*stage, bundle(side)))
                .collect();
            Parts {
                x,
                side,
                key: None,
                keys: keys.iter().copied().zip(all.by_ref()).collect(),
            }
        };
        Ok(self.microbatches.iter().map(&mut one).collect())
    }
}

/// The layout of a step's results: the total loss, the losses of the microbatches, then the
/// gradients of each stage.
#[derive(Default)]
pub(super) struct StepLayout {
    losses: Vec<Structure>,
    paths: Vec<Vec<String>>,
}

impl Results for StepOutput {
    type Layout = StepLayout;

    fn take_apart(self) -> (StepLayout, Vec<MpmdArray>) {
        let Self {
            loss,
            losses,
            gradients,
        } = self;
        let (mut all, mut structures) = (Vec::new(), Vec::with_capacity(1 + losses.len()));
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
        (
            StepLayout {
                losses: structures,
                paths,
            },
            all,
        )
    }

    /// Panics if there are fewer arrays.
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

impl Results for Vec<Bundle> {
    /// The structure of the outputs of each microbatch.
    type Layout = Vec<Structure>;

    fn take_apart(self) -> (Vec<Structure>, Vec<MpmdArray>) {
        let mut all = Vec::new();
        let structure = |Bundle { structure, leaves }| {
            all.extend(leaves);
            structure
        };
        (self.into_iter().map(structure).collect(), all)
    }

    fn put_together(layout: &Vec<Structure>, arrays: Vec<MpmdArray>) -> Self {
        let mut all = arrays.into_iter();
        let bundle = |structure: &Structure| {
            let leaves = all.by_ref().take(structure.leaves()).collect();
            Bundle {
                structure: structure.clone(),
                leaves,
            }
        };
        layout.iter().map(bundle).collect()
    }
}
