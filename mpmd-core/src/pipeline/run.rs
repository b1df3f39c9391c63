//! The runner: issues a schedule's actions as plain `jit` and `device_put` operations.

use std::fmt::Write as _;

use super::bound_stage::{BoundStage, Forwarded, PassOf};
use super::bundle::{Bundle, put_each};
use super::context::Mode;
use super::graph::{StageGraph, label};
use super::kernels::{AddArrays, add};
use super::links::check_all_read;
use super::microbatch::Parts;
use super::stage::{Loss, Passes};
use crate::api::jit::Jit;
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_device::cuda::kernels::ADD;
use mpmd_device::cuda::source::Source;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{Structure, Tree as _};
use mpmd_record::trace::Role;
use mpmd_schedule::{Action, ActionKind, Schedule};

/// (path, array) of a stage's gradients, summed over the microbatches, in the order of the
/// parameters that the stage stores. [Frozen](super::Stage::is_frozen) ones are left out.
pub type Gradients = Vec<(String, MpmdArray)>;

/// The results of a training step.
#[derive(Debug)]
pub struct StepOutput {
    /// The loss and its weight, each summed over the microbatches in ascending order; on the last
    /// stage's mesh.
    pub loss: Loss<MpmdArray>,
    /// The loss and weight of each microbatch, in ascending order; on the last stage's mesh.
    pub losses: Vec<Loss<MpmdArray>>,
    /// The gradients of each stage, indexed by stage.
    pub gradients: Vec<Gradients>,
}

/// The kernel that adds one microbatch's loss, weight and metrics to the sums.
struct AddLoss;

impl Kernel for AddLoss {
    type In = (Loss<MpmdArray>, Loss<MpmdArray>);
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        (sum, one): &(Loss<ShapedArray>, Loss<ShapedArray>),
    ) -> Result<Signature<Loss<ShapedArray>>> {
        let names = |loss: &Loss<ShapedArray>| loss.metrics.keys().cloned().collect::<Vec<_>>();
        if names(sum) != names(one) {
            return Err(Error::kernel(format!(
                "one microbatch has the metrics {:?}, another {:?}",
                names(sum),
                names(one)
            )));
        }
        let paths = sum.structure().paths();
        Ok(paths
            .into_iter()
            .fold(Signature::new(sum.clone()), |signature, path| {
                signature.alias(format!("0/{path}"), path)
            }))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (_, one): (Loss<View<'_>>, Loss<View<'_>>),
        mut sum: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        add(cx, &mut sum.sum, &one.sum)?;
        add(cx, &mut sum.weight, &one.weight)?;
        sum.metrics
            .values_mut()
            .zip(one.metrics.values())
            .try_for_each(|(sum, one)| add(cx, sum, one))
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&ADD]
    }
}

/// The numbers of passes of a step that are still to come at a stage.
#[derive(Clone, Copy, Default)]
struct Uses {
    /// Passes that read the stage's parameters.
    params: usize,
    /// Passes that add to the gradients of the stage's parameters.
    weights: usize,
}

/// Data of a microbatch at a stage between its passes.
#[derive(Default)]
struct Held {
    /// The parts of the stage's input that have arrived; `None` for the missing ones.
    parts: Vec<Option<Bundle>>,
    /// The stage's input, kept for recomputing the forward pass.
    x: Option<Bundle>,
    side: Option<Bundle>,
    of: PassOf,
    /// The number of leaves of each part of the stage's input.
    leaves: Vec<usize>,
    outputs: Option<Structure>,
    residual: Option<Bundle>,
    /// Gradients of the stage's outputs that have arrived from the reading stages.
    gradients: Vec<Arrived>,
    weight_residual: Option<Bundle>,
}

struct Arrived {
    from: (usize, usize),
    first: usize,
    gradient: Bundle,
}

/// The state of a running step.
struct RunningStep<'a> {
    graph: &'a mut StageGraph,
    program: &'a mut Program,
    /// Indexed by stage and microbatch.
    held: Vec<Held>,
    microbatches: usize,
    trains: bool,
    gradients: Vec<Option<Bundle>>,
    losses: Vec<Option<Loss<MpmdArray>>>,
}

