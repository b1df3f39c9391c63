//! The runner: issues a schedule's actions as plain `jit` and `device_put` operations.

use std::fmt::Write as _;

use super::bound_stage::{BoundStage, PassData};
use super::context::Mode;
use super::erased_tree::{ErasedTree, put_each};
use super::graph::{InputPart, StageGraph, StageParam, label};
use super::kernels::{AddArrays, add};
use super::links::check_all_read;
use super::microbatch::ErasedMicrobatch;
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

/// The gradients of a stage's parameters as (path, array), summed over the microbatches. In the
/// order of the parameters that the stage stores, without [frozen](super::Stage::is_frozen) ones.
pub type Gradients = Vec<(String, MpmdArray)>;

/// The results of a training step.
#[derive(Debug)]
pub struct StepOutput {
    /// The total loss and its weight, each summed over the microbatches in ascending order. On the
    /// last stage's mesh.
    pub loss: Loss<MpmdArray>,
    /// The loss and weight of each microbatch, in ascending order. On the last stage's mesh.
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

        // The sum is computed in place.
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

/// The stage and microbatch to which an action of a step belongs.
#[derive(Clone, Copy, Debug)]
struct StageMicrobatch {
    stage: usize,
    microbatch: usize,
}

/// Numbers of a stage's passes in a step.
#[derive(Clone, Copy, Default)]
struct PassCounts {
    /// Number of passes that read the stage's parameters.
    reads_params: usize,
    /// Number of passes that add to the gradients of the stage's parameters.
    adds_gradients: usize,
}

/// The data that a stage keeps for a microbatch between its passes.
#[derive(Default)]
struct MicrobatchState {
    /// The parts of the stage's input; `None` for a part that has not arrived.
    parts: Vec<Option<ErasedTree>>,
    /// The stage's input, kept for recomputing the forward pass.
    x: Option<ErasedTree>,
    side: Option<ErasedTree>,
    pass: PassData,
    /// The number of leaves of each part of the stage's input.
    part_leaves: Vec<usize>,
    /// The structure of the stage's outputs, once the forward pass is issued.
    outputs: Option<Structure>,
    residual: Option<ErasedTree>,
    /// Gradients of the stage's outputs that have arrived from the reading stages.
    gradients: Vec<ArrivedGradient>,
    weight_residual: Option<ErasedTree>,
}

/// The states of all microbatches at all stages.
struct MicrobatchStates {
    /// The states, ordered by stage, then by microbatch.
    all: Vec<MicrobatchState>,
    microbatches: usize,
}

/// A gradient, from one of the reading stages, of those outputs of a stage that it reads.
struct ArrivedGradient {
    /// The part of the reading stage's input to which the gradient belongs.
    from: InputPart,
    /// Index of the gradient's first leaf among the leaves of the stage's outputs.
    first: usize,
    gradient: ErasedTree,
}

/// The state of a running step.
struct RunningStep<'a> {
    graph: &'a mut StageGraph,
    program: &'a mut Program,
    /// The actions of the step, in the order in which all processes issue them.
    order: &'a [Action],
    /// True in a training step, false if only forward passes run.
    trains: bool,
    states: MicrobatchStates,
    /// Counts of the passes that have not been issued yet, indexed by stage.
    remaining: Vec<PassCounts>,
    /// The gradients so far, summed over the microbatches, indexed by stage.
    gradients: Vec<Option<ErasedTree>>,
    /// The last stage's losses in a training step, indexed by microbatch.
    losses: Vec<Option<Loss<MpmdArray>>>,
    /// The last stage's outputs outside of training, indexed by microbatch.
    outputs: Vec<Option<ErasedTree>>,
}