/// Returns the schedule that is run. In `schedule`'s copy, stages that fuse their gradients have
/// them as one action. If the pipeline asks for that, weight gradients are ascending.
pub(super) fn effective(graph: &StageGraph, schedule: &Schedule) -> Result<Schedule> {
    let fused = |stage: usize| graph.stages[stage].passes() == Passes::Fused;
    let schedule = mpmd_schedule::fused(schedule, fused)?;
    if !graph.ascending {
        return Ok(schedule);
    }
    let ascending = mpmd_schedule::ascending(&schedule)?;
    let split = |action: &&Action| action.kind == ActionKind::BackwardInput && fused(action.stage);
    match ascending.rows().iter().flatten().find(split) {
        None => Ok(ascending),
        Some(Action {
            stage, microbatch, ..
        }) => Err(graph.at(
            *stage,
            &Error::kernel(format!(
                "schedule {} does not compute its gradients in ascending order: those of \
                 microbatch {microbatch} come too early. With `buffer_gradients`, the stage needs \
                 `Passes::Split` or `Passes::Both`",
                schedule.name()
            )),
        )),
    }
}

/// Limit of the number of operations that compare a schedule; ranks are grouped to stay below it.
const COMPARED: usize = 64;

/// Makes the processes compare a schedule, unless it is `known`, the one compared last. Checks
/// first that the schedule trains this pipeline. Does not compare while the program captures.
pub(super) fn compare(
    known: &mut Option<Schedule>,
    (graph, microbatches): (&StageGraph, usize),
    program: &mut Program,
    schedule: &Schedule,
) -> Result<()> {
    check_training(graph, schedule, microbatches)?;
    // A replay could not repeat the comparison, so a capture must not contain it.
    if known.as_ref() == Some(schedule) || program.capture.is_some() {
        return Ok(());
    }
    // Before anything is issued.
    effective(graph, schedule)?;
    let together = schedule.ranks().div_ceil(COMPARED);
    for (index, rows) in schedule.rows().chunks(together).enumerate() {
        let mut text = format!("of schedule {}:", schedule.name());
        for (row, rank) in rows.iter().zip(index * together..) {
            let _ = write!(text, " rank {rank}:");
            row.iter().for_each(|action| {
                let _ = write!(text, " {action}");
            });
        }
        program.assert_same(text)?;
    }
    *known = Some(schedule.clone());
    Ok(())
}

pub(super) fn train_step(
    graph: &mut StageGraph,
    program: &mut Program,
    schedule: &Schedule,
    microbatches: Vec<Parts>,
) -> Result<StepOutput> {
    check_training(graph, schedule, microbatches.len())?;
    let schedule = effective(graph, schedule)?;
    let mut order = schedule.global_order()?;
    order.retain(|action| action.kind == ActionKind::Forward || graph.trains[action.stage]);
    let output = RunningStep::new(graph, program, microbatches, true).train(&order);
    if output.is_err() {
        graph.release();
    }
    output
}

/// Runs the forward passes of a schedule, which must fit. Returns the outputs of each microbatch,
/// in order.
pub(super) fn forward_all(
    graph: &mut StageGraph,
    program: &mut Program,
    schedule: &Schedule,
    microbatches: Vec<Parts>,
) -> Result<Vec<Bundle>> {
    let mut order = schedule.global_order()?;
    order.retain(|action| action.kind == ActionKind::Forward);
    let outputs = RunningStep::new(graph, program, microbatches, false).forward_all(&order);
    if outputs.is_err() {
        graph.release();
    }
    outputs
}

/// Runs each microbatch through all stages in order, and returns the outputs of the last stage.
pub(super) fn forward(
    graph: &mut StageGraph,
    program: &mut Program,
    microbatches: Vec<Parts>,
) -> Result<Vec<Bundle>> {
    let stages = 0..graph.stages.len();
    let pass = |microbatch| {
        let kind = ActionKind::Forward;
        stages.clone().map(move |stage| Action {
            stage,
            kind,
            microbatch,
        })
    };
    let order: Vec<Action> = (0..microbatches.len()).flat_map(pass).collect();
    let outputs = RunningStep::new(graph, program, microbatches, false).forward_all(&order);
    if outputs.is_err() {
        graph.release();
    }
    outputs
}

fn check_training(graph: &StageGraph, schedule: &Schedule, microbatches: usize) -> Result<()> {
    graph.check_trains()?;
    check(graph, schedule, microbatches)?;
    if !schedule.has_backward() {
        let problem = format!(
            "schedule {} has no backward passes to train with: take another, or call `forward_all`",
            schedule.name()
        );
        return Err(Error::kernel(problem));
    }
    Ok(())
}

/// Returns an error if the schedule is for another number of stages or microbatches.
pub(super) fn check(graph: &StageGraph, schedule: &Schedule, microbatches: usize) -> Result<()> {
    graph.check_stages(schedule)?;
    let (name, expected) = (schedule.name(), schedule.microbatches());
    if expected == microbatches {
        return Ok(());
    }
    Err(Error::kernel(format!(
        "schedule {name} is for {expected} microbatches, and {microbatches} are given: make a \
         schedule for \
         {microbatches}, or give {expected}"
    )))
}

/// Returns the role of the first operation that an action issues.
fn role(kind: ActionKind) -> Role {
    match kind {
        ActionKind::Forward => Role::Forward,
        ActionKind::BackwardInput => Role::BackwardInput,
        ActionKind::Backward => Role::Backward,
        ActionKind::BackwardWeight => Role::BackwardWeight,
    }
}

/// Returns, for each stage, the number of passes that read its parameters and of those that add to
/// its gradients.
fn uses(stages: usize, order: &[Action]) -> Vec<Uses> {
    let mut uses = vec![Uses::default(); stages];
    for action in order {
        let (params, weights) = counted(action.kind);
        uses[action.stage].params += params;
        uses[action.stage].weights += weights;
    }
    uses
}

fn counted(kind: ActionKind) -> (usize, usize) {
    match kind {
        ActionKind::Forward | ActionKind::BackwardInput => (1, 0),
        ActionKind::BackwardWeight => (0, 1),
        ActionKind::Backward => (1, 1),
    }
}

impl<'a> RunningStep<'a> {
    fn new(
        graph: &'a mut StageGraph,
        program: &'a mut Program,
        microbatches: Vec<Parts>,
        trains: bool,
    ) -> Self {
        let (stages, count) = (graph.stages.len(), microbatches.len());
        let mut held: Vec<Held> = (0..stages * count).map(|_| Held::default()).collect();
        for (microbatch, parts) in microbatches.into_iter().enumerate() {
            held[microbatch].parts = vec![Some(parts.x)];
            for (stage, side) in parts.side {
                if stage < stages {
                    held[stage * count + microbatch].side = Some(side);
                }
            }
            for (stage, key) in parts.keys {
                held[stage * count + microbatch].of.key = Some(key);
            }
        }
        // A failed step may have left gathered parameters.
        graph.release();
        Self {
            program,
            held,
            microbatches: count,
            trains,
            gradients: (0..stages).map(|_| None).collect(),
            losses: (0..count).map(|_| None).collect(),
            graph,
        }
    }

    fn held(&mut self, (stage, microbatch): (usize, usize)) -> &mut Held {
        &mut self.held[stage * self.microbatches + microbatch]
    }

    fn label(&mut self, (stage, microbatch): (usize, usize), role: Role) {
        label(self.program, (stage, Some(microbatch)), role);
    }

    fn train(mut self, order: &[Action]) -> Result<StepOutput> {
        let stages = self.graph.stages.len();
        let last = stages - 1;
        let mut left = uses(stages, order);
        for action in order {
            let key = (action.stage, action.microbatch);
            // Labels the position of the step for errors.
            self.label(key, role(action.kind));
            if action.kind != ActionKind::BackwardWeight {
                self.graph.make_ready(self.program, action.stage)?;
            }
            match action.kind {
                ActionKind::Forward => {
                    let y = self.forward_pass(key)?;
                    if !self.graph.trains[action.stage] {
                        *self.held(key) = Held::default();
                    }
                    if action.stage == last {
                        self.take_loss(key, y)?;
                    } else {
                        self.send_outputs(key, &y)?;
                    }
                }
                ActionKind::BackwardInput => self.input_pass(key, false)?,
                ActionKind::BackwardWeight => self.weight_pass(key)?,
                ActionKind::Backward => {
                    let fuses = self.graph.stages[action.stage].fuses();
                    self.input_pass(key, fuses)?;
                    if !fuses {
                        self.weight_pass(key)?;
                    }
                }
            }
            let (params, weights) = counted(action.kind);
            let left = &mut left[action.stage];
            (left.params, left.weights) = (left.params - params, left.weights - weights);
            if left.params == 0 {
                self.graph.stages[action.stage].release();
            }
            if weights > 0 && left.weights == 0 {
                self.reduce(action.stage)?;
            }
        }
        self.add_tied()?;
        let losses: Vec<Loss<MpmdArray>> = self.losses.into_iter().flatten().collect();
        label(self.program, (last, None), Role::Loss);
        let loss = sum_losses(&self.graph.stages[last], self.program, &losses)?;
        let gradients = self
            .gradients
            .into_iter()
            .enumerate()
            .map(|(stage, gradients)| {
                let stage = &self.graph.stages[stage];
                let (paths, own) = (stage.paths(), stage.own());
                let leaves = gradients
                    .map(|gradients| gradients.leaves)
                    .unwrap_or_default();
                let trained = |place: &usize| own.contains(place) && !stage.frozen()[*place];
                let pairs = paths.into_iter().zip(leaves).enumerate();
                pairs
                    .filter(|(place, _)| trained(place))
                    .map(|(_, pair)| pair)
                    .collect()
            });
        Ok(StepOutput {
            loss,
            losses,
            gradients: gradients.collect(),
        })
    }