/// Returns the schedule that is run: `schedule` with combined backward actions for stages that only
/// have a fused backward pass. If `graph.ascending`, its weight gradients are in ascending order.
pub(super) fn effective(graph: &StageGraph, schedule: &Schedule) -> Result<Schedule> {
    let fused = |stage: usize| graph.stages[stage].passes() == Passes::Fused;
    let schedule = mpmd_schedule::fused(schedule, fused)?;
    if !graph.ascending {
        return Ok(schedule);
    }

    // To come in order, a weight gradient may have been split off its input gradient. A stage that
    // fuses them cannot do that.
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

/// Maximum number of operations that compare a schedule. In larger schedules each operation
/// compares several ranks.
const COMPARED: usize = 64;

/// Compares the schedule on all processes, unless it equals `known`, the one compared last. First
/// checks that it can train this pipeline. Does not compare while the program captures.
pub(super) fn compare(
    known: &mut Option<Schedule>,
    graph: &StageGraph,
    program: &mut Program,
    schedule: &Schedule,
    microbatches: usize,
) -> Result<()> {
    check_training(graph, schedule, microbatches)?;
    // A replay could not repeat the comparison, so a capture must not contain it.
    if known.as_ref() == Some(schedule) || program.capture.is_some() {
        return Ok(());
    }

    // An error of the schedule must show before anything is issued.
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

/// Issues a training step in the order of `schedule`.
pub(super) fn train_step(
    graph: &mut StageGraph,
    program: &mut Program,
    schedule: &Schedule,
    microbatches: Vec<ErasedMicrobatch>,
) -> Result<StepOutput> {
    check_training(graph, schedule, microbatches.len())?;
    let schedule = effective(graph, schedule)?;
    let mut order = schedule.global_order()?;
    order.retain(|action| action.kind == ActionKind::Forward || graph.trains[action.stage]);

    let output = RunningStep::new(graph, program, &order, microbatches, true).train();
    if output.is_err() {
        graph.release();
    }
    output
}

/// Runs the forward passes of a schedule in its order. Returns the outputs of each microbatch, in
/// ascending order. The schedule must have been checked.
pub(super) fn forward_all(
    graph: &mut StageGraph,
    program: &mut Program,
    schedule: &Schedule,
    microbatches: Vec<ErasedMicrobatch>,
) -> Result<Vec<ErasedTree>> {
    let mut order = schedule.global_order()?;
    order.retain(|action| action.kind == ActionKind::Forward);
    forward_in_order(graph, program, &order, microbatches)
}

/// Runs each microbatch through all stages in order, and returns the outputs of the last stage.
pub(super) fn forward(
    graph: &mut StageGraph,
    program: &mut Program,
    microbatches: Vec<ErasedMicrobatch>,
) -> Result<Vec<ErasedTree>> {
    let mut order = Vec::with_capacity(microbatches.len() * graph.stages.len());
    for microbatch in 0..microbatches.len() {
        order.extend((0..graph.stages.len()).map(|stage| Action {
            stage,
            kind: ActionKind::Forward,
            microbatch,
        }));
    }
    forward_in_order(graph, program, &order, microbatches)
}

/// Runs the actions of `order`, all of which are forward passes. Returns the outputs of each
/// microbatch.
fn forward_in_order(
    graph: &mut StageGraph,
    program: &mut Program,
    order: &[Action],
    microbatches: Vec<ErasedMicrobatch>,
) -> Result<Vec<ErasedTree>> {
    let outputs = RunningStep::new(graph, program, order, microbatches, false).forward_all();
    if outputs.is_err() {
        graph.release();
    }
    outputs
}

/// Returns an error if the schedule cannot train this pipeline with this number of microbatches.
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

/// Returns an error if the schedule's number of stages or microbatches differs from the given ones.
pub(super) fn check(graph: &StageGraph, schedule: &Schedule, microbatches: usize) -> Result<()> {
    graph.check_stages(schedule)?;
    let name = schedule.name();
    let expected = schedule.microbatches();
    if expected == microbatches {
        return Ok(());
    }
    Err(Error::kernel(format!(
        "schedule {name} is for {expected} microbatches, and {microbatches} are given: make a \
         schedule for \
         {microbatches}, or give {expected}"
    )))
}

/// Returns the trace label's role for the first operation that an action issues.
fn role(kind: ActionKind) -> Role {
    match kind {
        ActionKind::Forward => Role::Forward,
        ActionKind::BackwardInput => Role::BackwardInput,
        ActionKind::Backward => Role::Backward,
        ActionKind::BackwardWeight => Role::BackwardWeight,
    }
}

impl StageMicrobatch {
    /// Returns the stage and microbatch of an action.
    fn of(action: &Action) -> Self {
        Self {
            stage: action.stage,
            microbatch: action.microbatch,
        }
    }
}

impl PassCounts {
    /// Returns the pass counts of one action.
    fn of(kind: ActionKind) -> Self {
        let (reads_params, adds_gradients) = match kind {
            ActionKind::Forward | ActionKind::BackwardInput => (1, 0),
            ActionKind::BackwardWeight => (0, 1),
            ActionKind::Backward => (1, 1),
        };
        Self {
            reads_params,
            adds_gradients,
        }
    }

    /// Returns the pass counts of each stage, from all actions in `order`.
    fn of_stages(stages: usize, order: &[Action]) -> Vec<Self> {
        let mut counts = vec![Self::default(); stages];
        for action in order {
            let one = Self::of(action.kind);
            counts[action.stage].reads_params += one.reads_params;
            counts[action.stage].adds_gradients += one.adds_gradients;
        }
        counts
    }
}

impl MicrobatchStates {
    /// Creates the states at the start of a step, with the first stage's input, the side inputs and
    /// the keys.
    fn new(stages: usize, microbatches: Vec<ErasedMicrobatch>) -> Self {
        let count = microbatches.len();
        let mut states = Self {
            all: (0..stages * count)
                .map(|_| MicrobatchState::default())
                .collect(),
            microbatches: count,
        };

        for (microbatch, parts) in microbatches.into_iter().enumerate() {
            let at = |stage| StageMicrobatch { stage, microbatch };
            states.at(at(0)).parts = vec![Some(parts.x)];
            for (stage, side) in parts.side {
                if stage < stages {
                    states.at(at(stage)).side = Some(side);
                }
            }
            for (stage, key) in parts.keys {
                states.at(at(stage)).pass.key = Some(key);
            }
        }
        states
    }

    fn at(&mut self, at: StageMicrobatch) -> &mut MicrobatchState {
        &mut self.all[at.stage * self.microbatches + at.microbatch]
    }
}

impl<'a> RunningStep<'a> {
    fn new(
        graph: &'a mut StageGraph,
        program: &'a mut Program,
        order: &'a [Action],
        microbatches: Vec<ErasedMicrobatch>,
        trains: bool,
    ) -> Self {
        let stages = graph.stages.len();
        let count = microbatches.len();
        let states = MicrobatchStates::new(stages, microbatches);

        // A failed step may have left gathered parameters.
        graph.release();
        Self {
            program,
            order,
            trains,
            states,
            remaining: PassCounts::of_stages(stages, order),
            gradients: (0..stages).map(|_| None).collect(),
            losses: (0..count).map(|_| None).collect(),
            outputs: (0..count).map(|_| None).collect(),
            graph,
        }
    }

    /// Runs a training step.
    fn train(mut self) -> Result<StepOutput> {
        self.run_actions()?;
        self.add_tied()?;

        let last = self.last_stage();
        let losses: Vec<Loss<MpmdArray>> = self.losses.into_iter().flatten().collect();
        label(self.program, last, None, Role::Loss);
        let loss = sum_losses(&self.graph.stages[last], self.program, &losses)?;

        let stages = self.graph.stages.iter().zip(self.gradients);
        let gradients = stages.map(|(stage, gradients)| trained_gradients(stage, gradients));
        Ok(StepOutput {
            loss,
            losses,
            gradients: gradients.collect(),
        })
    }

    /// Runs the forward passes, and returns the last stage's outputs for each microbatch.
    fn forward_all(mut self) -> Result<Vec<ErasedTree>> {
        self.run_actions()?;
        Ok(self.outputs.into_iter().flatten().collect())
    }

    fn run_actions(&mut self) -> Result<()> {
        for action in self.order {
            self.run_action(action)?;
            self.finish_action(action)?;
        }
        Ok(())
    }

    /// Issues the operations of one action of the schedule.
    fn run_action(&mut self, action: &Action) -> Result<()> {
        let at = StageMicrobatch::of(action);
        // An error of the operations up to the next label names this place.
        self.label(at, role(action.kind));
        if action.kind != ActionKind::BackwardWeight {
            self.graph.make_ready(self.program, at.stage)?;
        }

        match action.kind {
            ActionKind::Forward => self.run_forward(at),
            ActionKind::BackwardInput => self.run_backward_input(at, false),
            ActionKind::BackwardWeight => self.run_backward_weight(at),
            ActionKind::Backward => self.run_backward(at),
        }
    }

    /// Subtracts an action from the remaining passes. Drops a stage's gathered parameters after
    /// their last reader, and reduces its gradients after the last pass that adds to them.
    fn finish_action(&mut self, action: &Action) -> Result<()> {
        let done = PassCounts::of(action.kind);
        let remaining = &mut self.remaining[action.stage];
        remaining.reads_params -= done.reads_params;
        remaining.adds_gradients -= done.adds_gradients;
        let is_reduced = done.adds_gradients > 0 && remaining.adds_gradients == 0;

        if remaining.reads_params == 0 {
            self.graph.stages[action.stage].release();
        }
        if is_reduced {
            self.reduce_gradients(action.stage)?;
        }
        Ok(())
    }

    /// Runs the action [`ActionKind::Forward`]: computes the outputs and sends them to the reading
    /// stages. The last stage's outputs become results of the step.
    fn run_forward(&mut self, at: StageMicrobatch) -> Result<()> {
        let y = self.forward_pass(at)?;
        if !self.trains || !self.graph.trains[at.stage] {
            // No backward pass will read the residuals.
            *self.states.at(at) = MicrobatchState::default();
        }

        if at.stage != self.last_stage() {
            return self.send_outputs(at, &y);
        }
        if self.trains {
            return self.take_loss(at, y);
        }
        self.outputs[at.microbatch] = Some(y);
        Ok(())
    }

    /// Runs the action [`ActionKind::Backward`]: computes both gradients, in one kernel if the
    /// stage fuses them.
    fn run_backward(&mut self, at: StageMicrobatch) -> Result<()> {
        let fuses = self.graph.stages[at.stage].fuses();
        self.run_backward_input(at, fuses)?;
        if !fuses {
            self.run_backward_weight(at)?;
        }
        Ok(())
    }

    /// Runs the action [`ActionKind::BackwardInput`]: computes the input gradient of a microbatch
    /// at a stage, and sends it. With `fused`, the same kernel computes the weight gradient.
    fn run_backward_input(&mut self, at: StageMicrobatch, fused: bool) -> Result<()> {
        let role = if fused {
            Role::Backward
        } else {
            Role::BackwardInput
        };
        let residual = self.take_residual(at)?;
        let dy = self.take_output_gradient(at, role)?;

        self.label(at, role);
        let pass = self.states.at(at).pass.clone();
        // Without parameters there is no gradient to add to.
        let so_far = fused.then(|| {
            self.gradients[at.stage]
                .take()
                .filter(|so_far| !so_far.leaves.is_empty())
        });
        let stage = &mut self.graph.stages[at.stage];
        let output = stage.backward(self.program, &pass, residual, dy, so_far)?;

        match output.gradient {
            Some(gradient) => self.gradients[at.stage] = Some(gradient),
            None => self.states.at(at).weight_residual = Some(output.weight_residual),
        }
        self.send_gradients(at, output.dx)
    }

    /// Runs the action [`ActionKind::BackwardWeight`]: adds the weight gradient of a microbatch to
    /// the stage's gradients so far.
    fn run_backward_weight(&mut self, at: StageMicrobatch) -> Result<()> {
        let state = self.states.at(at);
        let pass = state.pass.clone();
        let weight_residual = required(state.weight_residual.take(), at, "weight residual")?;
        if !self.graph.has_trained(at.stage) {
            return Ok(());
        }

        self.label(at, Role::BackwardWeight);
        let so_far = self.gradients[at.stage].take();
        let stage = &mut self.graph.stages[at.stage];
        let sum = stage.backward_weight(self.program, &pass, weight_residual, so_far)?;
        self.gradients[at.stage] = Some(sum);
        Ok(())
    }

    fn last_stage(&self) -> usize {
        self.graph.stages.len() - 1
    }

    /// Sets the label of the operations that are issued from now on.
    fn label(&mut self, at: StageMicrobatch, role: Role) {
        label(self.program, at.stage, Some(at.microbatch), role);
    }

    /// Issues a forward pass, and returns the stage's outputs. Stores the residuals, or the inputs
    /// if the stage keeps those instead.
    fn forward_pass(&mut self, at: StageMicrobatch) -> Result<ErasedTree> {
        let side = self.states.at(at).side.take();
        let side = side.unwrap_or_else(ErasedTree::empty);
        let x = self.take_input(at)?;

        self.label(at, Role::Forward);
        let mode = self.forward_mode(at.stage);
        let key = self.states.at(at).pass.key.clone();
        let stage = &mut self.graph.stages[at.stage];
        let forwarded = stage.forward(self.program, &x, &side, mode, key)?;

        let recomputes = self.graph.recomputes[at.stage];
        let state = self.states.at(at);
        state.pass.kernels = forwarded.kernels;
        state.outputs = Some(forwarded.y.structure.clone());
        match forwarded.residual {
            None => state.residual = Some(ErasedTree::pair(x, side)),
            Some(_) if recomputes => {
                state.x = Some(x);
                state.side = Some(side);
            }
            Some(residual) => state.residual = Some(residual),
        }
        Ok(forwarded.y)
    }

    /// Returns the mode in which a stage runs its forward passes in this step.
    fn forward_mode(&self, stage: usize) -> Mode {
        if !self.trains {
            Mode::Evaluation
        } else if !self.graph.trains[stage] {
            Mode::ForwardOnly
        } else if self.graph.recomputes[stage] {
            Mode::Recomputed
        } else {
            Mode::Training
        }
    }

    /// Builds a stage's input from the parts that have arrived. A missing part is an error.
    fn take_input(&mut self, at: StageMicrobatch) -> Result<ErasedTree> {
        let state = self.states.at(at);
        let parts: Option<Vec<ErasedTree>> = std::mem::take(&mut state.parts).into_iter().collect();
        let parts = required(parts.filter(|parts| !parts.is_empty()), at, "input")?;
        state.part_leaves = parts.iter().map(|part| part.leaves.len()).collect();

        let structures = parts.iter().map(|part| part.structure.clone()).collect();
        Ok(ErasedTree {
            structure: self.graph.feeds[at.stage].structure(structures),
            leaves: parts.into_iter().flat_map(|part| part.leaves).collect(),
        })
    }

    /// Sends the outputs `y` of a stage to all stages that read them. An output that no stage reads
    /// is an error.
    fn send_outputs(&mut self, at: StageMicrobatch, y: &ErasedTree) -> Result<()> {
        self.label(at, Role::SendForward);
        let readers = &self.graph.readers[at.stage];
        check_all_read(
            at.stage,
            &y.structure,
            readers
                .iter()
                .map(|reader| &self.graph.feeds[reader.stage].parts[reader.part]),
        )?;

        for reader in readers {
            let feed = &self.graph.feeds[reader.stage];
            let input = self.graph.stages[reader.stage].input();
            let moved = feed.parts[reader.part].of(y)?.put(self.program, input)?;

            let to = StageMicrobatch {
                stage: reader.stage,
                ..at
            };
            let parts = &mut self.states.at(to).parts;
            parts.resize(feed.parts.len(), None);
            parts[reader.part] = Some(moved);
        }
        Ok(())
    }

    /// Stores the loss of a microbatch, and seeds its gradient: 1 for the loss, 0 for its weight
    /// and its metrics.
    fn take_loss(&mut self, at: StageMicrobatch, y: ErasedTree) -> Result<()> {
        let loss: Loss<MpmdArray> = y.into_tree("output")?;
        loss.map_ref(&mut |array| array.aval().clone()).check()?;

        let seed = |array: &MpmdArray, value: f64| match array.dtype() {
            DType::F64 => MpmdArray::scalar(value),
            _ => MpmdArray::scalar(value as f32),
        };
        let mut gradient = loss.map_ref(&mut |array| seed(array, 0.0));
        gradient.sum = seed(&loss.sum, 1.0);

        // No stage reads the last one's outputs, so this is the only gradient that arrives there.
        self.states.at(at).gradients.push(ArrivedGradient {
            from: InputPart {
                stage: at.stage,
                part: 0,
            },
            first: 0,
            gradient: ErasedTree::of(gradient),
        });
        self.losses[at.microbatch] = Some(loss);
        Ok(())
    }

    /// Returns the residuals for a backward pass. Residuals that were not kept are recomputed.
    fn take_residual(&mut self, at: StageMicrobatch) -> Result<ErasedTree> {
        let state = self.states.at(at);
        if let Some(residual) = state.residual.take() {
            return Ok(residual);
        }

        let x = required(state.x.take(), at, "input")?;
        let side = required(state.side.take(), at, "side input")?;
        let key = state.pass.key.clone();
        self.label(at, Role::Recompute);
        let stage = &mut self.graph.stages[at.stage];
        let again = stage.forward(self.program, &x, &side, Mode::Training, key)?;
        required(again.residual, at, "residual")
    }

    /// Returns the gradient of a stage's outputs: the sum of the reading stages' gradients, in the
    /// order of these stages. `role` labels the addition.
    fn take_output_gradient(&mut self, at: StageMicrobatch, role: Role) -> Result<ErasedTree> {
        let state = self.states.at(at);
        let mut arrived = std::mem::take(&mut state.gradients);
        let structure = required(state.outputs.take(), at, "output")?;

        // One reader of all outputs: there is nothing to add.
        if let [ArrivedGradient { gradient, .. }] = &arrived[..]
            && gradient.structure == structure
        {
            return Ok(arrived.swap_remove(0).gradient);
        }

        // The bits of a sum depend on its order, which must not be that of the arrivals.
        arrived.sort_unstable_by_key(|arrived| arrived.from);
        let mut summands: Vec<Vec<MpmdArray>> = vec![Vec::new(); structure.leaves()];
        for one in arrived {
            for (leaf, gradient) in summands[one.first..].iter_mut().zip(one.gradient.leaves) {
                leaf.push(gradient);
            }
        }

        self.label(at, role);
        let mut leaves = Vec::with_capacity(summands.len());
        for arrays in summands {
            let arrays = (!arrays.is_empty()).then_some(arrays);
            let arrays = required(arrays, at, "output gradient")?;
            leaves.push(self.graph.add_outputs(self.program, at.stage, arrays)?);
        }
        Ok(ErasedTree { structure, leaves })
    }

    /// Sends the gradient `dx` of a stage's input to the stages that produced the input and run
    /// backward passes. Does nothing if `dx` is `None`.
    fn send_gradients(&mut self, at: StageMicrobatch, dx: Option<ErasedTree>) -> Result<()> {
        let part_leaves = std::mem::take(&mut self.states.at(at).part_leaves);
        let Some(dx) = dx else { return Ok(()) };

        self.label(at, Role::SendBackward);
        let mut dx = dx.leaves.into_iter();
        for (part, leaves) in part_leaves.into_iter().enumerate() {
            // The first stage's input has no parts: it comes from no stage.
            let Some(source) = self.graph.feeds[at.stage].parts.get(part) else {
                break;
            };
            if !self.graph.trains[source.stage] {
                dx.by_ref().take(leaves).for_each(drop);
                continue;
            }

            let to = StageMicrobatch {
                stage: source.stage,
                ..at
            };
            let state = self.states.at(to);
            let outputs = required(state.outputs.as_ref(), to, "output")?;
            let first = source.places(outputs)?.start;
            let gradient = ErasedTree {
                structure: source.structure(outputs),
                leaves: dx.by_ref().take(leaves).collect(),
            };
            let gradient = gradient.put(self.program, self.graph.stages[to.stage].output())?;
            state.gradients.push(ArrivedGradient {
                from: InputPart {
                    stage: at.stage,
                    part,
                },
                first,
                gradient,
            });
        }
        Ok(())
    }

    /// Transfers a stage's finished gradients to the shardings of its stored parameters.
    fn reduce_gradients(&mut self, stage: usize) -> Result<()> {
        let Some(finished) = self.gradients[stage].take() else {
            return Ok(());
        };
        label(self.program, stage, None, Role::Reduce);
        let to = self.gradient_shardings(stage, &finished);
        let ErasedTree { structure, leaves } = finished;
        self.gradients[stage] = Some(ErasedTree {
            structure,
            leaves: put_each(self.program, leaves, |place| &to[place])?,
        });
        Ok(())
    }

    /// Returns the sharding to which each of a stage's finished gradients is transferred.
    fn gradient_shardings(&self, stage: usize, finished: &ErasedTree) -> Vec<Sharding> {
        let reduced = &self.graph.stages[stage];
        let mut to: Vec<Sharding> = (0..finished.leaves.len())
            .map(|place| reduced.place(place).sharding.clone())
            .collect();

        // The gradient of a tied parameter goes to the stage that stores the parameter.
        let ties = self.graph.ties.iter();
        for tie in ties.filter(|tie| tie.user.stage == stage) {
            to[tie.user.place] = self.graph.stored_sharding(tie.owner).clone();
        }

        // A frozen gradient has no elements, and stays where it is.
        let gradients = to.iter_mut().zip(&finished.leaves).zip(reduced.frozen());
        for ((to, gradient), _) in gradients.filter(|(_, frozen)| **frozen) {
            if let Some(sharding) = gradient.sharding() {
                to.clone_from(sharding);
            }
        }
        to
    }

    /// Adds the gradients of tied parameters to the gradients of the stages that store these
    /// parameters, in the order of the stages.
    fn add_tied(&mut self) -> Result<()> {
        for tie in self.graph.ties.clone() {
            self.add_tied_gradient(tie.owner, tie.user)?;
        }
        Ok(())
    }

    /// Adds the gradient of parameter `user` to that of parameter `owner`. Does nothing if `user`
    /// is frozen or either has no gradient.
    fn add_tied_gradient(&mut self, owner: StageParam, user: StageParam) -> Result<()> {
        let Some(sums) = &self.gradients[owner.stage] else {
            return Ok(());
        };
        let Some(more) = &self.gradients[user.stage] else {
            return Ok(());
        };
        if self.graph.stages[user.stage].frozen()[user.place] {
            return Ok(());
        }

        let sum = sums.leaves[owner.place].clone();
        let more = more.leaves[user.place].clone();
        label(self.program, owner.stage, None, Role::Reduce);
        let add = self
            .program
            .jit(AddArrays)
            .on(self.graph.stages[owner.stage].mesh())
            .outputs(self.graph.stored_sharding(owner));
        let sum = add.donate("0").build()?.call(self.program, (sum, more))?;

        if let Some(sums) = &mut self.gradients[owner.stage] {
            sums.leaves[owner.place] = sum;
        }
        Ok(())
    }
}

/// Returns the gradients of the parameters that a stage stores and trains. Empty if no pass has
/// computed gradients.
fn trained_gradients(stage: &BoundStage, gradients: Option<ErasedTree>) -> Gradients {
    let leaves = gradients.map_or_else(Vec::new, |gradients| gradients.leaves);
    let own = stage.own();
    let pairs = stage.paths().into_iter().zip(leaves).enumerate();
    pairs
        .filter(|(place, _)| own.contains(place) && !stage.frozen()[*place])
        .map(|(_, pair)| pair)
        .collect()
}

/// Adds up the losses in ascending order of microbatches, whatever the order of computation, and
/// returns the sum.
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

/// Returns the value in `found`. If it is `None`, returns an error with the name `value`; only an
/// unchecked schedule can cause this error.
fn required<T>(found: Option<T>, at: StageMicrobatch, value: &str) -> Result<T> {
    let StageMicrobatch { stage, microbatch } = at;
    found.ok_or_else(|| {
        let problem =
            format!("the {value} of stage {stage}, microbatch {microbatch}, is not there");
        Error::kernel(problem)
    })
}