    fn forward_all(mut self, order: &[Action]) -> Result<Vec<Bundle>> {
        let last = self.graph.stages.len() - 1;
        let mut left = uses(last + 1, order);
        let mut outputs: Vec<Option<Bundle>> = (0..self.microbatches).map(|_| None).collect();
        for Action {
            stage, microbatch, ..
        } in order.iter().copied()
        {
            let key = (stage, microbatch);
            self.label(key, Role::Forward);
            self.graph.make_ready(self.program, stage)?;
            let y = self.forward_pass(key)?;
            // No backward pass will read the residuals.
            *self.held(key) = Held::default();
            if stage == last {
                outputs[microbatch] = Some(y);
            } else {
                self.send_outputs(key, &y)?;
            }
            left[stage].params -= 1;
            if left[stage].params == 0 {
                self.graph.stages[stage].release();
            }
        }
        Ok(outputs.into_iter().flatten().collect())
    }

    /// Runs the forward pass of `key`, (stage, microbatch), and returns the stage's outputs.
    fn forward_pass(&mut self, key: (usize, usize)) -> Result<Bundle> {
        let held = self.held(key);
        let parts: Option<Vec<Bundle>> = std::mem::take(&mut held.parts).into_iter().collect();
        let side = held.side.take().unwrap_or_else(Bundle::empty);
        let parts = there(parts.filter(|parts| !parts.is_empty()), key, "input")?;
        held.leaves = parts.iter().map(|part| part.leaves.len()).collect();
        let structure = parts.iter().map(|part| part.structure.clone()).collect();
        let structure = self.graph.feeds[key.0].structure(structure);
        let x = Bundle {
            structure,
            leaves: parts.into_iter().flat_map(|part| part.leaves).collect(),
        };
        self.label(key, Role::Forward);
        let recomputes = self.graph.recomputes[key.0];
        let mode = match self.trains {
            false => Mode::Evaluation,
            true if !self.graph.trains[key.0] => Mode::ForwardOnly,
            true if recomputes => Mode::Recomputed,
            true => Mode::Training,
        };
        let random = self.held(key).of.key.clone();
        let stage = &mut self.graph.stages[key.0];
        let Forwarded {
            y,
            residual,
            kernels,
        } = stage.forward(self.program, (&x, &side), (mode, random))?;
        let held = self.held(key);
        held.of.kernels = kernels;
        held.outputs = Some(y.structure.clone());
        match residual {
            None => held.residual = Some(Bundle::pair(x, side)),
            Some(_) if recomputes => (held.x, held.side) = (Some(x), Some(side)),
            Some(residual) => held.residual = Some(residual),
        }
        Ok(y)
    }

    /// Sends the outputs `y` of `key`, (stage, microbatch), to all stages that read them. An output
    /// that no stage reads is an error.
    fn send_outputs(&mut self, key: (usize, usize), y: &Bundle) -> Result<()> {
        let (stage, microbatch) = key;
        self.label(key, Role::SendForward);
        let readers = &self.graph.readers[stage];
        check_all_read(
            stage,
            &y.structure,
            readers
                .iter()
                .map(|(to, part)| &self.graph.feeds[*to].parts[*part]),
        )?;
        for (to, part) in readers.iter().copied() {
            let feed = &self.graph.feeds[to];
            let moved = feed.parts[part]
                .of(y)?
                .put(self.program, self.graph.stages[to].input())?;
            let parts = &mut self.held[to * self.microbatches + microbatch].parts;
            parts.resize(feed.parts.len(), None);
            parts[part] = Some(moved);
        }
        Ok(())
    }

    /// Stores the loss of a microbatch, and seeds its gradient: 1 for the loss, 0 for its weight
    /// and its metrics.
    fn take_loss(&mut self, key: (usize, usize), y: Bundle) -> Result<()> {
        let loss: Loss<MpmdArray> = y.into_tree("output")?;
        loss.map_ref(&mut |array| array.aval().clone()).check()?;
        let seed = |array: &MpmdArray, value: f64| match array.dtype() {
            DType::F64 => MpmdArray::scalar(value),
            _ => MpmdArray::scalar(value as f32),
        };
        let mut gradient = loss.map_ref(&mut |array| seed(array, 0.0));
        gradient.sum = seed(&loss.sum, 1.0);
        let gradient = Bundle::of(gradient);
        self.held(key).gradients.push(Arrived {
            from: key,
            first: 0,
            gradient,
        });
        self.losses[key.1] = Some(loss);
        Ok(())
    }

    /// Returns the residuals for a backward pass. Residuals that were not kept are recomputed.
    fn residual(&mut self, key: (usize, usize)) -> Result<Bundle> {
        let held = self.held(key);
        if let Some(residual) = held.residual.take() {
            return Ok(residual);
        }
        let (x, side) = (
            there(held.x.take(), key, "input")?,
            there(held.side.take(), key, "side input")?,
        );
        let how = (Mode::Training, held.of.key.clone());
        self.label(key, Role::Recompute);
        let again = self.graph.stages[key.0].forward(self.program, (&x, &side), how)?;
        there(again.residual, key, "residual")
    }

    /// Returns the gradient of a stage's outputs: the sum of the readers' gradients, in the order
    /// of the readers. `role` is that of the pass that needs it.
    fn output_gradient(&mut self, key: (usize, usize), role: Role) -> Result<Bundle> {
        let held = self.held(key);
        let mut all = std::mem::take(&mut held.gradients);
        let structure = there(held.outputs.take(), key, "output")?;
        if let [Arrived { gradient, .. }] = &all[..]
            && gradient.structure == structure
        {
            return Ok(all.swap_remove(0).gradient);
        }
        all.sort_unstable_by_key(|arrived| arrived.from);
        let mut leaves: Vec<Vec<MpmdArray>> = (0..structure.leaves()).map(|_| Vec::new()).collect();
        for Arrived {
            first, gradient, ..
        } in all
        {
            for (leaf, gradient) in leaves[first..].iter_mut().zip(gradient.leaves) {
                leaf.push(gradient);
            }
        }
        self.label(key, role);
        let sum = |arrays: Vec<MpmdArray>| {
            let arrays = (!arrays.is_empty()).then_some(arrays);
            self.graph
                .add_outputs(self.program, key.0, there(arrays, key, "output gradient")?)
        };
        let leaves = leaves.into_iter().map(sum).collect::<Result<_>>()?;
        Ok(Bundle { structure, leaves })
    }

    /// Computes the input gradient of a microbatch at a stage, and sends it. With `fused`, the same
    /// kernel computes the weight gradient.
    fn input_pass(&mut self, key: (usize, usize), fused: bool) -> Result<()> {
        let residual = self.residual(key)?;
        let role = if fused {
            Role::Backward
        } else {
            Role::BackwardInput
        };
        let dy = self.output_gradient(key, role)?;
        self.label(key, role);
        let of = self.held(key).of.clone();
        // Without parameters there is no gradient to add to.
        let so_far = || {
            self.gradients[key.0]
                .take()
                .filter(|so_far| !so_far.leaves.is_empty())
        };
        let fused = fused.then(so_far);
        let stage = &mut self.graph.stages[key.0];
        let output = stage.backward(self.program, &of, (residual, dy), fused)?;
        match output.gradient {
            Some(gradient) => self.gradients[key.0] = Some(gradient),
            None => self.held(key).weight_residual = Some(output.weight_residual),
        }
        self.send_gradients(key, output.dx)
    }

    fn weight_pass(&mut self, key: (usize, usize)) -> Result<()> {
        let held = self.held(key);
        let of = held.of.clone();
        let weight_residual = there(held.weight_residual.take(), key, "weight residual")?;
        if !self.graph.has_trained(key.0) {
            return Ok(());
        }
        self.label(key, Role::BackwardWeight);
        let so_far = self.gradients[key.0].take();
        let stage = &mut self.graph.stages[key.0];
        self.gradients[key.0] =
            Some(stage.backward_weight(self.program, &of, weight_residual, so_far)?);
        Ok(())
    }

    /// Sends the gradient of a stage's input to the stages that produced the input, and that run
    /// backward passes. Does nothing if `dx` is `None`.
    fn send_gradients(&mut self, key: (usize, usize), dx: Option<Bundle>) -> Result<()> {
        let (stage, microbatch) = key;
        let leaves = std::mem::take(&mut self.held(key).leaves);
        let Some(dx) = dx else { return Ok(()) };
        self.label(key, Role::SendBackward);
        let mut dx = dx.leaves.into_iter();
        for (part, leaves) in leaves.into_iter().enumerate() {
            let Some(from) = self.graph.feeds[stage].parts.get(part) else {
                break;
            };
            if !self.graph.trains[from.stage] {
                dx.by_ref().take(leaves).for_each(drop);
                continue;
            }
            let held = &mut self.held[from.stage * self.microbatches + microbatch];
            let outputs = there(held.outputs.as_ref(), (from.stage, microbatch), "output")?;
            let (first, structure) = (from.places(outputs)?.start, from.structure(outputs));
            let gradient = Bundle {
                structure,
                leaves: dx.by_ref().take(leaves).collect(),
            };
            let gradient = gradient.put(self.program, self.graph.stages[from.stage].output())?;
            held.gradients.push(Arrived {
                from: (stage, part),
                first,
                gradient,
            });
        }
        Ok(())
    }

    /// Transfers a stage's finished gradients to the shardings of its stored parameters.
    fn reduce(&mut self, stage: usize) -> Result<()> {
        let Some(finished) = self.gradients[stage].take() else {
            return Ok(());
        };
        label(self.program, (stage, None), Role::Reduce);
        let trained = &self.graph.stages[stage];
        let mut to: Vec<Sharding> = (0..finished.leaves.len())
            .map(|place| trained.place(place).sharding.clone())
            .collect();
        for tie in self.graph.ties.iter().filter(|tie| tie.user.0 == stage) {
            let (owner, place) = tie.owner;
            to[tie.user.1] = self.graph.stages[owner].place(place).sharding.clone();
        }
        let frozen = to.iter_mut().zip(&finished.leaves).zip(trained.frozen());
        for ((to, gradient), _) in frozen.filter(|(_, frozen)| **frozen) {
            // It has no elements, and stays where it is.
            gradient
                .sharding()
                .into_iter()
                .for_each(|sharding| to.clone_from(sharding));
        }
        let Bundle { structure, leaves } = finished;
        self.gradients[stage] = Some(Bundle {
            structure,
            leaves: put_each(self.program, leaves, |place| &to[place])?,
        });
        Ok(())
    }

    /// Adds the gradients of tied parameters to those of the stages that store them, in the order
    /// of the stages.
    fn add_tied(&mut self) -> Result<()> {
        for tie in self.graph.ties.clone() {
            let ((owner, at), (user, from)) = (tie.owner, tie.user);
            let (Some(sums), Some(more)) = (&self.gradients[owner], &self.gradients[user]) else {
                continue;
            };
            if self.graph.stages[user].frozen()[from] {
                continue;
            }
            let pair = (sums.leaves[at].clone(), more.leaves[from].clone());
            label(self.program, (owner, None), Role::Reduce);
            let stage = &self.graph.stages[owner];
            let add = self
                .program
                .jit(AddArrays)
                .on(stage.mesh())
                .outputs(&stage.place(at).sharding);
            let sum = add.donate("0").build()?.call(self.program, pair)?;
            if let Some(sums) = &mut self.gradients[owner] {
                sums.leaves[at] = sum;
            }
        }
        Ok(())
    }
}

/// Returns the losses added in ascending order of microbatches, independent of the order of
/// computation.
fn sum_losses(
    last: &BoundStage,
    program: &mut Program,
    losses: &[Loss<MpmdArray>],
) -> Result<Loss<MpmdArray>> {
    let mesh = last.mesh();
    let add: Jit<AddLoss> = program
        .jit(AddLoss)
        .on(mesh)
        .outputs(mesh.replicated())
        .build()?;
    let (first, rest) = losses
        .split_first()
        .ok_or_else(|| Error::kernel("a step without microbatches"))?;
    rest.iter().try_fold(first.clone(), |sum, one| {
        add.call(program, (sum, one.clone()))
    })
}

/// Returns the value, or an error that names it if it is missing. Only a schedule that bypassed the
/// checks gets this error.
fn there<T>(found: Option<T>, (stage, microbatch): (usize, usize), value: &str) -> Result<T> {
    found.ok_or_else(|| {
        let problem =
            format!("the {value} of stage {stage}, microbatch {microbatch}, is not there");
        Error::kernel(problem)
    })
}
